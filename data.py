"""From text to rows of tokens: the corpus on your machine, a byte-level BPE, and packed memory-mapped shards.

    python data.py prepare --data PATH|hf:NAME[:CONFIG]|docs --vocab-size 32768 --uncased --out DIR
    python data.py verify --out DIR                         # are all files as they were written?

A prepared folder holds `tokenizer.json` (the `tokenizers` format, which transformers reads too), `meta.json`, and
shards `train-00000.npy`, `val-00000.npy`, ...: NumPy arrays (rows, seq_len) of uint16, or of uint32 where the
vocabulary needs it, memory-mapped when read. A row is `[CLS]` and seq_len - 1 tokens of documents that are
joined by `[SEP]`. A document is in validation if the hash of its text says so: no text is in both parts. With
`--apart` (the default for docs) no run of 13 words is, either: training documents that have one are left out.

The corpus is read twice, for a sample that the tokenizer learns from and for the shards, by one process that others
(`--processes`) tokenize for. The shards are a function of the text and the options alone. A command that ended in any
way continues after its last shard when it is given again. Memory does not grow with the corpus: less than 1 GB with
two processes and 0.1 GB for each further one (the sample, a shard, two blocks a process); `LONGEST` cuts documents.
Only `--apart` needs more: 16 bytes for each word of the validation part.
"""
import argparse
import functools
import hashlib
import importlib.util
import itertools
import json
import mmap
import os
import shlex
import signal
import sys
import sysconfig
import threading
import tokenize
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import tokenizers
from tqdm import tqdm

from files import (RECORDS, UNPACK, Parser, UserError, atomic, claim_folder, clear_errors, compare_runs, docstrings,
                   file_hash, lines, load_hub_dataset, read_json, reading, remembered, remove_temporaries, short_hash,
                   write_json)

SPECIALS = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]  # ids 0 to 3, as in maelm.py: workers need no PyTorch
CLS, SEP, NUM_SPECIAL = SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]"), len(SPECIALS)
SHARD_TOKENS = 1 << 25  # a shard of uint16 is 64 MB
BLOCK_CHARACTERS = 1 << 20  # text that is encoded at a time
LONGEST = 1 << 22  # characters; a longer document, longer than any book, is cut into several
PROCESS_BYTES = 1 << 26  # of text for each process: a small corpus is not worth starting one
CACHE = "~/.cache/maelm"  # where tokenized corpora are kept
VAL_SHARE = 0.01  # of the documents, held out for validation
RUN = 13  # words in a row that make two documents near-duplicates
SAMPLED = 1 << 26  # bytes; a larger file is hashed by samples
VERIFIED_BYTES = 1 << 32  # of shards, at most, that a process verifies when it opens them


# ---- 1. Tokenizer -------------------------------------------------------------------------------------------
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"  # no merge crosses the border of a piece


def byte_letters() -> dict[int, str]:
    """The byte-level alphabet of GPT-2 (Radford et al., 2019): a printable letter for each of the 256 bytes."""
    others = [b for b in range(256) if chr(b) == " " or not chr(b).isprintable()]
    printable = {b: chr(b) for b in range(256) if b not in others}
    return printable | {b: chr(256 + i) for i, b in enumerate(others)}


class Tokenizer:
    """Byte-level BPE, trained and stored by `tokenizers`, run by `tiktoken`. Specials, 256 bytes, merges."""

    def __init__(self, model: tokenizers.Tokenizer):
        self.model = model
        self.uncased = model.normalizer is not None
        byte = {letter: b for b, letter in byte_letters().items()}
        ranks = {}  # the bytes of each token -> its id, which is also the order of the merges
        for token, i in model.get_vocab().items():
            if token not in SPECIALS:
                ranks[bytes(byte[letter] for letter in token)] = i
        splitter = json.loads(model.to_str())["pre_tokenizer"]["pretokenizers"][0]
        self.tiktoken = tiktoken.Encoding("maelm", pat_str=splitter["pattern"]["Regex"], mergeable_ranks=ranks,
                                          special_tokens={name: i for i, name in enumerate(SPECIALS)})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, uncased: bool) -> "Tokenizer":
        """Learn merges until `vocab_size` rows are used, special tokens and bytes included (fewer if the text
        has no more pairs). Ties between equally frequent pairs go to the lower ids."""
        letters = byte_letters()
        learner = tokenizers.Tokenizer(tokenizers.models.BPE())
        dress(learner, uncased)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - NUM_SPECIAL, show_progress=False,
                                                 initial_alphabet=list(letters.values()))
        # tokenizers needs a hundred times the memory of what it is given at once.
        learner.train_from_iterator(cut(texts, 1 << 16), trainer)
        merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
        return cls.of_merges(merges, uncased)  # the learner numbers its tokens otherwise

    @classmethod
    def of_merges(cls, merges: list[tuple[str, str]], uncased: bool, pieces: str = PIECES) -> "Tokenizer":
        """The tokenizer with these merges, in the letters of `byte_letters`, and ids in our order."""
        tokens = SPECIALS + [byte_letters()[b] for b in range(256)] + [a + b for a, b in merges]
        distinct = dict.fromkeys(tokens)  # two merges can make the same token
        vocabulary = {token: i for i, token in enumerate(distinct)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        dress(model, uncased, pieces)
        model.add_special_tokens(SPECIALS)
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json; UserError if it is missing, or not such a file, or not the one that the other
        files of the folder were made with."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; a run folder or a folder made by data.py prepare has one")
        for name in ("meta.json", "progress.json", "config.json"):
            about = read_json(path.with_name(name)) if path.with_name(name).is_file() else {}
            if about.get("tokenizer", file_hash(path)) != file_hash(path):
                raise UserError(f"{path}: damaged or replaced: {name} was written with another one; restore it from a "
                                "copy, or make its folder again")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UserError(f"{path}: not a byte-level BPE in the format of tokenizers ({error})") from error

    def save(self, folder: Path) -> None:
        """Write `folder`/tokenizer.json, atomically."""
        with atomic(Path(folder) / "tokenizer.json") as temporary:
            temporary.write_text(self.model.to_str())

    def __len__(self) -> int:
        return self.tiktoken.n_vocab

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Token ids (length,) uint32. `[MASK]` and its like are plain text unless `special`."""
        if self.uncased:
            text = lower(text)
        if not special:
            return self.tiktoken.encode_to_numpy(text, disallowed_special=())
        for name in SPECIALS:  # which are in upper case
            text = text.replace(name.lower(), name)
        return self.tiktoken.encode_to_numpy(text, allowed_special="all")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, rows that no token uses become nothing."""
        return self.tiktoken.decode([int(i) for i in ids if i < len(self)])


