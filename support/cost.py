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


def estimate(config: Config, train, size: int, devices: int, peak: float, mfu: float) -> str:
    """A table of what a run by a TrainConfig takes on `devices` devices of `peak` TFLOP/s each, of which the share
    `mfu` is used, with micro-batches of `size` rows."""
    with torch.device("meta"):
        model = MAELM(config)
    parameters = sum(p.numel() for p in model.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    row = flops(config)
    step = row * train.batch_size
    tokens = train.batch_size * config.seq_len
    minutes = step * train.last_step / (devices * peak * 1e12 * mfu) / 60
    lines = {
        "parameters": f"{parameters:,}, of which {encoder:,} are the encoder's",
        "FLOPs per token": f"{row / config.seq_len / 1e9:.3g} G",
        "step": f"{train.batch_size:,} sequences, {tokens:,} tokens, {step / 1e15:.3g} PFLOP",
        "accumulation": f"{train.batch_size // size // devices} micro-batches of {size} on each of {devices} devices",
        "run": f"{train.last_step:,} steps, {tokens * train.last_step / 1e9:,.3g} G tokens, "
               f"{step * train.last_step / 1e18:.3g} EFLOP",
        "time": f"{minutes:,.3g} minutes or {minutes / 60:,.3g} hours at {mfu:.0%} of {peak:g} TFLOP/s each",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
