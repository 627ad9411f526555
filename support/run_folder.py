"""Run folders: a lock, whole files, settings in config.json, the log."""
import hashlib
import json
import os
import sys
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


# ---- The log ------------------------------------------------------------------------------------------------
def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl. It says on stderr how many it leaves out, as a crash or a disk damaged them."""
    path, found, damaged = out / "log.jsonl", [], 0
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            found.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        print(f"{path}: left out damaged lines: {damaged}", file=sys.stderr)
    return found


class RunLog:
    """log.jsonl of a run folder; with a project of Weights & Biases it goes there, too."""
    def __init__(self, out: Path, step: int, project: str, settings: dict):
        """Go on after `step`. What an interrupted run logged later goes: those steps are trained again."""
        self.path = out / "log.jsonl"
        kept = [line for line in read_log(out) if line["step"] <= step and step > 0]
        write_texts(out, {"log.jsonl": json_lines(kept)})
        self.wandb = open_wandb(project, out, settings) if project else None

    def write(self, **line):
        """Append a line."""
        with named(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb is not None:
            self.wandb.log(line)

    def close(self):
        """Tell Weights & Biases that the run has ended."""
        if self.wandb is not None:
            self.wandb.finish()


def open_wandb(project: str, out: Path, settings: dict):
    """The run of Weights & Biases that belongs to a run folder: new, or the one that it names."""
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb: this needs the package wandb: pip install wandb") from None
    known = short_hash(str(out.resolve()))
    run = wandb.init(project=project, id=known, resume="allow", name=str(out), dir=str(out), config=settings)
    run.define_metric("*", step_metric="step")  # a run that continues may log a step again
    return run
