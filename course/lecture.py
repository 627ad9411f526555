"""What lecture.ipynb shows that no other file computes or draws."""
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from maelm import MASK, NUM_SPECIAL, Corruption
from support.tokenizer import Tokenizer

SHADES = {"": "white", "[MASK]": "#f6b26b", "e_[MASK]": "#fce5cd"}  # of cells by their text; the others are blue


def readings(words: list[str], corruption: Corruption) -> tuple[list[str], list[str]]:
    """What encoder and decoder read at the n positions of one row, as in Figure 2; "" where a token is removed."""
    _, kept, read = corruption
    encoder, decoder = [""] * len(words), ["e_[MASK]"] * len(words)
    for i, token in zip(kept[0].tolist(), read[0].tolist()):
        encoder[i] = "[MASK]" if token == MASK else words[i]
        decoder[i] = f"h_{i}"
    return encoder, decoder


def draw_cells(rows: dict[str, list[str]], weights: dict[str, list[float]] | None = None) -> Figure:
    """A picture with a row of cells for each name; with weights in [0, 1] a cell is as dark as its weight."""
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(min(13, 2.5 + columns), 0.5 * len(rows) + 0.2), layout="constrained")
    axes = figure.subplots()
    for y, (name, texts) in enumerate(rows.items()):
        for x, text in enumerate(texts):
            shade = SHADES.get(text, "#cfe2f3") if weights is None else (0.0, 0.3, 0.8, weights[name][x])
            axes.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=shade))
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize="small")
    axes.set(xlim=(0, columns), ylim=(len(rows), 0), xticks=[], yticks=[y + 0.5 for y in range(len(rows))],
             yticklabels=rows)
    axes.spines[:].set_visible(False)
    return figure


def repeated_word(rows, tokenizer: Tokenizer, number: int = 0):
    """The row (1, n) int64 of rows (N, n) that is the number-th to hold a long word twice, and the two positions."""
    for row in rows:
        for i, token in enumerate(row.tolist()):
            places = (row == token).nonzero().flatten().tolist()
            word = tokenizer.decode([token]) if token >= NUM_SPECIAL else ""
            if len(places) == 2 and places[0] == i and len(word) > 5 and word.strip().isalpha():
                if number == 0:
                    return row[None], places
                number -= 1
                break
    raise ValueError("no row holds a long word twice")
