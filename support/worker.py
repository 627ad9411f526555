"""The device and the processes of a run: ranks, autocast, compilation."""
import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maelm import Corruption
from support.cli import UserError

PLACES = {"init", "tokenizer", "device", "cache", "wandb"}  # settings that may differ between machines


class Worker(NamedTuple):
    """This process's rank among torchrun's processes, its device, and autocast's dtype."""
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def micro_batch(self, batch_size: int, most: int) -> int:
        """The number of sequences per device and forward pass, at most `most`. Raises UserError if the batch size is
        not a multiple of this number times the number of devices."""
        size = max(1, min(most, batch_size // self.world_size))
        if batch_size % (size * self.world_size):
            raise UserError(f"batch_size={batch_size} is not a multiple of micro_batch_size={size} times "
                            f"{self.world_size} processes; change --batch-size or --micro-batch-size")
        return size

    def autocast(self) -> torch.autocast:
        """A new context in which matrix products are computed in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def put(self, tokens, corruption: Corruption) -> tuple[torch.Tensor, Corruption]:
        """Move a batch to this process's device."""
        tokens, *fields = [x.to(self.device, non_blocking=True) for x in (tokens, *corruption)]
        return tokens, Corruption(*fields)

    def all_reduce(self, *values: float) -> list[float]:
        """The sums of numbers over all processes."""
        if self.world_size == 1:  # some devices, such as Apple GPUs, have no float64
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def barrier(self):
        """Wait until all processes get here."""
        self.all_reduce(0)

    def gather(self, value: object) -> list:
        """The values of all processes, by rank. Waits for all processes."""
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def agree(self, settings: dict):
        """Raises UserError if any settings other than PLACES differ between processes."""
        for rank, others in enumerate(self.gather(settings)):
            for name, value in settings.items():
                if name not in PLACES and value != others[name]:
                    raise UserError(f"{name}={value!r} in process {self.rank}, {others[name]!r} in process {rank}: "
                                    "start all processes with the same command, text and --out")

    def parallel(self, model: nn.Module) -> nn.Module:
        """A model that averages its gradients over all processes in the backward pass."""
        if self.world_size == 1:
            return model
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        network.broadcast_buffers = False  # buffers never change (PyTorch versions disagree on the argument's name)
        return network

    def init_process_group(self):
        """Join the other processes that torchrun started."""
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def destroy_process_group(self, code: int = 0):
        """End this process at once if it has joined others; gloo's threads may abort an ordinary exit."""
        if dist.is_initialized():
            dist.destroy_process_group()
            os._exit(code)


def keep_freed_memory():
    """Make glibc keep freed memory. Returning memory to the system and getting it back took 7 % of a toy step."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)  # the C library that this process has loaded; musl's has no mallopt
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def best_device(name: str, small: bool) -> torch.device:
    """The device that --device names. For auto, it is an NVIDIA GPU, an Apple GPU (unless the model is `small`) or the
    CPU. Raises UserError if the device is missing."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        # An Apple GPU starts the hundreds of kernels of a toy step no faster than its CPU computes them.
        there["mps"] = there["mps"] and not small
        name = [kind for kind in there if there[kind]][0]
    if not there.get(name):
        raise UserError(f"--device {name}: this machine, or this PyTorch, has none; use --device auto")
    if name != "cuda":
        return torch.device(name)
    number, count = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count()
    if number not in map(str, range(count)):
        raise UserError(f"LOCAL_RANK={number!r}: this machine has {count} GPUs; start one process per GPU")
    return torch.device("cuda", int(number))


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bf16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 only emulates bf16, slowly
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if device.type == "cpu" and info.is_file() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def make_worker(precision: str, device: str = "auto", small: bool = False) -> Worker:
    """This process's device, dtype and rank. Raises UserError if the device is missing or torchrun's variables are
    incomplete."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"
    given = [os.environ.get(name, "") for name in names]
    rank, world_size = 0, 1
    if given[0] or given[1]:
        numbers = [int(value) for value in given[:4] if value.isdecimal()]
        if len(numbers) < 4 or given[4] == "" or numbers[0] >= numbers[1] or numbers[3] > 65535:
            listed = ", ".join(f"{name}={value!r}" for name, value in zip(names, given, strict=True))
            raise UserError(f"{listed}: not as torchrun sets them; start with torchrun, or unset them")
        rank, world_size = numbers[:2]
    found = best_device(device, small)
    if found.type == "cuda":
        torch.cuda.set_device(found)
        torch.set_float32_matmul_precision("high")  # use TF32 where autocast keeps float32
        # cuDNN's attention may misread the dtype of a mask. A context around the call would be compiled each time.
        torch.backends.cuda.enable_cudnn_sdp(False)
    keep_freed_memory()
    bf16 = precision == "bf16" or (precision == "auto" and has_bf16(found))
    return Worker(rank, world_size, found, torch.bfloat16 if bf16 else torch.float32)


def compile_model(model: nn.Module):
    """Compile a model at its first call, in place so that its parameters keep their names."""
    torch._dynamo.config.optimize_ddp = False  # it would split the model
    model.compile(dynamic=False)
