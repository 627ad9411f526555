"""The reports of a run: log.jsonl, loss.png, lines in the terminal, Weights & Biases; and the cost of a step."""
import json
import math
import shlex
import socket
import subprocess
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from maelm import MAELM, Config, Corruption
from support.model import make_model
from support.program import ROOT, UserError, figure, json_lines, read_lines, write_json, write_text
from support.corpus import Rows, evenly_spaced, unigram_entropy
from support.worker import Worker


def commit() -> str | None:
    """The commit of this code, with -dirty if files have changed since; None without git."""
    git = f"git -C {shlex.quote(str(ROOT))}"
    failed, output = subprocess.getstatusoutput(f"{git} describe --always --dirty --abbrev=40 --exclude=*")
    return None if failed else output


def losses_of(result) -> dict:
    """The result of MAELM.forward, a loss or a dictionary of its terms, as the whole loss and the terms by name."""
    if isinstance(result, dict):
        return {"loss": sum(result.values())} | {f"loss_{name}": term for name, term in result.items()}
    return {"loss": result}


def flops(config: Config) -> int:
    """FLOPs of all matrix products in a training step on one sequence; a multiply-add counts as 2."""
    n = config.seq_len
    m = config.num_masked(n)
    r = n - m + round(config.mask_in_encoder * m)  # tokens that the encoder sees
    # Meta tensors have shapes but no data. There, attention runs as matrix products; a GPU kernel would go uncounted.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens, masked, kept = [torch.zeros(1, length, dtype=torch.int64) for length in (n, m, r)]
        losses_of(make_model(config)(tokens, Corruption(tokens, masked, kept)))["loss"].backward()
    return counter.get_total_flops()


class Log:
    """Reports a run to the terminal and log.jsonl. Only the first process reports."""
    def __init__(self, out: Path, record: dict, step: int, last_step: int, seconds: float, worker: Worker):
        """The `record` is that of the run's checkpoints. Lines of log.jsonl after `step` go: the steps are repeated."""
        self.out, self.worker, self.step, self.last_step = out, worker, step, last_step
        self.settings = record["config"] | record["settings"]
        self.seconds = seconds  # of training, without evaluations and checkpoints
        self.recent = []  # since the last line
        if not worker.is_main:
            return
        kept = [line for line in read_lines(out / "log.jsonl") if line["step"] <= step and step > 0]
        write_text(out / "log.jsonl", json_lines(kept))  # first, because it marks the folder as ours
        # Copies for people; checkpoints hold the same.
        others = {name: record[name] for name in ("preset", "ablation", "corpus")}
        write_json(out / "config.json", self.settings | others)
        write_text(out / "tokenizer.json", record["tokenizer"])
        if self.settings["wandb"]:
            import wandb  # pip install wandb
            self.wandb = wandb.init(project=self.settings["wandb"], name=str(out), config=self.settings)

    def write(self, text: str, **line):
        """Append a line to log.jsonl and print a text."""
        if self.worker.is_main:
            line = {"step": self.step} | line
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if self.settings["wandb"]:
                self.wandb.log(line)
        print(text)

    def describe(self, model: MAELM, rows: dict[str, Rows], changed: dict[str, list]):
        """Print the sizes of model and text, and log the machine."""
        values, worker, config = self.settings, self.worker, model.config
        self.available = len(rows["train"])  # sequences for training
        entropy = unigram_entropy(evenly_spaced(rows["val"], values["eval_rows"]))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        epochs = values["batch_size"] * self.last_step / self.available
        micro_batch = min(values["batch_size"] // worker.world_size, values["micro_batch_size"])
        case = " in lower case (--no-uncased keeps its case)" if values["uncased"] else ""
        lines = [
            f"{self.out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, decoder "
            f"{config.decoder_layers} x {config.decoder_width}",
            f"{epochs:.2f} epochs of {values['data']}{case}, which has {self.available * config.seq_len / 1e6:,.1f} M "
            "tokens",
            f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, {micro_batch} "
            f"sequences at a time, {'continuing at' if self.step else 'from'} step {self.step}",
            *[f"changed: {name}={now!r}, before {before!r}" for name, (before, now) in changed.items()],
            f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context"]
        self.write("\n".join(lines), unigram_entropy=entropy, start={
            "commit": commit(), "torch": torch.__version__, "host": socket.gethostname(), "micro_batch": micro_batch,
            "processes": worker.world_size, "flops_per_token": flops(config) / config.seq_len, "changed": changed})

    def validation(self, loss: float, accuracy: float):
        """Print and log the validation loss in nats, and the accuracy at the masks."""
        self.write(f"step {self.step:>6,}/{self.last_step:,}  validation loss {loss:.3f}  accuracy {accuracy:.1%}",
                   val_loss=loss, val_accuracy=accuracy, seconds=self.seconds)

    def start_clock(self):
        """From here on, time is training time. `steps` stops the clock."""
        self.since = time.perf_counter()

    def add(self, values: dict):
        """Note a step's loss, its terms and its gradient norm, scalars on any device by name, for the next line."""
        self.recent.append(values)
        self.step += 1

    def steps(self, optimizers: list):
        """Log the speed and the means since the last line. Raises UserError if a loss or norm is not finite."""
        count = len(self.recent)
        names = [*self.recent[0]]
        sums = [sum(torch.stack([values[name] for values in self.recent]).tolist()) for name in names]
        sums = self.worker.all_reduce(*sums)  # processes have equal shares of a batch
        means = {name: total / count / self.worker.world_size for name, total in zip(names, sums)}
        loss = means["loss"]
        self.recent = []
        if not math.isfinite(sum(sums)):
            raise UserError(f"steps {self.step - count + 1} to {self.step}: a loss or a gradient's norm is not finite; "
                            "continue with a lower --learning-rate, a lower --clip-norm or another --seed")
        lap = time.perf_counter() - self.since  # the losses are known, so the GPU has finished
        self.seconds += lap
        sequences = self.step * self.settings["batch_size"]
        speed = count * self.settings["batch_size"] * self.settings["seq_len"] / lap
        line = means | {"seconds": self.seconds, "tokens_per_second": speed,
                        "tokens": sequences * self.settings["seq_len"], "epoch": round(sequences / self.available, 4)}
        for optimizer in optimizers:  # "lr" is that of the first one, and muon_lr that of Muon
            name = "lr" if optimizer is optimizers[0] else f"{type(optimizer).__name__.lower()}_lr"
            line[name] = optimizer.param_groups[0]["lr"]
        if self.worker.device.type == "cuda":
            line["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        left = (self.last_step - self.step) * self.seconds / self.step / 60
        self.write(f"step {self.step:>6,}/{self.last_step:,}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
                   f"{left:.1f} min left", **line)


def draw_loss(out: Path):
    """Draw loss.png from log.jsonl: the training and validation losses by step, and the unigram entropy."""
    log = read_lines(out / "log.jsonl")
    with figure(out / "loss.png") as axes:
        for name in dict.fromkeys(name for line in log for name in line if "loss" in name):
            points = [(line["step"], line[name]) for line in log if name in line]
            label = {"loss": "training", "val_loss": "validation"}.get(name, name)  # or a term of the loss
            axes.plot(*zip(*points), ".-" if name == "val_loss" else "-", label=label)
        if log and "unigram_entropy" in log[0]:
            axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
        axes.legend()
