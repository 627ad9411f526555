"""Readers of text files: lines of text, and records of JSON lines and Parquet. In a path, `*` is no wildcard.

Text is UTF-8, with or without a byte order mark, and may be compressed. The suffix names the format, in upper or lower
case: texts.JSONL.gz holds JSON lines.
"""
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fsspec.compression import register_compression
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from support.program.errors import UserError, root_cause

Record = tuple[str, dict]  # the place of a record, such as "a.jsonl, line 7", and its values by field


def zstd(file, mode):
    """A decompressed .zst. fsspec's own reader would take a truncated file for a whole one."""
    import pyarrow  # here, because it is slow
    return pyarrow.CompressedInputStream(file, "zstd")


register_compression("zstd", zstd, "zst", force=True)


def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv for test.CSV.gz."""
    if infer_compression(path.name) not in (None, "zip"):  # a .zip is a folder, of which fsspec reads only one file
        path = path.with_suffix("")
    return path.stem, path.suffix.lower()


@contextmanager
def readable(name: Path | str) -> Iterator[None]:
    """Turn any error of a library that reads a source into a UserError that names the source."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 ({error}); convert it, for example with iconv") from error
    except Exception as error:  # each format and each library has its own errors
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file for reading, decompressed. Raises UserError if it cannot be read."""
    how = dict(mode="rt", compression="infer", encoding="utf-8-sig")
    with readable(path), LocalFileSystem().open(str(path.absolute()), **how) as file:
        yield file


def lines_of(path: Path, longest: int = -1) -> Iterator[str]:
    """The lines of a text with their line ends. Lines of more than `longest` characters are split."""
    with open_text(path) as file:
        while line := file.readline(longest):
            yield line


def split_long(texts: Iterable[str], longest: int) -> Iterator[str]:
    """Split texts into pieces of at most `longest` characters; an empty text is one piece."""
    for text in texts:
        for start in range(0, max(len(text), 1), longest):
            yield text[start:start + longest]


def json_records(path: Path, column: str | None = None) -> Iterator[Record]:
    """The objects in a file that has one JSON object per line, with all their fields."""
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = line
        if not isinstance(value, dict):
            raise UserError(f"{path}, line {number}: must be an object like {{\"text\": ...}}, not {value!r:.60}")
        yield f"{path}, line {number}", value


def parquet_records(path: Path, column: str | None = None) -> Iterator[Record]:
    """The rows of a Parquet file. If it has this column, only this column is read."""
    import pyarrow.parquet  # here, because it is slow
    number = itertools.count(1)
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        columns = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1000, columns=columns):
            yield from ((f"{path}, row {next(number)}", record) for record in batch.to_pylist())


RECORDS = {".jsonl": json_records, ".json": json_records, ".parquet": parquet_records}  # readers by format


def hub_records(name: str, split: str = "train", streaming: bool = True) -> tuple[Iterable[dict], bool]:
    """The records of hf:NAME[:CONFIG], and whether each record is a line of text."""
    import datasets  # here, because it takes a second
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs errors that we report
    datasets.disable_progress_bars()
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read instead; run in another folder")
    source = f"{name}, downloaded to the folder HF_HOME"
    with readable(source):
        is_text = hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by")
        data_set = datasets.load_dataset(path, config or None, split=split, streaming=streaming)

    def records():
        with readable(source):
            yield from data_set
    return records(), is_text
