"""Figures without a display."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.program.files import atomic


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its side-by-side axes; then write the figure to `path`. No display is needed."""
    import matplotlib.figure
    with matplotlib.rc_context({"text.parse_math": False}):  # so that a $ in a name stays a $
        drawn = matplotlib.figure.Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        yield drawn, drawn.subplots(1, panels)
        with atomic(path) as temporary:
            drawn.savefig(temporary, dpi=120, format="png")