def lower(text: str) -> str:
    """Lower case letter by letter, as in `tokenizers`: Python writes a sigma that ends a word in another way."""
    return text.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()


def dress(model: tokenizers.Tokenizer, uncased: bool, pieces: str = PIECES) -> None:
    """Give a `tokenizers` model the lower-casing and the splitting that `Tokenizer.encode` has."""
    if uncased:
        model.normalizer = tokenizers.normalizers.Lowercase()
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = tokenizers.decoders.ByteLevel()


# ---- 2. Documents -------------------------------------------------------------------------------------------
DOCS_PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib",
                 "pyarrow", "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements install them
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
TEXT_FORMATS = (".txt", ".jsonl", ".parquet")
Part = tuple[str, str]  # of a source: docs, hf or one of TEXT_FORMATS; its name


def docs_files() -> list[tuple[str, Path]]:
    """(library, file) of all Python files of the standard library and of DOCS_PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in DOCS_PACKAGES:
        spec = importlib.util.find_spec(name)  # finds, does not import
        if spec is not None:
            roots += [(name, Path(place)) for place in spec.submodule_search_locations or []]
    found = []
    for library, root in roots:
        for path in sorted(root.rglob("*.py")):
            if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts):
                found.append((library, path))
    return found


@functools.cache
def read_docs(progress: bool = False) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine; in CACHE, as parsing takes a while."""
    kept = Path(CACHE).expanduser() / f"docs-1-{fingerprint(('docs', ''))}.json"  # 1: the version of the format
    return [(library, text) for library, text in remembered(kept, lambda: parse_docs(progress))]


def parse_docs(progress: bool) -> list[tuple[str, str]]:
    """What read_docs returns, from the files."""
    files = docs_files()
    texts = in_order(docstrings, [path for _, path in files], os.cpu_count() or 1)  # parsing: on all cores
    texts = tqdm(texts, "reading documentation", len(files), unit="file", leave=False, disable=not progress)
    first = {}  # the library in which a text was seen first
    for (library, _), found in zip(files, texts):
        for text in found:
            first.setdefault(text, library)
    return [(library, text) for text, library in first.items()]


def read_text(path: Path) -> Iterator[str]:
    """Documents of a .txt file: separated by blank lines."""
    for blank, group in itertools.groupby(lines(path), key=str.isspace):
        if not blank:
            for document in blocks(group, LONGEST):
                yield "".join(document).strip()


def texts_of(records: Iterable[dict], where: str) -> Iterator[str]:
    """The field `text` of records, null ones left out; UserError says where it is missing, or no text."""
    for number, record in enumerate(records, start=1):
        if "text" not in record:
            raise UserError(f"{where}, record {number}: no text column `text`; found: {', '.join(record)}")
        text = record["text"]
        if text is None:
            continue
        if not isinstance(text, str):
            raise UserError(f"{where}, record {number}: its `text` is {str(text)[:50]}, no text; use another column")
        yield text


def cut(texts: Iterable[str], most: int) -> Iterator[str]:
    """Texts in pieces of at most so many characters."""
    for text in texts:
        for start in range(0, len(text), most):
            yield text[start:start + most]


def names_in(source: str) -> list[str]:
    """The names that --data joins by `+`. A path that exists is one name, whatever it contains. UserError if one is
    empty."""
    if source and Path(source).expanduser().exists():
        return [source]
    names = source.split("+")
    if "" in names:
        raise UserError(f"--data {source!r}: a name in it is empty, and no file is called that; give docs, a file, a "
                        "folder or hf:NAME, joined by single +")
    return names


