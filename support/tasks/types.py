"""The fine-tuning tasks of Table 1, their examples and labels. `docs` classifies documentation strings by library and
needs no download; `custom` reads your own files."""
import re
from typing import NamedTuple

import numpy as np
from torch import Tensor

from support.program.errors import UserError


# ---- 1. Tasks -----------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1, as the Hub has it."""
    group: str  # small | large | squad | docs: determines the defaults and the grid (Tables 5 and 6)
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, numbers or the training split's labels
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of one or two texts
    dev: tuple[str, ...] = ("validation",)  # the dev split and, for MNLI, the mismatched one
    in_glue: bool = True
    kind: str = "classification"  # or spans; see KINDS in setup.py
    hub: str = ""  # data set on the Hub, NAME[:CONFIG]; default: nyu-mll/glue:TASK


YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "mnli": Task("large", labels=("entailment", "neutral", "contradiction"), columns=("premise", "hypothesis"),
                 dev=("validation_matched", "validation_mismatched")),
    "qqp": Task("large", ("accuracy", "f1"), YES_NO, ("question1", "question2")),
    "qnli": Task("large", labels=ENTAILMENT, columns=("question", "sentence")),
    "sst2": Task("large", labels=YES_NO, columns=("sentence",)),
    "cola": Task("small", ("matthews",), YES_NO, ("sentence",)),
    "rte": Task("small", labels=ENTAILMENT),
    "mrpc": Task("small", ("accuracy", "f1"), YES_NO),
    "stsb": Task("small", ("spearman",)),
    "squad2": Task("squad", ("f1",), in_glue=False, kind="spans", hub="rajpurkar/squad_v2"),
    "docs": Task("docs", columns=("text",), in_glue=False, labels=(
        "torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", ("accuracy", "f1"), columns=("text", "text2"), in_glue=False),
}
GLUE = tuple(name for name, task in TASKS.items() if task.in_glue)  # Table 1, left to right


# ---- 2. Examples and labels ---------------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label, as in the file."""
    text: str
    text2: str | None
    label: str
    place: str = ""  # such as dev.csv, row 7


class Question(NamedTuple):
    """A SQuAD question. Each answer is (first character, text); a question without answers is unanswerable."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.IGNORECASE)


class Labels(NamedTuple):
    """The possible outputs of a task: one of several names or, if there are no names, a number."""
    metrics: tuple[str, ...]  # as in Task
    names: tuple[str, ...] = ()
    scale: float = 1.0  # the model predicts the number divided by this

    def target(self, example: Example) -> int | float:
        """The label in the form of the model's output: the index of its name, or a number."""
        label = example.label
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
    if task.labels or task.kind != "classification":
        return Labels(task.metrics, task.labels)
    names = sorted({example.label for example in train})
    commas = [label for label in names if NUMBER.fullmatch(label.replace(",", ".")) and "," in label]
    if commas:
        raise UserError(f"label {commas[0]!r}: write decimals with a point")
    if len(names) == 1:
        raise UserError(f"all training examples have the label {names[0]!r}: use two labels or more")
    numbers = [float(label) for label in names if NUMBER.fullmatch(label)]
    if name == "custom" and all(number.is_integer() for number in numbers):
        return Labels(task.metrics if len(names) == 2 else ("accuracy",), tuple(names))
    largest = max(map(abs, numbers), default=0.0)  # for STS-B, this is 5, by which the official code divides
    return Labels(("spearman",), scale=largest or 1.0)


class Encoded(NamedTuple):
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # per input, (length,) int64
    targets: Tensor  # labels (N,) int64 or float32; spans (N, 3) int64: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD: index of each input's question, and shift from context to input
    remark: str
