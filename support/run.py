"""A run of train.py: where it stands, its checkpoints, and its reports in the terminal, log.jsonl and loss.png."""
import math
import secrets
import socket
import subprocess
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from maelm import MAELM, Config
from support.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from support.corpus import Corpus, evenly_spaced, unigram_entropy
from support.model import flops
from support.program import ROOT, UserError, compare, fields_of, figure, json_lines, read_lines, write_json, write_text
from support.worker import Worker

FILES = ("config.json", "tokenizer.json", "log.jsonl", "loss.png")  # of a run, besides its checkpoints
VALIDATION = f"with {Config.mask_rate:.0%} masks"  # in all runs, so that their losses can be compared


def commit() -> str | None:
    """The commit of this code, with -dirty if files have changed since; None without git."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


class Run:
    """A run in the folder `out`. All processes have one; only the first process writes files. `step` counts its steps,
    from that of the newest checkpoint. A checkpoint holds the run's `record`, which stays the same, and step, seconds,
    model and optimizers."""
    def __init__(self, out: Path, config: Config, recipe, fixed: Container[str], worker: Worker):
        """Find the newest checkpoint. Raises UserError if one of the settings in `fixed` differs, or if the
        folder is not that of a run."""
        self.out, self.config, self.recipe, self.worker = out, config, recipe, worker
        self.settings = asdict(config) | asdict(recipe)
        self.step = 0
        self.seconds = 0.0  # of training, without evaluations and checkpoints
        self.recent = []  # what `count_step` got since the last line
        self.changed = {}  # settings: name -> [before, now]
        self.saved = None  # the newest checkpoint
        found = checkpoints(out)
        if found:
            self.saved = read_checkpoint(found[-1])
            self.step, self.seconds = self.saved["step"], self.saved["seconds"]
            then = type(recipe)(**fields_of(type(recipe), self.saved["settings"]))  # what it lacks has its default
            self.changed = compare(out, asdict(self.saved["config"]) | asdict(then), self.settings, fixed)
        own = FILES if (out / "log.jsonl").is_file() else ()  # a run begins with its log
        foreign = [path.name for path in sorted(out.glob("[!.]*")) if path.name not in own]
        if foreign and not found:
            raise UserError(f"{out}: has {foreign[0]}, which is not of a run that has begun; choose another --out")
        if not worker.is_same(self.step):
            raise UserError(f"{out}: the processes find different checkpoints; use a folder that all share")

    # ---- Checkpoints ----------------------------------------------------------------------------------------
    def restore(self, model: MAELM, optimizers: list, start: dict | None):
        """Load weights and optimizers' states from the newest checkpoint or, in a new run, the weights of `start`. The
        settings of the optimizers' groups stay: they come from flags. Raises UserError for weights of another shape."""
        source = self.saved or start or {}
        self.tokenizer = source.get("tokenizer")  # None: a new one is learned
        self.record = {"start": source.get("start", ""), "id": (self.saved or {}).get("id", secrets.token_hex(8))}
        if source:
            try:
                model.load_state_dict(source.pop("model"))  # not kept in memory
            except RuntimeError as error:
                if self.saved:
                    raise UserError(f"{self.out}: its weights have another shape than this code's model; choose "
                                    f"another --out ({error})") from None
                raise UserError("--init: its weights have another shape; name a run of train.py, and no flags that "
                                f"change it ({error})") from None
        if self.saved:
            for optimizer, state in zip(optimizers, self.saved.pop("optimizers"), strict=True):
                optimizer.load_state_dict(state | {"param_groups": optimizer.state_dict()["param_groups"]})

    def save(self, model: MAELM, optimizers: list):
        """Write a checkpoint, remove older ones except the last `keep_checkpoints`, and draw loss.png."""
        if not self.worker.is_main:
            return
        write_checkpoint(self.out / f"step_{self.step:07d}.pt", self.record | {
            "step": self.step, "seconds": self.seconds, "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers]})
        if self.recipe.keep_checkpoints > 0:
            for old in checkpoints(self.out)[:-self.recipe.keep_checkpoints]:
                old.unlink()
        draw_loss(self.out)

    # ---- Reports --------------------------------------------------------------------------------------------
    def begin(self, model: MAELM, corpus: Corpus, **names: str):
        """Begin or continue the log, and describe the run. `names` go into its record."""
        self.record |= names | {"config": asdict(self.config), "settings": asdict(self.recipe),
                                "tokenizer": corpus.tokenizer.to_json(), "corpus": corpus.folder.name}
        if self.worker.is_main:
            # Lines after the checkpoint go: their steps are repeated.
            kept = [line for line in read_lines(self.out / "log.jsonl") if line["step"] <= self.step and self.step > 0]
            write_text(self.out / "log.jsonl", json_lines(kept))
            # Copies for people; checkpoints hold the same.
            write_json(self.out / "config.json", self.settings | names | {"corpus": corpus.folder.name})
            write_text(self.out / "tokenizer.json", self.record["tokenizer"])
        self.wandb = None
        if self.worker.is_main and self.recipe.wandb:
            import wandb  # pip install wandb
            try:
                self.wandb = wandb.init(project=self.recipe.wandb, name=str(self.out), config=self.settings,
                                        id=self.record["id"], resume="allow")
            except Exception as error:  # a network's trouble must not end training
                print(f"--wandb: {error}; training goes on without it")
        self.describe(model, corpus)

    def describe(self, model: MAELM, corpus: Corpus):
        """Print the sizes of model and text, and log the machine."""
        config, recipe, worker = self.config, self.recipe, self.worker
        entropy = unigram_entropy(evenly_spaced(corpus.val, recipe.eval_rows))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        epochs = recipe.batch_size * recipe.last_step / len(corpus.train)
        micro_batch = min(recipe.batch_size // worker.world_size, recipe.micro_batch_size)
        lines = [
            f"{self.out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, decoder "
            f"{config.decoder_layers} x {config.decoder_width}",
            f"{epochs:.2f} epochs of {recipe.data}, which has {len(corpus.train) * config.seq_len / 1e6:,.1f} M "
            "tokens",
            f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, {micro_batch} "
            f"sequences at a time, {'continuing at' if self.step else 'from'} step {self.step}",
            *[f"changed: {name}={now!r}, before {before!r}" for name, (before, now) in self.changed.items()],
            f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context"]
        self.write("\n".join(lines), unigram_entropy=entropy, start={
            "commit": commit(), "torch": torch.__version__, "host": socket.gethostname(), "micro_batch": micro_batch,
            "processes": worker.world_size, "dtype": str(worker.dtype),
            "flops_per_token": flops(config) / config.seq_len, "changed": self.changed})

    def write(self, text: str, **line):
        """Append a line to log.jsonl and print a text."""
        line = {"step": self.step} | line
        if self.worker.is_main:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json_lines([line]))
            if self.wandb:
                self.wandb.log(line)
        print(text)

    def start_clock(self):
        """From here on, time is training time. `log_steps` stops the clock."""
        self.since = time.perf_counter()

    def count_step(self, values: dict):
        """Count a step, and keep its loss, terms and gradient norm (scalars on any device by name) for a line."""
        self.recent.append(values)
        self.step += 1

    def log_steps(self, optimizers: list):
        """Log the speed and the means since the last line. Raises UserError if a loss or norm is not finite."""
        recipe, count = self.recipe, len(self.recent)
        names = [*self.recent[0]]
        sums = [sum(torch.stack([values[name] for values in self.recent]).tolist()) for name in names]
        sums = self.worker.sums(*sums)  # processes have equal shares of a batch
        means = {name: total / count / self.worker.world_size for name, total in zip(names, sums)}
        self.recent = []
        if not math.isfinite(sum(sums)):
            raise UserError(f"steps {self.step - count + 1} to {self.step}: a loss or a gradient's norm is not finite; "
                            "continue with a lower --learning-rate or a lower --clip-norm")
        lap = time.perf_counter() - self.since  # the losses are known, so the GPU has finished
        self.seconds += lap
        tokens_per_step = recipe.batch_size * self.config.seq_len
        speed = count * tokens_per_step / lap
        line = means | {"seconds": self.seconds, "tokens_per_second": speed, "tokens": self.step * tokens_per_step}
        for optimizer in optimizers:  # "lr" is that of the first one, and muon_lr that of Muon
            name = "lr" if optimizer is optimizers[0] else f"{type(optimizer).__name__.lower()}_lr"
            line[name] = optimizer.param_groups[0]["lr"]
        left = (recipe.last_step - self.step) * self.seconds / self.step / 60
        self.write(f"step {self.step:>6,}/{recipe.last_step:,}  loss {means['loss']:.3f}  {speed:,.0f} tokens/s  "
                   f"{left:.1f} min left", **line)

    def log_validation(self, loss: float, accuracy: float):
        """Log the validation loss in nats, and the accuracy at the masks. Raises UserError for a loss that is not
        finite."""
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: the validation loss is not finite; use a lower --learning-rate")
        self.write(f"step {self.step:>6,}/{self.recipe.last_step:,}  validation loss {loss:.3f}  accuracy "
                   f"{accuracy:.1%}  ({VALIDATION})", val_loss=loss, val_accuracy=accuracy, seconds=self.seconds)


def draw_loss(out: Path):
    """Draw loss.png from log.jsonl: the training and validation losses by step, and the unigram entropy."""
    log = read_lines(out / "log.jsonl")
    with figure(out / "loss.png") as axes:
        for name in dict.fromkeys(name for line in log for name in line if "loss" in name):
            points = [(line["step"], line[name]) for line in log if name in line]
            label = {"loss": "training", "val_loss": f"validation {VALIDATION}"}.get(name, name)  # or a term
            axes.plot(*zip(*points), ".-" if name == "val_loss" else "-", label=label)
        axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
        axes.legend()
