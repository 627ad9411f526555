"""What every program needs of files and command lines.

    1. Command lines  Parser, UserError, clear_errors: one line that a person can act on, and the exit code for it
    2. Files          atomic; JSON and lines of JSON with checksums: a flipped bit is noticed
    3. Records        lines and rows of the files of others: .txt, .jsonl, .csv, .tsv, .parquet, the Hugging Face Hub;
                      the documentation strings of a .py file
    4. Folders        what kind a folder is, which program is at work in it, and with what settings

Exit codes: 0, or 2 for what a person can put right, 130 after Ctrl-C, 143 after SIGTERM, 141 where the reader of
stdout has gone (`| head`).
"""
import argparse
import ast
import csv
import gzip
import hashlib
import json
import lzma
import os
import signal
import socket
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


# ---- 1. Command lines ---------------------------------------------------------------------------------------
PATIENCE = 8.0  # seconds in which torchrun ends the other processes after one has failed


class UserError(ValueError):
    """Something that the user can put right; the message names the file or field, the value and the fix."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; the number of the signal is its argument."""


class Parser(argparse.ArgumentParser):
    """Answers a bad command line, an empty name of a file or folder included, with one line and exit code 2."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register("type", Path, path_of)  # Path("") would be the current folder

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        options, unknown = self.parse_known_args(argv)
        if unknown:
            valid = sorted(flag for flag in self._option_string_actions if not flag.startswith("--no-"))
            self.error(f"unknown flag {unknown[0]}; the flags are {' '.join(valid)}")
        return options


def path_of(name: str) -> Path:
    """The path that a flag gives."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name is empty; give a file or folder, or . for the current one")
    return Path(name)


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Turn what ends a command into one line on stderr and an exit code: UserError and OSError, Ctrl-C and SIGTERM.
    Where the reader of stdout has gone, there is nobody to tell. Of several processes the first one speaks."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other one may set handlers
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    first = os.environ.get("RANK", "0") == "0"
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end: let that go to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        if first:
            print(f"{program}: interrupted; the same command continues", file=sys.stderr)
        sys.exit(128 + number)
    except (UserError, OSError) as error:
        with suppress(KeyboardInterrupt):
            if not first:
                time.sleep(PATIENCE)  # if the first process says the same, torchrun ends this one meanwhile
            line = str(error).replace("\n", " ")
            print(f"{program}: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def interrupt(number: int, frame: object) -> None:
    """Signal handler."""
    raise Interrupted(number)


# ---- 2. Files -----------------------------------------------------------------------------------------------
@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While entered, failure to write `path` is a UserError."""
    try:
        yield
    except BrokenPipeError:  # of stdout: no matter of this file
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; free some space or choose another "
                        "folder") from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then fsync and rename it to `path`: a reader finds a whole file or none. Makes the
    folder. Failure to write is a UserError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # or a power cut could leave the new name with nothing behind it
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Remove what commands that were killed left behind. Only for a folder that is claimed: else another process may
    be about to rename one of these files."""
    for stale in folder.glob(".*.tmp"):
        stale.unlink(missing_ok=True)


def short_hash(text: str) -> str:
    """16 letters that are a function of a text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """8 letters that are a function of the bytes of a file (CRC-32, which notices every single flipped bit)."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def seal(record: dict, name: str) -> dict:
    """A copy of a record whose last field, `name`, is a checksum of the others."""
    return {**record, name: zlib.crc32(json.dumps(record).encode())}


def unseal(sealed: dict, name: str) -> dict:
    """The record that was sealed; ValueError if it has changed since. One without a checksum is taken as it is."""
    if not sealed:
        return sealed
    record = dict(sealed)
    _, checksum = record.popitem()
    # A checksum that is right is one, even if a flipped bit has changed the name of its field.
    if checksum == zlib.crc32(json.dumps(record).encode()):
        return record
    if name in sealed:
        raise ValueError(f'its checksum is another; if you changed it by hand, delete its field "{name}"')
    return sealed


def write_json(path: Path, value: object, checked: bool = True) -> None:
    """Write `value` as JSON, atomically; a dict with a last field "checksum", unless its form is not ours to choose."""
    if checked and isinstance(value, dict):
        value = seal(value, "checksum")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path, fields: dict[str, type | tuple] | None = None, kind: type = dict) -> dict | list:
    """The dict (or list, by `kind`) in a JSON file, without its checksum, which is verified where there is one.
    `fields`: those that it must have, and their types. UserError for everything that can be wrong with it."""
    remedy = "restore it from a copy, or make its folder again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            value = unseal(value, "checksum")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, cut off, or no JSON ({error}); {remedy}") from error
    if not isinstance(value, kind):
        raise UserError(f"{path}: holds no {kind.__name__} but a {type(value).__name__}; {remedy}")
    for name, wanted in (fields or {}).items():
        if not isinstance(value.get(name), wanted):
            raise UserError(f"{path}: its field {name!r} is missing or of another type; {remedy}")
    return value


