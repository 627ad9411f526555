"""From --data to a prepared corpus: documents, which of them are validation, and their tokens.

A prepared corpus is a folder in --cache, named by a hash of what was read and how. `train.bin` and `val.bin` hold
tokens, uint16 or uint32, with `[SEP]` after each document. `meta.json`, written last, tells whether all is there.
"""
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from tqdm import tqdm

from maelm import CLS, NUM_SPECIAL, SEP, Config
from support.cli import UserError, root_cause
from support.documents import Source, documents, file_states, in_validation, ngrams, sources
from support.files import read_json, short_hash, write_json
from support.tokenizer import Tokenizer

LAYOUT = 2  # version of the files of a prepared corpus: one of another version is not found
SPLITS = ("train", "val")
SAMPLE = 200 * 10 ** 6  # characters that the tokenizer learns from, at most
LARGEST = 1 << 20  # vocabulary, more than any in use; far beyond it `tokenizers` ends the program


# ---- 1. The tokenizer's sample -----------------------------------------------------------------------------
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


# ---- 2. Documents as tokens ---------------------------------------------------------------------------------
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


# ---- 3. A prepared corpus -----------------------------------------------------------------------------------
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


# ---- 4. From a prepared corpus to the rows of a step -------------------------------------------------------
class Rows:
    """All rows of a split ("train", "val"): `[CLS]` and the next seq_len - 1 tokens of a prepared corpus, which stay
    on the disk until they are read. UserError if the corpus is damaged, or too small for a row."""
    def __init__(self, folder: Path, split: str, seq_len: int):
        meta = read_meta(folder)
        tokens = meta["tokens"][split]
        count = tokens // (seq_len - 1)
        if count == 0:
            raise UserError(f"--data {meta['data']}: its {split} split has {tokens} tokens, too few for a row of "
                            f"seq_len={seq_len}; use more text, a smaller --seq-len, or another --val-share")
        self.pieces = np.memmap(folder / f"{split}.bin", meta["dtype"], "r", shape=(count, seq_len - 1))
        self.vocabulary = len(read_json(folder / "tokenizer.json")["model"]["vocab"])

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, indices):
        """Rows (B, seq_len) int64 at indices (B,). UserError for ids that the text of a corpus cannot have."""
        found = np.asarray(self.pieces[indices], np.int64)
        if found.min() < SEP or found.max() >= self.vocabulary:
            raise UserError(f"{self.pieces.filename}: damaged; delete its folder, and it is made again")
        return np.insert(found, 0, CLS, axis=1)

    def fewest_real_tokens(self) -> int:
        """The fewest tokens in a row that are not special. It reads the whole text."""
        return int(np.count_nonzero(self.pieces >= NUM_SPECIAL, axis=1).min())


def evenly(rows: Rows | np.ndarray, most: int):
    """At most so many of the rows, spaced evenly over the whole text: a tensor (rows, seq_len) int64."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)
    return torch.from_numpy(rows[indices])


def unigram_entropy(tokens) -> float:
    """Entropy in nats of real tokens: the loss of a model that knows only how frequent each token is."""
    real = tokens[tokens >= NUM_SPECIAL]
    return float(torch.special.entr(real.bincount().double() / len(real)).sum())


def seed_of(*numbers: int) -> int:
    """One seed in [0, 2^63) from whole numbers, such as (seed, step)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@functools.lru_cache(maxsize=2)  # a step can be in two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order (total,) int64 of the rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def rows_of_step(seed: int, step: int, batch_size: int, total: int):
    """Row numbers (batch_size,) int64 of a step: every epoch is a new permutation of all `total` rows."""
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), total)
    rows = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(rows)
