"""The examples of a task, read from its files, from the Hub, or from the documentation on this machine."""
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.cli import UserError
from support.documents import in_validation, read_docs
from support.records import TABLES, Row, csv_rows, hub_records, lines_of, parse_json, split_name, table_rows
from support.tasks import GLUE, SPLITS, TASKS, Example, Question

INPUTS = (*TABLES, ".txt")  # formats of texts without labels


# ---- 1. A whole task ----------------------------------------------------------------------------------------
def read_task(name: str, data: str | None, val_share: float) -> tuple[dict[str, list], list[str]]:
    """The examples or questions of each split, and remarks on differences from the official release. `val_share` is
    the share that pre-training held out. UserError if a file is missing or cannot be understood."""
    task, remarks = TASKS[name], []
    if name == "docs":
        found = read_docs_task(val_share)
    elif data is None:
        found = {split: read_hub(name, file.replace("dev", "validation")) for split, file in zip(SPLITS, task.files)}
    else:
        found = {split: read_file(name, path) for split, path in find_files(name, data).items()}
    for split, examples in found.items():
        check_pairs(examples, is_pair(found["train"]), split, "train")
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
    if not root.is_dir():
        raise UserError(f"--data {data}: no such folder; {name} needs a folder with {' and '.join(task.files[:2])}")
    found = {}
    for split, file in zip(SPLITS, task.files):
        paths = files_called(file, name, root / task.folder) or files_called(file, name, root)
        if len(paths) > 1:
            raise UserError(f"--data {data}: holds {paths[0].name} and {paths[1].name}; move all but one away")
        if paths:
            found[split] = paths[0]
        elif split != "dev_mm":
            inside = f" or in {task.folder}/" if task.folder else ""
            raise UserError(f"--data {data}: no {file}{' or '.join(task.formats)} there{inside}")
    return found


def files_called(file: str, name: str, folder: Path) -> list[Path]:
    """The files of a split in a folder, such as dev.tsv, dev.TSV.gz or validation.tsv. SQuAD's have longer names."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        stem, suffix = split_name(path)
        stem = re.sub("^(validation|valid|val)", "dev", stem.lower())
        fits = stem.startswith(file) if name == "squad2" else stem == file
        if fits and suffix in TASKS[name].formats and path.is_file():
            found.append(path)
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
            found[split].append(Example(text, None, library, str(len(found[split]))))
    return found


# ---- 2. One split, from a file or the Hub -------------------------------------------------------------------
def read_file(name: str, path: Path, labelled: bool = True) -> list[Example] | list[Question]:
    """The examples or questions of task `name` in a file. A .tsv of GLUE has GLUE's own rules."""
    if name == "squad2":
        return read_squad(path, labelled)
    _, suffix = split_name(path)
    if suffix not in INPUTS:
        raise UserError(f"{path}: the name must end in {', '.join(INPUTS)}, and may then end in .gz, .bz2, .xz or .zst")
    if suffix == ".txt":
        lines = enumerate(lines_of(path), start=1)
        rows = ((f"{path}, line {number}", {"text": line.removesuffix("\n")}) for number, line in lines)
    elif suffix == ".tsv" and name in GLUE:
        rows = csv_rows(path, "\t", TASKS[name].header if labelled else (), quotes=False, skip=labelled)
        if labelled:  # a few of QQP's lines are cut off
            rows = (row for row in rows if row[1].get(TASKS[name].columns[-1]) != "")
    else:
        rows = table_rows(path)
    return examples_of(name, rows, str(path), labelled)


def read_hub(name: str, split: str, labelled: bool = True) -> list[Example] | list[Question]:
    """The examples or questions of task `name` in a split on the Hub; "ax" is MNLI's diagnostic set."""
    task, found = TASKS[name], []
    hub = "hf:rajpurkar/squad_v2" if name == "squad2" else f"hf:nyu-mll/glue:{name}"
    if (name, split) == ("mnli", "ax"):
        hub, split = "hf:nyu-mll/glue:ax", "test"
    records, _ = hub_records(hub, split, streaming=False)
    for number, record in enumerate(records, start=1):
        if name == "squad2":
            answers = zip(record["answers"]["answer_start"], record["answers"]["text"])
            found.append(Question(record["id"], record["question"], record["context"], tuple(answers)))
        else:  # labels are numbers there, and STS-B's 3.2 is 3.200000047683716
            label = task.labels[record["label"]] if task.labels else str(round(record["label"], 3))
            found.append((f"{hub}, record {number}", record | {task.columns[-1]: label}))
    return found if name == "squad2" else examples_of(name, found, hub, labelled)


def read_inputs(name: str, source: str, pairs: bool | None = None) -> list[Example] | list[Question]:
    """The inputs that a model of task `name` is to predict: a file, or hf:[SPLIT], a split of the task on the Hub.
    UserError if the model was trained on pairs and these are single texts, or the reverse."""
    if source.startswith("hf:") and name in GLUE:
        found = read_hub(name, source[3:] or TASKS[name].files[1].replace("dev", "test"), labelled=False)
    else:
        found = read_file(name, Path(source), labelled=False)
    if pairs is not None:  # an older model does not say
        check_pairs(found, pairs, source, "the training data of this model")
    return found


def submission(name: str, source: str, predictions: list[dict]) -> dict[str, str]:
    """The file that GLUE's server takes, by its name: predictions for the texts in `source`. MNLI has three such files,
    and a text without an index none."""
    stem, suffix = split_name(Path(source))
    if suffix == ".txt":
        return {}
    file = TASKS[name].folder
    if name == "mnli" and ("diagnostic" in stem or stem.lower().removeprefix("hf:") == "ax"):
        file = "AX"
    elif name == "mnli":
        file = "MNLI-mm" if "mismatched" in stem else "MNLI-m"
    lines = [f"{line['id']}\t{line['prediction']}\n" for line in predictions]
    return {f"{file}.tsv": "".join(["index\tprediction\n", *lines])}


