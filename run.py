"""What the programs share: the machine a run is on, the folder it leaves, the encoder it ends with.

    1. Flags         a flag for every field of a configuration
    2. The machine   Place: rank, device and dtype of this process; set_up joins torchrun's process group
    3. Signals       Interrupt and Clock, while a program computes
    4. Tensors       files of tensors and numbers, compared with their checksums
    5. The folder    config.json, log.jsonl, checkpoints step_*.pt, figures
    6. The encoder   of a run folder, of one checkpoint, of finetune.py (encoder.pt), or of the Hugging Face Hub

`files.py`, `data.py` and `maelm.py` are all that this file imports of the project.
"""
import argparse
import ctypes
import errno
import inspect
import os
import pickle
import re
import signal
import struct
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from data import Tokenizer, corpus
from files import PATIENCE, UserError, atomic, read_json, read_lines
from maelm import MAELM, Config, Encoder


# ---- 1. Flags made from a dataclass -------------------------------------------------------------------------
def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for every field of a dataclass, with the comment behind the field as its help."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.MULTILINE))
    group = parser.add_argument_group(config.__name__)
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        comment = comments.get(field.name, "")
        text = f"{comment} [{field.default}]".strip().replace("%", "%%")  # argparse formats its help with %
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given leaves no trace, so that a preset can decide.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **kind)


def given_flags(options: argparse.Namespace, config: type) -> dict:
    """The fields of a dataclass that the command line gave, by name."""
    return {field.name: getattr(options, field.name) for field in fields(config) if field.name in options}


# ---- 2. The machine -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where this process computes: its rank of `world` processes, its device, and autocast's dtype."""
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        """A fresh context in which matrix products are in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over all processes."""
        if self.world == 1:  # an Apple GPU, for one, has no float64
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest of a number over all processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        return total.item()

    def gather(self, value: object) -> list:
        """A value of each process, by rank, in all of them."""
        if self.world == 1:
            return [value]
        found = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; elsewhere bf16 is slower than fp32."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: to give each activation back and fault it in again cost 7 % of a toy step."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)  # the C library that this process has loaded; musl's has no mallopt
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


DEVICES = ("auto", "cpu", "cuda", "mps")  # what --device can be


def best_device(name: str, small: bool) -> torch.device:
    """The device that --device names, or for auto the best there is: a GPU of NVIDIA, an Apple GPU unless the model is
    `small`, the CPU. UserError if this machine has no such device."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        # An Apple GPU has hundreds of kernels to start for a step of the toy, which its CPU computes as fast.
        name = "cuda" if there["cuda"] else "mps" if there["mps"] and not small else "cpu"
    if not there[name]:
        raise UserError(f"--device {name}: this machine, or this PyTorch, has none; use --device auto")
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)


def has_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 are fast on this device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 emulates it, slowly
    return device.type == "cpu" and cpu_has_bf16()


def choose_place(precision: str, device: str = "auto", small: bool = False) -> Place:
    """The device and dtype of this process, and which of torchrun's processes it is. UserError as best_device."""
    device = best_device(device, small)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        # cuDNN's attention may read a mask as another dtype. Turned off here, once: a context around the call would
        # have torch.compile compile again at every start.
        torch.backends.cuda.enable_cudnn_sdp(False)
    keep_freed_memory()
    bf16 = precision == "bf16" or (precision == "auto" and has_bf16(device))
    return Place(rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)),
                 device=device, dtype=torch.bfloat16 if bf16 else torch.float32)


