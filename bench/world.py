"""The small world that faults.py attacks: what is in it, how its files are damaged, what came of a command.

A world is a folder with a text, its shards, shards half made, a run, half a run, a fine-tuned encoder, ranks, and small
tasks. Attacks work in copies of it. A command is given as it stands in the tables of faults.py and in inputs.txt: its
first word is one of COMMANDS, and paths are relative to the world.

Outcomes of a command, of which the first three are right:

    harmless   ended with exactly the result of an undisturbed command: weights, shards, numbers
    repaired   the same, and it said what was wrong
    refused    one line on stderr, the documented exit code, no content of any file lost
    WRONG      ended well with another result
    TRACEBACK  ended with an error that nobody caught
    UNCLEAR    several lines, another exit code, or refused where nothing was wrong any more
    LOST       refused, but the content of a file is gone
"""
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402

import classroom  # noqa: E402
import convert  # noqa: E402
import data  # noqa: E402
import finetune  # noqa: E402
import rank  # noqa: E402
import stand_in  # noqa: E402
import train  # noqa: E402
from conftest import QUICK, sentence, write_corpus  # noqa: E402
from files import unseal  # noqa: E402

GOOD = ("harmless", "repaired", "refused")
PROGRAMS = {"train": train, "data": data, "rank": rank, "finetune": finetune, "classroom": classroom,
            "convert": convert}
PREPARED = ["--data", "text.txt", "--vocab-size", "320", "--seq-len", "24", "--val-share", "0.3", "--processes", "1"]
# The first word of a command -> its program, and the arguments that every such command has.
COMMANDS = {
    "train": ("train", ["--data", "shards", "--cache", "cache", "--out", "new", *QUICK]),
    "prepare": ("data", ["prepare", *PREPARED, "--out", "new"]),
    "verify": ("data", ["verify"]),
    "rank": ("rank", ["--data", "text.txt", "--val-share", "1", "--tokens", "3000", "--out", "new"]),
    "tune": ("finetune", ["--init", "run", "--task", "custom", "--data", "task", "--seeds", "1", "--epochs", "1",
                          "--out", "new"]),
    "class": ("classroom", []),
    "convert": ("convert", []),
}


# ---- 1. A small world ---------------------------------------------------------------------------------------
def words(command: str) -> tuple[str, list[str]]:
    """A command as it stands in the tables -> its program, and its arguments."""
    first, *rest = shlex.split(command)
    program, given = COMMANDS[first]
    return program, [*given, *rest]


class Ended(NamedTuple):
    """How a command ended."""
    code: int
    out: str
    err: str


@contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Yield what is printed to stdout and stderr; to the latter also what libraries print that are not Python."""
    out, err = io.StringIO(), io.StringIO()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file, redirect_stdout(out), redirect_stderr(err):
        os.dup2(file.fileno(), 2)
        try:
            yield out, err
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            err.write(file.read().decode(errors="replace"))


def call(command: str) -> Ended:
    """Run the main() of a program in this process and in the current folder."""
    program, arguments = words(command)
    code = 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with captured() as (out, err):
        try:
            PROGRAMS[program].main(arguments)
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic in Rust is no Exception
            traceback.print_exc()
            code = 1
    for number, handler in handlers.items():
        signal.signal(number, handler)
    finetune.read_task.cache_clear()  # a process of its own would not remember
    return Ended(int(code), out.getvalue(), err.getvalue())


def must(command: str) -> None:
    """Run a command that has to end well."""
    ended = call(command)
    if ended.code:
        raise RuntimeError(f"{command}: {ended.err}")


@contextmanager
def world() -> Iterator[Path]:
    """Make the world, in a temporary folder: a text, its shards, shards half made, a run, half a run, a fine-tuned
    encoder, ranks, and small tasks."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(data, **stand_in.SMALL):
        home = Path(folder) / "home"
        home.mkdir()
        with chdir(home):
            write_corpus(Path("text.txt"))
            write_tasks()
            must("prepare --out shards")
            prepare_half()
            must("train --out run")
            must("train --out half --stop-at 3 --checkpoint-interval 1")
            must("train --out other --seed 1 --stop-at 3")
            must("tune --out tuned")
            must("rank run --out ranks")
        yield home


