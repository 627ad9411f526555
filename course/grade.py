"""Grading: reads submissions, runs the claims about their functions, and adds up points; see teaching.md.

Each task runs in a fresh copy of this project, with the student's file and our solutions to the other tasks. The copy
is not a sandbox.
"""
import ast
import functools
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve().parent.parent
TESTS = ("test_maelm.py", "tests/test_homework.py")  # the claims that students also get
COPIED = ("*.py", "support/**/*.py", "tests/__init__.py", "tests/random_inputs.py", "tests/test_homework.py")
PATHS = [path for pattern in COPIED for path in HERE.glob(pattern)]
PROJECT = {path.relative_to(HERE).as_posix(): path.read_text("utf-8") for path in PATHS}
TABLE = re.findall(r"^\| (`.*?`) \| `(\S+)` \|", (HERE / "course/homework.md").read_text("utf-8"), re.MULTILINE)
TASKS = {names.split("`")[1]: file for names, file in TABLE}  # the file of each task, in an order that works
PARTS = {names.split("`")[1]: re.findall(r"`(\S+)`", names) for names, _ in TABLE}  # the functions of each task
FILES = tuple(dict.fromkeys(TASKS.values()))
TOGETHER = "together"  # claims about all of a student's functions at once
RANDOM = "test_random_inputs"  # a claim that only the grader checks; see tests/random_inputs.py
CANARIES = ("assert False", "assert torch.equal(torch.zeros(2), torch.ones(2))", "assert torch.zeros(()) == 1",
            "torch.testing.assert_close(torch.zeros(2), torch.ones(2))")  # claims that cannot hold
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
RUN = {  # a number in a file of a toy's run folder, and the range that counts
    "validation loss": ("log.jsonl", r'"val_loss": ([\d.]+)', 2.93, 3.13),
    "linear probe": ("result.json", r'(?s)"frozen": "mean".*?"median": ([\d.]+)', 48, 65),
}
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib --tb=short
pythonpath = .
filterwarnings = ignore:Unknown pytest
"""


# ---- 1. Reading code ----------------------------------------------------------------------------------------
def parts_in(file: str, tasks: Iterable[str] = TASKS) -> list[str]:
    """The functions of these tasks that a file has."""
    return [part for task in tasks if TASKS[task] == file for part in PARTS[task]]


def source(text: str, name: str) -> str:
    """The lines of a function or Class.method in one of our texts, including a comment at the end of its last line."""
    node = ast.parse(text)
    for part in name.split("."):
        node, = [inner for inner in node.body if getattr(inner, "name", None) == part]
    return "\n".join(text.split("\n")[node.lineno - 1:node.end_lineno])


SOLUTIONS = {name: source(PROJECT[TASKS[task]], name) for task in TASKS for name in PARTS[task]}


def blank(name: str) -> str:
    """The signature and docstring of a function, followed by its rules from tasks.md if it is a task."""
    function, indent = SOLUTIONS[name], "    " * name.count(".")
    head = function[:function.index('"""', function.index('"""') + 3)]
    rules = (HERE / "course/tasks.md").read_text("utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0].strip()
    rules = textwrap.indent(f"\n\n{rules}", f"{indent}    ") if rules else ""
    return f'{head}{rules}"""\n{indent}    raise NotImplementedError'


BLANKS = {name: blank(name) for name in SOLUTIONS}


def is_written(text: str, name: str) -> bool:
    """Whether a student's text defines the function or Class.method `name` in any form other than our blank."""
    owner, _, last = name.rpartition(".")
    assigned = rf"^{re.escape(name)} = " + (rf"|^    {last} = " if owner else "")
    if re.search(assigned, text, re.MULTILINE):
        return True
    beginning = f"class {owner}" if owner else ""
    return beginning in text and f"def {last}(" in text and BLANKS[name] not in text


def claims_of(task: str) -> dict[str, bool]:
    """The claims of a task, and whether each is a gate: a task that fails a gate gets no points."""
    text = "\n".join(PROJECT[file] for file in TESTS)
    found = re.findall(rf'^@task\("{task}"(, gate=True)?\)\ndef (\w+)', text, re.MULTILINE)
    return {name: bool(gate) for gate, name in found} | {RANDOM: True}


def completed(text: str, file: str, own: list[str]) -> str:
    """A student's file, followed by our solutions to all tasks except the student's own."""
    for name in parts_in(file, [task for task in TASKS if task not in own]):
        owner, _, method = name.rpartition(".")
        text += f"\n\n\n{textwrap.dedent(SOLUTIONS[name])}\n"
        text += f"\n\nif {owner!r} in globals():\n    {name} = {method}\n" if owner else ""
    return text


