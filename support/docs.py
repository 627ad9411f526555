"""The documentation on this machine (`docs`): docstrings of Python and of the packages in requirements.txt. And the
tasks that are made from it: `docs` and `modules` ask where a docstring is from, `bshift` for the order of words."""
import ast
import functools
import gc
import hashlib
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from support.program import CACHE, path_of, progress, short_hash, write_json

PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
LIBRARIES = ("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx", "huggingface_hub")  # with most
MODULES = tuple(f"python.{name}" for name in (  # the ten with most docstrings that Python 3.11 to 3.14 have
    "tkinter", "idlelib", "asyncio", "email", "importlib", "logging", "xml", "_pydecimal", "multiprocessing", "turtle"))
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give C code a docstring
HELD_OUT = (0.1, 0.2)  # docstrings with these hashes, counted from the validation split, are for dev
SCORED = 150  # docstrings per label, at most, on which `docs` and `modules` are scored
LABELED = 100  # docstrings per label, at most, for their training
SENTENCES = 10_000  # for the training of `bshift`
NGRAM = 13  # documents that share this many consecutive words are near-duplicates


# ---- 1. The documentation -----------------------------------------------------------------------------------
def versions() -> list[str | None]:
    """The versions of Python and PACKAGES, which decide the documentation."""
    installed = {each.name.lower().replace("-", "_"): each.version for each in metadata.distributions()
                 if each.name}  # an interrupted pip leaves folders without a name
    return [platform.python_version(), *[installed.get(name) for name in PACKAGES]]


@functools.cache
def read_docs(cache: str = CACHE) -> list[tuple[str, str]]:
    """(source, text) of every distinct documentation string on this machine, kept by versions in `cache`. The source is
    a package or, in Python's own library, python.MODULE."""
    kept = path_of(cache) / f"docs-by-module-{short_hash(repr(versions()))}.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is made again
        return [(source, text) for source, text in json.loads(kept.read_bytes())]
    gc.disable()  # it would search the syntax trees, which hold no cycles, again and again
    first = {}  # the source in which a text was seen first
    for source, path in progress(docs_files(), "reading documentation", unit="file"):
        for text in docstrings(path):
            first.setdefault(text, source)
    gc.enable()
    docs = [(source, text) for text, source in first.items()]
    with suppress(OSError):  # where nothing can be written, the files are parsed again each time
        write_json(kept, docs)
    return docs


def docs_files() -> list[tuple[str, Path]]:
    """(source, file) of each Python file in the standard library and in PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # does not import it
        if spec is not None:
            roots += [(name, Path(folder)) for folder in spec.submodule_search_locations]
    files = []
    for package, root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            source = f"python.{parts[0]}" if package == "python" else package
            if TEST_FOLDERS.isdisjoint(parts):
                files.append((source, path))
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


# ---- 2. What is held out, and the tasks ---------------------------------------------------------------------
def in_validation(document: str, share: float) -> bool:
    """Whether a document belongs to the validation split, which has the documents with the lowest hashes."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(document: str) -> set[str]:
    """All sequences of NGRAM consecutive words, in lower case."""
    words = document.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def per_label(docs: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The first (label, text) of each label, at most this many."""
    count = Counter()
    chosen = []
    for label, text in docs:
        count[label] += 1
        if count[label] <= most:
            chosen.append((label, text))
    return chosen


def labeled_docs(labels: tuple[str, ...], cache: str) -> list[tuple[str, str]]:
    """(label, text) of the docstrings whose source, or its package, is a label, in an order that further docstrings do
    not change."""
    docs = []
    for source, text in read_docs(cache):
        label = source if source in labels else source.partition(".")[0]
        if label in labels:
            docs.append((label, text))
    return sorted(docs, key=lambda each: hashlib.blake2b(each[1].encode()).digest())


def dev_docs(docs: list[tuple[str, str]], val_share: float) -> list[tuple[str, str]]:
    """(label, text) of those of labeled_docs that are for dev, which are from the tenth HELD_OUT."""
    start, end = [val_share + share for share in HELD_OUT]
    held_out = [each for each in docs if in_validation(each[1], end)]
    return per_label((each for each in held_out if not in_validation(each[1], start)), SCORED)


def split_docs(labels: tuple[str, ...], val_share: float, cache: str, labeled: int = LABELED) -> dict[str, list]:
    """(label, text) of each split. Train is from the docstrings after the tenth HELD_OUT, and shares no NGRAM words in
    a row with a dev text."""
    docs = labeled_docs(labels, cache)
    dev = dev_docs(docs, val_share)
    known = set().union(*[ngrams(text) for _, text in dev])
    rest = [each for each in docs if not in_validation(each[1], val_share + HELD_OUT[1])]
    train = per_label((each for each in rest if known.isdisjoint(ngrams(each[1]))), labeled)
    return {"train": train, "dev": dev}


def scored_docs(val_share: float, cache: str) -> set[str]:
    """The docstrings on which a task is scored: no model is trained on them. Those of `bshift` are among them."""
    dev = [dev_docs(labeled_docs(labels, cache), val_share) for labels in (LIBRARIES, MODULES)]
    return {text for docs in dev for _, text in docs}


def docs_task(task: str, val_share: float, cache: str) -> dict[str, list[tuple[str, str]]]:
    """(label, text) of each split. The labels of `docs` are LIBRARIES, and those of `modules` MODULES; their names are
    removed from the texts. For `bshift`, see exchanged."""
    if task == "bshift":
        splits = split_docs(LIBRARIES, val_share, cache, labeled=1000)
        found = {split: dict.fromkeys(each for _, text in docs for each in sentences(text))
                 for split, docs in splits.items()}
        train = [each for each in found["train"] if each not in found["dev"]]
        return {"train": [*map(exchanged, train[:SENTENCES])], "dev": [*map(exchanged, found["dev"])]}
    labels = MODULES if task == "modules" else LIBRARIES
    names = "|".join(label.rpartition(".")[2].removeprefix("_py") for label in labels)
    name = re.compile(rf"\b({names})\b", re.IGNORECASE)
    splits = split_docs(labels, val_share, cache)
    return {split: [(label, name.sub("", text)) for label, text in docs] for split, docs in splits.items()}


def sentences(text: str) -> list[str]:
    """The sentences of a text that have 7 to 30 words, and no other signs than those of prose."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.findall(r"(?:^|(?<= ))[A-Z][\w ,;'\"()/`-]+[.!?](?= |$)", " ".join(paragraph.split()))
    return [each for each in found if 7 <= len(each.split()) <= 30 and "--" not in each]


def exchanged(sentence: str) -> tuple[str, str]:
    """(label, sentence) for bigram shift (Conneau et al., 2018): in half of the sentences, chosen by their hashes, two
    neighboring words are exchanged. The first and the last word stay: a capital or a period would reveal it."""
    number = int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest())
    words = sentence.split()
    if number % 2:
        return "original", sentence
    i = 1 + number // 2 % (len(words) - 3)
    words[i], words[i + 1] = words[i + 1], words[i]
    return "exchanged", " ".join(words)
