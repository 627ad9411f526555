"""From --data to a prepared corpus: documents, their split into training and validation, their tokens, and sequences.

A prepared corpus is a folder in --cache, named after a hash of the text and of how it was prepared. `train.bin` and
`val.bin` hold tokens, uint16 or uint32, with `[SEP]` after each document; `meta.json` is written last.
"""
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from maelm import CLS, NUM_SPECIAL, SEP
from support.program.cli import path_of
from support.program.errors import UserError, say
from support.program.files import code_hashes, lock_folder, read_json, short_hash, sync, write_json, write_text
from support.text.documents import Source, documents, read_docs, sources, text_hash
from support.text.tokenizer import Tokenizer

SPLITS = ("train", "val")
VAL_SHARE = 0.01  # fraction of the documents held out for validation
NGRAM = 13  # documents that share this many consecutive words are near-duplicates
SAMPLE = 200 * 10 ** 6  # largest number of bytes that the tokenizer learns from
BATCH = 1 << 22  # characters that are tokenized at a time
CODE = [f"support/text/{name}.py" for name in ("corpus", "documents", "readers", "tokenizer")]  # decides the tokens
LEAST_VAL = 4096  # smallest number of validation tokens, or a tenth of a small corpus


# ---- 1. The validation split, and near-duplicates -----------------------------------------------------------
def in_validation(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split, which has the documents with the lowest hashes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(text: str) -> set[str]:
    """All sequences of NGRAM consecutive words, in lower case."""
    words = text.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


# ---- 2. Documents as tokens ---------------------------------------------------------------------------------
def cost_of(text: bytes) -> int:
    """The size of a text in bytes, times 16 if it has few spaces: then, learning from it takes 64 times its memory."""
    spaces = text.count(b" ") + text.count(b"\n")
    return len(text) if len(text) < 30 * (spaces + 1) else 16 * len(text)


def sample(texts: Iterator[str], most: int, cost: Callable[[bytes], int] = len) -> list[bytes]:
    """Choose documents, at most this many bytes: all, or every second, or every fourth, and so on."""
    kept, size, step = [], 0, 1
    for number, text in enumerate(map(str.encode, texts)):  # as bytes, which need less memory
        if number % step == 0:
            kept.append(text)
            size += cost(text)
        while size > most and len(kept) > 1:  # drop every second document, and take only half as many from here on
            step *= 2
            kept = kept[::2]
            size = sum(map(cost, kept))
    return kept


def encode(text: str, tokenizer: Tokenizer, val_share: float, docs: set[str], known: set[str]) -> tuple:
    """The kind of a document, its size in bytes, and its tokens (length,) uint32 with `[SEP]`. The kind is its split or
    "empty" or "near-duplicates" (a training document of `docs` with a `known` ngram), which are dropped."""
    if not text:
        return "empty", 0, None
    split = "val" if in_validation(text, val_share) else "train"
    if split == "train" and text in docs and not known.isdisjoint(ngrams(text)):
        return "near-duplicates", 0, None
    return split, len(text.encode()), np.append(tokenizer.encode(text), np.uint32(SEP))


def in_threads(function: Callable[[str], tuple], texts: Iterator[str]) -> Iterator[tuple]:
    """Yield function(text) for each text, in order, using threads. About BATCH characters are held at a time."""
    with ThreadPoolExecutor() as pool:
        batch, size = [], 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= BATCH:
                yield from pool.map(function, batch)
                batch, size = [], 0
        yield from pool.map(function, batch)


def write_tokens(folder: Path, encoded: Iterable[tuple], dtype: np.dtype) -> tuple[Counter, int]:
    """Write documents, in the form that `encode` returns, to one file per split. Returns the number of documents of
    each kind, and the size of the written ones in bytes of text."""
    count = Counter()
    total = 0
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for kind, size, tokens in encoded:
            count[kind] += 1
            total += size
            if kind in files:
                files[kind].write(tokens.astype(dtype).tobytes())
    return count, total


def settle_validation(folder: Path, dtype: np.dtype, val_share: float) -> dict[str, int]:
    """Return the number of tokens in each split. If there are few documents, far too many or too few of them can fall
    into the validation split; then the last tokens of the corpus become the validation split."""
    train_file, val_file = [folder / f"{split}.bin" for split in SPLITS]
    train, val = [file.stat().st_size // dtype.itemsize for file in (train_file, val_file)]
    total = train + val
    wanted = max(round(val_share * total), min(LEAST_VAL, total // 10))
    if not wanted / 2 <= val <= 2 * wanted:  # append val to train, then cut the last `wanted` tokens off
        with open(train_file, "ab") as file:
            file.write(val_file.read_bytes())
        end = (total - wanted) * dtype.itemsize
        np.fromfile(train_file, dtype, offset=end).tofile(val_file)
        os.truncate(train_file, end)
        val = wanted
    for file in (train_file, val_file):
        sync(file)  # otherwise, a power cut could leave meta.json without the tokens
    return {"train": total - val, "val": val}


# ---- 3. A prepared corpus -----------------------------------------------------------------------------------
def prepare(settings: dict, selected: list[Source], tokenizer: Tokenizer | None, folder: Path):
    """Write the corpus of these sources to a folder. Raises UserError if they contain no text."""
    data, val_share, start = settings["data"], settings["val_share"], time.perf_counter()
    say(f"preparing {data}, in {folder}")
    read = partial(documents, selected, settings["column"], settings["cache"])
    bar = partial(tqdm, unit=" documents", unit_scale=True, leave=False, disable=None)
    if tokenizer is None:
        training = (each for each in bar(read(), "reading") if not in_validation(each, val_share))
        chosen = map(bytes.decode, sample(training, SAMPLE, cost_of))
        tokenizer = Tokenizer.train(chosen, settings["vocab_size"], settings["uncased"])
    write_text(folder / "tokenizer.json", tokenizer.to_json())

    docs, known = set(), set()
    if "docs" in selected:  # the documentation repeats many texts
        docs.update(text for _, text in read_docs(settings["cache"]))
        known.update(*[ngrams(each) for each in read() if in_validation(each, val_share)])
    dtype = np.dtype("uint16" if settings["vocab_size"] <= 1 << 16 else "uint32")
    encoded = in_threads(lambda each: encode(each, tokenizer, val_share, docs, known), read())
    count, size = write_tokens(folder, bar(encoded, "tokenizing"), dtype)
    if not count.keys() & {*SPLITS}:
        raise UserError(f"--data {data}: contains no text")
    tokens = settle_validation(folder, dtype, val_share)
    meta = {"data": data, "dtype": dtype.name, "tokens": tokens, "documents": count, "bytes": size}
    write_json(folder / "meta.json", meta)
    say(f"prepared in {time.perf_counter() - start:,.1f} s; {bytes_per_token(folder)}")


def bytes_per_token(folder: Path) -> str:
    """The bytes of text per token, and those of the tokenizer's own text: the oldest corpus in the cache with it."""
    tokenizer = (folder / "tokenizer.json").read_bytes()
    files = sorted(folder.parent.glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    same = (path for path in files if path.with_name("tokenizer.json").read_bytes() == tokenizer)
    own = next(path for path in same if "bytes" in read_json(path))  # older versions did not count them
    here, there = [meta["bytes"] / sum(meta["tokens"].values()) for meta in map(read_json, (folder / "meta.json", own))]
    compared = "" if own.parent == folder else f" ({there:.2f} in {own.parent}, from which its tokenizer was learned)"
    return f"{here:.2f} bytes of text per token{compared}"


def summary(folder: Path) -> str:
    """A prepared corpus in a line: its folder, tokens, documents, and bytes of text per token."""
    meta = read_json(folder / "meta.json")
    tokens = meta["tokens"]
    documents = ", ".join(f"{count:,} {kind}" for kind, count in meta["documents"].items())
    return (f"{folder}: {tokens['train']:,} tokens for training, {tokens['val']:,} for validation; "
            f"{bytes_per_token(folder)}; documents: {documents}")


def prepared_corpus(settings: dict, tokenizer: Tokenizer | None = None, name: str = "", moved: bool = False) -> Path:
    """The folder of the corpus that `settings` (the fields data, column, uncased, val_share, vocab_size and cache)
    select. If it does not exist, one process prepares it, with the given tokenizer or a new one. If it exists under the
    `name` that a run has recorded, the text is not read, unless it may be another text because it has `moved`."""
    cache = path_of(settings["cache"])
    data = settings["data"]
    if name and not moved and (cache / name / "meta.json").is_file():
        return cache / name
    selected = sources(data)
    text = text_hash(selected, settings["column"], settings["cache"])
    given = tokenizer.to_json() if tokenizer else settings["uncased"]  # a new tokenizer follows from the text
    how = text, settings["vocab_size"], settings["val_share"], given, code_hashes(*CODE)
    folder = cache / short_hash(repr(how))
    if name not in ("", folder.name):
        raise UserError(f"--data {data}: the text has changed, or the code that reads it, and the tokens of this run, "
                        f"{cache / name}, are gone; restore one of them, or use another --data and --out")
    complete = folder / "meta.json"
    if not complete.is_file():  # otherwise nothing is written: the disk may be read-only
        with lock_folder(folder, wait=True):
            if not complete.is_file():
                prepare(settings, selected, tokenizer, folder)
    return folder


# ---- 4. Its sequences ---------------------------------------------------------------------------------------
class Rows:
    """All sequences of a split ("train", "val"): `[CLS]` and the next seq_len - 1 tokens of a prepared corpus. Tokens
    stay on disk until they are read. Raises UserError if the corpus is too small for one sequence."""
    def __init__(self, folder: Path, split: str, seq_len: int):
        meta = read_json(folder / "meta.json")
        tokens = meta["tokens"][split]
        count = tokens // (seq_len - 1)
        if count == 0:
            raise UserError(f"--data {meta['data']}: its {split} split has {tokens} tokens, too few for a sequence "
                            f"of seq_len={seq_len}; use more text, a smaller --seq-len, or another --val-share")
        size = (folder / f"{split}.bin").stat().st_size  # in bytes
        if size != tokens * np.dtype(meta["dtype"]).itemsize:
            raise UserError(f"{folder / split}.bin: damaged ({size:,} bytes, {tokens:,} tokens); delete this folder, "
                            "and it is prepared again")
        self.pieces = np.memmap(folder / f"{split}.bin", meta["dtype"], "r", shape=(count, seq_len - 1))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, indices):
        """Sequences (B, seq_len) int64 at indices (B,)."""
        return np.insert(self.pieces[indices].astype(np.int64), 0, CLS, axis=1)

    def fewest_real(self) -> int:
        """The smallest number of real tokens in a sequence. No more tokens than these can be masked in each."""
        parts = np.array_split(self.pieces, 1 + len(self) // (1 << 16))  # read one after another
        return min(int((part >= NUM_SPECIAL).sum(axis=1).min()) for part in parts)


def evenly_spaced(rows: Rows | np.ndarray, most: int):
    """At most this many sequences (N, seq_len) int64, spaced evenly over the whole text."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)
    return torch.from_numpy(rows[indices])


def unigram_entropy(tokens) -> float:
    """The entropy of real tokens in nats, which is the loss of a model that knows only how frequent each token is."""
    real = tokens[tokens >= NUM_SPECIAL]
    return float(torch.special.entr(real.bincount().double() / len(real)).sum())


@lru_cache(maxsize=2)  # a step can belong to two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order of the sequences in an epoch, (total,) int64."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def indices_of_step(seed: int, step: int, batch_size: int, total: int):
    """The indices of a step's sequences, (batch_size,) int64. Each epoch draws a new permutation of all `total`
    sequences."""
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), total)
    rows = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(rows)
