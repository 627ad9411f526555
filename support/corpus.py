"""From --data to a prepared corpus: documents, which of them are validation, and their tokens.

A prepared corpus is a folder in --cache, named by a hash of the text and of how it was prepared. `train.bin` and
`val.bin` hold tokens, uint16 or uint32, with `[SEP]` after each document. `meta.json`, written last, tells whether all
is there. The text is read twice, the first time for the tokenizer.
"""
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from tqdm import tqdm

from maelm import CLS, NUM_SPECIAL, SEP
from support.cli import UserError, root_cause
from support.documents import Source, documents, in_validation, ngrams, sources, stripped, text_hash
from support.files import read_json, short_hash, write_json
from support.records import split_long
from support.tokenizer import Tokenizer

LAYOUT = 3  # version of the files of a prepared corpus: one of another version is not found
SPLITS = ("train", "val")
DROPPED = ("empty", "near-duplicates")  # documents
SAMPLE = 200 * 10 ** 6  # bytes of text that the tokenizer learns from, at most
PIECE = 1 << 16  # characters of a long document that the sample has or not
LARGEST = 1 << 20  # vocabulary, more than any in use; far beyond it `tokenizers` ends the program
ENOUGH = 4096  # validation tokens that a corpus with few documents has, or a tenth of it


# ---- 1. The tokenizer's sample -----------------------------------------------------------------------------
def sample(texts: Iterator[str], val_share: float) -> tuple[list[bytes], int]:
    """Pieces of the training documents, at most SAMPLE bytes, and the number of all documents. Every piece is taken, or
    every second, or every fourth ... of the whole text, whatever its files are."""
    kept, size, step, number, count = [], 0, 1, 0, 0
    for text in texts:
        count += 1
        if in_validation(text, val_share):
            continue
        for piece in split_long([text], PIECE):
            if number % step == 0:
                kept.append(piece.encode())
                size += len(kept[-1])
            number += 1
        while size > SAMPLE:
            step *= 2
            kept = kept[::2]
            size = sum(map(len, kept))
    return kept, count


# ---- 2. Documents as tokens ---------------------------------------------------------------------------------
def in_threads(function: Callable[[list[str]], list], texts: Iterator[str]) -> Iterator[list]:
    """`function` of lists of texts, in order, in threads. Only a few million characters are held at a time, or a few
    documents that are longer."""
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting, part, size = deque(), [], 0
        for text in texts:
            part.append(text)
            size += len(text)
            if size >= PIECE:
                waiting.append(pool.submit(function, part))
                part, size = [], 0
            if len(waiting) > workers:
                yield waiting.popleft().result()
        yield from [future.result() for future in waiting]
        yield function(part)


def encode_part(texts: list[str], tokenizer: Tokenizer, val_share: float, known: set[str]) -> list[tuple]:
    """(split, tokens (length,) uint32 with `[SEP]`, number of characters) of each text. In place of a split, texts that
    are dropped have the reason: they are empty, or training texts with `known` ngrams."""
    found = []
    for text in texts:
        split = "val" if in_validation(text, val_share) else "train"
        if not text:
            found.append(("empty", None, 0))
        elif split == "train" and known and not known.isdisjoint(ngrams(text)):
            found.append(("near-duplicates", None, len(text)))
        else:
            found.append((split, np.append(tokenizer.encode(text), np.uint32(SEP)), len(text)))
    return found


