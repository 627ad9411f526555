"""From documents to sequences: a prepared corpus is a folder of tokens in --cache.

`train.bin` and `val.bin` hold tokens, uint16 or uint32, with [SEP] after each document; `meta.json`, written last, says
what was read. The folder's name ends with a hash of the text and of the tokenizer.
"""
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from maelm import CLS, NUM_SPECIAL, SEP
from support.docs import in_validation
from support.program import UserError, lock_folder, path_of, progress, read_json, short_hash, write_json, write_text
from support.text import Text, content_hash, documents, split_documents
from support.tokenizer import Tokenizer

SAMPLE = 200 * 10 ** 6  # largest number of bytes that the tokenizer learns from


# ---- 1. Preparing a corpus ----------------------------------------------------------------------------------
def sample(texts: Iterable[str], most: int) -> list[bytes]:
    """Choose documents, at most this many bytes: all, or every second, or every fourth, and so on."""
    kept, size, step = [], 0, 1
    for number, text in enumerate(map(str.encode, texts)):  # as bytes, which need less memory
        if number % step == 0:
            kept.append(text)
            size += len(text)
        while size > most and len(kept) > 1:  # drop every second document, and take only half as many from here on
            step *= 2
            kept = kept[::2]
            size = sum(map(len, kept))
    return kept


def learned_tokenizer(text: Text, vocab_size: int, content: str) -> Tokenizer:
    """The tokenizer for a text with this hash of its content, learned from a sample of its training split, or kept in
    --cache since. One process learns it; others wait."""
    folder = path_of(text.cache) / "tokenizers"
    path = folder / f"{content}-{vocab_size}.json"
    if not path.is_file():  # otherwise nothing is written: the disk may be read-only
        with lock_folder(folder, wait=True):
            if not path.is_file():
                found = progress(split_documents(text), "reading")
                chosen = sample((document for split, document in found if split == "train"), SAMPLE)
                tokenizer = Tokenizer.train(map(bytes.decode, chosen), vocab_size, text.uncased)
                write_text(path, tokenizer.to_json())
    return Tokenizer.of_json(path.read_text("utf-8"))


def prepare(text: Text, tokenizer: Tokenizer, folder: Path):
    """Write the tokens of a text to a folder. Raises UserError if there is no text."""
    dtype = np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")
    tokens = {"train": 0, "val": 0}
    count = Counter(tokens)  # of documents
    size = 0  # in bytes of text
    remarks = []
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for split, document in progress(split_documents(text, remarks), "tokenizing", unit_scale=True):
            count[split] += 1
            if split in files:
                ids = np.append(tokenizer.encode(document), np.uint32(SEP)).astype(dtype)
                files[split].write(ids.tobytes())
                tokens[split] += len(ids)
                size += len(document.encode())
    if not size:
        raise UserError(f"--data {text.data}: contains no text")
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in count.items())
    case = ", in lower case (--no-uncased keeps its case)" if text.uncased else ""
    remarks.append(f"{tokens['train']:,} tokens for training, {tokens['val']:,} for validation{case}; documents: "
                   f"{kinds}; {size / sum(tokens.values()):.2f} bytes of text per token")
    write_json(folder / "meta.json", {"dtype": dtype.name, "tokens": tokens, "documents": count, "remarks": remarks})


# ---- 2. Its sequences ---------------------------------------------------------------------------------------
class Rows:
    """All sequences of a split ("train", "val"): [CLS] and the next seq_len - 1 tokens of a prepared corpus. Tokens
    stay on disk until they are read. Raises UserError if the corpus is too small for one sequence."""
    def __init__(self, folder: Path, split: str, seq_len: int):
        meta = read_json(folder / "meta.json")
        tokens = meta["tokens"][split]
        count = tokens // (seq_len - 1)
        if count == 0:
            raise UserError(f"{folder}: its {split} split has {tokens} tokens, too few for a sequence of seq_len="
                            f"{seq_len}; use more text, a smaller --seq-len, or another --val-share, such as 0.1")
        self.pieces = np.memmap(folder / f"{split}.bin", meta["dtype"], "r", shape=(count, seq_len - 1))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, indices):
        """Sequences (B, seq_len) int64 at indices (B,)."""
        return np.insert(self.pieces[indices].astype(np.int64), 0, CLS, axis=1)


class Corpus(NamedTuple):
    """A prepared corpus."""
    folder: Path
    tokenizer: Tokenizer
    train: Rows
    val: Rows


def open_corpus(text: Text, vocab_size: int, seq_len: int, tokenizer: Tokenizer | None = None,
                saved: dict | None = None) -> Corpus:
    """The sequences of a text, in tokens of a given or of a new tokenizer. Missing tokens are made by one process, and
    others wait. A run, whose checkpoint is `saved`, keeps its tokens: its text is read only if they are gone or --data
    is another. Raises UserError if the text has changed."""
    if tokenizer and tokenizer.uncased != text.uncased:
        raise UserError(f"uncased={text.uncased}: the tokenizer is that of --init; leave out this flag")
    kept = saved and path_of(text.cache) / saved["corpus"]
    if kept and saved["settings"]["data"] == text.data and (kept / "meta.json").is_file():
        folder = kept
    else:
        print(f"reading {text.data}")
        content = content_hash(text)
        tokenizer = tokenizer or learned_tokenizer(text, vocab_size, content)
        names = [re.sub(r"[^\w.]+", "_", path_of(source).resolve().name) for source in text.sources()]
        made_from = short_hash(content + tokenizer.to_json())
        folder = path_of(text.cache) / f"{'+'.join(names)[:100]}-{vocab_size}-{made_from}"
        if kept and kept.name[-16:] != made_from:  # the text's own name may have changed
            raise UserError(f"--data {text.data}: this run has the tokens {kept}, but this is another text, or it has "
                            "changed; restore it, or begin another run")
        if not (folder / "meta.json").is_file():
            with lock_folder(folder, wait=True):
                if not (folder / "meta.json").is_file():
                    prepare(text, tokenizer, folder)
    print(f"{folder}:", *read_json(folder / "meta.json")["remarks"], sep="\n  ")
    return Corpus(folder, tokenizer, Rows(folder, "train", seq_len), Rows(folder, "val", seq_len))


# ---- 3. Choosing sequences ----------------------------------------------------------------------------------
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
    indices = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(indices)


def text_rows(text: Text, encode: Callable, frame: tuple, n: int, tokens: int) -> np.ndarray:
    """Validation documents, spaced evenly over a text, as sequences (N, n) int64, of about this many tokens. The frame
    holds the special tokens before a sequence, between documents and after a sequence. Raises UserError if the text is
    too short for one sequence."""
    before, between, after = frame
    room = n - len(before) - len(after)
    held_out = (document for document in documents(text) if in_validation(document, text.val_share))
    ids = []
    for document in progress(sample(held_out, 20 * tokens), "tokenizing", unit="text"):
        ids += [*encode(document.decode()), *between]
    count = len(ids) // room
    if count == 0:
        raise UserError(f"--data {text.data}: {len(ids)} tokens, but a sequence has {n}; use --val-share 1")
    rows = [[*before, *ids[i * room:(i + 1) * room], *after] for i in range(count)]
    return np.array(rows, np.int64)
