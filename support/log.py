"""The reports of a run: log.jsonl, loss.png, the progress bar, Weights & Biases."""
import json
import math
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import tokenizers
import torch
from tqdm import tqdm

from support.cli import UserError
from support.files import figure, json_lines, named, short_hash, write_texts
from support.models import use_of_gpu


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl. It says on stderr how many it leaves out, as a crash or a disk damaged them."""
    path, found, damaged = out / "log.jsonl", [], 0
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            found.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        print(f"{path}: left out damaged lines: {damaged}", file=sys.stderr)
    return found


class Progress:
    """The reports of a train.Run while it trains: log.jsonl, the bar, lines in the terminal, Weights & Biases. Only the
    first process reports. Use as a context, which ends the bar."""
    def __init__(self, run):
        """Lines of log.jsonl after run.step go: those steps are done again."""
        self.run, self.wandb, self.is_main = run, run.wandb, run.worker.is_main
        self.path = run.out / "log.jsonl"
        self.recent = []  # loss and gradient norm of the steps since the last line of the log
        self.start_clock()
        if self.is_main:
            kept = [line for line in read_log(run.out) if line["step"] <= run.step and run.step > 0]
            write_texts(run.out, {"log.jsonl": json_lines(kept)})
        self.bar = tqdm(total=run.settings.last_step, initial=run.step, unit="step",
                        disable=None if self.is_main else True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception):
        self.bar.close()
        self.tell_wandb("finish")

    def start_clock(self):
        """Count the time from now on as training."""
        self.since = time.perf_counter()

    def write(self, **line):
        """Append a line to log.jsonl."""
        if self.is_main:
            with named(self.path), open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.tell_wandb("log", line)

    def tell_wandb(self, method: str, *arguments):
        """Call a method of the run of Weights & Biases. After its first error, one warning, it is left alone."""
        if self.wandb is not None:
            _, error = attempt(getattr(self.wandb, method), *arguments)
            if error is not None:
                self.wandb = None
                print(f"warning: --wandb: {error!r}; the run goes on without it", file=sys.stderr)

    def header(self, entropy: float):
        """Print the size of model, text and machine, and the unigram entropy of the validation tokens."""
        (config, recipe, _), run, worker = self.run.settings, self.run, self.run.worker
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        million = config.seq_len / 1e6  # tokens of a sequence
        there = len(run.rows["train"]) * million
        wanted = recipe.batch_size * run.settings.last_step * million
        self.say(f"{run.out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, "
                 f"decoder {config.decoder_layers} x {config.decoder_width}")
        self.say(f"{wanted:,.1f} M tokens of {recipe.data}, which has {there:,.1f} M: {wanted / there:.2f} epochs")
        self.say(f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, "
                 f"{'continuing at' if run.step else 'from'} step {run.step}")
        self.say(f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context")

    def log_start(self, micro_batch: int):
        """Log what this start runs with: code, versions, machines, and the settings that changed since the last one."""
        hosts = self.run.worker.gather(socket.gethostname())
        versions = {package.__name__: str(package.__version__) for package in (torch, numpy, tokenizers)}
        self.write(step=self.run.step, start={
            "commit": commit_of_code(), "python": platform.python_version(), **versions, "hosts": sorted(set(hosts)),
            "processes": len(hosts), "micro_batch": micro_batch, "changed": self.run.changed})

    def say(self, text: str):
        """Print a text above the bar."""
        if self.is_main:
            self.bar.write(text)

    def add_step(self, loss, norm):
        """Count a step with its loss and the norm of its gradient, scalars on any device."""
        self.recent.append((loss, norm))
        self.bar.update()

    def log_steps(self):
        """Log the means of the steps since the last line, and the speed. Raises UserError if they are not finite."""
        (config, recipe, _), run, count = self.run.settings, self.run, len(self.recent)
        # The mean over steps and processes: each process has an equal share of every batch.
        total, = run.worker.all_reduce(float(sum(loss for loss, _ in self.recent)))
        norm = float(sum(norm for _, norm in self.recent)) / count
        loss = total / run.worker.world_size / count
        if not math.isfinite(loss + norm):
            raise UserError(self.first_bad_step())
        lap = time.perf_counter() - self.since  # a GPU has ended its work, as the loss is known
        run.seconds += lap
        sequences = run.step * recipe.batch_size
        speed = count * recipe.batch_size * config.seq_len / lap
        line = {"step": run.step, "loss": loss, "grad_norm": norm, "seconds": run.seconds, "tokens_per_second": speed}
        for name, optimizer in zip(("lr", "muon_lr"), run.optimizers, strict=False):
            line[name] = optimizer.param_groups[0]["lr"]
        line |= {"tokens": sequences * config.seq_len, "epoch": round(sequences / len(run.rows["train"]), 4)}
        self.write(**line, **use_of_gpu(config, run.worker, speed))
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        self.recent = []

    def first_bad_step(self) -> str:
        """A description of the first of the recent steps whose loss or gradient is not finite."""
        step = self.run.step - len(self.recent)
        for loss, norm in self.recent:
            step += 1
            if not math.isfinite(loss + norm):
                break
        return (f"step {step}: the loss is not finite; this step is the first bad one, with loss {loss:.4g} and "
                f"gradient norm {norm:.4g}; go on from the last checkpoint with --change-recipe and a lower "
                "--learning-rate, a lower --clip-norm or another --seed")

    def log_validation(self, val_loss: float):
        """Log the validation loss, and print it with the speed and the time that is left."""
        (config, recipe, _), step, seconds = self.run.settings, self.run.step, self.run.seconds
        last = self.run.settings.last_step
        self.write(step=step, val_loss=val_loss, seconds=seconds)
        speed = step * recipe.batch_size * config.seq_len / seconds
        self.say(f"step {step:>6,}/{last:,}  validation loss {val_loss:.3f}  {speed:,.0f} tokens/s  "
                 f"{(last - step) / step * seconds / 60:.1f} min left")


def commit_of_code() -> str | None:
    """The git commit of this code, with -dirty after it if files have changed; None outside of a repository."""
    command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return found.stdout.strip() or None


# ---- Weights & Biases ---------------------------------------------------------------------------------------
def attempt(function: Callable, *arguments) -> tuple[object, Exception | None]:
    """The result of a call and None, or None and its error. For wandb, whose errors have no common base."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def open_wandb(project: str, out: Path, settings: dict):
    """The run of Weights & Biases that belongs to a run folder: new, or the one that it had before."""
    import wandb
    known = short_hash(str(out.resolve()))
    run = wandb.init(project=project, id=known, resume="allow", name=str(out), dir=str(out), config=settings)
    run.define_metric("*", step_metric="step")  # a run that continues may log a step again
    return run


def start_wandb(project: str, out: Path, settings: dict):
    """open_wandb, or None without a project. Raises UserError if it fails: without the package, a key, or a network."""
    if not project:
        return None
    run, error = attempt(open_wandb, project, out, settings)
    if error is not None:
        raise UserError(f"--wandb {project}: cannot start ({error!r}); try `pip install wandb` and `wandb login`, or "
                        "leave --wandb out") from error
    return run


# ---- The figure ---------------------------------------------------------------------------------------------
def draw_loss(out: Path):
    """Draw loss.png from log.jsonl: training and validation loss by step, and the unigram entropy."""
    log = read_log(out)
    with figure(out / "loss.png") as (_, axes):
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", ".-")):
            points = [(line["step"], line[name]) for line in log if name in line]
            if points:
                axes.plot(*zip(*points), style, label=label)
        for line in log:
            if "unigram_entropy" in line:
                axes.axhline(line["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
        axes.legend()
