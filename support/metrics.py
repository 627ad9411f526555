"""Metrics: of tasks with a label or a number for each example, and of SQuAD 2.0's answers."""
import math
import re
import string
from collections import Counter

import numpy as np


# ---- 1. Labels and numbers ----------------------------------------------------------------------------------
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


def mean_ranks(values):
    """The ranks (N,) of values (N,), from 1; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = counts.cumsum() - (counts - 1) / 2
    return ranks[index]


def spearman(predicted, true) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN where one of them is constant."""
    ranks = np.stack([mean_ranks(predicted), mean_ranks(true)])
    if 0 in np.ptp(ranks, axis=1):
        return math.nan
    return float(np.corrcoef(ranks)[0, 1])


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman}


def f1_of_second_label(predicted, true) -> dict[str, float]:
    """F1, precision and recall of label 1 for two labellings (N,) by 0 and 1, each in [0, 1], 0 where undefined."""
    hits = int(((predicted == 1) & (true == 1)).sum())
    guesses = int((predicted == 1).sum())
    wanted = int((true == 1).sum())
    return {
        "f1": 2 * hits / max(1, guesses + wanted),
        "precision": hits / max(1, guesses),
        "recall": hits / max(1, wanted)}


# ---- 2. SQuAD 2.0: EM and F1 --------------------------------------------------------------------------------
def normalize(answer: str) -> str:
    """SQuAD's normal form of an answer: lower case, without punctuation, articles and superfluous white space."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def token_f1(predicted: str, true: str) -> float:
    """Harmonic mean of precision and recall of the words of two answers; if one is empty, whether both are."""
    p = normalize(predicted).split()
    t = normalize(true).split()
    if not p or not t:
        return float(p == t)
    common = Counter(p) & Counter(t)  # words, as often as in both
    return 2 * common.total() / (len(p) + len(t))


def squad_metrics(questions: list, predictions: dict[str, str], odds: dict[str, float]) -> dict[str, float]:
    """The numbers that the official evaluation prints, shares in percent. `questions` are Questions. By id,
    `predictions` are answers, "" for none, and `odds` are higher the less likely an answer is. The best thresholds
    take away the answers whose odds are higher; they give no new ones."""
    scores = {"exact": {}, "f1": {}}
    for q in questions:
        true = [text for _, text in q.answers if normalize(text)] or [""]  # acceptable answers
        answer = predictions[q.id]
        scores["exact"][q.id] = float(normalize(answer) in map(normalize, true))
        scores["f1"][q.id] = max(token_f1(answer, text) for text in true)
    answerable = {q.id: bool(q.answers) for q in questions}
    found = {metric: mean(values.values()) for metric, values in scores.items()}
    for group, has_answer in (("HasAns", True), ("NoAns", False)):
        ids = [name for name in answerable if answerable[name] == has_answer]
        if ids:
            for metric, values in scores.items():
                found[f"{group}_{metric}"] = mean([values[name] for name in ids])
            found[f"{group}_total"] = len(ids)
    for metric, values in scores.items():
        best, threshold = best_threshold(values, predictions, odds, answerable)
        found[f"best_{metric}"], found[f"best_{metric}_thresh"] = best, threshold
    return found


def mean(values) -> float:
    """The mean of shares, in percent."""
    return 100 * sum(values) / len(values)


def best_threshold(scores: dict[str, float], predictions: dict[str, str], odds: dict[str, float],
                   answerable: dict[str, bool]) -> tuple[float, float]:
    """The highest mean score in percent, and the threshold of the odds above which no answer is given, by id."""
    score = best = sum(not has_answer for has_answer in answerable.values())  # no answer at all
    threshold = 0.0
    for name in sorted(odds, key=odds.get):  # also answer this question
        if answerable[name]:
            score += scores[name]
        elif predictions[name]:
            score -= 1
        if score > best:
            best, threshold = score, odds[name]
    return 100 * best / len(scores), threshold
