"""What the programs share: flags, the machine a run is on, the folder it leaves, the model it ends with."""
import argparse
import ctypes
import json
import os
import pickle
import re
import signal
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from maelm import MAELM, Config, Encoder, comments_of
from support.files import UserError, atomic, read_json
from support.tokenizer import Tokenizer


# ---- 1. Flags made from a dataclass, and the schedule -------------------------------------------------------
def value_in(argv: list[str] | None, flag: str, default: str) -> str:
    """The value of a flag on a command line that is not parsed yet, as its help depends on it."""
    words = sys.argv[1:] if argv is None else argv
    return words[words.index(flag) + 1] if flag in words[:-1] else default


def add_flags(parser: argparse.ArgumentParser, config: type, values: dict) -> None:
    """Add a flag for every field of a dataclass. Its help is the comment behind the field, and its value in `values`
    or by default."""
    comments = comments_of(config)
    group = parser.add_argument_group(config.__name__)
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.default)
        text = f"{comments.get(field.name, '')} [{value}]".replace("%", "%%")  # argparse formats with %
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        # A flag that is not given leaves no trace, so that a preset can decide.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text.strip(), **kind)


def given_flags(options: argparse.Namespace, config: type) -> dict:
    """The fields of a dataclass that the command line gave, by name."""
    return {field.name: getattr(options, field.name) for field in fields(config) if field.name in options}


def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate at 0 <= step < max_steps. It rises linearly from 1 / warmup_steps at step 0 to 1
    at step warmup_steps - 1, then falls linearly from 1 at step warmup_steps, which may be 0, to 0 at max_steps."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


# ---- 2. The machine -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where this process computes: its rank among `world` processes, its device, and autocast's dtype."""
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

    def join(self) -> None:
        """Join the other processes that torchrun started."""
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def leave(self, code: int = 0) -> None:
        """End this process if it has joined others; at an ordinary end, threads of gloo may abort it."""
        if dist.is_initialized():
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(code)


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


def best_device(name: str, small: bool) -> torch.device:
    """The device that --device names. auto: an NVIDIA GPU, an Apple GPU unless the model is `small`, or the CPU.
    UserError if this machine does not have it."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        # A step of the toy is hundreds of kernels that an Apple GPU starts no faster than its CPU computes them.
        name = "cuda" if there["cuda"] else "mps" if there["mps"] and not small else "cpu"
    if not there.get(name):
        raise UserError(f"--device {name}: this machine, or this PyTorch, has none; use --device auto")
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)


def choose_place(precision: str, device: str = "auto", small: bool = False) -> Place:
    """The device and dtype of this process, and which of torchrun's processes it is. UserError as best_device."""
    device = best_device(device, small)
    bf16 = device.type == "cpu" and cpu_has_bf16()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        # cuDNN's attention may read a mask as another dtype. Turned off here, once: a context around the call would
        # have torch.compile compile again at every start.
        torch.backends.cuda.enable_cudnn_sdp(False)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 emulates it, slowly
    keep_freed_memory()
    if precision != "auto":
        bf16 = precision == "bf16"
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and "RANK" not in os.environ:
        raise UserError(f"WORLD_SIZE={world} without RANK: start several processes with torchrun")
    return Place(int(os.environ.get("RANK", 0)), world, device, torch.bfloat16 if bf16 else torch.float32)


# ---- 3. Signals and memory ----------------------------------------------------------------------------------
class Interrupt:
    """While entered, notes SIGTERM and SIGINT, so that a checkpoint can be saved. A second Ctrl-C acts at once."""

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
        if number == signal.SIGINT:  # but SIGTERM comes twice at once, from Slurm and from torchrun
            signal.signal(number, self.before[number])


@contextmanager
def name_want_of_memory() -> Iterator[None]:
    """While entered, want of memory is a UserError that names the flag that saves some."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            raise UserError("out of memory: use a smaller --micro-batch-size") from error
        raise


# ---- 4. Checkpoints -----------------------------------------------------------------------------------------
CHECKPOINT = re.compile(r"step_([0-9]{7})\.pt")  # only files of this name are ours to load or to delete


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(path for path in out.glob("step_*.pt") if CHECKPOINT.fullmatch(path.name))


def checkpoint_path(out: Path, step: int) -> Path:
    """The checkpoint of a run after `step` steps."""
    return out / f"step_{step:07d}.pt"


def write_tensors(path: Path, state: dict) -> None:
    """Write tensors and numbers atomically. No objects of ours: so reading them back runs no code."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # PyTorch's writer hides the disk's error behind its own
                raise error.__context__ from None
            raise


