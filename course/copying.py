"""Where an MAE-LM and an MLM differ: what they predict by copying from the same row, and what their vectors hold.

    python -m course.copying out/toy out/toy-mlm      # run folders or checkpoints of train.py
"""
from pathlib import Path

import torch
import torch.nn.functional as F

import maelm
from maelm import CLS, MAELM, SEP, Corruption, corrupt
from rank import RankConfig, measurement_of_run
from support.checkpoints import load_model
from support.files import clear_errors
from support.flags import Parser
from train import TrainConfig, evaluation_tokens


def losses(model: MAELM, tokens, corruption: Corruption):
    """-log p(x_i | x-hat) at the masked positions of tokens (B, n): (B, k), in nats; and these positions (B, k)."""
    at = model.predicted(corruption.masked)
    z = model.decode(model.encode(corruption, at), tokens, corruption, at)
    logits = model.head(z, model.encoder.token_embedding.weight)  # (B, k, V)
    return F.cross_entropy(logits.mT, tokens.gather(1, at), reduction="none"), at


def twice(tokens):
    """Rows [CLS] A [SEP] A of the beginnings A of tokens (B, n), rows [CLS] B [SEP] A, and where the second A is."""
    text = tokens[:, 1:tokens.shape[1] // 2]
    cls, sep = (torch.full((len(tokens), 1), token) for token in (CLS, SEP))
    same, other = (torch.cat([cls, first, sep, text], dim=1) for first in (text, text.roll(1, 0)))
    return same, other, (torch.arange(same.shape[1]) > text.shape[1] + 1) & (same != SEP)


def attention_to_copies(model: MAELM, tokens, corruption: Corruption) -> list[float]:
    """By layer of what reads the gaps, the mean weight of the best head from a gap in the second A to its copy."""
    formula, found, half = maelm.attention, [], tokens.shape[1] // 2

    def recorded(q, k, v, bias=None, p=0.0):
        identity = torch.eye(tokens.shape[1]).expand(*k.shape[:2], -1, -1)  # as values, it returns the weights
        copies = formula(q, k, identity, bias).diagonal(-half, 2, 3)  # (B, heads, n / 2): from i to i - n / 2
        found.append(copies.mT[corruption.masked[:, half:]].mean(0).max().item())
        return formula(q, k, v, bias, p)

    maelm.attention = recorded if model.decoder is None else formula  # an MLM's encoder reads the gaps
    h = model.encode(corruption)
    maelm.attention = recorded
    model.decode(h, tokens, corruption, None)
    maelm.attention = formula
    return found


def explained(h, groups) -> float:
    """The share of the variance of h (N, d) that lies between groups (N,) int64, such as those of one token."""
    h = h - h.mean(0)
    means = torch.zeros(int(groups.max()) + 1, h.shape[1]).index_add(0, groups, h)
    means /= groups.bincount().clamp(min=1)[:, None]
    return float(means[groups].square().sum() / h.square().sum())


@torch.no_grad()
def describe(name: str, data: str) -> str:
    """What a run predicts of `data`, or of its own validation text, and what its vectors hold: printable lines."""
    model, _ = load_model(Path(name))
    rows = measurement_of_run(name, RankConfig(data=data), torch.device("cpu")).rows
    tokens = evaluation_tokens(rows, TrainConfig(eval_rows=512))
    masks = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    loss, at = losses(model, tokens, masks)
    shown = tokens.masked_fill(masks.masked, -1)[:, None, :]
    again = (tokens.gather(1, at)[:, :, None] == shown).any(2)  # (B, k): does it repeat a token of the row?
    same, other, second = twice(tokens)
    drawn = [corrupt(text, model.config, torch.Generator().manual_seed(1), second) for text in (same, other)]
    first, control = [losses(model, *pair)[0].mean() for pair in zip((same, other), drawn)]
    weights = attention_to_copies(model, same, drawn[0])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    states = [h.flatten(0, 1) for h in model.encoder(tokens, positions, all_layers=True)]
    shares = [f"{explained(h, tokens.flatten()):.0%} and {explained(h, positions.flatten()):.0%}" for h in states]
    for block in model.encoder.stack.blocks:
        block.self_attention.output.forward = torch.zeros_like  # from here on the encoder has no attention
    cost = losses(model, tokens, masks)[0].mean() - loss.mean()
    return f"""{name}: loss {loss.mean():.3f}
  {again.float().mean():.0%} repeat a token of the row: {loss[again].mean():.3f}; the others: {loss[~again].mean():.3f}
  masks in the second A of A [SEP] A: {first:.2f}; of B [SEP] A: {control:.2f}
  attention of a gap to its copy, best head, by layer: {', '.join(f'{weight:.3f}' for weight in weights)}
  without the encoder's attention: {cost:+.2f}
  variance that token and position explain, by layer: {', '.join(shares)}"""


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
