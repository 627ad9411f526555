"""From --data to documents: files and their records, and which documents are held out.

A record is a dictionary: a line of .jsonl, a row of .parquet, .csv or .tsv, or {"text": a document of .txt}.
"""
import csv
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow.parquet
from fsspec.implementations.local import LocalFileSystem

from support.docs import HELD_OUT, MODULES, SCORED, in_validation, ngrams, read_docs, scored_docs, versions
from support.program import CACHE, UserError, path_of, short_hash

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
GROUPED = 10_000  # characters after which a document of a .txt ends, also without a blank line


@dataclass(frozen=True)
class Text:
    """The settings that select a text."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG]; join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, .csv, .tsv, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = 0.01  # share of documents held out for validation
    cache: str = CACHE  # folder for tokenized corpora

    def sources(self) -> list[str]:
        """The sources that + joins in `data`: docs, hf:NAME[:CONFIG], or paths."""
        return [self.data] if path_of(self.data).exists() else self.data.split("+")


# ---- 1. Files and their records -----------------------------------------------------------------------------
def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv for test.CSV.gz."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.stem, path.suffix.lower()


def files_of(source: str) -> tuple[list[Path], Counter]:
    """All text files in a folder and the folders in it, links included, each once; or one file. Hidden ones are left
    out. Also the number of other files by suffix. Raises UserError if there is no text file."""
    root = path_of(source)
    found = {root.resolve(): root} if root.is_file() else {}
    entered = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        again = os.path.realpath(folder) in entered  # through a link
        entered.add(os.path.realpath(folder))
        folders[:] = [] if again else [name for name in folders if name[0] != "."]
        for path in [Path(folder, name) for name in names if name[0] != "." and not again]:
            is_text = split_name(path)[1] in READERS  # a link may have another suffix
            if path.is_file() and (is_text or path.resolve() not in found):
                found[path.resolve()] = path
    files = sorted(path for path in found.values() if split_name(path)[1] in READERS)
    if not source or not files:
        raise UserError(f"--data {source}: has no file ending in {', '.join(READERS)}, plain or compressed; other "
                        "sources are docs and hf:NAME")
    return files, Counter(path.suffix or path.name for path in found.values() if path not in files)


def grouped(lines: Iterable[str]) -> Iterator[dict]:
    """Documents, which end at a blank line or with the line in which they reach GROUPED characters."""
    document, size = [], 0
    for line in itertools.chain(lines, [" "]):  # a blank line ends the last one
        if not line.isspace():
            document.append(line)
            size += len(line)
        if document and (line.isspace() or size >= GROUPED):
            yield {"text": "".join(document)}
            document, size = [], 0


def table_rows(lines: IO[str], separators: str, quoting: int) -> Iterator[dict]:
    """Rows of a table, whose cells are texts, as written. The header shows which separator is used."""
    csv.field_size_limit(1 << 30)  # characters in a cell
    header = next(lines, "")
    separator = max(separators, key=header.count)
    rows = csv.DictReader(itertools.chain([header], lines), delimiter=separator, quoting=quoting, strict=True)
    if len({*rows.fieldnames}) < len(rows.fieldnames):
        raise ValueError(f"two columns have one name: {', '.join(rows.fieldnames)}")
    for row in rows:
        if None in row:
            raise ValueError("a row has more cells than the header")
        yield row


def parquet_rows(file: IO[bytes]) -> Iterator[dict]:
    """Rows of a .parquet file."""
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
        yield from batch.to_pylist()


def json_objects(lines: IO[str]) -> Iterator[dict]:
    """The objects in lines of JSON, of which some may be blank."""
    return (json.loads(line) for line in lines if not line.isspace())


READERS = {  # suffix -> the records in an open file
    ".txt": grouped, ".jsonl": json_objects, ".json": json_objects,
    ".csv": lambda lines: table_rows(lines, ",;\t", csv.QUOTE_MINIMAL),
    ".tsv": lambda lines: table_rows(lines, "\t", csv.QUOTE_NONE),  # as in GLUE's own files
    ".parquet": parquet_rows}


def records_of(path: Path) -> Iterator[dict]:
    """The records of a file. Raises UserError if it cannot be read; texts must be UTF-8."""
    kind = split_name(path)[1]
    how = dict(mode="rb") if kind == ".parquet" else dict(mode="rt", encoding="utf-8-sig", newline=None)
    if kind == ".csv":
        how["newline"] = ""  # a cell may hold \r
    count = 0
    try:
        compression = "zstd" if path.suffix == ".zst" else "infer"  # which reads .zst as plain without zstandard
        with LocalFileSystem().open(str(path.absolute()), compression=compression, **how) as file:
            for record in READERS[kind](file):
                if not isinstance(record, dict):
                    raise ValueError("a line is not a JSON object")
                yield record
                count += 1
    except Exception as error:  # each format has its own errors
        raise UserError(f"{path}, after record {count}: cannot be read ({error})") from error


def hub_records(name: str, split: str = "train") -> Iterable[dict]:
    """The records of hf:NAME[:CONFIG], downloaded to the folder HF_HOME."""
    import datasets  # here, because it takes a second
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read instead; run in another folder")
    return datasets.load_dataset(path, config or None, split=split)


# ---- 2. Documents -------------------------------------------------------------------------------------------
def column_of(place: Path | str, records: Iterable[dict], column: str) -> Iterator[str]:
    """The texts in a column of records, "" where it is missing. Raises UserError if the first record lacks it."""
    for number, record in enumerate(records):
        if number == 0 and column not in record:
            raise UserError(f"{place}: --column can be {', '.join(record)}, not {column}")
        text = record.get(column) or ""
        if not isinstance(text, str):
            raise UserError(f"{place}: needs text in its field {column}, not {text!r:.40}")
        yield text.encode(errors="replace").decode()  # half of a surrogate pair, as JSON may have it, becomes "?"


def texts_of(text: Text, remarks: list[str]) -> Iterator[str]:
    """The texts of all sources, unchanged. After each source, the remarks get a line: what was read, and what not."""
    for source in text.sources():
        others = Counter()
        if source == "docs":
            places = {source: ({"text": document} for _, document in read_docs(text.cache))}
        elif source.startswith("hf:"):
            places = {source: hub_records(source)}
        else:
            files, others = files_of(source)
            places = {file: records_of(file) for file in files}
        count = empty = 0
        for place, records in places.items():
            has_fields = source.startswith("hf:") or (source != "docs" and split_name(place)[1] != ".txt")
            for document in column_of(place, records, text.column if has_fields else "text"):
                count += 1
                empty += not document.strip()
                yield document
        skipped = ", ".join(f"{number:,} {suffix}" for suffix, number in sorted(others.items())) or "none"
        remarks.append(f"{source}: {count:,} texts, of which {empty:,} are empty or missing; files "
                       f"read: {len(places):,}; other files: {skipped}")


def documents(text: Text, remarks: list[str] | None = None) -> Iterator[str]:
    """The documents that a Text selects, without empty lines around them; empty ones are dropped. For `remarks`, see
    texts_of."""
    for document in texts_of(text, [] if remarks is None else remarks):
        trimmed = re.sub(r"^(\s*\n)+", "", document).rstrip()  # the first line keeps its indentation
        if trimmed:
            yield trimmed


def split_documents(text: Text, remarks: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """(split, document) of each document. In `docs`, which repeats many texts, the texts on which a task is scored,
    and near-duplicates of them or of the validation split, are "held out"."""
    docs, known = set(), set()
    if "docs" in text.sources():
        docs.update(document for _, document in read_docs(text.cache))
        scored = scored_docs(text.val_share, text.cache)
        unseen = itertools.chain(scored, (each for each in documents(text) if in_validation(each, text.val_share)))
        known.update(scored, *map(ngrams, unseen))
    for document in documents(text, remarks):
        if in_validation(document, text.val_share):
            yield "val", document
        elif document in docs and not known.isdisjoint({document, *ngrams(document)}):
            yield "held out", document
        else:
            yield "train", document


def content_hash(text: Text) -> str:
    """A hash of all that decides the documents and their splits, wherever the files are: their contents, or the
    versions of the documentation. For a data set on the Hub, only the name counts."""
    made_from = [text.column, text.uncased, text.val_share]
    for source in text.sources():
        if source == "docs":
            made_from += ["docs", HELD_OUT, SCORED, MODULES, *versions()]
        elif source.startswith("hf:"):
            made_from.append(source)
        else:
            for path in files_of(source)[0]:
                with open(path, "rb") as file:
                    made_from += [split_name(path)[1], hashlib.file_digest(file, "blake2b").hexdigest()]
    return short_hash(repr(made_from))
