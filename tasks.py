"""The tasks of fine-tuning, as data: where their files are, what is read from them, and how a model is scored.

A GLUE task is an entry of TASKS: its files in the original release and on the Hugging Face Hub, their columns, labels
and metric. SQuAD 2.0 has questions with answers in their context. `docs` needs no download: which library does a
documentation string belong to? `custom` reads files of your own.
"""
import hashlib
import json
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import RECORDS, UserError, in_validation, lines, load_hub_dataset, read_docs, read_tsv, rows_of_step


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
        group="large", labels=("entailment", "neutral", "contradiction"), rows=(392_702, 9_815, 9_832),
        folder="MNLI", files=("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"),
        columns=("sentence1", "sentence2", "gold_label"),
        hub="nyu-mll/glue:mnli", splits=("train", "validation_matched", "validation_mismatched"),
        hub_columns=("premise", "hypothesis", "label")),
    "qqp": Task(
        group="large", labels=YES_NO, rows=(363_846, 40_430),
        folder="QQP", columns=("question1", "question2", "is_duplicate"),
        hub="nyu-mll/glue:qqp", hub_columns=("question1", "question2", "label")),
    "qnli": Task(
        group="large", labels=ENTAILMENT, rows=(104_743, 5_463),
        folder="QNLI", columns=("question", "sentence", "label"), hub="nyu-mll/glue:qnli"),
    "sst2": Task(
        group="large", labels=YES_NO, rows=(67_349, 872),
        folder="SST-2", columns=("sentence", "label"), hub="nyu-mll/glue:sst2"),
    "cola": Task(
        group="small", metric="matthews", labels=YES_NO, rows=(8_551, 1_043),
        folder="CoLA", header=("source", "label", "star", "sentence"), columns=("sentence", "label"),
        hub="nyu-mll/glue:cola"),
    "rte": Task(
        group="small", labels=ENTAILMENT, rows=(2_490, 277),
        folder="RTE", columns=PAIR, hub="nyu-mll/glue:rte"),
    "mrpc": Task(
        group="small", labels=YES_NO, rows=(3_668, 408),
        folder="MRPC", columns=("#1 String", "#2 String", "Quality"),
        hub="nyu-mll/glue:mrpc", hub_columns=PAIR),
    "stsb": Task(
        group="small", metric="spearman", rows=(5_749, 1_500),
        folder="STS-B", columns=("sentence1", "sentence2", "score"),
        hub="nyu-mll/glue:stsb", hub_columns=PAIR),
    "squad2": Task(
        group="squad", metric="f1", rows=(130_319, 11_873),
        folder="SQuAD", files=("train*.json", "dev*.json"), hub="rajpurkar/squad_v2"),
    "docs": Task(
        group="docs",
        labels=("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")),
    "custom": Task(
        group="small", files=("train.*", "dev.*"), columns=("text", "text2", "label")),
}
GLUE = tuple(TASKS)[:8]  # Table 1, left to right


# ---- 2. Reading the parts of a task -------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label as it stands in the file."""
    text: str
    text2: str | None
    label: str


