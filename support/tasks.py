"""The fine-tuning tasks of Table 1: their settings (Tables 5 and 6), examples and labels. `docs` classifies
documentation strings by library and needs no download; `custom` reads your own files."""
import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas

from support.program import UserError, path_of
from support.corpus import Text, docs_by_hash, hub_records, in_validation, ngrams, records_of, scored_docs
from support.corpus import split_name
from support.docs import LIBRARIES


# ---- 1. Tasks -----------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1, as the Hub has it."""
    group: str  # small | large | squad | docs: determines the defaults and the grid
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, see labels_of
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of one or two texts; SQuAD: of all that is read
    dev: tuple[str, ...] = ("validation",)  # the dev split and, for MNLI, the mismatched one, for custom, test
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
    "squad2": Task("squad", ("f1",), columns=("id", "question", "context", "answers"), kind="spans",
                   hub="rajpurkar/squad_v2"),
    "docs": Task("docs", columns=("text",), labels=LIBRARIES),
    "custom": Task("small", ("accuracy", "f1"), columns=("text", "text2"), dev=("dev", "test")),
}
GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")  # Table 1, left to right


# ---- 2. Settings --------------------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of a job; each group of tasks has its own defaults."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2, and for docs 2.2e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step and per evaluation batch
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up; then linear decay to 0
    seq_len: int = 512  # longest input in tokens; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head
    weight_decay: float = 0.01  # weight decay of all parameters
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # for training; evaluation always uses fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    l2: float = 0.0  # --frozen: strength of L2 regularization; 0 chooses it on the training split


DEFAULTS = {  # by group
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16),
}
PROBED = ("seq_len", "batch_size", "l2")  # the settings that a linear probe uses
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
SWEPT = ("learning_rate", *dict.fromkeys(name for sweep in SWEEPS.values() for name in sweep))


def defaults_of(task: str) -> dict:
    """The settings of a task that differ from the fields' values; none for glue."""
    return DEFAULTS[TASKS[task].group] if task in TASKS else {}


def tune_of(task: str, given: dict, dim: int) -> TuneConfig:
    """The settings of a task for an encoder of width `dim`: given values, else those of its group, else the fields'."""
    tune = TuneConfig(**(defaults_of(task) | given))
    rate = 8e-4 / 36 if task == "docs" else 3e-5  # for base; a narrower encoder needs a higher one
    return replace(tune, learning_rate=tune.learning_rate or rate * (768 / dim) ** 2)


def grid(task: str, tune: TuneConfig, dim: int, given: dict) -> list[TuneConfig]:
    """The settings that Table 5 or 6 tries for an encoder of width `dim`. Fields in `given` keep their values."""
    group = TASKS[task].group if TASKS[task].group in SWEEPS else "small"
    smaller = max(1, 768 / dim) ** 2  # a smaller encoder than base needs higher rates
    narrow, wide = RATES[group]
    rates = wide if dim >= 1024 else narrow
    tried = SWEEPS[group] | {"learning_rate": [rate * smaller for rate in rates]}
    tried |= {name: (getattr(tune, name),) for name in SWEPT if name in given}
    return [replace(tune, **dict(zip(tried, values))) for values in itertools.product(*tried.values())]


# ---- 3. Examples and labels ---------------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label: a name, a number in a regression, or None if a test file has none."""
    text: str
    text2: str | None
    label: str | float | None
    others: dict = {}  # the other columns of its record, which predictions repeat


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

    def target(self, label: str | float | None) -> int | float:
        """A label in the form of the model's output: the index of its name, or a number; 0 if there is none."""
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        if self.names or not NUMBER.fullmatch(str(label)):
            known = ", ".join(self.names[:20]) or "numbers"
            raise UserError(f"label {label!r} is not one of the training labels ({known})")
        return float(label) / self.scale


def labels_of(name: str, train: list) -> Labels:
    """The labels of task `name`: those of the release, numbers if the training labels are numbers and some have
    decimals, or else the distinct training labels in alphabetical order."""
    task = TASKS[name]
    if task.labels or task.kind != "classification":
        return Labels(task.metrics, task.labels)
    names = tuple(sorted({str(example.label) for example in train}))
    if all(map(NUMBER.fullmatch, names)) and any("." in label for label in names):
        largest = max(abs(float(label)) for label in names)  # 5 for STS-B, as in the official code
        return Labels(("spearman",), scale=largest or 1.0)
    return Labels(tuple(metric for metric in task.metrics if metric != "f1" or len(names) == 2), names)


# ---- 4. Reading examples ------------------------------------------------------------------------------------
def read_task(name: str, data: str | None, settings: dict) -> dict[str, list]:
    """The examples or questions of each split: train, dev, dev_mm of MNLI, and test of custom. `data` is a folder with
    files of records, such as the Hub's; None means the Hub. Without dev, a tenth of train is dev. For docs, `settings`
    of the pre-training run has the fraction that it held out and its cache."""
    task = TASKS[name]
    if name == "docs":
        splits = read_docs_task(settings.get("val_share", Text.val_share), settings.get("cache", Text.cache))
    else:
        splits = {split: [*records(name, data, part)] for split, part in
                  zip(("train", "dev", "test" if name == "custom" else "dev_mm"), ("train", *task.dev))}
        splits = {split: read for split, read in splits.items() if read or split in ("train", "dev")}
        if name == "custom" and not splits["dev"]:
            splits |= with_dev(splits["train"])
        if task.kind == "spans":
            splits = {split: questions_of(read) for split, read in splits.items()}
            splits["train"] = with_answers(name, splits["train"])
        else:
            splits = {split: examples_of(name, split, read) for split, read in splits.items()}
    for split, examples in splits.items():
        if not examples:
            raise UserError(f"--task {name}: its {split} split has no examples; see --data")
    return splits


