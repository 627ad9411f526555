"""The reports of a run: log.jsonl, loss.png, lines in the terminal, Weights & Biases."""
import json
import math
import platform
import shlex
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import Config, Corruption
from support.model.build import make_model
from support.model.checkpoints import checkpoints
from support.model.guesses import held_out_guesses
from support.program.errors import UserError, printable, say
from support.program.figures import figure
from support.program.files import json_lines, write_json, write_text
from support.text.corpus import evenly_spaced, unigram_entropy
from support.training.run import Run


def read_log(out: Path) -> list[dict]:
    """The lines of log.jsonl in a run folder, except damaged ones, such as a line that a crash cut off."""
    path, log = out / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            log.append(json.loads(line))
    return [line for line in log if isinstance(line, dict) and "step" in line]


def commit() -> str | None:
    """The commit of this code, with -dirty if files have changed since; None without git."""
    git = f"git -C {shlex.quote(str(Path(__file__).parent))}"
    failed, output = subprocess.getstatusoutput(f"{git} describe --always --dirty --abbrev=40 --exclude=*")
    return None if failed else output


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


class Progress:
    """Reports a run to the terminal, log.jsonl and Weights & Biases. Only the first process reports."""
    def __init__(self, run: Run):
        """Removes the lines of log.jsonl after run.step, because these steps will be repeated."""
        self.run = run
        self.wandb = None
        self.recent = []  # loss and gradient norm of each step since the last log line, scalars on any device
        self.since = 0.0  # when the clock was started
        if run.worker.is_main:
            kept = [line for line in read_log(run.out) if line["step"] <= run.step and run.step > 0]
            write_text(run.out / "log.jsonl", json_lines(kept))  # first, because it marks the folder as ours
            # Copies for people; checkpoints hold the same settings and tokenizer.
            write_json(run.out / "config.json", run.settings.fields() | {"corpus": run.corpus})
            write_text(run.out / "tokenizer.json", run.tokenizer.to_json())
            project = run.settings.options.wandb
            if project:
                try:
                    import wandb
                except ImportError as error:
                    raise UserError(f"--wandb {project}: needs wandb; pip install wandb, and `wandb login`") from error
                self.wandb = wandb.init(project=project, name=str(run.out), config=run.settings.fields())

    def start_clock(self):
        """From here on, time is training time. log_steps stops the clock."""
        self.since = time.perf_counter()

    def add(self, loss, norm):
        """Note the result of a step for the next line."""
        self.recent.append((loss, norm))

    def write(self, text: str, **line):
        """Append a line to log.jsonl and print a text."""
        if self.run.worker.is_main:
            with open(self.run.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if self.wandb is not None:
                self.wandb.log(line)
            say(text)

    def finish(self, signal: int):
        """Say how the run ended: a signal, or 0 and the model's guesses. Send the last lines to Weights & Biases."""
        run = self.run
        if self.wandb is not None:
            self.wandb.finish()
        if run.worker.is_main:
            if signal:
                say(f"stopped by signal {signal}; repeat the command to continue")
            else:
                say(held_out_guesses(run.model.cpu(), run.tokenizer, run.rows["val"]))
            say(f"{run.out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(run.out)[-1].name}")

    def describe(self):
        """Print the sizes of model and text, and log the machine."""
        run = self.run
        worker = run.worker
        config, recipe, options = run.settings
        entropy = unigram_entropy(evenly_spaced(run.rows["val"], options.eval_rows))
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        available = len(run.rows["train"]) * config.seq_len / 1e6
        wanted = recipe.batch_size * run.settings.last_step * config.seq_len / 1e6
        micro_batch = min(worker.share_of(recipe.batch_size), options.micro_batch_size)
        peaks = [f"{each.param_groups[0]['lr']:g} ({type(each).__name__})" for each in run.optimizers]
        lines = [
            f"{run.out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, "
            f"decoder {config.decoder_layers} x {config.decoder_width}",
            f"{wanted:,.1f} M tokens of {recipe.data}, which has {available:,.1f} M: {wanted / available:.2f} epochs",
            f"{recipe.batch_size} sequences per step; rates rise to {', '.join(peaks)} in {recipe.warmup_steps:,} of "
            f"{recipe.max_steps:,} steps, then fall to 0",
            f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, {micro_batch} "
            f"sequences at a time, {'continuing at' if run.step else 'from'} step {run.step}",
            *[f"changed: {name}={now!r}, before {before!r}" for name, (before, now) in run.changed.items()],
            f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context"]
        self.write("\n".join(lines), step=run.step, unigram_entropy=entropy, start={
            "commit": commit(), "python": platform.python_version(), "torch": torch.__version__,
            "host": socket.gethostname(), "processes": worker.world_size,
            "micro_batch": micro_batch,
            "flops_per_token": flops(config) / config.seq_len, "changed": run.changed})

    def log_validation(self, val_loss: float, val_accuracy: float):
        """Print and log the validation loss and the accuracy at the masks."""
        step = self.run.step
        self.write(f"step {step:>6,}/{self.run.settings.last_step:,}  validation loss {val_loss:.3f}  accuracy "
                   f"{val_accuracy:.1%}", step=step, val_loss=val_loss, val_accuracy=val_accuracy,
                   seconds=self.run.seconds)

    def log_steps(self):
        """Log the speed and the means since the last line. Raises UserError if a loss or norm is not finite."""
        (config, recipe, _), run, count = self.run.settings, self.run, len(self.recent)
        losses, norms = [torch.stack(values).tolist() for values in zip(*self.recent, strict=True)]
        losses = run.worker.all_reduce(*losses)
        losses = [loss / run.worker.world_size for loss in losses]  # each process has an equal share of every batch
        for step, loss, norm in zip(range(run.step - count + 1, run.step + 1), losses, norms, strict=True):
            if not math.isfinite(loss + norm):
                raise UserError(f"step {step}: the loss is not finite; this step is the first bad one, with loss "
                                f"{loss:.4g} and gradient norm {norm:.4g}; continue from the last checkpoint with a "
                                "lower --learning-rate, a lower --clip-norm or another --seed")
        lap = time.perf_counter() - self.since  # the losses are known, so the GPU has finished
        run.seconds += lap
        sequences = run.step * recipe.batch_size
        speed = count * recipe.batch_size * config.seq_len / lap
        line = {"step": run.step, "loss": sum(losses) / count, "grad_norm": sum(norms) / count,
                "seconds": run.seconds, "tokens_per_second": speed, "tokens": sequences * config.seq_len,
                "epoch": round(sequences / len(run.rows["train"]), 4)}
        for name, optimizer in zip(("lr", "muon_lr"), run.optimizers, strict=False):
            line[name] = optimizer.param_groups[0]["lr"]
        if run.worker.device.type == "cuda":
            line["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        left = (run.settings.last_step - run.step) * run.seconds / run.step / 60
        self.write(f"step {run.step:>6,}/{run.settings.last_step:,}  loss {line['loss']:.3f}  {speed:,.0f} tokens/s  "
                   f"{left:.1f} min left", **line)
        self.recent = []


def draw_loss(out: Path):
    """Draw loss.png from log.jsonl: the training and validation losses by step, and the unigram entropy."""
    log = read_log(out)
    with figure(out / "loss.png") as axes:
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", ".-")):
            points = [(line["step"], line[name]) for line in log if name in line]
            if points:
                axes.plot(*zip(*points), style, label=label)
        if log and "unigram_entropy" in log[0]:
            axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=printable(str(out)))
        axes.legend()
