"""Files that are written whole, JSON, figures, and the lock and settings of a folder."""
import hashlib
import json
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from support.cli import UserError


@contextmanager
def named(path: Path) -> Iterator[None]:
    """While entered, errors of the disk name the file: a full one does not say which."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then fsync and rename it to `path`: a reader finds a whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with named(path):
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # or a power cut could leave the new name without its content
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_texts(folder: Path, files: dict[str, str]):
    """Write files, by their names in a folder, atomically."""
    for name, text in files.items():
        with atomic(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object):
    """Write JSON, atomically."""
    write_texts(path.parent, {path.name: json.dumps(value, indent=1) + "\n"})


def json_lines(records: Iterable[dict]) -> str:
    """Records as a text with one line of JSON each."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_json(path: Path, *wanted: str, advice: str = "restore it from a copy, or delete it") -> dict:
    """The object in a JSON file. UserError with advice if there is none, or if it lacks a field that is wanted."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, not JSON ({error}); {advice}") from error
    if not isinstance(found, dict) or not found.keys() >= set(wanted):
        raise UserError(f"{path}: damaged, lacks {', '.join(wanted) or 'fields'}; {advice}")
    return found


def short_hash(content: str | bytes) -> str:
    """A hash of 16 letters."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and be the only process at work in it. UserError if another process is."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):  # the system frees it when the process ends, however it does
            yield
    except Timeout:
        raise UserError(f"{folder}: another process is at work there; wait for it, or choose another --out") from None


def refuse_other_files(folder: Path):
    """UserError if a folder holds files although it is to be new."""
    if any(folder.glob("[!.]*")):
        raise UserError(f"{folder}: not empty; choose another folder")


def open_folder(folder: Path, settings: dict[str, object], may_change: Container[str] = (), begun: bool = True):
    """Write `settings` to config.json of a folder that is new, or was made with the same ones apart from those that
    `may_change`; of a folder where nothing has `begun`, all may. UserError for other settings or other files."""
    path, differs = folder / "config.json", []
    if not path.is_file():
        refuse_other_files(folder)
    elif begun:
        there = read_json(path)
        for name, value in settings.items():
            if name not in may_change and there.get(name) != value:
                differs.append(f"{name}={there.get(name)!r} there, {value!r} here")
    if differs:
        raise UserError(f"{folder} was made with other settings: {'; '.join(differs)}; choose another --out")
    write_json(path, settings)


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, side by side; then write it to `path`. Without pyplot: no display."""
    import matplotlib.figure
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a name is a $
        drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        yield drawn, drawn.subplots(1, panels)
        with atomic(path) as temporary:
            drawn.savefig(temporary, dpi=120, format="png")
