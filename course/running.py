"""Running students' code: its limits, and the user who runs it. This is no sandbox."""
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.program.errors import UserError
from support.program.files import ROOT


class Limits(NamedTuple):
    """What students' code may use."""
    seconds: float  # of CPU time for a task
    end: float = math.inf  # of all tasks, by time.monotonic
    rights: dict = {}  # of another user, as arguments of subprocess; by default, ours


def rights_of(user: str) -> dict:
    """The rights of a user, or {} for "". Raises UserError if they cannot be had."""
    if not user:
        return {}
    try:
        import pwd  # which Windows lacks
        entry = pwd.getpwnam(user)
    except (ImportError, KeyError):
        raise UserError(f"--user {user}: there is no such user; make one with useradd") from None
    if os.geteuid() != 0 or entry.pw_uid == 0:
        raise UserError(f"--user {user}: grade as root, and name a user that is only for students' code")
    rights = dict(user=entry.pw_uid, group=entry.pw_gid, extra_groups=[])
    try:
        subprocess.run([sys.executable, "-c", ""], cwd="/", check=True, **rights)
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"--user {user}: cannot run {sys.executable}; install Python where this user can") from None
    return rights


def run_limited(command: list[str], folder: Path, limits: Limits) -> tuple[int, str]:
    """Run a command with a limit of CPU time (not on Windows), and ten times as much in all, because other programs may
    run. Returns the exit code, and the reason if the command was ended. Its processes are killed."""
    # No variable may tell where our solutions are.
    hidden = [name for name, value in os.environ.items() if name.startswith("PYTEST_") or str(ROOT) in value]
    environment = {name: value for name, value in os.environ.items() if name not in (*hidden, "PWD", "OLDPWD")}
    environment |= {"HOME": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # without plugins, pytest starts faster
    if os.name == "posix":  # the system first warns the process (SIGXCPU), and kills it 5 seconds later
        most = math.ceil(limits.seconds)
        command = ["sh", "-c", f'ulimit -S -t {most}; ulimit -H -t {most + 5}; "$@"; exit $?', "sh", *command]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing,
                               start_new_session=True, **limits.rights)
    left = limits.end - time.monotonic()
    try:
        code = process.wait(max(0, min(10 * limits.seconds, left)))
    except subprocess.TimeoutExpired:
        return -1, "ran out of time: the whole grade, or a task that waits, took too long"
    finally:
        process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if limits.rights:  # their processes may be in other sessions
            kill_all(limits.rights["user"])
    reasons = {128 + 24: f"ran out of time: more than {limits.seconds:g} s of computing",  # SIGXCPU
               128 + 9: "killed by the system: it probably ran out of memory"}  # SIGKILL
    return code, reasons.get(code, "")


def kill_all(user: int):
    """Kill all processes of a user (only on Linux)."""
    for _ in range(20):  # because they may start others meanwhile
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if path.stat().st_uid == user:
                    os.kill(int(path.name), signal.SIGKILL)


def delete_files(user: int):
    """Delete a user's files where everyone can write (only on Linux)."""
    command = ["find", "/tmp", "/var/tmp", "/dev/shm", "-user", str(user), "-delete"]
    subprocess.run(command, stderr=subprocess.DEVNULL)


def is_plain(path: Path) -> bool:
    """Whether a file that students' code may have written is one: a link could lead to ours, a pipe would wait."""
    return path.is_file() and not path.is_symlink()
