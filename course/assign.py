"""Prepares homework for students and grades their solutions; see teaching.md.

    python test_maelm.py --blank corrupt attention     # print maelm.py without the bodies of these functions
    python test_maelm.py --handout homework            # make a folder for students
    python test_maelm.py --gradescope autograder.zip   # make an autograder to upload
    python test_maelm.py --grade homework              # a folder, a zip, a maelm.py, or a class: a folder of these
"""
import csv
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from course.grade import INI, TESTS, TOGETHER, Result, grade, write_all
from course.homework import HANDED_OUT, HOMEWORK, PROJECT, TASKS, read, submissions, without
from support.program.cli import Parser
from support.program.errors import UserError, clear_errors, printable
from support.program.files import ROOT, write_json, write_text

ALARMS = ("read by hand", "ran out", "killed", "no report", "cannot be imported")  # a class's line has them


def hand_out(folder: Path):
    """Make a folder for students. Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; name a new folder")
    texts = HANDED_OUT | {name: PROJECT[name] for name in ("conftest.py", "LICENSE")}
    texts |= {"README.md": PROJECT["course/homework.md"], "pytest.ini": INI}
    texts["support/model/cross_attention.py"] = "DECODERS = {}  # not homework, but conftest.py imports it\n"
    lecturers = re.compile(r'\n    python test_maelm.py -h[^\n]*|if __name__ .*?\n\n', re.DOTALL)
    texts |= {file: lecturers.sub("", PROJECT[file]) for file in TESTS}
    write_all(folder, texts)
    print(f"{folder}: read its README.md")


def make_autograder(path: Path):
    """Make the zip that Gradescope needs: two scripts, and this project in the folder maelm."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for script in ("setup.sh", "run_autograder"):
            archive.write(ROOT / "course/gradescope" / script, script)
        for name in PROJECT:
            archive.write(ROOT / name, f"maelm/{name}")
    print(f"{path}: upload it as the autograder")


def total(name: str, results: list[Result], *notes: str) -> str:
    """The points of all tasks and the maximum in one line, followed by notes."""
    points = f"{name} {sum(row.score for row in results)}/{sum(row.max_score for row in results)}"
    return printable("; ".join(filter(None, [points, *notes])))


def report(results: list[Result], problem: str, verbose: bool) -> str:
    """A submission's grade: a line for each task, with the messages of failed claims if it is verbose."""
    lines = [f"{row.name} {row.score}/{row.max_score} {row.output}" for row in results]
    if not verbose:
        lines = [line.partition("\n")[0] for line in lines]
    return "\n".join([*lines, total("total", results, problem)])


def grade_students(flags) -> bool:
    """Grade a submission, a line per task, or a class, a line per student. Returns whether all have full marks. Raises
    UserError if the code cannot run as flags.user."""
    import pwd  # not at the top, because Windows lacks it
    path = flags.grade.resolve(strict=True)  # so that . has a name
    try:
        user = pwd.getpwnam(flags.user) if flags.user else None
        rights = dict(user=user.pw_uid, group=user.pw_gid, extra_groups=[]) if user else {}
        subprocess.run([sys.executable, "-c", ""], cwd="/", check=True, **rights)
    except (KeyError, OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"--user {flags.user}: {error}; as root, make a user who can run Python") from error
    if not rights:
        print("graded without --user: students' code can read and change this user's files", file=sys.stderr)
    paths = [path] if flags.json else submissions(path)
    table = [["student", "total", *flags.only]]
    for path in paths:
        texts, problem = {}, ""
        try:
            texts = read(path)
        except (UserError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            problem = f"cannot be read: {error}"
        results = grade(texts, flags.only, flags.time_limit, flags.total_limit, rights)
        scores = [row.score for row in results]
        table.append([printable(path.name), sum(scores), *scores])
        if len(paths) > 1:
            alarms = [row.output.partition("\n")[0] for row in results if row.output.startswith(ALARMS)]
            points = ", ".join(f"{row.name} {row.score}" for row in results)
            print(total(f"{path.name}:", results, problem, *dict.fromkeys(alarms), points), flush=True)
        else:
            print(report(results, problem, flags.verbose))
        if flags.json:
            write_json(flags.json, {"output": problem, "tests": [row._asdict() for row in results]})
        if flags.out:
            write_text(flags.out / f"{path.name}.txt", report(results, problem, verbose=True) + "\n")
            with open(flags.out / "grades.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(table)
    return all(row[1] == sum(result.max_score for result in results) for row in table[1:])


def main(argv=None) -> int:
    """Run the command. Returns its exit code: 0, or 1 for less than full marks."""
    parser = Parser("test_maelm.py", __doc__)
    command = parser.add_mutually_exclusive_group(required=True).add_argument
    command("--blank", nargs="+", metavar="TASK", choices=[*HOMEWORK, "all"], help="print a file without these")
    command("--handout", type=Path, metavar="DIR", help="make a folder for students")
    command("--gradescope", type=Path, metavar="ZIP", help="make an autograder for Gradescope")
    command("--grade", type=Path, metavar="PATH", help="grade a folder, a zip, a maelm.py, or a class")
    add = parser.add_argument
    tasks = [*HOMEWORK, TOGETHER]
    add("--only", nargs="+", metavar="TASK", choices=tasks, default=tasks, help="grade only these")
    add("--verbose", action="store_true", help="show the message of each claim that failed")
    add("--json", type=Path, metavar="FILE", help="also write a submission's grade for Gradescope")
    add("--out", type=Path, metavar="DIR", help="also write grades.csv, and a text per student")
    add("--user", default="", metavar="NAME", help="run students' code as this user")
    add("--time-limit", type=int, metavar="SECONDS", default=60, help="CPU time per task [60]")
    add("--total-limit", type=float, metavar="SECONDS", default=float("inf"), help="time for a student's tasks")
    flags = parser.parse_args(argv)
    with clear_errors("test_maelm.py"):
        if flags.handout:
            hand_out(flags.handout)
        elif flags.gradescope:
            make_autograder(flags.gradescope)
        elif flags.blank:
            print(without(TASKS["maelm.py"] if "all" in flags.blank else flags.blank), end="")
        elif not grade_students(flags):
            return 1
    return 0
