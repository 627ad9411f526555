"""What students get: a file, or a whole folder, in which the functions of the tasks are still to be written.

    python test_maelm.py --blank corrupt attention > student/maelm.py
    python test_maelm.py --handout homework

A folder has all that a student needs and none of our solutions: the programs, the tests of the tasks, the assignment
from the docstrings, and `answers.pt`, what the other tasks' functions return in each test. With that a task can be
tested alone, as it is here, where our solutions stand for the other tasks. classroom.py, which grades, goes along.
"""
import ast
import importlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from classroom import (ANSWERS, HEAD, HERE, TASKS, defines, imports_of, inputs_of, locate, place_of, reached, text_of,
                       tree_of, uses)
from files import UserError, writing

RULE = f"\n\n# ---- Tasks of other files {'-' * 86}\nimport math\n\nimport numpy as np\n"
PROGRAMS = ("train", "rank", "finetune")  # they go along, with all of our files that they import


# ---- Blanks ---------------------------------------------------------------------------------------------------------
def blanked(text, name):
    """`text` without the body of function `name`: its signature and docstring are the assignment."""
    statements, at = locate(ast.parse(text).body, name)
    docstring, lines = statements[at].body[0], text.splitlines()
    # Lines are counted from 1, so that this is all behind the docstring.
    lines[docstring.end_lineno:statements[at].end_lineno] = [" " * docstring.col_offset + "raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def blank_of(file, names):
    """One of our files without the bodies of those tasks that are in it; its first line names them."""
    text, inside = text_of(file), [name for name in names if TASKS[name].file == file]
    for name in inside:
        text = blanked(text, name)
    return f"{HEAD}{' '.join(inside)}\n{text}" if inside else text


def blank_file(names, change=blanked):
    """maelm.py with these tasks blanked; those of other files are at its end. Its first line names them all."""
    text, others = text_of("maelm"), ""
    for name in names:
        if TASKS[name].file == "maelm":
            text = change(text, name)
        else:
            other = change(text_of(TASKS[name].file), name)
            statements, at = locate(ast.parse(other).body, name)
            others += f"\n\n{ast.get_source_segment(other, statements[at])}\n"
    return f"{HEAD}{' '.join(names)}\n{text}" + (RULE + others if others else "")


# ---- Tests ----------------------------------------------------------------------------------------------------------
def source(text, node, names):
    """The text of a statement: without the wrong versions above it, and of an import only these names."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        node.names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in names]
        return ast.unparse(node)
    if not isinstance(node, ast.FunctionDef):
        return ast.get_source_segment(text, node)
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    kept = [f"@{mark}\n" for mark in marks if not mark.startswith("catches(")]
    return "".join(kept) + ast.get_source_segment(text, node)


def only_what(text, wanted, docstring):
    """Of a test file the definitions of these names, and all that they use: (its text, the names in it)."""
    tree = ast.parse(text)
    statements = tree.body[1:]  # behind the docstring
    for node in statements:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [mark for mark in node.decorator_list if "catches(" not in ast.unparse(mark)]
    # What is done, not defined, always stays: a call that sets the number of threads, and what makes a file a program.
    start = [node for node in statements if isinstance(node, ast.If) or not defines(node) or defines(node) & wanted]
    kept = [node for node in statements if node in start or node in reached(start, statements)]
    names = uses(kept) | wanted
    pieces = [f'"""{docstring}"""']
    for before, node in zip([tree.body[0], *kept], kept):
        apart = isinstance(node, ast.FunctionDef) or isinstance(before, ast.FunctionDef)
        pieces.append(("\n\n" if apart else "") + source(text, node, names))
    return "\n".join(pieces) + "\n", names


def test_files(names):
    """{path: text} of the files with the tests of these tasks, and of conftest.py with what they use."""
    files, helpers = {"tests/__init__.py": ""}, {name for name in uses_of_conftest() if name.startswith("pytest_")}
    for module in dict.fromkeys(TASKS[name].tested_in for name in names):
        path = module.replace(".", "/")
        wanted = {test for name in names for test in TASKS[name].tests if TASKS[name].tested_in == module}
        files[f"{path}.py"], used = only_what(text_of(path), wanted, "Tests of the tasks in assignment.md.")
        helpers |= used
    # This file is also the command that grades, so it goes along even if none of its tests does.
    files.setdefault("test_maelm.py", only_what(text_of("test_maelm"), set(), "Grades: see README.md.")[0])
    files["conftest.py"], _ = only_what(text_of("conftest"), helpers, "What the tests share.")
    return files


def uses_of_conftest():
    """The names that conftest.py defines."""
    return set().union(*(defines(node) for node in tree_of("conftest").body))


# ---- Answers --------------------------------------------------------------------------------------------------------
def call_test(name, test):
    """Run a test of a task here and now, as it is."""
    import torch
    torch.manual_seed(0)
    getattr(importlib.import_module(TASKS[name].tested_in), test)()


def plain(output):
    """What a task's function returns, as torch.load can read it back: tensors, or a tuple or list of them; numbers."""
    if hasattr(output, "detach"):
        return output.detach().clone()
    if isinstance(output, list):
        return [plain(part) for part in output]
    if isinstance(output, tuple):
        return tuple(plain(part) for part in output)
    return output


def recording(function, calls, open_calls):
    """A function that appends each of its calls to `calls`, unless another one that does so has called it."""
    def recorded(*args, **kwargs):
        text, numbers = inputs_of(function, args, kwargs)
        open_calls.append(function)
        try:
            output = function(*args, **kwargs)
        finally:
            open_calls.pop()
        if not open_calls:
            calls.append((text, numbers, plain(output)))
        return output
    return recorded


def stored_answers(names):
    """{test: {other task: its calls}}: what our solutions of the other tasks return when a task's tests run on ours."""
    import pytest
    answers = {}
    for name in names:
        for test in TASKS[name].tests:
            answers[test], open_calls = {}, []
            with pytest.MonkeyPatch.context() as patch:
                for other in names:  # tasks that students have not got are whole in their files
                    if other != name:
                        owner, attribute = place_of(other)
                        calls = answers[test][other] = []
                        patch.setattr(owner, attribute, recording(getattr(owner, attribute), calls, open_calls))
                call_test(name, test)
    return answers


# ---- The folder -----------------------------------------------------------------------------------------------------
def programs():
    """The names of the files that go along: the programs, and all of ours that they import."""
    found = list(PROGRAMS)
    for file in found:  # which grows meanwhile
        for node in ast.walk(tree_of(file)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module]
            found += [name for name in modules if (HERE / f"{name}.py").exists() and name not in found]
    return found


def sentence(test):
    """What a test claims, in words."""
    return test.removeprefix("test_").replace("_", " ")


def assignment(names):
    """The tasks with their points, from the docstrings."""
    points = sum(len(TASKS[name].tests) for name in names)
    parts = [f"# Assignment: {points} points in {len(names)} tasks\n\nEach task is a function to be written; its "
             "docstring says all that the tests ask, and each test is a point.\n"]
    for name in names:
        task = TASKS[name]
        statements, at = locate(tree_of(task.file).body, name)
        function = statements[at]
        # From its head to the end of its docstring.
        lines = text_of(task.file).splitlines()[function.lineno - 1:function.body[0].end_lineno]
        shown = "\n".join(line.removeprefix(" " * function.col_offset) for line in lines)
        tests = "\n".join(f"- {sentence(test)}" for test in task.tests)
        parts.append(f"## {name}\n\n{len(task.tests)} points, {task.level}, in `{task.file}.py`:\n\n"
                     f"```python\n{shown}\n```\n\n{tests}\n")
    return "\n".join(parts)


README = """# Homework: MAE-LM

What is to be written stands in [assignment.md](assignment.md), and in the files where it says
`raise NotImplementedError`. Read `maelm.py` from the top first: it is the whole method. You need Python 3.11 or later,
a laptop, and no GPU:

```sh
pip install -r requirements.txt
python test_maelm.py --grade .               # your points, task by task
python test_maelm.py --grade . --verbose     # and all that went wrong, with what your code printed
```

A single task, as often as you like: `pytest` runs its tests on your code, and there, not with `--grade`,
`breakpoint()` works.

```sh
pytest -k {first}
```

Start where you like: where a test of one task needs another, it takes the stored answers of `answers.pt` if you call
the other one with the inputs that it expects, whole and as they come, and otherwise your own function. Write helpers,
constants and imports as you need them. Changes to `__init__` do not count. What you write must not import pytest,
importlib, or any file of this folder beyond what is imported there already: your teacher's grading refuses it.
When all is written, your code trains a language model of a million parameters in minutes, and measures it:

```sh
python train.py
python train.py --ablation mlm
python rank.py out/toy out/toy-mlm
```

Hand in the files that assignment.md names. Your teacher grades them with the same tests, and with the original code in
place of answers.pt.
"""


def leaks(folder, names):
    """Lines of our solutions of these tasks in the text files of a folder: ["file: line"]. Lines that say little, and
    those that are elsewhere in the files that students get, are no leaks."""
    shown = {line.strip() for file in programs() for line in blank_of(file, names).splitlines()}
    solutions = set()
    for name in names:
        statements, at = locate(tree_of(TASKS[name].file).body, name)
        first, last = statements[at].body[0].end_lineno, statements[at].end_lineno
        for line in text_of(TASKS[name].file).splitlines()[first:last]:
            line = line.partition("  #")[0].strip()
            if len(line) >= 25 and line not in shown:
                solutions.add(line)
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pt":
            lines = {line.partition("  #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()}
            found += [f"{path.name}: {line}" for line in sorted(lines & solutions)]
    return found


def make(folder, names):
    """Make a folder for students; UserError if there is something, or if a line of a solution would be in it."""
    import torch
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; name a new folder")
    files = {f"{file}.py": blank_of(file, names) for file in programs()}
    files |= test_files(names)
    needed = re.search("^pytest==.*$", (HERE / "requirements-test.txt").read_text(encoding="utf-8"), re.M)[0]
    files["requirements.txt"] = (HERE / "requirements.txt").read_text(encoding="utf-8") + needed + "\n"
    files["README.md"], files["assignment.md"] = README.format(first=names[0]), assignment(names)
    for name in ("classroom.py", "pyproject.toml", "LICENSE"):
        files[name] = (HERE / name).read_text(encoding="utf-8")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:  # in a new folder, which is renamed when it is complete and has been checked
        with writing(folder):
            (new / "tests").mkdir()
            for name, text in files.items():
                (new / name).write_text(text, encoding="utf-8")
            imports = set().union(*(imports_of(tree_of(task.file)).values() for task in TASKS.values()))
            torch.save({"answers": stored_answers(names), "imports": sorted(imports)}, new / ANSWERS.name)
        if found := leaks(new, names):
            raise UserError(f"{folder} would hold lines of solutions, so it was not made: {'; '.join(found)}")
        with writing(folder):
            new.chmod(0o755)  # a temporary folder is for its owner alone
            if folder.exists():  # and empty, which not every system replaces
                folder.rmdir()
            os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{folder}: {len(names)} tasks, {sum(len(TASKS[name].tests) for name in names)} points; read its README.md")
