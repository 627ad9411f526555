"""Models for any Config, the cost of a step, and checkpoints, written atomically and read without running code."""
import functools
import math
import pickle
import struct
import sys
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from maelm import MAELM, Config, Corruption, Encoder
from support.cli import UserError
from support.cross_attention import CrossMAELM
from support.files import atomic, check_fields, read_json
from support.tokenizer import Tokenizer
from support.worker import Worker


# ---- 1. A model for any Config -----------------------------------------------------------------------------
def make_model(config: Config, position_init: str = "normal") -> MAELM:
    """A new model, a CrossMAELM for decoders with cross-attention. position_init: normal | sinusoid."""
    check(config)
    model = MAELM(config) if config.decoder == "bi" else CrossMAELM(config)
    if position_init == "sinusoid":
        sinusoid_(model.encoder.position_embedding.weight, config.init_std)
        if model.decoder is not None:
            # Between init_std, which is negligible beside h_i^L (about 1), and 1, which fills its dimensions.
            std = config.init_std if config.decoder == "uni+cross" else 0.25
            sinusoid_(model.decoder.position_embedding.weight, std)
    return model


def sinusoid_(table, std: float):
    """Fill a table (n, d) with waves of root mean square std; Vaswani et al., 2017."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # an odd d needs one column less
    table.data.copy_(std * 2 ** 0.5 * waves)  # the root mean square of sin and cos is 1 / sqrt(2)


def check(config: Config) -> Config:
    """Return the Config. Raises ValueError for the first invalid field."""
    c, d, heads, buckets = config, config.encoder_dim, config.encoder_heads, config.rel_pos_buckets
    width = max(1, d // max(1, heads))  # of a head
    mlm = c.decoder_layers == 0 and c.mask_in_encoder == 1 and c.decoder == "bi"
    whole = c.decoder_dim == 0 or (c.decoder_dim > 0 and c.decoder_dim % width == 0 and not mlm)
    for field, holds, advice in (
            ("vocab_size", 261 <= c.vocab_size <= 1 << 20, "261 to 1,048,576"),  # far more end `tokenizers`
            ("seq_len", c.seq_len >= 2, "2 or more"),
            ("encoder_layers", c.encoder_layers >= 1, "1 or more"),
            ("encoder_dim", d >= 1, "1 or more"),
            ("encoder_heads", heads > 0 and d % heads == 0, f"a divisor of encoder_dim={d}"),
            ("dropout", 0 <= c.dropout < 1, "0 or more, below 1"),
            ("rel_pos_buckets", buckets == 0 or (buckets > 3 and buckets % 2 == 0), "0, 4, 6, 8 ..."),
            ("rel_pos_max_distance", c.rel_pos_max_distance > buckets // 4, f"more than {buckets // 4}"),
            ("mask_rate", 0 < c.mask_rate < 1, "between 0 and 1"),
            ("norm", c.norm in ("post", "pre"), "post or pre"),
            ("init_std", 0 < c.init_std < math.inf, "a number above 0"),
            ("mask_in_encoder", 0 <= c.mask_in_encoder <= 1, "0 to 1"),
            ("encoder_fill", c.encoder_fill in ("mask", "random"), "mask or random"),
            ("decoder", c.decoder in ("bi", "bi+cross", "uni+cross", "cross"), "bi, bi+cross, uni+cross or cross"),
            ("decoder_layers", c.decoder_layers > 0 or mlm, "1 or more, or mask_in_encoder=1"),
            ("decoder_dim", whole, f"0, or with a decoder a multiple of {width}")):
        if not holds:
            raise ValueError(f"{field}={getattr(config, field)!r}: use {advice}")
    return config


# ---- 2. The cost of a step ----------------------------------------------------------------------------------
@functools.cache
def flops(config: Config) -> int:
    """FLOPs of all matrix products of a training step on one sequence; a multiply-add counts as 2."""
    n = config.seq_len
    m = config.num_masked(n)
    r = n - m + round(config.mask_in_encoder * m)  # tokens that the encoder sees
    # Shapes without memory. The counter misses a GPU's attention kernel; here it counts the formula.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens, masked, kept = [torch.zeros(1, length, dtype=torch.int64) for length in (n, m, r)]
        make_model(config)(tokens, Corruption(tokens, masked, kept)).backward()
    return counter.get_total_flops()


PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "4090": 165e12}


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU in dense bf16, by its name; None for other GPUs, or another dtype."""
    peaks = [peak for name, peak in PEAKS.items() if name in device and dtype == torch.bfloat16]
    return peaks[0] if peaks else None


