"""The examples of a task, read from its files, from the Hub, or from the documentation on this machine."""
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.cli import UserError
from support.corpus import in_validation
from support.documents import read_docs
from support.files import short_hash
from support.tables import TABLES, Row, csv_rows, hub_records, lines_of, parse_json, read_rows, split_name
from support.tasks import GLUE, SPLITS, TASKS, Example, Question


# ---- 1. A whole task ----------------------------------------------------------------------------------------
def read_task(name: str, data: str | None, val_share: float) -> dict[str, list]:
    """The examples or questions of each split; `val_share` is the fraction that pre-training held out. Raises
    UserError if a file is missing or invalid."""
    if name == "docs":
        return read_docs_task(val_share)
    if data is None:
        files = zip(SPLITS, TASKS[name].files)
        return {split: read_hub(name, file.replace("dev", "validation")) for split, file in files}
    return {split: read_file(name, path) for split, path in find_files(name, data).items()}


def hash_of(splits: dict[str, list]) -> str:
    """A hash of the examples or questions of all splits, wherever they were read from."""
    return short_hash(repr([[example[:4] for example in found] for found in splits.values()]))  # without `place`


def find_files(name: str, data: str) -> dict[str, Path]:
    """The file of each split, such as dev.tsv, dev.TSV.gz or validation.tsv, in the folder `data` or in the task's own
    folder there. Raises UserError if a file other than dev_mm is missing. SQuAD's files may have longer names."""
    root, formats = Path(data).expanduser(), (".json",) if name == "squad2" else TABLES
    inside = sorted((root / TASKS[name].folder).glob("*")) or sorted(root.glob("*"))
    found = {}
    for split, file in zip(SPLITS, TASKS[name].files):
        paths = []
        for path in inside:
            stem, suffix = split_name(path)
            stem = re.sub("^(validation|valid|val)", "dev", stem.lower())
            fits = stem.startswith(file) if name == "squad2" else stem == file
            if fits and suffix in formats:
                paths.append(path)
        if len(paths) == 1:
            found[split] = paths[0]
        elif paths or split != "dev_mm":
            there = " and ".join(path.name for path in paths) or "none"
            raise UserError(f"--data {data}: for {name}, this folder must have one file {file} ({', '.join(formats)}), "
                            f"but has {there}")
    return found


def read_docs_task(val_share: float) -> dict[str, list[Example]]:
    """Documentation strings, at most 100 (train) and 150 (dev) per library, none from the validation split of
    pre-training."""
    most, found, count = {"train": 100, "dev": 150}, {"train": [], "dev": []}, Counter()
    for library, text in sorted(read_docs(), key=lambda item: hashlib.blake2b(item[1].encode()).digest()):
        if library in TASKS["docs"].labels and not in_validation(text, val_share):
            split = "dev" if in_validation(text, val_share + 0.1) else "train"  # the next tenth by hash
            count[split, library] += 1
            if count[split, library] <= most[split]:
                found[split].append(Example(text, None, library, str(len(found[split]))))
    return found


# ---- 2. One split, from a file or the Hub -------------------------------------------------------------------
def read_file(name: str, path: Path, labelled: bool = True) -> list[Example] | list[Question]:
    """The examples or questions of task `name` in a file. GLUE's .tsv files have rules of their own."""
    if name == "squad2":
        return read_squad(path, labelled)
    rows = read_rows(path)
    if name in GLUE and split_name(path)[1] == ".tsv":
        skip = labelled and name == "qqp"  # a few of its lines are cut off
        rows = csv_rows(path, "\t", TASKS[name].header if labelled else (), quotes=False, skip=skip)
    return examples_of(name, rows, path, labelled)


def read_hub(name: str, split: str) -> list[Example] | list[Question]:
    """The examples or questions of task `name` in a split on the Hub."""
    task, found = TASKS[name], []
    hub = "hf:rajpurkar/squad_v2" if name == "squad2" else f"hf:nyu-mll/glue:{name}"
    records, _ = hub_records(hub, split, streaming=False)
    for number, record in enumerate(records, start=1):
        if name == "squad2":
            answers = zip(record["answers"]["answer_start"], record["answers"]["text"])
            found.append(Question(record["id"], record["question"], record["context"], tuple(answers)))
        else:  # on the Hub, labels are numbers, and STS-B's 3.2 is 3.200000047683716
            label = task.labels[record["label"]] if task.labels else str(round(record["label"], 3))
            found.append((f"{hub}, record {number}", record | {task.columns[-1]: label}))
    return found if name == "squad2" else examples_of(name, found, hub)


