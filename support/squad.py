"""SQuAD 2.0: the official metrics, and how windows of the context are encoded and scored."""
import json
import math
import re
import string
from collections import Counter
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from maelm import PAD, SEP
from support.classification import Encoded, Kind, Scores
from support.examples import Question
from support.heads import SpanHead


# ---- 1. Metrics ---------------------------------------------------------------------------------------------
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


def squad_metrics(questions: list, predictions: dict[str, str]) -> dict[str, float]:
    """The official evaluation's exact match and F1 in percent, given the answer ("" for none) for each id."""
    exact, f1 = [], []
    for q in questions:
        true = [text for _, text in q.answers if normalize(text)] or [""]  # acceptable answers
        answer = predictions[q.id]
        exact.append(normalize(answer) in map(normalize, true))
        f1.append(max(token_f1(answer, text) for text in true))
    return {"exact": 100 * fmean(exact), "f1": 100 * fmean(f1)}


# ---- 2. The kind of task ------------------------------------------------------------------------------------
@dataclass
class Windows(Encoded):
    """A split as windows of contexts."""
    windows: list[tuple]  # per input, the index of its question, and its tokens' places in the context (length, 2)


class Spans(Kind):
    """Inputs `[CLS] question [SEP] window of the context [SEP]`. The target is the answer's first and last token, or
    [CLS] if the answer is elsewhere."""
    def encode(self, questions: list[Question]) -> Windows:
        """All windows of all questions. They start doc_stride tokens apart, or half a window apart if that is less."""
        ids, targets, windows, lost = [], [], [], 0
        for number, q in enumerate(questions):
            query = self.tokenizer.model.encode(q.question)
            length = min(len(query), self.tune.max_query, self.n // 2)
            room = self.n - length - 3  # for the window
            overlap = room - min(self.tune.doc_stride, max(1, room // 2))
            self.model.enable_truncation(self.n, stride=overlap, strategy="only_second")
            whole = self.model.encode(q.question[:query.offsets[length - 1][1]] if length else "", q.context)
            found = (0, 0)
            for window in (whole, *whole.overflowing):
                target = (0, 0)
                if q.answers:
                    start, text = q.answers[0]
                    start += len(text) - len(text.lstrip())  # without white space around the answer
                    ends = start, start + max(1, len(text.strip())) - 1
                    tokens = [window.char_to_token(at, 1) for at in ends]  # None outside the window
                    target = target if None in tokens else tuple(tokens)
                found = max(found, target)
                ids.append(np.array(window.ids, np.int64))
                targets.append(target)
                windows.append((number, np.array(window.offsets, np.int32)))
            lost += bool(q.answers) and found == (0, 0)
        remark = f"{len(ids):,} windows of {self.n} tokens; {lost:,} answers lie in no window, and count as no answer"
        return Windows(ids, torch.tensor(targets), questions, remark, windows)

    def head(self) -> nn.Module:
        return SpanHead(self.config.encoder_dim)

    def in_passage(self, logits, tokens):
        """Logits (B, t, 2) with -inf outside [CLS] and the window; tokens (B, t) int64."""
        position = torch.arange(logits.shape[1], device=logits.device)
        first_sep = (tokens == SEP).int().argmax(1, keepdim=True)  # before the window
        last_sep = (tokens != PAD).sum(1, keepdim=True) - 1  # after it
        allowed = (position > first_sep) & (position < last_sep)  # (B, t)
        allowed[:, 0] = True
        return logits.masked_fill(~allowed[:, :, None], -torch.inf)

    def loss(self, logits, targets, tokens):
        """Mean of the cross-entropies of the first and the last token, in nats."""
        return F.cross_entropy(self.in_passage(logits, tokens), targets)

    def decode(self, logits, tokens):
        """Logits (B, t, 2) -> (B, 4): the score of no answer; score, first and last token of the best span."""
        starts, ends = self.in_passage(logits, tokens).unbind(2)  # (B, t) each
        null = starts[:, 0] + ends[:, 0]
        longest = min(self.tune.max_answer, logits.shape[1])
        starts = F.pad(starts[:, 1:], (1, 0), value=-torch.inf)  # [CLS] is not an answer
        ends = F.pad(ends, (0, longest - 1), value=-torch.inf)
        ends = ends.unfold(1, longest, 1)  # (B, t, longest): the scores of each token and the next tokens
        spans = starts[:, :, None] + ends
        score, at = spans.flatten(1).max(1)
        first = at // longest
        last = first + at % longest
        return torch.stack([null, score, first, last], dim=1)

    def score(self, outputs, encoded: Windows) -> Scores:
        """Outputs of all windows (N, 4) -> the official metrics, and two files for the official script: each question's
        answer ("" for none), and its no-answer score minus the score of its best span."""
        null = {q.id: math.inf for q in encoded.examples}
        best = {q.id: (-math.inf, "") for q in encoded.examples}  # score and text of the best span
        for window, output in zip(encoded.windows, outputs.tolist()):
            number, offsets = window
            no_answer, score, first, last = output
            q = encoded.examples[number]
            null[q.id] = min(null[q.id], no_answer)
            if score > best[q.id][0]:
                best[q.id] = score, q.context[offsets[int(first), 0]:offsets[int(last), 1]]
        answers, odds = {}, {}
        for name, (score, text) in best.items():
            odds[name] = null[name] - score
            answers[name] = text if odds[name] <= 0 else ""
        files = {"predictions.json": json.dumps(answers, indent=1), "null_odds.json": json.dumps(odds, indent=1)}
        return Scores(squad_metrics(encoded.examples, answers), files)
