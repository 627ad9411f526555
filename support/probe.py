"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder. And naive
Bayes, which needs no encoder."""
from collections import Counter
from typing import NamedTuple

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


def fit(x: np.ndarray, targets: np.ndarray, strengths: np.ndarray, metric: str):
    """The linear model (a Pipeline) of vectors x (N, d) for labels (N,) int64 or numbers (N,) float32, with the L2
    regularization that is best on held-out folds by a metric of METRICS."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    folds = folds_of(targets)
    if targets.dtype == np.int64:
        model = LogisticRegressionCV(Cs=1 / strengths, cv=folds, l1_ratios=(0,), scoring=scoring(metric), max_iter=1000,
                                     use_legacy_attributes=False)
    else:
        model = RidgeCV(alphas=strengths, cv=folds, scoring=scoring(metric))
    return make_pipeline(StandardScaler(), model).fit(x, targets)


def fit_counts(texts: list[str], targets: np.ndarray, metric: str):
    """Multinomial naive Bayes (a GridSearchCV) for labels (N,) int64, which counts the tokens of texts and all pairs of
    neighbouring tokens. Its smoothing is the best on held-out folds by a metric of METRICS."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.model_selection import GridSearchCV
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    model = make_pipeline(CountVectorizer(ngram_range=(1, 2), token_pattern=r"\d+"), MultinomialNB())
    search = GridSearchCV(model, {"multinomialnb__alpha": SMOOTHING}, scoring=scoring(metric), cv=folds_of(targets))
    return search.fit(texts, targets)


def logits_of(model, x, classes: int) -> torch.Tensor:
    """The outputs (N, C) for N inputs: numbers if there are no classes, or logits, -inf without examples."""
    if classes == 0:
        return torch.from_numpy(model.predict(x))[:, None]
    outputs = np.full((len(x), classes), -np.inf)
    outputs[:, model.classes_] = model.predict_log_proba(x)
    return torch.from_numpy(outputs)


class Probe(NamedTuple):
    """The Scores of a linear model, and its strength of regularization or smoothing."""
    scores: Scores
    strength: float


def probe(kind: Kind, splits: dict[str, Encoded], vectors: dict[str, np.ndarray], l2: float) -> Probe:
    """Fit a linear model to the vectors (N, d) of the training split, and score it on the others. Its strength of
    regularization is chosen if l2 is 0."""
    vectors = {split: x.astype(np.float64) for split, x in vectors.items()}
    strengths = np.array([l2]) if l2 else STRENGTHS
    classes = len(kind.labels.names)
    model = fit(vectors.pop("train"), splits["train"].targets.numpy(), strengths, kind.labels.metrics[0])
    outputs = {split: logits_of(model, x, classes) for split, x in vectors.items()}
    strength = model[-1].alpha_ if classes == 0 else 1 / model[-1].C_
    return Probe(kind.scores(outputs, splits), float(strength))


def naive_bayes(kind: Kind, splits: dict[str, Encoded]) -> Probe:
    """Fit naive Bayes to the tokens of the training split, and score it on the others."""
    texts = {split: [" ".join(map(str, ids)) for ids in each.ids] for split, each in splits.items()}
    model = fit_counts(texts.pop("train"), splits["train"].targets.numpy(), kind.labels.metrics[0])
    outputs = {split: logits_of(model, each, len(kind.labels.names)) for split, each in texts.items()}
    return Probe(kind.scores(outputs, splits), model.best_params_["multinomialnb__alpha"])


def scores_by_layer(name: str, task: str, device: torch.device) -> dict[str, list[float]]:
    """The main score of a task on dev, in percent, for each pooling: probes of layers 0 to L of an encoder
    from a run. The last one is the result of finetune.py --frozen POOLING."""
    pretrained = Pretrained(name)
    encoder = pretrained.new_encoder(seed=1).to(device).eval()
    examples = read_task(task, Data(), pretrained.settings)
    kind, splits = encode_task(task, examples, pretrained, TuneConfig.of(task, {}, pretrained.config.encoder_dim))
    layers = [*range(pretrained.config.encoder_layers + 1)]
    vectors = {split: vectors_of(encoder, each, layers) for split, each in splits.items()}
    scores = {}
    for pooling in POOLINGS:
        probes = [probe(kind, splits, {split: each[pooling][:, i] for split, each in vectors.items()}, 0.0)
                  for i in layers]
        scores[pooling] = [each.scores.metrics[kind.labels.metrics[0]] for each in probes]
    return scores