def submission(name: str, path: Path) -> str:
    """The name that GLUE's server expects for the file with predictions for `path`."""
    if name == "mnli" and "diagnostic" in path.name:
        return "AX.tsv"
    if name == "mnli":
        return "MNLI-mm.tsv" if "mismatched" in path.name else "MNLI-m.tsv"
    return f"{TASKS[name].folder}.tsv"


# ---- 3. Rows as examples ------------------------------------------------------------------------------------
def cell_of(record: dict, place: str, *columns: str) -> str:
    """The text of a record in the first of these columns that the record has. Raises UserError if there is no text."""
    column = next((name for name in columns if name in record), columns[0])
    if not isinstance(record.get(column), str):
        has = ", ".join(f"`{name}`" for name in record) if column not in record else repr(record[column])
        raise UserError(f"{place}: must have a text in column `{column}`, but has {has:.200}. A table must start with "
                        "a header; a .csv must have commas, and a .tsv must have tabs")
    return record[column]


def examples_of(name: str, rows: Iterable[Row], where: object, labelled: bool = True) -> list[Example]:
    """Rows of task `name` -> examples. Column names are those of the task's files, of the Hub, or text[,text2].
    Raises UserError if a row lacks a text or, if `labelled`, the label."""
    task, found = TASKS[name], []
    *columns, label = task.columns
    firsts = [*columns[:1], *task.other_columns[:1], "text"]
    seconds = [*columns[1:], *task.other_columns[1:], "text2"]
    for number, (place, record) in enumerate(rows):
        record = {column.strip().lower(): cell for column, cell in record.items()}
        text, text2 = cell_of(record, place, *firsts), None
        if any(record.get(column) is not None for column in seconds):
            text2 = cell_of(record, place, *seconds)
        value = cell_of(record, place, label).strip() if labelled else None
        if labelled and not (value and text.strip()):  # two of QQP's second questions are empty
            raise UserError(f"{place}: the text or the label in column `{label}` is empty")
        names = [record[name] for name in ("index", "idx", "id") if record.get(name)]
        index = str(names[0] if names else number)
        if re.search("[\t\n\r]", f"{index} {value}"):
            raise UserError(f"{place}: the label or id has a tab or a line break, which predictions.tsv cannot hold")
        found.append(Example(text, text2, value, index, place))
    if not found:
        raise UserError(f"{where}: has no rows below the header")
    return found


# ---- 4. SQuAD -----------------------------------------------------------------------------------------------
def field(record: dict, name: str, kind: type, place: str):
    """The value of a field. Raises UserError if it is missing or of the wrong type."""
    value = record.get(name) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise UserError(f"{place}: not in SQuAD's format: `{name}` is {value!r:.60}, not of type {kind.__name__}")
    return value


def read_squad(path: Path, labelled: bool = True) -> list[Question]:
    """The questions in a SQuAD JSON file, version 1.1 or 2.0, with their answers if they are `labelled`."""
    found, place = {}, str(path)
    for article in field(parse_json("".join(lines_of(path)), place), "data", list, place):
        for paragraph in field(article, "paragraphs", list, place):
            context = field(paragraph, "context", str, place)
            if not context.strip():
                raise UserError(f"{place}: a paragraph has an empty context; remove the paragraph")
            for record in field(paragraph, "qas", list, place):
                name = field(record, "id", str, place)
                if name in found:
                    raise UserError(f"{place}: a second question has the id {name}; give it another id")
                question = field(record, "question", str, f"{place}, question {name}")
                answers = read_answers(record, context, f"{place}, question {name}") if labelled else ()
                found[name] = Question(name, question, context, answers)
    if not found:
        raise UserError(f"{path}: has no questions")
    return list(found.values())


def read_answers(record: dict, context: str, place: str) -> tuple[tuple[int, str], ...]:
    """The answers to a question. Raises UserError if they contradict is_impossible or are not in the context."""
    found = []
    for answer in field(record, "answers", list, place):
        start = field(answer, "answer_start", int, place)
        text = field(answer, "text", str, place)
        if not text.strip() or start < 0 or context[start:start + len(text)] != text:
            raise UserError(f"{place}: answer {text!r} is empty, or not at character {start} of its context")
        found.append((start, text))
    impossible = record.get("is_impossible", False)
    if impossible is bool(found) or not isinstance(impossible, bool):
        raise UserError(f"{place}: has {len(found)} answers, but is_impossible is {impossible!r}; correct one of them")
    return tuple(found)
