"""From text to rows of tokens: the corpora, their packing into memory-mapped rows, the rows of each step.

A prepared corpus lies in --cache, in a folder named by a hash of what was read and how. It holds `tokenizer.json`,
`meta.json`, `train.bin` and `val.bin`: (rows, seq_len) uint16, or uint32. A row is `[CLS]` and seq_len - 1 tokens of
documents that are joined by `[SEP]`. A hash of each document decides whether it is validation.
"""
import ast
import functools
import glob
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
import shutil
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from maelm import CLS, NUM_SPECIAL, SEP
from support.files import UserError, read_json, root_cause, short_hash, write_json
from support.tokenizer import Tokenizer, split_long

CACHE = "~/.cache/maelm"  # where tokenized corpora are kept
VAL_SHARE = 0.01  # of the documents, held out for validation
BLOCK = 1 << 20  # characters that a thread tokenizes at a time
LONGEST = 1 << 22  # characters; a longer document, longer than any book, is cut
SAMPLE = 200 * 10 ** 6  # characters that the tokenizer learns from, at most
NGRAM = 13  # words in a row that make two documents near-duplicates


# ---- 1. The documentation on this machine: --data docs ------------------------------------------------------
DOCS_PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib",
                 "pyarrow", "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements install them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code


def docs_files() -> list[tuple[str, Path]]:
    """(library, file) of all Python files of the standard library and of DOCS_PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in DOCS_PACKAGES:
        spec = importlib.util.find_spec(name)  # finds, does not import
        if spec is not None:
            roots += [(name, Path(folder)) for folder in spec.submodule_search_locations or []]
    found = []
    for library, root in roots:
        for path in sorted(root.rglob("*.py")):
            if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts):
                found.append((library, path))
    return found


@functools.cache
def read_docs() -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine; in CACHE, as parsing takes a while."""
    files = docs_files()
    cached = Path(CACHE).expanduser() / f"docs-{short_hash(file_states(path for _, path in files))}.json"
    if cached.is_file():
        return [(library, text) for library, text in read_json(cached)]
    first = {}  # the library in which a text was seen first
    for library, path in tqdm(files, "reading documentation", unit="file", leave=False, disable=None):
        for text in docstrings(path):
            first.setdefault(text, library)
    docs = [(library, text) for text, library in first.items()]
    write_json(cached, docs)
    return docs