def even_out(files: dict, tokens: dict[str, int], dtype: np.dtype, val_share: float):
    """Move tokens from the end of one split to the end of the other if the validation split has less than half, or
    more than twice, of what it should have, as can be with few documents. It changes `tokens`, their numbers."""
    total = sum(tokens.values())
    wanted = max(round(val_share * total), min(ENOUGH, total // 10))
    if wanted / 2 <= tokens["val"] <= 2 * wanted:
        return
    source, target = ("train", "val") if tokens["val"] < wanted else ("val", "train")
    count = abs(wanted - tokens["val"])
    tokens[source] -= count
    tokens[target] += count
    files[source].seek(tokens[source] * dtype.itemsize)
    files[target].write(files[source].read())
    files[source].seek(tokens[source] * dtype.itemsize)
    files[source].truncate()


# ---- 3. A prepared corpus -----------------------------------------------------------------------------------
def prepare(settings: dict, read: list[Source], text: str, tokenizer: Tokenizer | None, folder: Path):
    """Write the corpus of sources, whose hash is `text`, to `folder`. UserError for text that cannot be read."""
    data, val_share, start = settings["data"], settings["val_share"], time.perf_counter()
    size = sum(file.stat().st_size for source in read for file in source.files)
    print(f"preparing {data}" + (f", {size / 1e6:,.1f} MB" if size else "") + f", in {folder}")
    bar = partial(tqdm, unit=" documents", unit_scale=True, leave=False, disable=None)
    count = None  # of documents, if it is known
    if tokenizer is None:
        with suppress(UserError):  # there is one if a preparation was interrupted later
            tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        pieces, count = sample(bar(stripped(read), "reading"), val_share)
        tokenizer = Tokenizer.train(map(bytes.decode, pieces), settings["vocab_size"], settings["uncased"])
    tokenizer.save(folder)
    known = set()
    if any(source.kind == "docs" for source in read):  # whose texts repeat a lot
        known = known.union(*[ngrams(text) for text in documents(read) if in_validation(text, val_share)])

    texts = bar(stripped(read), "tokenizing", total=count)
    dtype = np.dtype("uint16" if settings["vocab_size"] <= 1 << 16 else "uint32")
    tokens, found = dict.fromkeys(SPLITS, 0), Counter()
    with open(folder / "train.bin", "wb+") as train, open(folder / "val.bin", "wb+") as val:
        files = {"train": train, "val": val}
        for part in in_threads(lambda part: encode_part(part, tokenizer, val_share, known), texts):
            for kind, stream, length in part:
                found[kind] += 1
                if kind in files:
                    files[kind].write(stream.astype(dtype).tobytes())
                    tokens[kind] += len(stream)
                    found["characters"] += length
        if not any(tokens.values()):
            raise UserError(f"--data {data}: there is no text in it")
        even_out(files, tokens, dtype, val_share)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave meta.json without them
    write_json(folder / "meta.json", {
        "data": data, "text": text, "dtype": dtype.name, "tokens": tokens,
        "documents": found["train"] + found["val"], "characters": found["characters"],
        "dropped": {kind: found[kind] for kind in DROPPED},
        "tokenizer": short_hash((folder / "tokenizer.json").read_bytes())})
    print(f"prepared in {time.perf_counter() - start:,.1f} s")


def describe(folder: Path) -> str:
    """What a prepared corpus holds, in one line."""
    meta = read_meta(folder)
    if "documents" not in meta:
        return f"{folder}: prepared by an earlier version"
    train, val = [meta["tokens"][split] for split in SPLITS]
    dropped = ", ".join(f"{count:,} {kind}" for kind, count in meta["dropped"].items())
    return (f"{folder}: {meta['documents']:,} documents, {train:,} training tokens, {val:,} validation tokens, "
            f"{meta['characters'] / (train + val):.2f} characters per token; dropped: {dropped}")


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared corpus. UserError if a file is missing, cut or of another corpus."""
    with suppress(FileNotFoundError, UserError, KeyError, TypeError):
        meta = read_json(folder / "meta.json")
        sizes = [meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize for split in SPLITS]
        there = [(folder / f"{split}.bin").stat().st_size for split in SPLITS]
        if sizes == there and meta["tokenizer"] == short_hash((folder / "tokenizer.json").read_bytes()):
            return meta
    raise UserError(f"{folder}: this prepared corpus is damaged or incomplete; delete it, and it is made again")


def note_changes(settings: dict, folder: Path, meta: dict):
    """Print a line if the text of --data is no longer that of a prepared corpus, or can no longer be read."""
    try:
        read = sources(settings["data"], settings.get("column", "text"), settings["cache"])
        changed = text_hash(read) != meta.get("text")
    except (UserError, OSError) as error:
        print(f"{error}; the tokens in {folder}, prepared earlier, are used")
        return
    if changed and "text" in meta:  # an earlier version did not write it
        print(f"--data {settings['data']}: has changed; the tokens in {folder}, prepared earlier, are used")


def prepared_corpus(settings: dict, tokenizer: Tokenizer | None = None) -> Path:
    """The folder of the corpus that `settings`, as in a run's config.json, name; one process prepares it if it is not
    there, with the given tokenizer, or else one that is learned. A run's own corpus (`corpus`) is used even if the
    text has changed since. UserError for a damaged corpus, and for text that is missing or bad."""
    cache, vocab_size = Path(settings["cache"]).expanduser(), settings["vocab_size"]
    if vocab_size > LARGEST:
        raise UserError(f"vocab_size={vocab_size}: use at most {LARGEST:,}")
    speaks = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes
    of_run = settings.get("corpus")
    if of_run and (cache / of_run / "meta.json").is_file():
        meta = read_meta(cache / of_run)
        if speaks:
            note_changes(settings, cache / of_run, meta)
        return cache / of_run

    read = sources(settings["data"], settings.get("column", "text"), settings["cache"])
    text = text_hash(read)
    how = LAYOUT, text, vocab_size, settings["uncased"], settings["val_share"]
    names = [short_hash(repr((*how, made_by))) for made_by in (None, tokenizer and tokenizer.model.to_str())]
    folder = cache / (of_run if of_run in names else names[1])
    if of_run and speaks:
        print(f"{cache / of_run}: no longer there; today's text of --data {settings['data']} takes its place")
    complete = folder / "meta.json"
    if not complete.is_file():  # otherwise nothing is written: the disk may be read-only
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                if not complete.is_file():
                    prepare(settings, read, text, tokenizer, folder)
        except (MemoryError, OSError) as error:
            raise UserError(f"{folder}: not prepared ({root_cause(error)}); is memory or disk full? --cache names "
                            "another folder, HF_HOME the folder for downloads") from error
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
        """The fewest tokens in a row that are not special. It reads the whole text once, and keeps the number."""
        path = Path(self.pieces.filename).with_suffix(f".{self.pieces.shape[1] + 1}.json")
        with suppress(OSError, UserError, KeyError):
            return read_json(path)["fewest_real_tokens"]
        fewest = self.pieces.shape[1]
        for start in range(0, len(self), PIECE):
            real = np.count_nonzero(self.pieces[start:start + PIECE] >= NUM_SPECIAL, axis=1)
            fewest = min(fewest, int(real.min()))
        with suppress(OSError):  # the disk may be read-only
            write_json(path, {"fewest_real_tokens": fewest})
        return fewest


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


@lru_cache(maxsize=2)  # a step can be in two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order (total,) int64 of the rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def rows_of_step(seed: int, step: int, batch_size: int, total: int):
    """Row numbers (batch_size,) int64 of a step: every epoch is a new permutation of all `total` rows."""
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), total)
    rows = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(rows)
