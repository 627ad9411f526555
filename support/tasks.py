"""The tasks of fine-tuning, as data: Table 1, and how each is fine-tuned, Tables 5 and 6.

`docs` needs no download: which library does a documentation string belong to? `custom` reads files of your own.
"""
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from support.cli import UserError
from support.documents import in_validation, read_docs, read_records
from support.files import read_json


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


class Example(NamedTuple):
    """One or two texts and a label as it stands in the file."""
    text: str
    text2: str | None
    label: str | None  # None: to be predicted
    id: int | str = 0  # its index in the file, else its number


class Question(NamedTuple):
    """A SQuAD question; without answers it is unanswerable. `answers` are (first character, text)."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


LOADERS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".parquet": "parquet"}
INPUTS = LOADERS | {".txt": "text"}  # of texts without labels


# ---- 3. A whole task ----------------------------------------------------------------------------------------
def read_task(name: str, data: str | None, val_share: float) -> tuple[dict[str, list], list[str]]:
    """Examples or questions of each split, and remarks on what is not official. `val_share` is that of pre-training."""
    task, remarks = TASKS[name], []
    if name == "docs":
        found = read_docs_task(val_share)
    elif data is None:
        found = {split: read_hub(name, file.replace("dev", "validation")) for split, file in zip(SPLITS, task.files)}
    else:
        found = {split: read_file(name, path) for split, path in find_files(name, data).items()}
    for split, count in zip(SPLITS, task.official):
        if split not in found:
            remarks.append(f"{split} is missing: not evaluated")
        elif len(found[split]) != count:
            remarks.append(f"{split} has {len(found[split]):,} examples, the official one {count:,}: not comparable "
                           "with published numbers")
    return found, remarks


def find_files(name: str, data: str) -> dict[str, Path]:
    """The file of each split in the folder `data`. UserError if one is missing; only dev_mm may be."""
    task, root = TASKS[name], Path(data).expanduser()
    found = {}
    for split, file in zip(SPLITS, task.files):
        pattern = file + task.suffix
        paths = sorted((root / task.folder).glob(pattern)) or sorted(root.glob(pattern))
        paths = [path for path in paths if path.suffix in LOADERS or name == "squad2"]
        if len(paths) > 1:
            raise UserError(f"--data {data}: holds {paths[0].name} and {paths[1].name}; move all but one away")
        if paths:
            found[split] = paths[0]
        elif split != "dev_mm":
            raise UserError(f"--data {data}: no {pattern} there" + (f" or in {task.folder}/" if task.folder else ""))
    return found


def read_docs_task(val_share: float) -> dict[str, list[Example]]:
    """Documentation strings, at most 100 and 150 of each library by hash, none from the validation of pre-training."""
    most = {"train": 100, "dev": 150}
    found = {"train": [], "dev": []}
    count = Counter()
    for library, text in sorted(read_docs(), key=lambda item: hashlib.blake2b(item[1].encode()).digest()):
        if library not in TASKS["docs"].labels or in_validation(text, val_share):
            continue
        split = "dev" if in_validation(text, val_share + 0.1) else "train"  # the next tenth by hash
        count[split, library] += 1
        if count[split, library] <= most[split]:
            found[split].append(Example(text, None, library, len(found[split])))
    return found


# ---- 4. One split, from a file or the Hub -------------------------------------------------------------------
def read_file(name: str, path: Path, labelled: bool = True) -> list[Example] | list[Question]:
    """The examples or questions in a file of task `name`, as examples_of. A .tsv is GLUE's: quotes are characters."""
    if name == "squad2":
        return read_squad(path)
    if path.suffix not in INPUTS:
        raise UserError(f"--predict {path}: the name must end in {', '.join(INPUTS)}")
    task, options = TASKS[name], {}
    if path.suffix in (".csv", ".tsv"):
        options["keep_default_na"] = False  # the text "None" is not missing
    if path.suffix == ".tsv":
        options |= {"delimiter": "\t", "quoting": 3}
        if labelled:  # a file of inputs has a header, and each of its lines counts
            options |= {"column_names": list(task.header) or None, "on_bad_lines": "skip"}
    records = read_records(INPUTS[path.suffix], [str(path)], str(path), **options)
    if labelled and path.suffix == ".tsv":  # a few of QQP's lines are cut off
        records = (record for record in records if record.get(task.columns[-1]) not in (None, ""))
    return examples_of(name, records, str(path), labelled)


