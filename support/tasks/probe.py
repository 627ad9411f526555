"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder."""
from collections import Counter
from functools import partial

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from support.model.checkpoints import last_layer
from support.program.errors import UserError
from support.tasks.classification import DIVERGED, Encoded, outputs_of, scores
from support.tasks.task import TuneConfig

STRENGTHS = np.logspace(-1, 3, 9)  # of L2 regularization, to choose from
FOLDS = 5  # of the training split, on which the strength is chosen


def vectors_of(encoder: nn.Module, encoded: Encoded, pooling: str, batch_size: int, device: torch.device) -> np.ndarray:
    """A vector for each input of a split, (N, d) float64: the mean over its tokens, or that at [CLS]."""
    def pool(tokens, padding):
        h = last_layer(encoder, tokens, padding).float()
        if pooling == "cls":
            return h[:, 0]
        real = (~padding)[:, :, None]
        return (h * real).sum(1) / real.sum(1)
    return outputs_of(pool, encoded, batch_size, device).double().numpy()


def fit(x: np.ndarray, targets: np.ndarray, strengths: np.ndarray) -> Pipeline:
    """The linear model of vectors x (N, d), for labels (N,) int64 or numbers (N,) float32, with the strength of L2
    regularization that is best on held-out folds. Raises UserError if a label has too few examples for folds."""
    if targets.dtype == np.int64:
        count = Counter(targets.tolist())
        fewest = min(count.values())
        if len(count) < 2 or fewest < 2:
            raise UserError("--frozen: needs two labels or more, each with two training examples or more; here, the "
                            f"rarest of {len(count)} has {fewest}")
        folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=0)
        model = LogisticRegressionCV(Cs=1 / strengths, cv=folds, l1_ratios=(0,), scoring="accuracy", max_iter=1000,
                                     use_legacy_attributes=False)
    else:
        folds = KFold(min(FOLDS, len(targets)), shuffle=True, random_state=0)
        model = RidgeCV(alphas=strengths, cv=folds, scoring="neg_mean_squared_error")
    return make_pipeline(StandardScaler(), model).fit(x, targets)


def logits_of(probe: Pipeline, x: np.ndarray, classes: int) -> torch.Tensor:
    """The outputs (N, C) for vectors (N, d): numbers, or logits of all classes, -inf for those without examples."""
    if isinstance(probe[-1], RidgeCV):
        return torch.from_numpy(probe.predict(x))[:, None]
    outputs = np.full((len(x), classes), -np.inf)
    outputs[:, probe.classes_] = probe.predict_log_proba(x)
    return torch.from_numpy(outputs)


def probe_once(setup, tune: TuneConfig, seed: int) -> dict:
    """Fit a linear model to the vectors of the frozen encoder of a task; `setup` is a finetune.Setup. Returns its
    value, metrics, prediction files and strength of regularization. `ranks` is None, because they do not change."""
    encoder = setup.pretrained.new_encoder(seed).to(setup.worker.device).eval()
    vectors = partial(vectors_of, encoder, pooling=setup.frozen, batch_size=tune.batch_size, device=setup.worker.device)
    train = vectors(setup.train)
    if not np.isfinite(train).all():
        return DIVERGED
    strengths = np.array([tune.l2]) if tune.l2 else STRENGTHS
    probe = fit(train, setup.train.targets.numpy(), strengths)
    classes = len(setup.kind.labels.names)
    outputs = {split: logits_of(probe, vectors(encoded), classes) for split, encoded in setup.splits.items()}
    metrics, files = scores(outputs, setup)
    model = probe[-1]
    l2 = model.alpha_ if isinstance(model, RidgeCV) else 1 / model.C_
    return {"value": metrics[setup.metric], "metrics": metrics, "files": files, "l2": float(l2), "ranks": None}
