"""What all programs share: mistakes of the user, flags, files, and folders."""
import argparse
import hashlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args

from filelock import FileLock, Timeout
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]  # the folder of maelm.py
progress = partial(tqdm, leave=False, disable=None)  # a bar on a terminal, which goes when it is full
CACHE = "~/.cache/maelm"  # default folder for files that can be made again


# ---- 1. Command lines ---------------------------------------------------------------------------------------
class UserError(ValueError):
    """A mistake that the user can correct, in a flag or a file. The message names it, its value and the fix."""


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Report a mistake of the user, or an error of the disk, in one line, and end the program with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams lack it
            # Print "?" for characters that an encoding such as cp1252 lacks, and each line at once.
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, OSError) or os.environ.get("LOCAL_RANK", "0") == "0":  # others make the same mistake
            print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Reads a program's own flags, and a flag for each field of dataclasses. Raises UserError for a wrong one."""
    def __init__(self, prog: str, description: str, **options):
        super().__init__(prog=prog, description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", Path, path_of)  # for arguments with type=Path
        self.names = []  # of fields

    def error(self, message: str):
        raise UserError(message)

    def add_fields(self, part: type, values: dict):
        """Add a flag for every field of a dataclass. Its help joins the field's comment and its value in `values`."""
        source = "".join(inspect.getsource(each) for each in part.__mro__[:-1])
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
        group = self.add_argument_group(part.__name__)
        for field in fields(part):
            self.names.append(field.name)
            value = values.get(field.name, field.default)
            shown = "" if value == "" else f" [{value}]"
            text = f"{comments[field.name]}{shown}".replace("%", "%%")  # argparse formats with %
            choices = get_args(field.type)  # of a Literal
            how = dict(choices=choices) if choices else dict(type=field.type, metavar=field.type.__name__.upper())
            if field.type is bool:
                how = dict(action=argparse.BooleanOptionalAction)
            group.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, help=text, **how)

    def read(self, argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
        """The program's own flags, and the values of the fields that were given, by name."""
        flags = self.parse_args(argv)
        given = {name: vars(flags).pop(name) for name in self.names if name in flags}
        return flags, given


def path_of(text: str) -> Path:
    """A path; ~ is the home folder, as in a shell."""
    return Path(text).expanduser()


def short_name(model: str) -> str:
    """The name of a model in the name of a folder: toy for out/toy, toy-step_0001900 for its checkpoint, random-toy."""
    prefix = "random-" if model.startswith("random:") else ""
    path = path_of(re.sub("^(random|bow|lsa|hf):", "", model)).resolve()
    return prefix + (f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name)


def fields_of(part: type, values: dict) -> dict:
    """The entries of `values` whose names are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(part) if field.name in values}


# ---- 2. Files -----------------------------------------------------------------------------------------------
@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then rename it to `path`, so that readers never find a partial file. One process at a
    time may write a file."""
    temporary = path.with_name(f".{path.name}.tmp")  # always the same, so that killed processes leave one at most
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
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
    """Records as text: one line of JSON per record. Dates, for example, become texts."""
    return "".join(json.dumps(record, default=str) + "\n" for record in records)


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    return json.loads(path.read_bytes())


def read_lines(path: Path) -> list[dict]:
    """The objects in a file of JSON lines, except damaged lines, such as a line that a crash cut off."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def short_hash(content: str | bytes) -> str:
    """A hash, in 16 hexadecimal digits."""
    content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# ---- 3. Folders, and figures in them ------------------------------------------------------------------------
@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Make a folder and lock it. Raises UserError if another process uses the folder and `wait` is False."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=-1 if wait else 0):  # freed when the process ends
            yield
    except Timeout:
        raise UserError(f"{folder}: another process is working there; wait for it, or choose another --out") from None


def compare(folder: Path, before: dict, now: dict, fixed: Container[str]) -> dict[str, list]:
    """The settings that have changed: name -> [value before, value now]. Raises UserError if one of them is `fixed`."""
    pairs = {name: [before.get(name), now.get(name)] for name in before | now}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    wrong = [f"{name}={old!r} there, {new!r} here" for name, (old, new) in changed.items() if name in fixed]
    if wrong:
        raise UserError(f"{folder} was made with other settings: {'; '.join(wrong)}; choose another --out")
    return changed


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator:
    """Yield the axes of a matplotlib figure, or a list of several, two per row; then write the figure to `path`."""
    from matplotlib.figure import Figure  # here, because it is slow
    rows, columns = math.ceil(panels / 2), min(panels, 2)
    drawn = Figure(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    yield axes if panels > 1 else axes[0]
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
