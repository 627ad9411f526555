"""Tasks with a label, or a number, for one or two texts: labels, inputs, head, loss and score."""
import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from maelm import CLS, SEP
from support.cli import UserError
from support.metrics import METRICS
from support.run_folder import json_lines
from support.task_files import Example
from support.tasks import TASKS
from support.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # of each input, (length,) int64
    targets: Tensor  # (N,) int64 or float32 labels; (N, 3) int64 for spans: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD, of each input: number of its question, tokens of the context before it
    remarks: list[str]


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


def labels_and_scale(task: str, examples: list) -> tuple[str, tuple[str, ...], float]:
    """Metric, labels and scale of a task, of some by its training examples; without labels if numbers are predicted."""
    metric, labels = TASKS[task].metric, TASKS[task].labels
    if labels or task == "squad2":
        return metric, labels, 1.0
    found = sorted({e.label for e in examples})
    if len(found) == 1:
        raise UserError(f"all training examples have the label {found[0]!r}: use two labels or more")
    numbers = [float(label) for label in found if NUMBER.fullmatch(label)]
    if task == "custom" and (len(numbers) < len(found) or all(map(float.is_integer, numbers))):
        return metric, tuple(found), 1.0
    # The official code divides STS-B's 0 ... 5 by 5.
    return "spearman", (), max(map(abs, numbers), default=0.0) or 1.0


class Classification:
    """Inputs `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, targets as in Encoded. Spans has the same methods."""
    def __init__(self, tokenizer: Tokenizer, dim: int, n: int, dropout: float, metric: str, labels: tuple[str, ...],
                 scale: float):
        self.tokenizer, self.dim, self.n, self.dropout = tokenizer, dim, n, dropout
        self.metric, self.labels, self.scale = metric, labels, scale

    def target(self, example: Example) -> int | float:
        """The label as the head sees it, 0 if it is to be predicted. UserError if the task does not have it."""
        if example.label is None:
            return 0
        if example.label in self.labels:
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
            a = self.tokenizer.encode(e.text)
            b = self.tokenizer.encode(e.text2 or "")
            room = self.n - (2 if e.text2 is None else 3)  # for both texts
            truncated += len(a) + len(b) > room
            keep = min(len(b), max(room // 2, room - len(a)))  # tokens of b; the others are for a
            tokens = [CLS, *a[:room - keep], SEP]
            if e.text2 is not None:
                tokens += [*b[:keep], SEP]
            ids.append(np.array(tokens, np.int64))
        remarks = [f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens"] if truncated else []
        return Encoded(ids, torch.tensor(targets), examples, [], remarks)

    def head(self) -> nn.Module:
        return ClassifierHead(self.dim, max(1, len(self.labels)), self.dropout)

    def loss(self, logits, targets, padding):
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits, targets, padding):
        """The logits (B, C) as they are."""
        return logits

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float], dict[str, str]]:
        """Logits (N, C) -> the metric in percent, and the file of all predictions."""
        predicted = outputs.argmax(1) if self.labels else outputs[:, 0]
        value = METRICS[self.metric](predicted, encoded.targets.numpy())
        return {self.metric: 100 * value}, {"predictions.jsonl": json_lines(self.predictions(outputs, encoded))}

    def predictions(self, outputs, encoded: Encoded) -> list[dict]:
        """Logits (N, C) -> of each example id, label, prediction and the probability of every label."""
        found = []
        for example, output in zip(encoded.examples, torch.from_numpy(outputs)):
            line = {"id": example.id}
            if example.label is not None:
                line["label"] = example.label if self.labels else float(example.label)
            if self.labels:
                line["prediction"] = self.labels[output.argmax()]
                line["scores"] = dict(zip(self.labels, output.softmax(0).tolist()))
            else:
                line["prediction"] = float(f"{self.scale * output.item():.4g}")
            found.append(line)
        return found
