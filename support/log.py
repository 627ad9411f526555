"""The log of a run: log.jsonl, loss.png, Weights & Biases."""
import json
import sys
from pathlib import Path

from support.cli import UserError
from support.files import figure, json_lines, named, short_hash, write_texts


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


class RunLog:
    """log.jsonl of a run folder; with a project of Weights & Biases it goes there, too."""
    def __init__(self, out: Path, step: int, project: str, settings: dict):
        """Go on after `step`. What an interrupted run logged later goes: those steps are trained again."""
        self.path = out / "log.jsonl"
        kept = [line for line in read_log(out) if line["step"] <= step and step > 0]
        write_texts(out, {"log.jsonl": json_lines(kept)})
        self.wandb = open_wandb(project, out, settings) if project else None

    def write(self, **line):
        """Append a line."""
        with named(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb is not None:
            self.wandb.log(line)

    def close(self):
        """Tell Weights & Biases that the run has ended."""
        if self.wandb is not None:
            self.wandb.finish()


def open_wandb(project: str, out: Path, settings: dict):
    """The run of Weights & Biases that belongs to a run folder: new, or the one that it names."""
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb: this needs the package wandb: pip install wandb") from None
    known = short_hash(str(out.resolve()))
    run = wandb.init(project=project, id=known, resume="allow", name=str(out), dir=str(out), config=settings)
    run.define_metric("*", step_metric="step")  # a run that continues may log a step again
    return run


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
