"""Prepares homework for students and grades their solutions; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --gradescope autograder.zip               # an autograder to upload
    python test_maelm.py --grade homework                          # a folder, a zip, a maelm.py, or a whole class

A task is a function that students write, and each of its claims is worth a point. There is no sandbox: use a container.
"""
import csv
import io
import math
import re
import sys
import textwrap
import time
import zipfile
from pathlib import Path

from course.blanks import BLANKS, PROJECT, without
from course.grade import PYTEST_INI, TESTS, TOGETHER, Result, grade, grade_run, write_all
from course.hand_in import FILES, HOMEWORK, parts_in
from course.running import Limits, rights_of
from course.submissions import PROBLEM, read_all
from support.program.cli import Parser
from support.program.errors import UserError, clear_errors, printable
from support.program.files import ROOT, atomic, write_json, write_text

HEADER = '"""Functions that you write for a larger program."""\nimport math\n\nimport numpy as np\nimport torch'
CROSS_ATTENTION = "DECODERS = {}  # other decoders of Table 2, which are not homework, but conftest.py imports them\n"
ALARMS = ("read by hand", "ran out", "killed", "no report", "cannot be imported")  # a class's line has them


# ---- 1. The handout -----------------------------------------------------------------------------------------
def blank_file(tasks: list[str]) -> str:
    """The file of some tasks, without their solutions; for "all", maelm.py. Raises UserError for tasks of two files."""
    if "all" in tasks:
        return without("maelm.py", HOMEWORK)
    files = {HOMEWORK[task].file for task in tasks}
    if len(files) > 1:
        raise UserError("--blank: these tasks are in several files; name only tasks from one file")
    return without(files.pop(), tasks)


def hand_out(folder: Path):
    """Make a folder for students. Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; name a new folder")
    texts = {"pytest.ini": PYTEST_INI, "support/model/cross_attention.py": CROSS_ATTENTION}
    pages = {"README.md": "course/homework.md", "hand_in.py": "course/hand_in.py"}
    for name in ("README.md", "hand_in.py", "conftest.py", "LICENSE"):
        texts[name] = (ROOT / pages.get(name, name)).read_text("utf-8")
    for file in TESTS:  # without the claims that reveal solutions and the lecturer's command
        text = re.sub(r'\n    python test_maelm.py -h[^\n]*|if __name__ .*?\n\n', "", PROJECT[file], flags=re.DOTALL)
        blocks = [block for block in text.split("\n\n\n") if "@task(" in block or "def test_" not in block]
        texts[file] = "\n\n\n".join(blocks).rstrip() + "\n"
    for file in FILES:
        blanks = [BLANKS[part] for part in parts_in(file)]
        texts[file] = "\n\n\n".join([HEADER, *blanks]) + "\n"
    texts["maelm.py"] = without("maelm.py", HOMEWORK)
    write_all(folder, texts)
    print(f"{folder}: read its README.md")


def make_autograder(path: Path):
    """Make the zip that Gradescope needs: two scripts, and this project in the folder maelm."""
    names = {*PROJECT, "requirements.txt", "requirements-test.txt", "LICENSE"}
    names |= {file.relative_to(ROOT).as_posix() for file in ROOT.glob("course/*.[pm][yd]")}
    with atomic(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for script in ("setup.sh", "run_autograder"):
            archive.write(ROOT / "course/gradescope" / script, script)
        for name in sorted(names):
            archive.write(ROOT / name, f"maelm/{name}")
    print(f"{path}: upload it as the autograder")


# ---- 2. The grade -------------------------------------------------------------------------------------------
def total_of(results: list[Result]) -> str:
    """The points of all tasks, and the maximum."""
    return f"{sum(row.points for row in results)}/{sum(row.most for row in results)}"


def report(results: list[Result], problem: str, verbose: bool) -> str:
    """A submission's grade: a line for each task, with the messages of failed claims if it is verbose."""
    lines = []
    for row in results:
        lines.append(f"{row.task} {row.points}/{row.most} {row.status}")
        if verbose and row.details:
            lines.append(textwrap.indent(row.details, "    "))
    return "\n".join([*lines, "; ".join(filter(None, [f"total {total_of(results)}", problem]))])


