"""Files and errors: errors in one line, atomic writes, JSON, records of data files, a lock for a folder."""
import hashlib
import json
import lzma
import os
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

CACHE = "~/.cache/maelm"  # the folder for what can be made again, unless --cache names another
BROKEN = (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError)  # raised for files that cannot be read


class UserError(Exception):
    """Something that the user can put right. The message names the file or field, its value and the fix."""


def root_cause(error: BaseException) -> str:
    """The message of the error that led to an error, such as that of a proxy, at most 200 characters."""
    while error.__cause__:
        error = error.__cause__
    return str(error)[:200] or type(error).__name__


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Turn what the user can put right, and Ctrl-C, into one line on stderr and an exit code: 2, or 130."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        line = str(error).replace("\n", " ")
        print(f"{program}: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then fsync and rename it to `path`: a reader finds a whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name without its content
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say which file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object):
    """Write JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict:
    """The content of a JSON file. UserError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); restore it from a copy") from error


def short_hash(content: str | bytes) -> str:
    """A hash of 16 letters."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def file_states(files: Iterable[Path | str]) -> str:
    """Names, sizes and times of files, by which it shows that they have changed."""
    states = []
    for file in files:
        state = os.stat(file)
        states.append((str(file), state.st_size, state.st_mtime_ns))
    return json.dumps(states)


def load(loader: str, files: Iterable[str], name: str, **options) -> Iterator[dict]:
    """The records that `datasets` reads from files, or of the Hub's `name` without files. UserError if it cannot."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if loader == "hub":
            path, _, config = name.removeprefix("hf:").partition(":")
            if Path(path).exists():
                raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
            if hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by"):
                options["sample_by"] = "paragraph"  # text files, as those on this machine
            found = datasets.load_dataset(path, config or None, **{"split": "train", "streaming": True} | options)
        else:
            found = datasets.load_dataset(loader, data_files=list(files), split="train", streaming=True, **options)
        yield from found
    except (*BROKEN, RuntimeError, datasets.exceptions.DatasetsError, HTTPError) as error:  # RuntimeError: a script
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and be the only process at work in it. UserError if another process is."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    try:
        with FileLock(lock, timeout=0):  # the system frees it when the process ends, however it does
            try:
                yield
            finally:
                if [*folder.iterdir()] == [lock]:  # what was refused leaves no folder
                    with suppress(OSError):
                        lock.unlink()
                        folder.rmdir()
    except Timeout:
        raise UserError(f"{folder}: another process is at work there; wait for it, or choose another --out") from None


def same_settings(folder: Path, there: dict, here: dict):
    """UserError that lists the fields of `here` that differ in `there`, the settings a folder was made with."""
    differs = []
    for name, value in here.items():
        if there.get(name) != value:
            differs.append(f"{name}={there.get(name)!r} there, {value!r} here")
    if differs:
        raise UserError(f"{folder} was made with other settings: {'; '.join(differs)}; choose another --out")


def refuse_other_files(folder: Path):
    """UserError if a folder holds files although it is to be new."""
    if any(folder.glob("[!.]*")):
        raise UserError(f"{folder}: not empty; choose another folder")
