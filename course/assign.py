"""Prepares homework for students and grades their solutions; see teaching.md.

    python test_maelm.py --blank corrupt attention > student.py    # maelm.py without the bodies of these functions
    python test_maelm.py --handout homework                        # a folder for students
    python test_maelm.py --grade homework                          # a folder, a zip, a maelm.py, or a whole class

A task is a function that students write, and each of its claims is worth a point. There is no sandbox: use a container.
"""
import json
import os
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from course.grade import (BLANKS, FILES, HERE, PROJECT, PYTEST_INI, SOLUTIONS, TASKS, TESTS, TOGETHER, effects_of_ours,
                          grade, grade_run, parts_in, read_all, write_all)
from support.program.cli import Parser
from support.program.errors import UserError, clear_errors, printable

HEADER = '"""Functions that you write for a larger program."""\nimport math\n\nimport numpy as np\nimport torch'
CROSS_ATTENTION = "CrossMAELM = None  # a part of Table 2 that is not homework, but conftest.py imports it\n"


# ---- 1. The handout -----------------------------------------------------------------------------------------
def without(file: str, tasks: list[str]) -> str:
    """One of our files, without the solutions to these tasks."""
    text = PROJECT[file]
    for name in parts_in(file, tasks):
        text = text.replace(SOLUTIONS[name], BLANKS[name])
    return text


def hand_out(folder: Path):
    """Make a folder for students. Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; name a new folder")
    texts = {"pytest.ini": PYTEST_INI, "support/model/cross_attention.py": CROSS_ATTENTION}
    for name, page in (("README.md", "course/homework.md"), ("conftest.py", "conftest.py"), ("LICENSE", "LICENSE")):
        texts[name] = (HERE / page).read_text("utf-8")
    for file in TESTS:  # without the claims that reveal solutions and the lecturer's command
        text = re.sub(r'\n    python test_maelm.py -h[^\n]*|if __name__ .*?\n\n', "", PROJECT[file], flags=re.DOTALL)
        blocks = [block for block in text.split("\n\n\n") if "@task(" in block or "def test_" not in block]
        texts[file] = "\n\n\n".join(blocks).rstrip() + "\n"
    for file in FILES:
        texts[file] = without(file, list(TASKS))
        if file != "maelm.py":
            blanks = [BLANKS[name] for name in parts_in(file)]
            texts[file] = "\n\n\n".join([HEADER, *blanks]) + "\n"
    write_all(folder, texts)
    print(f"{folder}: read its README.md")


# ---- 2. The grade -------------------------------------------------------------------------------------------
def grade_students(options) -> bool:
    """Grade a submission, a line per task, or a class, a line per student. Returns whether all have full marks."""
    submissions, perfect = read_all(options.grade, bool(options.json)), True
    only_runs = all("log.jsonl" in texts and texts.keys().isdisjoint(FILES) for texts in submissions.values())
    tasks = [] if only_runs else options.only or [*TASKS, TOGETHER]
    ours = effects_of_ours(*tasks) if tasks else {}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(cpus)
    grades = {name: [pool.submit(grade, task, texts, options.time_limit, ours) for task in tasks]
              for name, texts in submissions.items()}
    for name, texts in submissions.items():
        results = [grade.result() for grade in grades[name]]
        results += grade_run(texts) if "log.jsonl" in texts else []
        score, most = sum(row.points for row in results), sum(row.most for row in results)
        problem = texts.get("problem", "")
        perfect = perfect and score == most and not problem
        if len(submissions) > 1:
            told = "read by hand", "ran out", "no report", "cannot be imported"
            alarms = {row.status for row in results if row.status.startswith(told)}
            points = ", ".join(f"{row.task} {row.points}" for row in results)
            line = "; ".join(filter(None, [f"{name}: {score}/{most}", problem, *sorted(alarms), points]))
            print(printable(line), flush=True)
            continue
        for row in results:
            print(f"{row.task} {row.points}/{row.most} {row.status}")
            if options.verbose and row.details:
                print(textwrap.indent(row.details, "    "))
        print("; ".join(filter(None, [f"total {score}/{most}", problem])))
        if options.json:  # in Gradescope's format
            rows = [{"name": task, "score": points, "max_score": most, "output": f"{status}\n{details}"}
                    for task, points, most, status, details in results]
            options.json.write_text(json.dumps({"output": problem, "tests": rows}, indent=1), "utf-8")
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a submission's grade for Gradescope")
    options = parser.parse_args(argv)
    if options.time_limit <= 0:
        parser.error(f"--time-limit {options.time_limit:g}: use a positive number")
    if options.grade and not options.grade.exists():
        parser.error(f"--grade {options.grade}: there is no such file or folder")
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
