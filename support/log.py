"""The log of a run, its curve, Weights & Biases, and figures."""
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.files import UserError, atomic, short_hash


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl, without one that a crash cut off."""
    lines = []
    if (out / "log.jsonl").is_file():
        for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


class RunLog:
    """log.jsonl of a run folder; with a project of Weights & Biases it goes there, too."""
    def __init__(self, out: Path, step: int, project: str, settings: dict):
        """Go on after `step`. What an interrupted run logged later goes: those steps are trained again."""
        self.path = out / "log.jsonl"
        kept = [line for line in read_log(out) if line["step"] <= step and step > 0]
        with atomic(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.wandb = open_wandb(project, out, settings) if project else None

    def write(self, **line):
        """Append a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb is not None:
            self.wandb.log(line)

    def close(self):
        """Tell Weights & Biases that the run has ended."""
        if self.wandb is not None:
            self.wandb.finish()


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


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, side by side; then write it to `path`. Without pyplot: no display."""
    from matplotlib.figure import Figure
    drawn = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    yield drawn, drawn.subplots(1, panels)
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
