"""What a run will take: train.py --estimate."""
import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import MAELM, Config, Corruption


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


PEAK = 312e12  # FLOP/s of an A100 in bf16


def estimate(config: Config, train) -> str:
    """A table of what a run by a TrainConfig takes, on A100s at half of their peak."""
    with torch.device("meta"):
        model = MAELM(config)
    parameters = sum(p.numel() for p in model.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    row, rows = flops(config), train.batch_size * train.last_step
    hours = row * rows / (PEAK / 2) / 3600
    lines = {
        "parameters": f"{parameters:,}, of which {encoder:,} are the encoder's",
        "FLOPs per token": f"{row / config.seq_len / 1e9:.3g} G",
        "step": f"{train.batch_size * config.seq_len:,} tokens, {row * train.batch_size / 1e15:.3g} PFLOP",
        "run": f"{rows * config.seq_len / 1e9:,.3g} G tokens, {row * rows / 1e18:.3g} EFLOP",
        "time": ", ".join(f"{hours / n:,.3g} hours on {n}" for n in (1, 8, 64)) + " A100s at half of their peak",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
