"""From --data to a prepared corpus: documents, which of them are validation, and their tokens.

A prepared corpus is a folder in --cache, named by a hash of what was read and how. `train.bin` and `val.bin` hold
tokens, uint16 or uint32, with `[SEP]` after each document. `meta.json`, written last, tells whether all is there.
"""
import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from maelm import SEP, Config
from support.cli import UserError, root_cause
from support.docs_corpus import CACHE, docs_files, file_states, read_docs
from support.records import read_records
from support.run_folder import read_json, short_hash, write_json
from support.tokenizer import Tokenizer, split_long

LAYOUT = 2  # version of the files of a prepared corpus: one of another version is not found
SPLITS = ("train", "val")
VAL_SHARE = 0.01  # of the documents, held out for validation
LONGEST = 1 << 22  # characters; a longer document, longer than any book, is cut
SAMPLE = 200 * 10 ** 6  # characters that the tokenizer learns from, at most
LARGEST = 1 << 20  # vocabulary, more than any in use; far beyond it `tokenizers` ends the program
NGRAM = 13  # words in a row that make two documents near-duplicates


# ---- 1. Documents of --data ---------------------------------------------------------------------------------
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


# ---- 2. Validation, near-duplicates, the tokenizer's sample -------------------------------------------------
def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: those with the lowest hashes do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(text: str) -> set[str]:
    """All NGRAM words in a row, in lower case and split at white space."""
    words = text.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def sample(read: list[Source], val_share: float) -> Iterator[str]:
    """Training documents for the tokenizer: of each source the first ones, SAMPLE characters over all sources."""
    for source in read:
        left = SAMPLE // len(read)
        for text in documents([source]):
            if left <= 0:
                break
            if not in_validation(text, val_share):
                left -= len(text)
                yield text


# ---- 3. Documents as tokens ---------------------------------------------------------------------------------
def in_threads(function: Callable[[list[str]], list], texts: Iterator[str]) -> Iterator[list]:
    """`function` of lists of texts, in order, in threads; only a few hundred texts are held at a time."""
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(texts, 256)):
            yield from pool.map(function, [group[i:i + 16] for i in range(0, len(group), 16)])


def encode_block(texts: list[str], tokenizer: Tokenizer, val_share: float, known: set[str]) -> list[tuple]:
    """Split and tokens (length,) uint32 of each text, with `[SEP]`; not of training texts that have `known` ngrams."""
    found = []
    for text in texts:
        split = "val" if in_validation(text, val_share) else "train"
        if split == "val" or not known or known.isdisjoint(ngrams(text)):
            found.append((split, np.append(tokenizer.encode(text), np.uint32(SEP))))
    return found


# ---- 4. A prepared corpus -----------------------------------------------------------------------------------
class CorpusConfig(NamedTuple):
    """What a corpus is made of, and how."""
    data: str
    cache: str
    vocab_size: int
    uncased: bool
    val_share: float
    column: str = "text"
    tokenizer: Tokenizer | None = None  # without one, it is learned


def corpus_settings(config: Config, settings: dict, tokenizer: Tokenizer | None) -> CorpusConfig:
    """The corpus of a run, from its config.json, with a given tokenizer. UserError for a vocabulary that cannot be."""
    if config.vocab_size > LARGEST:
        raise UserError(f"vocab_size={config.vocab_size}: use at most {LARGEST:,}")
    given = settings.get("init") or settings.get("tokenizer")
    return CorpusConfig(settings["data"], settings["cache"], config.vocab_size, settings["uncased"],
                        settings["val_share"], settings.get("column", "text"), tokenizer if given else None)


def prepare(wanted: CorpusConfig, read: list[Source], folder: Path):
    """Write a corpus, read from sources, to `folder`. UserError for text that is missing or bad."""
    tokenizer = wanted.tokenizer
    if tokenizer is None:
        texts = tqdm(sample(read, wanted.val_share), "tokenizer's sample", unit=" texts", leave=False, disable=None)
        # A list: learning does not hear Ctrl-C.
        tokenizer = Tokenizer.train(list(texts), wanted.vocab_size, wanted.uncased)
    tokenizer.save(folder)
    known = set()
    if any(source.loader == "docs" for source in read):  # whose texts repeat a lot
        known = known.union(*[ngrams(text) for text in documents(read) if in_validation(text, wanted.val_share)])
    texts = iter(tqdm(documents(read), "tokenizing", unit=" texts", mininterval=10, delay=10))
    dtype = "uint16" if wanted.vocab_size <= 1 << 16 else "uint32"
    tokens = dict.fromkeys(SPLITS, 0)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for block in in_threads(lambda part: encode_block(part, tokenizer, wanted.val_share, known), texts):
            for split, stream in block:
                files[split].write(stream.astype(dtype).tobytes())
                tokens[split] += len(stream)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave meta.json without them
    write_json(folder / "meta.json", {"data": wanted.data, "dtype": dtype, "tokens": tokens,
                                      "tokenizer": short_hash((folder / "tokenizer.json").read_bytes())})


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared corpus. UserError if a file is missing, cut or of another corpus."""
    with suppress(FileNotFoundError, UserError, KeyError, TypeError):
        meta = read_json(folder / "meta.json")
        sizes = [meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize for split in SPLITS]
        there = [(folder / f"{split}.bin").stat().st_size for split in SPLITS]
        if sizes == there and meta["tokenizer"] == short_hash((folder / "tokenizer.json").read_bytes()):
            return meta
    raise UserError(f"{folder}: this prepared corpus is damaged or incomplete; delete it, and it is made again")


def prepared_corpus(wanted: CorpusConfig) -> Path:
    """The folder of a corpus, which one process prepares if it is not there. UserError for damage or bad text."""
    read = sources(wanted.data, wanted.column, wanted.cache)
    states = [(source.name, source.column, file_states(source.files)) for source in read]
    tokenizer = None if wanted.tokenizer is None else wanted.tokenizer.model.to_str()
    made_of = LAYOUT, states, wanted.vocab_size, wanted.uncased, wanted.val_share, tokenizer
    folder = Path(wanted.cache).expanduser() / short_hash(repr(made_of))
    meta = folder / "meta.json"
    if not meta.is_file():  # otherwise nothing is written: the disk may be read-only
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            try:
                if not meta.is_file():
                    prepare(wanted, read, folder)
            except (MemoryError, OSError) as error:
                raise UserError(f"{folder}: not prepared ({root_cause(error)}); is memory or disk full?") from error
    read_meta(folder)
    return folder