def write_tasks() -> None:
    """Small tasks in the formats that finetune.py reads."""
    for folder in ("task", "glue", "squad"):
        Path(folder).mkdir()
    for part in ("train", "dev"):
        texts = [sentence(i) for i in range(16)]
        lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
        Path(f"task/{part}.jsonl").write_text("\n".join(lines))
        rows = [f"{i}\t{text}\t{text}\tentailment" for i, text in enumerate(texts)]
        Path(f"glue/{part}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]))
        asked = [{"id": str(i), "question": "who?", "answers": [{"text": text[:5], "answer_start": 0}]}
                 for i, text in enumerate(texts)]
        paragraphs = [{"context": text, "qas": [question]} for text, question in zip(texts, asked)]
        Path(f"squad/{part}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def prepare_half() -> None:
    """What `data.py prepare` leaves in the folder `begun` when it dies at its second progress.json."""
    written = []

    def dying(path: Path, value: object) -> None:
        written.append(path.name)
        if written.count("progress.json") == 3:
            raise MemoryError
        write_json(path, value)

    write_json = data.write_json
    with mock.patch.object(data, "write_json", dying):
        if call("prepare --out begun").code == 0:
            raise RuntimeError("prepare was to die")


@contextmanager
def copy_of(home: Path) -> Iterator[None]:
    """Work in a copy of the world, which is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        shutil.copytree(home, folder, dirs_exist_ok=True)
        with chdir(folder):
            yield


# ---- 2. Results and outcomes --------------------------------------------------------------------------------
TIMES = {"seconds", "tokens_per_second", "waiting", "logged", "checksum", "crc"}  # differ between equal runs


def without_times(value: object) -> object:
    """A JSON value, or what a checkpoint holds, without the fields of TIMES; tensors by their bytes."""
    if isinstance(value, dict):
        return {str(name): without_times(inner) for name, inner in value.items() if name not in TIMES}
    if isinstance(value, list | tuple):
        return [without_times(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return hashlib.blake2b(value.numpy().tobytes(), digest_size=8).hexdigest()
    return value


def content(path: Path) -> object:
    """What a file says, times apart; equal contents are equal results."""
    raw = path.read_bytes()
    try:
        if path.suffix == ".pt":
            return without_times(torch.load(path, weights_only=True))
        if path.suffix == ".json":
            value = json.loads(raw)
            return without_times(unseal(value, "checksum") if isinstance(value, dict) else value)
        if path.suffix == ".jsonl":
            lines = [without_times(unseal(json.loads(line), "crc")) for line in raw.splitlines()]
            return sorted(lines, key=json.dumps)  # processes that share a sweep end in any order
    except Exception as error:  # damaged, in many ways
        return f"{type(error).__name__}"
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def result_of(folder: str, ended: Ended) -> dict:
    """What a command left in a folder: all files but pictures, and of checkpoints the last; without a folder, what it
    printed."""
    if not folder:
        return {"printed": ended.out}
    kinds = (".json", ".jsonl", ".csv", ".npy", ".pt")
    files = [path for path in sorted(Path(folder).glob("[!.]*")) if path.suffix in kinds]
    numbered = [path for path in files if path.stem.removeprefix("step_").isdecimal()]
    return {path.name: content(path) for path in files if path not in numbered[:-1]}


@functools.cache
def undisturbed(home: Path, command: str, folder: str) -> dict:
    """The result of a command that nothing disturbs, in a copy of the world."""
    with copy_of(home):
        ended = call(command)
        if ended.code:
            raise RuntimeError(f"{command}: {ended.err}")
        return result_of(folder, ended)


def contents() -> Counter:
    """How often each content occurs in the files below the current folder, locks apart."""
    files = [path for path in Path().rglob("*") if path.is_file() and ".lock" not in str(path)]
    return Counter(path.read_bytes() for path in files)


def outcome(ended: Ended, right: bool, lost: bool = False, code: int = 2) -> str:
    """The outcome of a command: whether its result was right, whether some content was lost."""
    if "Traceback" in ended.err:
        return "TRACEBACK"
    if ended.code == 0:
        said = "repaired" if ended.err else "harmless"
        return said if right else "WRONG"
    # Who waits for another process says so first.
    said = [line for line in ended.err.strip().splitlines() if not line.startswith("waiting for ")]
    if ended.code != code or len(said) != 1:
        return "UNCLEAR"
    return "LOST" if lost else "refused"


def then(home: Path, command: str, folder: str) -> tuple[str, Ended]:
    """Give a command (again): it has to end well, with the undisturbed result."""
    ended = call(command)
    found = outcome(ended, has(result_of(folder, ended), undisturbed(home, command, folder)))
    if found == "refused":
        found = "UNCLEAR"  # nothing is wrong any more
    return found, ended


def has(found: dict, wanted: dict) -> bool:
    """Whether a result holds all of another one; it may hold more, such as a damaged file under a new name."""
    return wanted.items() <= found.items()


# ---- 3. Processes -------------------------------------------------------------------------------------------
class Victim:
    """A process that runs a command by way of stand_in.py; `processes` of them under torchrun."""

    def __init__(self, change: str, place: str, command: str, processes: int = 1):
        program, arguments = words(command)
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        self.process = subprocess.Popen([*launcher, HERE / "stand_in.py", change, place, program, *arguments],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.ids = [self.process.pid]
        self.processes = processes
        self.waits = change == "wait"

    def ready(self) -> bool:
        """Wait until all processes are where they were to get; False if they have ended."""
        for line in self.process.stdout:
            if line.startswith("ready"):
                self.ids.append(int(line.split()[1]))
            if len(self.ids) > self.processes:
                return True
        return False

    def go(self) -> None:
        """Let a process that waits go on."""
        self.waits = False
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has gone on and ended
            pass

    def kill(self, ids: list[int]) -> bool:
        """kill -9; False if it had ended before."""
        alive = self.process.poll() is None
        for number in ids:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return alive

    def end(self) -> Ended:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=300)
        return Ended(self.process.returncode, out, err)


# ---- 4. Damage ------------------------------------------------------------------------------------------------
def cut(raw: bytes) -> bytes:
    """The first half."""
    return raw[:len(raw) // 2]


def flip_middle(raw: bytes) -> bytes:
    """A flipped bit in the middle."""
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 4]) + raw[middle + 1:]


def table(**columns) -> Callable:
    """A Parquet file with these columns."""
    def make(raw: bytes) -> bytes:
        import pyarrow
        import pyarrow.parquet
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        return file.getvalue()
    return make


class Malice:
    """Unpickled, it would make a file."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("malice",)


def tensors(change: Callable) -> Callable:
    """A checkpoint, changed."""
    def make(raw: bytes) -> bytes:
        file = io.BytesIO()
        torch.save(change(torch.load(io.BytesIO(raw), weights_only=True)), file)
        return file.getvalue()
    return make


def with_nan(state: dict) -> dict:
    """All weights NaN."""
    weights = state.get("model", state.get("encoder"))
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    return state


def high_ids(raw: bytes) -> bytes:
    """A shard whose last row has ids beyond every vocabulary."""
    return raw[:-48] + b"\xff" * 48


def without(name: str) -> Callable:
    """JSON, or a checkpoint, without a field."""
    def remove(value: dict) -> dict:
        return {key: inner for key, inner in value.items() if key != name}

    def make(raw: bytes) -> bytes:
        if raw[:1] == b"{":
            return json.dumps(remove(json.loads(raw))).encode()
        return tensors(remove)(raw)
    return make


DAMAGE = {
    "cut": cut,
    "flip": flip_middle,
    "deep": lambda raw: b"[" * 100_000,
    "nul": lambda raw: raw.replace(b" ", b"\0", 1),
    "gzcut": lambda raw: cut(gzip.compress(raw)),
    "gzflip": lambda raw: flip_middle(gzip.compress(raw, mtime=0)),
    "xzcut": lambda raw: cut(lzma.compress(raw)),
    "xzflip": lambda raw: flip_middle(lzma.compress(raw)),
    "utf16": lambda raw: (raw.decode() or sentence(1)).encode("utf-16-le"),
    "more": lambda raw: raw + b"\n\n" + sentence(5000).encode(),
    "long": lambda raw: raw + b'"' + b"x" * 200_000 + b'"\n',
    "lastline": lambda raw: b"".join(raw.splitlines(keepends=True)[:-1]),
    "brokenline": lambda raw: raw.replace(b"{", b"(", 1),
    "numbers": table(text=[1, 2], label=[0, 1]),
    "body": table(body=["a", "b"]),
    "bytes": table(text=[b"\xff\xfe", b"\x00"], label=[0, 1]),
    "lists": table(text=[["a"], ["b"]], label=[0, 1]),
    "malice": tensors(lambda state: Malice()),
    "foreign": tensors(lambda state: {"weight": torch.ones(2)}),
    "list": tensors(lambda state: [1, 2]),
    "nan": tensors(with_nan),
    "noweights": without("model"),
    "noconfig": without("config"),
    "nooptimizers": without("optimizers"),
    "nostep": without("step"),
    "notrain": without("train"),
    "novocab": without("vocab_size"),
    "highids": high_ids,
}


def damage(path: Path, how: str) -> None:
    """Write a file, or change it: <FILE, a copy; @NAME of DAMAGE; @gone, @folder, @link (to nowhere), @loop; else its
    new content, with Python's escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if how == "@folder":
        path.mkdir()
    elif how in ("@link", "@loop"):
        path.symlink_to("nowhere" if how == "@link" else path.name)
    elif how.startswith("<"):
        shutil.copy(how[1:], path)
    elif how.startswith("@") and how != "@gone":
        path.write_bytes(DAMAGE[how[1:]](raw))
    elif how != "@gone":
        path.write_bytes(how.encode().decode("unicode_escape").encode("latin-1"))


def step(line: str) -> str:
    """Do what stands before the last ` ; ` of a line, and return the rest: a command. What stands before are commands
    and FILE=CONTENT, FILE=<FILE, FILE=@DAMAGE."""
    *before, last = line.split(" ; ")
    for part in before:
        if part.split()[0] in COMMANDS:
            must(part)
            continue
        for word in shlex.split(part):
            file, _, how = word.partition("=")
            damage(Path(file), how)
    return last
