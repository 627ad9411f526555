"""Figures without a display."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.program.files import atomic


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator:
    """Yield the axes of a matplotlib figure, or several side by side; then write the figure to `path`."""
    import matplotlib.figure
    drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    yield drawn.subplots(1, panels)
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
