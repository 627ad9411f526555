"""What the programs share: the machine a run is on, the folder it leaves, the encoder it ends with.

    1. Flags         a flag for every field of a configuration
    2. The machine   Place: rank, device and dtype of this process; set_up joins torchrun's process group
    3. The folder    config.json, log.jsonl, checkpoints step_*.pt, figures
    4. The encoder   of a run folder, of one checkpoint, of finetune.py (encoder.pt), or of the Hugging Face Hub

`data.py` and `maelm.py` are all that this file imports of the project.
"""
import argparse
import ctypes
import inspect
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from data import Tokenizer, UserError, atomic, corpus
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
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest of a number over all processes."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX)
        return total.item()


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


def best_device(local_rank: int) -> torch.device:
    """The GPU of this process where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def has_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 are fast on this device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and cpu_has_bf16()


def set_up(precision: str) -> Place:
    """Join the process group if torchrun started this process, and choose device and dtype."""
    device = best_device(int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    by_torchrun = "WORLD_SIZE" in os.environ
    if by_torchrun and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    keep_freed_memory()
    bf16 = precision == "bf16" or (precision == "auto" and has_bf16(device))
    return Place(rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)),
                 device=device, dtype=torch.bfloat16 if bf16 else torch.float32)


# ---- 3. The folder that a run leaves ------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(out.glob("step_*.pt"))


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int) -> None:
    """Write step_STEP.pt atomically: plain tensors and numbers. Then remove all but the newest `keep` (0 = none)."""
    # No objects of ours: such a file can be read with weights_only=True, which runs no code.
    state = {
        "step": step,
        "seconds": seconds,  # of training, evaluations apart
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    with atomic(out / f"step_{step:07d}.pt") as temporary:
        torch.save(state, temporary)
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()


def load_checkpoint(out: Path, device: torch.device | str) -> dict | None:
    """The newest whole checkpoint of a run folder, or None; a damaged one is named on stderr and passed over."""
    for path in reversed(checkpoints(out)):
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # compares the checksum of every tensor
            if damaged:
                raise zipfile.BadZipFile(damaged)
            return torch.load(path, map_location=device, weights_only=True)
        except (zipfile.BadZipFile, RuntimeError, EOFError) as error:
            print(f"{path} is damaged ({error}); trying the one before", file=sys.stderr)
    return None


def run_settings(folder: Path) -> dict:
    """How the run in `folder` was trained: the TrainConfig in its config.json as a dict, or {} if it has none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    return json.loads(path.read_text()).get("train", {})


def open_corpus(config: Config, settings: dict, place: Place) -> Path:
    """The folder of shards of a run with these training settings; the first process makes it where there is none."""
    arguments = (settings["data"], Path(settings["cache"]), config.vocab_size, config.seq_len,
                 settings["uncased"], settings["val_share"])
    if place.first:
        corpus(*arguments)
    if place.world > 1:
        dist.barrier()  # the others wait here, and then find it
    return corpus(*arguments)


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl; a last line that was cut off by a crash is left out."""
    path = out / "log.jsonl"
    if not path.is_file():
        return []
    whole, _, _ = path.read_text().rpartition("\n")  # without what follows the last line break
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, `panels` side by side, without a display; then write it to `path`."""
    import matplotlib
    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt
    drawn, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.2), layout="constrained")
    yield drawn, axes
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
    plt.close(drawn)


# ---- 4. The encoder that a run ends with --------------------------------------------------------------------
def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[MAELM, Tokenizer]:
    """The model of a run folder, or of one of its checkpoint files, in evaluation mode, and its tokenizer. UserError
    if there is none, or it is damaged or of another program."""
    if path.suffix == ".pt":
        folder, state = path.parent, read_tensors(path, device)
        if "model" not in state:
            raise UserError(f"{path}: not a checkpoint of train.py, which alone holds a decoder")
    else:
        if not path.is_dir():
            raise UserError(f"{path}: no such run folder; train.py makes one")
        folder, state = path, load_checkpoint(path, device)
        if state is None:
            raise UserError(f"{path}: holds no checkpoint; run train.py --out {path} first")
    model = MAELM(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), Tokenizer.load(folder)


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config]:
    """The encoder of a run folder of train.py, of one of its checkpoints, or of finetune.py (encoder.pt), in evaluation
    mode. UserError if there is none."""
    file = path / "encoder.pt" if path.is_dir() else path
    if file.name != "encoder.pt" or not file.is_file():
        model, tokenizer = load_model(path, device)
        return model.encoder, tokenizer, model.config
    state = read_tensors(file, device)
    config = Config(**state["config"])
    encoder = Encoder(config).to(device).eval()
    encoder.load_state_dict(state["encoder"])
    return encoder, Tokenizer.load(file.parent), config


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict:
    """The tensors and numbers in a .pt file; UserError if it is missing or damaged."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{path}: no checkpoint, or a damaged one ({str(error).splitlines()[0]})") from error


class HubEncoder(NamedTuple):
    """An encoder of the Hugging Face Hub, as `transformers` loads it."""
    name: str  # or the folder it is from
    model: nn.Module  # float32, in evaluation mode
    tokenizer: object
    dim: int  # d
    seq_len: int  # the longest input in tokens


def open_hub(name: str) -> HubEncoder:
    """The encoder that transformers loads from the Hub or a folder (of BART, the encoder alone). UserError if there is
    no transformers, if it cannot load the name, or if the model knows no mask token."""
    name = name.removeprefix("hf:")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"hf:{name}: needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
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