def remembered(path: Path, make: Callable[[], list]) -> list:
    """The list that `make` returns, of what JSON knows, from the file where an earlier call has left it. A file that is
    missing, damaged or cannot be written costs the time of making it, nothing else."""
    with suppress(UserError):
        return read_json(path, {"found": list})["found"]
    found = make()
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"found": found})
    return found


def append_line(path: Path, record: dict) -> None:
    """Append a record to a .jsonl file, as a line with a last field "crc". A last line that a crash cut off is closed
    first: removed, or ended if only its end was missing. One process at a time. Failure to write is a UserError."""
    line = json.dumps(seal(record, "crc")).encode() + b"\n"
    with writing(path), open(path, "ab+") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            _, _, tail = file.read().rpartition(b"\n")
            if cut_off(tail):
                file.truncate(file.tell() - len(tail))
            else:
                line = b"\n" + line
        file.write(line)


def read_lines(path: Path) -> list[dict]:
    """The records of a .jsonl file that `append_line` wrote; none if there is no file. A last line that a crash cut
    off is left out. UserError names a damaged line. Lines without a checksum are taken as they are."""
    try:
        *whole, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); move it away") from error
    if not cut_off(tail):
        whole.append(tail)
    records = []
    for number, line in enumerate(whole, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if isinstance(record, dict):
                record = unseal(record, "crc")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: damaged ({error}); delete this line, or restore the file from a "
                            "copy") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: no object with named fields; delete this line")
        records.append(record)
    return records


def cut_off(tail: bytes) -> bool:
    """Whether this, behind the last line break, is the beginning of a line that a crash cut off. A whole record is
    not, nor one with something behind it, which was a line break."""
    try:
        json.JSONDecoder().raw_decode(tail.decode(errors="replace"))
    except (ValueError, RecursionError):
        return True
    return False


# ---- 3. Records: text and tables of others ------------------------------------------------------------------
LONGEST_LINE = 1 << 26  # characters
UNPACK = {".gz": gzip.open, ".xz": lzma.open}


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """While entered, failure to read `path` is a UserError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise UserError(f"{path}: damaged {Path(path).suffix} file: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); mend it, or leave it out") from error


def lines(path: Path) -> Iterator[str]:
    """Lines of a text file, .gz and .xz unpacked, those beyond LONGEST_LINE in pieces; UserError names the file and
    the offset of undecodable bytes."""
    unpack = UNPACK.get(path.suffix.lower(), open)
    with reading(path):
        with unpack(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            try:
                while line := file.readline(LONGEST_LINE):
                    if "\0" in line:
                        raise UserError(f"{path}: holds NUL bytes, as UTF-16 does; convert the file to UTF-8, for "
                                        "example with iconv")
                    yield line
            except UnicodeDecodeError as error:
                offset = file.buffer.tell() - len(error.object) + error.start  # error.object is what was read last
                raise UserError(f"{path}: byte {offset} is not UTF-8 (0x{error.object[error.start]:02x}); convert the "
                                "file, for example with iconv") from error


def read_jsonl(path: Path) -> Iterator[dict]:
    """The objects of a .jsonl file, one a line; UserError names the file and the line that is none."""
    for number, line in enumerate(lines(path), start=1):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON, or longer than {LONGEST_LINE:,}: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: not an object with named fields, but {line[:20].strip()}")
        yield record


def read_csv(path: Path) -> Iterator[dict]:
    """Rows of a .csv file; the first one names the columns. UserError names the file and the line that is no CSV."""
    reader = csv.DictReader(lines(path))
    try:
        yield from reader
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from error


def read_tsv(path: Path, header: tuple[str, ...] = ()) -> Iterator[dict]:
    """Rows of a GLUE file: tab-separated, quotes are plain characters, the first row names the columns unless `header`
    does. Rows that are cut off, as a few of QQP's, are left out."""
    rows = (line.rstrip("\r\n").split("\t") for line in lines(path))
    names = header or next(rows, ())
    for row in rows:
        if len(row) >= len(names):
            yield dict(zip(names, row))


def read_parquet(path: Path) -> Iterator[dict]:
    """Rows of a .parquet file; UserError names a file that is none."""
    import pyarrow
    import pyarrow.parquet
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged: {error}") from error


RECORDS = {".csv": read_csv, ".jsonl": read_jsonl, ".parquet": read_parquet, ".tsv": read_tsv}


