"""Files that are written whole, JSON, figures, and the lock, owner and settings of a folder."""
import errno
import hashlib
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from filelock import FileLock, Timeout

from support.cli import UserError

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # errors of a disk that has no file locks, such as some NFS


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


def check_fields(path: Path, values: dict, *kinds: type):
    """Raises UserError if a file of ours has a field that none of these dataclasses has, or a value of a wrong type."""
    types = {field.name: field.type for kind in kinds for field in fields(kind)}
    for name, value in values.items():
        if name not in types:
            raise UserError(f"{path}: this version of maelm does not know the field {name!r}; use the version that "
                            "wrote the file")
        wanted = int | float if types[name] is float else types[name]
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            raise UserError(f"{path}: {name}={value!r} has a wrong type; restore the file from a copy")


# ---- Folders that are written to ----------------------------------------------------------------------------
@contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file, for which others wait. Raises filelock.Timeout if it is held for longer than the timeout in
    seconds. On a disk without locks, a line on stderr says so, and nothing is held."""
    lock = FileLock(path, timeout=timeout, fallback_to_soft=False)  # the system frees it when the process ends
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{path.parent}: this disk has no file locks ({error.strerror}); going on without: start no second "
              "process there", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def lock_folder(folder: Path, sign: str = "", *wanted: str) -> Iterator[None]:
    """Make a folder and be the only process at work in it. Raises UserError if another process is at work there, or if
    the folder is not ours by a `sign`: see refuse_other_files."""
    try:
        if sign:
            refuse_other_files(folder, sign, *wanted)
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder}: a file has this name, or a folder in it; choose another --out") from error
    try:
        with locked(folder / ".lock", timeout=0):
            for stale in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                stale.unlink()
            yield
    except Timeout:
        raise UserError(f"{folder}: another process is at work there; wait for it, or choose another --out") from None


def refuse_other_files(folder: Path, sign: str = "", *wanted: str):
    """Raises UserError if a folder holds files, unless the program that asks wrote them: then the JSON file `sign` is
    there and has the fields that are wanted."""
    if not any(folder.glob("[!.]*")):
        return
    path = folder / sign
    if not sign or not path.is_file() or not read_json(path).keys() >= set(wanted):
        raise UserError(f"{folder}: not empty, and not written by this program; choose another folder")


def read_settings(path: Path, *kinds: type) -> dict:
    """The fields of these dataclasses in a config.json of ours; a missing one has its default. Raises UserError for
    others."""
    found = read_json(path)
    check_fields(path, found, *kinds)
    for kind in kinds:
        found = asdict(kind()) | found
    return found


def changes(before: dict, now: dict, may_change: Container[str] = ()) -> dict[str, list]:
    """Name -> [value before, value now] of the settings that are not the same, apart from those that `may_change`."""
    names = [name for name in now if name not in may_change and before.get(name) != now[name]]
    return {name: [before.get(name), now[name]] for name in names}


def refuse_changes(folder: Path, changed: dict[str, list], advice: str = "choose another --out"):
    """Raises UserError, with advice, if any settings of a folder have changed."""
    if changed:
        listed = "; ".join(f"{name}={before!r} there, {now!r} here" for name, (before, now) in changed.items())
        raise UserError(f"{folder} was made with other settings: {listed}; {advice}")


def open_folder(folder: Path, settings: dict[str, object], may_change: Container[str] = ()):
    """Write `settings` to config.json of a folder that is new, or was made with the same ones apart from those that
    `may_change`. Raises UserError for other settings or other files."""
    path = folder / "config.json"
    if path.is_file():
        refuse_changes(folder, changes(read_json(path), settings, may_change))
    else:
        refuse_other_files(folder)
    write_json(path, settings)


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, side by side; then write it to `path`. No display is needed."""
    if "matplotlib" not in sys.modules:
        os.environ.pop("MPLBACKEND", None)  # it may name a backend, such as a notebook's, that is not installed here
    import matplotlib.figure
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a name is a $
        drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        yield drawn, drawn.subplots(1, panels)
        with atomic(path) as temporary:
            drawn.savefig(temporary, dpi=120, format="png")
