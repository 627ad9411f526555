"""The tasks of fine-tuning, as data: Table 1, and how each is fine-tuned, Tables 5 and 6.

`docs` needs no download: which library does a documentation string belong to? `custom` reads files of your own.
"""
import itertools
from typing import NamedTuple


# ---- 1. Tasks: section 4.1, App. B --------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1: where its files are, what their columns are called, how a model is scored."""
    group: str  # small | large | squad | docs: whose defaults and grid it has (Tables 5 and 6)
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()  # in the Hub's order; empty: a number, or found in the training split
    official: tuple[int, ...] = ()  # examples of each split of the original release
    folder: str = ""  # of the original release
    files: tuple[str, ...] = ("train", "dev")  # of each split; on the Hub dev is called validation
    suffix: str = ".tsv"  # of the files
    header: tuple[str, ...] = ()  # column names of a TSV without a header
    columns: tuple[str, ...] = ()  # text, text2 if any, label: in the files
    hub_columns: tuple[str, ...] = ()  # text and text2 on the Hub, if others


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
        columns=("question1", "question2", "is_duplicate")),
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
        hub_columns=PAIR[:2]),
    "stsb": Task(
        "small", "spearman", official=(5_749, 1_500), folder="STS-B", columns=("sentence1", "sentence2", "score")),
    "squad2": Task("squad", "f1", official=(130_319, 11_873), folder="SQuAD", suffix="*.json"),
    "docs": Task(
        "docs", columns=("text", "label"),
        labels=("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", suffix=".*", columns=("text", "text2", "label")),
}
GLUE = tuple(TASKS)[:8]  # Table 1, left to right


# ---- 2. How they are fine-tuned: Tables 5 and 6 -------------------------------------------------------------
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