# ---- 2. Submissions -----------------------------------------------------------------------------------------
def unpack(path: Path, folder: Path):
    """Unpack a zip or tar."""
    is_zip = path.name.lower().endswith(".zip")
    shutil.unpack_archive(path, folder, "zip" if is_zip else "tar", **({} if is_zip else {"filter": "data"}))


def files_in(path: Path) -> Iterator[tuple[str, str]]:
    """(role, text) of the files in a folder and in archives inside archives, except links, hidden files, virtual
    environments, and our models. Code has as its roles the names in FILES whose functions it has written; results have
    their own name. Broken archives raise many types of errors."""
    name = path.name.lower()
    if path.is_symlink() or name == "models" or name.startswith(".") or (path / "pyvenv.cfg").exists():
        return
    if path.is_dir():
        for entry in sorted(path.iterdir(), key=lambda entry: (-len(entry.name), entry.name)):
            yield from files_in(entry)
    elif name.endswith(ARCHIVES):
        with tempfile.TemporaryDirectory() as folder:
            unpack(path, Path(folder))
            yield from files_in(Path(folder))
    elif path.is_file() and name.endswith((".py", *[file for file, *_ in RUN.values()])):
        text = path.read_text("utf-8-sig", "replace")
        roles = {TASKS[task] for task in TASKS for part in PARTS[task] if is_written(text, part)}
        yield from [(role, text) for role in roles] if name.endswith(".py") else [(name, text)]


def read_submission(path: Path) -> dict[str, str]:
    """The texts of a submission by their roles, and any "problem". If files share a role, the one with the
    most functions counts or, of equals, the one with the shortest name."""
    texts = {}
    try:
        for role, text in files_in(path):
            names = parts_in(role)
            texts[role] = max(text, texts.get(role, ""), key=lambda text: sum(is_written(text, name) for name in names))
    except Exception as error:  # a broken archive must not stop a class
        texts["problem"] = f"cannot read all of it: {error}"
    return texts or {"problem": "no Python file with a written function of the homework"}


def read_all(path: Path, as_one: bool) -> dict[str, dict[str, str]]:
    """The texts of a submission by its name or, for a class, of each entry of a folder or archive."""
    with tempfile.TemporaryDirectory() as place:
        root = path.resolve()
        if path.name.lower().endswith(ARCHIVES):
            with suppress(Exception):  # read_submission will name the problem
                unpack(path, Path(place))
                root = Path(place)
        entries = [root]
        while len(entries) == 1 and entries[0].is_dir():
            entries = sorted(entry for entry in entries[0].glob("[!.]*") if entry.name != "__MACOSX")
        stems = "|".join(Path(file).stem for file in FILES)
        ours = rf"({stems})[\W\d_]*\.py|support|log\.jsonl"  # also maelm (1).py
        if as_one or len(entries) < 2 or any(re.fullmatch(ours, entry.name.lower()) for entry in entries):
            return {path.resolve().name: read_submission(root)}
        return {entry.name: read_submission(entry) for entry in entries}


def write_all(folder: Path, texts: dict[str, str]):
    """Write files, by their names, to a folder."""
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")


# ---- 3. Points ----------------------------------------------------------------------------------------------
class Result(NamedTuple):
    """The result of a task: its points, the maximum, a status line, and a paragraph for each failed claim."""
    task: str
    points: int
    most: int
    status: str
    details: str = ""


