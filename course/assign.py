"""Assignments: what students get, and how many points their solutions have; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --grade homework                          # such a folder, or a maelm.py

A task is a function that students write; its tests are a point each. They run in a copy of this project, where the
student's file has our solutions of all other tasks, with limits of time and memory. It is no sandbox.
"""
import ast
import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from xml.etree import ElementTree

from support.files import Parser, UserError, clear_errors

try:
    import resource
except ImportError:  # Windows, where nothing limits the memory of a task
    resource = None

HERE = Path(__file__).resolve().parent.parent
TASKS = {  # function or Class.method: its file, level and hours; each one calls only those above it
    "learning_rate_factor": ("support/run.py", "easy", 0.5),
    "tau_rank": ("rank.py", "easy", 0.5),
    "matthews": ("support/tasks.py", "easy", 1),
    "effective_rank": ("rank.py", "medium", 1.5),
    "relative_bucket": ("maelm.py", "medium", 1.5),
    "attention": ("maelm.py", "easy", 1),
    "RelativeBias.forward": ("maelm.py", "medium", 1.5),
    "Attention.forward": ("maelm.py", "medium", 1.5),
    "corrupt": ("maelm.py", "hard", 3),
    "Encoder.forward": ("maelm.py", "medium", 1.5),
    "MAELM.decoder_input": ("maelm.py", "medium", 1),
    "MAELM.forward": ("maelm.py", "easy", 1),
}
TESTS = ("test_maelm.py", "tests/test_homework.py")
COPIED = ("*.py", "tests/test_homework.py", "support/*.py", "course/*.py", "LICENSE", "requirements.txt")
SOLVED = ("support/convert.py", "support/modeling_maelm.py", "support/predict.py")  # not copied: they show solutions
PREDICT = 'examples = fill_mask = lambda *_: "What the model expects at [MASK] is not part of the homework."\n'


# ---- 1. Reading and changing code ---------------------------------------------------------------------------
def read(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    return path.read_text(encoding="utf-8-sig")


def write(path: Path, text: str) -> None:
    """Write a text, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@functools.cache
def find(text: str, name: str) -> ast.FunctionDef | None:
    """Function or Class.method `name` in a Python text, the last one if there are several; None if there is none."""
    node = ast.parse(text)
    for part in name.split("."):
        found = [inner for inner in node.body if getattr(inner, "name", "") == part]
        if not found:
            return None
        node = found[-1]
    return node


def source(text: str, name: str) -> str:
    """The lines of a function, not indented."""
    node = find(text, name)
    return textwrap.dedent("\n".join(text.split("\n")[node.lineno - 1:node.end_lineno]))


def replaced(text: str, name: str, function: str) -> str:
    """`text` with the lines `function` for its function `name`."""
    node, lines = find(text, name), text.split("\n")
    indent = lines[node.lineno - 1][:node.col_offset]
    lines[node.lineno - 1:node.end_lineno] = textwrap.indent(function, indent).split("\n")
    return "\n".join(lines)


def blank(text: str, name: str) -> str:
    """The signature and docstring of a function."""
    function = source(text, name)
    docstring = find(function, name.rpartition(".")[2]).body[0]
    head = function.split("\n")[:docstring.end_lineno]
    return "\n".join([*head, "    raise NotImplementedError"])


def alone(text: str, name: str, ours: str) -> str:
    """A student's file with the solutions in `ours` of all its tasks but `name`."""
    for other, (file, *_) in TASKS.items():
        if other != name and file == TASKS[name][0] and find(text, other):
            text = replaced(text, other, source(ours, other))
    return text


# ---- 2. What students get -----------------------------------------------------------------------------------
def task_of(node: ast.stmt) -> str | None:
    """The task that a statement is a test of, by its decorator @task."""
    for mark in getattr(node, "decorator_list", []):
        if ast.unparse(mark).startswith("task("):
            return mark.args[0].value
    return None


def claims_of(name: str) -> list[str]:
    """The tests of a task, as pytest names them."""
    found = []
    for file in TESTS:
        tests = [node for node in ast.parse(read(HERE / file)).body if task_of(node) == name]
        found += [f"{file}::{test.name}" for test in tests]
    return found


def for_students(text: str) -> str:
    """A test file without what shows solutions: tests of no task, wrong versions, lines marked "not for students"."""
    text = text.partition("# ---- Not for students")[0]
    hidden = set()
    for node in ast.parse(text).body:
        hide = getattr(node, "name", "").startswith("test_") and not task_of(node)
        for part in [*getattr(node, "decorator_list", []), node]:
            if hide or ast.unparse(part).startswith("catches("):
                hidden.update(range(part.lineno, part.end_lineno + 1))
    lines = text.split("\n")
    kept = [line for i, line in enumerate(lines, 1) if i not in hidden and "# not for students" not in line]
    return re.sub("\n{4,}", "\n\n\n", "\n".join(kept))


def copy_project(folder: Path) -> None:
    """Write the programs, with our solutions, and the tests of the tasks into a folder."""
    for path in itertools.chain(*map(HERE.glob, COPIED)):
        name = path.relative_to(HERE).as_posix()
        text = read(path)
        if name in TESTS or name == "conftest.py":
            text = for_students(text)
        if name not in SOLVED:
            write(folder / name, text)
    write(folder / "support/predict.py", PREDICT)  # train.py imports it
    write(folder / "pytest.ini", "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\n")


def hand_out(folder: Path) -> None:
    """Make a folder for students. UserError if it is not a new or empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists; name a new folder")
    copy_project(folder)
    sections = ["# Assignment\n\nThe paper: https://arxiv.org/abs/2302.02060. Each task calls only those above it.\n"]
    for name, (file, level, hours) in TASKS.items():
        text, points = read(folder / file), len(claims_of(name))
        function = blank(text, name)
        write(folder / file, replaced(text, name, function))
        sections.append(f"## {name}\n\n{level}, {hours} h, {points} points, `{file}`\n\n```python\n{function}\n```\n")
    write(folder / "assignment.md", "\n".join(sections))
    write(folder / "README.md", read(HERE / "course/homework.md"))
    pytest = re.search("^pytest==.*$", read(HERE / "requirements-test.txt"), re.MULTILINE)
    write(folder / "requirements.txt", f"{read(HERE / 'requirements.txt')}{pytest[0]}\n")
    print(f"{folder}: read its README.md")


def without(names: list[str]) -> str:
    """The file of the first of these tasks, or maelm.py for "all", without the solutions of all of them in it."""
    wanted = "maelm.py" if "all" in names else TASKS[names[0]][0]
    text = read(HERE / wanted)
    for name, (file, *_) in TASKS.items():
        if file == wanted and (name in names or "all" in names):
            text = replaced(text, name, blank(text, name))
    return text


# ---- 3. Grading ---------------------------------------------------------------------------------------------
MUST_FAIL = """
def test_must_fail():
    import torch
    torch.testing.assert_close(torch.zeros(1), torch.ones(1))
"""


def set_limits() -> None:
    """Limit this process's memory, and the size of what it prints."""
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))


