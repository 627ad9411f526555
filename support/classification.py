"""Tasks that classify one or two texts: how examples become batches of tokens, the head, the loss and the scores."""
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maelm import PAD, Config
from support.examples import Example, Labels
from support.heads import ClassifierHead
from support.program import json_lines, progress
from support.tasks import TuneConfig
from support.tokenizer import Tokenizer

EVALUATED = 64  # inputs per batch of an evaluation


# ---- 1. Metrics ---------------------------------------------------------------------------------------------
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
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; 0 if either is constant."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return 0.0
    ranks = pandas.DataFrame([predicted, true]).rank(axis=1)  # equal values share their mean rank
    return float(np.corrcoef(ranks)[0, 1])


def f1(predicted, true) -> float:
    """F1 in [0, 1] of label 1 for two arrays (N,) of labels 0 and 1; 0 if label 1 does not occur."""
    return 2 * float((predicted * true).sum()) / max(1, predicted.sum() + true.sum())


def r2(predicted, true) -> float:
    """The share of the variance of numbers (N,) that predictions explain, at most 1; 0 if the numbers are constant."""
    if np.ptp(true) == 0:
        return 0.0
    return 1 - float(((true - predicted) ** 2).sum() / ((true - true.mean()) ** 2).sum())


METRICS = {  # functions of predicted and true labels or numbers, (N,) each
    "accuracy": lambda predicted, true: float((predicted == true).mean()),
    "matthews": matthews, "spearman": spearman, "f1": f1, "r2": r2}