@contextmanager
def first_alone() -> Iterator[None]:
    """What is inside is done by the first of torchrun's processes, and when it is through, by the others; then all join
    a process group. So what is wrong is found, and said, by one process, and what takes long is done once, before
    anybody waits with a time limit. Of one process alone: nothing but what is inside."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    # torchrun's store, in which the processes meet. It still holds what others wrote there before a restart: so each
    # process says its name, a new one, and waits for an answer to that from the first process: the first one's name.
    store, rank, world = next(dist.rendezvous("env://"))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"process {rank}", name)
        while not store.check([name]):
            time.sleep(0.2)
        name = store.get(name).decode()
    yield
    group = dist.PrefixStore(name, store)  # a part of the store that only they know
    group.add("through", 1)
    while group.add("through", 0) < world:
        if rank == 0:
            answer(store, world, name)
        time.sleep(0.2)
    if torch.cuda.is_initialized():  # choose_place has taken a GPU
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", store=group, rank=rank, world_size=world, device_id=device)
    else:
        dist.init_process_group("gloo", store=group, rank=rank, world_size=world)


def answer(store: dist.Store, world: int, name: str) -> None:
    """Tell the other processes, as far as they have said their names, that of the first one."""
    for rank in range(1, world):
        if store.check([f"process {rank}"]):
            other = store.get(f"process {rank}").decode()
            store.set(other, name)


@contextmanager
def first_speaks() -> Iterator[None]:
    """If the first of torchrun's processes ends with an error, the others lose their connection to it and raise errors
    of their own. They wait before: meanwhile torchrun ends them."""
    try:
        yield
    except RuntimeError:
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(PATIENCE)
        raise


def set_up(precision: str, device: str = "auto") -> Place:
    """Choose device and dtype, and join the process group if torchrun started this process."""
    with first_alone():
        return choose_place(precision, device)


# ---- 3. Signals and time ------------------------------------------------------------------------------------
class Interrupt:
    """While entered, notes SIGTERM and SIGINT, and that the reader of stdout has gone (`| head`), so that the step in
    progress ends and a checkpoint is written; a second Ctrl-C acts at once."""

    def __enter__(self) -> "Interrupt":
        self.signal = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: object) -> None:
        """Signal handler."""
        self.signal = number
        if number == signal.SIGINT:  # while SIGTERM comes twice at once, from Slurm and from torchrun
            signal.signal(number, self.before[number])

    def say(self, bar: tqdm, text: str) -> None:
        """Print a line above a progress bar."""
        try:
            bar.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.signal = self.signal or 13  # SIGPIPE, which Windows does not name


class Clock:
    """Counts seconds of training. `mark` says how many there were at the last line of the log, and `waited` how many
    have since then been spent waiting for rows."""

    def __init__(self, seconds: float):
        self.start = time.perf_counter() - seconds
        self.lap(seconds)

    def now(self) -> float:
        """Seconds in all, pauses apart."""
        return time.perf_counter() - self.start

    def lap(self, mark: float) -> None:
        """Start to count from a new mark."""
        self.mark, self.waited = mark, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While entered, the clock stands still."""
        before = self.now()
        yield
        self.start = time.perf_counter() - before


# ---- 4. Files of tensors and numbers ------------------------------------------------------------------------
class Damaged(UserError):
    """A file that is not as it was written."""


DAMAGE = (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError)  # raised for a zip with wrong bits
FOREIGN = (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError, AssertionError, RecursionError,
           struct.error)  # raised by a whole file that holds other things than tensors and numbers


def check_zip(path: Path) -> None:
    """Compare every part of a .pt file, which is a zip archive, with its checksum. One of DAMAGE if one differs."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            # PyTorch stores plain files: one wrong bit says packed, or a folder (which it would read as empty) ...
            if part.compress_type or part.external_attr:
                raise zipfile.BadZipFile(f"{part.filename} is no plain file")
            if part.flag_bits & 1:  # ... or encrypted
                raise zipfile.BadZipFile(f"{part.filename} is encrypted")
        wrong = archive.testzip()
        if wrong:
            raise zipfile.BadZipFile(f"{wrong} differs from its checksum")


def read_tensors(path: Path) -> dict:
    """What a .pt file holds, on the CPU; it runs no code. UserError if the file is missing or foreign, and Damaged if
    it is not as it was written. Whatever else is raised, for example for want of memory, says nothing of the file."""
    try:
        check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGE as error:
        raise Damaged(f"{path}: damaged, or no checkpoint ({error or 'cut off'})") from error
    except FOREIGN as error:
        raise UserError(f"{path}: not written by this project: {first_line(error)}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
        raise Damaged(f"{path}: damaged (a part would be outside of the file)") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):  # out of memory, and all else that may be raised
            raise
        raise Damaged(f"{path}: damaged ({first_line(error)})") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: not written by this project: holds a {type(state).__name__}")
    return state


def write_tensors(path: Path, state: dict) -> None:
    """Write tensors and numbers atomically. UserError if that fails, for example on a full disk."""
    # No objects of ours in `state`: so it can be read with weights_only=True, which runs no code.
    with atomic(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # PyTorch's writer covers the error of the disk with its own
                raise error.__context__ from None
            raise


def first_line(error: Exception) -> str:
    """The first line of what an exception says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_fields(path: Path, state: dict, **kinds: type | tuple) -> None:
    """UserError if a file holds no field of a name, or one of another type."""
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise UserError(f"{path}: its field {name!r} is missing or of another type; restore the file from a "
                            "copy")


