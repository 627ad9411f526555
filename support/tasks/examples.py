"""The examples of a task, read from the Hub, from local files, or from the documentation on this machine."""
import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.program.cli import path_of
from support.program.errors import UserError, is_first, say
from support.program.files import short_hash
from support.tasks.task import TASKS, Example, Question
from support.text.corpus import VAL_SHARE, in_validation, ngrams
from support.text.documents import CACHE, read_docs
from support.text.readers import RECORDS, Record, hub_records, open_text, parquet_records, readable, split_name


# ---- 1. A whole task ----------------------------------------------------------------------------------------
def read_task(name: str, data: str | None, settings: dict) -> dict[str, list]:
    """The examples or questions of each split: train, dev, dev_mm of MNLI, and test of custom. `data` is a folder with
    the Hub's own files or those of custom_splits; None means the Hub. For docs, `settings` of the pre-training run has
    the fraction that it held out and its cache."""
    if name == "docs":
        splits = read_docs_task(settings.get("val_share", VAL_SHARE), settings.get("cache", CACHE))
    elif name == "custom":
        splits = custom_splits(data)
    else:
        parts = dict(zip(("train", "dev", "dev_mm"), ("train", *TASKS[name].dev)))
        records = {split: hub_files(name, data, part) if data else from_hub(name, part)
                   for split, part in parts.items()}
        of_records = {"classification": examples_of, "spans": questions_of}[TASKS[name].kind]
        splits = {split: of_records(name, each) for split, each in records.items() if split != "dev_mm" or each}
    for split, examples in splits.items():
        if not examples:
            raise UserError(f"--task {name}: its {split} split has no examples")
    return splits


def hash_of(splits: dict[str, list]) -> str:
    """A hash of the examples or questions of all splits, wherever they were read from."""
    return short_hash(repr([[example._replace(place="") for example in each] for each in splits.values()]))


def read_docs_task(val_share: float, cache: str) -> dict[str, list[Example]]:
    """Documentation strings, at most 100 (train) and 150 (dev) per library, none from the validation split of
    pre-training. No training text shares 13 words in a row with a dev text."""
    splits, known = {"train": [], "dev": []}, set()
    texts = sorted(read_docs(cache), key=lambda item: hashlib.blake2b(item[1].encode()).digest())
    for split, most in (("dev", 150), ("train", 100)):
        count = Counter()
        for library, text in texts:
            in_dev = in_validation(text, val_share + 0.1)  # the next tenth by hash
            if library not in TASKS["docs"].labels or in_validation(text, val_share) or in_dev != (split == "dev"):
                continue
            if count[library] < most and known.isdisjoint(ngrams(text)):
                count[library] += 1
                splits[split].append(Example(text, None, library))
        known = set().union(*[ngrams(example.text) for example in splits["dev"]])
    return splits


# ---- 2. GLUE and SQuAD 2.0, with the Hub's columns ----------------------------------------------------------
def data_set(name: str) -> str:
    """The name of a task's data set on the Hub."""
    return f"hf:{TASKS[name].hub or f'nyu-mll/glue:{name}'}"


def from_hub(name: str, part: str) -> list[Record]:
    """The records of a split on the Hub, with their places."""
    hub = data_set(name)
    records, _ = hub_records(hub, part, streaming=False)
    return [(f"{hub}, record {number}", record) for number, record in enumerate(records, start=1)]


def hub_files(name: str, data: str, part: str) -> list[Record]:
    """The records of a split in the Hub's Parquet files, in the task's own folder, which is `data` or inside it."""
    root, own = path_of(data).resolve(), re.split("[/:]", data_set(name))[-1]
    files = sorted((root if root.name == own else root / own).glob(f"{part}*.parquet"))
    if not files and part != "validation_mismatched":
        raise UserError(f"--data {data}: {name} needs the Hub's files {part}*.parquet, in a folder {own}")
    return [record for file in files for record in parquet_records(file)]


def examples_of(name: str, records: Iterable[Record], labeled: bool = True) -> list[Example]:
    """Records of a task that classifies texts -> examples. Raises UserError if a text (or label) is missing."""
    columns, examples = TASKS[name].columns, []
    for place, record in records:
        texts = [record.get(column) for column in columns]
        if name == "custom" and texts[1] is None:
            texts = texts[:1]  # the second text is optional
        if (labeled and "label" not in record) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place}: needs text in {' and '.join(columns)}, and a label, but has {record!r:.200}")
        text2 = texts[1] if len(texts) == 2 else None
        label = label_of(name, record.get("label"), place)
        if labeled and label is None:
            raise UserError(f"{place}: its label is missing; add one, or remove the row")
        examples.append(Example(texts[0], text2, label, place))
    return examples