def grade(task: str, texts: dict[str, str], seconds: float, ours: dict) -> Result:
    """Grade one task of a submission or, for `together`, all tasks that the student has attempted. `ours` has the
    effects of our solutions; see tests/random_inputs.py."""
    claims, names = claims_of(task), TASKS if task == TOGETHER else [task]
    own = [name for name in names if any(is_written(texts.get(TASKS[name], ""), part) for part in PARTS[name])]
    files = {TASKS[name] for name in own}
    failure = functools.partial(Result, task, 0, len(claims))
    if not own or task == TOGETHER and not {name for name in TASKS if TASKS[name] == "maelm.py"} <= {*own}:
        return failure("not attempted")
    aliases = {claim: f"test_{secrets.token_hex(8)}" for claim in (*claims, *CANARIES)}  # students cannot know them
    copy = PROJECT | {"pytest.ini": PYTEST_INI} | {file: completed(texts[file], file, own) for file in files}
    for claim in claims:
        copy |= {file: copy[file].replace(f"def {claim}(", f"def {aliases[claim]}(") for file in TESTS}
    copy[TESTS[0]] += "".join(f"\n\ndef {aliases[wrong]}():\n    {wrong}\n" for wrong in CANARIES)
    copy[TESTS[1]] += (f"\n\ndef {aliases[RANDOM]}():\n    from tests import random_inputs\n"
                       f"    random_inputs.save(__file__ + '.pt', [{task!r}])\n")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_all(folder, copy)
        # conftest.py is not loaded as a plugin, so that the report includes files that cannot be imported.
        command = [sys.executable, "-m", "pytest", "--noconftest", "-s", "-p", "no:cacheprovider", *TESTS,
                   "--junitxml=report.xml", "-k", " or ".join(aliases.values())]
        code = run_limited(command, folder, seconds)
        if code is None:
            return failure(f"ran out of time: more than {seconds:g} s of computing")
        try:
            cases = {case.get("name"): case for case in ElementTree.parse(folder / "report.xml").iter("testcase")}
        except (OSError, ElementTree.ParseError):
            return failure("no report: the code ends Python")
        errors = {claim: said_in(cases.get(alias), texts) for claim, alias in aliases.items()}
        errors[RANDOM] = errors[RANDOM] or difference(effects_in(folder / f"{TESTS[1]}.pt", task), ours[task])
    if not cases.keys() & {*aliases.values()}:  # pytest could not even collect the tests
        return failure(f"cannot be imported: {said_in(next(iter(cases.values()), None), {})}")
    if code == 0 or not all(len(cases.get(aliases[wrong], ())) for wrong in CANARIES):  # a failure is in its case
        return failure("read by hand: claims that cannot hold did not fail")
    failed = [claim for claim in claims if errors[claim]]
    gates = [claim for claim in failed if claims[claim]]
    status = f"failed: {', '.join(failed)}" if failed else "full marks"
    status = f"no points without {gates[0]}; {status}" if gates else status
    details = "\n".join(f"{claim}: {errors[claim]}" for claim in failed)
    return Result(task, 0 if gates else len(claims) - len(failed), len(claims), status, details)


def run_limited(command: list[str], folder: Path, seconds: float) -> int | None:
    """Run a command with a limit of CPU time (not on Windows), and ten times as much in all, because other programs may
    run. Returns the exit code, or None if time ran out. Its processes are killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if os.name == "posix":
        command = ["sh", "-c", 'ulimit -t $0; "$@"; exit $?', str(math.ceil(seconds)), *command]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing,
                               start_new_session=True)
    try:
        code = process.wait(10 * seconds)
        return None if code in (128 + 9, 128 + 24) else code  # SIGKILL and SIGXCPU: CPU time is up
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said_in(case: ElementTree.Element | None, texts: dict[str, str]) -> str:
    """The message of a test case and the student's own lines from pytest's short traceback; "" if the test passed."""
    if case is None or not len(case):  # an empty case has passed
        return "has no result" if case is None else ""
    traceback = "".join(case.itertext())
    said = re.findall(r"^E +(.*)", traceback, re.MULTILINE) or traceback.splitlines()[-1:]
    lines = [line.removeprefix("AssertionError: ") for line in said if re.match(r"\w+Error\b", line)][:1] or said[:1]
    for file, number, function, code in re.findall(r"^(\S+):(\d+): in (.+)\n +(.*)", traceback, re.MULTILINE):
        if int(number) <= len(texts.get(file, "").splitlines()):  # our solutions follow at the end
            lines.append(f"    {file}:{number} in {function}: {code}")
    return "\n".join(lines)


def difference(theirs: Iterable[tuple], ours: Iterable[tuple]) -> str:
    """The first difference between the effects of a student's calls and ours, in one line; "" if there is none."""
    sizes = "?"
    try:
        for (_, found), (sizes, expected) in zip(theirs, ours, strict=True):
            if found or "meta" not in sizes:
                for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
                    largest = float(y.double().abs().max()) if torch.is_tensor(y) and y.numel() > 0 else 1.0
                    torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4 * max(1.0, largest))
    except Exception as error:  # students' code can write any file
        return f"with arguments of sizes {sizes}: {' '.join(str(error).split())}"
    return ""


def effects_in(path: Path, task: str) -> Iterator[tuple]:
    """The effects in a file. Raises many types of errors."""
    yield from torch.load(path, weights_only=True)[task]


@functools.cache
def effects_of_ours(*tasks: str) -> dict:
    """The effects of our solutions to these tasks."""
    with tempfile.TemporaryDirectory() as name:
        path = f"{name}/effects.pt"
        subprocess.run([sys.executable, "-m", "tests.random_inputs", path, *tasks], cwd=HERE, check=True)
        return torch.load(path, weights_only=True)


def grade_run(texts: dict[str, str]) -> list[Result]:
    """Grade the run folder of a toy: the last validation loss, and the linear probe of the mean vector."""
    results = []
    for task, (file, pattern, least, most) in RUN.items():
        value = float((re.findall(pattern, texts.get(file, "")) or ["nan"])[-1])
        results.append(Result(task, int(least <= value <= most), 1, f"{value:.4g}, expected {least:g} to {most:g}"))
    return results
