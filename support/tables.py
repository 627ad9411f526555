"""One reader for files: lines of text, rows of tables (CSV, JSON, Parquet), and data sets on the Hub.

Paths are never patterns. Text is UTF-8, with or without a byte order mark, and may be compressed. The suffix
names the format, in upper or lower case: labels.CSV.gz is a table with commas.
"""
import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from support.cli import UserError, root_cause

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # and .zst
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")

Row = tuple[str, dict]  # the place of a row, such as "a.csv, line 7", and its cells by column


def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv for test.CSV.gz."""
    if path.suffix.lower() in {*COMPRESSED, ".zst"}:
        path = path.with_suffix("")
    return path.stem, path.suffix.lower()


@contextmanager
def readable(name: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn the errors of reading a source into a UserError that names the source."""
    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, *kinds) as error:
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # here, because it is slow
        return pyarrow.input_stream(str(path), compression="zstd")
    return COMPRESSED.get(suffix, open)(path, "rb")


def lines_of(path: Path, newline: str | None = None, longest: int = -1) -> Iterator[str]:
    """The lines of a text with their line ends, which are preserved only if newline="". Lines of more than `longest`
    characters are split. Raises UserError unless the text is UTF-8."""
    with readable(path), open_bytes(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline)
        for number in itertools.count(1):
            line = text.readline(longest)
            if not line:
                return
            utf16 = number == 1 and "\0" in line  # without a byte order mark
            # Bytes that are not UTF-8 were decoded as halves of surrogate pairs, which cannot be encoded.
            if utf16 or not (line.isascii() or line.encode(errors="ignore").decode() == line):
                raise UserError(f"{path}, line {number}: not UTF-8; convert the file to UTF-8, for example with iconv")
            yield line


def split_long(texts: Iterable[str], longest: int) -> Iterator[str]:
    """Split texts into pieces of at most `longest` characters; an empty text is one piece."""
    for text in texts:
        for start in range(0, max(len(text), 1), longest):
            yield text[start:start + longest]


def parse_json(text: str, place: str):
    """The value of a JSON text. Raises UserError if it is not JSON."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair, such as \ud83d alone, is not text
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from error


def json_rows(path: Path) -> Iterator[Row]:
    """The objects in a file that has one object per line, or a list of objects."""
    lines, unit = lines_of(path), "line"
    for index, line in enumerate(lines, start=1):
        values = []
        if line.lstrip().startswith("["):
            values, unit = parse_json(line + "".join(lines), str(path)), "record"
        elif line.strip():
            values = [parse_json(line, f"{path}, line {index}")]
        for place, value in enumerate(values, start=index):
            if not isinstance(value, dict):
                raise UserError(f"{path}, {unit} {place}: must be an object like {{\"text\": ...}}, not {value!r:.60}")
            yield f"{path}, {unit} {place}", value


def refuse_equal_names(place: object, names: Iterable[str | None]):
    """Raises UserError if two columns have the same name, apart from case and spaces."""
    names = [name.strip().lower() for name in names if name]
    if len(set(names)) < len(names):
        raise UserError(f"{place}: two of the columns {', '.join(names)} have the same name; rename one")


def csv_rows(path: Path, comma: str, header: tuple = (), quotes: bool = True, skip: bool = False) -> Iterator[Row]:
    """The rows of a table. Its first line is the header unless one is given. With `quotes`, quotation marks enclose
    cells that contain commas or line breaks. Rows that do not fit the header raise UserError or are skipped."""
    csv.field_size_limit(2 ** 31 - 1)  # characters in a cell
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(lines_of(path, newline=""), delimiter=comma, quoting=quoting, strict=True)
    try:
        names = header or next(reader, [])
        refuse_equal_names(path, names)
        for cells in reader:
            if not cells and len(names) == 1:  # a blank line is an empty cell
                cells = [""]
            if len(cells) == len(names):
                yield f"{path}, line {reader.line_num}", dict(zip(names, cells))
            elif cells and not skip:
                raise UserError(f"{path}, line {reader.line_num}: must have as many cells as the header; put a "
                                "text with a comma, tab or line break in quotes; in GLUE's files, remove the tab")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; double the quotes inside a text") from error


def parquet_rows(path: Path, column: str | None = None) -> Iterator[Row]:
    """The rows of a Parquet file. If it has this column, only this column is read."""
    import pyarrow.parquet  # here, because it is slow
    number = itertools.count(1)
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        columns = [column] if column in file.schema_arrow.names else None
        refuse_equal_names(path, [] if columns else file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1000, columns=columns):
            for record in batch.to_pylist():
                yield f"{path}, row {next(number)}", record


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a table, or the lines of a .txt file as `text`. Cells keep the file's text. Numbers from JSON and
    Parquet are written as in Python (1.0 is not 1); null and NaN become None. Raises UserError for bad rows."""
    _, kind = split_name(path)
    if kind in (".csv", ".tsv"):
        yield from csv_rows(path, comma="\t" if kind == ".tsv" else ",")
    elif kind == ".txt":
        for number, line in enumerate(lines_of(path), start=1):
            yield f"{path}, line {number}", {"text": line.removesuffix("\n")}
    elif kind in TABLES:
        for place, record in parquet_rows(path) if kind == ".parquet" else json_rows(path):
            refuse_equal_names(place, record)
            for name, cell in record.items():
                if isinstance(cell, bool | int | float):
                    record[name] = json.dumps(cell) if cell == cell else None
            yield place, record
    else:
        raise UserError(f"{path}: the name must end in .txt, {', '.join(TABLES)}; .gz, .bz2, .xz or .zst may follow")


def hub_records(name: str, split: str = "train", streaming: bool = True) -> tuple[Iterable[dict], bool]:
    """The records of hf:NAME[:CONFIG], and whether each record is a line of text. Raises UserError if they cannot be
    read."""
    import datasets  # here, because it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs errors that we report
    datasets.disable_progress_bars()
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read instead; run in another folder")
    source = f"{name}, downloaded to the folder HF_HOME", HTTPError, datasets.exceptions.DatasetsError
    with readable(*source):
        is_text = hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by")
        found = datasets.load_dataset(path, config or None, split=split, streaming=streaming)

    def records():
        with readable(*source):
            yield from found
    return records(), is_text
