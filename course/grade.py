"""Grading: reads submissions, runs the tests on their functions, and adds up points; see teaching.md.

Each task runs in a fresh copy of this project, with the student's file and our solutions to all other tasks. The points
come from pytest's report, which is written outside the copy. The copy is not a sandbox.
"""
import ast
import functools
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from support.program.cli import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None

HERE = Path(__file__).resolve().parent.parent
TASKS = {  # function or Class.method: its file; each function calls only functions above it
    "learning_rate_factor": "train.py",
    "tau_rank": "rank.py",
    "matthews": "support/tasks/metrics.py",
    "effective_rank": "rank.py",
    "relative_bucket": "maelm.py",
    "attention": "maelm.py",
    "RelativeBias.forward": "maelm.py",
    "Attention.forward": "maelm.py",
    "corrupt": "maelm.py",
    "Encoder.hidden_states": "maelm.py",
    "MAELM.fill_gaps": "maelm.py",
    "MAELM.forward": "maelm.py",
}
STEPS = {"corrupt": ("draw_masks", "apply_masks")}  # functions that also belong to a task
SHORTCUTS = {"RelativeBias.forward": ("lookup",)}  # functions that only our solution to a task calls
TOGETHER = "together"  # claims about all of a student's functions at once
FILES = ("maelm.py", "rank.py", "train.py", "support/tasks/metrics.py")
TESTS = ("test_maelm.py", "tests/test_homework.py")  # files that students also get
CLAIMS = (*TESTS, "tests/test_random_inputs.py")
COPIED = ("*.py", "support/**/*.py", *CLAIMS)
CANARIES = ("assert False", "assert torch.equal(torch.zeros(2), torch.ones(2))", "assert torch.zeros(()) == 1",
            "torch.testing.assert_close(torch.zeros(2), torch.ones(2))")  # claims that cannot hold
PYTEST_INI = "[pytest]\naddopts = --import-mode=importlib --tb=short\npythonpath = .\n"


# ---- 1. Reading code ----------------------------------------------------------------------------------------
@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file, or an empty tree if the file has syntax errors; pytest will report them."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.parse("")


def find(text: str, name: str) -> ast.FunctionDef | None:
    """Function or Class.method `name` in a Python text, the last one if there are several; None if there is none."""
    node = parsed(text)
    for part in name.split("."):
        named = {inner.name: inner for inner in getattr(node, "body", []) if hasattr(inner, "name")}
        node = named.get(part)
    return node


def lines_of(text: str, name: str) -> str:
    """The lines of a function, including a comment at the end of the last one."""
    node = find(text, name)
    return "\n".join(text.split("\n")[node.lineno - 1:node.end_lineno])


def source(text: str, name: str) -> str:
    """The lines of a function, dedented."""
    return textwrap.dedent(lines_of(text, name))


def functions_of(task: str) -> tuple[str, ...]:
    """The functions that students write for a task."""
    return (task, *STEPS.get(task, ()))


def claims_of(task: str, files: tuple[str, ...] = CLAIMS) -> dict[str, bool]:
    """The tests of a task, and whether each is a gate: a task that fails a gate gets no points."""
    text = "\n".join((HERE / file).read_text("utf-8") for file in files)
    found = re.findall(rf'^@task\("{task}"(, gate=True)?\)\ndef (\w+)', text, re.MULTILINE)
    return {name: bool(gate) for gate, name in found}


def is_written(text: str, name: str) -> bool:
    """Whether a file defines the function or Class.method `name` in any form other than our blank."""
    owner, _, last = name.rpartition(".")
    node = find(text, name)
    if node is None:  # defined inside an if, as a lambda, or not at all
        return owner in text and last in text
    is_blank = "NotImplementedError" in ast.unparse(node.body[-1])
    return not is_blank or bool(re.search(rf"^\s*({re.escape(name)}|{last}) = ", text, re.MULTILINE))


# ---- 2. Submissions -----------------------------------------------------------------------------------------
def read_submission(path: Path) -> dict[str, str]:
    """The texts of a student's files, by their names in FILES. Raises UserError if the path does not exist."""
    if path.suffix == ".zip" and path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            shutil.unpack_archive(path, folder)
            return read_submission(Path(folder))
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; name a maelm.py, a folder or a zip")
    if path.is_file():
        return {"maelm.py": path.read_text("utf-8-sig", "replace")}
    texts, names = {}, {Path(file).name: file for file in FILES}
    for found in sorted(path.rglob("*.py"), key=lambda found: -len(found.parts)):  # the uppermost copy counts
        if found.name in names and "__MACOSX" not in found.parts:
            texts[names[found.name]] = found.read_text("utf-8-sig", "replace")
    return texts


def completed(text: str, file: str, own: list[str]) -> str:
    """A student's file, followed by our solutions to all tasks except the student's own."""
    ours, parts = (HERE / file).read_text("utf-8"), [text]
    for task in TASKS:
        if TASKS[task] == file and task not in own:
            for name in (*functions_of(task), *SHORTCUTS.get(task, ())):
                owner, _, method = name.rpartition(".")
                parts.append(source(ours, name))
                if owner:
                    parts.append(f"if {owner!r} in globals():\n    {name} = {method}")
    return "\n\n\n".join([*parts, ""])


