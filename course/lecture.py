"""Functions for lecture.ipynb that draw figures, find example sequences and look into models."""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import maelm
from maelm import MAELM, MASK, NUM_SPECIAL, Attention, Corruption, corrupt
from support.tokenizer import Tokenizer

# The color of a cell by its text; cells with other texts are gray. Purple always means [MASK].
SHADES = {"": "white", "[MASK]": "#b8a1dd", "e_[MASK]": "#e4daf5"}
LOSS = "−log p"  # cells that show a term of the loss begin with this text


def six_tokens(words: list[str], corruption: Corruption) -> tuple[list[str], list[str], list[str]]:
    """The texts of Figure 2's cells for the n positions of one sequence: the encoder's input, the decoder's input and
    the terms of the loss. The text of an empty cell is ""."""
    encoder = [""] * len(words)
    decoder = ["e_[MASK]"] * len(words)
    loss = [""] * len(words)
    for i in corruption.kept[0].tolist():
        encoder[i] = "[MASK]" if corruption.corrupted[0, i] == MASK else words[i]
        decoder[i] = f"h_{i}"
    for i in corruption.masked[0].tolist():
        loss[i] = f"{LOSS}({words[i]})"
    return encoder, decoder, loss


def draw_cells(rows: dict[str, list[str] | str]) -> Figure:
    """Draw one row of cells per name. Columns are numbered from 0. A row that is a single text is a box over all
    columns, with an arrow from each cell above it and to each cell below it."""
    columns = max(len(texts) for texts in rows.values() if isinstance(texts, list))
    figure = Figure(figsize=(max(13, 1.2 * columns), 0.55 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots()
    cells = list(rows.values())
    for y, texts in enumerate(cells):
        if isinstance(texts, str):
            axes.add_patch(Rectangle((0.03, y + 0.25), columns - 0.06, 0.5, facecolor="white", edgecolor="black"))
            axes.text(columns / 2, y + 0.5, texts, ha="center", va="center")
            for start, neighbors in ((y - 0.05, cells[y - 1]), (y + 0.75, cells[y + 1])):
                for x in [x for x, text in enumerate(neighbors) if text]:
                    axes.annotate("", (x + 0.5, start + 0.3), (x + 0.5, start), arrowprops={"arrowstyle": "->"})
            continue
        for x, text in enumerate(texts):
            shade = "#f4c7c3" if text.startswith(LOSS) else SHADES.get(text, "#e6e6e6")
            edge = "#7e57c2" if text == "[MASK]" else "lightgray"
            axes.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=shade, edgecolor=edge, linewidth=2))
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center")
    axes.set(xlim=(0, columns), ylim=(len(rows), 0), xlabel="position")
    axes.set_xticks([x + 0.5 for x in range(columns)], range(columns))
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_method(words: list[str], corruption: Corruption) -> Figure:
    """Draw how MAE-LM predicts the masked words of a sequence: Figure 2 of the paper."""
    encoder, decoder, loss = six_tokens(words, corruption)
    states = [text.replace("e_[MASK]", "") for text in decoder]
    return draw_cells({"text": words, "encoder's input": encoder, "": "encoder", "encoder's output": states,
                       "decoder's input": decoder, " ": "decoder", "loss": loss})


def repeated_words(sequences, tokenizer: Tokenizer) -> Iterator[tuple]:
    """Find the sequences (N, n) int64 that contain a long word exactly twice. Yields each as (1, n), with the word's
    two positions."""
    for sequence in sequences:
        for token in sequence[sequence >= NUM_SPECIAL].tolist():
            places = (sequence == token).nonzero().flatten().tolist()
            word = tokenizer.decode([token])
            is_long = len(word) > 5 and word.strip().isalpha()
            if is_long and len(places) == 2:
                yield sequence[None], places
                break


def losses(model: MAELM, tokens, seed: int):
    """-log p(x_i | x-hat) in nats at masked positions of tokens (B, n), drawn by the seed -> (B, m)."""
    corruption = corrupt(tokens, model.config, torch.Generator().manual_seed(seed))
    logits = model.logits(corruption)  # (B, m, V)
    return F.cross_entropy(logits.mT, tokens.gather(1, corruption.masked), reduction="none")


@contextmanager
def recorded_attention(n: int) -> Iterator[list[torch.Tensor]]:
    """Until the context ends, collect the attention weights (B, heads, n, n) of each layer that reads all n positions,
    including gaps: the layers of an MLM's encoder or of an MAE-LM's decoder."""
    layers, original = [], maelm.attention

    def recording(q, k, v, *others):
        if k.shape[2] == n:
            identity = torch.eye(n).expand(*k.shape[:2], -1, -1)
            layers.append(original(q, k, identity, *others))  # with the identity as V, attention returns the softmax
        return original(q, k, v, *others)

    maelm.attention = recording
    try:
        yield layers
    finally:
        maelm.attention = original


def residual(h) -> float:
    """||H - 1 h^T|| / ||H|| (Frobenius), where h is the mean row; 0 if all rows are equal."""
    return float((h - h.mean(0)).norm() / h.norm())


def share_outside(gram, text_gram, dims: int) -> float:
    """The share of the squared length of the rows of H outside the first `dims` singular directions of a text.
    Takes gram = H^T H and the same product for the text, (d, d) float64 each."""
    _, directions = torch.linalg.eigh(text_gram)  # ascending
    inside = directions[:, -dims:]  # (d, dims)
    return 1 - float((inside.T @ gram @ inside).trace() / gram.trace())


def single_head(layer: Attention):
    """W^QK = W^Q W^K^T / sqrt(d) and W^VO = W^V W^O, (d, d) float64, as one head without biases; App. A."""
    # nn.Linear holds the transpose of the paper's W.
    query = layer.query.weight.double()
    key, value = layer.key_value.weight.double().chunk(2)
    output = layer.output.weight.double()
    return query.T @ key / len(query) ** 0.5, value.T @ output.T
