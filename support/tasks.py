"""The tasks of fine-tuning as data: Table 1, and how each task is fine-tuned, Tables 5 and 6.

`docs` needs no download: which library does a documentation string belong to? `custom` reads your own files.
"""
import itertools
import math
import re
from typing import NamedTuple

from support.cli import UserError
from support.records import TABLES


# ---- 1. Tasks: section 4.1, App. B --------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1: where its files are, what their columns are called, how a model is scored."""
    group: str  # small | large | squad | docs: whose defaults and grid it has (Tables 5 and 6)
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()  # in the Hub's order; empty: a number, or found in the training split
    official: tuple[int, ...] = ()  # examples of each split of the original release
    folder: str = ""  # of the original release
    files: tuple[str, ...] = ("train", "dev")  # of each split; on the Hub dev is called validation
    formats: tuple[str, ...] = (".tsv",)  # of the files
    header: tuple[str, ...] = ()  # column names of a TSV without a header
    columns: tuple[str, ...] = ()  # text, text2 if any, label: in the files
    hub_columns: tuple[str, ...] = ()  # text and text2 on the Hub, if others
    f1: bool = False  # with two labels: also F1, precision and recall of the second label


SPLITS = ("train", "dev", "dev_mm")  # dev_mm: MNLI's mismatched one
YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2", "label")
TASKS = {
    "mnli": Task(
        "large", labels=("entailment", "neutral", "contradiction"), official=(392_702, 9_815, 9_832), folder="MNLI",
        files=("train", "dev_matched", "dev_mismatched"), columns=("sentence1", "sentence2", "gold_label"),
        hub_columns=("premise", "hypothesis")),
    "qqp": Task(
        "large", labels=YES_NO, official=(363_846, 40_430), folder="QQP",
        columns=("question1", "question2", "is_duplicate"), f1=True),
    "qnli": Task(
        "large", labels=ENTAILMENT, official=(104_743, 5_463), folder="QNLI",
        columns=("question", "sentence", "label")),
    "sst2": Task("large", labels=YES_NO, official=(67_349, 872), folder="SST-2", columns=("sentence", "label")),
    "cola": Task(
        "small", "matthews", labels=YES_NO, official=(8_551, 1_043), folder="CoLA", columns=("sentence", "label"),
        header=("source", "label", "star", "sentence")),
    "rte": Task("small", labels=ENTAILMENT, official=(2_490, 277), folder="RTE", columns=PAIR),
    "mrpc": Task(
        "small", labels=YES_NO, official=(3_668, 408), folder="MRPC", columns=("#1 String", "#2 String", "Quality"),
        hub_columns=PAIR[:2], f1=True),
    "stsb": Task(
        "small", "spearman", official=(5_749, 1_500), folder="STS-B", columns=("sentence1", "sentence2", "score")),
    "squad2": Task("squad", "f1", official=(130_319, 11_873), folder="SQuAD",
                   formats=(".json",)),
    "docs": Task(
        "docs", columns=("text", "label"),
        labels=("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", formats=TABLES, columns=("text", "text2", "label"), f1=True),
}
GLUE = tuple(TASKS)[:8]  # Table 1, left to right


# ---- 2. How each task is fine-tuned: Tables 5 and 6 -------------------------------------------------------------
DEFAULTS = {
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16, learning_rate=8e-4),  # the rate: docs/results.md
}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,)),
    "squad": dict(epochs=(2.0, 3.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
}
RATES = {  # (whether the task is of the large group, whether the encoder is large) -> learning rates to try
    (False, False): (2e-5, 3e-5, 4e-5, 5e-5),
    (False, True): (7e-6, 1e-5, 2e-5, 3e-5),
    (True, False): (1e-5, 2e-5, 3e-5, 4e-5),
    (True, True): (5e-6, 7e-6, 1e-5, 2e-5),
}


def grid(group: str, dim: int, given: dict) -> list[dict[str, float]]:
    """The settings of Table 5 or 6 for an encoder of width dim; a value that is given replaces all that are tried."""
    group = "small" if group == "docs" else group
    tried = SWEEPS[group] | {"learning_rate": RATES[group == "large", dim >= 1024]}
    tried |= {name: (given[name],) for name in SWEPT if name in given}
    return [dict(zip(tried, values)) for values in itertools.product(*tried.values())]


# ---- 3. Examples and labels ---------------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label, as they stand in the file."""
    text: str
    text2: str | None
    label: str | None  # None: to be predicted
    id: str = "0"  # its index or id in the file, or its number
    place: str = ""  # such as dev.csv, line 7


class Question(NamedTuple):
    """A SQuAD question; without answers it is unanswerable. `answers` are (first character, text)."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def number_of(label: str) -> float | None:
    """The finite number that a label spells, or None."""
    value = float(label) if NUMBER.fullmatch(label) else math.inf
    return value if math.isfinite(value) else None


class Labels(NamedTuple):
    """What a task predicts: one of several names, or, without names, a number."""
    metric: str
    names: tuple[str, ...] = ()
    scale: float = 1.0  # the model predicts the number divided by this
    f1: bool = False  # as in Task

    def target(self, example: Example) -> int | float:
        """The label as the model's output: the index of its name, or a number; 0 if it is to be predicted. UserError
        for a label that the task does not have."""
        label = example.label
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        value = number_of(label)
        if self.names or value is None:
            known = ", ".join(self.names[:20]) or "numbers"
            raise UserError(f"{example.place}: label {label!r} is not one of the training labels: {known}")
        return value / self.scale


def labels_of(name: str, train: list) -> Labels:
    """The labels of task `name`: those of the release, else numbers if the training labels have fractions, else their
    names in alphabetical order. UserError if they are all equal, or if only some of them are numbers."""
    task = TASKS[name]
    if task.labels or name == "squad2":
        return Labels(task.metric, task.labels, f1=task.f1)
    found = sorted({example.label for example in train})
    if len(found) == 1:
        raise UserError(f"all training examples have the label {found[0]!r}: use two labels or more")
    numbers = [number_of(label) for label in found]
    has_fraction = any(number is not None and not number.is_integer() for number in numbers)
    if name == "custom" and not has_fraction:
        return Labels(task.metric, tuple(found), f1=task.f1)
    for example in train:
        if number_of(example.label) is None:
            raise UserError(f"{example.place}: label {example.label!r} is not a number, but other labels have "
                            "decimals; remove that row, or add a letter to all labels to make them names")
    largest = max(abs(number) for number in numbers)  # STS-B's 5, by which the official code divides
    return Labels("spearman", scale=largest or 1.0)
