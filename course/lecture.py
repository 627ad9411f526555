"""What lecture.ipynb shows that no other file computes or draws."""
from collections.abc import Iterator

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from maelm import MASK, NUM_SPECIAL, Corruption
from support.tokenizer import Tokenizer

SHADES = {"": "white", "[MASK]": "#f6b26b", "e_[MASK]": "#fce5cd"}  # of cells by their text; the others are blue


def readings(words: list[str], corruption: Corruption) -> tuple[list[str], list[str]]:
    """What encoder and decoder read at the n positions of one row, as in Figure 2; "" where a token is removed."""
    encoder = [""] * len(words)
    decoder = ["e_[MASK]"] * len(words)
    for i in corruption.kept[0].tolist():
        encoder[i] = "[MASK]" if corruption.corrupted[0, i] == MASK else words[i]
        decoder[i] = f"h_{i}"
    return encoder, decoder


def draw_cells(rows: dict[str, list[str]], weights: dict[str, list[float]] | None = None) -> Figure:
    """A picture with a row of cells for each name; with weights in [0, 1] a cell is as dark as its weight."""
    columns = max(map(len, rows.values()))
    size = (min(13, 2.5 + columns), 0.5 * len(rows) + 0.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for y, (name, texts) in enumerate(rows.items()):
        for x, text in enumerate(texts):
            shade = SHADES.get(text, "#cfe2f3")
            color = "black"
            if weights is not None:
                shade = (0.0, 0.3, 0.8, weights[name][x])
                color = "white" if weights[name][x] > 0.5 else "black"
            cell = Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=shade)
            axes.add_patch(cell)
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=color)
    axes.set(xlim=(0, columns), ylim=(len(rows), 0), xticks=[])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    axes.spines[:].set_visible(False)
    return figure


def repeated_words(rows, tokenizer: Tokenizer) -> Iterator[tuple]:
    """Of rows (N, n) int64 those in which a long word stands twice: each as (1, n), and the two positions."""
    for row in rows:
        for token in row[row >= NUM_SPECIAL].tolist():
            places = (row == token).nonzero().flatten().tolist()
            word = tokenizer.decode([token])
            is_long = len(word) > 5 and word.strip().isalpha()
            if is_long and len(places) == 2:
                yield row[None], places
                break  # one word of each row
