"""What a program tells people, and how it ends: output, errors in one line, signals."""
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class UserError(ValueError):
    """A mistake that the user can correct, in a flag or a file. The message names it, its value and the fix."""


def printable(text: str) -> str:
    """Escape control characters as Python does, because a terminal would obey them. Joiners belong to words."""
    joiners = "\u200c\u200d"
    return "".join(c if c.isprintable() or c in joiners else repr(c)[1:-1] for c in text)


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
    """Whether this is the first process on this machine; torchrun sets the variable."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


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
    except UserError as error:  # all processes on this machine have the same error
        give_up(program, str(error), silent=not is_first())
    except OSError as error:
        give_up(program, str(error))
    except (MemoryError, RuntimeError) as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            give_up(program, f"the model cannot be compiled ({root_cause(error)}); use --compile off")
        if re.search("(closed|reset) by peer|pair closure", str(error)):
            give_up(program, "another process has ended; see its message", silent=not is_first())
        if re.search("connectFullMesh|[Tt]imed out", str(error)):
            give_up(program, "another process was not reached for ten minutes; before a large text is used, run "
                    "--prepare; between machines, GLOO_SOCKET_IFNAME may have to name the network interface")
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
