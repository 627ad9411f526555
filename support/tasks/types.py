"""The fine-tuning tasks of Table 1 and their grids (Tables 5 and 6). `docs` classifies documentation strings by library
and needs no download; `custom` reads your own files."""
import itertools
import math
import re
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from support.program.cli import require
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


# ---- 2. Grids -----------------------------------------------------------------------------------------------
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


PROBED = {"batch_size", "seq_len", "l2"}  # the settings that --frozen uses


def check_tune(t):
    """Raises ValueError for the first field of a finetune.TuneConfig whose value is not allowed."""
    require(
        t,
        ("epochs", 0 < t.epochs <= 10_000, "a number above 0, at most 10,000"),
        ("batch_size", 1 <= t.batch_size <= 10_000, "1 to 10,000"),
        ("seq_len", t.seq_len >= 8, "8 or more"),
        ("precision", t.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"),
        *[(name, 0 <= getattr(t, name) < math.inf, "0 or more") for name in ("learning_rate", "weight_decay", "l2")],
        *[(name, 0 <= getattr(t, name) < 1, "0 or more, below 1") for name in ("warmup_share", "dropout")],
        *[(name, getattr(t, name) >= 1, "1 or more") for name in ("max_query", "doc_stride", "max_answer")])


def check_options(options, given: dict):
    """Raises ValueError for a flag, or one of the `given` fields of TuneConfig, that is missing or has no effect."""
    if options.task == "docs" and options.data:
        raise ValueError("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if options.task == "custom" and not options.data:
        raise ValueError("--task custom: needs --data, a folder with train and dev")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"seeds={options.seeds}: use 1 or more")
    if not options.frozen:
        if "l2" in given:
            raise ValueError("--l2: needs --frozen")
        return
    unused = sorted(given.keys() - PROBED)
    if options.sweep:
        unused.append("sweep")
    if options.seeds is not None and not options.init.startswith("random:"):
        unused.append("seeds")  # nothing is random
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')}: has no effect with --frozen")
    if options.task in TASKS and TASKS[options.task].kind != "classification":
        raise ValueError(f"--frozen: {options.task} needs an encoder that is fine-tuned")


def grid(group: str, dim: int, given: dict) -> list[dict[str, float]]:
    """The settings of Table 5 or 6 for an encoder of width `dim`; a given value replaces them."""
    smaller = max(1, 768 / dim) ** 2  # an encoder smaller than base needs higher rates, as in TuneConfig
    rates = [rate * smaller for rate in RATES[group == "large", dim >= 1024]]
    tried = SWEEPS.get(group, SWEEPS["small"]) | {"learning_rate": rates}
    tried |= {name: (given[name],) for name in SWEPT if name in given}
    return [dict(zip(tried, values)) for values in itertools.product(*tried.values())]


# ---- 3. Examples and labels ---------------------------------------------------------------------------------
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

    @property
    def first_metric(self) -> str:
        """The metric that selects checkpoints, and is the value of a run."""
        return self.metrics[0]

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


# ---- 4. A kind of task --------------------------------------------------------------------------------------
class Encoded(NamedTuple):
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # per input, (length,) int64
    targets: Tensor  # labels (N,) int64 or float32; spans (N, 3) int64: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD: index of each input's question, and shift from context to input
    remark: str


class Kind(Protocol):
    """What finetune.py must know about a kind of task: Classification (classification.py) or Spans (squad.py)."""
    labels: Labels

    def encode(self, examples: list) -> Encoded:
        """The inputs and targets of a split. Raises UserError if an example does not fit the task."""

    def head(self) -> nn.Module:
        """A new head: H^L (B, m, d) and padding (B, m) bool -> logits; see support/model/heads.py."""

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """The outputs (B, K) float32 of a batch that `score` needs."""

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float | None], dict[str, str]]:
        """The outputs of a whole split (N, K) -> its metrics in percent, and files of predictions by name."""
