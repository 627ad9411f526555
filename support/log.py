"""The log of a run, its curve, Weights & Biases, and figures."""
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.files import atomic, short_hash


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log.jsonl, without one that a crash cut off."""
    lines = []
    if (out / "log.jsonl").is_file():
        for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


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
    import wandb
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
