"""From text to rows of tokens: the corpus on your machine, a byte-level BPE, and packed memory-mapped shards.

    python data.py prepare --data PATH|hf:NAME[:CONFIG]|docs --vocab-size 32768 --uncased --out DIR

A prepared folder holds `tokenizer.json` (the `tokenizers` format, which transformers reads too), `meta.json`, and
shards `train-00000.npy`, `val-00000.npy`, ...: NumPy arrays (rows, seq_len) of uint16, or of uint32 where the
vocabulary needs it, memory-mapped when read. A row is `[CLS]` and seq_len - 1 tokens of documents that are
joined by `[SEP]`. A document is in validation if the hash of its text says so: no text is in both parts.

The corpus is read twice, for a sample that the tokenizer learns from and for the shards, by one process that others
(`--processes`) tokenize for. The shards are a function of the text and the options alone. A command that ended in any
way continues after its last shard when it is given again. Memory does not grow with the corpus: less than 1 GB with
two processes and 0.1 GB for each further one (the sample, a shard, two blocks a process); `LONGEST` cuts documents.
"""
import argparse
import ast
import functools
import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import mmap
import os
import re
import signal
import sys
import sysconfig
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tqdm import tqdm

SPECIALS = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]  # ids 0 to 3, as in maelm.py: workers need no PyTorch
CLS, SEP, NUM_SPECIAL = SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]"), len(SPECIALS)
SHARD_TOKENS = 1 << 25  # a shard of uint16 is 64 MB
BLOCK_CHARACTERS = 1 << 20  # text that is encoded at a time
LONGEST = 1 << 22  # characters; a longer document, longer than any book, is cut into several
LONGEST_LINE = 1 << 26  # characters
PROCESS_BYTES = 1 << 26  # of text for each process: a small corpus is not worth starting one


class UserError(ValueError):
    """Something that the user can put right; the message names the file or field, the value and the fix."""


