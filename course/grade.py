"""Grades a submission: runs claims about its functions, each worth a point; see teaching.md. The tasks run one after
another, each in a fresh copy of this project: the student's file, with our solutions to earlier tasks only (all others
in `together`), so that no process has seen our solution to a later task. It is no sandbox."""
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from course.homework import HANDED_OUT, HOMEWORK, PARTS, PROJECT, SOLUTIONS, TASKS, is_attempted, is_plain
from support.program.files import ROOT

TOGETHER = "together"  # claims about all of a student's functions at once
TESTS = ("test_maelm.py", "tests/test_homework.py")  # the claims that students also get
RANDOM_CLAIM = "test_random_inputs"  # only the grader checks it; a process of ours compares the effects that it writes
# Claims that cannot hold. If one does not fail, the student's code has changed pytest, torch or the report.
MUST_FAIL = ("assert False", "assert torch.equal(torch.zeros(2), torch.ones(2))", "assert torch.zeros(()) == 1",
             "close(torch.zeros(2), torch.ones(2))")
INI = "[pytest]\naddopts = --import-mode=importlib --tb=short\npythonpath = .\nfilterwarnings = ignore:Unknown pytest\n"


class Result(NamedTuple):
    """A graded task, in Gradescope's words. Its output is a status line, followed by the messages of failed claims."""
    name: str
    score: int
    max_score: int
    output: str


def grade(texts: dict[str, str], tasks: list[str], seconds: int, total: float, rights: dict) -> list[Result]:
    """Grade these tasks of a submission, within seconds of CPU time per task and a total of seconds by the clock."""
    limits = dict(seconds=seconds, end=time.monotonic() + total, rights=rights)  # of a user, as arguments of subprocess
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {task: run_task(task, texts, Path(folder, task), limits) for task in tasks}
        done = subprocess.run([sys.executable, "-m", "tests.random_inputs", folder], cwd=ROOT, capture_output=True)
        differences = json.loads(done.stdout) if done.returncode == 0 else {}
    return [result_of(task, *outcomes[task], differences.get(task, "the effects are missing")) for task in tasks]


def result_of(task: str, problem: str, messages: dict[str, str], difference: str) -> Result:
    """The points of a task, given the outcome of run_task, and the difference between its effects and ours."""
    claims = claims_of(task)
    if problem:
        return Result(task, 0, len(claims), problem)
    messages[RANDOM_CLAIM] = messages[RANDOM_CLAIM] or difference
    failed = [claim for claim in claims if messages[claim]]
    gates = [claim for claim in failed if claims[claim]]
    points = 0 if gates else len(claims) - len(failed)
    status = f"failed: {', '.join(failed)}" if failed else "full marks"
    status = f"no points without {gates[0]}; {status}" if gates else status
    return Result(task, points, len(claims), "\n    ".join([status, *[f"{name}: {messages[name]}" for name in failed]]))


def claims_of(task: str) -> dict[str, bool]:
    """The claims of a task, and whether each is a gate: a task that fails a gate gets no points."""
    text = "\n".join(PROJECT[file] for file in TESTS)
    found = re.findall(rf'^@task\("{task}"(, gate=True)?\)\ndef (\w+)', text, re.MULTILINE)
    return {name: bool(gate) for gate, name in found} | {RANDOM_CLAIM: True}


