"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder."""
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
FOLDS = 5  # of the training split, on which the strength is chosen


def mean(h, real):
    """The mean over the real tokens. The poolings take H^L (B, t, d) and real (B, t, 1) bool, and return (B, d)."""
    return (h * real).sum(1) / real.sum(1)


POOLINGS = {"mean": mean, "cls": lambda h, real: h[:, 0]}  # the values of --frozen


def vectors_of(encoder: nn.Module, encoded: Encoded, pooling: str, layers: list[int], batch_size: int) -> np.ndarray:
    """A vector for each input of a split and each of these layers, (N, layers, d) float64. Raises UserError if they are
    not finite."""
    def pool(tokens, padding):
        states = text_states(encoder, tokens, padding)
        real = ~padding[:, :, None]
        vectors = [POOLINGS[pooling](states[layer].float(), real) for layer in layers]
        return torch.stack(vectors, dim=1)

    vectors = encoded.outputs(pool, batch_size, next(encoder.parameters()).device)
    if not vectors.isfinite().all():
        raise UserError("--init: the vectors of the encoder contain NaN or infinity; use another checkpoint")
    return vectors.double().numpy()


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


class Probe(NamedTuple):
    """The Scores of a linear model, and its strength of regularization."""
    scores: Scores
    l2: float


def probe_layers(encoder: nn.Module, kind: Kind, splits: dict[str, Encoded], pooling: str, layers: list[int],
                 tune: TuneConfig) -> list[Probe]:
    """For each of these layers, fit a linear model to the vectors of the training split, and score it on the others.
    Its strength of regularization is chosen if tune.l2 is 0."""
    vectors = {split: vectors_of(encoder, each, pooling, layers, tune.batch_size) for split, each in splits.items()}
    others = [split for split in splits if split != "train"]
    strengths = np.array([tune.l2]) if tune.l2 else STRENGTHS
    classes = len(kind.labels.names)
    probes = []
    for i in range(len(layers)):
        model = fit(vectors["train"][:, i], splits["train"].targets.numpy(), strengths, kind.labels.metrics[0])
        outputs = {split: logits_of(model, vectors[split][:, i], classes) for split in others}
        linear = model[-1]
        l2 = linear.alpha_ if classes == 0 else 1 / linear.C_
        probes.append(Probe(kind.scores(outputs, splits), float(l2)))
    return probes


def scores_by_layer(name: str, task: str, device: torch.device) -> dict[str, list[float]]:
    """The main score of a task on dev, in percent, for each pooling: probes of layers 0 to L of an encoder
    from a run. The last one is the result of finetune.py --frozen POOLING."""
    pretrained = Pretrained(name)
    encoder = pretrained.new_encoder(seed=1).to(device).eval()
    examples = read_task(task, Data(), pretrained.settings)
    tune = TuneConfig.of(task, {}, pretrained.config.encoder_dim)
    kind, splits = encode_task(task, examples, pretrained, tune)
    layers = [*range(pretrained.config.encoder_layers + 1)]
    found = {}
    for pooling in POOLINGS:
        probes = probe_layers(encoder, kind, splits, pooling, layers, tune)
        found[pooling] = [each.scores.metrics[kind.labels.metrics[0]] for each in probes]
    return found
