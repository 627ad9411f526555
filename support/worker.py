"""The device, processes and signals of a run: ranks, autocast, compilation."""
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from maelm import Corruption
from support.program import UserError, lock_folder

GPU_DIM = 256  # dimensions from which compiling, and an Apple GPU, make a model faster


class Worker(NamedTuple):
    """This process's rank among torchrun's processes, its device, and autocast's dtype."""
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def make(cls, precision: str, device: str, dim: int) -> "Worker":
        """This process's rank, device and dtype, for an encoder of `dim` dimensions. precision: auto | fp32 | bf16."""
        chosen = best_device(device, dim)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
            # cuDNN's attention may misread the dtype of a mask. A context around the call would be compiled each time.
            torch.backends.cuda.enable_cudnn_sdp(False)
        keep_freed_memory()
        bf16 = precision == "bf16" or (precision == "auto" and has_bf16(chosen))
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
        return cls(rank, world_size, chosen, torch.bfloat16 if bf16 else torch.float32)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def lock(self, folder: Path) -> AbstractContextManager:
        """A context in which no other run uses a folder; the first process locks it for all."""
        return lock_folder(folder) if self.is_main else nullcontext()

    def micro_batches(self, tokens: torch.Tensor, corruption: Corruption, size: int) -> list[tuple]:
        """This process's share of a batch (B, n) and of its masks, in pieces of at most `size` sequences."""
        share = [x.tensor_split(self.world_size)[self.rank] for x in (tokens, *corruption)]
        pieces = zip(*[x.split(size) for x in share])
        return [(piece, Corruption(*masks)) for piece, *masks in pieces if len(piece) > 0]

    def autocast(self) -> torch.autocast:
        """A new context in which matrix products are computed in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def put(self, batch: tuple) -> tuple:
        """Move the tensors of a batch to this process's device. The batch may contain other tuples of tensors."""
        is_pinned = self.device.type == "cuda"  # from other memory, a copy may read what has been freed
        return tree_map(lambda x: x.to(self.device, non_blocking=is_pinned), batch)

    def pin(self, batch: tuple) -> tuple:
        """Move a batch to pinned memory, from which a GPU copies while it computes, if this process has a GPU."""
        return tree_map(torch.Tensor.pin_memory, batch) if self.device.type == "cuda" else batch

    def sums(self, *values: float) -> list[float]:
        """The sums of numbers over all processes, which wait for each other."""
        total = torch.tensor(values, dtype=torch.float64)  # on the CPU, so that no GPU waits
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def wait(self):
        """Wait until all processes are here."""
        self.sums(0)

    def is_same(self, number: int) -> bool:
        """Whether all processes have the same number. (If they differ, not every process has the mean.)"""
        return self.sums(number)[0] == number * self.world_size

    @contextmanager
    def noted_signals(self) -> Iterator[list[int]]:
        """Yield a list that collects Ctrl-C and the signals by which a closed terminal, Slurm or torchrun ends a
        program. A second Ctrl-C ends it at once."""
        noted = []

        def note(number, _):
            if number == signal.SIGINT and number in noted:
                raise KeyboardInterrupt
            noted.append(number)

        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows lacks the last two
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as SIGHUP after nohup
                signal.signal(number, note)
        try:
            yield noted
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def signal_of_any(self, noted: list[int], step: int) -> int:
        """A signal that any process has noted, so that all stop together; 0 if there is none."""
        number = torch.tensor(max(noted, default=0))
        if self.world_size > 1:
            if step % 4 != 0:  # the comparison makes all of them wait
                return 0
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def averaging(self, network: nn.Module, is_last: bool) -> AbstractContextManager:
        """A context for one of several backward passes of a `network` that `parallel` has made. In the last one, DDP
        takes the mean of gradients over all processes, whose parts of a batch are equal."""
        return nullcontext() if self.world_size == 1 or is_last else network.no_sync()

    def parallel(self, model: nn.Module, when: str) -> nn.Module:
        """A model that averages its gradients over all processes in the backward pass. Its first call compiles it, in
        place so that its parameters keep their names: when = on, or auto for large models on CUDA."""
        fast = self.device.type == "cuda" and model.config.encoder_dim >= GPU_DIM
        if when == "on" or (when == "auto" and fast):
            torch._dynamo.config.optimize_ddp = False  # it would split the model
            model.compile(dynamic=False)
        if self.world_size == 1:
            return model
        group = dist.new_group(backend="nccl") if self.device.type == "cuda" else None
        network = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        network.broadcast_buffers = False  # buffers never change (PyTorch versions disagree on the argument's name)
        return network


@contextmanager
def joined_processes() -> Iterator[None]:
    """A context in which torchrun's processes are connected, and only the first one prints. This comes first: if one of
    them fails later, its connections close, and all others end within ten minutes."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    with redirect_stdout(sys.stdout if dist.get_rank() == 0 else None):
        yield
    dist.destroy_process_group()


def keep_freed_memory():
    """Make glibc keep freed memory. Returning memory to the system and getting it back took a fifth of a toy step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)  # the C library of this process
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def best_device(name: str, dim: int) -> torch.device:
    """The device that --device names. For auto, it is an NVIDIA GPU, an Apple GPU (for an encoder of at least GPU_DIM
    dimensions) or the CPU. Raises UserError if the device is missing."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        # An Apple GPU starts the hundreds of kernels of a toy step no faster than its CPU computes them.
        available["mps"] = available["mps"] and dim >= GPU_DIM
        name = [kind for kind in available if available[kind]][0]
    if not available.get(name):
        raise UserError(f"--device {name}: this machine, or this PyTorch, has none; use --device auto")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return torch.device(name)


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bf16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 only emulates bf16, slowly
    if device.type == "mps":
        return False
    units = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of PyTorch lack it
    return bool(units.get("amx_bf16") or units.get("avx512_bf16"))
