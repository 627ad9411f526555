"""Grading: runs claims about the functions of a submission, and adds up points; see teaching.md. A claim is a test of
one task, and is worth a point.

The tasks run one after another, each in a fresh copy of this project: the student's file, with our solutions to earlier
tasks only (all others in `together`), so that no process has seen our solution to a later one. It is no sandbox.
"""
import itertools
import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from course.blanks import PROJECT, SOLUTIONS, without
from course.hand_in import FILES, HOMEWORK, written_in
from course.running import Limits, delete_files, is_plain, run_limited
from support.program.files import ROOT

TESTS = ("test_maelm.py", "tests/test_homework.py")  # the claims that students also get
TOGETHER = "together"  # claims about all of a student's functions at once
RANDOM_CLAIM = "test_random_inputs"  # a claim of every task that only the grader checks; see tests/random_inputs.py
EFFECTS = "effects.pt"  # the file to which it writes the results, gradients and changed arguments of random calls
# Claims that cannot hold. If one does not fail, the student's code has changed pytest, torch or the report.
MUST_FAIL = ("assert False", "assert torch.equal(torch.zeros(2), torch.ones(2))", "assert torch.zeros(()) == 1",
            "close(torch.zeros(2), torch.ones(2))")
TOY_RANGES = {  # a number in a file of a toy's run folder (see homework.md), and the range that gets a point
    "validation loss": ("log.jsonl", r'"val_loss": (\d+\.?\d*)', 2.93, 3.13),
    "linear probe": ("result.json", r'(?s)"frozen": "mean".*?"median": (\d+\.?\d*)', 48, 65),
}
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib --tb=short
pythonpath = .
filterwarnings = ignore:Unknown pytest
"""


# ---- 1. Running a task --------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """A task, and how its claims have ended."""
    task: str
    problem: str = ""  # why no claim counts
    messages: dict[str, str] = {}  # of each claim, "" if it holds


def claims_of(task: str) -> dict[str, bool]:
    """The claims of a task, and whether each is a gate: a task that fails a gate gets no points."""
    # Such as: @task("corrupt", gate=True) above def test_every_sequence_has_exactly_m_masks():
    text = "\n".join(PROJECT[file] for file in TESTS)
    found = re.findall(rf'^@task\("{task}"(, gate=True)?\)\ndef (\w+)', text, re.MULTILINE)
    return {name: bool(gate) for gate, name in found} | {RANDOM_CLAIM: True}


def tasks_by_student(task: str, texts: dict[str, str]) -> list[str]:
    """The tasks whose functions are the student's own when a task is graded; none if the task cannot be graded."""
    written = [name for name, row in HOMEWORK.items() if written_in(texts.get(row.file, "")) & {*row.parts}]
    if task != TOGETHER:
        return [task] if task in written else []
    required = {name for name, row in HOMEWORK.items() if row.file == "maelm.py"}
    return written if required.issubset(written) else []


def copy_for(task: str, texts: dict[str, str], by_student: list[str]) -> dict[str, str]:
    """The files of the copy in which a task runs: ours with blanks or, for the tasks `by_student`, the student's. Our
    solutions to earlier tasks follow at the end of each file, where they replace the student's."""
    files = PROJECT | {file: without(file, HOMEWORK) for file in FILES}
    for name in by_student:
        files[HOMEWORK[name].file] = texts[HOMEWORK[name].file]
    for name in itertools.takewhile(lambda name: name != task, HOMEWORK):  # all of them in `together`
        if name not in by_student:
            for part in HOMEWORK[name].parts:
                files[HOMEWORK[name].file] += at_the_end(part)
    return files


def at_the_end(part: str) -> str:
    """Our solution as text for the end of a file. A method is put into its class, if there is one."""
    text = f"\n\n\n{textwrap.dedent(SOLUTIONS[part])}\n"
    owner, _, method = part.rpartition(".")
    if owner:  # if 'Attention' in globals(): Attention.forward = forward
        text += f"\n\nif {owner!r} in globals():\n    {part} = {method}\n"
    return text


def write_all(folder: Path, texts: dict[str, str], owner: int | None = None):
    """Write files, by their names, to a folder, which then belongs to the owner, if one is named."""
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")
    if owner:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, owner)


def name_claims(files: dict[str, str], task: str, aliases: dict[str, str]):
    """In a copy of the project, rename the claims that students also have, and add MUST_FAIL and RANDOM_CLAIM."""
    for file in TESTS:
        for claim in claims_of(task):
            files[file] = files[file].replace(f"def {claim}(", f"def {aliases[claim]}(")
    for wrong in MUST_FAIL:
        files[TESTS[0]] += f"\n\ndef {aliases[wrong]}():\n    {wrong}\n"
    files[TESTS[1]] += (f"\n\ndef {aliases[RANDOM_CLAIM]}():\n    from tests import random_inputs\n"
                       f"    torch.save([*random_inputs.effects({task!r})], {EFFECTS!r})\n")


