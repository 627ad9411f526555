"""Atomic writes, JSON, figures, and the lock, owner and settings of a folder."""
import hashlib
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from filelock import FileLock, Timeout

from support.cli import UserError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then fsync and rename it to `path`, so that readers never find a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # otherwise, a power cut could leave an empty file
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # adds the file's name, which the error of a full disk lacks
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_texts(folder: Path, files: dict[str, str]):
    """Write a text to each of these files in a folder, atomically."""
    for name, text in files.items():
        with atomic(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object):
    """Write JSON atomically."""
    write_texts(path.parent, {path.name: json.dumps(value, indent=1) + "\n"})


def json_lines(records: Iterable[dict]) -> str:
    """Records as text: one line of JSON per record."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_json(path: Path, *wanted: str, advice: str = "restore it from a copy, or delete it") -> dict:
    """The object in a JSON file. Raises UserError with advice if it is missing, damaged or without a `wanted` field."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: missing, or damaged ({error}); {advice}") from error
    if not isinstance(found, dict) or not found.keys() >= set(wanted):
        raise UserError(f"{path}: damaged (it lacks {', '.join(wanted) or 'fields'}); {advice}")
    return found


def short_hash(content: str | bytes) -> str:
    """A hash, in 16 hexadecimal digits."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def check_fields(path: Path, values: dict, *kinds: type):
    """Raises UserError if a file has a field that no dataclass in `kinds` has, or a value of the wrong type."""
    types = {field.name: field.type for kind in kinds for field in fields(kind)}
    for name, value in values.items():
        if name not in types:
            raise UserError(f"{path}: this version of maelm does not know the field {name!r}; use the version that "
                            "wrote the file")
        wanted = int | float if types[name] is float else types[name]
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            raise UserError(f"{path}: {name}={value!r} has the wrong type; restore the file from a copy")


# ---- Output folders -----------------------------------------------------------------------------------------
@contextmanager
def lock_folder(folder: Path, sign: str = "", *wanted: str, wait: bool = False) -> Iterator[None]:
    """Make a folder and lock it. Raises UserError if another process uses the folder and `wait` is False, or if
    refuse_other_files refuses the folder."""
    if sign:
        refuse_other_files(folder, sign, *wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: not a usable folder ({error.strerror}); choose another --out or --cache") from error
    # The system frees the lock when the process ends.
    lock = FileLock(folder / ".lock", timeout=-1 if wait else 0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another process is working there; wait for it, or choose another --out") from None
    except OSError as error:  # some NFS mounts, for example, do not support locks
        print(f"{folder}: cannot be locked ({error.strerror}); do not start a second process there", file=sys.stderr)
    try:
        for stale in folder.glob(".*.[0-9]*.tmp"):  # left by a process that was killed while writing
            stale.unlink()
        yield
    finally:
        lock.release()


def refuse_other_files(folder: Path, sign: str = "", *wanted: str):
    """Raises UserError if a folder belongs to another program, that is, if it has files but no JSON file `sign`
    with the `wanted` fields."""
    if not any(folder.glob("[!.]*")):
        return
    path = folder / sign
    if not sign or not path.is_file() or not read_json(path).keys() >= set(wanted):
        raise UserError(f"{folder}: not empty, and not written by this program; choose another folder")


def changes(before: dict, now: dict) -> dict[str, list]:
    """The settings that have changed: name -> [value before, value now]."""
    return {name: [before.get(name), value] for name, value in now.items() if before.get(name) != value}


def refuse_changes(folder: Path, changed: dict[str, list], advice: str = "choose another --out"):
    """Raises UserError, with advice, if any settings of a folder have changed."""
    if changed:
        listed = "; ".join(f"{name}={before!r} there, {now!r} here" for name, (before, now) in changed.items())
        raise UserError(f"{folder} was made with other settings: {listed}; {advice}")


def open_folder(folder: Path, settings: dict[str, object], may_change: Container[str] = ()):
    """Write config.json to a folder that is empty or has the same settings apart from those in `may_change`. Raises
    UserError if the folder has other settings or files."""
    path = folder / "config.json"
    if path.is_file():
        changed = changes(read_json(path), settings)
        refuse_changes(folder, {name: pair for name, pair in changed.items() if name not in may_change})
    else:
        refuse_other_files(folder)
    write_json(path, settings)


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its side-by-side axes; then write the figure to `path`. No display is needed."""
    if "matplotlib" not in sys.modules:
        os.environ.pop("MPLBACKEND", None)  # it may name a backend, such as a notebook's, that is not installed here
    import matplotlib.figure
    with matplotlib.rc_context({"text.parse_math": False}):  # so that a $ in a name stays a $
        drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        yield drawn, drawn.subplots(1, panels)
        with atomic(path) as temporary:
            drawn.savefig(temporary, dpi=120, format="png")
