"""Where an MAE-LM and an MLM differ: what they predict by copying from the same row, and what their vectors hold.

    python -m course.copying out/toy out/toy-mlm      # run folders or checkpoints of train.py
"""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from maelm import MAELM, NUM_SPECIAL, SEP, Attention, apply_masks, attention, draw_masks
from rank import RankConfig
from support.cli import Parser, clear_errors
from support.corpus import evenly
from support.models import load_model
from support.subjects import subject_of_run


def losses(model: MAELM, tokens, maskable, seed: int):
    """Mask tokens (B, n), as many as in training, where maskable (B, n) bool is True -> -log p(x_i | x-hat) at the
    masked positions, in nats, and these positions: both (B, k)."""
    k = model.config.num_masked(tokens.shape[1])
    generator = torch.Generator().manual_seed(seed)
    at = draw_masks(maskable, k, generator)
    logits = model.logits(apply_masks(tokens, at, model.config, generator))  # (B, k, V)
    return F.cross_entropy(logits.mT, tokens.gather(1, at), reduction="none"), at


# ---- 1. Which tokens are easier? ----------------------------------------------------------------------------
def which_are_easier(model: MAELM, tokens):
    """Print the loss on masked tokens that stand elsewhere in their row, and on the others."""
    loss, at = losses(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    answers = tokens.gather(1, at)  # (B, k)
    visible = tokens.scatter(1, at, -1)  # (B, n)
    again = (answers[:, :, None] == visible[:, None, :]).any(2)  # (B, k)
    share = again.float().mean()
    print(f"loss {loss.mean():.3f}")
    print(f"  {share:.0%} repeat a token of the row: {loss[again].mean():.3f}; the others: {loss[~again].mean():.3f}")


# ---- 2. Does it copy? ---------------------------------------------------------------------------------------
def twice(tokens):
    """Rows [CLS] A [SEP] A of the beginnings A of tokens (B, n), rows [CLS] B [SEP] A, and where the second A is."""
    half = tokens.shape[1] // 2
    first = tokens[:, :half]  # [CLS] A
    text = first[:, 1:]
    sep = torch.full_like(text[:, :1], SEP)
    same = torch.cat([first, sep, text], dim=1)
    other = torch.cat([first.roll(1, 0), sep, text], dim=1)  # B is the text of another row
    second = torch.arange(2 * half) > half
    return same, other, second & (same != SEP)


def does_it_copy(model: MAELM, tokens):
    """Print the loss on a text that stands twice in its row, and how much the gaps attend to its copy."""
    same, other, second = twice(tokens)
    half = same.shape[1] // 2
    with recorded_attention(model) as layers:
        copied, at = losses(model, same, second, seed=1)
    control, _ = losses(model, other, second, seed=1)
    print(f"  masks in the second A of A [SEP] A: {copied.mean():.2f}; of B [SEP] A: {control.mean():.2f}")
    best = []
    for weights in layers:
        to_copies = weights.diagonal(-half, 2, 3)  # from each position i to i - n / 2: (B, heads, n / 2)
        from_gaps = to_copies.take_along_dim(at[:, None] - half, dim=2)  # (B, heads, k)
        best.append(f"{from_gaps.mean((0, 2)).max():.3f}")
    print("  attention of a gap to its copy, best head, by layer:", ", ".join(best))


@contextmanager
def recorded_attention(model: MAELM) -> Iterator[list[torch.Tensor]]:
    """While entered, collects the softmax (B, heads, n, n) of each layer that reads gaps: of an MLM's encoder, or of
    an MAE-LM's decoder."""
    layers = []

    def record(layer: Attention, inputs, output):
        """Add the softmax of a layer that reads x (B, n, d)."""
        x, bias = inputs
        keys, _ = layer.key_value(x).chunk(2, dim=-1)
        q, k = [y.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for y in (layer.query(x), keys)]
        identity = torch.eye(x.shape[1]).expand(*k.shape[:2], -1, -1)
        layers.append(attention(q, k, identity, bias))  # with the identity as V it returns the softmax

    stack = model.encoder.stack if model.decoder is None else model.decoder.stack
    hooks = [block.self_attention.register_forward_hook(record) for block in stack.blocks]
    try:
        yield layers
    finally:  # also after an error, or the model would record on
        for hook in hooks:
            hook.remove()


# ---- 3. What do the vectors hold? ---------------------------------------------------------------------------
def what_vectors_hold(model: MAELM, tokens):
    """Print how much the encoder's attention helps, and how much token and position explain."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    variance = []
    for h in model.encoder.hidden_states(tokens, positions):
        variance.append(f"{explained(h, tokens):.0%} and {explained(h, positions):.0%}")

    before, _ = losses(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    for block in model.encoder.stack.blocks:
        block.self_attention.output.forward = torch.zeros_like  # from here on the encoder has no attention
    after, _ = losses(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    print(f"  without the encoder's attention: {after.mean() - before.mean():+.2f}")
    print("  variance that token and position explain, by layer:", ", ".join(variance))


def explained(h, groups) -> float:
    """The share of the variance of h (..., d) between groups (...) int64, such as the vectors of one token."""
    h, groups = h.flatten(0, -2), groups.flatten()
    h = h - h.mean(0)
    sums = torch.zeros(int(groups.max()) + 1, h.shape[1]).index_add(0, groups, h)
    means = sums / groups.bincount().clamp(min=1)[:, None]
    return float(means[groups].square().sum() / h.square().sum())


@torch.no_grad()
def main(argv=None):
    parser = Parser("course.copying", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or checkpoint of train.py")
    parser.add_argument("--data", default="", help="text, as for train.py [the validation text of each run]")
    options = parser.parse_args(argv)
    with clear_errors("course.copying"):
        for name in options.runs:
            model, _ = load_model(Path(name))
            subject = subject_of_run(name, RankConfig(data=options.data), torch.device("cpu"))
            tokens = evenly(subject.rows, 512)
            print(name, end=": ")
            which_are_easier(model, tokens)
            does_it_copy(model, tokens)
            what_vectors_hold(model, tokens)


if __name__ == "__main__":
    main()
