"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder."""
from collections import Counter

import numpy as np
import torch
from torch import nn

from support.program import UserError
from support.tasks.classification import Encoded, outputs_of
from support.tasks.tuned import last_layer

STRENGTHS = np.logspace(-1, 3, 9)  # of L2 regularization, to choose from
FOLDS = 5  # of the training split, on which the strength is chosen


def mean(h, real):
    """The mean over the real tokens. The poolings take H^L (B, t, d) and real (B, t, 1) bool, and return (B, d)."""
    return (h * real).sum(1) / real.sum(1)


POOLINGS = {"mean": mean, "cls": lambda h, real: h[:, 0]}  # the values of --frozen


def vectors_of(encoder: nn.Module, encoded: Encoded, pooling: str, batch_size: int, device: torch.device) -> np.ndarray:
    """A vector for each input of a split, (N, d) float64."""
    def pool(tokens, padding):
        return POOLINGS[pooling](last_layer(encoder, tokens, padding).float(), (~padding)[:, :, None])
    return outputs_of(pool, encoded, batch_size, device).double().numpy()


def fit(x: np.ndarray, targets: np.ndarray, strengths: np.ndarray):
    """The linear model (a Pipeline) of vectors x (N, d) for labels (N,) int64 or numbers (N,) float32, with the L2
    regularization that is best on held-out folds. Raises UserError if a label has too few examples for folds."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV  # here, because scikit-learn is slow to import
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
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


def logits_of(probe, x: np.ndarray, classes: int) -> torch.Tensor:
    """The outputs (N, C) for vectors (N, d): numbers if there are no classes, or logits, -inf without examples."""
    if classes == 0:
        return torch.from_numpy(probe.predict(x))[:, None]
    outputs = np.full((len(x), classes), -np.inf)
    outputs[:, probe.classes_] = probe.predict_log_proba(x)
    return torch.from_numpy(outputs)
