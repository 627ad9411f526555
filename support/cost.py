"""What a step costs, and how well it uses a GPU."""
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
