"""The kind of task that classifies one or two texts: its inputs, head, loss and scores."""
import math
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from maelm import Config
from support.model.heads import ClassifierHead
from support.program.errors import UserError
from support.program.files import json_lines
from support.tasks.metrics import METRICS
from support.tasks.types import Encoded, Example, Labels
from support.text.tokenizer import Tokenizer


class Classification:
    """Inputs `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`. The target is a label or a number."""
    def __init__(self, tokenizer: Tokenizer, config: Config, tune, labels: Labels):
        self.config, self.labels = config, labels
        self.n = min(tune.seq_len, config.seq_len)
        self.model = tokenizer.framed()
        self.model.enable_truncation(self.n)  # cut the longer text first
        self.pairs = None  # whether examples have a second text, once that is known

    def encode(self, examples: list[Example]) -> Encoded:
        """Tokenize the examples of a split, each to at most n tokens. Raises UserError if one does not fit the task."""
        targets = [self.labels.target(example) for example in examples]  # before the slow part
        ids, truncated = [], 0
        if self.pairs is None:
            self.pairs = examples[0].text2 is not None
        for example in tqdm(examples, "tokenizing", leave=False, disable=None):
            if (example.text2 is not None) != self.pairs:
                has = "lacks" if self.pairs else "has"
                raise UserError(f"{example.place}: {has} a second text, unlike the first training example")
            encoding = self.model.encode(example.text, example.text2)
            ids.append(np.array(encoding.ids, np.int64))
            truncated += bool(encoding.overflowing)
        inputs = "pairs of texts" if self.pairs else "texts"
        labels = ", ".join(self.labels.names) or "numbers as labels"
        [(label, count)] = Counter(example.label for example in examples).most_common(1)
        remark = (f"{len(ids):,} {inputs} ({labels:.200}), of which {count / len(ids):.1%} are {label:.40}; "
                  f"{truncated:,} are cut off at the limit of {self.n} tokens")
        return Encoded(ids, torch.tensor(targets), examples, [], remark)

    def head(self) -> nn.Module:
        """A new head: H^L (B, m, d) and padding (B, m) bool -> logits (B, C)."""
        return ClassifierHead(self.config.encoder_dim, max(1, len(self.labels.names)), self.config.dropout)

    def loss(self, logits, targets, padding):
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels.names:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits, targets, padding):
        """The outputs that `score` needs, float32: here, the logits (B, C)."""
        return logits

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float | None], dict[str, str]]:
        """Logits (N, C) -> metrics in percent (None for the correlation of constant predictions), and predictions.jsonl
        with the label, the prediction and, for labels with names, all probabilities of each example."""
        names = self.labels.names
        lines = []
        for example, output in zip(encoded.examples, torch.from_numpy(outputs)):
            if names:
                scores = dict(zip(names, output.softmax(0).tolist()))
                lines.append({"label": example.label, "prediction": names[output.argmax()], "scores": scores})
            else:
                number = float(f"{self.labels.scale * output.item():.6g}")  # without float32's rounding errors
                lines.append({"label": float(example.label), "prediction": number})
        columns = [[line[name] for line in lines] for name in ("prediction", "label")]  # scores are those of the file
        predicted, true = [np.array([names.index(cell) if names else cell for cell in column]) for column in columns]
        metrics = {}
        for name in self.labels.metrics:
            value = METRICS[name](predicted, true)
            metrics[name] = None if math.isnan(value) else 100 * value
        return metrics, {"predictions.jsonl": json_lines(lines)}