def docstrings(path: Path) -> list[str]:
    """All documentation strings of a Python file: docstrings, `add_docstr(f, "...")` and help topics."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
BROKEN = (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError)  # raised for files that cannot be read


class Part(NamedTuple):
    """A part of --data that is read at once."""
    name: str  # docs, hf:NAME[:CONFIG], or as it is given
    loader: str  # docs, hub, or one of `datasets`
    files: tuple[str, ...] = ()
    column: str = "text"  # the field of its records that holds the text


def parts(source: str, column: str = "text") -> list[Part]:
    """--data as parts in a fixed order. UserError if a name in it has no text."""
    names = [source] if source and Path(source).expanduser().exists() else source.split("+")
    found = []
    for name in names:
        if name == "docs":
            found.append(Part(name, "docs"))
        elif name.startswith("hf:") and name != "hf:":
            found.append(Part(name, "hub", column=column))
        else:
            by_loader = {}
            for path in files_in(name) if name else []:
                by_loader.setdefault(loader_of(path), []).append(str(path))
            by_loader.pop(None, None)
            if not by_loader:
                raise UserError(f"--data {source}: {name!r} is not docs, hf:NAME, or a file or folder with "
                                f"{', '.join(FORMATS)}, also packed")
            for loader, files in by_loader.items():
                found.append(Part(name, loader, tuple(files), "text" if loader == "text" else column))
    return found


def files_in(name: str) -> list[Path]:
    """The files that a path or a pattern such as texts/*.txt names, and all in its folders but hidden ones."""
    found = []
    given = Path(name).expanduser()
    for path in [given] if given.exists() else sorted(map(Path, glob.glob(str(given)))):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                found.append(file)
    return found


def loader_of(path: Path) -> str | None:
    """The loader of `datasets` for a file, by its suffix without those of packing; None if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def load(loader: str, files: Iterable[str], name: str, **options) -> Iterator[dict]:
    """The records that `datasets` reads from files, or of the Hub's `name` without files. UserError if it cannot."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what we say
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if loader == "hub":
            path, _, config = name.removeprefix("hf:").partition(":")
            if Path(path).exists():
                raise UserError(f"{name}: the folder {path} would be read in its place; start in another folder")
            if hasattr(datasets.load_dataset_builder(path, config or None).config, "sample_by"):
                options["sample_by"] = "paragraph"  # text files, as those on this machine
            found = datasets.load_dataset(path, config or None, **{"split": "train", "streaming": True} | options)
        else:
            found = datasets.load_dataset(loader, data_files=list(files), split="train", streaming=True, **options)
        yield from found
    except (*BROKEN, RuntimeError, datasets.exceptions.DatasetsError, HTTPError) as error:  # RuntimeError: a script
        raise UserError(f"{name}: cannot be read ({root_cause(error)})") from error


def documents(part: Part) -> Iterator[str]:
    """The texts of a part; those beyond LONGEST are cut, and empty ones left out."""
    if part.loader == "docs":
        texts = (text for _, text in read_docs())
    else:
        options = {"sample_by": "paragraph"} if part.loader == "text" else {}
        texts = (text_of(record, part) for record in load(part.loader, part.files, part.name, **options))
    for text in split_long(texts, LONGEST):
        if text.strip():
            yield text.strip()


def text_of(record: dict, part: Part) -> str:
    """The text in a record, "" for null. UserError if it has no such field."""
    if not isinstance(record.get(part.column, 0), str | None):
        raise UserError(f"{part.name}: its records need a field `{part.column}`; --column can be {', '.join(record)}")
    return record[part.column] or ""


def file_states(files: Iterable[Path]) -> str:
    """Names, sizes and times of files: what tells that they have changed."""
    states = [(str(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return json.dumps(states)


def identity(source: str) -> list[str]:
    """What a corpus is known by: its parts, and the names, sizes and times of their files."""
    found = []
    for part in parts(source):
        files = [path for _, path in docs_files()] if part.loader == "docs" else map(Path, part.files)
        found.append(part.name + file_states(files))
    return found


# ---- 3. Validation, near-duplicates, the tokenizer's sample -------------------------------------------------
def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation part: those with the lowest hashes do."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2 ** 32 < share


def ngrams(text: str) -> set[str]:
    """All NGRAM words in a row, in lower case and split at white space."""
    words = text.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def validation_ngrams(read: list[Part], val_share: float) -> set[str]:
    """The ngrams of all validation documents; none if no part is docs, whose texts repeat a lot."""
    found = set()
    if any(part.loader == "docs" for part in read):
        for text in itertools.chain.from_iterable(map(documents, read)):
            if in_validation(text, val_share):
                found |= ngrams(text)
    return found


def sample(read: list[Part], val_share: float) -> Iterator[str]:
    """Training documents for the tokenizer: of each part the first ones, SAMPLE characters over all parts."""
    for part in read:
        left = SAMPLE // len(read)
        for text in documents(part):
            if left <= 0:
                break
            if not in_validation(text, val_share):
                left -= len(text)
                yield text


# ---- 4. Packed rows -----------------------------------------------------------------------------------------
def blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts, in order, in lists of at least BLOCK characters; the last one may have fewer."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def in_threads(function: Callable, items: Iterable) -> Iterator:
    """`function` of each item, in order, in threads; only a few items are held at a time."""
    items = iter(items)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(items, 64)):
            yield from pool.map(function, group)


class EncodedBlock(NamedTuple):
    """A block of documents as tokens."""
    streams: dict[str, np.ndarray]  # train, val -> tokens (length,), each document followed by `[SEP]`
    size: int  # characters
    left_out: int  # training documents that share an ngram with a validation document


def encode_block(texts: list[str], tokenizer: Tokenizer, val_share: float, known: set[str]) -> EncodedBlock:
    """Tokenize documents; training documents that have one of the `known` ngrams are left out."""
    separator = np.array([SEP], np.uint32)
    pieces = {"train": [separator[:0]], "val": [separator[:0]]}
    left_out = 0
    for text in texts:
        part = "val" if in_validation(text, val_share) else "train"
        if part == "train" and known and not known.isdisjoint(ngrams(text)):
            left_out += 1
        else:
            pieces[part] += [tokenizer.encode(text), separator]
    streams = {part: np.concatenate(found) for part, found in pieces.items()}
    return EncodedBlock(streams, sum(map(len, texts)), left_out)


class RowWriter:
    """Packs the tokens of one part into rows `[CLS]` + n - 1 tokens, and appends them to a file."""
    def __init__(self, path: Path, n: int, dtype: str):
        self.path, self.n, self.dtype = path, n, dtype
        self.rest = np.empty(0, np.uint32)  # tokens that fill no row yet
        self.count = 0  # rows
        self.min_real = n  # the fewest real tokens in a row

    def add(self, stream):
        """Append tokens (length,)."""
        stream = np.concatenate([self.rest, stream])
        body, self.rest = np.split(stream, [len(stream) // (self.n - 1) * (self.n - 1)])
        rows = np.insert(body.reshape(-1, self.n - 1), 0, CLS, axis=1)
        real = (rows >= NUM_SPECIAL).sum(axis=1)
        useful = real >= self.n // 4  # skip rows that are almost only [SEP]
        with open(self.path, "ab") as file:
            file.write(rows[useful].astype(self.dtype).tobytes())
        self.count += int(useful.sum())
        self.min_real = int(real[useful].min(initial=self.min_real))


def prepare(source: str, folder: Path, vocab_size: int, seq_len: int, uncased: bool, val_share: float,
            column: str = "text", tokenizer: Tokenizer | None = None):
    """Write tokenizer, rows and meta.json to `folder`. UserError for text that is missing, bad or too little."""
    read = parts(source, column)
    if tokenizer is None:
        # One pass over a sample for the tokenizer, and one over all for the rows.
        texts = tqdm(sample(read, val_share), "tokenizer's sample", unit=" texts", leave=False, disable=None)
        tokenizer = Tokenizer.train(list(texts), vocab_size, uncased)  # a list: learning does not hear Ctrl-C
    tokenizer.save(folder)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    writers = {part: RowWriter(folder / f"{part}.bin", seq_len, dtype) for part in ("train", "val")}
    encode = partial(encode_block, tokenizer=tokenizer, val_share=val_share, known=validation_ngrams(read, val_share))
    texts = itertools.chain.from_iterable(map(documents, read))
    left_out = 0
    with tqdm(desc="tokenizing", unit=" characters", unit_scale=True, mininterval=10, delay=10) as bar:
        for block in in_threads(encode, blocks(texts)):
            for part, stream in block.streams.items():
                writers[part].add(stream)
            left_out += block.left_out
            bar.update(block.size)
        characters = bar.n
    for part, writer in writers.items():
        if writer.count == 0:
            raise UserError(f"--data {source}: its {part} part is too small for one row of seq_len={seq_len} tokens; "
                            "use more text, a smaller --seq-len, or another --val-share")
    write_json(folder / "meta.json", {
        "source": source, "characters": characters, "left_out": left_out, "dtype": dtype,
        "min_real": min(writer.min_real for writer in writers.values()),
        **{part: (writer.count, seq_len) for part, writer in writers.items()}})


def corpus_folder(source: str, cache: str, tokenizer: Tokenizer | None = None, **how) -> Path:
    """Where the rows of `source` are, or will be; `how` are the other arguments of `prepare`."""
    known = "" if tokenizer is None else short_hash(tokenizer.model.to_str())
    return Path(cache).expanduser() / short_hash(json.dumps(["rows", identity(source), known, sorted(how.items())]))


def corpus(source: str, cache: str, **how) -> Path:
    """The folder of rows of `source`. If it is not there, one process prepares it, and the others wait."""
    folder = corpus_folder(source, cache, **how)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            # Until it is whole it has another name: a preparation that was killed starts again.
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                prepare(source, unfinished, **how)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


# ---- 5. Rows of a step --------------------------------------------------------------------------------------
class Rows:
    """All rows of one part ("train", "val") of a prepared corpus, memory-mapped."""
    def __init__(self, folder: Path, part: str):
        meta = read_json(folder / "meta.json")
        self.min_real = meta["min_real"]
        self.rows = np.memmap(folder / f"{part}.bin", meta["dtype"], "r", shape=tuple(meta[part]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices):
        """Rows (B, seq_len) int64 at indices (B,)."""
        return np.asarray(self.rows[indices], np.int64)


def seed_of(*numbers: int) -> int:
    """One seed in [0, 2^63) from whole numbers, such as (seed, step)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@functools.lru_cache(maxsize=2)  # a step can be in two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order (total,) int64 of the rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def rows_of_step(seed: int, step: int, batch_size: int, total: int):
    """Row numbers (batch_size,) int64 of a step: every epoch is a new permutation of all `total` rows."""
    sample = step * batch_size + np.arange(batch_size)  # numbered from the start of training
    epochs = sample // total
    rows = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permutation(seed, int(epoch), total)[sample[here] % total]
    return rows