# ---- 2. Inputs and batches ----------------------------------------------------------------------------------
@dataclass
class Encoded:
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # per input, (length,) int64
    targets: Tensor  # labels (N,) int64 or float32; SQuAD: first and last token of the answer (N, 2) int64
    examples: list  # Example or Question
    remark: str

    def batch(self, chosen, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen inputs (B,) -> tokens (B, t) int64, padding (B, t) bool, targets. The longest has t tokens."""
        ids = [torch.from_numpy(self.ids[i]) for i in chosen]
        tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD).to(device)
        lengths = torch.tensor([len(each) for each in ids], device=device)
        padding = torch.arange(tokens.shape[1], device=device) >= lengths[:, None]  # PAD is a word elsewhere
        return tokens, padding, self.targets[chosen].to(device)

    def take(self, chosen: np.ndarray) -> "Encoded":
        """The inputs at these indices, (K,) int64."""
        return Encoded([self.ids[i] for i in chosen], self.targets[chosen], [self.examples[i] for i in chosen], "")

    def draw(self, shots: int, seed: int) -> np.ndarray:
        """The indices of `shots` inputs of each label, drawn by the seed: one of each label, then another one of each,
        and so on; 0 is all inputs, in their order."""
        if shots == 0:
            return np.arange(len(self.ids))
        order = np.random.default_rng(seed).permutation(len(self.ids))
        labels = pandas.Series(self.targets.numpy()[order])
        rounds = labels.groupby(labels).cumcount()
        return order[np.argsort(rounds, kind="stable")][:(rounds < shots).sum()]

    def by_length(self, device: torch.device) -> Iterator[tuple]:
        """Yield all inputs in batches of similar length: their indices, and what `batch` returns."""
        order = np.argsort([len(ids) for ids in self.ids], kind="stable")
        for start in range(0, len(order), EVALUATED):
            chosen = order[start:start + EVALUATED]
            yield chosen, *self.batch(chosen, device)

    @torch.no_grad()
    def outputs(self, function: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Tensor:
        """function(tokens, padding) for all inputs, as one tensor (N, ...) in their order."""
        outputs = {}
        batches = math.ceil(len(self.ids) / EVALUATED)
        for chosen, tokens, padding, _ in progress(self.by_length(device), "evaluating", batches):
            outputs |= zip(chosen, function(tokens, padding).cpu())
        return torch.stack([outputs[i] for i in range(len(outputs))])

    def shuffled(self, seed: int, batch_size: int) -> Iterator[np.ndarray]:
        """Yield the indices of each step's inputs, (batch_size,) int64 or, at the end of an epoch, fewer. Every epoch
        is a new permutation of all inputs. Those of sixteen batches are sorted by length, which saves padding."""
        lengths = np.array([len(ids) for ids in self.ids])
        for epoch in itertools.count():
            random = np.random.default_rng((seed, epoch))
            order = random.permutation(len(lengths))
            for start in range(0, len(order), 16 * batch_size):
                group = order[start:start + 16 * batch_size]
                group = group[np.argsort(lengths[group], kind="stable")]
                cut = [group[i:i + batch_size] for i in range(0, len(group), batch_size)]
                # Shuffle the batches, so that inputs do not grow longer from step to step.
                yield from [cut[i] for i in random.permutation(len(cut))]


# ---- 3. The kind of task ------------------------------------------------------------------------------------
class Scores(NamedTuple):
    """The metrics of a model in percent, by name, each None if it has diverged, and the texts of prediction files."""
    metrics: dict[str, float | None]
    files: dict[str, str]


class Kind:
    """A kind of task. It has `labels` and these methods: `encode` turns examples into tokens; `head` makes one; `loss`
    compares its outputs with the targets of a batch; `decode` takes from the outputs of a batch what `score` needs,
    (B, K), which becomes (N, K) for a whole split; `score` turns these into Scores."""
    def __init__(self, tokenizer: Tokenizer, config: Config, tune: TuneConfig, labels: Labels):
        self.tokenizer, self.config, self.tune, self.labels = tokenizer, config, tune, labels
        self.n = min(tune.seq_len, config.seq_len)
        self.model = tokenizer.framed()
        self.model.enable_truncation(self.n)  # cut the longer text first

    def scores(self, outputs: dict[str, Tensor], splits: dict[str, Encoded]) -> Scores:
        """Outputs (N, K) by split -> Scores. Names end in _mm or _test for splits other than dev. If the model has
        diverged, the files show it as if NaN were 0."""
        metrics, files = {}, {}
        for split, each in outputs.items():
            found = self.score(each.nan_to_num().numpy(), splits[split])
            end = {"dev": "", "dev_mm": "_mm", "test": "_test"}[split]
            has_diverged = bool(each.isnan().any())
            for name, value in found.metrics.items():
                metrics[name + end] = None if has_diverged else value
            files |= {name.replace(".", f"{end}."): text for name, text in found.files.items()}
        return Scores(metrics, files)


class Classification(Kind):
    """Inputs `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`. The target is a label or a number."""
    def encode(self, examples: list[Example]) -> Encoded:
        """Tokenize the examples of a split, each to at most n tokens. Raises UserError if a label is unknown."""
        targets = [self.labels.target(example.label) for example in examples]  # before the slow part
        ids, truncated = [], 0
        for example in progress(examples, "tokenizing"):
            encoding = self.model.encode(example.text, example.text2)
            ids.append(np.array(encoding.ids, np.int64))
            truncated += bool(encoding.overflowing)
        labels = ", ".join(self.labels.names) or "numbers as labels"
        [(label, count)] = Counter(example.label for example in examples).most_common(1)
        label = "without a label" if label is None else label
        remark = (f"{len(ids):,} examples ({labels:.200}), of which {count / len(ids):.1%} are {str(label):.40}; "
                  f"{truncated:,} are cut off at the limit of {self.n} tokens")
        return Encoded(ids, torch.tensor(targets), examples, remark)

    def head(self) -> nn.Module:
        """A new head: H^L (B, t, d) and padding (B, t) bool -> logits (B, C)."""
        return ClassifierHead(self.config.encoder_dim, max(1, len(self.labels.names)), self.config.dropout)

    def loss(self, logits, targets, tokens):
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels.names:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits, tokens):
        """The outputs that `score` needs, float32: here, the logits (B, C)."""
        return logits

    def score(self, outputs, encoded: Encoded) -> Scores:
        """Logits (N, C) -> metrics of the examples with labels, and predictions.jsonl with each example's label,
        prediction and, for labels with names, all probabilities, beside the other columns of its record."""
        names, labels = self.labels.names, self.labels
        lines = []
        for example, output in zip(encoded.examples, torch.from_numpy(outputs)):
            if names:
                scores = dict(zip(names, output.softmax(0).tolist()))
                found = {"label": example.label, "prediction": names[output.argmax()], "scores": scores}
            else:
                distance = float(f"{labels.scale * output.item():.6g}")  # without float32's rounding errors
                label = None if example.label is None else float(example.label)
                found = {"label": label, "prediction": labels.center + distance}
            lines.append(example.others | found)
        labeled = [line for line in lines if line["label"] is not None]
        metrics = {}
        if labeled:
            predicted, true = [np.array([names.index(line[name]) if names else line[name] for line in labeled])
                               for name in ("prediction", "label")]  # the scores are those of the file
            metrics = {name: 100 * METRICS[name](predicted, true) for name in labels.metrics}
        return Scores(metrics, {"predictions.jsonl": json_lines(lines)})