def run_task(task: str, texts: dict[str, str], effects: Path, limits: dict) -> tuple[str, dict[str, str]]:
    """Run the claims of a task in a copy of the project, and copy its file of effects to a path. Returns why no claim
    counts, "" if they count, and the message of each claim, "" if it holds."""
    tasks = HOMEWORK if task == TOGETHER else [task]
    students = [name for name in tasks if is_attempted(name, texts)]
    needed = TASKS["maelm.py"] if task == TOGETHER else [task]  # other functions may be ours
    if not {*needed}.issubset(students):
        return "not attempted", {}
    # Code that was written before cannot contain these names, so it cannot report them.
    names = {claim: f"test_{secrets.token_hex(8)}" for claim in (*claims_of(task), *MUST_FAIL)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        write_all(folder, copy_for(task, texts, students, names))
        # conftest.py is not loaded as a plugin, so that the report includes files that cannot be imported.
        problem = run_limited([sys.executable, "-m", "pytest", "--noconftest", "--assert=plain", "-s", *TESTS, "-k",
                               " or ".join(names.values()), "--junitxml=report.xml"], folder, **limits)
        found = read_report(folder / "report.xml")
        if found and not problem and is_plain(folder / "effects.pt"):  # otherwise, it may be incomplete
            shutil.copyfile(folder / "effects.pt", effects)
    if problem or not found:
        return problem or "no report: the code ends Python", {}
    if found.keys().isdisjoint(names.values()):  # pytest could not even collect the tests
        return f"cannot be imported: {next(iter(found.values()))}", {}
    if not all(found.get(names[wrong]) for wrong in MUST_FAIL):
        return "read by hand: claims that cannot hold did not fail", {}
    return "", {claim: found.get(names[claim], "has no result") for claim in claims_of(task)}


def copy_for(task: str, texts: dict[str, str], students: list[str], names: dict[str, str]) -> dict[str, str]:
    """The files of the copy in which a task runs: ours with blanks or, for some tasks, the student's. Our solutions to
    earlier tasks follow at the end of each file, where they replace the student's. Claims get new names."""
    files = PROJECT | HANDED_OUT | {"pytest.ini": INI}
    for name in students:
        files[HOMEWORK[name]] = texts[HOMEWORK[name]]
    for name in itertools.takewhile(lambda name: name != task, HOMEWORK):  # all tasks in `together`
        if name not in students:
            for part in PARTS[name]:
                method = f"{part} = {part.split('.')[1]}" if "." in part else ""  # Attention.forward = forward
                files[HOMEWORK[name]] += f"\n\n\n{textwrap.dedent(SOLUTIONS[part])}\n\n\n{method}\n"
    for file in TESTS:
        for claim in claims_of(task):
            files[file] = files[file].replace(f"def {claim}(", f"def {names[claim]}(")
    for wrong in MUST_FAIL:
        files[TESTS[0]] += f"\n\ndef {names[wrong]}():\n    {wrong}\n"
    files[TESTS[1]] += (f"\n\ndef {names[RANDOM_CLAIM]}():\n    from tests import random_inputs\n"
                        f"    torch.save([*random_inputs.effects({task!r})], 'effects.pt')\n")
    return files


def write_all(folder: Path, texts: dict[str, str]):
    """Write files, by their names, to a folder."""
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")


def run_limited(command: list[str], folder: Path, seconds: int, end: float, rights: dict) -> str:
    """Run a command in a folder, with these seconds of CPU time, ten times as many by the clock, and until `end` by
    time.monotonic. Kills its process group. Returns the reason if a limit ended the command."""
    if rights:
        subprocess.run(["chown", "-R", str(rights["user"]), folder], check=True)
    # No variable may tell where our solutions are.
    environment = {name: value for name, value in os.environ.items() if str(ROOT) not in value}
    environment |= {"HOME": str(folder), "PWD": str(folder), "OLDPWD": "", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": "",
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # without plugins, pytest starts faster
    # The system first warns the process (SIGXCPU), and kills it 5 seconds later.
    limited = f'ulimit -S -t {seconds}; ulimit -H -t {seconds + 5}; exec "$@" < /dev/null > /dev/null 2>&1'
    command = ["sh", "-c", limited, "sh", *command]
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **rights)
    try:
        code = process.wait(max(0, min(10 * seconds, end - time.monotonic())))
    except subprocess.TimeoutExpired:
        return "ran out of time: the whole grade, or a task that waits, took too long"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    reasons = {-signal.SIGXCPU: f"ran out of time: more than {seconds} s of computing",
               -signal.SIGKILL: "killed by the system: it probably ran out of memory"}
    return reasons.get(code, "")


def read_report(path: Path) -> dict[str, str]:
    """The message of each test in pytest's report, "" if it passed; none if there is no report."""
    messages = {}
    with suppress(OSError, ElementTree.ParseError):
        for case in ElementTree.fromstring(path.read_bytes() if is_plain(path) else "").iter("testcase"):
            text = "".join(case.itertext())
            errors = re.findall(r"^E   (?:AssertionError: )?(\S.*)", text, re.MULTILINE) or [f"failed {text[-99:]}"]
            places = re.findall(rf"^(?:{'|'.join(TASKS)}):\d+: in .*", text, re.MULTILINE)
            messages[case.get("name")] = "\n        ".join([*errors[:1], *places]) if len(case) > 0 else ""
    return messages
