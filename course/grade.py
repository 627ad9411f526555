"""Grades a submission: runs claims about its functions, each worth a point; see teaching.md. The tasks run one after
another, each in a fresh copy of this project: the student's file, with our solutions to earlier tasks (all others in
`together`), but not to later ones, which its code could read. It is no sandbox."""
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest  # noqa: F401  (each task's process needs it)

from course.homework import HANDED_OUT, HOMEWORK, PARTS, PROJECT, SOLUTIONS, TASKS, is_attempted

TOGETHER = "together"  # claims about all of a student's functions at once
TESTS = ("test_maelm.py", "tests/test_homework.py")  # the claims that students also get
INI = "[pytest]\naddopts = --import-mode=importlib --tb=short\npythonpath = .\nfilterwarnings = ignore:Unknown pytest\n"


class Result(NamedTuple):
    """A graded task, in Gradescope's words. Its output is a status line, followed by the messages of failed claims."""
    name: str
    score: int
    max_score: int
    output: str


def grade(texts: dict[str, str], tasks: list[str], seconds: float) -> list[Result]:
    """Grade these tasks of a submission, within seconds per task."""
    return [result_of(task, *run_task(task, texts, seconds)) for task in tasks]


def result_of(task: str, problem: str, messages: dict[str, str]) -> Result:
    """The points of a task, given the outcome of run_task."""
    claims = claims_of(task)  # claim -> whether it is a gate
    if problem:
        return Result(task, 0, len(claims), problem)
    failed = [claim for claim in claims if messages[claim]]
    gates = [claim for claim in failed if claims[claim]]
    points = 0 if gates else len(claims) - len(failed)
    status = f"failed: {', '.join(failed)}" if failed else "full marks"
    if gates:
        status = f"no points without {gates[0]}; {status}"
    lines = [status, *[f"{name}: {messages[name]}" for name in failed]]
    return Result(task, points, len(claims), "\n    ".join(lines))


def claims_of(task: str) -> dict[str, bool]:
    """The claims of a task, and whether each is a gate: a task that fails a gate gets no points."""
    text = "\n".join(PROJECT[file] for file in TESTS)
    found = re.findall(rf'^@task\("{task}"(, gate=True)?\)\ndef (\w+)', text, re.MULTILINE)
    return {name: bool(gate) for gate, name in found}


def run_task(task: str, texts: dict[str, str], seconds: float) -> tuple[str, dict[str, str]]:
    """Run the claims of a task in a copy of the project. Returns why no claim counts, "" if they count, and the message
    of each claim, "" if it holds."""
    tasks = HOMEWORK if task == TOGETHER else [task]
    attempted = [name for name in tasks if is_attempted(name, texts)]
    needed = TASKS["maelm.py"] if task == TOGETHER else [task]  # other functions may be ours
    if not all(name in attempted for name in needed):
        return "not attempted", {}
    claims = claims_of(task)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        write_all(folder, copy_for(task, texts, attempted))
        # conftest.py is not loaded as a plugin, so that the report includes files that cannot be imported.
        command = [sys.executable, "-m", "pytest", "--noconftest", "--assert=plain", "-s", "--junitxml=report.xml",
                   *TESTS, "-k", " or ".join(claims)]
        problem = run_limited(command, folder, seconds)
        found = read_report(folder / "report.xml")
    if problem or not found:
        return problem or "no report: the code ends Python before the tests do", {}
    if found.keys().isdisjoint(claims):  # pytest could not even collect the tests
        return f"cannot be imported: {next(iter(found.values()))}", {}
    return "", {claim: found.get(claim, "did not run") for claim in claims}


def copy_for(task: str, texts: dict[str, str], attempted: list[str]) -> dict[str, str]:
    """The files of the copy in which a task runs: ours with blanks or, for the tasks in `attempted`, the student's. Our
    solutions to the other earlier tasks follow at the end of each file, where a definition replaces those before it."""
    files = PROJECT | HANDED_OUT | {"pytest.ini": INI}
    for name in attempted:
        files[HOMEWORK[name]] = texts[HOMEWORK[name]]
    earlier = [*itertools.takewhile(lambda other: other != task, HOMEWORK)]  # all tasks in `together`
    for name in earlier:
        if name not in attempted:
            for part in PARTS[name]:
                method = f"{part} = {part.split('.')[1]}" if "." in part else ""  # Attention.forward = forward
                files[HOMEWORK[name]] += f"\n\n\n{textwrap.dedent(SOLUTIONS[part])}\n\n\n{method}\n"
    return files


def write_all(folder: Path, texts: dict[str, str]):
    """Write files, by their names, to a folder."""
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")


def run_limited(command: list[str], folder: Path, seconds: float) -> str:
    """Run a command in a folder for at most these seconds. Kills its process group, and returns the reason if it was
    killed."""
    environment = os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **nothing)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"ran out of time: more than {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return "killed by the system: it probably ran out of memory" if code == -signal.SIGKILL else ""


def read_report(path: Path) -> dict[str, str]:
    """The message of each test in pytest's report, "" if it passed; none if there is no report."""
    messages = {}
    with suppress(OSError, ElementTree.ParseError):
        for case in ElementTree.fromstring(path.read_bytes()).iter("testcase"):
            text = "".join(case.itertext())
            errors = re.findall(r"^E   (?:AssertionError: )?(\S.*)", text, re.MULTILINE) or [f"failed {text[-99:]}"]
            places = re.findall(rf"^(?:{'|'.join(TASKS)}):\d+: in .*", text, re.MULTILINE)
            messages[case.get("name")] = "\n        ".join([errors[0][:300], *places[:9]]) if len(case) > 0 else ""
    return messages
