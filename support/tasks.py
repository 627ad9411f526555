"""The fine-tuning tasks of Table 1 and their grids (Tables 5 and 6). `docs` classifies documentation strings by library
and needs no download; `custom` reads your own files."""
import itertools
import re
import unicodedata
from typing import NamedTuple

import numpy as np
from torch import Tensor

from support.cli import UserError


class Task(NamedTuple):
    """One column of Table 1: its files, their columns and its metrics."""
    group: str  # small | large | squad | docs: determines the defaults and the grid (Tables 5 and 6)
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, numbers or the training split's labels
    folder: str = ""  # folder of the original release, and name of the file for GLUE's server
    files: tuple[str, ...] = ("train", "dev")  # of each split; on the Hub, "dev" is called "validation"
    header: tuple[str, ...] = ()  # column names of a TSV without a header
    columns: tuple[str, ...] = ()  # of text, text2 (if any) and label in the files, in lower case
    other_columns: tuple[str, ...] = ()  # of text and text2 on the Hub or, for custom, in tables like GLUE's


SPLITS = ("train", "dev", "dev_mm")  # dev_mm: MNLI's mismatched dev split
YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2", "label")
TASKS = {
    "mnli": Task("large", labels=("entailment", "neutral", "contradiction"), folder="MNLI",
                 files=("train", "dev_matched", "dev_mismatched"),
                 columns=("sentence1", "sentence2", "gold_label"), other_columns=("premise", "hypothesis")),
    "qqp": Task("large", ("accuracy", "f1"), YES_NO, "QQP", columns=("question1", "question2", "is_duplicate")),
    "qnli": Task("large", labels=ENTAILMENT, folder="QNLI", columns=("question", "sentence", "label")),
    "sst2": Task("large", labels=YES_NO, folder="SST-2", columns=("sentence", "label")),
    "cola": Task("small", ("matthews",), YES_NO, "CoLA", columns=("sentence", "label"),
                 header=("source", "label", "star", "sentence")),
    "rte": Task("small", labels=ENTAILMENT, folder="RTE", columns=PAIR),
    "mrpc": Task("small", ("accuracy", "f1"), YES_NO, "MRPC", columns=("#1 string", "#2 string", "quality"),
                 other_columns=PAIR[:2]),
    "stsb": Task("small", ("spearman",), folder="STS-B", columns=("sentence1", "sentence2", "score")),
    "squad2": Task("squad", ("f1",), folder="SQuAD"),
    "docs": Task("docs", columns=("text", "label"), labels=(
        "torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", ("accuracy", "f1"), columns=("text", "text2", "label"), other_columns=PAIR[:2]),
}
GLUE = tuple(TASKS)[:8]  # Table 1, left to right


DEFAULTS = {
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16, learning_rate=8e-4),  # see docs/results.md
}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,)),
    "squad": dict(epochs=(2.0, 3.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
}
RATES = {  # (task in the large group, large encoder) -> learning rates to try
    (False, False): (2e-5, 3e-5, 4e-5, 5e-5),
    (False, True): (7e-6, 1e-5, 2e-5, 3e-5),
    (True, False): (1e-5, 2e-5, 3e-5, 4e-5),
    (True, True): (5e-6, 7e-6, 1e-5, 2e-5),
}


def grid(group: str, dim: int, given: dict) -> list[dict[str, float]]:
    """The settings of Table 5 or 6 for an encoder of width `dim`; a given value replaces the grid's values."""
    tried = SWEEPS.get(group, SWEEPS["small"]) | {"learning_rate": RATES[group == "large", dim >= 1024]}
    tried |= {name: (given[name],) for name in SWEPT if name in given}
    return [dict(zip(tried, values)) for values in itertools.product(*tried.values())]


class Example(NamedTuple):
    """One or two texts and a label, as in the file."""
    text: str
    text2: str | None
    label: str | None  # None if it is to be predicted
    id: str = "0"  # its index or id in the file, or its position
    place: str = ""  # such as dev.csv, line 7


class Question(NamedTuple):
    """A SQuAD question. Each answer is (first character, text); a question without answers is unanswerable."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


class Encoded(NamedTuple):
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # per input, (length,) int64
    targets: Tensor  # labels (N,) int64 or float32; spans (N, 3) int64: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD: index of each input's question, and shift from context to input
    remark: str


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.IGNORECASE)


class Labels(NamedTuple):
    """The possible outputs of a task: one of several names or, if there are no names, a number."""
    metrics: tuple[str, ...]  # as in Task
    names: tuple[str, ...] = ()
    scale: float = 1.0  # the model predicts the number divided by this
    pairs: bool | None = None  # whether examples have a second text; None if both kinds are allowed

    def describe(self) -> str:
        """The kind of the examples and the labels in a few words."""
        names = f"{len(self.names)} labels ({', '.join(self.names):.200})" if self.names else "numbers as labels"
        return f"{'pairs of texts' if self.pairs else 'single texts'} with {names}"

    def target(self, example: Example) -> int | float:
        """The label in the form of the model's output: the index of its name, or a number; 0 if it is unknown. Raises
        UserError if the label or the number of texts does not fit the task."""
        label, is_pair = example.label, example.text2 is not None
        if self.pairs not in (None, is_pair):
            has = "has" if is_pair else "lacks"
            raise UserError(f"{example.place}: {has} a second text (text2), unlike the training examples")
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        if self.names or not NUMBER.fullmatch(label):
            known = ", ".join(self.names[:20]) or "numbers, since some have decimals"
            raise UserError(f"{example.place}: label {label!r} is not one of the training labels ({known}); correct it")
        return float(label) / self.scale


def labels_of(name: str, train: list) -> Labels:
    """The labels of task `name`: those of the release, if any. Otherwise, they are numbers if a training label has
    decimals, or else the distinct training labels in alphabetical order. Raises UserError if all labels are equal."""
    task = TASKS[name]
    pairs = train[0].text2 is not None if name == "custom" else len(task.columns) == 3
    if task.labels or name == "squad2":
        return Labels(task.metrics, task.labels, pairs=pairs)
    found = sorted({example.label for example in train})
    if len({unicodedata.normalize("NFC", label).casefold() for label in found}) < len(found):
        raise UserError(f"some training labels differ only in case or encoding ({', '.join(found):.200}); write "
                        "them alike")
    if len(found) == 1:
        raise UserError(f"all training examples have the label {found[0]!r}: use two labels or more")
    numbers = [float(label) for label in found if NUMBER.fullmatch(label)]
    if name == "custom" and all(number.is_integer() for number in numbers):
        return Labels(task.metrics if len(found) == 2 else ("accuracy",), tuple(found), pairs=pairs)
    largest = max(map(abs, numbers), default=0.0)  # for STS-B, this is 5, by which the official code divides
    return Labels(("spearman",), scale=largest or 1.0, pairs=pairs)
