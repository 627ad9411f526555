"""SQuAD 2.0: the official metrics, the tokens of answers, and how windows of the context are encoded and scored."""
import functools
import json
import math
import re
import string
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from maelm import CLS, PAD, SEP, Config
from support.model.heads import SpanHead
from support.tasks.classification import Encoded
from support.tasks.tasks import Labels, Question, TuneConfig
from support.text.tokenizer import Tokenizer


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
    return {"exact": float(np.mean(100.0 * np.array(exact))), "f1": float(np.mean(100.0 * np.array(f1)))}


# ---- 2. The tokens of answers -------------------------------------------------------------------------------
def spans_of(tokenizer: Tokenizer, text: str):
    """Text -> token ids, and the start and end character of each token, end exclusive, without the space before a word;
    (length,) each."""
    encoding = tokenizer.model.encode(text, add_special_tokens=False)  # tiktoken gives no offsets
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, ends = offsets.T
    space = np.array([*map(str.isspace, text), False])
    starts = np.minimum(starts + space[starts], ends)
    return np.array(encoding.ids, np.int64), starts, ends


def answer_tokens(q: Question, starts, ends) -> tuple[int, int]:
    """The first and last token of the first answer, (0, 0) for none. starts and ends (length,) are in characters."""
    if not q.answers:
        return 0, 0
    start, text = q.answers[0]
    first = start + len(text) - len(text.lstrip())  # without white space around the answer
    last = first + len(text.strip())
    a = int(np.searchsorted(ends, first, side="right"))  # the first token that ends after character `first`
    b = int(np.searchsorted(starts, last)) - 1  # the last token that starts before character `last`
    return a, b


# ---- 3. The kind of task ------------------------------------------------------------------------------------
class Spans:
    """Inputs `[CLS] question [SEP] window of the context [SEP]`. The target is the answer's first and last token, or
    [CLS] if the answer is elsewhere."""
    def __init__(self, tokenizer: Tokenizer, config: Config, tune: TuneConfig, labels: Labels):
        self.tokenizer, self.config, self.tune, self.labels = tokenizer, config, tune, labels
        self.n = min(tune.seq_len, config.seq_len)
        self.spans_of = functools.cache(functools.partial(spans_of, tokenizer))  # many questions share a context

    def encode(self, questions: list[Question]) -> Encoded:
        """All windows of all questions. They start doc_stride tokens apart, or half a window apart if that is less."""
        ids, targets, windows = [], [], []
        longest = min(self.tune.max_query, self.n // 2)
        for number, q in enumerate(questions):
            context, starts, ends = self.spans_of(q.context)
            first, last = answer_tokens(q, starts, ends)
            question = self.tokenizer.encode(q.question)
            query = [CLS, *question[:longest], SEP]
            room = self.n - len(query) - 1  # for the window
            stride = min(self.tune.doc_stride, max(1, room // 2))
            # The last window is the one that reaches the end of the context.
            end = max(0, len(context) - room) + stride
            for offset in range(0, end, stride):
                window = context[offset:offset + room]
                ids.append(np.array([*query, *window, SEP], np.int64))
                shift = len(query) - offset  # from an index in the context to an index in the input
                windows.append((number, shift))
                inside = q.answers and offset <= first and last < offset + room
                targets.append((first + shift, last + shift) if inside else (0, 0))
        answered = {number for (number, _), (first, _) in zip(windows, targets) if first > 0}
        lost = sum(bool(q.answers) for q in questions) - len(answered)
        remark = f"{len(ids):,} windows of {self.n} tokens; {lost:,} answers lie in no window, and count as no answer"
        return Encoded(ids, torch.tensor(targets), questions, windows, remark)

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

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float], dict[str, str]]:
        """Outputs of all windows (N, 4) -> the official metrics, and two files for the official script: each question's
        answer ("" for none), and its no-answer score minus the score of its best span."""
        null = {q.id: math.inf for q in encoded.examples}
        best = {q.id: (-math.inf, "") for q in encoded.examples}  # score and text of the best span
        for window, output in zip(encoded.windows, outputs.tolist()):
            number, shift = window
            no_answer, score, first, last = output
            q = encoded.examples[number]
            null[q.id] = min(null[q.id], no_answer)
            if score > best[q.id][0]:
                _, starts, ends = self.spans_of(q.context)
                start = starts[int(first) - shift]  # first and last are indices in the input
                end = ends[int(last) - shift]
                best[q.id] = score, q.context[start:end]
        answers, odds = {}, {}
        for name, (score, text) in best.items():
            odds[name] = null[name] - score
            answers[name] = text if odds[name] <= 0 else ""
        files = {"predictions.json": json.dumps(answers, indent=1), "null_odds.json": json.dumps(odds, indent=1)}
        return squad_metrics(encoded.examples, answers), files
