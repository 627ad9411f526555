"""The documentation on this machine: what `--data docs` reads."""
import ast
import functools
import importlib.util
import json
import os
import sysconfig
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from support.run_folder import short_hash, write_json

CACHE = "~/.cache/maelm"  # the folder for what can be made again, unless --cache names another
PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code


@functools.cache
def docs_files() -> list[tuple[str, Path]]:
    """(library, file) of all Python files of the standard library and of PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # finds, does not import
        if spec is not None:
            roots += [(name, Path(folder)) for folder in spec.submodule_search_locations or []]
    found = []
    for library, root in roots:
        paths = sorted(root.rglob("*.py"))
        found += [(library, path) for path in paths if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts)]
    return found


def file_states(files: Iterable[Path | str]) -> str:
    """Names, sizes and times of files, by which it shows that they have changed."""
    stats = [(str(file), os.stat(file)) for file in files]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


@functools.cache
def read_docs(cache: str = CACHE) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine; kept in the folder `cache`."""
    files = docs_files()
    cached = Path(cache).expanduser() / f"docs-{short_hash(file_states(path for _, path in files))}.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is made again
        return [(library, text) for library, text in json.loads(cached.read_bytes())]
    first = {}  # the library in which a text was seen first
    for library, path in tqdm(files, "reading documentation", unit="file", leave=False, disable=None):
        for text in docstrings(path):
            first.setdefault(text, library)
    docs = [(library, text) for text, library in first.items()]
    with suppress(OSError):  # where nothing can be written, the files are parsed again each time
        write_json(cached, docs)
    return docs


def docstrings(path: Path) -> list[str]:
    """All documentation strings of a Python file: docstrings, `add_docstr(f, "...")` and help topics."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and files of other Python versions
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))  # of module.f(...), of f(...)
            if name in DOCUMENTING:
                found.append(max(strings_in(ast.walk(node)), key=len, default=""))
        elif isinstance(node, ast.Dict) and path.parent.name == "pydoc_data":
            found += strings_in(node.values)
    texts = [text.strip() for text in found if len(text.split()) > 3]
    return [text.encode(errors="replace").decode() for text in texts]  # Python strings can hold half a surrogate pair


def strings_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The string constants among the nodes of a syntax tree."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