def check_weights(path: Path, module: nn.Module, weights: dict) -> None:
    """UserError if the weights that a file holds do not fit into a module."""
    wanted = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    found = {name: tuple(getattr(x, "shape", ())) for name, x in weights.items()}
    for name in wanted.keys() | found.keys():
        if found.get(name) != wanted.get(name):
            raise UserError(f"{path}: the weight {name} has shape {found.get(name, 'none')}, its configuration asks for"
                            f" {wanted.get(name, 'none')}: not a file of this project")


def with_weights(path: Path, make: Callable[[Config], nn.Module], state: dict, name: str) -> nn.Module:
    """The module make(Config) with the configuration and the weights, state[name], that a file holds. UserError if they
    do not fit together."""
    check_fields(path, state, config=dict, **{name: dict})
    try:
        config = Config(**state["config"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its configuration is not one of this project ({first_line(error)})") from error
    with torch.device("meta"):  # shapes without memory
        check_weights(path, make(config), state[name])
    module = make(config)
    module.load_state_dict(state[name])
    return module


# ---- 5. The folder that a run leaves ------------------------------------------------------------------------
CHECKPOINT = re.compile(r"step_([0-9]{7})\.pt")  # nothing else in a run folder is ours to load or to delete


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint states; None of any other name."""
    match = CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(path for path in out.glob("step_*.pt") if step_of(path) is not None and path.is_file())


def checkpoint_path(out: Path, step: int) -> Path:
    """The checkpoint of a run after so many steps."""
    return out / f"step_{step:07d}.pt"


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, identity: dict,
                    keep: int) -> None:
    """Write step_STEP.pt atomically: plain tensors and numbers, and the settings that tell runs apart. Then remove the
    oldest but `keep` (0 = none). UserError, and nothing is written, if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"step {step}: weights are not finite, {name} to begin with: nothing is saved, earlier "
                            "checkpoints stay; start again with a lower --learning-rate in another --out")
    path = checkpoint_path(out, step)
    write_tensors(path, {
        "step": step,
        "seconds": seconds,  # of training, evaluations apart
        "logged": len(read_log(out)),  # a log with fewer lines, when the run continues, has lost some
        "run": identity,
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    })
    older = [other for other in checkpoints(out) if other.name < path.name]
    if keep > 0:
        for other in older[:max(0, len(older) + 1 - keep)]:
            other.unlink()


def load_checkpoint(out: Path, mend: bool = False) -> dict | None:
    """What the newest checkpoint of a run folder holds, on the CPU, or None if there never was one. UserError if it is
    damaged, and as read_tensors. With `mend`, for the program that will train the lost steps again: a damaged one is
    named on stderr, becomes NAME.damaged and is passed over; UserError if there are damaged ones alone."""
    found = checkpoints(out)
    passed_over = []
    for path in reversed(found):
        try:
            state = read_tensors(path)
        except Damaged as error:
            if not mend:
                raise UserError(f"{error}; name an earlier checkpoint, or let train.py continue the run") from error
            passed_over.append(f"{error}; continuing from the one before")
            path.replace(f"{path}.damaged")
            continue
        for line in passed_over:
            print(line, file=sys.stderr)
        if state.get("step") != step_of(path):
            raise UserError(f"{path}: holds step {state.get('step')}; give it back the name that it had")
        return state
    damaged = sorted(path.name for path in out.glob("step_*.pt.damaged"))
    if damaged:
        raise UserError(f"{out}: no whole checkpoint, but damaged ones: {', '.join(damaged)}; put a copy in their "
                        "place, or remove them to start again, or choose another --out")
    return None


def run_settings(folder: Path) -> dict:
    """How the run in `folder` was trained: the TrainConfig in its config.json as a dict, or {} if it has none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    settings = read_json(path)
    check_fields(path, {"train": {}} | settings, train=dict)
    return settings.get("train", {})


def open_corpus(config: Config, settings: dict, folder: Path) -> Path:
    """The folder of shards of a run with these training settings, which is made where there is none: with the tokenizer
    in `folder` if the run began with the weights of another one. Of processes that ask at once, one makes it and the
    others wait."""
    tokenizer = folder if settings.get("init") else None
    return corpus(settings["data"], Path(settings["cache"]), config.vocab_size, config.seq_len, settings["uncased"],
                  settings["val_share"], tokenizer)


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl; a last line that was cut off by a crash is left out."""
    return read_lines(out / "log.jsonl")


@contextmanager
def figure(path: Path, panels: int = 1, rows: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, `rows` of `panels`, without a display; then write it to `path`."""
    import matplotlib
    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt
    drawn, axes = plt.subplots(rows, panels, figsize=(5.2 * panels, 4.2 * rows), layout="constrained")
    yield drawn, axes
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
    plt.close(drawn)


# ---- 6. The encoder that a run ends with --------------------------------------------------------------------
def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[MAELM, Tokenizer]:
    """The model of a run folder, or of one of its checkpoint files, in evaluation mode, and its tokenizer. UserError
    if there is none, or it is damaged or of another program."""
    if path.suffix == ".pt":
        folder, state = path.parent, read_tensors(path)
        if "model" not in state:
            raise UserError(f"{path}: not a checkpoint of train.py, which alone holds a decoder")
    else:
        if not path.is_dir():
            raise UserError(f"{path}: no such run folder; train.py makes one")
        folder, state = path, load_checkpoint(path)
        if state is None:
            raise UserError(f"{path}: holds no checkpoint; run train.py --out {path} first")
    model = with_weights(path, MAELM, state, "model")
    return model.to(device).eval(), Tokenizer.load(folder)


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config]:
    """The encoder of a run folder of train.py, of one of its checkpoints, or of finetune.py (encoder.pt), in evaluation
    mode. UserError if there is none."""
    file = path / "encoder.pt" if path.is_dir() else path
    if file.name != "encoder.pt" or not file.is_file():
        model, tokenizer = load_model(path, device)
        return model.encoder, tokenizer, model.config
    state = read_tensors(file)
    encoder = with_weights(file, Encoder, state, "encoder")
    return encoder.to(device).eval(), Tokenizer.load(file.parent), Config(**state["config"])


class HubEncoder(NamedTuple):
    """An encoder of the Hugging Face Hub, as `transformers` loads it."""
    name: str  # or the folder it is from
    model: nn.Module  # float32, in evaluation mode
    tokenizer: object
    dim: int  # d
    seq_len: int  # the longest input in tokens


def transformers_library(asker: str = ""):
    """The module transformers, silent. UserError, which begins with the `asker`, if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{asker}needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def open_hub(name: str) -> HubEncoder:
    """The encoder that transformers loads from the Hub or a folder (of BART, the encoder alone). UserError if there is
    no transformers, if it cannot load the name, or if the model knows no mask token."""
    name = name.removeprefix("hf:")
    transformers = transformers_library(f"hf:{name}: ")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # what a checkpoint lacks, RoBERTa's pooler, is drawn: the same in every process
            model = transformers.AutoModel.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, by what is missing or damaged
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"hf:{name}: transformers cannot load it ({reason})") from error
    if model.config.is_encoder_decoder:  # BART
        model = model.get_encoder()
    # Some tokenizers know a mask token that their model has no embedding for.
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer.mask_token_id is None or tokenizer.mask_token_id >= vocabulary:
        raise UserError(f"hf:{name}: it has no mask token to measure; use an encoder trained with MLM")
    longest = min(tokenizer.model_max_length, positions_of(model))  # a tokenizer may state a limit, or a huge number
    return HubEncoder(name, model.float().eval(), tokenizer, model.config.hidden_size, longest)


def positions_of(model: nn.Module) -> int:
    """How many positions an encoder of transformers has. RoBERTa, CamemBERT, XLM-R and MPNet count them from behind
    their padding id: a table of 514 rows with padding id 1 has 512. A model without a table has its stated limit."""
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            first = 0 if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - first
    return getattr(model.config, "max_position_embeddings", 512)