def parts(source: str) -> list[Part]:
    """--data as parts, folders as their files, in a fixed order. UserError if a name has no text."""
    found = []
    for name in names_in(source):
        kind, colon, rest = name.partition(":")
        if kind == "docs" and colon or kind == "hf" and not rest:
            raise UserError(f"--data {name}: give docs, which has no choices, or hf:NAME[:CONFIG]")
        if kind in ("docs", "hf"):
            found.append((kind, rest))
            continue
        path = Path(name).expanduser()
        if not path.exists():
            raise UserError(f"--data {name}: no such file or folder; give one, hf:NAME, or docs")
        files = files_in(path) if path.is_dir() else [path]
        texts = [(text_format(file), str(file)) for file in files if text_format(file)]
        if not texts:
            raise UserError(f"--data {name}: holds no text; use {', '.join(TEXT_FORMATS)}, also .gz or .xz")
        found += texts
    return found


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, in a fixed order: links are followed, what several names lead to is taken once, hidden
    files and folders (such as .ipynb_checkpoints) are left out. UserError for what cannot be read."""
    def refuse(error: OSError) -> None:
        raise UserError(f"--data {folder}: {error.filename} cannot be read ({error.strerror}); mend it, or take it "
                        "out") from error

    found, seen = [], set()
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if os.path.realpath(here) in seen:  # a link has led here
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        for name in sorted(names):
            path = Path(here, name)
            real = os.path.realpath(path)
            if name.startswith(".") or real in seen:
                continue
            if not path.exists():
                raise UserError(f"--data {folder}: {path} is a link to nothing; mend it, or take it out")
            seen.add(real)
            found.append(path)
    return sorted(found)


def text_format(path: Path) -> str | None:
    """Which of TEXT_FORMATS the file `path` has, under .gz or .xz too; None if it has none."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in UNPACK]
    if suffixes and suffixes[-1] in TEXT_FORMATS and path.is_file():
        return suffixes[-1]
    return None


def documents(part: Part) -> Iterator[str]:
    """The texts of one part of a source, those beyond LONGEST cut, empty ones left out."""
    kind, name = part
    if kind == "docs":
        texts = [text for _, text in read_docs(progress=sys.stderr.isatty())]
    elif kind == "hf":
        texts = texts_of(load_hub_dataset(name, "train", streaming=True), f"hf:{name}")
    elif kind == ".txt":
        texts = read_text(Path(name))
    else:
        texts = texts_of(RECORDS[kind](Path(name)), name)
    for text in cut(texts, LONGEST):
        if not text.isspace():
            yield text.encode(errors="replace").decode()  # JSON can hold half a surrogate pair


def files_of(part: Part) -> list[Path]:
    """The files that a part is read from; of a Hub data set, none that we know."""
    kind, name = part
    if kind == "docs":
        return [path for _, path in docs_files()]
    return [] if kind == "hf" else [Path(name)]


def what_is_read(source: str) -> str:
    """The files and bytes that --data reads, in one line, and how many files it leaves out."""
    found = parts(source)
    files = list(itertools.chain.from_iterable(map(files_of, found)))
    said = f"{source}: {len(files):,} files, {sum(path.stat().st_size for path in files):,} bytes"
    left_out = 0
    for name in names_in(source):
        folder = Path(name).expanduser()
        if name != "docs" and folder.is_dir():
            left_out += len([path for path in files_in(folder) if not text_format(path)])
    if left_out:
        said += f"; {left_out:,} of other formats are left out"
    return said