class Question(NamedTuple):
    """A SQuAD question; no answers = unanswerable. `answers` are (first character, text)."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


def examples_of(records: Iterable[dict], columns: tuple[str, ...], where: str) -> list[Example]:
    """Records -> examples. `columns` are text, text2 (if any) and label; one that is called `text2` is optional.
    UserError for a record that lacks a value."""
    found = []
    for number, record in enumerate(records, start=1):
        used = [name for name in columns if name != "text2" or name in record]
        missing = [name for name in used if record.get(name) is None]
        if missing:
            raise UserError(f"{where}, record {number}: no column `{missing[0]}`; found: {', '.join(map(str, record))}")
        *texts, label = [str(record[name]).strip() for name in used]
        found.append(Example(texts[0], texts[1] if len(texts) > 1 else None, label))
    return found


def read_squad(path: Path) -> list[Question]:
    """The questions of a SQuAD JSON file, version 1.1 or 2.0."""
    found = []
    try:
        articles = json.loads("".join(lines(path)))["data"]
        for paragraph in [p for article in articles for p in article["paragraphs"]]:
            for q in paragraph["qas"]:
                answers = () if q.get("is_impossible") else q["answers"]
                answers = tuple((a["answer_start"], a["text"]) for a in answers)
                found.append(Question(q["id"], q["question"].strip(), paragraph["context"], answers))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not in the format of SQuAD: no {error}") from error
    return found


def read_from_hub(task: Task, split: str) -> list:
    """A part of a data set of the Hugging Face Hub, class labels as they stand in the original files."""
    records = load_hub_dataset(task.hub, split, streaming=False)
    if task.group == "squad":
        found = []
        for r in records:
            answers = zip(r["answers"]["answer_start"], r["answers"]["text"])
            found.append(Question(r["id"], r["question"], r["context"], tuple(answers)))
        return found
    if task.labels:
        records = [record | {"label": task.labels[record["label"]]} for record in records]
    return examples_of(records, task.hub_columns or task.columns, f"hf:{task.hub}")


def read_docs_parts(task: Task, val_share: float) -> dict[str, list[Example]]:
    """Documentation strings labelled with their library, at most 100 and 150 of each library, drawn by hash. No text of
    the pre-training validation part is in either; the next tenth of all documents, by the same hash, is `dev`. So
    pre-training has read the texts of both parts, without labels, and its validation loss stays honest."""
    most = {"train": 100, "dev": 150}
    found = {"train": [], "dev": []}
    count = Counter()
    documents = read_docs(progress=sys.stderr.isatty())
    for library, text in sorted(documents, key=lambda item: hashlib.blake2b(item[1].encode(errors="replace")).digest()):
        if library not in task.labels or in_validation(text, val_share):
            continue
        part = "dev" if in_validation(text, val_share + 0.1) else "train"  # the next tenth by hash
        count[part, library] += 1
        if count[part, library] <= most[part]:
            found[part].append(Example(text, None, library))
    return found


def locate(name: str, data: str | None, split: int) -> Path | None:
    """The file of a part of task `name`; None if no file holds it (the Hub does, or this machine's documentation), or
    if it is dev_mm and missing. UserError if another is missing."""
    task = TASKS[name]
    if name == "docs" or data is None and task.hub:
        return None
    if data is None:
        raise UserError(f"--task {name} needs --data: a folder with {' and '.join(task.files)}")
    root, pattern = Path(data).expanduser(), task.files[split]
    for path in [*sorted((root / task.folder).glob(pattern)), *sorted(root.glob(pattern))]:
        if path.suffix in RECORDS or name == "squad2":
            return path
    if PARTS[split] != "dev_mm":
        folder = f" or in {task.folder}/" if task.folder else ""
        raise UserError(f"--data {data}: no {pattern} there{folder}")
    return None


def read_part(name: str, data: str | None, split: int) -> list | None:
    """The examples or questions of a part of task `name`; None if it is missing."""
    task = TASKS[name]
    path = locate(name, data, split)
    if data is None:
        return read_from_hub(task, task.splits[split])
    if path is None:
        return None
    if name == "squad2":
        return read_squad(path)
    records = read_tsv(path, task.header) if path.suffix == ".tsv" else RECORDS[path.suffix](path)
    return examples_of(records, task.columns, str(path))


@lru_cache(maxsize=1)
def read_task(name: str, data: str | None, val_share: float, max_train: int, max_dev: int) -> tuple[dict, list[str]]:
    """The parts of a task, {"train": [...], "dev": [...]}, and remarks on what differs from the official release.
    `val_share` is what pre-training held out (docs). UserError for an empty part or an answer not in its context."""
    task, parts, remarks = TASKS[name], {}, []
    documentation = read_docs_parts(task, val_share) if name == "docs" else {}
    for split, part in enumerate(PARTS[:len(task.files)]):
        rows = documentation[part] if name == "docs" else read_part(name, data, split)
        if rows is None:
            remarks.append(f"{part} is missing: not evaluated")
            continue
        where = f"{name}, part {part}" + (f" in {data}" if data else "")
        if not rows:
            raise UserError(f"{where}: empty; use another --data")
        if name == "squad2":
            check_answers(rows, where)
        official = task.rows[split] if task.rows else len(rows)
        if len(rows) != official:
            remarks.append(f"{part} has {len(rows):,} rows, the official one {official:,}: not comparable with "
                           "published numbers")
        limit = min(max_train if part == "train" else max_dev, len(rows))
        if limit:
            remarks.append(f"{part}: {limit:,} of {len(rows):,} rows are used")
            rows = [rows[i] for i in rows_of_step(0, 0, limit, len(rows))]
        parts[part] = rows
    return parts, remarks


def check_answers(questions: list[Question], where: str) -> None:
    """UserError for an answer that is empty, or is not in its context where it says."""
    for q in questions:
        for start, text in q.answers:
            if not text.strip() or q.context[start:start + len(text)] != text:
                raise UserError(f"{where}: question {q.id}: answer {text!r} is not in its context, "
                                f"at character {start}")


# ---- 3. Metrics ---------------------------------------------------------------------------------------------
def accuracy(predicted: np.ndarray, true: np.ndarray) -> float:
    """Share of equal entries of two arrays (N,), in [0, 1]."""
    return float((predicted == true).mean())


def matthews(predicted: np.ndarray, true: np.ndarray) -> float:
    """Correlation of two labellings (N,), in [-1, 1]; 0 where one of them is constant.

    Labels are any integers, two or more; which ones does not matter. For two (Matthews, 1975) it is
    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)). For more (Gorodkin, 2004), and equally for two,
    sum(t p) / sqrt(sum(t^2) sum(p^2)): t and p (N, labels) are 1 in the column of the row's label and 0 elsewhere, less
    the mean of each column, and the sums are over all entries."""
    if np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    labels, index = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    t, p = np.eye(len(labels))[index.reshape(2, -1)]  # (N, labels) each
    t = t - t.mean(0)
    p = p - p.mean(0)
    return float((t * p).sum() / math.sqrt((t * t).sum() * (p * p).sum()))


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks 1 ... N of x (N,), float64; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # rank of the last of each group of equal values
    return (last - (counts - 1) / 2)[inverse]


def spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN where one of them is constant."""
    a, b = ranks(predicted), ranks(true)
    a = a - a.mean()
    b = b - b.mean()
    scale = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale else math.nan


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman}