# ---- 3. Points ----------------------------------------------------------------------------------------------
class Result(NamedTuple):
    """The result of a task: its points, the maximum, a status line, and a paragraph for each failed claim."""
    task: str
    points: int
    most: int
    status: str
    details: str = ""


def grade(task: str, texts: dict[str, str], seconds: float) -> Result:
    """Grade one task of a submission or, for `together`, all tasks that the student has attempted."""
    most, names = len(claims_of(task)), TASKS if task == TOGETHER else [task]
    own = [name for name in names if any(is_written(texts.get(TASKS[name], ""), part) for part in functions_of(name))]
    files = {TASKS[name] for name in own}
    if not files or task == TOGETHER and "maelm.py" not in files:
        return Result(task, 0, most, "not attempted")

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as elsewhere:
        folder, report = Path(name), Path(elsewhere) / "report.xml"
        for pattern in COPIED:
            for path in HERE.glob(pattern):
                for place in (folder, folder / "solutions"):
                    target = place / path.relative_to(HERE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target)
        (folder / "pytest.ini").write_text(PYTEST_INI)
        for file in files:
            (folder / file).write_text(completed(texts[file], file, own), "utf-8")
        canaries = [f"test_{secrets.token_hex(8)}" for _ in CANARIES]
        lines = [f"def {name}():\n    {wrong}\n" for name, wrong in zip(canaries, CANARIES)]
        (folder / f"{canaries[0]}.py").write_text("\n".join(["import torch", *lines]))
        # conftest.py is not loaded as a plugin, so that the report includes files that cannot be imported.
        command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        for file in CLAIMS:
            command += [f"{file}::{claim}" for claim in claims_of(task, (file,))]
        if not run_limited([*command, f"{canaries[0]}.py"], folder, seconds):
            return Result(task, 0, most, f"ran out of time: more than {seconds:g} s of computing")
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            return Result(task, 0, most, "no report: the code ends Python")
    return counted(task, cases, texts, canaries)


def run_limited(command: list[str], folder: Path, seconds: float) -> bool:
    """Run a command with a limit of CPU time, and ten times as much in all, because other programs may be running.
    Returns whether it ended in time. Its processes are killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    most, nothing = math.ceil(seconds), subprocess.DEVNULL
    limit = (lambda: resource.setrlimit(resource.RLIMIT_CPU, (most, most))) if resource else None
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing,
                               start_new_session=True, preexec_fn=limit)
    try:
        code = process.wait(10 * seconds)
        return code >= 0 or -code not in (signal.SIGKILL, getattr(signal, "SIGXCPU", None))
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def counted(task: str, cases: list[ElementTree.Element], texts: dict[str, str], canaries: list[str]) -> Result:
    """The points for the test cases of a report. Claims that cannot hold, the canaries, must have failed."""
    claims, failed = claims_of(task), {}
    by_name = {case.get("name"): case for case in cases}
    if cases and not by_name.keys() & claims.keys():  # pytest could not even collect the tests
        said = re.findall(r"^E +(\w+: .*)", "".join(cases[0].itertext()), re.MULTILINE)
        return Result(task, 0, len(claims), f"cannot be imported: {said[-1] if said else 'see pytest'}")
    if not all(name in by_name and len(by_name[name]) for name in canaries):
        return Result(task, 0, len(claims), "read by hand: claims that cannot hold did not fail")
    for claim in claims:
        if claim not in by_name:
            failed[claim] = f"{claim}: has no result"
        elif len(by_name[claim]):  # it contains a failure, an error or a skip
            failed[claim] = f"{claim}: {explained(''.join(by_name[claim].itertext()), texts)}"
    gates = [claim for claim in failed if claims[claim]]
    status = f"failed: {', '.join(failed)}" if failed else "full marks"
    if gates:
        status = f"no points without {gates[0]}; {status}"
    return Result(task, 0 if gates else len(claims) - len(failed), len(claims), status, "\n".join(failed.values()))


def explained(traceback: str, texts: dict[str, str]) -> str:
    """The message and the student's own lines from pytest's short traceback, without our lines."""
    lines = re.findall(r"^E +(?:AssertionError: )?(.*)", traceback, re.MULTILINE)[:1]
    for file, number, function, code in re.findall(r"^(\S+):(\d+): in (.+)\n +(.*)", traceback, re.MULTILINE):
        if int(number) <= len(texts.get(file, "").splitlines()):  # our solutions follow at the end
            lines.append(f"    {file}:{number} in {function}: {code}")
    return "\n".join(lines)


def grade_all(texts: dict[str, str], only: list[str], seconds: float) -> list[Result]:
    """Grade all tasks, or only some of them, with one process per task."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cpus) as pool:
        return list(pool.map(lambda task: grade(task, texts, seconds), only or [*TASKS, TOGETHER]))


def gradescope(results: list[Result]) -> str:
    """results.json in Gradescope's format."""
    tests = [{"name": task, "score": points, "max_score": most, "output": f"{status}\n{details}"}
             for task, points, most, status, details in results]
    return json.dumps({"tests": tests}, indent=1)