def fingerprint(part: Part) -> str:
    """A hash of what a part contains: of each file's size and bytes, or of the name of a Hub data set. Of a file beyond
    64 MiB, of the time of its last change and of 64 pieces of 1 MiB, evenly spread."""
    kind, name = part
    digest = hashlib.blake2b(f"{kind}:".encode(), digest_size=16)
    if kind == "hf":
        digest.update(name.encode())
    for path in files_of(part):
        with reading(path), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            digest.update(status.st_size.to_bytes(8))
            if status.st_size > SAMPLED:
                digest.update(status.st_mtime_ns.to_bytes(8))
            # Steps of 1 MiB read a file up to 64 MiB as a whole, longer steps a larger one in pieces.
            for start in range(0, status.st_size, max(1 << 20, status.st_size // 64)):
                file.seek(start)
                digest.update(file.read(1 << 20))
    return digest.hexdigest()


# ---- 3. Blocks of documents, in processes ----------------------------------------------------------------------
def blocks(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Group texts, in order, into lists of at least so many characters; the last one may have fewer."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= characters:
            yield block
            block, size = [], 0
    if block:
        yield block


Spot = tuple[int, int]  # part of a source, document in it


def blocks_from(place: Spot, found: list[Part]) -> Iterator[tuple[Spot, list[str]]]:
    """The blocks of all documents from `place` on, each with the place where the next one starts."""
    first, number = place
    for part in range(first, len(found)):
        left = itertools.islice(documents(found[part]), number, None)
        for block in blocks(left, BLOCK_CHARACTERS):
            number += len(block)
            yield (part, number), block
        number = 0


def in_order(function: Callable, items: Iterable, processes: int) -> Iterator:
    """`function` of each item, in order, computed in so many processes (in this one if 1). At most two items a
    process are held. UserError if a process is killed."""
    if processes == 1:
        yield from map(function, items)
        return
    waiting: deque = deque()
    # "spawn", for a fork of a process with threads can hang; the function is sent once, not with every item.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), start_worker, (function,))
    try:
        for item in items:
            with starting():
                waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError("a process was killed, perhaps for want of memory: give fewer --processes; the same command "
                        "continues") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def starting() -> Iterator[None]:
    """While entered, processes start without running the script of this one, which may do its work without
    `if __name__ == "__main__"`, and deaf to Ctrl-C, after which this one stops them."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # of which there is no file to run
    blocks_signals = hasattr(signal, "pthread_sigmask")  # not on Windows
    if blocks_signals:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if blocks_signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = script


def start_worker(function: Callable) -> None:
    """Make this process compute `function` and end with its parent, by Ctrl-C or however that one ends."""
    global work_here
    work_here = function

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    threading.Thread(target=end_with_parent, daemon=True).start()


def work(item: object) -> object:
    """The function of `start_worker`, in a worker."""
    return work_here(item)


def bytes_read(description: str, total: int | None = None, initial: int = 0) -> tqdm:
    """A progress bar in bytes; a line a minute where stderr is no terminal."""
    shown = {}
    if not sys.stderr.isatty():
        end = "" if total is None else ", of {total_fmt}B, {remaining} left"
        shown = {"mininterval": 60, "delay": 60, "bar_format": "{desc}: {n_fmt}B" + end + ", {rate_fmt}\n"}
    return tqdm(desc=description, total=total, initial=initial, unit="B", unit_scale=True, leave=False, miniters=1,
                **shown)


# ---- 4. Packed shards ---------------------------------------------------------------------------------------
def unit_hash(text: bytes) -> float:
    """A number in [0, 1) that is a function of a document alone."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) / 2 ** 32


def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation part: those with the lowest hashes do."""
    return unit_hash(text.encode(errors="replace")) < share


def sample(texts: Iterable[str], val_share: float, most: int) -> tuple[list[bytes], dict]:
    """Training documents of at most `most` bytes in all, UTF-8, from all over the corpus: those with the highest
    hashes, of a share 1, 1/2, 1/4, ... of all documents, the largest that fits. Also what is to be said of it."""
    kept, size, total, held_out, share = [], 0, 0, 0, 1.0
    with bytes_read("reading") as bar:
        for text in map(str.encode, texts):
            total += len(text)
            bar.update(len(text))
            # Hashes below val_share are validation's; the rule takes its share from the other end.
            if unit_hash(text) < val_share:
                held_out += 1
            elif unit_hash(text) >= 1 - share:
                kept.append(text)
                size += len(text)
            while size > most:  # half the share, which keeps what of it has been read so far
                share /= 2
                kept = [text for text in kept if unit_hash(text) >= 1 - share]
                size = sum(map(len, kept))
    rule = f"the training documents among the {share:g} of all with the highest hashes"
    return kept, {"bytes": total, "held_out": held_out, "sample": {"rule": rule, "documents": len(kept), "bytes": size}}


def runs_of_words(text: str) -> np.ndarray:
    """A hash (length,) uint64 of each RUN words in a row, in lower case and split at white space."""
    words = np.array([zlib.crc32(word.encode()) for word in text.lower().split()], np.uint64)
    hashes = np.zeros(max(0, len(words) - RUN + 1), np.uint64)
    for i in range(RUN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[i:i + len(hashes)]
    return hashes


def keep_runs(texts: Iterable[str], val_share: float, runs: list[np.ndarray]) -> Iterator[str]:
    """Pass texts on, and append the runs of words in those of the validation part to `runs`."""
    for text in texts:
        if in_validation(text, val_share):
            runs.append(runs_of_words(text))
        yield text


def shares_a_run(text: str, known: np.ndarray) -> bool:
    """Whether a run of words in the text is among `known` ones, hashes (length,) uint64 in ascending order."""
    if len(known) == 0:
        return False
    runs = runs_of_words(text)
    at = np.searchsorted(known, runs)
    at[at == len(known)] = 0  # beyond all, so equal to none
    return bool((known[at] == runs).any())


class Encoded(NamedTuple):
    """What becomes of a block of documents."""
    place: Spot  # where the next block starts
    size: int  # bytes of text
    streams: dict[str, np.ndarray]  # part -> tokens (length,): its documents, each followed by `[SEP]`
    left_out: list[int]  # training documents with a run of words of a validation document, their bytes


def encode_block(tokenizer: Tokenizer, val_share: float, dtype: np.dtype, apart: Path | None,
                 block: tuple[Spot, list[str]]) -> Encoded:
    """Tokenize the documents of a block, those left out that share a run of words with the file `apart`."""
    place, texts = block
    sep, nothing = np.array([SEP], dtype), np.empty(0, dtype)
    known = np.load(apart, mmap_mode="r") if apart else nothing
    pieces = {"train": [nothing], "val": [nothing]}
    size, left_out = 0, [0, 0]
    for text in texts:
        raw = text.encode()
        size += len(raw)
        part = "val" if unit_hash(raw) < val_share else "train"
        if part == "train" and shares_a_run(text, known):
            left_out = [left_out[0] + 1, left_out[1] + len(raw)]
            continue
        pieces[part] += [tokenizer.encode(text), sep]
    # Token ids are uint32; all of them fit into dtype.
    streams = {part: np.concatenate(found, dtype=dtype, casting="unsafe") for part, found in pieces.items()}
    return Encoded(place, size, streams, left_out)


def pack(stream: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream of tokens (length,) into rows `[CLS]` + n - 1 tokens; returns them (rows, n) and the rest."""
    count = len(stream) // (n - 1)
    body = stream[:count * (n - 1)].reshape(count, n - 1)
    return np.insert(body, 0, CLS, axis=1), stream[count * (n - 1):]


@dataclass
class ShardWriter:
    """Packs the tokens of one part into rows (n,) and writes them as shards."""
    folder: Path
    part: str  # "train" or "val"
    n: int
    shards: list  # (name, rows, checksum) of each shard so far
    min_real: int  # the fewest real tokens in a row so far
    rest: np.ndarray  # the tokens (length,) of a row that is not full yet
    rows: list = field(default_factory=list)  # that are not written yet, (count, n) each
    tokens: int = 0  # in these

    def add(self, stream: np.ndarray) -> None:
        """Append tokens (length,)."""
        rows, self.rest = pack(np.concatenate([self.rest, stream]), self.n)  # (rows, n)
        real = (rows >= NUM_SPECIAL).sum(axis=1)
        useful = real >= self.n // 4  # rows of separators teach nothing
        rows = rows[useful]
        self.min_real = min(self.min_real, int(real[useful].min(initial=self.n)))
        self.rows.append(rows)
        self.tokens += rows.size

    def flush(self) -> None:
        """Write the rows collected so far as the next shard, if there are any."""
        if self.tokens == 0:
            return
        path = self.folder / f"{self.part}-{len(self.shards):05d}.npy"
        rows = np.concatenate(self.rows)
        with atomic(path) as temporary, open(temporary, "wb") as file:
            np.save(file, rows)
        self.shards.append([path.name, len(rows), file_hash(path)])
        self.rows, self.tokens = [], 0


def write_shards(source: str, out: Path, meta: dict, processes: int) -> None:
    """Tokenize the corpus from `meta["progress"]` on. Whenever a part has SHARD_TOKENS, both end a shard, and
    progress.json says what is done: the next document, the bytes, the tokens that wait. At the end it becomes
    meta.json. UserError if a part is too small for a row."""
    dtype = np.dtype(meta["dtype"])
    place, done = meta["progress"]["place"], meta["progress"]["bytes"]  # where the next block starts; what was read
    left_out = meta["left_out"]
    writers = {part: ShardWriter(out, part, meta["seq_len"], meta[part], meta["min_real"], np.array(rest, dtype))
               for part, rest in meta["progress"]["rest"].items()}

    def save() -> None:
        for writer in writers.values():
            writer.flush()
        meta["min_real"] = min(writer.min_real for writer in writers.values())
        meta["left_out"] = left_out
        rest = {part: writer.rest.tolist() for part, writer in writers.items()}
        write_json(out / "progress.json", meta | {"progress": {"place": place, "bytes": done, "rest": rest}})

    # Processes tokenize; this one reads the text, and packs and writes what comes back, in the order of the text.
    apart = out / "apart.npy" if meta["apart"] else None
    encode = functools.partial(encode_block, Tokenizer.load(out), meta["val_share"], dtype, apart)
    processes = min(processes, 1 + max(0, meta["bytes"] - done) // PROCESS_BYTES)
    blocks_left = blocks_from(place, parts(source))
    with bytes_read("tokenizing", total=meta["bytes"], initial=done) as bar:
        for block in in_order(encode, blocks_left, processes):
            for part, writer in writers.items():
                writer.add(block.streams[part])
            place, done = block.place, done + block.size
            left_out = [left_out[0] + block.left_out[0], left_out[1] + block.left_out[1]]
            bar.update(block.size)
            if max(writer.tokens for writer in writers.values()) >= SHARD_TOKENS:
                save()
    for part, writer in writers.items():
        if not meta[part] and writer.tokens == 0:
            discard(out, meta)
            raise too_small(source, part, meta["seq_len"])
    save()
    # meta.json is there if and only if all is done.
    del meta["progress"]
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()


def too_small(source: str, part: str, seq_len: int) -> UserError:
    """What to say of a part without a single row."""
    return UserError(f"--data {source}: its {part} part is too small for one row of seq_len={seq_len} tokens; use more "
                     "text, a smaller --seq-len, or another --val-share")


META = {"vocab_size": int, "seq_len": int, "dtype": str, "min_real": int, "train": list, "val": list}


def read_meta(folder: Path, name: str = "meta.json") -> dict:
    """What data.py has noted about a prepared folder; UserError if that is missing or damaged."""
    return read_json(folder / name, META)


def checksums(meta: dict) -> dict[str, tuple[str | None, int]]:
    """Of each file of a prepared folder, the checksum (None: an earlier version noted none) and the least size."""
    noted = {"tokenizer.json": (meta.get("tokenizer"), 1)}
    if meta.get("apart"):
        noted["apart.npy"] = (meta["runs"], 1)
    row_bytes = meta["seq_len"] * np.dtype(meta["dtype"]).itemsize
    for name, count, *checksum in meta["train"] + meta["val"]:
        noted[name] = (checksum[0] if checksum else None, count * row_bytes)
    return noted


def damages(folder: Path, meta: dict) -> dict[str, str]:
    """The files of a prepared folder that are not as they were written, and what to say of each."""
    found = {}
    for name, (checksum, least) in checksums(meta).items():
        path = folder / name
        if not path.is_file():
            found[name] = f"{path} is missing"
        elif path.stat().st_size < least:
            found[name] = f"{path} is cut off"
        elif checksum not in (None, file_hash(path)):
            found[name] = f"{path} is damaged: its checksum is another"
    return found


def flag(name: str, value: object) -> str:
    """An option as a flag on the command line."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed} {value}"


def mending(folder: Path, meta: dict) -> str:
    """Says which command writes the damaged files of a prepared folder again."""
    options = {"data": shlex.quote(meta.get("source", "...")), "out": shlex.quote(str(folder))}
    for name in ("vocab_size", "seq_len", "uncased", "val_share", "sample_mb", "apart"):
        if name in meta:
            options[name] = meta[name]
    if meta.get("given"):
        options["tokenizer"] = "RUN"
    return "to mend it: python data.py prepare " + " ".join(flag(*option) for option in options.items())


def discard(out: Path, meta: dict) -> None:
    """Remove all that was written of a corpus."""
    shards = [name for name, *_ in meta["train"] + meta["val"]]
    for name in ["meta.json", "progress.json", *shards, "apart.npy", "tokenizer.json"]:
        (out / name).unlink(missing_ok=True)


def fresh(seq_len: int) -> dict:
    """What progress.json says of the shards before the first one."""
    return {"min_real": seq_len, "left_out": [0, 0], "train": [], "val": [],
            "progress": {"place": (0, 0), "bytes": 0, "rest": {"train": [], "val": []}}}


def begun(out: Path, options: dict) -> dict | None:
    """What an earlier command with the same options wrote about `out`; None if nothing that can be continued. Says
    which files are damaged and will be written again. UserError if `out` holds another corpus."""
    name = "meta.json" if (out / "meta.json").is_file() else "progress.json"
    if not (out / name).is_file():
        return None
    meta = read_meta(out, name)
    meta.setdefault("apart", False)  # which earlier versions did not know
    meta.setdefault("given", None)
    unfinished = "progress" in meta
    try:
        compare_runs(out, meta, options)
    except UserError:
        if not unfinished or meta["train"] or meta["val"]:  # that is work to lose
            raise
        discard(out, meta)
        return None
    if unfinished and "tokenizer" not in meta:  # of an earlier version, which noted no checksums
        discard(out, meta)
        return None
    damaged = damages(out, meta)
    for what in damaged.values():
        print(f"{what}; the corpus is written again", file=sys.stderr)
    if "tokenizer.json" in damaged or "apart.npy" in damaged:
        discard(out, meta)
        return None
    if damaged:
        meta.setdefault("tokenizer", file_hash(out / "tokenizer.json"))  # which earlier versions did not note
        meta |= fresh(meta["seq_len"])
        write_json(out / "progress.json", meta)
        (out / "meta.json").unlink(missing_ok=True)
    return meta


def first_pass(source: str, out: Path, options: dict, tokenizer: Path | None) -> dict:
    """Read the text, train the tokenizer on a sample of it or take that of a folder, and note the runs of words of the
    validation part if the others are to be kept apart from it. Returns what progress.json then holds."""
    texts, runs = itertools.chain.from_iterable(map(documents, parts(source))), []
    if options["apart"]:
        texts = keep_runs(texts, options["val_share"], runs)
    kept, facts = sample(texts, options["val_share"], options["sample_mb"] * 10 ** 6)
    for part, found in (("train", kept), ("val", facts["held_out"])):
        if not found:
            raise too_small(source, part, options["seq_len"])
    print(what_is_read(source), flush=True)
    if tokenizer is None:
        Tokenizer.train(map(bytes.decode, kept), options["vocab_size"], options["uncased"]).save(out)
    else:
        with atomic(out / "tokenizer.json") as temporary:
            temporary.write_bytes((tokenizer / "tokenizer.json").read_bytes())
    dtype = "uint16" if options["vocab_size"] <= 1 << 16 else "uint32"
    meta = {"source": source, **options, **facts, "dtype": dtype, "tokenizer": file_hash(out / "tokenizer.json")}
    if options["apart"]:
        with atomic(out / "apart.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, np.unique(np.concatenate(runs)))
        meta["runs"] = file_hash(out / "apart.npy")
    meta |= fresh(options["seq_len"])
    write_json(out / "progress.json", meta)
    return meta


def prepare(source: str, out: Path, vocab_size: int, seq_len: int, uncased: bool, val_share: float,
            sample_mb: int = 200, processes: int | None = None, apart: bool | None = None,
            tokenizer: Path | None = None) -> Path:
    """Train a tokenizer on a `sample` of at most `sample_mb` million bytes, or take that of the folder `tokenizer`, and
    write shards to `out`, in so many processes (default: one per core); or go on with that; or find it done, and whole.
    `apart` (default: for docs) leaves out near-duplicates of validation documents. Returns `out`, after waiting for
    another process that is at work there. UserError for bad, missing or too little text, for an `out` that holds
    something else, and for a tokenizer of another size or case."""
    if apart is None:
        apart = ("docs", "") in parts(source)
    options = {"vocab_size": vocab_size, "seq_len": seq_len, "uncased": uncased, "val_share": val_share,
               "sample_mb": sample_mb, "apart": apart, "content_hash": content_hash(source),
               "given": tokenizer_hash(tokenizer, vocab_size, uncased)}
    with claim_folder(out, "corpus", wait=True):
        remove_temporaries(out)
        # First pass over the text: the tokenizer. The second one is in write_shards.
        meta = begun(out, options) or first_pass(source, out, options, tokenizer)
        if "progress" in meta:
            write_shards(source, out, meta, processes or os.cpu_count() or 1)
    return out


def tokenizer_hash(folder: Path | None, vocab_size: int, uncased: bool) -> str | None:
    """The hash of the tokenizer of a folder; UserError if it does not fit. None: the corpus has one of its own."""
    if folder is None:
        return None
    there = Tokenizer.load(folder)
    if len(there) > vocab_size or there.uncased != uncased:
        raise UserError(f"{folder}: its tokenizer needs {flag('uncased', there.uncased)} and --vocab-size {len(there)} "
                        "or more, as the run has that will read the corpus")
    return file_hash(folder / "tokenizer.json")


def content_hash(source: str) -> str:
    """A hash of all that --data reads."""
    return short_hash(" ".join(map(fingerprint, parts(source))))


def prepared_folder(source: str) -> Path | None:
    """The folder that --data names, if data.py prepare made it; UserError if that is not finished."""
    if source == "":  # would be the current folder; `parts` says what is wrong with it
        return None
    folder = Path(source).expanduser()
    if (folder / "meta.json").is_file():
        return folder
    if (folder / "progress.json").is_file():
        raise UserError(f"--data {source}: not finished; give the command data.py prepare again, which continues")
    return None


def corpus(source: str, cache: Path, vocab_size: int, seq_len: int, uncased: bool, val_share: float,
           tokenizer: Path | None = None) -> Path:
    """The folder of shards for `source`: itself if data.py prepare made it, else prepared once below `cache`
    and found again by the hash of its content and of these arguments."""
    folder = prepared_folder(source)
    if folder is not None:
        return folder
    key = [content_hash(source), vocab_size, seq_len, uncased, val_share, 3]  # the last one: the version of the format
    if tokenizer is not None:
        key.append(tokenizer_hash(tokenizer, vocab_size, uncased))
    folder = cache.expanduser() / short_hash(json.dumps(key))
    if not (folder / "meta.json").is_file():
        prepare(source, folder, vocab_size, seq_len, uncased, val_share, tokenizer=tokenizer)
    return folder


def compare_made(folder: Path, meta: dict, wanted: dict) -> None:
    """UserError if a prepared folder was made with other options than those `wanted`."""
    for name, value in wanted.items():
        if meta.get(name, value) != value:
            raise UserError(f"{folder}: prepared with {name}={meta[name]}, this run has {value}: pass "
                            f"{flag(name, meta[name])} or prepare it again")


def check_prepared(source: str, given: dict) -> None:
    """UserError if --data is a prepared folder that was made with another `uncased` or `val_share` than those given."""
    folder = prepared_folder(source)
    if folder is not None:
        compare_made(folder, read_meta(folder), given)


def corpus_identity(folder: Path) -> dict[str, str]:
    """Hashes of the rows of a prepared folder and of its tokenizer: what a run must find again to continue."""
    meta = read_meta(folder)
    rows = [meta.get("content_hash"), meta["train"], meta["val"]]
    return {"corpus": short_hash(json.dumps(rows)), "tokenizer": file_hash(folder / "tokenizer.json")}


# ---- 5. Rows of a step --------------------------------------------------------------------------------------
def open_shard(path: Path, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Memory-map a shard; UserError if its header is not what meta.json says."""
    try:
        shard = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise UserError(f"{path}: not a readable shard ({error})") from error
    if shard.shape != shape or shard.dtype != dtype:
        raise UserError(f"{path}: bad header: {shard.dtype} {shard.shape}, meta.json says {dtype} {shape}")
    if hasattr(mmap, "MADV_RANDOM"):  # rows are drawn at random: do not read what lies around each
        shard.base.madvise(mmap.MADV_RANDOM)
    return np.asarray(shard)  # the same memory; a row of a memmap takes four times as long to take


class Rows:
    """All rows of one part ("train", "val") of a prepared folder, memory-mapped. Of `world` processes each verifies
    its share of the shards, at most VERIFIED_BYTES. UserError for a bad shard, and for a folder of other sizes."""

    def __init__(self, folder: Path, part: str, vocab_size: int, seq_len: int, rank: int = 0, world: int = 1):
        meta = read_meta(folder)
        compare_made(folder, meta, {"seq_len": seq_len, "vocab_size": vocab_size})
        self.min_real, self.vocab_size = meta["min_real"], vocab_size
        noted, left = checksums(meta), VERIFIED_BYTES
        self.mending = mending(folder, meta)
        try:
            for name, *_ in meta[part][rank::world]:
                checksum, size = noted[name]
                left -= size
                if left > 0 and checksum not in (None, file_hash(folder / name)):
                    raise UserError(f"{folder / name} is damaged: its checksum is another")
            self.shards = [open_shard(folder / name, (count, seq_len), meta["dtype"]) for name, count, *_ in meta[part]]
        except (UserError, FileNotFoundError) as error:
            raise UserError(f"{error}; {self.mending}") from error
        # Row i is in the first shard whose end is above i.
        self.ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Rows (B, seq_len) int64 at indices (B,); UserError if a token id is beyond the vocabulary."""
        shard = np.searchsorted(self.ends, indices, side="right")
        # i - ends[s] counts from the end of shard s.
        rows = np.stack([self.shards[s][i - self.ends[s]] for s, i in zip(shard, indices)]).astype(np.int64)
        if rows.max() >= self.vocab_size:
            bad = indices[(rows >= self.vocab_size).any(axis=1)][0]
            raise UserError(f"row {bad} holds token id {rows.max()}, but vocab_size={self.vocab_size}: the shards "
                            f"are damaged or of another tokenizer; {self.mending}")
        return rows


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of uint64 to uint64 of any shape (the finalizer of SplitMix64, Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """One seed in [0, 2^63) from several whole numbers, such as (seed, step)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state + np.uint64(0x9E3779B97F4A7C15) + np.array([part], np.int64).view(np.uint64))
    return int(state[0] >> np.uint64(1))


def rows_of_step(seed: int, step: int, batch_size: int, total: int) -> np.ndarray:
    """Row numbers (batch_size,) int64 of a step: every epoch is a new permutation of all `total` rows, without
    replacement, and a pure function of (seed, epoch). Nothing as large as the corpus is ever stored: the
    permutation is a Feistel network over 2h bits, applied until the number falls below `total`."""
    sample = step * batch_size + np.arange(batch_size)  # numbered from the start of training
    epoch, x = sample // total, (sample % total).astype(np.uint64)
    # The smallest network that holds all numbers below total: two halves of h bits each.
    h = np.uint64(max(1, (total.bit_length() + 1) // 2))
    low = np.uint64((1 << int(h)) - 1)
    rounds = np.array([[seed_of(seed, r) for r in range(4)]], np.uint64)
    keys = mix(rounds + epoch[:, None].astype(np.uint64))  # (batch_size, 4)
    outside = np.ones(batch_size, bool)
    while outside.any():
        left, right = x >> h, x & low
        for key in keys.T:
            left, right = right, left ^ (mix(right + key) & low)
        # Numbers below total are done; the others are permuted again, which ends on their cycle.
        x = np.where(outside, left << h | right, x)
        outside = x >= total
    return x.astype(np.int64)


# ---- 6. Command line ----------------------------------------------------------------------------------------
def verify(folder: Path) -> None:
    """Say of each file of a prepared folder that is not as it was written what is wrong; then exit with code 2."""
    meta = read_meta(prepared_folder(str(folder)) or folder)
    damaged = damages(folder, meta)
    for what in damaged.values():
        print(f"data.py: {what}; {mending(folder, meta)}", file=sys.stderr)
    if damaged:
        sys.exit(2)
    if "tokenizer" not in meta:
        print(f"{folder} is of an earlier version, without checksums: only the sizes of its files were compared")
    print(f"{folder}: {len(checksums(meta))} files are whole")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="data.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["prepare", "verify"], help="verify needs --out alone")
    add("--data", default="docs", help="docs, a file, a folder, hf:NAME[:CONFIG]; joined by +")
    add("--out", type=Path, required=True, help="folder for the tokenizer and the shards")
    add("--vocab-size", type=int, default=32768, help="special tokens, bytes and merges in all")
    add("--seq-len", type=int, default=512, help="tokens in a row")
    add("--uncased", action=argparse.BooleanOptionalAction, default=True, help="lower-case all text")
    add("--val-share", type=float, default=VAL_SHARE, help="share of documents held out")
    add("--sample-mb", type=int, default=200, help="the tokenizer learns from at most so many million bytes: the "
        "training documents with the highest hashes, from all over the corpus")
    add("--tokenizer", type=Path, help="take the tokenizer of this folder, such as a run's, and learn none")
    add("--apart", action=argparse.BooleanOptionalAction, help=f"leave out training documents that share {RUN} words "
        "in a row with a validation document [for docs]")
    add("--processes", type=int, default=os.cpu_count() or 1, help="that tokenize; any number gives the same files"
        " [%(default)s]")
    arguments = vars(parser.parse_args(argv))
    for name, least in (("vocab_size", 261), ("seq_len", 2), ("sample_mb", 1), ("processes", 1)):
        if arguments[name] < least:
            parser.error(f"--{name.replace('_', '-')} {arguments[name]}: use at least {least}")
    if not 0 < arguments["val_share"] < 1:
        parser.error(f"--val-share {arguments['val_share']}: use a number between 0 and 1")
    command, source = arguments.pop("command"), arguments.pop("data")
    with clear_errors("data.py"):
        if command == "verify":
            verify(arguments["out"])
            return
        folder = prepare(source, **arguments)
        meta = read_meta(folder)
        rows = {part: sum(count for _, count, *_ in meta[part]) for part in ("train", "val")}
        print(f"{folder}: {rows['train']:,} training and {rows['val']:,} validation rows of {meta['seq_len']} tokens")
        if meta.get("apart"):
            print(f"left out as near-duplicates of validation documents: {meta['left_out'][0]:,} training documents, "
                  f"{meta['left_out'][1] / meta['bytes']:.1%} of all text")


if __name__ == "__main__":
    import data  # by its name, under which other processes find its functions
    data.main()
