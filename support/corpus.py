"""From --data to tokens: documents, their split into training and validation, a prepared corpus, and its sequences.

A prepared corpus is a folder in --cache. `train.bin` and `val.bin` hold tokens, uint16 or uint32, with [SEP] after each
document; `meta.json`, written last, has their numbers.
"""
import glob
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from maelm import CLS, NUM_SPECIAL, SEP, Config
from support.program import CACHE, UserError, lock_folder, path_of, read_json, short_hash, write_json, write_text
from support.docs import LIBRARIES, read_docs, versions
from support.tokenizer import Tokenizer, split_long

SPLITS = ("train", "val")
FORMATS = {  # suffix -> kind of file, and options, for `datasets`
    ".txt": ("text", dict(keep_linebreaks=True, encoding="utf-8-sig")),
    ".jsonl": ("json", {}), ".json": ("json", {}), ".parquet": ("parquet", {})}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
GROUPED = 10_000  # characters after which a document of a .txt ends, also without a blank line
LONGEST = 100_000  # characters after which any document is split
NGRAM = 13  # documents that share this many consecutive words are near-duplicates
SCORED = 150  # documentation strings per library on which the task `docs` is scored, and no model is trained
SAMPLE = 200 * 10 ** 6  # largest number of bytes that the tokenizer learns from


# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class Text:
    """The settings that select a text."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG]; join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = 0.01  # share of documents held out for validation
    cache: str = CACHE  # folder for tokenized corpora

    def sources(self) -> list[str]:
        """The sources that + joins in `data`: docs, hf:NAME[:CONFIG], or paths."""
        return [self.data] if path_of(self.data).exists() else self.data.split("+")


# ---- 1. Documents -------------------------------------------------------------------------------------------
def split_name(path: Path) -> tuple[str, str]:
    """The name of a file without its suffixes, and its format: test and .csv for test.CSV.gz."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.stem, path.suffix.lower()


def files_of(source: str) -> list[Path]:
    """A text file, or all text files in a folder and the folders in it. Raises UserError if there are none."""
    root = path_of(source)
    files = [path for path in sorted([root, *root.rglob("*")]) if path.is_file() and split_name(path)[1] in FORMATS]
    if not files:
        raise UserError(f"--data {source}: has no file ending in {', '.join(FORMATS)}, plain or compressed; other "
                        "sources are docs and hf:NAME")
    return files


def records_of(path: Path) -> Iterator[dict]:
    """The records of a file. Raises UserError if it cannot be read."""
    import datasets  # here, because it takes a second
    kind, options = FORMATS[split_name(path)[1]]
    file = glob.escape(str(path.absolute()))
    try:
        records = datasets.load_dataset(kind, data_files=[file], split="train", streaming=True, **options)
        yield from grouped(record["text"] for record in records) if kind == "text" else records
    except Exception as error:  # each format has its own errors
        raise UserError(f"{path}: cannot be read ({error})") from error


def grouped(lines: Iterable[str]) -> Iterator[dict]:
    """Records of documents, which end at a blank line or with the line in which they reach GROUPED characters."""
    document, size = [], 0
    for line in itertools.chain(lines, [" "]):  # a blank line ends the last one
        if not line.isspace():
            document.append(line)
            size += len(line)
        if document and (line.isspace() or size >= GROUPED):
            yield {"text": "".join(document)}
            document, size = [], 0


def hub_records(name: str, split: str = "train") -> Iterable[dict]:
    """The records of hf:NAME[:CONFIG], downloaded to the folder HF_HOME."""
    import datasets
    path, _, config = name.removeprefix("hf:").partition(":")
    if Path(path).exists():
        raise UserError(f"{name}: the folder {path} would be read instead; run in another folder")
    return datasets.load_dataset(path, config or None, split=split)


def texts_of(text: Text) -> Iterator[str]:
    """The texts of all sources, unchanged."""
    for source in text.sources():
        if source == "docs":
            yield from (document for _, document in read_docs(text.cache))
            continue
        files = {} if source.startswith("hf:") else {file: records_of(file) for file in files_of(source)}
        for place, records in (files or {source: hub_records(source)}).items():
            for record in records:
                column = text.column if len(record) > 1 else next(iter(record))  # a single field holds the text
                if column not in record:
                    raise UserError(f"{place}: --column can be {', '.join(record)}, not {column}")
                yield record[column] or ""


def documents(text: Text) -> Iterator[str]:
    """The documents that a Text selects, without white space around them. Long ones are split, empty ones dropped."""
    return filter(None, map(str.strip, split_long(texts_of(text), LONGEST)))


