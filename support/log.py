"""The reports of a run: log.jsonl, loss.png, lines in the terminal, speed and MFU, Weights & Biases."""
import functools
import json
import math
import platform
import secrets
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy
import tokenizers
import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import Config, Corruption
from support.cli import UserError, printable
from support.files import figure, json_lines, write_texts
from support.models import make_model
from support.worker import Worker


def read_log(out: Path) -> list[dict]:
    """The lines of log.jsonl in a run folder, except damaged ones, such as a line that a crash cut off."""
    path, found = out / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "step" in line]


def commit() -> str | None:
    """The commit of this code, with -dirty if files have changed since; None without git."""
    git = f"git -C {shlex.quote(str(Path(__file__).parent))}"
    failed, found = subprocess.getstatusoutput(f"{git} describe --always --dirty --abbrev=40 --exclude=*")
    return None if failed else found


class Progress:
    """Reports a train.Run to the terminal, log.jsonl and Weights & Biases. Only the first process reports."""
    def __init__(self, run):
        """Removes the lines of log.jsonl after run.step, because these steps will be repeated."""
        self.run, self.wandb = run, run.wandb
        self.recent = []  # loss and gradient norm of each step since the last log line, scalars on any device
        self.since = time.perf_counter()  # start of the training time that is not yet counted
        if run.worker.is_main:
            kept = [line for line in read_log(run.out) if line["step"] <= run.step and run.step > 0]
            write_texts(run.out, {"log.jsonl": json_lines(kept)})

    def write(self, text: str, **line):
        """Print a text and append a line to log.jsonl."""
        if self.run.worker.is_main:
            print(text)
            with open(self.run.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.tell_wandb("log", line)

    def tell_wandb(self, method: str, *arguments):
        """Call a method of the Weights & Biases run. The first error is printed as a warning and turns wandb off."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, method)(*arguments)
        except Exception as error:  # wandb's errors have no common base
            self.wandb = None
            print(f"warning: --wandb: {error!r}; the run continues without it", file=sys.stderr)

    def start(self, entropy: float):
        """Print the sizes of the model and the text; log the commit, versions and machines, and settings that have
        changed since the last start. `entropy` is the unigram entropy of the validation tokens, in nats."""
        (config, recipe, options), run, worker = self.run.settings, self.run, self.run.worker
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        there = len(run.rows["train"]) * config.seq_len / 1e6
        wanted = recipe.batch_size * run.settings.last_step * config.seq_len / 1e6
        self.write(
            f"{run.out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, "
            f"decoder {config.decoder_layers} x {config.decoder_width}\n"
            f"{wanted:,.1f} M tokens of {recipe.data}, which has {there:,.1f} M: {wanted / there:.2f} epochs\n"
            f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, "
            f"{'continuing at' if run.step else 'from'} step {run.step}\n"
            f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context",
            step=run.step, unigram_entropy=entropy, start={
                "commit": commit(), "python": platform.python_version(),
                "torch": torch.__version__, "numpy": numpy.__version__, "tokenizers": tokenizers.__version__,
                "hosts": sorted(set(worker.gather(socket.gethostname()))), "processes": worker.world_size,
                "micro_batch": worker.micro_batch(recipe.batch_size, options.micro_batch_size),
                "changed": run.changed})

    def log_validation(self, val_loss: float):
        """Print and log the validation loss."""
        step = self.run.step
        self.write(f"step {step:>6,}/{self.run.settings.last_step:,}  validation loss {val_loss:.3f}", step=step,
                   val_loss=val_loss, seconds=self.run.seconds)

    def log_steps(self):
        """Log the speed and the means since the last line. Raises UserError if a loss or norm is not finite."""
        (config, recipe, _), run, count = self.run.settings, self.run, len(self.recent)
        losses, norms = [torch.stack(values).tolist() for values in zip(*self.recent, strict=True)]
        for step, loss, norm in zip(range(run.step - count + 1, run.step + 1), losses, norms, strict=True):
            if not math.isfinite(loss + norm):
                raise UserError(f"step {step}: the loss is not finite; this step is the first bad one, with loss "
                                f"{loss:.4g} and gradient norm {norm:.4g}; continue from the last checkpoint with "
                                "--change-recipe and a lower --learning-rate, a lower --clip-norm or another --seed")
        # The mean over steps and processes; each process has an equal share of every batch.
        total, = run.worker.all_reduce(sum(losses))
        loss, norm = total / run.worker.world_size / count, sum(norms) / count
        lap = time.perf_counter() - self.since  # the loss is known, so the GPU has finished
        run.seconds += lap
        sequences = run.step * recipe.batch_size
        speed = count * recipe.batch_size * config.seq_len / lap
        line = {"step": run.step, "loss": loss, "grad_norm": norm, "seconds": run.seconds, "tokens_per_second": speed,
                "tokens": sequences * config.seq_len, "epoch": round(sequences / len(run.rows["train"]), 4)}
        for name, optimizer in zip(("lr", "muon_lr"), run.optimizers, strict=False):
            line[name] = optimizer.param_groups[0]["lr"]
        left = (run.settings.last_step - run.step) * run.seconds / run.step / 60
        self.write(f"step {run.step:>6,}/{run.settings.last_step:,}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
                   f"{left:.1f} min left", **line, **use_of_gpu(config, run.worker, speed))
        self.recent = []


# ---- FLOPs, and the share of a GPU's peak (MFU) ------------------------------------------------------------------
@functools.cache
def flops(config: Config) -> int:
    """FLOPs of all matrix products in a training step on one sequence; a multiply-add counts as 2."""
    n = config.seq_len
    m = config.num_masked(n)
    r = n - m + round(config.mask_in_encoder * m)  # tokens that the encoder sees
    # Meta tensors have shapes but no data. There, attention runs as matrix products; a GPU kernel would go uncounted.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens, masked, kept = [torch.zeros(1, length, dtype=torch.int64) for length in (n, m, r)]
        make_model(config)(tokens, Corruption(tokens, masked, kept)).backward()
    return counter.get_total_flops()


PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "4090": 165e12}


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of a GPU in dense bf16, by its name; None for unknown GPUs and other dtypes."""
    peaks = [peak for name, peak in PEAKS.items() if name in device and dtype == torch.bfloat16]
    return peaks[0] if peaks else None


def use_of_gpu(config: Config, worker: Worker, speed: float) -> dict[str, float]:
    """Peak memory in GB, and the fraction of peak FLOP/s (MFU) at a speed in tokens per second; {} without a GPU."""
    if worker.device.type != "cuda":
        return {}
    found = {"memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    peak = peak_of(torch.cuda.get_device_name(), worker.dtype)
    if peak is not None:
        found["mfu"] = speed / config.seq_len * flops(config) / (peak * worker.world_size)
    return found


# ---- Weights & Biases ---------------------------------------------------------------------------------------
def start_wandb(project: str, out: Path, settings: dict):
    """Start the Weights & Biases run of a run folder; None without a project. Raises UserError if that fails."""
    if not project:
        return None
    known = out / ".wandb-id"  # in the folder, so that a new run in an emptied folder has a new id
    if not known.is_file():
        write_texts(out, {known.name: secrets.token_hex(8)})
    try:
        import wandb
        run = wandb.init(project=project, id=known.read_text(), resume="allow", name=str(out), dir=str(out.parent),
                         config=settings)
        run.define_metric("*", step_metric="step")  # a continued run may log a step again
    except Exception as error:  # wandb's errors have no common base
        raise UserError(f"--wandb: {error!r}; try `pip install wandb` and `wandb login`, or omit it") from error
    return run


# ---- The figure ---------------------------------------------------------------------------------------------
def draw_loss(out: Path):
    """Draw loss.png from log.jsonl: the training and validation losses by step, and the unigram entropy."""
    log = read_log(out)
    with figure(out / "loss.png") as (_, axes):
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", ".-")):
            points = [(line["step"], line[name]) for line in log if name in line]
            if points:
                axes.plot(*zip(*points), style, label=label)
        if log and "unigram_entropy" in log[0]:
            axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=printable(str(out)))
        axes.legend()
