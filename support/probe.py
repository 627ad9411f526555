"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder. And two
baselines that need no encoder: naive Bayes, and latent semantic analysis (LSA)."""
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from support.checkpoints import Pretrained
from support.classification import METRICS, Encoded, Kind, Scores
from support.examples import Data, read_task
from support.kinds import encode_task
from support.model import text_states
from support.program import UserError
from support.tasks import TuneConfig

STRENGTHS = np.logspace(-1, 3, 9)  # of L2 regularization, to choose from
SMOOTHING = np.logspace(-3, 1, 9).tolist()  # counts that naive Bayes adds, to choose from
FOLDS = 5  # of the training split, on which these are chosen


def mean(h, real):
    """The mean over the real tokens. The poolings take H^l (B, t, d) and real (B, t, 1) bool, and return (B, d)."""
    return (h * real).sum(1) / real.sum(1)


POOLINGS = {"mean": mean, "cls": lambda h, real: h[:, 0]}  # the values of --frozen


def vectors_of(encoder: nn.Module, encoded: Encoded, layers: list[int]) -> dict[str, np.ndarray]:
    """For each pooling, a vector for each input of a split and each of these layers, (N, layers, d) float32. Raises
    UserError if they are not finite."""
    def pool(tokens, padding):
        states = text_states(encoder, tokens, padding)
        real = ~padding[:, :, None]
        vectors = [[pooling(states[layer].float(), real) for layer in layers] for pooling in POOLINGS.values()]
        return torch.stack([torch.stack(each, dim=1) for each in vectors], dim=1)

    vectors = encoded.outputs(pool, next(encoder.parameters()).device)  # (N, poolings, layers, d)
    if not vectors.isfinite().all():
        raise UserError("--init: the vectors of the encoder contain NaN or infinity; use another checkpoint")
    return dict(zip(POOLINGS, vectors.transpose(0, 1).numpy()))


def folds_of(targets: np.ndarray):
    """How to cut labels (N,) int64 or numbers (N,) float32 into FOLDS. Raises UserError if a label has too few."""
    from sklearn.model_selection import KFold, StratifiedKFold  # here, because scikit-learn is slow to import
    if targets.dtype != np.int64:
        return KFold(min(FOLDS, len(targets)), shuffle=True, random_state=0)
    count = Counter(targets.tolist())
    fewest = min(count.values())
    if len(count) < 2 or fewest < 2:
        raise UserError("--frozen: needs two labels or more, each with two training examples or more; here, the rarest "
                        f"of {len(count)} has {fewest}")
    return StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=0)


def scoring(metric: str):
    """A metric of METRICS in scikit-learn's form."""
    from sklearn.metrics import make_scorer
    return make_scorer(lambda true, predicted: METRICS[metric](predicted, true))


def fit(x: np.ndarray, targets: np.ndarray, l2: float, metric: str):
    """The linear model (a Pipeline) of vectors x (N, d) for labels (N,) int64 or numbers (N,) float32, with L2
    regularization of this strength or, if it is 0, of the one that is best on held-out folds by a metric of METRICS."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    folds = folds_of(targets)
    strengths = np.array([l2]) if l2 else STRENGTHS
    if targets.dtype == np.int64:
        model = LogisticRegressionCV(Cs=1 / strengths, cv=folds, l1_ratios=(0,), scoring=scoring(metric), max_iter=1000,
                                     use_legacy_attributes=False)
    else:
        model = RidgeCV(alphas=strengths, cv=folds, scoring=scoring(metric))
    return make_pipeline(StandardScaler(), model).fit(x.astype(np.float64), targets)


def words_of(encoded: Encoded) -> np.ndarray:
    """The ids of each input of a split as words of a text, (N,)."""
    return np.array([" ".join(map(str, ids)) for ids in encoded.ids], dtype=object)


def texts_of(encoded: Encoded, decode: Callable) -> list[str]:
    """The text of each input of a split, cut off where the encoder's is."""
    return [decode(ids).removeprefix("[CLS]").replace("[SEP]", " ") for ids in encoded.ids]


def fit_counts(words: np.ndarray, targets: np.ndarray, metric: str):
    """Multinomial naive Bayes (a Pipeline) for labels (N,) int64, which counts words and all pairs of neighboring
    words. Its smoothing is the best on held-out folds by a metric of METRICS."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.model_selection import GridSearchCV
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    counter = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\d+")
    search = GridSearchCV(MultinomialNB(), {"alpha": SMOOTHING}, scoring=scoring(metric), cv=folds_of(targets))
    search.fit(counter.fit_transform(words), targets)
    return make_pipeline(counter, search.best_estimator_)


def lsa_of(texts: Iterable[str], dims: int):
    """LSA of texts (a Pipeline): it turns a text into the TF-IDF of its words, projected on the first `dims` singular
    vectors of the TF-IDF of `texts`, or on all, with length 1."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer
    tfidf = TfidfVectorizer(sublinear_tf=True, min_df=3)
    matrix = tfidf.fit_transform(texts)
    svd = TruncatedSVD(min(dims, matrix.shape[1]), random_state=0).fit(matrix)
    return make_pipeline(tfidf, svd, Normalizer())


def strength_of(model) -> float:
    """The strength of regularization, or the smoothing, of a model of fit or fit_counts."""
    last = model[-1]
    if hasattr(last, "C_"):
        return 1 / float(last.C_)
    return float(last.alpha_ if hasattr(last, "alpha_") else last.alpha)


def scores_of(model, kind: Kind, splits: dict[str, Encoded], inputs: dict[str, np.ndarray]) -> Scores:
    """The Scores of a model of fit or fit_counts, from the inputs (N, ...) of all splits but train."""
    classes = len(kind.labels.names)
    outputs = {}
    for split, x in inputs.items():
        if split == "train":
            continue
        if classes == 0:
            outputs[split] = torch.from_numpy(model.predict(x))[:, None]
        else:
            logits = np.full((len(x), classes), -np.inf)  # of labels without training examples
            logits[:, model.classes_] = model.predict_log_proba(x)
            outputs[split] = torch.from_numpy(logits)
    return kind.scores(outputs, splits)


def scores_by_layer(name: str, task: str, device: torch.device) -> dict[str, list[float]]:
    """The main score of a task on dev, in percent, for each pooling: probes of layers 0 to L of an encoder
    from a run. The last one is the result of finetune.py --frozen POOLING."""
    pretrained = Pretrained(name)
    encoder = pretrained.new_encoder(seed=1).to(device).eval()
    examples = read_task(task, Data(), pretrained.settings)
    kind, splits = encode_task(task, examples, pretrained, TuneConfig.of(task, {}, pretrained.config.encoder_dim))
    layers = [*range(pretrained.config.encoder_layers + 1)]
    vectors = {split: vectors_of(encoder, each, layers) for split, each in splits.items()}
    metric = kind.labels.metrics[0]
    found = {pooling: [] for pooling in POOLINGS}
    for pooling, scores in found.items():
        for i in layers:
            inputs = {split: each[pooling][:, i] for split, each in vectors.items()}
            model = fit(inputs["train"], splits["train"].targets.numpy(), 0.0, metric)
            scores.append(scores_of(model, kind, splits, inputs).metrics[metric])
    return found