def use_of_gpu(config: Config, worker: Worker, speed: float) -> dict[str, float]:
    """Peak memory in GB, and the share of peak FLOP/s at a speed in tokens per second; {} without a GPU."""
    if worker.device.type != "cuda":
        return {}
    found = {"memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    peak = peak_of(torch.cuda.get_device_name(), worker.dtype)
    if peak is not None:
        found["mfu"] = speed / config.seq_len * flops(config) / (peak * worker.world_size)
    return found


# ---- 3. Checkpoints ----------------------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. Only files with such names are loaded or deleted."""
    return sorted(out.glob(f"step_{7 * '[0-9]'}.pt"))


def write_tensors(path: Path, state: dict):
    """Write tensors and numbers atomically, without other objects, so that reading them runs no code."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise (error.__context__ or error) from None  # PyTorch's writer hides the disk's error behind its own


class Damaged(UserError):
    """A file is incomplete, or was not written by this project."""


def read_tensors(path: Path, *wanted: str) -> dict:
    """The content of a .pt file, on the CPU, with its configuration as a Config; it runs no code. Raises Damaged, or
    UserError if a file lacks a field or has a newer version. Errors of disk and memory pass through."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    state = None
    try:
        if zipfile.ZipFile(path).testzip() is None:  # compares the checksums, which torch.load does not
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError,
            pickle.UnpicklingError) as error:
        if "can't allocate memory" in str(error):
            raise
    if not isinstance(state, dict):
        raise Damaged(f"{path}: damaged, or not written by this project; delete it: then the checkpoint before it is "
                      "used, or its run is done again")
    if not state.keys() >= {"config", *wanted}:
        raise UserError(f"{path}: lacks config, {', '.join(wanted)}: not a file of the kind that is needed here")
    check_fields(path, state["config"], Config)
    return state | {"config": Config(**state["config"])}  # a missing field has its default


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int):
    """Write step_STEP.pt, after `seconds` of training, then remove all but the newest `keep` checkpoints, or none if
    `keep` is 0. Raises UserError if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"step {step}: {name} is not finite; continue from the last checkpoint with "
                            "--change-recipe and a lower --learning-rate")
    write_tensors(out / f"step_{step:07d}.pt", {
        "step": step, "seconds": seconds, "config": asdict(model.config), "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers]})
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()


def set_damaged_aside(out: Path):
    """Rename damaged checkpoints newer than the newest intact one. Raises Damaged if none is intact."""
    for path in reversed(checkpoints(out)):
        try:
            read_tensors(path)
            return
        except Damaged:
            if path == checkpoints(out)[0]:
                raise
            aside = path.replace(path.with_name(f"{path.name}.damaged"))
            print(f"warning: {path} is damaged, and is now {aside.name}; the run continues from an earlier checkpoint",
                  file=sys.stderr)


def load_checkpoint(path: Path, model: MAELM, optimizers: list) -> tuple[int, float]:
    """Load a file of save_checkpoint into model and optimizers. Returns its step and the seconds of training."""
    state = read_tensors(path, "step", "seconds", "model", "optimizers")
    load_weights(model, state["model"], path)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:  # they also hold the recipe, which --change-recipe may change
            group |= {name: optimizer.defaults[name] for name in group.keys() & optimizer.defaults.keys()}
    return state["step"], state["seconds"]


def load_weights(module: nn.Module, weights: dict, path: Path):
    """Load the weights of a file. Raises UserError if they do not fit."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: its weights have other names or shapes than in this version of maelm; use the "
                        "version that wrote it, or train again") from error


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path names, the newest of a run folder, or finetune.py's encoder.pt, which load_encoder
    reads. Raises UserError if there is none."""
    found = [path] if path.suffix == ".pt" else [*checkpoints(path), *path.glob("encoder.pt")]
    if not found:
        raise UserError(f"{path}: not a run folder with checkpoints; train.py makes one; support.convert imports hf:")
    return found[-1]


def load_model(path: Path) -> tuple[MAELM, Tokenizer]:
    """The model of a run folder or checkpoint, in evaluation mode, and its tokenizer. Raises UserError if missing."""
    file = checkpoint_of(path)
    state = read_tensors(file, "model", "step")  # finetune.py's encoder.pt has no step, and no decoder
    model = make_model(state["config"])
    load_weights(model, state["model"], file)
    return model.eval(), Tokenizer.load(file.parent)


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config, dict]:
    """The encoder of a run folder, a checkpoint, or a folder of finetune.py (encoder.pt), in evaluation mode; its
    tokenizer; its Config; the settings of its run. Raises UserError if there is none."""
    file = checkpoint_of(path)
    state = read_tensors(file, "model")
    encoder = Encoder(state["config"])
    names = [name.removeprefix("encoder.") for name in state["model"] if name.startswith("encoder.")]
    load_weights(encoder, {name: state["model"][f"encoder.{name}"] for name in names}, file)
    return encoder.to(device).eval(), Tokenizer.load(file.parent), state["config"], run_settings(file.parent)


def run_settings(folder: Path) -> dict:
    """The content of config.json in a run folder, or {} if there is none."""
    path = folder / "config.json"
    return read_json(path, "init") if path.is_file() else {}
