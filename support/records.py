"""One reader of files: the records of texts, tables, JSON and Parquet, and of the Hub.

A path is a path, never a pattern. Text is UTF-8, with or without a byte order mark. Any file may be compressed. The
suffix names the format, in upper or lower case: labels.CSV.gz is a table with commas.
"""
import bz2
import csv
import gzip
import io
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
    """The lines of a text, each with its end. Only with newline="" are the ends as they are in the file. UserError for
    a text that is not UTF-8."""
    with readable(path), open_bytes(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline)
        for number, line in enumerate(text, start=1):
            utf16 = number == 1 and "\0" in line  # without a byte order mark
            if utf16 or not is_text(line):
                raise UserError(f"{path}, line {number}: not UTF-8; convert the file to UTF-8, for example with iconv")
            yield line


def is_text(line: str) -> bool:
    """Whether a line was UTF-8: bytes that were not have become halves of surrogate pairs."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def paragraphs_of(path: Path) -> Iterator[str]:
    """The parts of a text between blank lines."""
    part = ""
    for line in lines_of(path):
        if line != "\n":
            part += line
        elif part:
            yield part.removesuffix("\n")
            part = ""
    if part:
        yield part.removesuffix("\n")


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
        if line.lstrip().startswith("["):
            values = parse_json(line + "".join(lines), str(path), number)
            yield from [json_row(f"{path}, record {i}", value) for i, value in enumerate(values, start=1)]
        elif line.strip():
            place = f"{path}, line {index}"
            yield json_row(place, parse_json(line, place, number))


def json_row(place: str, value) -> Row:
    """A JSON object as a row. UserError for another value."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: needs an object such as {{\"text\": ...}}; has {value!r:.60}")
    for name, cell in value.items():
        if isinstance(cell, str):  # half a surrogate pair, such as \ud83d, is no text
            value[name] = cell.encode(errors="replace").decode()
    return place, value


# ---- 3. Tables ----------------------------------------------------------------------------------------------
def csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """The rows of a table whose first line is a header. Quotes enclose cells with delimiters or line breaks."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(lines_of(path, newline=""), delimiter=delimiter, strict=True)
    header = None
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{place}: {error}; write a quote inside of quotes twice") from error
        if cells is None:
            return
        if cells and header is None:
            header = check_header(cells, place)
        elif cells:  # a blank line has none
            yield place, fit(header, cells, place, "put quotes around a text that contains a comma, tab or line break")


def check_header(cells: list[str], place: str) -> list[str]:
    """The names of columns. UserError if two are equal."""
    header = [cell.strip() for cell in cells]
    for name in header:
        if name and header.count(name) > 1:
            raise UserError(f"{place}: the header has two columns `{name}`; rename one")
    return header


def fit(header: list[str], cells: list[str], place: str, advice: str) -> dict[str, str]:
    """Cells by column. UserError with advice if their number differs from the header's."""
    if len(cells) != len(header):
        raise UserError(f"{place}: {len(cells)} cells, but {len(header)} columns in the header; {advice}")
    return dict(zip(header, cells))


def glue_rows(path: Path, header: tuple[str, ...], labelled: bool) -> Iterator[Row]:
    """The rows of one of GLUE's own TSV files, where quotes are characters; `header` if the file has none. With
    labels, lines that do not fit are left out: a few of QQP's are cut off. Without, they raise a UserError."""
    names = list(header)
    for number, line in enumerate(lines_of(path), start=1):
        cells = line.removesuffix("\n").split("\t")
        place = f"{path}, line {number}"
        if not names:
            names = check_header(cells, place)
        elif len(cells) == len(names) or (line.strip() and not labelled):
            yield place, fit(names, cells, place, "remove tabs from the texts")


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
        yield from csv_rows(path, "\t" if kind == ".tsv" else ",")
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
