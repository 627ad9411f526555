"""Metrics of tasks with a label or a number for each example."""
import math

import numpy as np
import pandas


def accuracy(predicted, true) -> float:
    """Share of equal entries of two arrays (N,), in [0, 1]."""
    return float((predicted == true).mean())


def matthews(predicted, true) -> float:
    """Correlation of two labellings (N,) by any integers, in [-1, 1]; Matthews, 1975, and Gorodkin, 2004."""
    if np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    both = np.concatenate([true, predicted])
    labels, index = np.unique(both, return_inverse=True)
    t, p = np.eye(len(labels))[index.reshape(2, -1)]  # (N, labels) each
    t = t - t.mean(0)
    p = p - p.mean(0)
    return float((t * p).sum() / math.sqrt((t * t).sum() * (p * p).sum()))


def spearman(predicted, true) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN where one of them is constant."""
    table = pandas.DataFrame({0: predicted, 1: true})
    return float(table.corr("spearman")[0][1])


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman}
