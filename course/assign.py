"""Prepares homework for students and grades their solutions; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --grade homework                          # a folder, a zip, a maelm.py, or a whole class

A task is a function that students write, and each of its tests is worth a point. Nothing is sandboxed: use a container.
"""
import re
import textwrap
from pathlib import Path

from course.grade import (FILES, HERE, PYTEST_INI, SHORTCUTS, TASKS, TESTS, find, functions_of, grade_all, gradescope,
                          lines_of, read_submission, source)
from support.program.cli import Parser, UserError, clear_errors

HEADER = '"""Functions that you write for a larger program."""\nimport math\n\nimport numpy as np\nimport torch'
CROSS_ATTENTION = "CrossMAELM = None  # a part of Table 2 that is not homework, but conftest.py imports it\n"


# ---- 1. The handout -----------------------------------------------------------------------------------------
def blank(text: str, name: str) -> str:
    """The signature and docstring of a function, followed by its rules from tasks.md if it is a task."""
    function = source(text, name)
    docstring = find(function, name.rpartition(".")[2]).body[0]
    head = "\n".join(function.split("\n")[:docstring.end_lineno]).removesuffix('"""')
    rules = (HERE / "course/tasks.md").read_text("utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0].strip()
    rules = textwrap.indent(f"\n\n{rules}", "    ") if rules else ""
    return head + rules + '"""\n    raise NotImplementedError'


def unsolved(text: str, task: str) -> str:
    """`text` without the solution to a task."""
    for name in functions_of(task):
        indent = " " * find(text, name).col_offset
        text = text.replace(lines_of(text, name), textwrap.indent(blank(text, name), indent))
    for name in SHORTCUTS.get(task, ()):
        text = text.replace(f"{source(text, name)}\n\n\n", "")
    return text


def without(file: str, tasks: list[str]) -> str:
    """One of our files, without the solutions to these tasks."""
    text = (HERE / file).read_text("utf-8")
    for task in tasks:
        text = unsolved(text, task) if TASKS[task] == file else text
    return text


def student_tests(file: str) -> str:
    """One of our test files, without the tests that reveal solutions and without the lecturer's command."""
    text = (HERE / file).read_text("utf-8")
    text = re.sub(r"if __name__ .*?\n\n", "", text, flags=re.DOTALL)
    text = re.sub(r"    python test_maelm.py -h.*\n", "", text)
    blocks = [block for block in text.rstrip("\n").split("\n\n\n") if "@task(" in block or "def test_" not in block]
    return "\n\n\n".join(blocks) + "\n"


def hand_out(folder: Path):
    """Make a folder for students. Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; name a new folder")
    texts = {"pytest.ini": PYTEST_INI, "support/model/cross_attention.py": CROSS_ATTENTION}
    for name, page in (("README.md", "course/homework.md"), ("conftest.py", "conftest.py"), ("LICENSE", "LICENSE")):
        texts[name] = (HERE / page).read_text("utf-8")
    for file in TESTS:
        texts[file] = student_tests(file)
    for file in FILES:
        texts[file] = without(file, list(TASKS))
        if file != "maelm.py":
            tasks = [source(texts[file], task) for task in TASKS if TASKS[task] == file]
            texts[file] = "\n\n\n".join([HEADER, *tasks, ""]).rstrip("\n") + "\n"
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")
    print(f"{folder}: read its README.md")


# ---- 2. The command -----------------------------------------------------------------------------------------
def submissions_in(path: Path) -> dict[str, dict[str, str]]:
    """The files of a submission by its name or, for a class, the files of each folder or zip. Raises UserError if there
    are no files."""
    is_one = path.is_file() or any((path / file).exists() for file in FILES)
    inner = [] if is_one or not path.exists() else sorted(path.iterdir())
    found = {entry.name: read_submission(entry) for entry in inner if entry.is_dir() or entry.suffix == ".zip"}
    found = {name: texts for name, texts in found.items() if texts} or {path.name: read_submission(path)}
    if not all(found.values()):
        raise UserError(f"{path}: has none of the files {', '.join(FILES)}")
    return found


def grade_students(options) -> bool:
    """Grade a submission and print a line per task, or grade a class and print a line per student. Returns whether all
    have full marks. All submissions are read before any of their code runs."""
    submissions = submissions_in(options.grade)
    if options.json and len(submissions) > 1:
        raise UserError("--json: name one submission, not a class")
    perfect = True
    for name, texts in submissions.items():
        results = grade_all(texts, options.only, options.time_limit)
        score, most = sum(result.points for result in results), sum(result.most for result in results)
        perfect = perfect and score == most
        if len(submissions) > 1:
            points = [f"{result.task} {result.points}" for result in results]
            print(f"{name}: {score}/{most}; {', '.join(points)}")
            continue
        for result in results:
            print(f"{result.task} {result.points}/{result.most} {result.status}")
            if options.verbose and result.details:
                print(textwrap.indent(result.details, "    "))
        print(f"total {score}/{most}")
        if options.json:
            options.json.write_text(gradescope(results), "utf-8")
    return perfect


def main(argv=None) -> int:
    """Run the command. Returns its exit code: 0, or 1 for less than full marks."""
    parser = Parser("test_maelm.py", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="TASK", choices=[*TASKS, "all"],
                      help="print a file without the bodies of these functions; all: maelm.py")
    what.add_argument("--handout", type=Path, metavar="DIR", help="make a folder for students")
    what.add_argument("--grade", type=Path, metavar="PATH", help="grade a folder, a zip, a maelm.py, or a class")
    parser.add_argument("--only", nargs="+", metavar="TASK", choices=TASKS, default=[], help="grade only these tasks")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", default=60, help="CPU time per task [60]")
    parser.add_argument("--verbose", action="store_true", help="show the message of each claim that failed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the grade for Gradescope")
    options = parser.parse_args(argv)
    if options.time_limit <= 0:
        parser.error(f"--time-limit {options.time_limit:g}: use a positive number")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    with clear_errors("test_maelm.py"):
        if options.handout:
            hand_out(options.handout)
        elif options.blank:
            tasks = list(TASKS) if "all" in options.blank else options.blank
            if "all" not in options.blank and len({TASKS[task] for task in tasks}) > 1:
                raise UserError("--blank: these tasks are in several files; name only tasks from one file")
            print(without("maelm.py" if "all" in options.blank else TASKS[tasks[0]], tasks), end="")
        else:
            return int(not grade_students(options))
    return 0
