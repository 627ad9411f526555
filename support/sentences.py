"""Tasks with a label, or a number, for one or two texts: labels, inputs, head, loss and score."""
import itertools
import re
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from maelm import CLS, SEP
from support.files import UserError
from support.tasks import METRICS, TASKS, Encoded, Example
from support.tokenizer import Tokenizer


class ClassifierHead(nn.Sequential):
    """H^L at [CLS] -> logits (B, C), as RoBERTa: dropout, dense, tanh, dropout, linear. PyTorch's initial weights."""
    def __init__(self, d: int, classes: int, dropout: float):
        super().__init__(
            nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(),
            nn.Dropout(dropout), nn.Linear(d, classes))

    def forward(self, h):
        """h (B, m, d) -> (B, C)."""
        return super().forward(h[:, 0])


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def labels_and_scale(task: str, examples: list[Example]) -> tuple[str, tuple[str, ...], float]:
    """Metric, labels and scale of a task, for `custom` by its training examples; no labels for numbers."""
    metric, labels = TASKS[task].metric, TASKS[task].labels
    if task == "custom":
        found = sorted({e.label for e in examples})
        if len(found) == 1:
            raise UserError(f"all training records have the label {found[0]!r}: use two labels or more")
        numbers = [float(label) for label in found if NUMBER.fullmatch(label)]
        if len(numbers) == len(found) and not all(number.is_integer() for number in numbers):
            metric = "spearman"  # labels such as 3.5: to be predicted as numbers
        else:
            labels = tuple(found)
    if labels:
        return metric, labels, 1.0
    # The official code divides STS-B's 0 ... 5 by 5.
    largest = max([abs(float(e.label)) for e in examples if NUMBER.fullmatch(e.label)], default=0.0)
    return metric, (), largest or 1.0


class Sentences:
    """Tasks with a label, or a number, for one or two texts: `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`. Spans has the
    same methods. Targets are those of Encoded."""
    def __init__(self, tokenizer: Tokenizer, dim: int, n: int, dropout: float, metric: str, labels: tuple[str, ...],
                 scale: float):
        self.tokenizer, self.dim, self.n, self.dropout = tokenizer, dim, n, dropout
        self.metric, self.labels, self.scale = metric, labels, scale

    def target(self, example: Example) -> int | float:
        """The label as the head sees it, 0 if it is to be predicted. UserError if the task does not have it."""
        if example.label is None:
            return 0
        if self.labels and example.label in self.labels:
            return self.labels.index(example.label)
        if self.labels or not NUMBER.fullmatch(example.label):
            raise UserError(f"label {example.label!r} of {example.text[:40]!r} is not in the task: "
                            f"{', '.join(self.labels) or 'use numbers'}")
        return float(example.label) / self.scale

    def encode(self, examples: list[Example]) -> Encoded:
        """Tokens of each example. Of inputs that are too long, the longer text is cut off at the end."""
        targets = [self.target(e) for e in examples]  # a bad label is found before the long work
        ids, truncated = [], 0
        for e in tqdm(examples, "tokenizing", leave=False, disable=None):
            a = self.tokenizer.encode(e.text).tolist()
            b = self.tokenizer.encode(e.text2 or "").tolist()
            room = self.n - (2 if e.text2 is None else 3)  # for both texts
            truncated += len(a) + len(b) > room
            keep = min(len(b), max(room // 2, room - len(a)))  # tokens of b; the others are for a
            row = [CLS, *a[:room - keep], SEP]
            if e.text2 is not None:
                row += [*b[:keep], SEP]
            ids.append(np.array(row, np.int64))
        remarks = [f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens"] if truncated else []
        return Encoded(ids, torch.tensor(targets), examples, [], remarks)

    def head(self) -> nn.Module:
        """A new head."""
        return ClassifierHead(self.dim, max(1, len(self.labels)), self.dropout)

    def loss(self, logits, targets, padding):
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits, targets, padding):
        """The logits (B, C) as they are."""
        return logits

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Logits (N, C) -> the metric in percent, and the file of all predictions."""
        predicted = outputs.argmax(1) if self.labels else outputs[:, 0]
        value = METRICS[self.metric](predicted, encoded.targets.numpy())
        rows = self.rows(outputs, encoded.examples, itertools.count())
        return {self.metric: 100 * value}, {"predictions.jsonl": rows}

    def rows(self, outputs, examples: list[Example], ids: Iterable) -> list[dict]:
        """Logits (N, C) -> of each example id, label, prediction and the probability of every label."""
        scores = torch.from_numpy(outputs).softmax(1).tolist()
        rows = []
        for i, (example, logits, name) in enumerate(zip(examples, outputs, ids)):
            row = {"id": name}
            if example.label is not None:
                row["label"] = example.label if self.labels else float(example.label)
            if self.labels:
                row["prediction"] = self.labels[logits.argmax()]
                row["scores"] = dict(zip(self.labels, scores[i]))
            else:
                row["prediction"] = float(f"{self.scale * logits[0]:.4g}")
            rows.append(row)
        return rows