def in_validation(document: str, share: float) -> bool:
    """Whether a document belongs to the validation split, which has the documents with the lowest hashes."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=4).digest()) / 2 ** 32 < share


def ngrams(document: str) -> set[str]:
    """All sequences of NGRAM consecutive words, in lower case."""
    words = document.lower().split()
    return {" ".join(words[i:i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def docs_by_hash(cache: str) -> list[tuple[str, str]]:
    """(library, text) of the documentation strings of LIBRARIES, in an order that further strings do not change."""
    chosen = [(library, text) for library, text in read_docs(cache) if library in LIBRARIES]
    return sorted(chosen, key=lambda each: hashlib.blake2b(each[1].encode()).digest())


def scored_docs(val_share: float, cache: str) -> list[tuple[str, str]]:
    """(library, text) of the dev split of the task `docs`: the first SCORED per library of the tenth of the strings
    that follows the validation split by hash."""
    count = Counter()
    chosen = []
    for library, text in docs_by_hash(cache):
        follows = in_validation(text, val_share + 0.1) and not in_validation(text, val_share)
        if follows and count[library] < SCORED:
            count[library] += 1
            chosen.append((library, text))
    return chosen


def split_documents(text: Text) -> Iterator[tuple[str, str]]:
    """(split, document) of each document. In `docs`, which repeats many texts, the split of those in the task's dev
    split, and of near-duplicates of these or of the validation split, is "held out"."""
    docs, known = set(), set()
    if "docs" in text.sources():
        docs.update(document for _, document in read_docs(text.cache))
        scored = {document for _, document in scored_docs(text.val_share, text.cache)}
        unseen = itertools.chain(scored, (each for each in documents(text) if in_validation(each, text.val_share)))
        known.update(scored, *map(ngrams, unseen))
    for document in documents(text):
        if in_validation(document, text.val_share):
            yield "val", document
        elif document in docs and not known.isdisjoint({document, *ngrams(document)}):
            yield "held out", document
        else:
            yield "train", document


# ---- 2. A prepared corpus -----------------------------------------------------------------------------------
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


def new_tokenizer(text: Text, vocab_size: int) -> Tokenizer:
    """Learn a tokenizer from a sample of the training split."""
    found = tqdm(split_documents(text), "reading", leave=False, disable=None)
    chosen = sample((document for split, document in found if split == "train"), SAMPLE)
    return Tokenizer.train(map(bytes.decode, chosen), vocab_size, text.uncased)


def prepare(text: Text, vocab_size: int, tokenizer: Tokenizer | None, folder: Path):
    """Write a corpus to a folder, with a new tokenizer if none is given. Raises UserError if there is no text."""
    print(f"preparing {text.data}")
    tokenizer = tokenizer or new_tokenizer(text, vocab_size)
    write_text(folder / "tokenizer.json", tokenizer.to_json())
    dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    tokens = dict.fromkeys(SPLITS, 0)
    count = Counter(tokens)  # of documents
    size = 0  # in bytes of text
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for split, document in tqdm(split_documents(text), "tokenizing", unit_scale=True, leave=False, disable=None):
            count[split] += 1
            if split in files:
                ids = np.append(tokenizer.encode(document), np.uint32(SEP)).astype(dtype)
                files[split].write(ids.tobytes())
                tokens[split] += len(ids)
                size += len(document.encode())
    if not size:
        raise UserError(f"--data {text.data}: contains no text")
    meta = {"tokenizer": short_hash(tokenizer.to_json()), "dtype": dtype.name, "tokens": tokens, "documents": count}
    write_json(folder / "meta.json", meta)
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in count.items())
    print(f"{folder}: {tokens['train']:,} tokens for training, {tokens['val']:,} for validation; documents: {kinds}; "
          f"{size / sum(tokens.values()):.2f} bytes of text per token")


def folder_of(text: Text, vocab_size: int, tokenizer: Tokenizer | None) -> Path:
    """The folder of a corpus, such as docs-2048-90ab12cd34ef56ab: the name ends with a hash of all that decides its
    tokens, with the sizes and times of its files. Data sets on the Hub have only their names."""
    made_from = [text.column, text.uncased, text.val_share, vocab_size]
    if tokenizer:
        made_from.append(tokenizer.to_json())
    names = []
    for source in text.sources():
        names.append(re.sub(r"[^\w.]+", "_", path_of(source).resolve().name))
        if source == "docs":
            made_from += ["docs", SCORED, *versions()]
        elif source.startswith("hf:"):
            made_from.append(source)
        else:
            files = [(str(file.resolve()), file.stat()) for file in files_of(source)]
            made_from += [(name, status.st_size, status.st_mtime) for name, status in files]
    return path_of(text.cache) / f"{'+'.join(names)[:100]}-{vocab_size}-{short_hash(repr(made_from))}"


def prepared_corpus(text: Text, vocab_size: int, tokenizer: Tokenizer | None = None) -> Path:
    """The folder of a corpus. If it is missing, one process prepares it; others wait."""
    folder = folder_of(text, vocab_size, tokenizer)
    meta = folder / "meta.json"
    if not meta.is_file():  # otherwise nothing is written: the disk may be read-only
        with lock_folder(folder, wait=True):
            if not meta.is_file():
                prepare(text, vocab_size, tokenizer, folder)
    return folder


def corpus_of_run(text: Text, saved: dict) -> Path:
    """The corpus that a checkpoint names, prepared again if it is gone. Raises UserError if it would be another."""
    folder = path_of(text.cache) / saved["corpus"]
    if (folder / "meta.json").is_file():
        return folder
    given = saved["tokenizer"] if saved["settings"].get("init") else None
    if folder_of(text, saved["config"].vocab_size, given) != folder:
        raise UserError(f"--data {text.data}: the tokens of this run, {folder}, are gone, and the text has changed; "
                        "restore one of them, or begin another run")
    return prepared_corpus(text, saved["config"].vocab_size, given)


# ---- 3. Its sequences ---------------------------------------------------------------------------------------
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


def open_corpus(text: Text, config: Config, saved: dict | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of a `saved` run or, for a new run, of a text, with a new tokenizer if none is given."""
    if tokenizer and tokenizer.uncased != text.uncased:
        raise UserError(f"uncased={text.uncased}: the tokenizer is that of --init; leave out this flag")
    folder = corpus_of_run(text, saved) if saved else prepared_corpus(text, config.vocab_size, tokenizer)
    tokenizer = saved["tokenizer"] if saved else Tokenizer.load(folder)
    return Corpus(folder, tokenizer, Rows(folder, "train", config.seq_len), Rows(folder, "val", config.seq_len))


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
