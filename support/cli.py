"""Command lines: errors in one line, Ctrl-C and other signals, running out of memory, and flags from dataclasses."""
import argparse
import difflib
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
from pathlib import Path


# ---- 1. Errors ----------------------------------------------------------------------------------------------
class UserError(Exception):
    """A mistake that the user can correct. The message names the file or field, its value and the fix."""


def printable(text: str) -> str:
    """Escape control characters as Python does, because a terminal would obey them."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def root_cause(error: BaseException) -> str:
    """The message of an error's first cause, such as a proxy error, cut to 200 characters."""
    while error.__cause__:
        error = error.__cause__
    return str(error)[:200] or type(error).__name__


class Stream:
    """An output stream that never ends the program, even if its terminal is closed, its pipe is not read, or its disk
    is full."""
    def __init__(self, stream: io.TextIOWrapper):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text. After the first error, all output is dropped."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self.stream = open(os.devnull, "w")
            print(f"warning: no more output ({error.strerror}); the program continues", file=sys.stderr)
            return len(text)


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Report a user's mistake (exit code 2) or Ctrl-C (130) in one line on stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # None if the shell closed it, as with 2>&-
        if isinstance(stream, io.TextIOWrapper):
            # Print "?" for characters that an encoding such as cp1252 lacks, and write each line at once.
            stream.reconfigure(errors="replace", line_buffering=True)
            setattr(sys, name, Stream(stream))
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted; repeat the command to continue", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        line = str(error).replace("\n", " ")
        if f"{Path.home()}/.cache" in line and isinstance(error.__cause__ or error, OSError):
            line += "; --cache and the variable HF_HOME can name other folders"
        print(f"{program}: {printable(line)}", file=sys.stderr)
        sys.exit(2)


# ---- 2. Signals, and running out of memory ------------------------------------------------------------------
@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C and the signals by which Slurm, torchrun or a terminal ends a program, so that
    a checkpoint can be saved. A second Ctrl-C takes effect at once."""
    noted, before = [], {}

    def note(number: int, frame: object):
        noted.append(number)
        if number == signal.SIGINT:  # not for SIGTERM, which Slurm and torchrun both send
            signal.signal(number, before[number])

    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows lacks the last two
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def explain_out_of_memory(flags: str = "--micro-batch-size or a smaller model") -> Iterator[None]:
    """Turn an out-of-memory error into advice to lower these flags."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("can't allocate memory|out of memory", str(error)):
            raise
        raise UserError(f"out of memory: use a smaller {flags}") from error


# ---- 3. Flags -----------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Reports an invalid command line in one line, with exit code 2. Until parse_args is called, -h is ignored."""
    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        # torchrun sets both variables; only the first process of a machine reports.
        silent = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0"
        self.exit(2, None if silent else f"{self.prog}: {printable(message)}\n")

    def parse_args(self, argv=None) -> argparse.Namespace:
        # Added last, because the help for some flags depends on a value that parse_known_args finds first.
        self.add_argument("-h", "--help", action="help", help="show this help")
        options, unknown = self.parse_known_args(argv)
        for action in self._actions:
            if action.option_strings and getattr(options, action.dest, None) == "":  # --init "$RUN" without a RUN
                self.error(f"{action.option_strings[0]}: the value is empty")
        if unknown:
            valid = sorted(flag for flag in self._option_string_actions if not flag.startswith("--no-"))
            close = difflib.get_close_matches(unknown[0].partition("=")[0], valid, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unknown flag {unknown[0]}{meant}; the flags are {' '.join(valid)}")
        return options


def comments_of(config: type) -> dict[str, str]:
    """The comment after each field of a dataclass, by the name of the field."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.MULTILINE))


def require(config, **conditions: bool):
    """Raises ValueError, with the comment of the field, for the first field that is infinite or whose condition is
    False."""
    for field, holds in conditions.items():
        if not holds or getattr(config, field) == math.inf:
            comment = comments_of(type(config)).get(field, "")
            raise ValueError(f"{field}={getattr(config, field)!r} is not possible: {comment}")


def require_positive(config, *fields: str):
    """Raises ValueError for the first field that is not positive and finite."""
    for field in fields:
        if not 0 < getattr(config, field) < math.inf:
            raise ValueError(f"{field}={getattr(config, field)!r}: use a positive number")


def add_flags(parser: argparse.ArgumentParser, config: type, values: dict):
    """Add a flag for every field of a dataclass. Its help joins the field's comment and its value in `values`."""
    comments = comments_of(config)
    group = parser.add_argument_group(config.__name__)
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.default)
        shown = "" if value == "" else f" [{value}]"
        text = f"{comments.get(field.name, '')}{shown}".replace("%", "%%")  # argparse formats with %
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given is absent from the result, so that the value of the preset applies.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text.strip(), **kind)


def fields_of(config: type, values: dict) -> dict:
    """The entries of `values` (given flags, for example) whose names are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(config) if field.name in values}
