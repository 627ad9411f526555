"""What a run will take: train.py --estimate."""
import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import Config, Corruption
from support.models import make_model
from support.worker import Worker


@functools.cache
def flops(config: Config) -> int:
    """FLOPs of all matrix products of a training step on one row, as PyTorch counts them: 2 for each multiply-add."""
    n = config.seq_len
    k = config.masks_per_row(n)
    m = n - k + round(config.mask_in_encoder * k)  # tokens that the encoder reads
    # Shapes without memory. The counter does not know a GPU's attention kernel; here attention is the formula.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(1, n, dtype=torch.int64)
        kept = torch.zeros(1, m, dtype=torch.int64)
        make_model(config)(tokens, Corruption(tokens.bool(), kept, kept)).backward()
    return counter.get_total_flops()


PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
         "L40": 181e12, "L4": 121e12, "4090": 165e12}  # the first name that is part of a device's counts


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU in dense bf16, by its name; None if it is not known, or for another dtype."""
    if dtype != torch.bfloat16:
        return None
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def use_of_gpu(config: Config, worker: Worker, speed: float) -> dict[str, float]:
    """Peak memory in GB, and the share of the peak FLOP/s that a speed in tokens per second is; {} without a GPU."""
    if worker.device.type != "cuda":
        return {}
    found = {"memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    peak = peak_of(torch.cuda.get_device_name(), worker.dtype)
    if peak is not None:
        found["mfu"] = speed / config.seq_len * flops(config) / (peak * worker.world_size)
    return found


def describe_epochs(train, config: Config, rows: int | None) -> str:
    """What a run by a TrainConfig reads of a corpus of so many rows; None: it is not prepared."""
    read = train.batch_size * train.last_step
    tokens = short_count(read * config.seq_len)
    if rows is None:
        return f"{tokens} tokens of {train.data}, which is not prepared yet: see --prepare"
    return f"{tokens} tokens of {train.data}, which has {short_count(rows * config.seq_len)}: {read / rows:.2f} epochs"


def short_count(count: int) -> str:
    """A large number of tokens, such as 7.8 M."""
    return f"{count / 1e9:,.1f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"


def estimate(config: Config, train, rows: int | None) -> str:
    """What a run by a TrainConfig takes, on H100s; rows of the corpus, None if not prepared."""
    with torch.device("meta"):
        model = make_model(config)
    parameters, encoder = (sum(p.numel() for p in part.parameters()) for part in (model, model.encoder))
    row, batch = flops(config), train.batch_size
    share = 0.25 if config.encoder_dim >= 768 else 0.12  # as measured for base and small: bench/results/speed.md
    hours = row * batch * train.last_step / (share * PEAKS["H100"]) / 3600
    lines = {
        "parameters": f"{parameters:,}, of which {encoder:,} are the encoder's",
        "FLOPs per token": f"{row / config.seq_len / 1e9:.3g} G",
        "step": f"{batch * config.seq_len:,} tokens, {row * batch / 1e15:.3g} PFLOP",
        "run": describe_epochs(train, config, rows),
        "time": f"{hours:,.3g} hours on 1, {hours / 8:,.3g} hours on 8 H100s at {share:.0%} of their peak",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
