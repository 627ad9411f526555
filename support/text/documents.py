"""The documents that --data selects: from files, from the Hub, or from the documentation on this machine (`docs`).

Each record of a .jsonl, .json or .parquet file is a document. A text file is read line by line: a document ends at a
blank line, at a line <|endoftext|>, or at the end of the line in which it reaches 10,000 characters. A document of more
than 4 million characters is split.
"""
import ast
import functools
import hashlib
import importlib.util
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from support.program.cli import path_of
from support.program.errors import UserError
from support.program.files import code_hashes, short_hash, write_json
from support.text.readers import RECORDS, Record, hub_records, lines_of, split_long, split_name

CACHE = "~/.cache/maelm"  # default folder for files that can be made again
PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give C code a docstring
GROUPED = 10_000  # characters after which a document without a blank line ends
LONGEST = 1 << 22  # characters after which a line or document is split; no book is that long
END_OF_TEXT = "<|endoftext|>"  # also ends a document, if it is alone on its line
TEXT = (".txt",)  # formats of plain text
FORMATS = (*TEXT, *RECORDS)


# ---- 1. The documentation on this machine ------------------------------------------------------------------
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


@functools.cache
def read_docs(cache: str = CACHE) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine, kept in the folder `cache` by everything
    that decides them: the versions of Python and PACKAGES, and the code of this file."""
    installed = {each.name.lower().replace("-", "_"): each.version for each in metadata.distributions()}
    versions = [platform.python_version(), *[installed.get(name) for name in PACKAGES]]
    kept = path_of(cache) / f"docs-{short_hash(repr((versions, code_hashes('support/text/documents.py'))))}.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is made again
        return [(library, text) for library, text in json.loads(kept.read_bytes())]
    first = {}  # the library in which a text was seen first
    for library, path in tqdm(docs_files(), "reading documentation", unit="file", leave=False, disable=None):
        for text in docstrings(path):
            first.setdefault(text, library)
    docs = [(library, text) for text, library in first.items()]
    with suppress(OSError):  # where nothing can be written, the files are parsed again each time
        write_json(kept, docs)
    return docs


def docstrings(path: Path) -> list[str]:
    """All documentation strings of a Python file: docstrings, `add_docstr(f, "...")` and help topics."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates, and files for other Python versions
        return []
    strings = []
    for node in ast.walk(tree):
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


def strings_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The string constants in a list of syntax nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


# ---- 2. Documents of --data ----------------------------------------------------------------------------------
Source = str | Path  # docs, hf:NAME[:CONFIG], or a text file


def sources(data: str) -> list[Source]:
    """The sources that --data names, where + joins several, in a fixed order."""
    selected = []
    for name in [data] if path_of(data).exists() else data.split("+"):
        if name == "docs" or (name.startswith("hf:") and name != "hf:"):
            selected.append(name)
            continue
        if not name or not path_of(name).exists():
            raise UserError(f"--data {name}: no such file or folder; other sources are docs and hf:NAME")
        files = sorted(files_below(path_of(name)), key=str)
        if not files:
            raise UserError(f"--data {name}: no file ending in {', '.join(FORMATS)}, plain or compressed")
        selected += files
    return selected


def files_below(path: Path) -> Iterator[Path]:
    """A text file, or all text files in a folder and the folders in it, except hidden ones."""
    if path.is_dir():
        for inside in path.iterdir():
            if not inside.name.startswith("."):
                yield from files_below(inside)
    elif split_name(path)[1] in FORMATS:
        yield path


def text_hash(selected: list[Source], column: str, cache: str) -> str:
    """A hash of the contents of sources. A data set on the Hub is identified only by its name."""
    contents = [column]
    for source in tqdm(selected, "comparing files", unit="file", leave=False, delay=2, disable=None):
        if source == "docs":
            contents.append(json.dumps(read_docs(cache)))
        elif isinstance(source, str):
            contents.append(source)
        else:
            with open(source, "rb") as file:
                contents.append(split_name(source)[1] + hashlib.file_digest(file, "blake2b").hexdigest())
    return short_hash(repr(contents))


def grouped(lines: Iterable[str]) -> Iterator[str]:
    """Group lines into documents by the rule at the top of this file."""
    document, size = [], 0
    for line in lines:
        blank = line.isspace() or line.strip() == END_OF_TEXT
        if not blank:
            document.append(line)
            size += len(line)
        if document and (blank or size >= GROUPED):
            yield "".join(document)
            document, size = [], 0
    if document:
        yield "".join(document)


def column_of(records: Iterable[Record], column: str) -> Iterator[str]:
    """The texts in a column of records, "" for null."""
    for number, (place, record) in enumerate(records):
        if number == 0 and column not in record:  # later records may lack it, which counts as null
            raise UserError(f"{place}: needs a field `{column}`; --column can be {', '.join(record)}")
        text = record.get(column)
        if not isinstance(text, str | None):
            raise UserError(f"{place}: field `{column}` holds {text!r:.40}, not text")
        yield text or ""


def texts_of(source: Source, column: str, cache: str) -> Iterator[str]:
    """The texts of a source, unchanged, with "" for missing ones. Raises UserError if a text cannot be read."""
    if source == "docs":
        return (text for _, text in read_docs(cache))
    if isinstance(source, str):
        records, is_text = hub_records(source)
        texts = column_of(((source, record) for record in records), column)
        return grouped(line + "\n" for line in texts) if is_text else texts
    suffix = split_name(source)[1]
    if suffix in TEXT:
        return grouped(lines_of(source, longest=LONGEST))
    return column_of(RECORDS[suffix](source, column), column)


def documents(selected: list[Source], column: str = "text", cache: str = CACHE) -> Iterator[str]:
    """The documents of sources, including empty ones, stripped of white space and split after LONGEST characters."""
    for source in selected:
        for text in split_long(texts_of(source, column, cache), LONGEST):
            # JSON can hold half of a surrogate pair, which is not text.
            yield text.strip().encode(errors="replace").decode()
