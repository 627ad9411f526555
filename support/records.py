"""One reader of files: the lines of texts, the rows of tables, JSON and Parquet, and data sets of the Hub.

A path is a path, never a pattern. Text is UTF-8, with or without a byte order mark, and may be compressed. The suffix
names the format, in upper or lower case: labels.CSV.gz is a table with commas.
"""
import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from support.cli import UserError, root_cause

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # and .zst
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LONGEST_CELL = 2 ** 31 - 1  # characters

Row = tuple[str, dict]  # its place, such as "a.csv, line 7", and its cells by column


def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv for test.CSV.gz."""
    name = path.name
    if Path(name).suffix.lower() in {*COMPRESSED, ".zst"}:
        name = Path(name).stem
    return Path(name).stem, Path(name).suffix.lower()


# ---- 1. Bytes and lines -------------------------------------------------------------------------------------
@contextmanager
def readable(name: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn the errors of a source that cannot be read into a UserError that names it."""
    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, *kinds) as error:
        reason = getattr(error, "strerror", None) or root_cause(error)  # strerror: without the path
        raise UserError(f"{name}: cannot be read ({reason})") from error


def open_bytes(path: Path) -> BinaryIO:
    """The content of a file, decompressed."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # here: it takes a while
        return pyarrow.input_stream(str(path), compression="zstd")
    return COMPRESSED.get(suffix, open)(path, "rb")


def lines_of(path: Path, newline: str | None = None, longest: int = -1) -> Iterator[str]:
    """The lines of a text, each with its end, which only newline="" leaves as it is in the file. Lines of more than
    `longest` characters come in parts. Raises UserError unless the text is UTF-8."""
    with readable(path), open_bytes(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline)
        for number in itertools.count(1):
            line = text.readline(longest)
            if not line:
                return
            utf16 = number == 1 and "\0" in line  # without a byte order mark
            # Bytes that are not UTF-8 have become halves of surrogate pairs, which cannot be encoded.
            if utf16 or not (line.isascii() or line.encode(errors="ignore").decode() == line):
                raise UserError(f"{path}, line {number}: not UTF-8; convert the file to UTF-8, for example with iconv")
            yield line


def split_long(texts: Iterable[str], longest: int) -> Iterator[str]:
    """Texts in pieces of at most `longest` characters; an empty text is one piece."""
    for text in texts:
        for start in range(0, max(len(text), 1), longest):
            yield text[start:start + longest]


# ---- 2. Rows ------------------------------------------------------------------------------------------------
def parse_json(text: str, place: str, number: Callable | None = None):
    """The value of a JSON text; `number` makes each number from its letters. Raises UserError."""
    try:
        return json.loads(text, parse_int=number, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from error


def json_rows(path: Path, number: Callable | None = None) -> Iterator[Row]:
    """The objects of a file with one of them per line, or with a list of them."""
    lines = lines_of(path)
    for index, line in enumerate(lines, start=1):
        values, places = [], itertools.repeat(f"{path}, line {index}")
        if line.lstrip().startswith("["):
            values = parse_json(line + "".join(lines), str(path), number)
            places = (f"{path}, record {i}" for i in itertools.count(1))
        elif line.strip():
            values = [parse_json(line, next(places), number)]
        for place, value in zip(places, values):
            if not isinstance(value, dict):
                raise UserError(f"{place}: needs an object such as {{\"text\": ...}}; has {value!r:.60}")
            for name, cell in value.items():
                if isinstance(cell, str):  # half a surrogate pair, such as \ud83d, is no text
                    value[name] = cell.encode(errors="replace").decode()
            yield place, value


def csv_rows(path: Path, comma: str, header: tuple = (), quotes: bool = True, skip: bool = False) -> Iterator[Row]:
    """The rows of a table. Its first line is the header unless one is given. `quotes` enclose cells with commas or line
    breaks; else they are characters. Rows that do not fit the header raise a UserError, or are left out with `skip`."""
    csv.field_size_limit(LONGEST_CELL)
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(lines_of(path, newline=""), delimiter=comma, quoting=quoting, strict=True)
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{place}: {error}; write a quote inside of quotes twice") from error
        if cells is None:
            return
        if cells and not header:  # a blank line has no cells
            header = [cell.strip() for cell in cells]
            twice = [name for name in header if name and header.count(name) > 1]
            if twice:
                raise UserError(f"{place}: the header has two columns `{twice[0]}`; rename one")
        elif len(cells) == len(header):
            yield place, dict(zip(header, cells))
        elif cells and not skip:
            advice = "put quotes around a text with a comma, tab or line break" if quotes else "remove tabs from texts"
            raise UserError(f"{place}: {len(cells)} cells, but {len(header)} columns in the header; {advice}")


def parquet_rows(path: Path, column: str | None = None) -> Iterator[Row]:
    """The rows of a Parquet file, with only this column if the file has it."""
    import pyarrow.parquet  # here: it takes a while
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        columns = [column] if column in file.schema_arrow.names else None
        number = 0
        for batch in file.iter_batches(batch_size=1000, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record


def table_rows(path: Path) -> Iterator[Row]:
    """The rows of a table. Cells are text: what a CSV contains, the digits of a number in JSON (1.0 is not 1), and
    numbers of Parquet as Python writes them. null, and NaN in Parquet, are None. Raises UserError for a bad row."""
    _, kind = split_name(path)
    if kind in (".csv", ".tsv"):
        yield from csv_rows(path, comma="\t" if kind == ".tsv" else ",")
        return
    for place, record in parquet_rows(path) if kind == ".parquet" else json_rows(path, str):
        for name, cell in record.items():
            if isinstance(cell, bool | int | float):
                record[name] = json.dumps(cell) if cell == cell else None
        yield place, record


# ---- 3. The Hub ---------------------------------------------------------------------------------------------
def hub_records(name: str, split: str = "train", streaming: bool = True) -> tuple[Iterable[dict], bool]:
    """The records of hf:NAME[:CONFIG], and whether each is a line of a text. Raises UserError if it cannot be read."""
    import datasets  # here: it takes a second
    from huggingface_hub.constants import HF_HOME
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log our errors
    datasets.disable_progress_bars()
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
    with suppress(OSError):
        os.makedirs(HF_HOME, exist_ok=True)
    if not os.access(HF_HOME, os.W_OK):
        raise UserError(f"{name}: {HF_HOME}, for downloads, cannot be written; set HF_HOME to another folder")
    errors = HTTPError, datasets.exceptions.DatasetsError
    with readable(name, *errors):
        is_text = hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by")
        found = datasets.load_dataset(path, config or None, split=split, streaming=streaming)

    def records():
        with readable(name, *errors):
            yield from found
    return records(), is_text