def run_pytest(tests: list[str], folder: Path, seconds: float) -> tuple[dict[str, bool], str]:
    """Run tests in a process of their own -> whether each failed (none if they did not end), what pytest printed."""
    with tempfile.TemporaryDirectory() as outside:
        report, output = Path(outside, "report.xml"), Path(outside, "output.txt")
        command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with open(output, "wb") as file:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                                       stderr=file, start_new_session=True, preexec_fn=resource and set_limits)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        process.wait()
        if resource:
            with contextlib.suppress(OSError):  # it started nothing that goes on
                os.killpg(process.pid, signal.SIGKILL)
        failed = {}
        with contextlib.suppress(OSError, ElementTree.ParseError):  # no report
            for case in ElementTree.parse(report).iter("testcase"):
                failed[case.get("name")] = len(case) > 0
        return failed, output.read_text(encoding="utf-8", errors="replace")[-10_000:]


def grade(name: str, path: Path, folder: Path, seconds: float) -> tuple[int, str, str]:
    """Grade the task `name` in a student's file, in a `folder` with a copy of the project -> points, status, output."""
    file, claims = TASKS[name][0], claims_of(name)
    try:
        ours, text = read(HERE / file), read(path)
        if find(text, name) is None or source(text, name) == blank(ours, name):
            return 0, "not attempted", ""
        text = alone(text, name, ours)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return 0, f"cannot be read: {error}", ""
    write(folder / "test_must_fail.py", MUST_FAIL)
    write(folder / file, text)
    failed, printed = run_pytest([*claims, "test_must_fail.py"], folder, seconds)
    write(folder / file, ours)
    if not failed.get("test_must_fail"):
        return 0, f"no report: it cannot be imported, takes over {seconds:g} s, ends Python, or changes pytest", printed
    wrong = [test.partition("::")[2] for test in claims if failed.get(test.partition("::")[2], True)]
    return len(claims) - len(wrong), f"failed: {wrong[0]}" if wrong else "full marks", printed


def grade_all(submission: Path, only: list[str], seconds: float, verbose: bool) -> bool:
    """Grade a folder, or a maelm.py, and print a line for each task. Returns whether it gets full marks."""
    if not submission.exists():
        raise UserError(f"{submission}: no such file or folder")
    score = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        for name in only or TASKS:
            file = TASKS[name][0]
            if submission.is_dir() or file == "maelm.py":
                path = submission / file if submission.is_dir() else submission
                points, status, printed = grade(name, path, Path(folder), seconds)
                print(f"{name} {points}/{len(claims_of(name))} {status}", flush=True)
                if verbose and status != "full marks":
                    print(printed)
                score += points
                total += len(claims_of(name))
    print(f"total {score}/{total}")
    return score == total


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 1 for less than full marks."""
    parser = Parser("test_maelm.py", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="TASK", choices=[*TASKS, "all"],
                      help="print the file of these functions without them; all: maelm.py")
    what.add_argument("--handout", type=Path, metavar="DIR", help="make a folder for students")
    what.add_argument("--grade", type=Path, metavar="PATH", help="grade a folder or a maelm.py")
    parser.add_argument("--only", nargs="+", metavar="TASK", choices=TASKS, default=[], help="grade only these tasks")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", default=60, help="for each task [60]")
    parser.add_argument("--verbose", action="store_true", help="show what pytest prints of tasks without full marks")
    options = parser.parse_args(argv)
    full_marks = True
    with clear_errors("test_maelm.py"):
        if options.handout:
            hand_out(options.handout)
        elif options.blank:
            print(without(options.blank), end="")
        else:
            full_marks = grade_all(options.grade, options.only, options.time_limit, options.verbose)
    return int(not full_marks)
