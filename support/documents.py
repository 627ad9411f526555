"""Documents: of files, of the Hub, and the documentation on this machine, which `--data docs` reads.

support/texts.py says where documents end in files. A document of more than 4 million characters is cut.
"""
import ast
import functools
import hashlib
import importlib.util
import json
import lzma
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from support.cli import UserError, root_cause
from support.files import read_json, short_hash, write_json
from support.texts import LONGEST, file_texts, files_in, format_of, grouped, readable, split_long, texts_in

CACHE = "~/.cache/maelm"  # the folder for what can be made again, unless --cache names another
PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib", "pyarrow",
            "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements.txt installs them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code
VAL_SHARE = 0.01  # of the documents, held out for validation
NGRAM = 13  # words in a row that make two documents near-duplicates


# ---- 1. Records of files and of the Hub --------------------------------------------------------------------
def read_records(loader: str, files: Iterable[str], name: str, **options) -> Iterator[dict]:
    """The records that `datasets` reads from files, or of the Hub's `name` without files. UserError if it cannot."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    datasets.disable_progress_bars()
    options = {"split": "train", "streaming": True} | options
    path, _, config = name.removeprefix("hf:").partition(":")
    if loader == "hub" and Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
    try:
        if loader == "hub":
            if hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by"):
                options["sample_by"] = "paragraph"  # text files, as those on this machine
            yield from datasets.load_dataset(path, config or None, **options)
        else:
            yield from datasets.load_dataset(loader, data_files=list(files), **options)
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, HTTPError,
            datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


# ---- 2. The documentation on this machine ------------------------------------------------------------------
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


def content_hashes(files: Iterable[Path], cache: str) -> list[str]:
    """A hash of the content of each file. The folder `cache` remembers them by path, size and time of change, so that
    200 GB of text are not read again at every start."""
    remembered = Path(cache).expanduser() / "hashes.json"
    known, found, changed = {}, [], False
    with suppress(OSError, UserError):  # missing or damaged: the files are read again
        known = read_json(remembered)
    for file in tqdm(files, "comparing files", unit="file", leave=False, delay=2, disable=None):
        stat = os.stat(file)
        state = [stat.st_size, stat.st_mtime_ns]
        path = os.path.abspath(file)
        if known.get(path, [])[:2] != state:
            with open(file, "rb") as content:
                known[path] = [*state, hashlib.file_digest(content, "blake2b").hexdigest()[:32]]
            changed = True
        found.append(known[path][2])
    if changed:
        with suppress(OSError):
            write_json(remembered, known)
    return found


@functools.cache
def docs_hash(cache: str) -> str:
    """A hash of the files that read_docs reads."""
    files = docs_files()
    hashes = content_hashes([path for _, path in files], cache)
    return short_hash(json.dumps([(library, content) for (library, _), content in zip(files, hashes)]))


@functools.cache
def read_docs(cache: str = CACHE) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine; kept in the folder `cache`."""
    cached = Path(cache).expanduser() / f"docs-{docs_hash(cache)}.json"
    with suppress(OSError, ValueError):  # missing or damaged: it is made again
        return [(library, text) for library, text in json.loads(cached.read_bytes())]
    first = {}  # the library in which a text was seen first
    for library, path in tqdm(docs_files(), "reading documentation", unit="file", leave=False, disable=None):
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


# ---- 3. Documents of --data ---------------------------------------------------------------------------------
class Source(NamedTuple):
    """One of the texts that + joins in --data."""
    name: str  # docs, hf:NAME[:CONFIG], or a path as it is given
    kind: str  # docs | hub | files
    files: tuple[Path, ...] = ()
    column: str = "text"  # the field of records that holds the text
    cache: str = CACHE  # the folder where hashes of files, and the documentation, are kept

    def content_hash(self) -> str:
        """A hash of what the source holds; of a data set on the Hub, of its name."""
        if self.kind == "docs":
            return docs_hash(self.cache)
        if self.kind == "hub":
            return short_hash(f"{self.name} {self.column}")
        formats = [format_of(file) for file in self.files]
        return short_hash(repr([self.column, formats, content_hashes(self.files, self.cache)]))


def sources(data: str, column: str = "text", cache: str = CACHE) -> list[Source]:
    """The sources of --data, in a fixed order. UserError if a name in it has no text."""
    names = [data] if Path(data).expanduser().exists() else data.split("+")
    found = []
    for name in names:
        if name == "docs":
            found.append(Source(name, "docs", cache=cache))
        elif name.startswith("hf:") and name != "hf:":
            found.append(Source(name, "hub", column=column))
        else:
            found.append(Source(name, "files", files_in(name), column, cache))
    return found


def text_hash(read: list[Source]) -> str:
    """A hash of what sources hold, together."""
    return short_hash(repr([source.content_hash() for source in read]))


def hub_texts(source: Source) -> Iterator[str]:
    """The texts of the split `train` of hf:NAME[:CONFIG], read as a stream. UserError if that fails."""
    import datasets  # here: it takes a second
    from huggingface_hub.constants import HF_HOME
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    datasets.disable_progress_bars()
    path, _, config = source.name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{source.name}: the folder {path} would be read in its place; start in another folder")
    with suppress(OSError):
        os.makedirs(HF_HOME, exist_ok=True)
    if not os.access(HF_HOME, os.W_OK):
        raise UserError(f"{source.name}: {HF_HOME}, for downloads, cannot be written; set HF_HOME to another folder")
    with readable(source.name, HTTPError, datasets.exceptions.DatasetsError):
        builder = datasets.load_dataset_builder(path, config or None)
        records = builder.as_streaming_dataset(split="train")
        if hasattr(builder.config, "sample_by"):  # text files, read line by line
            yield from grouped(record["text"] + "\n" for record in records)
        else:
            yield from texts_in(records, source.column, source.name)


def texts_of(source: Source) -> Iterator[str]:
    """The texts of a source as they are, "" for those that are missing. UserError for what cannot be read."""
    if source.kind == "docs":
        yield from [text for _, text in read_docs(source.cache)]
    if source.kind == "hub":
        yield from hub_texts(source)
    for file in source.files:
        yield from file_texts(file, source.column)


def stripped(read: list[Source]) -> Iterator[str]:
    """The documents of sources without white space around them; those beyond LONGEST are cut, some can be empty."""
    for source in read:
        yield from map(str.strip, split_long(texts_of(source), LONGEST))


def documents(read: list[Source]) -> Iterator[str]:
    """The documents of sources that are not empty."""
    return filter(None, stripped(read))


# ---- 4. Validation and near-duplicates -------------------------------------------------
def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: those with the lowest hashes do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(text: str) -> set[str]:
    """All NGRAM words in a row, in lower case and split at white space."""
    words = text.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
