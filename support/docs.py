"""The documentation on this machine (`docs`): docstrings of Python and of the packages in requirements.txt. And the
task `docs`: which library is a docstring from?"""
import ast
import functools
import gc
import hashlib
import importlib.util
import json
import platform
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from support.program import CACHE, path_of, short_hash, write_json

PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
LIBRARIES = ("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")  # with most
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give C code a docstring
SCORED = 150  # docstrings per library on which the task `docs` is scored
LABELED = 100  # docstrings per library for its training
NGRAM = 13  # documents that share this many consecutive words are near-duplicates


# ---- 1. The documentation -----------------------------------------------------------------------------------
def versions() -> list[str | None]:
    """The versions of Python and PACKAGES, which decide the documentation."""
    installed = {each.name.lower().replace("-", "_"): each.version for each in metadata.distributions()}
    return [platform.python_version(), *[installed.get(name) for name in PACKAGES]]


@functools.cache
def read_docs(cache: str = CACHE) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine, kept by versions in `cache`."""
    kept = path_of(cache) / f"docs-{short_hash(repr(versions()))}.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is made again
        return [(library, text) for library, text in json.loads(kept.read_bytes())]
    gc.disable()  # it would search the syntax trees, which hold no cycles, again and again
    first = {}  # the library in which a text was seen first
    for library, path in tqdm(docs_files(), "reading documentation", unit="file", leave=False, disable=None):
        for text in docstrings(path):
            first.setdefault(text, library)
    gc.enable()
    docs = [(library, text) for text, library in first.items()]
    with suppress(OSError):  # where nothing can be written, the files are parsed again each time
        write_json(kept, docs)
    return docs


def docs_files() -> list[tuple[str, Path]]:
    """(library, file) of each Python file in the standard library and in PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # does not import it
        if spec is not None:
            roots += [(name, Path(folder)) for folder in spec.submodule_search_locations or []]
    files = []
    for library, root in roots:
        paths = sorted(root.rglob("*.py"))
        files += [(library, path) for path in paths if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts)]
    return files


def docstrings(path: Path) -> list[str]:
    """All documentation strings of a Python file: docstrings, `add_docstr(f, "...")` and help topics."""
    content = path.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
    except (SyntaxError, ValueError):  # templates, and files for other Python versions
        return []
    # Only help topics and few other files have documentation in expressions, which are most of a syntax tree.
    in_statements = path.parent.name != "pydoc_data" and not any(name.encode() in content for name in DOCUMENTING)
    strings = []
    for node in statements(tree) if in_statements else ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            strings.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))  # for module.f(...) or f(...)
            if name in DOCUMENTING:
                strings.append(max(strings_in(ast.walk(node)), key=len, default=""))
        elif isinstance(node, ast.Dict) and path.parent.name == "pydoc_data":
            strings += strings_in(node.values)
    texts = [text.strip() for text in strings if len(text.split()) > 3]
    return [text.encode(errors="replace").decode() for text in texts]  # a string may hold half a surrogate pair


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a syntax tree, in the order of ast.walk."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        children = ast.iter_child_nodes(node)
        todo.extend(each for each in children if isinstance(each, (ast.stmt, ast.excepthandler, ast.match_case)))
        yield node


def strings_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The string constants in a list of syntax nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


# ---- 2. The task `docs`, and what is held out for it --------------------------------------------------------
def in_validation(document: str, share: float) -> bool:
    """Whether a document belongs to the validation split, which has the documents with the lowest hashes."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(document: str) -> set[str]:
    """All sequences of NGRAM consecutive words, in lower case."""
    words = document.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def per_library(docs: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The first (library, text) of each library, at most this many."""
    count = Counter()
    chosen = []
    for library, text in docs:
        count[library] += 1
        if count[library] <= most:
            chosen.append((library, text))
    return chosen


def docs_task(val_share: float, cache: str) -> dict[str, list[tuple[str, str]]]:
    """(library, text) of the docstrings in the task's splits, in an order that further docstrings do not change. Dev is
    from the tenth that follows the validation split by hash; no model is trained on it. train is from the rest, and
    shares no NGRAM words in a row with a dev text."""
    docs = [(library, text) for library, text in read_docs(cache) if library in LIBRARIES]
    docs.sort(key=lambda each: hashlib.blake2b(each[1].encode()).digest())
    tenth, rest = [], []
    for library, text in docs:
        if not in_validation(text, val_share + 0.1):
            rest.append((library, text))
        elif not in_validation(text, val_share):
            tenth.append((library, text))
    dev = per_library(tenth, SCORED)
    known = set().union(*[ngrams(text) for _, text in dev])
    train = per_library((each for each in rest if known.isdisjoint(ngrams(each[1]))), LABELED)
    return {"train": train, "dev": dev}
