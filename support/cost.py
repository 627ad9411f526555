"""What a run will take: train.py --estimate."""
import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import MAELM, Config, Corruption
from support.muon import make_optimizers


@functools.cache
def flops(config: Config) -> int:
    """FLOPs of all matrix products of a training step on one row, as PyTorch counts them: 2 for each multiply-add."""
    n = config.seq_len
    k = config.masks_per_row(n)
    m = n - k + round(config.mask_in_encoder * k)  # tokens that the encoder reads
    # Shapes without memory. The counter knows matrix products, but not those inside a GPU's attention kernel; on the
    # meta device attention is the plain formula.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(1, n, dtype=torch.int64)
        kept = torch.zeros(1, m, dtype=torch.int64)
        MAELM(config)(tokens, Corruption(tokens.bool(), kept, kept)).backward()
    return counter.get_total_flops()


SHARE = 0.25  # of the peak, as measured for base on an H100: docs/results.md
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}


def peak_of(device: str) -> float | None:
    """FLOP/s of a GPU in dense bf16, by its name; None if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def passes(train, config: Config, rows: int | None) -> str:
    """What a run by a TrainConfig reads of a corpus of so many rows; None: it is not prepared."""
    read = train.batch_size * train.last_step
    tokens = in_print(read * config.seq_len)
    if rows is None:
        return f"{tokens} tokens of {train.data}, which is not prepared yet: see --prepare"
    return f"{tokens} tokens of {train.data}, which has {in_print(rows * config.seq_len)}: {read / rows:.2f} epochs"


def in_print(count: int) -> str:
    """A large number of tokens, such as 7.8 M."""
    return f"{count / 1e9:,.1f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"


def duration(hours: float) -> str:
    """Hours for print, below one as minutes."""
    return f"{hours:,.3g} hours" if hours >= 1 else f"{max(1, 60 * hours):.0f} min"


def estimate(config: Config, train, rows: int | None) -> str:
    """A table of what a run by a TrainConfig takes, on H100s at SHARE of their peak. `rows` are those of the corpus, or
    None if it is not prepared."""
    with torch.device("meta"):
        model = MAELM(config)
        optimizers = make_optimizers(model, train, torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    adamw = sum(p.numel() for p in optimizers[0].param_groups[0]["params"])
    row, batch = flops(config), train.batch_size
    hours = row * batch * train.last_step / (SHARE * PEAKS["H100"]) / 3600
    lines = {
        "parameters": f"{parameters:,}, of which {encoder:,} are the encoder's",
        "checkpoint": f"{(2 * parameters + adamw) * 4 / 1e6:,.0f} MB",  # AdamW keeps two numbers for each, Muon one
        "FLOPs per token": f"{row / config.seq_len / 1e9:.3g} G",
        "step": f"{batch * config.seq_len:,} tokens, {row * batch / 1e15:.3g} PFLOP",
        "run": passes(train, config, rows),
        "time": ", ".join(f"{duration(hours / n)} on {n}" for n in (1, 8, 64)) + " H100s at a quarter of their peak",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
