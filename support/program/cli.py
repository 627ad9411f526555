"""Command lines: errors in one line, signals, flags from dataclasses, and checks of their values."""
import argparse
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path


# ---- 1. Output and errors -----------------------------------------------------------------------------------
class UserError(Exception):
    """A mistake that the user can correct, in a flag or a file. The message names it, its value and the fix."""


def printable(text: str) -> str:
    """Escape control characters as Python does, because a terminal would obey them."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def root_cause(error: BaseException) -> str:
    """The message of an error's first cause, such as a proxy error, cut to 200 characters."""
    while error.__cause__:
        error = error.__cause__
    return str(error)[:200] or type(error).__name__


def say(*lines: str):
    """Print lines at once. If nobody reads them (`| head`, a closed terminal), go on: a checkpoint may follow."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        with suppress(OSError):  # drops what could not be written, which would otherwise be tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_first() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def give_up(program: str, message: str, code: int = 2, silent: bool = False):
    """End the program with an exit code and, unless it is silent, one line on stderr."""
    if not silent:
        line = printable(message.replace("\n", " "))
        print(f"{program}: {line}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def clear_errors(program: str, memory_flags: str = "--batch-size") -> Iterator[None]:
    """Report a user's mistake, a disk's error or a lack of memory in one line with exit code 2, and Ctrl-C with 130."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for characters that an encoding such as cp1252 lacks
            stream.reconfigure(errors="replace")
    try:
        yield
    except KeyboardInterrupt:
        give_up(program, "interrupted; repeat the command to continue", code=130)
    except UserError as error:  # the first process decides, so it has the same error
        give_up(program, str(error), silent=not is_first())
    except OSError as error:
        give_up(program, str(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("can't allocate memory|out of memory", str(error)):
            raise
        give_up(program, f"out of memory: use a smaller {memory_flags}")


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C and the signals by which Slurm, torchrun or a terminal ends a program."""
    noted, before = [], {}
    if threading.current_thread() is threading.main_thread():  # other threads receive no signals
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks the last two
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- 2. Flags -----------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Reports an invalid command line in one line, with exit code 2. Until parse_args is called, -h is ignored."""
    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        give_up(self.prog, message, silent=not is_first())

    def parse_args(self, argv=None) -> argparse.Namespace:
        # Added last, because the help for some flags depends on a value that parse_known_args finds first.
        self.add_argument("-h", "--help", action="help", help="show this help")
        options, unknown = self.parse_known_args(argv)
        for action in self._actions:
            empty = getattr(options, action.dest, None) == "" and action.default != ""  # --init "$RUN" without a RUN
            if action.option_strings and empty:
                self.error(f"{action.option_strings[0]}: the value is empty")
        if unknown:
            valid = sorted(flag for flag in self._option_string_actions if not flag.startswith("--no-"))
            self.error(f"unknown flag {unknown[0]}; the flags are {' '.join(valid)}")
        return options


def path_of(text: str) -> Path:
    """A path on the command line; ~ is the home folder, as in a shell."""
    return Path(os.path.expanduser(text))


def short_name(model: str) -> str:
    """The name of a model in the name of a folder: toy for out/toy, toy-step_0001900 for its checkpoint, random-toy."""
    prefix = "random-" if model.startswith("random:") else ""
    path = path_of(model.removeprefix("random:").removeprefix("hf:")).resolve()
    return prefix + (f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name)


def add_flags(parser: argparse.ArgumentParser, config: type, values: dict):
    """Add a flag for every plain field of a dataclass. Its help joins the field's comment and its value in `values`."""
    comments = {}
    with suppress(OSError):  # under a profiler, which hides the source, -h lacks the comments
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.MULTILINE))
    group = parser.add_argument_group(config.__name__)
    for field in [field for field in fields(config) if field.type in (bool, int, float, str, Path)]:
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.default)
        shown = "" if value in ("", Path()) else f" [{value}]"
        text = f"{comments.get(field.name, '')}{shown}".replace("%", "%%")  # argparse formats with %
        if field.type is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": path_of if field.type is Path else field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given is absent from the result, so that the value of the preset applies.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text.strip(), **how)


# ---- 3. Values ----------------------------------------------------------------------------------------------
def fields_of(config: type, values: dict) -> dict:
    """The entries of `values` (given flags, for example) whose names are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(config) if field.name in values}


def require(settings, *checks: tuple[str, bool, str]):
    """Raises ValueError for the first check (field, whether its value is allowed, advice) that fails."""
    for field, holds, advice in checks:
        if not holds:
            raise ValueError(f"{field}={getattr(settings, field)!r}: use {advice}")