def normalize(answer: str) -> str:
    """SQuAD's normal form of an answer: lower case, without punctuation, articles and superfluous white space."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(predicted: str, true: str) -> float:
    """1 if two answers have the same normal form, else 0."""
    return float(normalize(predicted) == normalize(true))


def token_f1(predicted: str, true: str) -> float:
    """Harmonic mean of precision and recall of the words of two answers; if one is empty, whether both are."""
    p, t = normalize(predicted).split(), normalize(true).split()
    if not p or not t:
        return float(p == t)
    common = sum((Counter(p) & Counter(t)).values())  # words, as often as in both
    return 2 * common / (len(p) + len(t))


def squad_metrics(questions: list[Question], answers: list[str], null: np.ndarray,
                  threshold: float) -> dict[str, float]:
    """EM and F1 in percent, as the official evaluation has them: with no answer where `null` (N,) is above a fixed
    threshold, and above the best one of each. Without an acceptable true answer the empty one is true."""
    found = {}
    answerable = np.array([bool(q.answers) for q in questions])
    empty = np.array([not answer for answer in answers])
    order = np.argsort(null, kind="stable")
    for name, score in (("exact", exact_match), ("f1", token_f1)):
        scores = np.zeros(len(questions))
        for i, (q, answer) in enumerate(zip(questions, answers)):
            true = [text for _, text in q.answers if normalize(text)] or [""]  # acceptable answers
            scores[i] = max(score(answer, text) for text in true)
        found[name] = 100 * float(np.where(null > threshold, ~answerable, scores).mean())
        # Start without an answer to any question; then answer them in the order of `null`: where is the sum highest?
        gain = np.where(answerable, scores, np.where(empty, 0.0, -1.0))
        total = (~answerable).sum() + np.concatenate([[0.0], np.cumsum(gain[order])])
        best = int(total.argmax())
        found[f"best_{name}_threshold"] = float(null[order[best - 1]]) if best else 0.0
        found[f"best_{name}"] = 100 * float(total[best] / len(scores))
    return found