def read_docs_task(val_share: float, cache: str) -> dict[str, list[Example]]:
    """Documentation strings with their libraries: dev, on which no model was trained (see split_documents), and at most
    100 per library for training, none of which shares 13 words in a row with a dev text."""
    scored = scored_docs(val_share, cache)
    known = set().union(*[ngrams(text) for _, text in scored])
    count = Counter()
    train = []
    for library, text in docs_by_hash(cache):
        if count[library] < 100 and not in_validation(text, val_share + 0.1) and known.isdisjoint(ngrams(text)):
            count[library] += 1
            train.append((library, text))
    return {split: [Example(text, None, library) for library, text in chosen]
            for split, chosen in {"train": train, "dev": scored}.items()}


def records(name: str, data: str | None, part: str) -> Iterable[dict]:
    """The records of a split: on the Hub, or in files such as PART.csv or PART-00000-of-00001.parquet, in a folder
    `data` or the task's folder inside. Raises UserError if a file lacks a column."""
    task = TASKS[name]
    hub = task.hub or f"nyu-mll/glue:{name}"
    if data is None:
        return hub_records(f"hf:{hub}", part)
    inside = path_of(data) / re.split("[/:]", hub)[-1]
    files = sorted((inside if inside.is_dir() else path_of(data)).glob(f"{part}*"))
    needed = task.columns[:1] if name == "custom" else task.columns  # its second text is optional
    if task.kind == "classification" and part != "test":
        needed += ("label",)
    found = []
    for file in [file for file in files if split_name(file)[1] in READERS]:
        rows = [*READERS[split_name(file)[1]](file)]
        if rows and not rows[0].keys() >= {*needed}:
            raise UserError(f"{file}: needs the columns {', '.join(needed)}, but has {', '.join(rows[0])}")
        found += rows
    return found


def table_rows(path: Path) -> list[dict]:
    """The rows of a .csv or .tsv file, whose cells are texts, as written. Raises UserError if it cannot be read."""
    # A .tsv has no quotes, as in GLUE's own files.
    how = dict(sep="\t", quoting=csv.QUOTE_NONE) if split_name(path)[1] == ".tsv" else {}
    try:
        table = pandas.read_csv(path, dtype=str, keep_default_na=False, **how)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(table.index, pandas.RangeIndex):  # where pandas has taken the first cells for names of the rows
        raise UserError(f"{path}: its rows have more cells than the header")
    return table.to_dict("records")


READERS = {".csv": table_rows, ".tsv": table_rows, ".jsonl": records_of, ".parquet": records_of}


def with_dev(train: list[dict]) -> dict[str, list[dict]]:
    """Nine tenths of the training records as train, and one tenth, drawn at random, as dev."""
    order = np.random.default_rng(0).permutation(len(train))
    count = len(train) // 10
    print(f"--data has no file dev: {count:,} of {len(train):,} examples in train are dev")
    return {"train": [train[i] for i in order[count:]], "dev": [train[i] for i in order[:count]]}


def examples_of(name: str, split: str, found: list[dict]) -> list[Example]:
    """Records of a task that classifies texts -> examples. Raises UserError if a text or label is missing."""
    task, examples = TASKS[name], []
    for number, record in enumerate(found, start=1):
        texts = [record.get(column) for column in task.columns]
        if name == "custom" and texts[1] is None:
            texts = texts[:1]  # the second text is optional
        label = label_of(task, record.get("label"))
        if not all(isinstance(text, str) for text in texts) or (label is None and split != "test"):
            raise UserError(f"--task {name}, {split}, row {number}: needs text in {' and '.join(task.columns)}, and a "
                            f"label, but has {record!r:.200}")
        others = {column: cell for column, cell in record.items() if column not in (*task.columns, "label")}
        examples.append(Example(texts[0], texts[1] if len(texts) == 2 else None, label, others))
    return examples


def label_of(task: Task, label) -> str | float | None:
    """A label as its name, or a number. The Hub's names are numbers from 0, and STS-B's 3.2 is 3.200000047683716 there.
    None if the label is missing."""
    if label in (None, "") or label != label or (task.labels and label not in range(len(task.labels))):  # or NaN
        return None
    if isinstance(label, float) and not task.labels:
        return float(f"{label:.6g}")
    return task.labels[int(label)] if task.labels else str(label)


def questions_of(found: list[dict]) -> list[Question]:
    """Records of SQuAD -> questions."""
    return [Question(record["id"], record["question"], record["context"],
                     tuple(zip(record["answers"]["answer_start"], record["answers"]["text"]))) for record in found]


def with_answers(name: str, questions: list[Question]) -> list[Question]:
    """The training questions whose answer stands where the file says. Raises UserError if fewer than half do."""
    kept = [q for q in questions if all(q.context[start:start + len(text)] == text for start, text in q.answers[:1])]
    wrong = len(questions) - len(kept)
    if wrong > len(kept):
        raise UserError(f"--task {name}: {wrong:,} of {len(questions):,} training answers are not in their context at "
                        "answer_start, which counts characters from 0; correct it")
    if wrong:
        print(f"--task {name}: {wrong:,} training questions are left out: their answer is not at answer_start")
    return kept
