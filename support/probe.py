"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder."""
from collections import Counter

import numpy as np
import torch
from torch import nn

from support.checkpoints import Pretrained, hidden_states
from support.program import UserError
from support.classification import METRICS, Encoded
from support.kinds import make_kind
from support.tasks import TuneConfig, read_task, tune_of

STRENGTHS = np.logspace(-1, 3, 9)  # of L2 regularization, to choose from
FOLDS = 5  # of the training split, on which the strength is chosen


def mean(h, real):
    """The mean over the real tokens. The poolings take H^L (B, t, d) and real (B, t, 1) bool, and return (B, d)."""
    return (h * real).sum(1) / real.sum(1)


POOLINGS = {"mean": mean, "cls": lambda h, real: h[:, 0]}  # the values of --frozen


def vectors_of(encoder: nn.Module, encoded: Encoded, pooling: str, layers: list[int], batch_size: int) -> np.ndarray:
    """A vector for each input of a split and each of these layers, (N, layers, d) float32."""
    def pool(tokens, padding):
        states = hidden_states(encoder, tokens, padding)
        vectors = [POOLINGS[pooling](states[layer].float(), (~padding)[:, :, None]) for layer in layers]
        return torch.stack(vectors, dim=1)
    return encoded.outputs(pool, batch_size, next(encoder.parameters()).device).numpy()


def fit(x: np.ndarray, targets: np.ndarray, strengths: np.ndarray, metric: str):
    """The linear model (a Pipeline) of vectors x (N, d) for labels (N,) int64 or numbers (N,) float32, with the L2
    regularization that is best on held-out folds by a metric of METRICS. Raises UserError if a label has too few
    examples for folds."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV  # here, because scikit-learn is slow to import
    from sklearn.metrics import make_scorer
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    scoring = make_scorer(lambda true, predicted: METRICS[metric](predicted, true))
    if targets.dtype == np.int64:
        count = Counter(targets.tolist())
        fewest = min(count.values())
        if len(count) < 2 or fewest < 2:
            raise UserError("--frozen: needs two labels or more, each with two training examples or more; here, the "
                            f"rarest of {len(count)} has {fewest}")
        folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=0)
        model = LogisticRegressionCV(Cs=1 / strengths, cv=folds, l1_ratios=(0,), scoring=scoring, max_iter=1000,
                                     use_legacy_attributes=False)
    else:
        folds = KFold(min(FOLDS, len(targets)), shuffle=True, random_state=0)
        model = RidgeCV(alphas=strengths, cv=folds, scoring=scoring)
    return make_pipeline(StandardScaler(), model).fit(x, targets)


def logits_of(probe, x: np.ndarray, classes: int) -> torch.Tensor:
    """The outputs (N, C) for vectors (N, d): numbers if there are no classes, or logits, -inf without examples."""
    if classes == 0:
        return torch.from_numpy(probe.predict(x))[:, None]
    outputs = np.full((len(x), classes), -np.inf)
    outputs[:, probe.classes_] = probe.predict_log_proba(x)
    return torch.from_numpy(outputs)


def probe(vectors: dict[str, np.ndarray], train: Encoded, splits: dict[str, Encoded], kind, l2: float) -> tuple:
    """Fit a linear model to the vectors (N, d) of the training split, and score it on the others. Returns the metrics,
    the prediction files, and the strength of regularization, which is chosen if `l2` is 0."""
    x = {split: each.astype(np.float64) for split, each in vectors.items()}
    model = fit(x["train"], train.targets.numpy(), np.array([l2]) if l2 else STRENGTHS, kind.labels.metrics[0])
    classes = len(kind.labels.names)
    metrics, files = kind.scores({split: logits_of(model, x[split], classes) for split in splits}, splits)
    linear = model[-1]
    return metrics, files, float(linear.alpha_ if classes == 0 else 1 / linear.C_)


def probe_layers(encoder: nn.Module, kind, train: Encoded, splits: dict[str, Encoded], pooling: str, layers: list[int],
                 tune: TuneConfig) -> list[tuple]:
    """What `probe` returns for the vectors of each of these layers."""
    vectors = {split: vectors_of(encoder, each, pooling, layers, tune.batch_size)
               for split, each in {"train": train, **splits}.items()}
    return [probe({split: each[:, i] for split, each in vectors.items()}, train, splits, kind, tune.l2)
            for i in range(len(layers))]


def scores_by_layer(name: str, task: str, device: torch.device) -> dict[str, list[float]]:
    """The main score of a task on dev, in percent, for each pooling: probes of layers 0 to L of an encoder
    from a run. The last one is the result of finetune.py --frozen POOLING."""
    pretrained = Pretrained(name)
    encoder = pretrained.new_encoder(seed=1).to(device).eval()
    examples = read_task(task, None, pretrained.settings)
    tune = tune_of(task, {}, pretrained.config.encoder_dim)
    kind = make_kind(task, pretrained.tokenizer, pretrained.config, tune, examples["train"])
    train, dev = [kind.encode(examples[split]) for split in ("train", "dev")]
    layers = [*range(pretrained.config.encoder_layers + 1)]
    found = {}
    for pooling in POOLINGS:
        results = probe_layers(encoder, kind, train, {"dev": dev}, pooling, layers, tune)
        found[pooling] = [metrics[kind.labels.metrics[0]] for metrics, *_ in results]
    return found