def label_of(name: str, label, place: str) -> str | None:
    """A label as text: as written for custom, so that 1 and 1.0 stay different. The Hub's are numbers, and STS-B's 3.2
    is 3.200000047683716 there. None if the label is missing."""
    names = TASKS[name].labels
    label = label.strip() if isinstance(label, str) else label
    if label in (None, "") or label != label or (label == -1 and names):  # NaN differs from itself
        return None
    if isinstance(label, str):
        return label
    if name == "custom":
        return json.dumps(label)
    if not names:
        return str(label if isinstance(label, int) else float(f"{label:.6g}"))
    if label not in range(len(names)):
        raise UserError(f"{place}: label {label!r}: use a whole number from 0 to {len(names) - 1}")
    return names[int(label)]


def questions_of(name: str, records: Iterable[Record]) -> list[Question]:
    """Records of SQuAD -> questions."""
    questions = []
    for place, record in records:
        with readable(place):  # columns of another data set
            answers = tuple(zip(record["answers"]["answer_start"], record["answers"]["text"]))
            questions.append(Question(record["id"], record["question"], record["context"], answers, place))
    return questions


# ---- 3. Your own files --------------------------------------------------------------------------------------
def custom_splits(data: str) -> dict[str, list[Example]]:
    """The examples of files such as train.csv, dev.TSV.gz and, with or without labels, test.jsonl. Without dev, it is a
    tenth of train, chosen by a hash of the texts. Raises UserError if there is no train, or more than one file."""
    inside = sorted(path_of(data).glob("*"))
    splits = {}
    for split in ("train", "dev", "test"):
        names = ("dev", "validation", "valid", "val") if split == "dev" else (split,)
        files = [path for path in inside if split_name(path)[0].lower() in names and split_name(path)[1] in CUSTOM]
        if len(files) > 1 or (split == "train" and not files):
            listed = " and ".join(path.name for path in files) or "none"
            raise UserError(f"--data {data}: must have one file {split} ({', '.join(CUSTOM)}), but has {listed}")
        if files:
            splits[split] = custom_examples(files[0], labeled=split != "test")
        elif split == "dev":
            examples = sorted(splits["train"], key=lambda example: short_hash(repr(example[:2])))
            tenth = (len(examples) + 9) // 10
            splits = {"train": examples[tenth:], "dev": examples[:tenth]}
            if is_first():
                say(f"--data {data}: has no file dev; {tenth:,} examples of train, chosen by a hash, are dev")
    return splits


def table_records(path: Path) -> Iterator[Record]:
    """The rows of a .csv or .tsv file, with all cells as text. Raises UserError if a row is unlike the header."""
    # A .tsv has no quotes, as in GLUE's own files. In a .csv, strict: otherwise, an unpaired " would merge rows.
    how = dict(delimiter="\t", quoting=csv.QUOTE_NONE) if split_name(path)[1] == ".tsv" else dict(strict=True)
    csv.field_size_limit(1 << 30)  # characters in a cell
    with open_text(path) as file:
        rows = filter(None, csv.reader(file, **how))
        columns, number = next(rows, []), 0
        try:
            for number, row in enumerate(rows, start=1):
                if len(row) != len(columns):
                    raise UserError(f"{path}, row {number}: needs {len(columns)} cells like the header; has {len(row)}")
                yield f"{path}, row {number}", dict(zip(columns, row))
        except csv.Error as error:
            raise UserError(f'{path}, row {number + 1}: {error}; in a cell, write " as ""') from error


CUSTOM = {".csv": table_records, ".tsv": table_records} | RECORDS  # by format


def custom_examples(path: Path, labeled: bool = True) -> list[Example]:
    """The examples of a table with the columns text[,text2],label or sentence1,sentence2,label."""
    renamed, records = {"sentence1": "text", "sentence2": "text2"}, []
    for place, record in CUSTOM[split_name(path)[1]](path):
        record = {column.strip().lower(): cell for column, cell in record.items()}
        records.append((place, {renamed.get(column, column): cell for column, cell in record.items()}))
    return examples_of("custom", records, labeled)
