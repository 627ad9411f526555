"""The homework: its tasks, our functions as blanks and as solutions, and the files that students hand in."""
import ast
import re
import shutil
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from support.program import ROOT, UserError

TASKS = {  # of each file, in an order that works: a task needs only earlier tasks
    "train.py": ["learning_rate_factor"],
    "rank.py": ["tau_rank", "effective_rank"],
    "support/classification.py": ["matthews"],
    "maelm.py": ["attention", "Attention.forward", "relative_bucket", "RelativeBias.forward", "corrupt",
                 "Encoder.hidden_states", "MAELM.fill_gaps", "MAELM.forward"],
}
HOMEWORK = {task: file for file, tasks in TASKS.items() for task in tasks}
FILES = {Path(file).name: file for file in TASKS}
PARTS = {task: [task] for task in HOMEWORK} | {"corrupt": ["corrupt", "draw_masks", "apply_masks"]}  # functions
COPIED = ("*.py", "LICENSE", "requirements*.txt", "course/*.py", "course/*.md", "support/**/*.py", "tests/__init__.py",
          "tests/test_homework.py")
PROJECT = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for name in COPIED for path in ROOT.glob(name)}
HEADER = '"""Functions that you write for a larger program."""\nimport math\n\nimport numpy as np\nimport torch'


def source(part: str, text: str) -> str:
    """The lines of a function or Class.method in one of our files."""
    node = ast.parse(text)
    for name in part.split("."):
        node, = [inner for inner in node.body if getattr(inner, "name", "") == name]
    return "\n".join(text.split("\n")[node.lineno - 1:node.end_lineno])


SOLUTIONS = {part: source(part, PROJECT[file]) for task, file in HOMEWORK.items() for part in PARTS[task]}


def blank(part: str) -> str:
    """The signature and docstring of a function, followed by its rules from tasks.md."""
    signature, docstring, *_ = SOLUTIONS[part].split('"""')
    indent = "    " * (part.count(".") + 1)
    rules = PROJECT["course/tasks.md"].partition(f"## {part}\n")[2].partition("\n## ")[0].strip()
    rules = textwrap.indent(f"\n\n{rules}", indent) if rules else ""
    return f'{signature}"""{docstring}{rules}"""\n{indent}raise NotImplementedError'


BLANKS = {part: blank(part) for part in SOLUTIONS}


def without(tasks: list[str]) -> str:
    """The file of these tasks, with blanks in place of their functions. Raises UserError for tasks of two files."""
    files = sorted({HOMEWORK[task] for task in tasks})
    if len(files) > 1:
        raise UserError(f"these tasks are in {' and '.join(files)}; name only tasks from one file")
    text = PROJECT[files[0]]
    for part in [part for task in tasks for part in PARTS[task]]:
        text = text.replace(SOLUTIONS[part], BLANKS[part])
    return text


# The files as students get them: maelm.py without its solutions; of the other files, only the blanks.
HANDED_OUT = {file: "\n\n\n".join([HEADER, *[BLANKS[task] for task in tasks]]) + "\n" for file, tasks in TASKS.items()}
HANDED_OUT["maelm.py"] = without(TASKS["maelm.py"])


def is_attempted(task: str, texts: dict[str, str]) -> bool:
    """Whether a submission has code for a task: in place of the blank, or in addition to it."""
    file = HOMEWORK[task]
    text = texts.get(file, "")
    for part in PARTS[task]:
        definition = re.compile(rf"\bdef {part.split('.')[-1]}\b|^{re.escape(part)} *=", re.MULTILINE)
        more = len(definition.findall(text)) - len(definition.findall(HANDED_OUT[file]))
        if more > 0 or (more == 0 and BLANKS[part] not in text):
            return True
    return False


def read(path: Path) -> dict[str, str]:
    """The texts of the homework's files, by their names, in a folder or zip: of several with the same name, the
    nearest. None from a damaged or encrypted zip."""
    if path.is_file():
        with TemporaryDirectory() as folder:
            try:
                shutil.unpack_archive(path, folder, "zip")
            except Exception:  # zipfile has many errors, and one student's zip must not end a class
                return {}
            return read(Path(folder))
    texts = {}
    for name, file in FILES.items():
        found = [each for each in path.rglob(name) if each.is_file() and not each.is_symlink()]  # not ours
        if found:
            texts[file] = min(found, key=lambda each: len(each.parts)).read_text("utf-8-sig", "replace")
    return texts
