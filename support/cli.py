"""Command lines: errors in one line, Ctrl-C, and flags from the fields of a dataclass."""
import argparse
import inspect
import io
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields


# ---- 1. Errors ----------------------------------------------------------------------------------------------
class UserError(Exception):
    """Something that the user can put right. The message names the file or field, its value and the fix."""


def printable(text: str) -> str:
    """A text whose control characters, which a terminal would obey, are written as in Python."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def root_cause(error: BaseException) -> str:
    """The message of the error that led to an error, such as that of a proxy, at most 200 characters."""
    while error.__cause__:
        error = error.__cause__
    return str(error)[:200] or type(error).__name__


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Turn what the user can put right, and Ctrl-C, into one line on stderr and an exit code: 2, or 130."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What an encoding such as cp1252 lacks becomes ?; a line in a file or pipe can be read at once.
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:
        line = str(error).replace("\n", " ")
        print(f"{program}: {printable(line)}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- 2. Signals, and memory that runs out -------------------------------------------------------------------
class Interrupt:
    """While entered, notes SIGTERM and SIGINT, so that a checkpoint can be saved. A second Ctrl-C acts at once."""
    def __enter__(self) -> "Interrupt":
        self.signal = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: object):
        """Signal handler."""
        self.signal = number
        if number == signal.SIGINT:  # but SIGTERM comes twice at once, from Slurm and from torchrun
            signal.signal(number, self.before[number])


@contextmanager
def explain_out_of_memory(flag: str = "--micro-batch-size") -> Iterator[None]:
    """Turn an out-of-memory error into advice: lower a flag."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        names = type(error).__name__, str(error)  # by its name, since only PyTorch has torch.OutOfMemoryError
        if isinstance(error, MemoryError) or names[0] == "OutOfMemoryError" or "can't allocate memory" in names[1]:
            raise UserError(f"out of memory: use a smaller {flag}") from error
        raise


# ---- 3. Flags -----------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Answers a bad command line with one line and exit code 2."""
    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        # Of torchrun's processes one speaks.
        self.exit(2, f"{self.prog}: {printable(message)}\n" if os.environ.get("RANK", "0") == "0" else None)

    def parse_args(self, argv=None) -> argparse.Namespace:
        # Only now: before, parse_known_args tells a value on which the help of other flags depends.
        self.add_argument("-h", "--help", action="help", help="show this help")
        options, unknown = self.parse_known_args(argv)
        if unknown:
            valid = sorted(flag for flag in self._option_string_actions if not flag.startswith("--no-"))
            self.error(f"unknown flag {unknown[0]}; the flags are {' '.join(valid)}")
        return options


def comments_of(config: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, by the field's name."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.MULTILINE))


def require(config, **conditions: bool):
    """Raise a ValueError for the first field whose condition is False, or that is infinite. It quotes its comment."""
    for field, holds in conditions.items():
        if not holds or getattr(config, field) == math.inf:
            comment = comments_of(type(config)).get(field, "")
            raise ValueError(f"{field}={getattr(config, field)!r} is not possible: {comment}")


def require_positive(config, *fields: str):
    """Raise a ValueError for the first field that is not above 0, or infinite."""
    for field in fields:
        if not 0 < getattr(config, field) < math.inf:
            raise ValueError(f"{field}={getattr(config, field)!r}: use a positive number")


def add_flags(parser: argparse.ArgumentParser, config: type, values: dict):
    """Add a flag for every field of a dataclass, with the comment behind it and its value in `values` as help."""
    comments = comments_of(config)
    group = parser.add_argument_group(config.__name__)
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.default)
        text = f"{comments.get(field.name, '')} [{value}]".replace("%", "%%")  # argparse formats with %
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given leaves no trace, so that a preset can decide.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text.strip(), **kind)


def fields_of(config: type, values: dict) -> dict:
    """Those of `values`, such as the flags that a command line gave, that are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(config) if field.name in values}
