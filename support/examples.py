"""The examples and labels of the tasks of finetune.py, from docs, the Hub or files."""
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.docs import docs_task
from support.program import UserError, path_of
from support.tasks import TASKS, Task
from support.text import READERS, Text, hub_records, records_of, split_name


@dataclass(frozen=True)
class Data:
    """Where a task's examples come from."""
    data: str = ""  # folder with the Hub's own files or, for custom, with train; default: the Hub
    text_column: str = "text"  # custom: column with the text
    text2_column: str = "text2"  # custom: column with a second text, if there is one
    label_column: str = "label"  # custom: column with the label
    regression: bool = False  # custom: whether labels are numbers to predict, also if they are whole


class Example(NamedTuple):
    """One or two texts and a label: a name, a number in a regression, or None if a test file has none."""
    text: str
    text2: str | None
    label: str | float | None
    others: dict = {}  # custom: the other columns of its record, which predictions repeat


class Question(NamedTuple):
    """A SQuAD question. Each answer is (first character, text); a question without answers is unanswerable."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


# ---- 1. Reading ---------------------------------------------------------------------------------------------
def read_tasks(names: list[str], data: Data, settings: dict, named: list[str]) -> dict[str, dict[str, list]]:
    """What read_task returns for each task that has a training file in data.data. Raises UserError if one of the
    `named` tasks has none, or none has any. Several tasks need folders of their own."""
    of_files = [name for name in names if data.data and TASKS[name].group != "docs"]
    missing = []
    for name in of_files:
        folder = folder_of(name, data.data)
        shared = len(of_files) > 1 and folder == path_of(data.data)
        if shared or not files_of_split(folder, "train"):
            missing.append(name)
    if missing == names or any(name in named for name in missing):
        raise UserError(f"--data {data.data}: has no training file of {', '.join(missing)}")
    return {name: read_task(name, data, settings) for name in names if name not in missing}


def read_task(name: str, data: Data, settings: dict) -> dict[str, list]:
    """The examples or questions of each split: train, dev, dev_mm of MNLI, and test of custom. Without dev, a tenth of
    train is dev. For docs and its like, `settings` of the pre-training run has the fraction that it held out and its
    cache. Raises UserError if examples are missing or have no text or label."""
    task = TASKS[name]
    if task.group == "docs":
        found = docs_task(name, settings.get("val_share", Text.val_share), settings.get("cache", Text.cache))
        return {split: [Example(text, None, label) for label, text in each] for split, each in found.items()}
    parts = dict(zip(("train", "dev", "test" if name == "custom" else "dev_mm"), ("train", *task.dev)))
    if data.data:
        folder = folder_of(name, data.data)
        read = [file for part in parts.values() for file in files_of_split(folder, part)]
        others = [file.name for file in sorted(folder.glob("[!.]*")) if file not in read]
        print(f"{folder}: {', '.join(file.name for file in read)}; not read: {', '.join(others) or 'nothing':.200}")
    splits = {}
    for split, part in parts.items():
        records = records_of_split(name, data.data, part)
        if task.kind == "spans":
            splits[split] = questions_of(records)
        else:
            splits[split] = [example_of(name, data, split, place, record) for place, record in records]
    lacks = {row.text2 is None for rows in splits.values() for row in rows} if name == "custom" else set()
    if len(lacks) > 1 or (lacks == {True} and data.text2_column != Data.text2_column):
        raise UserError(f"--data {data.data}: some rows, or all, lack the column {data.text2_column}")
    if name == "custom" and not splits["dev"]:
        splits |= with_dev(splits["train"], data.regression)
    if task.kind == "spans":
        splits["train"] = with_answers(name, splits["train"])
    for split in ("train", "dev"):
        if not splits[split]:
            raise UserError(f"--task {name}: its {split} split has no examples; see --data")
    return {split: examples for split, examples in splits.items() if examples}


def folder_of(name: str, data: str) -> Path:
    """The folder of a task: the task's folder in `data`, such as glue/rte, or `data` itself."""
    root = path_of(data)
    folders = sorted(root.rglob(re.split("[/:]", TASKS[name].hub or name)[-1]))
    return next((folder for folder in folders if files_of_split(folder, "train")), root)


