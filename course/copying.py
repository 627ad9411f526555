"""Compares how well an MAE-LM and an MLM predict tokens that they can copy from the same sequence.

    python -m course.copying out/toy out/toy-mlm      # run folders or checkpoints of train.py
"""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from maelm import MAELM, NUM_SPECIAL, SEP, Attention, apply_masks, attention, draw_masks
from rank import RankConfig
from support.checkpoints import load_model
from support.cli import Parser, UserError, clear_errors
from support.corpus import evenly
from support.subjects import subject_of_run


def losses(model: MAELM, tokens, maskable, seed: int):
    """Mask m of the tokens (B, n) per sequence where maskable (B, n) bool is True, with m as in training ->
    -log p(x_i | x-hat) in nats at the masked positions, and the masked positions: (B, m) each."""
    m = min(model.config.num_masked(tokens.shape[1]), int(maskable.sum(1).min()))
    generator = torch.Generator().manual_seed(seed)
    masked = draw_masks(maskable, m, generator)
    logits = model.logits(apply_masks(tokens, masked, model.config, generator))  # (B, m, V)
    return F.cross_entropy(logits.mT, tokens.gather(1, masked), reduction="none"), masked


# ---- 1. Which tokens are easier? ----------------------------------------------------------------------------
def which_are_easier(model: MAELM, tokens):
    """Print the loss on masked tokens that also occur elsewhere in their sequence, and on all others."""
    loss, masked = losses(model, tokens, tokens >= NUM_SPECIAL, seed=0)
    answers = tokens.gather(1, masked)  # (B, m)
    visible = tokens.scatter(1, masked, -1)  # (B, n)
    again = (answers[:, :, None] == visible[:, None, :]).any(2)  # (B, m)
    print(f"loss {loss.mean():.3f}\n  {again.float().mean():.0%} repeat a token of the sequence: "
          f"{loss[again].mean():.3f}; the others: {loss[~again].mean():.3f}")


# ---- 2. Does it copy? ---------------------------------------------------------------------------------------
def twice(tokens):
    """Sequences [CLS] A [SEP] A, where A is the beginning of a sequence in tokens (B, n); sequences [CLS] A' [SEP] A,
    where A' is the beginning of another one; and a mask that marks the second A."""
    half = tokens.shape[1] // 2
    first = tokens[:, :half]  # [CLS] A
    second = first.clone()
    second[:, 0] = SEP
    same = torch.cat([first, second], dim=1)
    other = torch.cat([first.roll(1, 0), second], dim=1)
    is_second = torch.arange(2 * half) > half
    return same, other, is_second & (same != SEP)


def does_it_copy(model: MAELM, tokens):
    """Print the loss on a text that occurs twice in its sequence, and how strongly the gaps attend to the copy."""
    same, other, second = twice(tokens)
    half = same.shape[1] // 2
    with recorded_attention(model) as layers:
        copied, masked = losses(model, same, second, seed=1)
    control, _ = losses(model, other, second, seed=1)
    print(f"  masks in the second A of A [SEP] A: {copied.mean():.2f}; of B [SEP] A: {control.mean():.2f}")
    best = []
    for weights in layers:
        to_copies = weights.diagonal(-half, 2, 3)  # from each position i to i - n / 2: (B, heads, n / 2)
        from_gaps = to_copies.take_along_dim(masked[:, None] - half, dim=2)  # (B, heads, m)
        best.append(f"{from_gaps.mean((0, 2)).max():.3f}")
    print("  attention of a gap to its copy, best head, by layer:", ", ".join(best))


@contextmanager
def recorded_attention(model: MAELM) -> Iterator[list[torch.Tensor]]:
    """Until the context ends, collect the attention weights (B, heads, n, n) of each layer that reads gaps: the layers
    of an MLM's encoder or of an MAE-LM's decoder."""
    layers = []

    def record(layer: Attention, inputs, output):
        x, bias = inputs
        keys, _ = layer.key_value(x).chunk(2, dim=-1)
        q, k = [y.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for y in (layer.query(x), keys)]
        identity = torch.eye(x.shape[1]).expand(*k.shape[:2], -1, -1)
        layers.append(attention(q, k, identity, bias))  # with the identity as V, attention returns the softmax

    stack = model.encoder.stack if model.decoder is None else model.decoder.stack
    hooks = [block.self_attention.register_forward_hook(record) for block in stack.blocks]
    yield layers
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def main(argv=None):
    parser = Parser("course.copying", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or checkpoint of train.py")
    parser.add_argument("--data", help="text, as for train.py [the validation text of each run]")
    options = parser.parse_args(argv)
    with clear_errors("course.copying"):
        for name in options.runs:
            model, _ = load_model(Path(name))
            if model.config.decoder != "bi":
                raise UserError(f"{name}: its decoder uses cross-attention, so it has no gaps to look at")
            subject = subject_of_run(name, RankConfig(data=options.data or ""), torch.device("cpu"))
            tokens = evenly(subject.rows, 512)
            print(name, end=": ")
            which_are_easier(model, tokens)
            does_it_copy(model, tokens)


if __name__ == "__main__":
    main()
