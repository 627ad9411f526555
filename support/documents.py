"""Documents: of files, of the Hub, and the documentation on this machine, which `--data docs` reads."""
import ast
import functools
import glob
import hashlib
import importlib.util
import json
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from support.cli import UserError
from support.files import short_hash, write_json
from support.records import read_records
from support.tokenizer import split_long

CACHE = "~/.cache/maelm"  # the folder for what can be made again, unless --cache names another
PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code
VAL_SHARE = 0.01  # of the documents, held out for validation
LONGEST = 1 << 22  # characters; a longer document, longer than any book, is cut
NGRAM = 13  # words in a row that make two documents near-duplicates


# ---- 1. The documentation on this machine ------------------------------------------------------------------
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


# ---- 2. Documents of --data ---------------------------------------------------------------------------------
FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # suffix -> loader of `datasets`
PACKED = {".gz", ".xz", ".bz2", ".zst"}


class Source(NamedTuple):
    """What is read at once: all of --data, or one of those that + joins."""
    name: str  # docs, hf:NAME[:CONFIG], or as it is given
    loader: str  # docs, hub, or one of `datasets`
    files: tuple[str, ...] = ()
    column: str = "text"  # the field of its records that holds the text
    cache: str = CACHE  # where read_docs keeps its list


def sources(data: str, column: str = "text", cache: str = CACHE) -> list[Source]:
    """The sources of --data, in a fixed order. UserError if a name in it has no text."""
    names = [data] if Path(data).expanduser().exists() else data.split("+")
    found = []
    for name in names:
        if name == "docs":
            found.append(Source(name, "docs", tuple(str(path) for _, path in docs_files()), cache=cache))
        elif name.startswith("hf:") and name != "hf:":
            found.append(Source(name, "hub", column=column))
        elif name and (by_loader := files_in(name)):
            for loader, files in by_loader.items():
                found.append(Source(name, loader, tuple(files), "text" if loader == "text" else column))
        else:
            raise UserError(f"--data {data}: {name!r} is not docs, hf:NAME, or a file or folder with "
                            f"{', '.join(FORMATS)}, also packed")
    return found


def files_in(name: str) -> dict[str, list[str]]:
    """Loader -> files that a path or a pattern such as texts/*.txt names, and all in its folders but hidden ones."""
    given = Path(name).expanduser()
    found = {}
    for path in [given] if given.exists() else sorted(map(Path, glob.glob(str(given)))):
        inside = glob.glob("**", root_dir=path, recursive=True)  # skips what is hidden
        for file in sorted(path / part for part in inside) or [path]:
            suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in PACKED]
            if file.is_file() and suffixes and suffixes[-1] in FORMATS:
                found.setdefault(FORMATS[suffixes[-1]], []).append(str(file))
    return found


def texts_of(source: Source) -> Iterator[str]:
    """The texts of a source as they are, "" for null. UserError for a record without text in its column."""
    if source.loader == "docs":
        yield from [text for _, text in read_docs(source.cache)]
        return
    options = {"sample_by": "paragraph"} if source.loader == "text" else {}
    for record in read_records(source.loader, source.files, source.name, **options):
        if source.column not in record:
            raise UserError(f"{source.name}: its records need a field `{source.column}`; "
                            f"--column can be {', '.join(record)}")
        text = record[source.column]
        if not isinstance(text, str | None):
            raise UserError(f"{source.name}: field `{source.column}` of its records holds {text!r:.40}, not text")
        yield text or ""


def documents(read: list[Source]) -> Iterator[str]:
    """The documents of sources; those beyond LONGEST are cut, and empty ones left out."""
    for source in read:
        yield from filter(None, map(str.strip, split_long(texts_of(source), LONGEST)))


# ---- 3. Validation and near-duplicates -------------------------------------------------
def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: those with the lowest hashes do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(text: str) -> set[str]:
    """All NGRAM words in a row, in lower case and split at white space."""
    words = text.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