def files_of_split(folder: Path, part: str) -> list[Path]:
    """The file PART.csv (or in another format), or the Hub's PART-00000-of-00001.parquet. Raises UserError for two
    files with one name."""
    files = [file for file in sorted(folder.glob(f"{part}*")) if split_name(file)[1] in READERS]
    whole = [file for file in files if split_name(file)[0] == part]
    if len(whole) > 1:
        raise UserError(f"{whole[0]} and {whole[1].name}: keep one of them")
    parts = [file for file in files if re.fullmatch(rf"{part}-\d+-of-\d+.*", split_name(file)[0])]
    if parts and len(parts) != int(re.search(r"-of-(\d+)", parts[0].name)[1]):
        raise UserError(f"{parts[0]}: of this many files, only {len(parts)} are there")
    return whole or parts


def records_of_split(name: str, data: str, part: str) -> Iterator[tuple[str, dict]]:
    """(place, record) of a split: on the Hub, or in files_of_split if there is `data`. The place is for messages.
    Raises UserError if files have no rows."""
    if data:
        sources = {file: records_of(file) for file in files_of_split(folder_of(name, data), part)}
    else:
        hub = TASKS[name].hub or f"nyu-mll/glue:{name}"
        sources = {f"hf:{hub}, {part}": hub_records(f"hf:{hub}", part)}
    place = ""
    for source, records in sources.items():
        for number, record in enumerate(records, start=1):
            place = f"{source}, row {number}"
            yield place, record
    if sources and not place:
        raise UserError(f"{', '.join(map(str, sources))}: has no rows")


def example_of(name: str, data: Data, split: str, place: str, record: dict) -> Example:
    """A record of a task that classifies texts as an Example. Raises UserError if its text or label is missing."""
    columns, label_column, others = TASKS[name].columns, "label", {}
    if name == "custom":
        columns, label_column = (data.text_column, data.text2_column), data.label_column
        if record.get(data.text2_column) is None:
            columns = columns[:1]  # the second text is optional
        others = {column: cell for column, cell in record.items() if column not in (*columns, label_column)}
        clash = others.keys() & {"label", "prediction", "scores"}
        if clash:
            raise UserError(f"{place}: rename its column {min(clash)}, which predictions would replace")
    texts = [record.get(column) for column in columns]
    label = label_of(TASKS[name], record.get(label_column))
    may_be_empty = name != "custom"  # as a few texts of QQP are
    has_texts = all(isinstance(text, str) and (text.strip() or may_be_empty) for text in texts)
    cell = record.get(label_column)
    has_no_label = cell in (None, "") or cell != cell  # NaN
    if not has_texts or (label is None and not (split == "test" and has_no_label)):
        advice = "see --text-column and --label-column" if name == "custom" else "numbers as in the Hub's files"
        raise UserError(f"{place}: needs text in {' and '.join(columns)}, and a label in {label_column} (none in test; "
                        f"{advice}), but has {record!r:.200}")
    return Example(texts[0], texts[1] if len(texts) == 2 else None, label, others)


def label_of(task: Task, label) -> str | float | None:
    """A label as its name, or a number. The Hub's names are numbers from 0, and STS-B's 3.2 is 3.200000047683716 there.
    None if the label is missing, or something else."""
    if not isinstance(label, str | int | float) or label == "" or label != label:  # NaN
        return None
    if task.labels:
        return task.labels[int(label)] if label in range(len(task.labels)) else None
    if isinstance(label, float) and label == float(np.float32(label)):
        return float(str(np.float32(label)))  # the shortest form of a float32
    return label if isinstance(label, float) else str(label)


