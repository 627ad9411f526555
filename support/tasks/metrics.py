"""Metrics for labels, for numbers, and for SQuAD 2.0's answers."""
import math
import re
import string
from collections import Counter

import numpy as np


def accuracy(predicted, true) -> float:
    """The fraction of equal entries in two arrays (N,), in [0, 1]."""
    return float((predicted == true).mean())


def matthews(predicted, true) -> float:
    """The correlation in [-1, 1] of two arrays (N,) of integer labels; Matthews, 1975; Gorodkin, 2004."""
    if np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    both = np.concatenate([true, predicted])
    labels, index = np.unique(both, return_inverse=True)
    t, p = np.eye(len(labels))[index.reshape(2, -1)]  # (N, labels) each
    t = t - t.mean(0)
    p = p - p.mean(0)
    return float((t * p).sum() / math.sqrt((t * t).sum() * (p * p).sum()))


def spearman(predicted, true) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN if either is constant."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return math.nan
    import pandas  # here, because it is slow
    ranks = [pandas.Series(values).rank() for values in (predicted, true)]  # equal values share their mean rank
    return float(np.corrcoef(*ranks)[0, 1])


def f1(predicted, true) -> float:
    """F1 in [0, 1] of label 1 for two arrays (N,) of labels 0 and 1; 0 if label 1 does not occur."""
    hits = int((predicted * true).sum())
    marked = int(predicted.sum() + true.sum())
    return 2 * hits / max(1, marked)


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman, "f1": f1}


def normalize(answer: str) -> str:
    """SQuAD's normal form of an answer: in lower case, without punctuation, articles or extra white space."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def token_f1(predicted: str, true: str) -> float:
    """F1 of the words in two answers, in [0, 1]: 1 if both are empty, and 0 if only one of them is empty."""
    p = Counter(normalize(predicted).split())
    t = Counter(normalize(true).split())
    if not p or not t:
        return float(p == t)
    return 2 * (p & t).total() / (p.total() + t.total())


def squad_metrics(questions: list, predictions: dict[str, str], odds: dict[str, float]) -> dict[str, float]:
    """The numbers that the official evaluation prints, in percent, given the answer ("" for none) and the odds of no
    answer for each id. The best threshold removes the answers with higher odds; it never adds answers."""
    scores = {"exact": [], "f1": []}
    for q in questions:
        true = [text for _, text in q.answers if normalize(text)] or [""]  # acceptable answers
        answer = predictions[q.id]
        scores["exact"].append(normalize(answer) in map(normalize, true))
        scores["f1"].append(max(token_f1(answer, text) for text in true))
    answerable = np.array([bool(q.answers) for q in questions])
    answered = np.array([predictions[q.id] != "" for q in questions])
    thresholds = np.array([odds[q.id] for q in questions])
    order = np.argsort(thresholds, kind="stable")
    results = {}
    for metric, values in scores.items():
        values = 100.0 * np.array(values)
        results[metric] = float(values.mean())
        for group, chosen in (("HasAns", answerable), ("NoAns", ~answerable)):
            if chosen.any():
                results[f"{group}_{metric}"] = float(values[chosen].mean())
                results[f"{group}_total"] = int(chosen.sum())
        # Start without answers, then add them one by one, in the order of the odds.
        gains = np.where(answerable, values, -100.0 * answered)[order]
        sums = 100 * np.sum(~answerable) + np.append(0, gains.cumsum())
        best = sums.argmax()
        results[f"best_{metric}"] = float(sums[best] / len(values))
        results[f"best_{metric}_thresh"] = float(thresholds[order[best - 1]]) if best else 0.0
    return results