class Parser(argparse.ArgumentParser):
    """Answers a bad command line with one line and exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        options, unknown = self.parse_known_args(argv)
        if unknown:
            valid = sorted(flag for action in self._actions for flag in action.option_strings if flag[:5] != "--no-")
            self.error(f"unknown flag {unknown[0]}; the flags are {' '.join(valid)}")
        return options


@contextmanager
def clear_errors(program: str) -> Iterator[None]:
    """Turn UserError and OSError into one line on stderr and exit code 2."""
    try:
        yield
    except (UserError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then fsync and rename it to `path`: a reader finds a whole file or none. Makes the
    folder. Failure to write is a UserError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; free some space or choose another "
                        "folder") from error
    finally:
        if temporary.exists():
            temporary.unlink()


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


# ---- 1. Tokenizer -------------------------------------------------------------------------------------------
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"  # no merge crosses the border of a piece


def byte_letters() -> dict[int, str]:
    """The byte-level alphabet of GPT-2 (Radford et al., 2019): a printable letter for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class Tokenizer:
    """Byte-level BPE, trained and stored by `tokenizers`, run by `tiktoken`. Specials, 256 bytes, merges."""

    def __init__(self, model: tokenizers.Tokenizer):
        self.model = model
        self.uncased = model.normalizer is not None
        byte = {letter: b for b, letter in byte_letters().items()}
        ranks = {bytes(byte[letter] for letter in token): i
                 for token, i in model.get_vocab().items() if token not in SPECIALS}
        self.tiktoken = tiktoken.Encoding("maelm", pat_str=PIECES, mergeable_ranks=ranks,
                                          special_tokens={name: i for i, name in enumerate(SPECIALS)})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, uncased: bool) -> "Tokenizer":
        """Learn merges until `vocab_size` rows are used, special tokens and bytes included (fewer if the text
        has no more pairs). Ties between equally frequent pairs go to the lower ids."""
        letters = byte_letters()
        most = 1 << 16  # characters; tokenizers needs a hundred times the memory of what it is given at once
        texts = (text[i:i + most] for text in texts for i in range(0, len(text), most))
        learner = tokenizers.Tokenizer(tokenizers.models.BPE())
        dress(learner, uncased)
        learner.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - NUM_SPECIAL, initial_alphabet=list(letters.values()), show_progress=False))
        merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
        tokens = dict.fromkeys([*SPECIALS, *(letters[b] for b in range(256)), *(a + b for a, b in merges)])
        vocabulary = {token: i for i, token in enumerate(tokens)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        dress(model, uncased)
        model.add_special_tokens(SPECIALS)
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json; UserError if it is missing or not such a file."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; a run folder or a folder made by data.py prepare has one")
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
        text = text if not self.uncased else text.lower() if not special else lower_around_specials(text)
        return self.tiktoken.encode_to_numpy(text, allowed_special="all" if special else set(), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, rows that no token uses become nothing."""
        return self.tiktoken.decode([int(i) for i in ids if i < len(self)])


def dress(model: tokenizers.Tokenizer, uncased: bool) -> None:
    """Give a `tokenizers` model the lower-casing and the splitting that `Tokenizer.encode` has."""
    if uncased:
        model.normalizer = tokenizers.normalizers.Lowercase()
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = tokenizers.decoders.ByteLevel()


def lower_around_specials(text: str) -> str:
    """Lower-case `text`, but not the names of special tokens in it."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
    return "".join(piece if piece in SPECIALS else piece.lower() for piece in pieces)


# ---- 2. Documents -------------------------------------------------------------------------------------------
DOCS_PACKAGES = ("torch", "numpy", "sympy", "networkx", "pandas", "datasets", "huggingface_hub", "matplotlib",
                 "pyarrow", "fsspec", "jinja2", "mpmath", "tiktoken", "tokenizers", "tqdm")  # requirements install them
DOCUMENTING = {"add_docstr", "_add_docstr", "add_newdoc", "_add_newdoc"}  # functions that give a docstring to C code
TEST_FOLDERS = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
READERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def docs_files() -> list[tuple[str, Path]]:
    """(library, file) of all Python files of the standard library and of DOCS_PACKAGES, in a fixed order."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for name in DOCS_PACKAGES:
        spec = importlib.util.find_spec(name)  # finds, does not import
        roots += [(name, Path(place)) for place in (spec.submodule_search_locations if spec else None) or []]
    return [(library, path) for library, root in roots for path in sorted(root.rglob("*.py"))
            if not TEST_FOLDERS & set(path.relative_to(root).parts)]


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
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in DOCUMENTING:
            strings = [s.value for s in ast.walk(node) if isinstance(s, ast.Constant) and isinstance(s.value, str)]
            found.append(max(strings, key=len, default=""))
        elif isinstance(node, ast.Dict) and path.parent.name == "pydoc_data":
            found += [s.value for s in node.values if isinstance(s, ast.Constant)]
    return [text.strip() for text in found if len(text.split()) > 3]


@functools.cache
def read_docs(progress: bool = False) -> list[tuple[str, str]]:
    """(library, text) of every distinct documentation string on this machine: English that needs no download."""
    files = docs_files()
    texts = in_order(docstrings, [path for _, path in files], os.cpu_count() or 1)
    first = {}
    for (library, _), found in zip(files, tqdm(texts, "reading documentation", len(files), unit="file", leave=False,
                                               disable=not progress)):
        for text in found:
            first.setdefault(text, library)
    return [(library, text) for text, library in first.items()]


def lines(path: Path) -> Iterator[str]:
    """Lines of a text file, .gz and .xz unpacked, those beyond LONGEST_LINE in pieces; UserError names the file and
    the offset of undecodable bytes."""
    try:
        with READERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            try:
                yield from iter(functools.partial(file.readline, LONGEST_LINE), "")
            except UnicodeDecodeError as error:
                offset = file.buffer.tell() - len(error.object) + error.start  # error.object is what was read last
                raise UserError(f"{path}: byte {offset} is not UTF-8 (0x{error.object[error.start]:02x}); convert the "
                                "file, for example with iconv") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise UserError(f"{path}: damaged {path.suffix} file: {error}") from error


def read_text(path: Path) -> Iterator[str]:
    """Documents of a .txt file: separated by blank lines."""
    for blank, group in itertools.groupby(lines(path), key=str.isspace):
        if not blank:
            yield from ("".join(document).strip() for document in blocks(group, LONGEST))


def read_jsonl(path: Path) -> Iterator[str]:
    """Documents of a .jsonl file: the field `text` of each line."""
    for number, line in enumerate(lines(path), start=1):
        try:
            record = json.loads(line) if line.strip() else {"text": ""}
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON, or longer than {LONGEST_LINE:,}: {error}") from error
        yield text_field(record, f"{path}, line {number}")


def text_field(record: object, where: str) -> str:
    """`record["text"]`, or a UserError that lists the columns that are there."""
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        columns = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: no text column `text`; found: {columns}")
    return record["text"].encode(errors="replace").decode()  # JSON can hold half a surrogate pair


def read_parquet(path: Path) -> Iterator[str]:
    """Documents of a .parquet file: its column `text`."""
    import pyarrow
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file: {error}") from error
    text_field({name: "" for name in file.schema_arrow.names}, str(path))
    for batch in file.iter_batches(columns=["text"], batch_size=64):
        yield from (text for text in batch.column(0).to_pylist() if text)


def read_hub(name: str) -> Iterator[str]:
    """Documents of a data set of the Hugging Face Hub, or of a local folder that `datasets` loads; streamed."""
    import datasets
    path, _, config = name.partition(":")
    try:
        stream = datasets.load_dataset(path, config or None, split="train", streaming=True)
        for record in stream:
            yield text_field(record, f"hf:{name}")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"hf:{name}: cannot be loaded ({reason}). Is the name right, and the network there? "
                        "--data docs needs neither") from error


FORMATS = {".txt": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}


def parts(source: str) -> list[tuple[str, str]]:
    """Split --data at `+` and folders into (kind, name) parts, in a fixed order: kind is docs, hf or a suffix."""
    found = []
    for name in source.split("+"):
        kind, path = name.partition(":")[0], Path(name).expanduser()
        if kind in ("docs", "hf"):
            found.append((kind, name.partition(":")[2]))
            continue
        if not path.exists():
            raise UserError(f"--data {name}: no such file or folder; give one, hf:NAME, or docs")
        files = sorted(p for p in path.rglob("*") if text_format(p)) if path.is_dir() else [path]
        if not files or not text_format(files[0]):
            raise UserError(f"--data {name}: holds no text; use {', '.join(FORMATS)}, also .gz or .xz")
        found += [(text_format(p), str(p)) for p in files]
    return found


def text_format(path: Path) -> str | None:
    """The suffix in FORMATS that `path` has, under .gz or .xz too; None if it has none."""
    suffixes = [s for s in path.suffixes if s not in READERS]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS and path.is_file() else None


def documents(part: tuple[str, str]) -> Iterator[str]:
    """The texts of one part of a source, those beyond LONGEST cut, empty ones left out."""
    kind, name = part
    if kind == "docs":
        texts = (text for _, text in read_docs(progress=sys.stderr.isatty()))
    elif kind == "hf":
        texts = read_hub(name)
    else:
        texts = FORMATS[kind](Path(name))
    pieces = (text[i:i + LONGEST] for text in texts for i in range(0, len(text), LONGEST))
    return (text for text in pieces if text and not text.isspace())


def fingerprint(part: tuple[str, str]) -> str:
    """A hash of what a part contains: of each file's size and bytes (beyond 64 MiB of 64 pieces of 1 MiB, evenly
    spread), or of the name of a Hub data set."""
    kind, name = part
    digest = hashlib.blake2b(f"{kind}:{name if kind == 'hf' else ''}".encode(), digest_size=16)
    files = [path for _, path in docs_files()] if kind == "docs" else [] if kind == "hf" else [Path(name)]
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8))
        with open(path, "rb") as file:
            for start in range(0, size, max(1 << 20, size // 64)):
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


def blocks_from(place: tuple[int, int], found: list[tuple[str, str]]) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """The blocks of all documents from `place` = (part, number) on, each with the place where the next one starts."""
    first, number = place
    for part in range(first, len(found)):
        for block in blocks(itertools.islice(documents(found[part]), number, None), BLOCK_CHARACTERS):
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
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), start_worker, (function,)) as pool:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError("a process was killed, perhaps for want of memory: give fewer --processes; the same command "
                        "continues") from error


def start_worker(function: Callable) -> None:
    """Make this process compute `function` and end with its parent, by Ctrl-C or however that one ends."""
    global work_here
    work_here = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def work(item: object) -> object:
    """The function of `start_worker`, in a worker."""
    return work_here(item)


def bytes_read(description: str, **more) -> tqdm:
    """A progress bar in bytes; a line a minute where stderr is no terminal."""
    line = "{desc}: {n_fmt}B" + ", of {total_fmt}B, {remaining} left" * bool(more) + ", {rate_fmt}\n"
    shown = {} if sys.stderr.isatty() else dict(mininterval=60, delay=60, bar_format=line)
    return tqdm(desc=description, unit="B", unit_scale=True, leave=False, miniters=1, **shown, **more)


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
    kept, size, total, share = [], 0, 0, 1.0
    with bytes_read("reading") as bar:
        for text in map(str.encode, texts):
            total += len(text)
            bar.update(len(text))
            if unit_hash(text) >= max(val_share, 1 - share):
                kept.append(text)
                size += len(text)
            while size > most:
                share /= 2
                kept = [text for text in kept if unit_hash(text) >= 1 - share]
                size = sum(map(len, kept))
    rule = f"the training documents among the {share:g} of all with the highest hashes"
    return kept, {"bytes": total, "sample": {"rule": rule, "documents": len(kept), "bytes": size}}


def encode_block(tokenizer: Tokenizer, val_share: float, dtype: np.dtype,
                 block: tuple[tuple[int, int], list[str]]) -> tuple[tuple[int, int], int, dict[str, np.ndarray]]:
    """The place and the texts of a block to the place, the bytes of text and the tokens of either part (length,)
    dtype: its documents, each followed by `[SEP]`."""
    place, texts = block
    pieces = {"train": [np.empty(0, dtype)], "val": [np.empty(0, dtype)]}
    size, sep = 0, np.array([SEP], dtype)
    for text in texts:
        raw = text.encode()
        size += len(raw)
        pieces["val" if unit_hash(raw) < val_share else "train"] += [tokenizer.encode(text), sep]
    return place, size, {part: np.concatenate(found, dtype=dtype, casting="unsafe") for part, found in pieces.items()}


def pack(stream: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream of tokens (length,) into rows `[CLS]` + n - 1 tokens; returns them (rows, n) and the rest."""
    count = len(stream) // (n - 1)
    body = stream[:count * (n - 1)].reshape(count, n - 1)
    return np.insert(body, 0, CLS, axis=1), stream[count * (n - 1):]


