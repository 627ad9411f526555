"""Prepares homework for students and grades their solutions; see teaching.md.

    python -m course.assign --blank corrupt attention     # print maelm.py without the bodies of these functions
    python -m course.assign --handout homework            # make a folder for students
    python -m course.assign --gradescope autograder.zip   # make an autograder to upload
    python -m course.assign --grade homework              # a folder, a zip, a maelm.py, or a class: a folder of these
"""
import sys
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path

import pandas

from course.grade import INI, TESTS, TOGETHER, grade, write_all
from course.homework import HANDED_OUT, HOMEWORK, PROJECT, TASKS, alike, read, submissions, without
from support.program import ROOT, Parser, UserError, clear_errors, write_json, write_text

ALARMS = ("ran out", "killed", "no report", "cannot be imported")  # a class's line has them


def hand_out(folder: Path):
    """Make a folder for students. Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; name a new folder")
    texts = HANDED_OUT | {name: PROJECT[name] for name in ("conftest.py", "LICENSE", *TESTS)}
    write_all(folder, texts | {"README.md": PROJECT["course/homework.md"], "pytest.ini": INI})
    print(f"{folder}: read its README.md")


def make_autograder(path: Path, tasks: list[str]):
    """Make the zip that Gradescope needs: two scripts, the names of the tasks, and this project in the folder maelm."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tasks", " ".join(tasks))
        for script in ("setup.sh", "run_autograder"):
            archive.write(ROOT / "course/gradescope" / script, script)
        for name in PROJECT:
            archive.write(ROOT / name, f"maelm/{name}")
    print(f"{path}: upload it as the autograder")


def grade_students(flags: Namespace):
    """Grade a submission, a line per task, or a class, a line per student."""
    path = flags.grade.resolve(strict=True)  # so that . has a name
    if not flags.user:
        print("graded without --user: students' code can read and change this user's files", file=sys.stderr)
    paths = [path] if flags.json else submissions(path)
    rows = []
    handed_in = {}
    for path in paths:
        texts = {}
        problem = ""
        try:
            texts = read(path)
        except (UserError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            problem = f"cannot be read: {error}"
        handed_in[path.name] = texts
        results = grade(texts, flags.only, flags.time_limit, flags.total_limit, flags.user)
        scores = [row.score for row in results]
        total = f"{sum(scores)}/{sum(row.max_score for row in results)}"
        lines = [f"{row.name} {row.score}/{row.max_score} {row.output}" for row in results]
        report = "\n".join([*lines, f"total {total} {problem}".strip()])
        if len(paths) > 1:
            alarms = {row.output.partition("\n")[0] for row in results if row.output.startswith(ALARMS)}
            points = ", ".join(f"{row.name} {row.score}" for row in results)
            print("; ".join(filter(None, [f"{path.name}: {total}", problem, *sorted(alarms), points])))
        else:
            print(report)
        if flags.json:
            write_json(flags.json, {"output": problem, "tests": [row._asdict() for row in results]})
        if flags.out:
            write_text(flags.out / f"{path.name}.txt", report + "\n")
            rows.append({"student": path.name, "total": sum(scores)} | dict(zip(flags.only, scores)))
            write_text(flags.out / "grades.csv", pandas.DataFrame(rows).to_csv(index=False))
    if len(paths) > 1:
        for pair in alike(handed_in):
            print(f"nearly equal, for you to read: {pair}")


def main(argv=None):
    with clear_errors("course.assign"):
        parser = Parser("course.assign", __doc__)
        command = parser.add_mutually_exclusive_group(required=True).add_argument
        command("--blank", nargs="+", metavar="TASK", choices=[*HOMEWORK, "all"], help="print a file without these")
        command("--handout", type=Path, metavar="DIR", help="make a folder for students")
        command("--gradescope", type=Path, metavar="ZIP", help="make an autograder for Gradescope")
        command("--grade", type=Path, metavar="PATH", help="grade a folder, a zip, a maelm.py, or a class")
        add = parser.add_argument
        tasks = [*HOMEWORK, TOGETHER]
        add("--only", nargs="+", metavar="TASK", choices=tasks, default=tasks, help="only these tasks")
        add("--json", type=Path, metavar="FILE", help="also write a submission's grade for Gradescope")
        add("--out", type=Path, metavar="DIR", help="also write grades.csv, and a text per student")
        add("--user", default="", metavar="NAME", help="run students' code as this user")
        add("--time-limit", type=float, metavar="SECONDS", default=120, help="time per task [120]")
        add("--total-limit", type=float, metavar="SECONDS", default=600, help="time for a student's tasks [600]")
        flags = parser.parse_args(argv)
        if flags.handout:
            hand_out(flags.handout)
        elif flags.gradescope:
            make_autograder(flags.gradescope, flags.only)
        elif flags.blank:
            print(without(TASKS["maelm.py"] if "all" in flags.blank else flags.blank), end="")
        else:
            grade_students(flags)


if __name__ == "__main__":
    main()
