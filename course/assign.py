"""Assignments: what students get, and how many points their solutions have; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --grade homework                          # such a folder, or a maelm.py

A task is a function that students write; its tests are a point each. They run in a copy of this project with our
solutions of all other tasks, with a limit of time. It is no sandbox.
"""
import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from support.cli import Parser, UserError, clear_errors

HERE = Path(__file__).resolve().parent.parent
TASKS = {  # function or Class.method: its file; each one calls only those above it
    "learning_rate_factor": "train.py",
    "tau_rank": "rank.py",
    "matthews": "support/metrics.py",
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
STEPS = {"corrupt": ("draw_masks", "apply_masks")}  # functions that belong to a task, too
TESTS = ("test_maelm.py", "tests/test_homework.py")
COPIED = ("*.py", "support/*.py", "tests/test_homework.py", "course/assign.py", "course/tasks.md", "*.txt", "LICENSE")
STUBS = {  # what students get for files that show solutions
    "support/modeling_maelm.py": "",
    "support/cross_attention.py": "CrossMAELM = None  # not part of the homework\n",
    "support/fill_mask.py": 'examples = fill_mask = lambda *_: "What a model expects at [MASK] is not part of this."\n',
}


# ---- 1. Reading and changing code ---------------------------------------------------------------------------
@functools.cache
def find(text: str, name: str) -> ast.FunctionDef | None:
    """Function or Class.method `name` in a Python text, the last one if there are several; None if there is none."""
    node = ast.parse(text)
    for part in name.split("."):
        named = {inner.name: inner for inner in getattr(node, "body", []) if hasattr(inner, "name")}
        node = named.get(part)
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


def functions_of(task: str) -> tuple[str, ...]:
    """The functions that students write for a task."""
    return (task, *STEPS.get(task, ()))


def blank(text: str, name: str) -> str:
    """The signature of a function, and its docstring, with the rules in tasks.md if it is a task."""
    function = source(text, name)
    docstring = find(function, name.rpartition(".")[2]).body[0]
    head = "\n".join(function.split("\n")[:docstring.end_lineno]).removesuffix('"""')
    rules = (HERE / "course/tasks.md").read_text("utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0].strip()
    rules = textwrap.indent(f"\n\n{rules}", "    ") if rules else ""
    return head.removesuffix(rules) + rules + '"""\n    raise NotImplementedError'


def unsolved(text: str, task: str) -> str:
    """`text` without the solution of a task."""
    for name in functions_of(task):
        text = replaced(text, name, blank(text, name))
    return text


def alone(text: str, task: str, ours: str) -> str:
    """A student's file with the solutions in `ours` of all tasks but one."""
    for other in TASKS:
        for name in functions_of(other):
            if other != task and find(text, name) and find(ours, name):
                text = replaced(text, name, source(ours, name))
    return text


# ---- 2. What students get -----------------------------------------------------------------------------------
def claims_of(task: str) -> list[str]:
    """The tests of a task, as pytest names them."""
    pattern = rf'^@task\("{task}"\)\ndef (\w+)'
    found = []
    for file in TESTS:
        found += [f"{file}::{test}" for test in re.findall(pattern, (HERE / file).read_text("utf-8"), re.MULTILINE)]
    return found


def copy_project(folder: Path):
    """Write the programs, with our solutions, and the tests of the tasks into a folder."""
    for path in itertools.chain(*map(HERE.glob, COPIED)):
        name = path.relative_to(HERE).as_posix()
        text = path.read_text("utf-8")
        if name in TESTS:  # without the tests of no task, which show solutions
            blocks = text.split("\n\n\n")
            text = "\n\n\n".join(block for block in blocks if "@task(" in block or "def test_" not in block)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(STUBS.get(name, text), "utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\npythonpath = .\n")


def hand_out(folder: Path):
    """Make a folder for students. UserError if it exists."""
    if folder.exists():
        raise UserError(f"{folder}: exists; name a new folder")
    copy_project(folder)
    sections = ["# Assignment\n\nThe paper: https://arxiv.org/abs/2302.02060. Each task calls only those above it.\n"]
    for task, file in TASKS.items():
        text, points = (folder / file).read_text("utf-8"), len(claims_of(task))
        function = "\n\n\n".join(blank(text, name) for name in functions_of(task))
        (folder / file).write_text(unsolved(text, task), "utf-8")
        sections.append(f"## {task}\n\n{points} points, `{file}`\n\n```python\n{function}\n```\n")
    (folder / "assignment.md").write_text("\n".join(sections), "utf-8")
    shutil.copy(HERE / "course/homework.md", folder / "README.md")
    print(f"{folder}: read its README.md")


def without(tasks: list[str]) -> str:
    """The file of the first of these tasks, or maelm.py for "all", without the solutions of all of them in it."""
    file = "maelm.py" if "all" in tasks else TASKS[tasks[0]]
    text = (HERE / file).read_text("utf-8")
    for task in TASKS if "all" in tasks else tasks:
        if TASKS[task] == file:
            text = unsolved(text, task)
    return text


# ---- 3. Grading ---------------------------------------------------------------------------------------------
def grade(task: str, path: Path, folder: Path, seconds: float) -> tuple[int, str, str]:
    """Grade a task in a student's file, in a `folder` with a copy of the project -> points, status, output."""
    file, claims = TASKS[task], claims_of(task)
    ours = (HERE / file).read_text("utf-8")
    try:
        text = path.read_text("utf-8-sig")
        missing = [name for name in functions_of(task) if not find(text, name)]
        if missing or all(source(text, name) == blank(ours, name) for name in functions_of(task)):
            return 0, "not attempted", ""
        text = alone(text, task, ours)
    except (OSError, SyntaxError, ValueError) as error:
        return 0, f"cannot be read: {error}", ""
    if "assert_close" in text or "pytest" in text:  # by which a file could change the tests
        return 0, "the file names assert_close or pytest: move that to another file", ""
    (folder / file).write_text(text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-rfp", "--color=no", "-p", "no:cacheprovider", *claims]
    try:
        printed = subprocess.run(command, cwd=folder, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True,
                                 encoding="utf-8", errors="replace").stdout
    except subprocess.TimeoutExpired:
        printed = ""
    (folder / file).write_text(ours, "utf-8")
    passed = re.findall(r"^PASSED \S+::(\w+)", printed, re.MULTILINE)
    failed = re.findall(r"^FAILED \S+::(\w+)", printed, re.MULTILINE)
    if len(passed) + len(failed) < len(claims):
        return 0, f"no report: it cannot be imported, takes over {seconds:g} s, or ends Python", printed
    return len(passed), f"failed: {failed[0]}" if failed else "full marks", printed


def grade_all(submission: Path, only: list[str], seconds: float, verbose: bool) -> bool:
    """Grade a folder, or a maelm.py, and print a line for each task. Returns whether it gets full marks."""
    score = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        for task in only or TASKS:
            file, most = TASKS[task], len(claims_of(task))
            if submission.is_dir() or file == "maelm.py":
                path = submission / file if submission.is_dir() else submission
                points, status, printed = grade(task, path, Path(folder), seconds)
                print(f"{task} {points}/{most} {status}")
                if verbose and points < most:
                    print(printed)
                score += points
                total += most
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
    with clear_errors("test_maelm.py"):
        if options.handout:
            hand_out(options.handout)
        elif options.blank:
            print(without(options.blank), end="")
        else:
            return int(not grade_all(options.grade, options.only, options.time_limit, options.verbose))
    return 0