def is_whole(path: Path) -> bool:
    """Whether a .pt file, a zip archive, is as it was written: it has a checksum for each tensor."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, UnicodeDecodeError):  # wrong bits
        return False


def read_tensors(path: Path, *wanted: str) -> dict:
    """What a .pt file holds, on the CPU; it runs no code. UserError if the file is damaged, or lacks a field."""
    if not path.is_file():
        raise UserError(f"{path}: not a checkpoint or encoder.pt")
    if not is_whole(path):
        raise UserError(f"{path}: damaged; name an earlier checkpoint, or let train.py continue the run")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: not written by this project") from error
    if not isinstance(state, dict) or not state.keys() >= set(wanted):
        raise UserError(f"{path}: lacks {', '.join(wanted)}: not a file of the kind that is needed here")
    return state


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int) -> None:
    """Write step_STEP.pt, then remove the oldest but `keep` (0 = none). UserError if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"step {step}: weights are not finite, {name} to begin with; nothing is saved, earlier "
                            "checkpoints stay; start again with a lower --learning-rate in another --out")
    write_tensors(checkpoint_path(out, step), {
        "step": step,
        "seconds": seconds,  # of training, evaluations not counted
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    })
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()


def set_damaged_aside(out: Path) -> None:
    """Rename the newest checkpoints of a run that are damaged, so that the one before them counts. UserError if all
    are damaged: a run never starts from 0 again unasked."""
    for path in reversed(checkpoints(out)):
        if is_whole(path):
            return
        path.replace(f"{path}.damaged")
        print(f"{path}: damaged; continuing from the one before", file=sys.stderr)
    if any(out.glob("step_*.damaged")):
        raise UserError(f"{out}: all checkpoints are damaged; restore one from a copy, or choose another --out")


def load_checkpoint(out: Path) -> dict | None:
    """What the newest checkpoint of a run holds; None if there is none."""
    found = checkpoints(out)
    return read_tensors(found[-1], "step", "seconds", "model", "optimizers") if found else None


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path names, or the newest one of a run folder. UserError if there is none."""
    found = [path] if path.suffix == ".pt" else checkpoints(path)
    if not found:
        raise UserError(f"{path}: not a run folder with checkpoints; train.py makes one")
    return found[-1]


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[MAELM, Tokenizer]:
    """The model of a run folder or checkpoint, in evaluation mode, and its tokenizer. UserError if there is none."""
    file = checkpoint_of(path)
    state = read_tensors(file, "config", "model")
    model = MAELM(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), Tokenizer.load(file.parent)


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config]:
    """The encoder of a run folder, a checkpoint, or finetune.py (encoder.pt), in evaluation mode. UserError if none."""
    file = path / "encoder.pt" if path.is_dir() else path
    if file.name != "encoder.pt" or not file.is_file():
        model, tokenizer = load_model(path, device)
        return model.encoder, tokenizer, model.config
    state = read_tensors(file, "config", "encoder")
    config = Config(**state["config"])
    encoder = Encoder(config)
    encoder.load_state_dict(state["encoder"])
    return encoder.to(device).eval(), Tokenizer.load(file.parent), config


def corpus_settings(config: Config, settings: dict, tokenizer: Tokenizer | None) -> dict:
    """The arguments of support.data.corpus for a run with these settings. The tokenizer is the run's, if it was given
    one; otherwise the corpus has its own."""
    given = settings.get("init") or settings.get("tokenizer")
    return dict(source=settings["data"], cache=settings["cache"], vocab_size=config.vocab_size, seq_len=config.seq_len,
                uncased=settings["uncased"], val_share=settings["val_share"], column=settings.get("column", "text"),
                tokenizer=tokenizer if given else None)


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl, without one that a crash cut off."""
    lines = []
    if (out / "log.jsonl").is_file():
        for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def draw_loss(out: Path) -> None:
    """Draw loss.png from log.jsonl: training and validation loss by step, and the unigram entropy."""
    log = read_log(out)
    with figure(out / "loss.png") as (_, axes):
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", ".-")):
            points = [(line["step"], line[name]) for line in log if name in line]
            axes.plot(*zip(*points), style, label=label)
        axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
        axes.legend()


def open_wandb(project: str, out: Path, settings: dict):
    """The run of Weights & Biases that belongs to a run folder: new, or the one that it names."""
    import wandb
    file = out / "wandb-id"
    known = file.read_text() if file.is_file() else None
    run = wandb.init(project=project, id=known, resume="allow", name=str(out), dir=str(out), config=settings)
    file.write_text(run.id)
    run.define_metric("*", step_metric="step")  # a run that continues may log a step again
    return run


def run_settings(folder: Path) -> dict:
    """What config.json of a run folder holds; {} if there is none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


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
