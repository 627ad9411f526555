"""The fine-tuning tasks of Table 1, their settings (Tables 5 and 6), examples and labels. `docs` classifies
documentation strings by library and needs no download; `custom` reads your own files."""
import itertools
import re
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import NamedTuple

from support.program.cli import fields_of, require
from support.program.errors import UserError


# ---- 1. Tasks -----------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1, as the Hub has it."""
    group: str  # small | large | squad | docs: determines the defaults and the grid
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, see labels_of
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of one or two texts
    dev: tuple[str, ...] = ("validation",)  # the dev split and, for MNLI, the mismatched one
    kind: str = "classification"  # or spans; see KINDS in finetune.py
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
    "squad2": Task("squad", ("f1",), kind="spans", hub="rajpurkar/squad_v2"),
    "docs": Task("docs", columns=("text",), labels=(
        "torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", ("accuracy", "f1"), columns=("text", "text2")),
}
GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")  # Table 1, left to right


# ---- 2. Settings --------------------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of a job; each group of tasks has its own defaults."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step and per evaluation batch
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up; then linear decay to 0
    seq_len: int = 512  # longest input in tokens; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head
    weight_decay: float = 0.01  # weight decay of all parameters
    precision: str = "auto"  # auto | fp32 | bf16: for training; evaluation always uses fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    l2: float = 0.0  # --frozen: strength of L2 regularization; 0 chooses it on the training split

    def __post_init__(self):
        """Raises UserError for a common mistake; other bad values fail later."""
        require(
            self,
            ("epochs", 0 < self.epochs <= 10_000, "a number above 0, at most 10,000"),
            ("batch_size", 1 <= self.batch_size <= 10_000, "1 to 10,000"),
            ("warmup_share", 0 <= self.warmup_share < 1, "0 or more, below 1"),
            ("seq_len", self.seq_len >= 8, "8 or more"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"))


DEFAULTS = {  # by group
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16, learning_rate=8e-4),  # for 128 dimensions
}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,)),
    "squad": dict(epochs=(2.0, 3.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
}
RATES = {  # group -> learning rates to try for base's width and, from 1,024 dimensions, for large++'s
    "small": ((2e-5, 3e-5, 4e-5, 5e-5), (7e-6, 1e-5, 2e-5, 3e-5)),
    "large": ((1e-5, 2e-5, 3e-5, 4e-5), (5e-6, 7e-6, 1e-5, 2e-5)),
    "squad": ((2e-5, 3e-5, 4e-5, 5e-5), (7e-6, 1e-5, 2e-5, 3e-5)),
}


def tune_of(task: str, given: dict, dim: int) -> TuneConfig:
    """The settings of a task for an encoder of width `dim`: given values, else those of its group, else the fields'."""
    tune = TuneConfig(**(DEFAULTS[TASKS[task].group] | given))
    rate = tune.learning_rate or 3e-5 * (768 / dim) ** 2  # a smaller encoder than base needs a higher rate
    return replace(tune, learning_rate=rate)


def grid(task: str, tune: TuneConfig, dim: int, given: dict) -> list[TuneConfig]:
    """The settings that Table 5 or 6 tries for an encoder of width `dim`. Fields in `given` keep their values."""
    group = TASKS[task].group if TASKS[task].group in SWEEPS else "small"
    smaller = max(1, 768 / dim) ** 2  # a smaller encoder than base needs higher rates
    narrow, wide = RATES[group]
    rates = wide if dim >= 1024 else narrow
    tried = SWEEPS[group] | {"learning_rate": [rate * smaller for rate in rates]}
    tried |= {name: (getattr(tune, name),) for name in SWEPT if name in given}
    return [replace(tune, **dict(zip(tried, values))) for values in itertools.product(*tried.values())]


def check_flags(flags: Namespace):
    """Raises UserError for a flag whose value is not allowed, or that is missing."""
    TuneConfig(**fields_of(TuneConfig, vars(flags)))
    if flags.task == "docs" and flags.data:
        raise UserError("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if flags.task == "custom" and not flags.data:
        raise UserError("--task custom: needs --data, a folder with a file train")
    if flags.seeds is not None and flags.seeds < 1:
        raise UserError(f"seeds={flags.seeds}: use 1 or more")
    if flags.frozen and flags.sweep:
        raise UserError("--sweep: a linear probe has no grid; leave out --frozen")
    if flags.task == "squad2" and flags.frozen:
        raise UserError("--frozen: squad2 needs an encoder that is fine-tuned")


# ---- 3. Examples and labels ---------------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label, as in the file."""
    text: str
    text2: str | None
    label: str | None  # None if a test file has none
    place: str = ""  # such as dev.csv, row 7


class Question(NamedTuple):
    """A SQuAD question. Each answer is (first character, text); a question without answers is unanswerable."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    place: str = ""


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.IGNORECASE)


class Labels(NamedTuple):
    """The possible outputs of a task: one of several names or, if there are no names, a number."""
    metrics: tuple[str, ...]  # as in Task
    names: tuple[str, ...] = ()
    scale: float = 1.0  # the model predicts the number divided by this

    def target(self, example: Example) -> int | float:
        """The label in the form of the model's output: the index of its name, or a number; 0 if there is none."""
        label = example.label
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        if self.names or not NUMBER.fullmatch(label):
            known = ", ".join(self.names[:20]) or "numbers"
            raise UserError(f"{example.place}: label {label!r} is not one of the training labels ({known}); correct it")
        return float(label) / self.scale


def labels_of(name: str, train: list) -> Labels:
    """The labels of task `name`: those of the release, if any. Otherwise, they are numbers if a training label is not
    whole (1.0 is) or the task's metric is spearman, or else the distinct training labels in alphabetical order."""
    task = TASKS[name]
    if task.labels or task.kind != "classification":
        return Labels(task.metrics, task.labels)
    names = sorted({example.label for example in train})
    numbers = [float(label) for label in names if NUMBER.fullmatch(label)]
    if task.metrics[0] != "spearman" and all(number.is_integer() for number in numbers):
        metrics = [metric for metric in task.metrics if metric != "f1" or len(names) == 2]
        return Labels(tuple(metrics), tuple(names))
    largest = max(map(abs, numbers), default=0.0)  # for STS-B, this is 5, by which the official code divides
    return Labels(("spearman",), scale=largest or 1.0)
