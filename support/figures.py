"""Figures, and the curve of a run."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.run_folder import atomic, read_log


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


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, side by side; then write it to `path`. Without pyplot: no display."""
    import matplotlib.figure
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a name is a $
        drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        yield drawn, drawn.subplots(1, panels)
        with atomic(path) as temporary:
            drawn.savefig(temporary, dpi=120, format="png")