class ShardWriter:
    """Packs the tokens of one part ("train" or "val") into rows (n,) and writes them as shards; `shards` lists them.
    `rest` are the tokens of a row that is not full yet."""

    def __init__(self, folder: Path, part: str, n: int, shards: list, rest: np.ndarray):
        self.folder, self.part, self.n, self.shards, self.rest = folder, part, n, shards, rest
        self.rows, self.tokens, self.min_real = [], 0, n

    def add(self, stream: np.ndarray) -> None:
        """Append tokens (length,)."""
        rows, self.rest = pack(np.concatenate([self.rest, stream]), self.n)
        real = (rows >= NUM_SPECIAL).sum(axis=1)
        rows, real = rows[real >= self.n // 4], real[real >= self.n // 4]  # rows of separators teach nothing
        self.min_real = min(self.min_real, int(real.min(initial=self.n)))
        self.rows.append(rows)
        self.tokens += rows.size

    def flush(self) -> None:
        """Write the rows collected so far as the next shard, if there are any."""
        if self.tokens:
            path = self.folder / f"{self.part}-{len(self.shards):05d}.npy"
            rows = np.concatenate(self.rows)
            with atomic(path) as temporary, open(temporary, "wb") as file:
                np.save(file, rows)
            self.shards.append([path.name, len(rows)])
        self.rows, self.tokens = [], 0


def write_shards(source: str, out: Path, meta: dict, processes: int) -> None:
    """Tokenize the corpus from `meta["progress"]` on. Whenever a part has SHARD_TOKENS, both end a shard, and
    progress.json says what is done: the next document, the bytes, the tokens that wait. At the end it becomes
    meta.json. UserError if a part is too small for a row."""
    dtype, place, done = np.dtype(meta["dtype"]), meta["progress"]["place"], meta["progress"]["bytes"]
    writers = {part: ShardWriter(out, part, meta["seq_len"], meta[part], np.array(rest, dtype))
               for part, rest in meta["progress"]["rest"].items()}

    def save() -> None:
        for writer in writers.values():
            writer.flush()
            meta["min_real"] = min(meta["min_real"], writer.min_real)
        rest = {part: writer.rest.tolist() for part, writer in writers.items()}
        write_json(out / "progress.json", meta | {"progress": {"place": place, "bytes": done, "rest": rest}})

    for stale in out.glob(".*.tmp"):  # of a command that was killed
        stale.unlink()
    encode = functools.partial(encode_block, Tokenizer.load(out), meta["val_share"], dtype)
    processes = min(processes, 1 + max(0, meta["bytes"] - done) // PROCESS_BYTES)
    with bytes_read("tokenizing", total=meta["bytes"], initial=done) as bar:
        for place, size, streams in in_order(encode, blocks_from(place, parts(source)), processes):
            for part, writer in writers.items():
                writer.add(streams[part])
            done += size
            bar.update(size)
            if max(writer.tokens for writer in writers.values()) >= SHARD_TOKENS:
                save()
    save()
    for part in writers:
        if not meta[part]:
            raise too_small(source, part, meta["seq_len"])
    del meta["progress"]
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()


def too_small(source: str, part: str, seq_len: int) -> UserError:
    """What to say of a part without a single row."""
    return UserError(f"--data {source}: its {part} part is too small for one row of seq_len={seq_len} tokens; use more "
                     "text, a smaller --seq-len, or another --val-share")


def begun(out: Path, options: dict) -> dict | None:
    """What an earlier command with the same options wrote about `out`; None if nothing. UserError if they differ."""
    known = [path for path in (out / "meta.json", out / "progress.json") if path.is_file()]
    meta = json.loads(known[0].read_text()) if known else options
    for field, value in options.items():
        if meta.get(field) != value:
            raise UserError(f"{out}: holds a corpus prepared with {field}={meta.get(field)}, this command has "
                            f"{field}={value}: choose another --out, or delete the folder")
    return meta if known else None


def prepare(source: str, out: Path, vocab_size: int, seq_len: int, uncased: bool, val_share: float,
            sample_mb: int = 200, processes: int | None = None) -> Path:
    """Train a tokenizer on a `sample` of at most `sample_mb` million bytes and write shards to `out`, in so many
    processes (default: one per core); or go on with that; or find it done. Returns `out`; UserError for bad, missing
    or too little text, and for an `out` that holds another corpus."""
    options = {"vocab_size": vocab_size, "seq_len": seq_len, "uncased": uncased, "val_share": val_share,
               "sample_mb": sample_mb, "content_hash": content_hash(source)}
    meta = begun(out, options)
    if meta is None:
        every = itertools.chain.from_iterable(map(documents, parts(source)))
        texts, facts = sample(every, val_share, sample_mb * 10 ** 6)
        if not texts:
            raise too_small(source, "train", seq_len)
        Tokenizer.train(map(bytes.decode, texts), vocab_size, uncased).save(out)
        meta = {"source": source, **options, **facts, "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
                "min_real": seq_len, "train": [], "val": [],
                "progress": {"place": (0, 0), "bytes": 0, "rest": {"train": [], "val": []}}}
        write_json(out / "progress.json", meta)
        del texts
    if "progress" in meta:
        write_shards(source, out, meta, processes or os.cpu_count() or 1)
    return out


def content_hash(source: str) -> str:
    """A hash of all that --data reads."""
    return hashlib.blake2b(" ".join(map(fingerprint, parts(source))).encode(), digest_size=8).hexdigest()


def corpus(source: str, cache: Path, vocab_size: int, seq_len: int, uncased: bool, val_share: float) -> Path:
    """The folder of shards for `source`: itself if data.py prepare made it, else prepared once below `cache`
    and found again by the hash of its content and of these arguments."""
    if (Path(source).expanduser() / "meta.json").is_file():
        return Path(source).expanduser()
    key = [content_hash(source), vocab_size, seq_len, uncased, val_share, 2]
    folder = cache.expanduser() / hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
    if not (folder / "meta.json").is_file():
        prepare(source, folder, vocab_size, seq_len, uncased, val_share)
    return folder


# ---- 5. Rows of a step --------------------------------------------------------------------------------------
class Rows:
    """All rows of one part ("train", "val") of a prepared folder, memory-mapped; UserError for a bad shard."""

    def __init__(self, folder: Path, part: str, vocab_size: int, seq_len: int):
        meta = json.loads((folder / "meta.json").read_text())
        for field, value in (("seq_len", seq_len), ("vocab_size", vocab_size)):
            if meta[field] != value:
                raise UserError(f"{folder}: prepared with {field}={meta[field]}, this run has {value}: pass "
                                f"--{field.replace('_', '-')} {meta[field]} or prepare it again")
        self.min_real, self.vocab_size = meta["min_real"], vocab_size
        self.shards = [self.open(folder / name, (count, seq_len), meta["dtype"]) for name, count in meta[part]]
        self.ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    @staticmethod
    def open(path: Path, shape: tuple[int, int], dtype: str) -> np.ndarray:
        """Memory-map a shard and check its header against meta.json."""
        try:
            shard = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not a readable shard ({error}); prepare the data again") from error
        if shard.shape != shape or shard.dtype != dtype:
            raise UserError(f"{path}: bad header: {shard.dtype} {shard.shape}, meta.json says {dtype} {shape}; "
                            "prepare the data again")
        if hasattr(mmap, "MADV_RANDOM"):  # rows are drawn at random: do not read what lies around each
            shard.base.madvise(mmap.MADV_RANDOM)
        return shard

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Rows (B, seq_len) int64 at indices (B,); UserError if a token id is beyond the vocabulary."""
        shard = np.searchsorted(self.ends, indices, side="right")
        rows = np.stack([self.shards[s][i - self.ends[s]] for s, i in zip(shard, indices)]).astype(np.int64)
        if rows.max() >= self.vocab_size:
            bad = indices[(rows >= self.vocab_size).any(axis=1)][0]
            raise UserError(f"row {bad} holds token id {rows.max()}, but vocab_size={self.vocab_size}: the shards "
                            "are damaged or of another tokenizer; prepare the data again")
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
    sample = step * batch_size + np.arange(batch_size)
    epoch, x = sample // total, (sample % total).astype(np.uint64)
    h = np.uint64(max(1, (total.bit_length() + 1) // 2))
    low = np.uint64((1 << int(h)) - 1)
    keys = mix(np.array([[seed_of(seed, r) for r in range(4)]], np.uint64) + epoch[:, None].astype(np.uint64))
    outside = np.ones(batch_size, bool)
    while outside.any():
        left, right = x >> h, x & low
        for key in keys.T:
            left, right = right, left ^ (mix(right + key) & low)
        x = np.where(outside, left << h | right, x)
        outside = x >= total
    return x.astype(np.int64)


# ---- 6. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="data.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["prepare"])
    add("--data", default="docs", help="docs, a file, a folder, hf:NAME[:CONFIG]; joined by +")
    add("--out", type=Path, required=True, help="folder for the tokenizer and the shards")
    add("--vocab-size", type=int, default=32768, help="special tokens, bytes and merges in all")
    add("--seq-len", type=int, default=512, help="tokens in a row")
    add("--uncased", action=argparse.BooleanOptionalAction, default=True, help="lower-case all text")
    add("--val-share", type=float, default=0.01, help="share of documents held out")
    add("--sample-mb", type=int, default=200, help="the tokenizer learns from at most so many million bytes: the "
        "training documents with the highest hashes, from all over the corpus")
    add("--processes", type=int, default=os.cpu_count() or 1, help="that tokenize; any number gives the same files"
        " [%(default)s]")
    arguments = vars(parser.parse_args(argv))
    for name, least in (("vocab_size", 261), ("seq_len", 2), ("sample_mb", 1), ("processes", 1)):
        if arguments[name] < least:
            parser.error(f"--{name.replace('_', '-')} {arguments[name]}: use at least {least}")
    if not 0 < arguments["val_share"] < 1:
        parser.error(f"--val-share {arguments['val_share']}: use a number between 0 and 1")
    del arguments["command"]
    source = arguments.pop("data")
    with clear_errors("data.py"):
        folder = prepare(source, **arguments)
        meta = json.loads((folder / "meta.json").read_text())
        rows = {part: sum(count for _, count in meta[part]) for part in ("train", "val")}
        print(f"{folder}: {rows['train']:,} training and {rows['val']:,} validation rows of {meta['seq_len']} tokens")


if __name__ == "__main__":
    main()