def run_task(task: str, texts: dict[str, str], limits: Limits, effects_path: Path) -> Outcome:
    """Run the claims of a task in a copy of the project. Its file of effects is copied to a path."""
    by_student = tasks_by_student(task, texts)
    if not by_student:
        return Outcome(task, "not attempted")
    files = copy_for(task, texts, by_student) | {"pytest.ini": PYTEST_INI}
    aliases = {claim: f"test_{secrets.token_hex(8)}" for claim in (*claims_of(task), *MUST_FAIL)}
    name_claims(files, task, aliases)  # with names that students cannot know, so that only pytest can report them
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        write_all(folder, files, limits.rights.get("user"))
        # conftest.py is not loaded as a plugin, so that the report includes files that cannot be imported.
        command = [sys.executable, "-m", "pytest", "--noconftest", "-s", "-p", "no:cacheprovider", *TESTS,
                   "--junitxml=report.xml", "-k", " or ".join(aliases.values())]
        code, problem = run_limited(command, folder, limits)
        cases = read_report(folder / "report.xml")
        if is_plain(folder / EFFECTS):
            shutil.copyfile(folder / EFFECTS, effects_path)
    if limits.rights:  # so that the code cannot leave our solutions to the next student
        delete_files(limits.rights["user"])
    return Outcome(task, problem) if problem else outcome_of(task, code, cases, aliases, texts)


def outcome_of(task: str, code: int, cases: dict | None, aliases: dict[str, str], texts: dict[str, str]) -> Outcome:
    """The outcome of a task from pytest's exit code and its test cases."""
    if cases is None:
        return Outcome(task, "no report: the code ends Python")
    if cases.keys().isdisjoint(aliases.values()):  # pytest could not even collect the tests
        first = next(iter(cases.values()), None)
        return Outcome(task, f"cannot be imported: {message_of(first, {})}")
    not_failed = [wrong for wrong in MUST_FAIL if len(cases.get(aliases[wrong], ())) == 0]  # or missing
    if code == 0 or not_failed:
        return Outcome(task, "read by hand: claims that cannot hold did not fail")
    return Outcome(task, messages={claim: message_of(cases.get(aliases[claim]), texts) for claim in claims_of(task)})


def read_report(path: Path) -> dict[str, ElementTree.Element] | None:
    """pytest's test cases by their names, or None if there is no report."""
    try:
        root = ElementTree.fromstring(path.read_bytes()) if is_plain(path) else None
    except (OSError, ElementTree.ParseError):
        return None
    return None if root is None else {case.get("name"): case for case in root.iter("testcase")}


def message_of(case: ElementTree.Element | None, texts: dict[str, str]) -> str:
    """The message of a test case and the student's own lines from pytest's short traceback; "" if the test passed."""
    if case is None:
        return "has no result"
    if len(case) == 0:  # it has passed
        return ""
    traceback = "".join(case.itertext())
    said = re.findall(r"^E +(.*)", traceback, re.MULTILINE) or traceback.splitlines()[-1:]
    named = [line for line in said if re.match(r"\w+Error\b", line)]
    lines = [line.removeprefix("AssertionError: ") for line in (named or said)[:1]]
    for file, number, function, code in re.findall(r"^(\S+):(\d+): in (.+)\n +(.*)", traceback, re.MULTILINE):
        if int(number) <= len(texts.get(file, "").splitlines()):  # our solutions follow at the end
            lines.append(f"    {file}:{number} in {function}: {code}")
    return "\n".join(lines)


# ---- 2. Points ----------------------------------------------------------------------------------------------
class Result(NamedTuple):
    """The result of a task: its points, the maximum, a status line, and a paragraph for each failed claim."""
    task: str
    points: int
    most: int
    status: str
    details: str = ""


def grade(texts: dict[str, str], tasks: list[str], limits: Limits) -> list[Result]:
    """Grade these tasks of a submission."""
    with tempfile.TemporaryDirectory() as temporary:
        paths = {task: Path(temporary, f"{number}.pt") for number, task in enumerate(tasks)}
        outcomes = [run_task(task, texts, limits, paths[task]) for task in tasks]
        differences = first_differences({task: path for task, path in paths.items() if path.exists()})
    return [points_of(outcome, differences.get(outcome.task, "the effects are missing")) for outcome in outcomes]


def first_differences(paths: dict[str, Path]) -> dict[str, str]:
    """The first difference of a student's effects from ours for each task, "" for none; see tests/random_inputs.py."""
    if not paths:
        return {}
    command = [sys.executable, "-m", "tests.random_inputs", *[f"{task}={path}" for task, path in paths.items()]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    failed = dict.fromkeys(paths, "the effects cannot be compared")
    return json.loads(done.stdout) if done.returncode == 0 else failed


def points_of(outcome: Outcome, difference: str) -> Result:
    """The points for a task, given the difference between its random effects and ours."""
    claims = claims_of(outcome.task)
    if outcome.problem:
        return Result(outcome.task, 0, len(claims), outcome.problem)
    messages = outcome.messages | {RANDOM_CLAIM: outcome.messages[RANDOM_CLAIM] or difference}
    failed = [claim for claim in claims if messages[claim]]
    gates = [claim for claim in failed if claims[claim]]
    status = f"failed: {', '.join(failed)}" if failed else "full marks"
    status = f"no points without {gates[0]}; {status}" if gates else status
    details = "\n".join(f"{claim}: {messages[claim]}" for claim in failed)
    return Result(outcome.task, 0 if gates else len(claims) - len(failed), len(claims), status, details)


def grade_run(texts: dict[str, str]) -> list[Result]:
    """Grade the run folder of a toy: the last validation loss, and the linear probe of the mean vector."""
    results = []
    for task, (file, pattern, least, most) in TOY_RANGES.items():
        found = re.findall(pattern, texts.get(file, ""))
        if not found:
            results.append(Result(task, 0, 1, f"not found in {file}"))
            continue
        value = float(found[-1])
        results.append(Result(task, int(least <= value <= most), 1, f"{value:.4g}, expected {least:g} to {most:g}"))
    return results
