"""Where an MAE-LM and an MLM differ: what they predict by copying from the same row, and what their vectors hold.

    python -m course.copying out/toy out/toy-mlm      # run folders or checkpoints of train.py
"""
from pathlib import Path

import torch
import torch.nn.functional as F

from maelm import CLS, MAELM, NUM_SPECIAL, SEP, Attention, Corruption, attention, draw_masks, remove_masks
from rank import RankConfig, subject_of_run
from support.checkpoints import load_model
from support.cli import Parser, clear_errors
from support.rows import evenly


def losses(model: MAELM, tokens, corruption: Corruption):
    """-log p(x_i | x-hat) at the masked positions of tokens (B, n): (B, k), in nats; and these positions (B, k)."""
    k = int(corruption.masked[0].sum())
    at = corruption.masked.int().topk(k).indices
    logits = model.logits(corruption, at)  # (B, k, V)
    return F.cross_entropy(logits.mT, tokens.gather(1, at), reduction="none"), at


def mask(model: MAELM, tokens, maskable, seed: int) -> Corruption:
    """Mask tokens (B, n), as many as in training, where maskable (B, n) bool is True."""
    generator = torch.Generator().manual_seed(seed)
    chosen = draw_masks(maskable, model.config.masks_per_row(tokens.shape[1]), generator)
    return remove_masks(tokens, chosen, model.config, generator)


# ---- 1. Which tokens are easier? ----------------------------------------------------------------------------
def repeated(model: MAELM, tokens) -> tuple[float, float, float]:
    """The share of masked tokens that stand elsewhere in their row, the loss on these, and on the others."""
    corruption = mask(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    loss, at = losses(model, tokens, corruption)
    visible = tokens.masked_fill(corruption.masked, -1)[:, None, :]  # (B, 1, n)
    answers = tokens.gather(1, at)[:, :, None]  # (B, k, 1)
    again = (answers == visible).any(2)  # (B, k)
    return float(again.float().mean()), float(loss[again].mean()), float(loss[~again].mean())


# ---- 2. Does it copy? ---------------------------------------------------------------------------------------
def twice(tokens):
    """Rows [CLS] A [SEP] A of the beginnings A of tokens (B, n), rows [CLS] B [SEP] A, and where the second A is."""
    text = tokens[:, 1:tokens.shape[1] // 2]
    cls, sep = (torch.full((len(tokens), 1), token) for token in (CLS, SEP))
    same = torch.cat([cls, text, sep, text], dim=1)
    other = torch.cat([cls, text.roll(1, 0), sep, text], dim=1)  # B is the text of another row
    second = torch.arange(same.shape[1]) > text.shape[1] + 1
    return same, other, second & (same != SEP)


def attention_to_copies(model: MAELM, corruption: Corruption) -> list[float]:
    """By layer of what reads the gaps, the mean weight of the best head from a gap in the second A to its copy."""
    half = corruption.masked.shape[1] // 2
    gaps = corruption.masked[:, half:]  # (B, n / 2)
    found = []
    for weights in attention_weights(model, corruption):
        copies = weights.diagonal(-half, 2, 3)  # (B, heads, n / 2): from i to i - n / 2
        found.append(copies.mT[gaps].mean(0).max().item())
    return found


def attention_weights(model: MAELM, corruption: Corruption) -> list[torch.Tensor]:
    """The softmax of each layer that reads the gaps, an MLM's encoder or a decoder: (B, heads, n, n) each."""
    found = []

    def record(layer: Attention, inputs: tuple, output):
        x, bias = inputs
        key, _ = layer.key_value(x).chunk(2, dim=-1)
        q, k = [y.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for y in (layer.query(x), key)]
        identity = torch.eye(x.shape[1]).expand(*k.shape[:2], -1, -1)
        found.append(attention(q, k, identity, bias))  # with the identity as V it returns the softmax

    reader = model.encoder if model.decoder is None else model.decoder
    hooks = [block.self_attention.register_forward_hook(record) for block in reader.stack.blocks]
    model.logits(corruption, at=corruption.masked.int().topk(1).indices)
    for hook in hooks:
        hook.remove()
    return found


# ---- 3. What do the vectors hold? ---------------------------------------------------------------------------
def explained(h, groups) -> float:
    """The share of the variance of h (N, d) that lies between groups (N,) int64, such as those of one token."""
    h = h - h.mean(0)
    means = torch.zeros(int(groups.max()) + 1, h.shape[1]).index_add(0, groups, h)
    means /= groups.bincount().clamp(min=1)[:, None]
    return float(means[groups].square().sum() / h.square().sum())


@torch.no_grad()
def describe(name: str, data: str) -> str:
    """The three answers for a run on `data`, or on its own validation text: printable lines."""
    model, _ = load_model(Path(name))
    subject = subject_of_run(name, RankConfig(data=data), torch.device("cpu"))
    tokens = evenly(subject.rows, 512)

    share, again, others = repeated(model, tokens)
    same, other, second = twice(tokens)
    drawn = [mask(model, text, second, seed=1) for text in (same, other)]
    first, control = [losses(model, *pair)[0].mean() for pair in zip((same, other), drawn)]
    weights = ", ".join(f"{weight:.3f}" for weight in attention_to_copies(model, drawn[0]))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    variance = []
    for h in model.encoder(tokens, positions, all_layers=True):
        of_token, of_position = [explained(h.flatten(0, 1), groups.flatten()) for groups in (tokens, positions)]
        variance.append(f"{of_token:.0%} and {of_position:.0%}")

    corruption = mask(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    loss = losses(model, tokens, corruption)[0].mean()
    for block in model.encoder.stack.blocks:
        block.self_attention.output.forward = torch.zeros_like  # from here on the encoder has no attention
    cost = losses(model, tokens, corruption)[0].mean() - loss
    return f"""{name}: loss {loss:.3f}
  {share:.0%} repeat a token of the row: {again:.3f}; the others: {others:.3f}
  masks in the second A of A [SEP] A: {first:.2f}; of B [SEP] A: {control:.2f}
  attention of a gap to its copy, best head, by layer: {weights}
  without the encoder's attention: {cost:+.2f}
  variance that token and position explain, by layer: {', '.join(variance)}"""


def main(argv=None):
    parser = Parser("course.copying", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or checkpoint of train.py")
    parser.add_argument("--data", default="", help="text, as for train.py [the validation text of each run]")
    options = parser.parse_args(argv)
    with clear_errors("course.copying"):
        for name in options.runs:
            print(describe(name, options.data), flush=True)


if __name__ == "__main__":
    main()
