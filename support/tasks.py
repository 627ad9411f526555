"""The fine-tuning tasks of Table 1, and their settings (Tables 5 and 6). `docs`, `modules` and `bshift` need no
download; `custom` reads your own files."""
import itertools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from support.docs import LIBRARIES, MODULES
from support.program import UserError


# ---- 1. Tasks -----------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1, as the Hub has it."""
    group: str  # small | large | squad | docs: determines the defaults and the grid
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, see labels_of in examples.py
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of one or two texts
    dev: tuple[str, ...] = ("validation",)  # the dev split and, for MNLI, the mismatched one, for custom, test
    kind: str = "classification"  # or spans; see KINDS in kinds.py
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
    "docs": Task("docs", labels=LIBRARIES),
    "modules": Task("docs", labels=MODULES),
    "bshift": Task("docs", labels=("original", "exchanged")),
    "custom": Task("small", ("accuracy", "f1"), dev=("dev", "test")),
}
GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")  # Table 1, left to right


def task_names(text: str) -> list[str]:
    """The tasks in a text such as rte,mrpc or glue. Raises UserError for an unknown one."""
    names = [name for part in text.split(",") for name in (GLUE if part == "glue" else [part])]
    for name in names:
        if name not in TASKS:
            raise UserError(f"--task {text}: use {', '.join(TASKS)}, glue, or several joined by commas")
    return names


# ---- 2. Settings --------------------------------------------------------------------------------------------
DEFAULTS = {  # by group: differences from the fields' values
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16),
}
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,)),
}
SWEEPS["squad"] = SWEEPS["small"] | dict(epochs=(2.0, 3.0))
RATES = {  # group -> learning rates to try for base's width and, from 1,024 dimensions, for large++'s
    "small": ((2e-5, 3e-5, 4e-5, 5e-5), (7e-6, 1e-5, 2e-5, 3e-5)),
    "large": ((1e-5, 2e-5, 3e-5, 4e-5), (5e-6, 7e-6, 1e-5, 2e-5)),
}
RATES["squad"] = RATES["small"]
SWEPT = ("learning_rate", *dict.fromkeys(name for sweep in SWEEPS.values() for name in sweep))


@dataclass(frozen=True)
class TuneConfig:
    """Settings of a job; each group of tasks has its own defaults."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2; tasks from docs: 2.2e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up; then linear decay to 0
    seq_len: int = 512  # longest input in tokens; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head
    weight_decay: float = 0.01  # weight decay of all parameters
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # for training and choosing checkpoints; scores always use fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    l2: float = 0.0  # --frozen: strength of L2 regularization; 0 chooses it on the training split

    PROBED = {"seq_len", "l2"}  # no field: the settings that a linear probe uses

    @classmethod
    def defaults(cls, task: str) -> dict:
        """The settings of a task that differ from the fields' values; none for several tasks."""
        return DEFAULTS[TASKS[task].group] if task in TASKS else {}

    @classmethod
    def of(cls, task: str, given: dict, dim: int) -> "TuneConfig":
        """The settings of a task for an encoder of width `dim`: given values, else the task's, else the fields'."""
        tune = cls(**(cls.defaults(task) | given))
        rate = 8e-4 / 36 if TASKS[task].group == "docs" else 3e-5  # for base; a narrower encoder needs a higher one
        return replace(tune, learning_rate=tune.learning_rate or rate * (768 / dim) ** 2)

    def grid(self, task: str, dim: int, given: dict) -> list["TuneConfig"]:
        """The settings that Table 5 or 6 tries for an encoder of width `dim`. Given values stay."""
        group = TASKS[task].group if TASKS[task].group in SWEEPS else "small"
        smaller = max(1, 768 / dim) ** 2  # a smaller encoder than base needs higher rates
        narrow, wide = RATES[group]
        rates = wide if dim >= 1024 else narrow
        tried = SWEEPS[group] | {"learning_rate": [rate * smaller for rate in rates]}
        tried |= {name: (given[name],) for name in SWEPT if name in given}
        return [replace(self, **dict(zip(tried, values))) for values in itertools.product(*tried.values())]
