"""Assignments: what students get, and how many points their solutions have; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --grade homework                          # such a folder, or a maelm.py

A task is a function that students write; its tests are a point each. They run in a copy of this project with our
solutions of all other tasks, with a limit of time. It is no sandbox.
"""
import ast
import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from xml.etree import ElementTree

from support.cli import Parser, UserError, clear_errors

HERE = Path(__file__).resolve().parent.parent
TASKS = {  # function or Class.method: its file, level and hours; each one calls only those above it
    "learning_rate_factor": ("train.py", "easy", 0.5),
    "tau_rank": ("rank.py", "easy", 0.5),
    "matthews": ("support/metrics.py", "easy", 1),
    "effective_rank": ("rank.py", "easy", 1),
    "relative_bucket": ("maelm.py", "medium", 1.5),
    "attention": ("maelm.py", "easy", 1),
    "RelativeBias.forward": ("maelm.py", "medium", 1.5),
    "Attention.forward": ("maelm.py", "medium", 1.5),
    "corrupt": ("maelm.py", "hard", 3),
    "Encoder.forward": ("maelm.py", "medium", 1.5),
    "MAELM.decoder_input": ("maelm.py", "medium", 1),
    "MAELM.forward": ("maelm.py", "easy", 1),
}
STEPS = {"corrupt": ("draw_masks", "remove_masks")}  # functions that belong to a task, too
TESTS = ("test_maelm.py", "tests/test_homework.py")
COPIED = ("*.py", "tests/test_homework.py", "support/*.py", "course/*.py", "course/tasks.md", "LICENSE",
          "requirements.txt")
SOLVED = ("support/convert.py", "support/modeling_maelm.py", "course/copying.py")  # not copied: they show solutions
STUBS = {  # what takes the place of other files that do
    "support/fill_mask.py": 'examples = fill_mask = lambda *_: "What a model expects at [MASK] is not part of this."\n',
    "support/cross_attention.py": "CrossMAELM = None  # not part of the homework\n",
}


# ---- 1. Reading and changing code ---------------------------------------------------------------------------
def read(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    return path.read_text(encoding="utf-8-sig")


def write(path: Path, text: str):
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


def rules(name: str) -> str:
    """The section of a task in tasks.md."""
    return read(HERE / "course/tasks.md").partition(f"## {name}\n")[2].partition("\n## ")[0].strip()


def functions_of(task: str) -> tuple[str, ...]:
    """The functions that students write for a task."""
    return (task, *STEPS.get(task, ()))


def blank(text: str, name: str) -> str:
    """The signature of a function, and its docstring with the rules of the task."""
    function = source(text, name)
    docstring = find(function, name.rpartition(".")[2]).body[0]
    head = "\n".join(function.split("\n")[:docstring.end_lineno]).removesuffix('"""')
    section = "\n\n" + textwrap.indent(rules(name), "    ") if name in TASKS else ""
    return head.removesuffix(section) + section + '"""\n    raise NotImplementedError'


def unsolved(text: str, task: str) -> str:
    """`text` without the solution of a task."""
    for name in functions_of(task):
        text = replaced(text, name, blank(text, name))
    return text


def alone(text: str, task: str, ours: str) -> str:
    """A student's file with the solutions in `ours` of all its tasks but one."""
    for other, (file, *_) in TASKS.items():
        for name in functions_of(other):
            if other != task and file == TASKS[task][0] and find(text, name):
                text = replaced(text, name, source(ours, name))
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
    """A test file without what shows solutions: tests of no task, lines marked "not for students"."""
    text = text.partition("# ---- Not for students")[0]
    hidden = set()
    for node in ast.parse(text).body:
        if getattr(node, "name", "").startswith("test_") and not task_of(node):
            for part in [*node.decorator_list, node]:
                hidden.update(range(part.lineno, part.end_lineno + 1))
    lines = text.split("\n")
    kept = [line for i, line in enumerate(lines, 1) if i not in hidden and "# not for students" not in line]
    return re.sub("\n{4,}", "\n\n\n", "\n".join(kept))


def copy_project(folder: Path):
    """Write the programs, with our solutions, and the tests of the tasks into a folder."""
    for path in itertools.chain(*map(HERE.glob, COPIED)):
        name = path.relative_to(HERE).as_posix()
        text = read(path)
        if name in TESTS or name == "conftest.py":
            text = for_students(text)
        if name not in SOLVED:
            write(folder / name, STUBS.get(name, text))
    write(folder / "pytest.ini", "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\n")


def hand_out(folder: Path):
    """Make a folder for students. UserError if it is not a new or empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists; name a new folder")
    copy_project(folder)
    sections = ["# Assignment\n\nThe paper: https://arxiv.org/abs/2302.02060. Each task calls only those above it.\n"]
    for name, (file, level, hours) in TASKS.items():
        text, points = read(folder / file), len(claims_of(name))
        write(folder / file, unsolved(text, name))
        function = "\n\n\n".join(blank(text, part) for part in functions_of(name))
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
            text = unsolved(text, name)
    return text


# ---- 3. Grading ---------------------------------------------------------------------------------------------
MUST_FAIL = """
def test_must_fail():
    import torch
    torch.testing.assert_close(torch.zeros(1), torch.ones(1))
"""


def run_pytest(tests: list[str], folder: Path, seconds: float) -> dict[str, str]:
    """Run tests in a process of their own -> what went wrong in each, "" for nothing; nothing if they did not end."""
    with tempfile.TemporaryDirectory() as outside:
        report = Path(outside, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with contextlib.suppress(subprocess.TimeoutExpired):
            environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            subprocess.run(command, cwd=folder, env=environment, timeout=seconds, **quiet)
        with contextlib.suppress(OSError, ElementTree.ParseError):  # no report
            cases = ElementTree.parse(report).iter("testcase")
            return {case.get("name"): "".join(case.itertext())[-10_000:] for case in cases}
    return {}


def grade(name: str, path: Path, folder: Path, seconds: float) -> tuple[int, str, str]:
    """Grade the task `name` in a student's file, in a `folder` with a copy of the project -> points, status, output."""
    file, claims = TASKS[name][0], claims_of(name)
    try:
        ours, text = read(HERE / file), read(path)
        parts = functions_of(name)
        if any(find(text, part) is None for part in parts) or all(
                source(text, part) == blank(ours, part) for part in parts):
            return 0, "not attempted", ""
        text = alone(text, name, ours)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return 0, f"cannot be read: {error}", ""
    write(folder / "test_must_fail.py", MUST_FAIL)
    write(folder / file, text)
    found = run_pytest([*claims, "test_must_fail.py"], folder, seconds)
    write(folder / file, ours)
    printed = "\n".join(text for name, text in found.items() if name != "test_must_fail")
    if not found.get("test_must_fail"):
        return 0, f"no report: it cannot be imported, takes over {seconds:g} s, ends Python, or changes pytest", printed
    wrong = [test.partition("::")[2] for test in claims if found.get(test.partition("::")[2]) != ""]
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


def main(argv=None) -> int:
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
