"""One reader of files: the records of texts, tables, JSON and Parquet, and of the Hub.

A path is a path, never a pattern. Text is UTF-8, with or without a byte order mark. Any file may be compressed. The
suffix names the format, in upper or lower case: labels.CSV.gz is a table with commas.
"""
import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from support.cli import UserError, root_cause

PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # and .zst
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LONGEST_CELL = 2 ** 31 - 1  # characters

Row = tuple[str, dict]  # its place, such as "a.csv, line 7", and its cells by column


def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv of test.CSV.gz."""
    name = path.name
    if Path(name).suffix.lower() in {*PACKED, ".zst"}:
        name = Path(name).stem
    return Path(name).stem, Path(name).suffix.lower()


# ---- 1. Bytes and lines -------------------------------------------------------------------------------------
@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into a UserError that names it."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:  # pyarrow's are ValueErrors
        reason = getattr(error, "strerror", None) or root_cause(error)  # strerror: without the path
        raise UserError(f"{path}: cannot be read ({reason})") from error


def open_bytes(path: Path) -> BinaryIO:
    """The content of a file, decompressed."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # here: it takes a while
        return pyarrow.input_stream(str(path), compression="zstd")
    return PACKED.get(suffix, open)(path, "rb")


def lines_of(path: Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text, each with its end; only with newline="" are the ends as in the file. UserError unless it is
    UTF-8."""
    with readable(path), open_bytes(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline)
        for number, line in enumerate(text, start=1):
            utf16 = number == 1 and "\0" in line  # without a byte order mark
            # Bytes that are not UTF-8 have become halves of surrogate pairs, which cannot be encoded.
            if utf16 or line.encode(errors="ignore").decode() != line:
                raise UserError(f"{path}, line {number}: not UTF-8; convert the file to UTF-8, for example with iconv")
            yield line


def paragraphs_of(path: Path) -> Iterator[str]:
    """The parts of a text between blank lines."""
    for is_blank, lines in itertools.groupby(lines_of(path), lambda line: line == "\n"):
        if not is_blank:
            yield "".join(lines).removesuffix("\n")


# ---- 2. JSON ------------------------------------------------------------------------------------------------
def parse_json(text: str, place: str, number: Callable | None = None):
    """The value of a JSON text; `number` makes each number from its letters."""
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


# ---- 3. Tables ----------------------------------------------------------------------------------------------
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


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file."""
    import pyarrow.parquet  # here: it takes a while
    with readable(path), open_bytes(path) as file:
        plain = file if path.suffix.lower() == ".parquet" else io.BytesIO(file.read())
        number = 0
        for batch in pyarrow.parquet.ParquetFile(plain).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record


def table_rows(path: Path) -> Iterator[Row]:
    """The rows of a table. Cells are text: what a CSV contains, the digits of a number in JSON (1.0 is not 1), and
    numbers of Parquet as Python writes them. null, and NaN in Parquet, are None. UserError for a damaged row."""
    _, kind = split_name(path)
    if kind in (".csv", ".tsv"):
        yield from csv_rows(path, comma="\t" if kind == ".tsv" else ",")
        return
    for place, record in parquet_rows(path) if kind == ".parquet" else json_rows(path, str):
        for name, cell in record.items():
            if isinstance(cell, bool | int | float):
                record[name] = json.dumps(cell) if cell == cell else None
        yield place, record


# ---- 4. Records of a corpus, and of the Hub -----------------------------------------------------------------
def read_records(loader: str, files: Iterable[str], name: str, **options) -> Iterator[dict]:
    """The records of files by their format (text, json, parquet), or with the loader "hub" those of the Hub's `name`.
    Texts have a record per line, or per paragraph with sample_by="paragraph". UserError if they cannot be read."""
    if loader == "hub":
        yield from hub_records(name, **options)
    for file in map(Path, files):
        if loader == "text" and options.get("sample_by") == "paragraph":
            yield from ({"text": part} for part in paragraphs_of(file))
        elif loader == "text":
            yield from ({"text": line.removesuffix("\n")} for line in lines_of(file))
        else:
            rows = parquet_rows(file) if loader == "parquet" else json_rows(file)
            yield from (record for _, record in rows)


def hub_records(name: str, **options) -> Iterator[dict]:
    """The records of hf:NAME[:CONFIG]. UserError if it cannot be read."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    datasets.disable_progress_bars()
    options = {"split": "train", "streaming": True} | options
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
    try:
        if hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by"):
            options["sample_by"] = "paragraph"  # text files, as those on this machine
        yield from datasets.load_dataset(path, config or None, **options)
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, HTTPError,
            datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error
