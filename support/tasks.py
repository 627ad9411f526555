"""The tasks of fine-tuning, as data: where their files are, what is read from them, and how a model is scored.

`docs` needs no download: which library does a documentation string belong to? `custom` reads files of your own.
"""
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from support.corpus import in_validation
from support.docs_corpus import read_docs
from support.files import UserError, load, read_json


# ---- 1. Tasks: section 4.1, App. B --------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """One column of Table 1, as data: where it is, what its columns are called, how it is measured."""
    group: str  # small | large | squad | docs: whose defaults and grid it has (Tables 5 and 6)
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()  # in the Hub's order; empty: a number, or found in the training part
    folder: str = ""  # of the original release
    files: tuple[str, ...] = ("train.tsv", "dev.tsv")
    header: tuple[str, ...] = ()  # column names of a TSV without a header
    columns: tuple[str, ...] = ()  # text, text2 if any, label: in the files
    hub: str = ""  # NAME:CONFIG
    splits: tuple[str, ...] = ("train", "validation")
    hub_columns: tuple[str, ...] = ()  # on the Hub, if others
    rows: tuple[int, ...] = ()  # official counts: train, dev, dev_mm


PARTS = ("train", "dev", "dev_mm")  # dev_mm: MNLI's mismatched part
YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2", "label")
TASKS = {
    "mnli": Task(
        "large", labels=("entailment", "neutral", "contradiction"), rows=(392_702, 9_815, 9_832), folder="MNLI",
        files=("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"), columns=("sentence1", "sentence2", "gold_label"),
        hub="nyu-mll/glue:mnli", splits=("train", "validation_matched", "validation_mismatched"),
        hub_columns=("premise", "hypothesis", "label")),
    "qqp": Task(
        "large", labels=YES_NO, rows=(363_846, 40_430), folder="QQP",
        columns=("question1", "question2", "is_duplicate"), hub="nyu-mll/glue:qqp",
        hub_columns=("question1", "question2", "label")),
    "qnli": Task(
        "large", labels=ENTAILMENT, rows=(104_743, 5_463), folder="QNLI", columns=("question", "sentence", "label"),
        hub="nyu-mll/glue:qnli"),
    "sst2": Task(
        "large", labels=YES_NO, rows=(67_349, 872), folder="SST-2", columns=("sentence", "label"),
        hub="nyu-mll/glue:sst2"),
    "cola": Task(
        "small", "matthews", labels=YES_NO, rows=(8_551, 1_043), folder="CoLA", columns=("sentence", "label"),
        header=("source", "label", "star", "sentence"), hub="nyu-mll/glue:cola"),
    "rte": Task(
        "small", labels=ENTAILMENT, rows=(2_490, 277), folder="RTE", columns=PAIR, hub="nyu-mll/glue:rte"),
    "mrpc": Task(
        "small", labels=YES_NO, rows=(3_668, 408), folder="MRPC", columns=("#1 String", "#2 String", "Quality"),
        hub="nyu-mll/glue:mrpc", hub_columns=PAIR),
    "stsb": Task(
        "small", "spearman", rows=(5_749, 1_500), folder="STS-B", columns=("sentence1", "sentence2", "score"),
        hub="nyu-mll/glue:stsb", hub_columns=PAIR),
    "squad2": Task(
        "squad", "f1", rows=(130_319, 11_873), folder="SQuAD", files=("train*.json", "dev*.json"),
        hub="rajpurkar/squad_v2"),
    "docs": Task(
        "docs", columns=("text", "label"),
        labels=("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task("small", files=("train.*", "dev.*"), columns=("text", "text2", "label")),
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


def grid(group: str, dim: int, given: dict) -> list[dict]:
    """The settings of Table 5 or 6; a flag that is given replaces all values of its row."""
    group = "small" if group == "docs" else group
    rows = SWEEPS[group] | {"learning_rate": RATES[group == "large", dim >= 1024]}
    for name in SWEPT:
        if name in given:
            rows[name] = (given[name],)
    return [dict(zip(rows, values)) for values in itertools.product(*rows.values())]


# ---- 3. Reading the parts of a task -------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label as it stands in the file."""
    text: str
    text2: str | None
    label: str | None  # None: to be predicted


class Question(NamedTuple):
    """A SQuAD question; without answers it is unanswerable. `answers` are (first character, text)."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


class Encoded(NamedTuple):
    """A part of a task as tokens."""
    ids: list[np.ndarray]  # of each input, (length,) int64
    targets: Tensor  # (N,) int64 or float32 labels; (N, 3) int64 for spans: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD, of each input: number of its question, tokens of the context before it
    remarks: list[str]


LOADERS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".parquet": "parquet"}
INPUTS = LOADERS | {".txt": "text"}  # of texts without labels


def records_of(path: Path, header: tuple[str, ...] = (), bad_lines: str = "skip") -> Iterable[dict]:
    """The records of a file. A .tsv is GLUE's: quotes are characters; `header` names columns if the file does not."""
    options = {}
    if path.suffix in (".csv", ".tsv"):
        options["keep_default_na"] = False  # the text "None" is not missing
    if path.suffix == ".tsv":
        options |= {"delimiter": "\t", "quoting": 3, "column_names": list(header) or None, "on_bad_lines": bad_lines}
    for record in load(INPUTS[path.suffix], [str(path)], str(path), **options):
        if "__index_level_0__" in record:  # pandas takes the first field of such rows as their name
            raise UserError(f"{path}: has rows with more fields than columns; put texts with a comma in quotes")
        yield record


def examples_of(records: Iterable[dict], columns: tuple[str, ...], where: str) -> list[Example]:
    """Records -> examples. `columns` are text, text2 (optional) and label. UserError for a record that lacks one."""
    found = []
    for number, record in enumerate(records, start=1):
        *texts, label = [record.get(name) for name in columns if name != "text2" or record.get(name) is not None]
        # Two of QQP's questions are empty, both second ones.
        if label in (None, "") or not all(isinstance(text, str) for text in texts) or not texts[0].strip():
            raise UserError(f"{where}, record {number}: needs {', '.join(columns)}; has {str(record)[:200]}")
        if "label.1" in record:
            raise UserError(f"{where}: has two columns `label`; rename one")
        texts = [text.strip() for text in texts]
        found.append(Example(texts[0], texts[1] if len(texts) > 1 else None, str(label).strip()))
    return found


def read_inputs(name: str, source: str) -> tuple[list[Example], list]:
    """What task `name` is to predict, and the index of each in its file, or its number: lines of a .txt, the columns of
    GLUE's releases or of the Hub, or text[,text2]; hf:[SPLIT] is a split of the task on the Hub."""
    task, path = TASKS[name], Path(source)
    if source.startswith("hf:") and task.hub:
        split = source[3:] or task.splits[1].replace("validation", "test")
        records = load("hub", (), f"hf:{task.hub}", split=split, streaming=False)
    elif path.suffix in INPUTS:
        records = records_of(path, bad_lines="error")
    else:
        raise UserError(f"--predict {path}: the name must end in {', '.join(INPUTS)}")
    columns = task.columns[:-1]
    known = [columns, task.hub_columns[:-1], ("text", "text2")[:len(columns)]]
    found, indices = [], []
    for number, record in enumerate(records):
        present = [[column for column in names if isinstance(record.get(column), str)] for names in known]
        names = max(present, key=len)
        if len(names) < (1 if name == "custom" else len(columns)):
            raise UserError(f"{source}, record {number + 1}: needs {', '.join(columns)}; has {str(record)[:200]}")
        texts = [record[column].strip() for column in names]
        found.append(Example(texts[0], texts[1] if len(texts) > 1 else None, None))
        indices.append(record.get("index", record.get("idx", record.get("id", number))))
    if not found:
        raise UserError(f"--predict {source}: empty")
    return found, indices


def read_squad(path: Path) -> list[Question]:
    """The questions of a SQuAD JSON file, version 1.1 or 2.0. UserError if it is not one."""
    found = []
    try:
        for article in read_json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for q in paragraph["qas"]:
                    answers = [] if q.get("is_impossible") else q.get("answers", [])
                    answers = tuple((a["answer_start"], a["text"]) for a in answers)
                    found.append(Question(q["id"], q["question"].strip(), paragraph["context"], answers))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not in the format of SQuAD ({error!r})") from error
    for q in found:
        for start, text in q.answers:
            if q.context[start:start + len(text)] != text:
                raise UserError(f"{path}: question {q.id}: answer {text!r} is not at character {start} of its context")
    return found


def questions_of_hub(records: Iterable[dict]) -> list[Question]:
    """The questions of the data set on the Hugging Face Hub."""
    found = []
    for r in records:
        answers = tuple(zip(r["answers"]["answer_start"], r["answers"]["text"]))
        found.append(Question(r["id"], r["question"].strip(), r["context"], answers))
    return found


def read_docs_parts(task: Task, val_share: float) -> dict[str, list[Example]]:
    """Documentation strings, at most 100 and 150 of each library by hash, none from the validation of pre-training."""
    most = {"train": 100, "dev": 150}
    found = {"train": [], "dev": []}
    count = Counter()
    for library, text in sorted(read_docs(), key=lambda item: hashlib.blake2b(item[1].encode()).digest()):
        if library not in task.labels or in_validation(text, val_share):
            continue
        part = "dev" if in_validation(text, val_share + 0.1) else "train"  # the next tenth by hash
        count[part, library] += 1
        if count[part, library] <= most[part]:
            found[part].append(Example(text, None, library))
    return found


def locate(name: str, data: str | None, split: int) -> Path | None:
    """The file of a part of task `name`, None if there is none. UserError if one is missing that is not dev_mm."""
    task = TASKS[name]
    if name == "docs":
        if data is not None:
            raise UserError(f"--data {data}: --task docs reads only this machine's documentation; leave --data out")
        return None
    if data is None:
        if not task.hub:
            raise UserError(f"--task {name} needs --data: a folder with {' and '.join(task.files)}")
        return None
    root, pattern = Path(data).expanduser(), task.files[split]
    for folder in (root / task.folder, root):
        found = [path for path in sorted(folder.glob(pattern)) if path.suffix in LOADERS or name == "squad2"]
        if len(found) > 1:
            raise UserError(f"--data {data}: holds {found[0].name} and {found[1].name}; move all but one away")
        if found:
            return found[0]
    if PARTS[split] == "dev_mm":
        return None
    raise UserError(f"--data {data}: no {pattern} there" + (f" or in {task.folder}/" if task.folder else ""))


def read_part(name: str, data: str | None, split: int) -> list[Example] | list[Question]:
    """The examples or questions of a part of task `name`; none if it is dev_mm and missing."""
    task, path = TASKS[name], locate(name, data, split)
    if data is None:
        records = load("hub", (), f"hf:{task.hub}", split=task.splits[split], streaming=False)
        if name == "squad2":
            return questions_of_hub(records)
        if task.labels:  # numbers on the Hub
            records = (record | {"label": task.labels[record["label"]]} for record in records)
        else:  # STS-B's 3.2 is 3.200000047683716 there
            records = (record | {"label": round(record["label"], 3)} for record in records)
        return examples_of(records, task.hub_columns or task.columns, f"hf:{task.hub}")
    if path is None:
        return []
    if name == "squad2":
        return read_squad(path)
    records = records_of(path, task.header)
    if path.suffix == ".tsv":  # a few of QQP's rows are cut off
        records = (record for record in records if record.get(task.columns[-1]) not in (None, ""))
    return examples_of(records, task.columns, str(path))


def read_task(name: str, data: str | None, val_share: float) -> tuple[dict, list[str]]:
    """The parts of a task by name, and how they differ from the official release; `val_share`: of pre-training."""
    task, parts, remarks = TASKS[name], {}, []
    documentation = read_docs_parts(task, val_share) if name == "docs" else {}
    for split, part in enumerate(PARTS[:len(task.files)]):
        rows = documentation[part] if name == "docs" else read_part(name, data, split)
        if not rows and part == "dev_mm":
            remarks.append(f"{part} is missing: not evaluated")
            continue
        if not rows:
            raise UserError(f"{name}, part {part}: empty; use another --data")
        official = task.rows[split] if task.rows else len(rows)
        if len(rows) != official:
            remarks.append(f"{part} has {len(rows):,} rows, the official one {official:,}: not comparable with "
                           "published numbers")
        parts[part] = rows
    return parts, remarks


# ---- 4. Metrics ---------------------------------------------------------------------------------------------
def accuracy(predicted, true) -> float:
    """Share of equal entries of two arrays (N,), in [0, 1]."""
    return float((predicted == true).mean())


def matthews(predicted, true) -> float:
    """Correlation of two labellings (N,) by any integers, in [-1, 1]; Matthews, 1975, and Gorodkin, 2004."""
    if np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    labels, index = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    t, p = np.eye(len(labels))[index.reshape(2, -1)]  # (N, labels) each
    t = t - t.mean(0)
    p = p - p.mean(0)
    return float((t * p).sum() / math.sqrt((t * t).sum() * (p * p).sum()))


def ranks(x):
    """Ranks 1 ... N of x (N,), float64; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # rank of the last of each group of equal values
    return (last - (counts - 1) / 2)[inverse]


def spearman(predicted, true) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN where one of them is constant."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return math.nan
    return float(np.corrcoef(ranks(predicted), ranks(true))[0, 1])


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman}
