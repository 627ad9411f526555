"""Packs your homework, and checks that the grader can read it.

    python hand_in.py homework.zip answers.pdf out/toy    # the four files, your answers, and your run folder
"""
import ast
import functools
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Task(NamedTuple):
    """A row of the homework: its file, how hard it is, and its functions, which may be Class.method."""
    file: str
    level: str
    parts: tuple[str, ...]


HOMEWORK = {  # in an order that works: a task needs only earlier tasks
    "learning_rate_factor": Task("train.py", "easy", ("learning_rate_factor",)),
    "tau_rank": Task("rank.py", "easy", ("tau_rank",)),
    "effective_rank": Task("rank.py", "easy", ("effective_rank",)),
    "matthews": Task("support/tasks/classification.py", "easy", ("matthews",)),
    "attention": Task("maelm.py", "easy", ("attention",)),
    "Attention.forward": Task("maelm.py", "medium", ("Attention.forward",)),
    "relative_bucket": Task("maelm.py", "hard", ("relative_bucket",)),
    "RelativeBias.forward": Task("maelm.py", "medium", ("RelativeBias.forward",)),
    "corrupt": Task("maelm.py", "hard", ("corrupt", "draw_masks", "apply_masks")),
    "Encoder.hidden_states": Task("maelm.py", "medium", ("Encoder.hidden_states",)),
    "MAELM.fill_gaps": Task("maelm.py", "medium", ("MAELM.fill_gaps",)),
    "MAELM.forward": Task("maelm.py", "easy", ("MAELM.forward",)),
}
FILES = tuple(dict.fromkeys(task.file for task in HOMEWORK.values()))


def parts_in(file: str) -> list[str]:
    """The functions of the homework that belong into a file."""
    return [part for task in HOMEWORK.values() if task.file == file for part in task.parts]


def definitions(block: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of the functions, methods and assignments in a block, in order, also inside `if` or `try`."""
    for node in block:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield owner + node.name, node
        elif isinstance(node, ast.Assign):
            yield from [(owner + ast.unparse(target), node) for target in node.targets]
        else:
            for field in ("body", "handlers", "orelse", "finalbody"):
                yield from definitions(getattr(node, field, []), owner)


def is_blank(node: ast.stmt) -> bool:
    """Whether a function, after its docstring, only raises NotImplementedError."""
    if not isinstance(node, ast.FunctionDef):
        return False
    code = [line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return [ast.unparse(line).removesuffix("()") for line in code] == ["raise NotImplementedError"]


@functools.cache
def written_in(text: str) -> frozenset[str]:
    """The functions in a file whose last definition is not blank or, if it is not valid Python, all that it names."""
    try:
        last = dict(definitions(ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parts = [part for file in FILES for part in parts_in(file)]
        return frozenset(part for part in parts if f"def {part.split('.')[-1]}" in text and part.split(".")[0] in text)
    return frozenset(name for name, node in last.items() if not is_blank(node))


def files_of(path: Path) -> list[Path]:
    """A file, or the files in a folder except checkpoints and hidden files."""
    found = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.suffix != ".pt"]


def main(argv: list[str]) -> int:
    """Run the command. Returns its exit code: 2 for a mistake on the command line."""
    if len(argv) == 0 or not argv[0].endswith(".zip"):
        print("hand_in.py: name the archive first, such as homework.zip, then your answers and run folder")
        return 2
    missing = [path for path in (*FILES, *argv[1:]) if not Path(path).exists()]
    if missing:
        print(f"hand_in.py: {missing[0]}: there is no such file or folder here; correct its name")
        return 2
    with zipfile.ZipFile(argv[0], "w", zipfile.ZIP_DEFLATED) as archive:
        for file in FILES:
            archive.write(file)
        for path in map(Path, argv[1:]):
            for file in files_of(path):
                archive.write(file, Path(path.name, file.relative_to(path)))
    with zipfile.ZipFile(argv[0]) as archive:
        print(f"{argv[0]}: {len(archive.namelist())} files, {Path(argv[0]).stat().st_size / 1e6:.1f} MB")
        for file in FILES:
            text = archive.read(file).decode("utf-8-sig", "replace")
            try:
                ast.parse(text)
            except SyntaxError as error:
                print(f"{file}, line {error.lineno}: {error.msg}; no task of this file can get points")
            for part in parts_in(file):
                if part not in written_in(text):
                    print(f"{file}: {part} is not written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
