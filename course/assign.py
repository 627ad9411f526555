"""Prepares homework for students and grades their solutions; see teaching.md.

    python -m course.assign --blank corrupt attention     # print maelm.py without the bodies of these functions
    python -m course.assign --handout homework            # make a folder for students
    python -m course.assign --gradescope autograder.zip   # make an autograder to upload
    python -m course.assign --grade anna                  # grade a student's folder, or a folder of these
"""
import zipfile
from argparse import Namespace
from pathlib import Path

import pandas

from course.grade import INI, TESTS, TOGETHER, grade, write_all
from course.homework import FILES, HANDED_OUT, HOMEWORK, PROJECT, TASKS, read, without
from support.program import ROOT, Parser, UserError, clear_errors, write_json


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


def grade_all(path: Path, flags: Namespace):
    """Grade a student's folder or zip, with a line per task and one for the total; or, if several folders or zips in a
    folder have homework's files, a class, whose points also go into grades.csv there."""
    inside = [each for each in sorted(path.glob("*")) if each.is_dir() or each.suffix.lower() == ".zip"]
    students = {each.stem if each.is_file() else each.name: read(each) for each in inside}
    is_class = sum(map(bool, students.values())) > 1 and not any((path / name).is_file() for name in FILES)
    if flags.json or not is_class:
        students = {path: read(path)}
    if not any(students.values()):
        raise UserError(f"{path}: has no file named {', '.join(FILES)}")
    rows = []
    for name, texts in students.items():
        results = grade(texts, flags.only, flags.time_limit)
        print(*[f"{row.name} {row.score}/{row.max_score} {row.output}" for row in results], sep="\n")
        points = {row.name: row.score for row in results}
        rows.append({"student": name, "total": sum(points.values())} | points)
        print(f"{name}: total {rows[-1]['total']}/{sum(row.max_score for row in results)}")
        if len(students) > 1:
            pandas.DataFrame(rows).to_csv(path / "grades.csv", index=False)
    if flags.json:
        write_json(flags.json, {"tests": [row._asdict() for row in results]})


def main(argv=None):
    with clear_errors("course.assign"):
        parser = Parser("course.assign", __doc__)
        command = parser.add_mutually_exclusive_group(required=True).add_argument
        command("--blank", nargs="+", metavar="TASK", choices=[*HOMEWORK, "all"], help="print a file without these")
        command("--handout", type=Path, metavar="DIR", help="make a folder for students")
        command("--gradescope", type=Path, metavar="ZIP", help="make an autograder for Gradescope")
        command("--grade", type=Path, metavar="PATH", help="grade a folder or zip, or each of those in a folder")
        add = parser.add_argument
        tasks = [*HOMEWORK, TOGETHER]
        add("--only", nargs="+", metavar="TASK", choices=tasks, default=tasks, help="only these tasks")
        add("--json", type=Path, metavar="FILE", help="also write a submission's grade for Gradescope")
        add("--time-limit", type=float, metavar="SECONDS", default=120, help="time per task [120]")
        flags = parser.parse_args(argv)
        if flags.handout:
            hand_out(flags.handout)
        elif flags.gradescope:
            make_autograder(flags.gradescope, flags.only)
        elif flags.blank:
            print(without(TASKS["maelm.py"] if "all" in flags.blank else flags.blank), end="")
        else:
            grade_all(flags.grade, flags)


if __name__ == "__main__":
    main()