def read_hub(name: str, split: str, labelled: bool = True) -> list[Example] | list[Question]:
    """The examples or questions of task `name` in a split on the Hub."""
    task, found = TASKS[name], []
    hub = "hf:rajpurkar/squad_v2" if name == "squad2" else f"hf:nyu-mll/glue:{name}"
    for record in read_records("hub", (), hub, split=split, streaming=False):
        if name == "squad2":
            answers = zip(record["answers"]["answer_start"], record["answers"]["text"])
            found.append(Question(record["id"], record["question"].strip(), record["context"], tuple(answers)))
        else:  # labels are numbers there, and STS-B's 3.2 is 3.200000047683716
            label = task.labels[record["label"]] if task.labels else round(record["label"], 3)
            found.append(record | {task.columns[-1]: label})
    return found if name == "squad2" else examples_of(name, found, hub, labelled)


def texts_of(name: str, record: dict, where: str) -> tuple[str, str | None]:
    """The text of a record and its second one, None in a task with one. Columns are called as in the files of task
    `name`, as on the Hub, or text[,text2]. UserError if a text is missing."""
    *columns, _ = TASKS[name].columns
    if name == "custom" and record.get("text2") is None:  # it is optional
        columns = ["text"]
    for names in (columns, TASKS[name].hub_columns, ("text", "text2")[:len(columns)]):
        texts = [record.get(column) for column in names]
        if texts and all(isinstance(text, str) for text in texts):
            return texts[0].strip(), texts[1].strip() if len(texts) > 1 else None
    raise UserError(f"{where}: needs {', '.join(columns)}; has {str(record)[:200]}")


def examples_of(name: str, records: Iterable[dict], where: str, labelled: bool = True) -> list[Example]:
    """Records of task `name` -> examples. UserError for a record that lacks a text or, if `labelled`, the label."""
    *columns, column = TASKS[name].columns
    found = []
    for number, record in enumerate(records):
        if "__index_level_0__" in record:  # pandas takes the first field of such lines as their name
            raise UserError(f"{where}: has lines with more fields than columns; put texts with a comma in quotes")
        if "label.1" in record:
            raise UserError(f"{where}: has two columns `label`; rename one")
        text, text2 = texts_of(name, record, f"{where}, record {number + 1}")
        label = record.get(column) if labelled else None
        if labelled and (not text or label in (None, "")):  # two of QQP's questions are empty, both second ones
            raise UserError(f"{where}, record {number + 1}: needs {columns[0]}, {column}; has {str(record)[:200]}")
        index = record.get("index", record.get("idx", record.get("id", number)))
        found.append(Example(text, text2, str(label).strip() if labelled else None, index))
    if not found:
        raise UserError(f"{where}: empty")
    return found


def read_inputs(name: str, source: str) -> list[Example] | list[Question]:
    """What task `name` is to predict: a file, as read_file, or hf:[SPLIT], a split of the task on the Hub."""
    if source.startswith("hf:") and name in GLUE:
        return read_hub(name, source[3:] or TASKS[name].files[1].replace("dev", "test"), labelled=False)
    return read_file(name, Path(source), labelled=False)


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
    if not found:
        raise UserError(f"{path}: empty")
    for q in found:
        for start, text in q.answers:
            if q.context[start:start + len(text)] != text:
                raise UserError(f"{path}: question {q.id}: answer {text!r} is not at character {start} of its context")
    return found