def summary(name: str, results: list[Result], problem: str) -> str:
    """A student's grade in one line."""
    alarms = {row.status for row in results if row.status.startswith(ALARMS)}
    points = ", ".join(f"{row.task} {row.points}" for row in results)
    return printable("; ".join(filter(None, [f"{name}: {total_of(results)}", problem, *sorted(alarms), points])))


def for_gradescope(results: list[Result], problem: str) -> dict:
    """A submission's grade in Gradescope's format."""
    tests = [{"name": row.task, "score": row.points, "max_score": row.most, "output": f"{row.status}\n{row.details}"}
             for row in results]
    return {"output": problem, "tests": tests}


def write_table(path: Path, grades: dict[str, list[Result]]):
    """Write a CSV with a line for each student, and a column for the total and for each task."""
    rows = []
    for name, results in grades.items():
        points = {row.task: row.points for row in results}
        rows.append({"student": name, "total": sum(points.values())} | points)
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def grade_students(options) -> bool:
    """Grade a submission, a line per task, or a class, a line per student. Returns whether all have full marks."""
    rights = rights_of(options.user)
    submissions = read_all(options.grade, as_one=bool(options.json))
    only_runs = all("log.jsonl" in texts and texts.keys().isdisjoint(FILES) for texts in submissions.values())
    tasks = [] if only_runs else options.only or [*HOMEWORK, TOGETHER]
    if tasks and not rights:
        print("graded without --user: students' code can read and change this user's files", file=sys.stderr)
    perfect = True
    grades = {}
    for name, texts in submissions.items():
        limits = Limits(options.time_limit, time.monotonic() + options.total_limit, rights)
        results = grade(texts, tasks, limits) + (grade_run(texts) if "log.jsonl" in texts else [])
        problem = texts.get(PROBLEM, "")
        perfect = perfect and not problem and all(row.points == row.most for row in results)
        if len(submissions) > 1:
            print(summary(name, results, problem), flush=True)
        else:
            print(report(results, problem, options.verbose))
        if options.json:
            write_json(options.json, for_gradescope(results, problem))
        if options.out:
            grades[name] = results
            write_text(options.out / f"{name}.txt", report(results, problem, verbose=True) + "\n")
            write_table(options.out / "grades.csv", grades)
    return perfect


# ---- 3. The command -----------------------------------------------------------------------------------------
def main(argv=None) -> int:
    """Run the command. Returns its exit code: 0, or 1 for less than full marks."""
    parser = Parser("test_maelm.py", __doc__)
    command = parser.add_mutually_exclusive_group(required=True)
    command.add_argument("--blank", nargs="+", metavar="TASK", choices=[*HOMEWORK, "all"],
                         help="print a file without the bodies of these functions; all: maelm.py")
    command.add_argument("--handout", type=Path, metavar="DIR", help="make a folder for students")
    command.add_argument("--gradescope", type=Path, metavar="ZIP", help="make an autograder for Gradescope")
    command.add_argument("--grade", type=Path, metavar="PATH", help="grade a folder, a zip, a maelm.py, or a class")
    add = parser.add_argument
    add("--only", nargs="+", metavar="TASK", choices=[*HOMEWORK, TOGETHER], default=[], help="grade only these")
    add("--verbose", action="store_true", help="show the message of each claim that failed")
    add("--json", type=Path, metavar="FILE", help="also write a submission's grade for Gradescope")
    add("--out", type=Path, metavar="DIR", help="also write grades.csv, and a text per student")
    add("--user", default="", metavar="NAME", help="run students' code as this user, all of whose processes are ended")
    add("--time-limit", type=float, metavar="SECONDS", default=60, help="CPU time per task [60]")
    add("--total-limit", type=float, metavar="SECONDS", default=math.inf,
        help="time per student, after which tasks get no points")
    options = parser.parse_args(argv)
    if options.grade and not options.grade.exists():
        parser.error(f"--grade {options.grade}: there is no such file or folder")
    with clear_errors("test_maelm.py"):
        if options.handout:
            hand_out(options.handout)
        elif options.gradescope:
            make_autograder(options.gradescope)
        elif options.grade:
            return int(not grade_students(options))
        else:
            print(blank_file(options.blank), end="")
    return 0