# ---- 3. Rows as examples ------------------------------------------------------------------------------------
def is_pair(examples: list[Example]) -> bool:
    """Whether examples have two texts each; questions do not count."""
    return isinstance(examples[0], Example) and examples[0].text2 is not None


def check_pairs(examples: list[Example], pairs: bool, here: str, there: str):
    """UserError unless examples have two texts where those that they are compared with do."""
    if is_pair(examples) != pairs:
        has = "has" if is_pair(examples) else "lacks"
        raise UserError(f"{here} {has} a second text (column text2), unlike {there}; use the same columns in both")


def cell_of(column: str, record: dict, place: str) -> str:
    """The text of a record in a column. UserError if there is none."""
    if column not in record:
        there = ", ".join(f"`{name}`" for name in record)
        raise UserError(f"{place}: needs a column `{column}`; has {there[:200]}. A table starts with a header; a .csv "
                        "has commas, a .tsv has tabs")
    if not isinstance(record[column], str):
        raise UserError(f"{place}: `{column}` is {record[column]!r:.40}, not a text")
    return record[column]


def texts_of(name: str, record: dict, place: str) -> tuple[str, str | None]:
    """The text of a record, and its second text or None. Columns are called as in the files of task `name`, as on the
    Hub, or text[,text2]. UserError if a text is missing, or if there is one too many."""
    *columns, _ = TASKS[name].columns
    if name == "custom" and record.get("text2") is None:  # it is optional
        columns = ["text"]
    if len(columns) == 1 and record.get("text2") is not None:
        raise UserError(f"{place}: has a column text2, but {name} is a task of single texts")
    for names in (TASKS[name].hub_columns, ("text", "text2")[:len(columns)]):
        if names and record.keys() >= set(names):
            columns = names
    texts = [cell_of(column, record, place) for column in columns]
    return texts[0], texts[1] if len(texts) > 1 else None


def examples_of(name: str, rows: Iterable[Row], where: str, labelled: bool = True) -> list[Example]:
    """Rows of task `name` -> examples. UserError for a row that lacks a text or, if `labelled`, the label."""
    known = TASKS[name].columns
    found = []
    for number, (place, record) in enumerate(rows):
        for column in record:
            if name == "custom" and column not in known and column.lower() in known:
                raise UserError(f"{place}: has a column `{column}`; call it `{column.lower()}`")
        text, text2 = texts_of(name, record, place)
        label = cell_of(known[-1], record, place).strip() if labelled else None
        if labelled and not (label and text.strip()):  # two of QQP's questions are empty, both second ones
            raise UserError(f"{place}: the text or the label in column `{known[-1]}` is empty")
        index = str(record.get("index", record.get("idx", record.get("id", number))))
        found.append(Example(text, text2, label, index, place))
        if is_pair(found) != (text2 is not None):
            raise UserError(f"{place}: some rows have a second text (text2) and others have none")
    if not found:
        raise UserError(f"{where}: has no rows" + (f" with a label in column `{known[-1]}`" if labelled else ""))
    return found


# ---- 4. SQuAD -----------------------------------------------------------------------------------------------
TYPES = {str: "a text", int: "a whole number", bool: "true or false", list: "a list"}


def field(record: dict, name: str, kind: type, place: str):
    """The value of a field. UserError if it is missing or of another type."""
    value = record.get(name) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise UserError(f"{place}: not in the format of SQuAD: `{name}` is {value!r:.60}, not {TYPES[kind]}")
    if kind is str:  # half a surrogate pair is no text
        value = value.encode(errors="replace").decode()
    return value


def read_squad(path: Path, labelled: bool = True) -> list[Question]:
    """The questions of a SQuAD JSON file, version 1.1 or 2.0, which may lack the answers unless they are `labelled`.
    UserError if it is not one."""
    found = {}
    content = parse_json("".join(lines_of(path)), str(path))
    for article in field(content, "data", list, str(path)):
        for paragraph in field(article, "paragraphs", list, str(path)):
            context = field(paragraph, "context", str, str(path))
            for record in field(paragraph, "qas", list, str(path)):
                name = field(record, "id", str, str(path))
                place = f"{path}, question {name}"
                if name in found:
                    raise UserError(f"{place}: a second question has this id; give it another one")
                question = field(record, "question", str, place)
                answers = read_answers(record, context, place) if labelled else ()
                found[name] = Question(name, question, context, answers)
    if not found:
        raise UserError(f"{path}: has no questions")
    return list(found.values())


def read_answers(record: dict, context: str, place: str) -> tuple[tuple[int, str], ...]:
    """The answers of a question. UserError if they contradict is_impossible, or are not in the context."""
    impossible = "is_impossible" in record and field(record, "is_impossible", bool, place)
    found = []
    for answer in field(record, "answers", list, place):
        start = field(answer, "answer_start", int, place)
        text = field(answer, "text", str, place)
        if not text.strip():
            raise UserError(f"{place}: an answer is empty; an unanswerable question has is_impossible: true")
        if start < 0 or context[start:start + len(text)] != text:
            raise UserError(f"{place}: answer {text!r} is not at character {start} of its context")
        found.append((start, text))
    if impossible == bool(found):
        wrong = "has answers, but is_impossible is true" if impossible else "no answers, but is_impossible is not true"
        raise UserError(f"{place}: {wrong}; correct one of them")
    return tuple(found)
