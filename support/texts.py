"""The texts in files: plain text and records, compressed or not, found by path.

Each record of a .jsonl, .json or .parquet file is a document. A text file is read line by line: a document ends at a
blank line, or at the end of the line with which it reaches 10,000 characters.
"""
import bz2
import glob
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cli import UserError, root_cause

GROUPED = 10_000  # characters; a document of lines without a blank line ends there
LONGEST = 1 << 22  # characters; a longer line or document, longer than any book, is cut
FORMATS = (".txt", ".jsonl", ".json", ".parquet")


def open_zst(path: Path, mode: str, encoding: str) -> io.TextIOWrapper:
    """Open a text file compressed by zstd, as gzip.open opens one compressed by gzip."""
    import pyarrow  # here: other formats do not need it
    return io.TextIOWrapper(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"), encoding)


COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": open_zst}  # suffix -> how it is opened


def format_of(file: Path) -> str:
    """The suffix of a file in lower case, without that of its compression: `.txt` for Book.TXT.gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        if suffixes[-1:] == [".parquet"]:  # has its own compression
            return ""
    return suffixes[-1] if suffixes else ""


def files_in(name: str) -> tuple[Path, ...]:
    """The text files that a path names, or else a pattern such as texts/*.txt, and those in its folders that are not
    hidden. UserError if there are none."""
    given = Path(name).expanduser()
    paths = [given] if given.exists() else sorted(map(Path, glob.glob(str(given))))
    if not paths or not name:
        raise UserError(f"--data {name}: no such file or folder; other sources are docs and hf:NAME")
    found = []
    for path in paths:
        inside = glob.glob("**", root_dir=path, recursive=True)  # skips what is hidden
        files = [path / part for part in sorted(inside)] or [path]
        found += [file for file in files if file.is_file() and format_of(file) in FORMATS]
    if not found:
        raise UserError(f"--data {name}: neither a file nor a folder with {', '.join(FORMATS)}; "
                        f"all but .parquet can be compressed ({', '.join(COMPRESSED)})")
    return tuple(found)


@contextmanager
def readable(name: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """While entered, an error that shows that a source cannot be read becomes a UserError with its name."""
    try:
        yield
    except UnicodeError as error:
        raise UserError(f"{name}: not UTF-8 ({error}); convert it: iconv -f LATIN1 (or UTF-16) -t UTF-8") from error
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, *kinds) as error:
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


def lines_of(path: Path, longest: int = -1) -> Iterator[str]:
    """The lines of a text file without its byte order mark. Lines of more than `longest` characters come in parts."""
    opened = COMPRESSED.get(path.suffix.lower(), open)
    with readable(path), opened(path, "rt", encoding="utf-8") as file:
        line = file.readline(longest).removeprefix("\ufeff")
        if "\0" in line:
            raise UnicodeError("it has NUL characters, as UTF-16 has")
        while line:
            yield line
            line = file.readline(longest)


def grouped(lines: Iterable[str]) -> Iterator[str]:
    """Lines as documents, by the rule at the top of this file."""
    document, size = [], 0
    for line in lines:
        blank = line.isspace()
        if not blank:
            document.append(line)
            size += len(line)
        if document and (blank or size >= GROUPED):
            yield "".join(document)
            document, size = [], 0
    if document:
        yield "".join(document)


def json_records(path: Path) -> Iterator[dict]:
    """The records of a file with one JSON object in each line, or with one list of objects."""
    lines = lines_of(path)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        with readable(path):
            yield from json.loads(first + "".join(lines))
        return
    for number, line in enumerate(itertools.chain([first], lines), start=1):
        if line.strip():
            with readable(f"{path}, line {number}"):
                record = json.loads(line)
            yield record


def parquet_records(path: Path, column: str) -> Iterator[dict]:
    """The records of a parquet file with only this field, or with all if it lacks the field, read in small parts."""
    import pyarrow.parquet
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        wanted = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1000, columns=wanted):
            yield from batch.to_pylist()


def texts_in(records: Iterable[dict], column: str, name: Path | str) -> Iterator[str]:
    """The texts in a field of records, "" for null. UserError if the first record lacks it, or for what is no text."""
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{name}: record {number} is {record!r:.40}, not an object with a field `{column}`")
        if number == 1 and column not in record:  # later ones may lack it, as they may hold null
            raise UserError(f"{name}: its records need a field `{column}`; --column can be {', '.join(record)}")
        text = record.get(column)
        if not isinstance(text, str | None):
            raise UserError(f"{name}: field `{column}` of record {number} holds {text!r:.40}, not text")
        yield (text or "").encode(errors="replace").decode()  # JSON can hold half a surrogate pair


def file_texts(file: Path, column: str) -> Iterator[str]:
    """The texts of a file, "" for those that are missing. UserError for what cannot be read."""
    if format_of(file) == ".txt":
        return grouped(lines_of(file, LONGEST))
    if format_of(file) == ".parquet":
        return texts_in(parquet_records(file, column), column, file)
    return texts_in(json_records(file), column, file)


def split_long(texts: Iterable[str], longest: int) -> Iterator[str]:
    """Texts in pieces of at most `longest` characters; an empty text is one piece."""
    for text in texts:
        for start in range(0, max(len(text), 1), longest):
            yield text[start:start + longest]
