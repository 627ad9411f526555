"""The device and the processes of a run: ranks, autocast, compilation."""
import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from maelm import Corruption
from support.cli import UserError


class Worker(NamedTuple):
    """Where this process computes: its rank among torchrun's processes, its device, and autocast's dtype."""
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        """A fresh context in which matrix products are in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def put(self, tokens, corruption: Corruption) -> tuple[torch.Tensor, Corruption]:
        """A batch on this process's device."""
        tokens, *fields = [x.to(self.device, non_blocking=True) for x in (tokens, *corruption)]
        return tokens, Corruption(*fields)

    def all_reduce(self, *values: float) -> list[float]:
        """The sums of numbers over all processes."""
        if self.world_size == 1:  # an Apple GPU, for one, has no float64
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self):
        """Wait until all processes are here."""
        self.all_reduce(0)

    def init_process_group(self):
        """Join the other processes that torchrun started."""
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def destroy_process_group(self, code: int = 0):
        """End this process if it has joined others; at an ordinary end, threads of gloo may abort it."""
        if dist.is_initialized():
            dist.destroy_process_group()
            os._exit(code)


def keep_freed_memory():
    """Have glibc keep freed memory: to give each activation back and fault it in again cost 7 % of a toy step."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)  # the C library that this process has loaded; musl's has no mallopt
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def best_device(name: str, small: bool) -> torch.device:
    """The device that --device names; auto: an NVIDIA GPU, an Apple GPU unless the model is `small`, or the CPU."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        # A step of the toy is hundreds of kernels that an Apple GPU starts no faster than its CPU computes them.
        name = "cuda" if there["cuda"] else "mps" if there["mps"] and not small else "cpu"
    if not there.get(name):
        raise UserError(f"--device {name}: this machine, or this PyTorch, has none; use --device auto")
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)


def make_worker(precision: str, device: str = "auto", small: bool = False) -> Worker:
    """The device and dtype of this process, and which of torchrun's processes it is. UserError as best_device."""
    device = best_device(device, small)
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    bf16 = device.type == "cpu" and ("amx_bf16" in flags or "avx512_bf16" in flags)  # other CPUs are slower in it
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        # cuDNN's attention may read a mask as another dtype. A context around the call would be compiled each time.
        torch.backends.cuda.enable_cudnn_sdp(False)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 emulates it, slowly
    keep_freed_memory()
    if precision != "auto":
        bf16 = precision == "bf16"
    world = int(os.environ.get("WORLD_SIZE", 1))
    return Worker(int(os.environ.get("RANK", 0)), world, device, torch.bfloat16 if bf16 else torch.float32)


def compile_model(model: nn.Module, how: str):
    """Compile a model in place, so that its parameters keep their names. How: auto, on, or graphs (CUDA graphs)."""
    torch._dynamo.config.suppress_errors = how == "auto"  # without a compiler, run as it is
    torch._dynamo.config.optimize_ddp = False  # it would cut the model into pieces
    model.compile(dynamic=False, mode="reduce-overhead" if how == "graphs" else None)
