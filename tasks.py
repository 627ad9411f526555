"""The tasks of fine-tuning, as data: where their files are, what is read from them, and how a model is scored.

A GLUE task is an entry of TASKS: its files in the original release and on the Hugging Face Hub, their columns, labels
and metric. SQuAD 2.0 has questions with answers in their context. `docs` needs no download: which library does a
documentation string belong to? `custom` reads files of your own.
"""
import hashlib
import itertools
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import in_validation, read_docs, rows_of_step
from files import RECORDS, UserError, load_hub_dataset, read_json, read_tsv


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


# ---- 2. How they are fine-tuned: Tables 5 and 6 -------------------------------------------------------------
DEFAULTS = {
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16, learning_rate=8e-4),  # the rate: docs/results.md
}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # (group, size of the encoder) -> values to try; Tables 5 and 6
    ("small", "base"): dict(
        epochs=(2.0, 3.0, 5.0, 10.0), learning_rate=(2e-5, 3e-5, 4e-5, 5e-5),
        batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    ("small", "large"): dict(
        epochs=(2.0, 3.0, 5.0, 10.0), learning_rate=(7e-6, 1e-5, 2e-5, 3e-5),
        batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    ("large", "base"): dict(
        epochs=(2.0, 3.0, 5.0), learning_rate=(1e-5, 2e-5, 3e-5, 4e-5),
        batch_size=(32,), warmup_share=(0.06,)),
    ("large", "large"): dict(
        epochs=(2.0, 3.0, 5.0), learning_rate=(5e-6, 7e-6, 1e-5, 2e-5),
        batch_size=(32,), warmup_share=(0.06,)),
    ("squad", "base"): dict(
        epochs=(2.0, 3.0), learning_rate=(2e-5, 3e-5, 4e-5, 5e-5),
        batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    ("squad", "large"): dict(
        epochs=(2.0, 3.0), learning_rate=(7e-6, 1e-5, 2e-5, 3e-5),
        batch_size=(16, 32), warmup_share=(0.06, 0.10)),
}


def grid(group: str, dim: int, given: dict) -> list[dict]:
    """The settings of Table 5 or 6; a flag that is given replaces all values of its row."""
    size = "large" if dim >= 1024 else "base"
    rows = dict(SWEEPS["small" if group == "docs" else group, size])
    for name in SWEPT:
        if name in given:
            rows[name] = (given[name],)
    return [dict(zip(rows, values)) for values in itertools.product(*rows.values())]


# ---- 3. Reading the parts of a task -------------------------------------------------------------------------
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


def value_of(record: object, name: str, kinds: type | tuple, where: str) -> object:
    """A field of a record, text without half surrogate pairs (JSON can hold them) and with as many characters.
    UserError if it is missing, null, or of another type."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: not an object with named fields, but {str(record)[:40]}")
    value = record.get(name)
    if value is None:
        reason = "is null: fill it in, or leave the record out" if name in record else (
            f"is missing; found: {', '.join(map(str, record))}")
        raise UserError(f"{where}: `{name}` {reason}")
    if not isinstance(value, kinds):
        wanted = {str: "text", list: "a list", int: "a whole number"}.get(kinds, "text or a number")
        raise UserError(f"{where}: `{name}` is of type {type(value).__name__} ({str(value)[:40]}): use {wanted}")
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def examples_of(records: Iterable[dict], columns: tuple[str, ...], where: str) -> list[Example]:
    """Records -> examples. `columns` are text, text2 (if any) and label; one that is called `text2` is optional.
    UserError for a record that lacks a value or holds something else than text."""
    found = []
    for number, record in enumerate(records, start=1):
        place = f"{where}, record {number}"
        if None in record:  # csv's name for what is behind the last column
            raise UserError(f"{place}: has more values than columns; put text that holds a comma in quotes")
        # A second text that all records lack is a column less; one that some lack, check_custom refuses.
        *texts, label = [name for name in columns if name != "text2" or record.get(name) is not None]
        texts = [value_of(record, name, str, place).strip() for name in texts]
        label = str(value_of(record, label, (str, int, float), place)).strip()
        found.append(Example(texts[0], texts[1] if len(texts) > 1 else None, label))
    return found


def number_of(label: str) -> float | None:
    """The number that a label is, NaN and infinity included; None if it is a word."""
    try:
        return float(label)
    except ValueError:
        return None


def check_custom(examples: list[Example], where: str) -> None:
    """UserError for what a model would learn without a word although it is a mistake: an empty text or label, a second
    text in some records alone, NaN or infinity among numbers, or one label."""
    numbers = {example.label: number_of(example.label) for example in examples}
    for number, example in enumerate(examples, start=1):
        place = f"{where}, record {number}"
        for name in ("text", "label"):
            if not getattr(example, name):
                raise UserError(f"{place}: `{name}` is empty: fill it in, or leave the record out")
        if (example.text2 is None) != (examples[0].text2 is None):
            lacking = "this record" if example.text2 is None else "record 1"
            raise UserError(f"{place}: `text2` is in some records alone, {lacking} has none: fill it in, or leave the "
                            "column out")
        value = numbers[example.label]
        # Among words, "nan" and "inf" are names like others: the code of a language, for example.
        if None not in numbers.values() and not math.isfinite(value):
            raise UserError(f"{place}: label {example.label!r} among numbers: use a finite number, or leave the record "
                            "out")
    if len(numbers) == 1:
        raise UserError(f"{where}: all {len(examples):,} records have the label {examples[0].label!r}: nothing to tell "
                        "apart; use two labels or more in each part")


def read_squad(path: Path) -> list[Question]:
    """The questions of a SQuAD JSON file, version 1.1 or 2.0. UserError names a field that is missing or of another
    type."""
    found = []
    where = f"{path}: not in the format of SQuAD"
    for article in value_of(read_json(path), "data", list, where):
        for paragraph in value_of(article, "paragraphs", list, where):
            context = value_of(paragraph, "context", str, where)
            for q in value_of(paragraph, "qas", list, where):
                name = value_of(q, "id", str, where)
                place = f"{path}: question {name}"
                question = value_of(q, "question", str, place).strip()
                answers = []
                for a in () if q.get("is_impossible") else value_of(q, "answers", list, place):
                    answers.append((value_of(a, "answer_start", int, place), value_of(a, "text", str, place)))
                found.append(Question(name, question, context, tuple(answers)))
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
    for folder in (root / task.folder, root):
        found = [path for path in sorted(folder.glob(pattern)) if path.suffix in RECORDS or name == "squad2"]
        if len(found) > 1:
            raise UserError(f"--data {data}: holds {found[0].name} and {found[1].name}; move all but one away")
        if found:
            return found[0]
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
    examples = examples_of(records, task.columns, str(path))
    if name == "custom":
        check_custom(examples, str(path))
    return examples


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
    """UserError for two questions of one id, an answer that is empty, or one that is not in its context where it
    says."""
    seen = set()
    for q in questions:
        if q.id in seen:
            raise UserError(f"{where}: two questions have the id {q.id}; predictions are told apart by it: rename one")
        seen.add(q.id)
        for start, text in q.answers:
            if not text.strip() or start < 0 or q.context[start:start + len(text)] != text:
                raise UserError(f"{where}: question {q.id}: answer {text!r} is not in its context, "
                                f"at character {start}")


# ---- 4. Answers as tokens -----------------------------------------------------------------------------------
def borders(q: Question) -> tuple[int, int]:
    """First and last + 1 character of the first answer, without white space around it."""
    start, text = q.answers[0]
    first = start + len(text) - len(text.lstrip())
    return first, first + len(text.strip())


def cut_at_answer(spans: Callable, q: Question) -> np.ndarray:
    """The context's tokens and their characters, as `spans(text)` gives them, (3, length) int64, with a token's end
    before and after the answer; the space before a word stays with it."""
    first, last = borders(q)
    if q.context[max(0, first - 1):first].isspace():
        first -= 1
    found = []
    for begin, end in itertools.pairwise((0, first, last, len(q.context))):
        ids, starts, ends = spans(q.context[begin:end])
        found.append((ids, starts + begin, ends + begin))
    return np.concatenate(found, axis=1)


def answer_tokens(q: Question, starts: np.ndarray, ends: np.ndarray) -> tuple[int, int, bool]:
    """First and last token of the first answer, by the tokens' characters (length,), and whether they are exactly it;
    (0, 0, False) without an answer."""
    if not q.answers:
        return 0, 0, False
    a, b = borders(q)
    first = int(np.searchsorted(ends, a, side="right"))  # the first token that ends behind character a
    last = int(np.searchsorted(starts, b)) - 1  # the last one that starts before character b
    return first, last, bool(starts[first] == a and ends[last] == b)


# ---- 5. Metrics ---------------------------------------------------------------------------------------------
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