def load_hub_dataset(name: str, split: str, streaming: bool) -> Iterator[dict]:
    """Records of a part of NAME[:CONFIG] on the Hugging Face Hub, or of a local folder that `datasets` loads;
    UserError if it cannot be loaded."""
    import datasets
    path, _, config = name.partition(":")
    try:
        yield from datasets.load_dataset(path, config or None, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"hf:{name}: cannot be loaded ({reason.splitlines()[0]}). Is the name right, and the network "
                        "there? Files of your own and docs need neither") from error


DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code


def docstrings(path: Path) -> list[str]:
    """All documentation strings of a Python file: docstrings, `add_docstr(f, "...")` and help topics."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and files of other Python versions
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))  # of module.f(...), of f(...)
            if name in DOCUMENTING:
                found.append(max(strings_in(ast.walk(node)), key=len, default=""))
        elif isinstance(node, ast.Dict) and path.parent.name == "pydoc_data":
            found += strings_in(node.values)
    return [text.strip() for text in found if len(text.split()) > 3]


def strings_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The string constants among the nodes of a syntax tree."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


# ---- 4. Folders ---------------------------------------------------------------------------------------------
MAKERS = {"run": "train.py", "corpus": "data.py prepare", "fine-tuning": "finetune.py", "ranks": "rank.py",
          "export": "convert.py export", "evidence": "bench/evidence.py"}
SIGNS = {"meta.json": "corpus", "progress.json": "corpus", "sweep.jsonl": "fine-tuning", "encoder.pt": "fine-tuning",
         "result.json": "fine-tuning", "rank.json": "ranks"}


def kind_of(folder: Path) -> str | None:
    """What a folder is, one of MAKERS, by the files in it; None if none of them. UserError for a damaged
    config.json."""
    if (folder / "finetune.json").is_file():  # beside the config.json of the encoder, which may be an export's
        return "fine-tuning"
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        for name, kind in (("task", "fine-tuning"), ("train", "run"), ("maelm", "export")):
            if name in config:
                return kind
    if any(folder.glob("step_[0-9]*.pt")):
        return "run"
    for name, kind in SIGNS.items():
        if (folder / name).is_file():
            return kind
    return None


@contextmanager
def claim_folder(folder: Path, kind: str, wait: bool = False) -> Iterator[Path]:
    """Make a folder and be the only process that is at work in it. UserError if it is of another kind or cannot be
    written to, or, unless we `wait`, if another process has it. A folder that we made and left empty is removed."""
    refuse_other_kind(folder, kind)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder):
        lock = take(folder, wait)
    owner = folder / ".lock.owner"
    try:
        refuse_other_kind(folder, kind)  # which another program may have made meanwhile
        who = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_json(owner, who)
        yield folder
    finally:
        with suppress(OSError):  # such as on Windows, where a locked file cannot be removed
            owner.unlink(missing_ok=True)
            if made and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                for path in made:
                    path.rmdir()
        lock.release()


def refuse_other_kind(folder: Path, kind: str) -> None:
    """UserError if `folder` is none, or one that another of our programs made."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file, not a folder; choose another --out")
    there = kind_of(folder)
    if there not in (None, kind):
        raise UserError(f"{folder} was made by {MAKERS[there]}, and {MAKERS[kind]} would overwrite its files; choose "
                        "another --out")


def take(folder: Path, wait: bool) -> FileLock:
    """Make a folder and lock it. The system frees the lock when this process ends, however it does."""
    told = False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=1 if wait else 0)
            return lock
        except FileNotFoundError:
            continue  # who had it left the folder empty, and removed it
        except Timeout as error:
            if not wait:
                raise UserError(f"{folder}: {holder(folder)} is at work there; wait for it, or choose another "
                                "--out") from error
        if not told:
            print(f"waiting for {folder}, where {holder(folder)} is at work", file=sys.stderr, flush=True)
            told = True


def holder(folder: Path) -> str:
    """Who has claimed a folder, in words."""
    try:
        who = read_json(folder / ".lock.owner")
        return f"process {who['process']} on {who['host']}, since {who['since']},"
    except (UserError, KeyError):  # just about to be written, or removed
        return "another process"


def compare_runs(folder: Path, there: dict, here: dict) -> None:
    """UserError that lists the fields of `here`, our settings, that differ in `there`, those `folder` was made with."""
    differs = []
    for name, value in here.items():
        if there.get(name) != value:
            differs.append(f"{name}={there.get(name)!r} there, {value!r} here")
    if differs:
        raise UserError(f"{folder} was made with other settings: {'; '.join(differs)}; choose another --out")