def with_dev(train: list[Example], regression: bool) -> dict[str, list[Example]]:
    """Nine tenths of the training examples as train, and a tenth, drawn at random, as dev. Train has an example of each
    class."""
    order = np.random.default_rng(0).permutation(len(train)).tolist()
    are_classes = labels_of("custom", train, regression).names
    first = {train[i].label: i for i in reversed(order)} if are_classes else {}
    dev = [i for i in order if first.get(train[i].label) != i][:len(train) // 10]
    held = {*dev}
    print(f"--data has no file dev: {len(dev):,} of {len(train):,} examples in train are dev")
    return {"train": [train[i] for i in order if i not in held], "dev": [train[i] for i in dev]}


def questions_of(records: Iterator[tuple[str, dict]]) -> list[Question]:
    """Records of SQuAD -> questions. Raises UserError if two of them have one id."""
    found = {}
    for place, record in records:
        answers = zip(record["answers"]["answer_start"], record["answers"]["text"])
        question = Question(record["id"], record["question"], record["context"], tuple(answers))
        if found.setdefault(question.id, question) is not question:
            raise UserError(f"{place}: its id {question.id} occurs twice; predictions need one for each question")
    return [*found.values()]


def with_answers(name: str, questions: list[Question]) -> list[Question]:
    """The training questions whose answer stands where the file says."""
    kept = [q for q in questions if all(q.context[start:start + len(text)] == text for start, text in q.answers[:1])]
    if len(kept) < len(questions):
        print(f"--task {name}: {len(questions) - len(kept):,} training questions are left out: their answer is not at "
              "answer_start")
    return kept


# ---- 2. Labels ----------------------------------------------------------------------------------------------
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.IGNORECASE)
MOST_CLASSES = 20  # if labels are whole numbers; more are probably meant as numbers


class Labels(NamedTuple):
    """The possible outputs of a task: one of several names or, if there are no names, a number."""
    metrics: tuple[str, ...]  # as in Task
    names: tuple[str, ...] = ()
    center: float = 0.0  # the model predicts (number - center) / scale
    scale: float = 1.0

    def saved(self) -> dict:
        """What an export needs of these labels."""
        return {"labels": list(self.names), "center": self.center, "scale": self.scale}

    def target(self, label: str | float | None) -> int | float:
        """A label in the form of the model's output: the index of its name, or a number; 0 if there is none."""
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        if self.names or not NUMBER.fullmatch(str(label)):
            known = ", ".join(self.names[:20]) or "numbers"
            raise UserError(f"label {label!r} is not one of the training labels ({known})")
        return (float(label) - self.center) / self.scale


def labels_of(name: str, train: list, regression: bool = False) -> Labels:
    """The labels of task `name`: those of the release, numbers in a `regression` or if some have decimals, or else the
    distinct training labels in alphabetical order. Raises UserError for numbers of which neither is clear."""
    task = TASKS[name]
    if task.labels or task.kind != "classification":
        return Labels(task.metrics, task.labels)
    names = tuple(sorted({str(example.label) for example in train}))
    numbers = [label for label in names if NUMBER.fullmatch(label)]
    has_decimals = not all(label.lstrip("+-").isdigit() for label in numbers)
    if regression or has_decimals:
        wrong = [label for label in names if label not in numbers]
        if wrong:
            raise UserError(f"label {wrong[0]!r}: is no number, but other labels are; correct or remove it")
        if name != "custom":
            return Labels(task.metrics, scale=5.0)  # as in the official code for STS-B
        values = np.array([float(example.label) for example in train])
        return Labels(("spearman", "r2"), (), float(values.mean()), float(values.std()) or 1.0)
    comma = [label for label in names if re.fullmatch(r"[-+]?\d+,\d+", label)]
    if comma or len(names) < 2:
        raise UserError(f"label {(comma or names)[0]!r}: write decimals with a point, and give two labels or more")
    if len(numbers) > MOST_CLASSES:
        raise UserError(f"{len(names)} different whole numbers as labels: give --regression to predict numbers, or "
                        "write classes as names, such as class 7")
    return Labels(tuple(metric for metric in task.metrics if metric != "f1" or len(names) == 2), names)
