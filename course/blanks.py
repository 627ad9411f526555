"""Our functions that are homework, as text: their solutions, and what students get instead."""
import ast
import textwrap
from collections.abc import Iterable

from course.hand_in import HOMEWORK
from support.program.files import ROOT

COPIED = ("*.py", "support/**/*.py", "tests/__init__.py", "tests/random_inputs.py", "tests/test_homework.py")
PATHS = [path for pattern in COPIED for path in ROOT.glob(pattern)]
PROJECT = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in PATHS}


def source(text: str, name: str) -> str:
    """The lines of a function or Class.method in one of our texts, including a comment at the end of its last line."""
    node = ast.parse(text)
    for part in name.split("."):
        node, = [inner for inner in node.body if getattr(inner, "name", None) == part]
    return "\n".join(text.split("\n")[node.lineno - 1:node.end_lineno])


SOLUTIONS = {part: source(PROJECT[task.file], part) for task in HOMEWORK.values() for part in task.parts}


def blank(name: str) -> str:
    """The signature and docstring of a function, followed by its rules from tasks.md if it is a task."""
    function = SOLUTIONS[name]
    indent = "    " * name.count(".")
    start_of_docstring = function.index('"""')
    head = function[:function.index('"""', start_of_docstring + 3)]
    rules = (ROOT / "course/tasks.md").read_text("utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0].strip()
    rules = textwrap.indent(f"\n\n{rules}", f"{indent}    ") if rules else ""
    return f'{head}{rules}"""\n{indent}    raise NotImplementedError'


BLANKS = {name: blank(name) for name in SOLUTIONS}


def without(file: str, tasks: Iterable[str]) -> str:
    """One of our files, without the solutions to these tasks."""
    text = PROJECT[file]
    for task in tasks:
        if HOMEWORK[task].file == file:
            for part in HOMEWORK[task].parts:
                text = text.replace(SOLUTIONS[part], BLANKS[part])
    return text
