"""Atomic writes, JSON, hashes, and folders: who may write there, and whether their settings have changed."""
import ast
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from support.program.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # the folder of maelm.py


# ---- 1. Files -----------------------------------------------------------------------------------------------
def sync(path: Path):
    """Wait until a file is on the disk, unless the disk cannot do this; otherwise, a power cut could leave it empty."""
    with open(path, "rb+") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then rename it to `path`, so that readers never find a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # adds the file's name, which the error of a full disk lacks
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str):
    """Write a text atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object):
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def json_lines(records: Iterable[dict]) -> str:
    """Records as text: one line of JSON per record."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises UserError if the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); restore it from a copy, or delete it") from error


def short_hash(content: str | bytes) -> str:
    """A hash, in 16 hexadecimal digits."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


TABLES = "ABLATIONS|PRESETS|SMALL_MODELS|TASKS|DEFAULTS|SWEEPS|RATES"  # of settings, which are recorded where used


def code_hashes(*files: str) -> dict[str, str]:
    """A hash of each of our Python files, for whatever is kept and reused: it records the code that made it. Comments,
    TABLES, f-strings and texts of several words (messages, help, docstrings) do not count."""
    hashes = {}
    for file in files:
        tree = ast.parse((ROOT / file).read_bytes())
        tree.body = [node for node in tree.body if not re.match(rf"({TABLES})\b.* = ", ast.unparse(node))]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.search("[a-z]{2} [a-z]{2}", str(node.value), re.IGNORECASE):
                node.value = ""
            elif isinstance(node, ast.JoinedStr):
                node.values = []
        hashes[f"code of {file}"] = short_hash(ast.unparse(tree))
    return hashes


# ---- 2. Folders ---------------------------------------------------------------------------------------------
@contextmanager
def lock_folder(folder: Path, *signs: str, wait: bool = False) -> Iterator[None]:
    """Make a folder and lock it. Raises UserError if another process uses the folder and `wait` is False, or if the
    folder has files but none of the `signs`, which are patterns of names."""
    if signs and any(folder.glob("[!.]*")) and not any(any(folder.glob(sign)) for sign in signs):
        raise UserError(f"{folder}: not empty, and not written by this program; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The system frees the lock when the process ends.
    lock = FileLock(folder / ".lock", timeout=-1 if wait else 0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another process is working there; wait for it, or choose another --out") from None
    except OSError as error:  # some NFS mounts, for example, do not support locks
        if wait and os.environ.get("RANK", "0") != "0":  # the first process prepares for all on its disk
            raise UserError(f"{folder}: cannot be locked ({error.strerror}), so processes could read it while one of "
                            "them writes; on each machine, first run this command with --prepare") from None
        print(f"{folder}: cannot be locked ({error.strerror}); do not start a second process there", file=sys.stderr)
    try:
        for stale in folder.glob(".*.[0-9]*.tmp"):  # left by a process that was killed while writing
            stale.unlink()
        yield
    finally:
        lock.release()


def compare(folder: Path, before: dict, now: dict, may_change: Container[str] = (),
            advice: str = "choose another --out") -> dict[str, list]:
    """The settings that have changed, which must be in `may_change`: name -> [value before, value now]."""
    pairs = {name: [before.get(name), now.get(name)] for name in before | now}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    fixed = []
    for name, (old, new) in changed.items():
        if name not in may_change:
            fixed.append(f"{name} has changed" if "code of" in name else f"{name}={old!r} there, {new!r} here")
    if fixed:
        raise UserError(f"{folder} was made with other settings: {'; '.join(fixed)}; {advice}")
    return changed
