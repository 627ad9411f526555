"""Where an MAE-LM and an MLM differ: what they predict by copying from the same row, and what their vectors hold.

    python -m course.copying out/toy out/toy-mlm      # run folders or checkpoints of train.py
"""
import copy
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
    same = torch.cat([cls, text, sep, text], dim=1)
    other = torch.cat([cls, text.roll(1, 0), sep, text], dim=1)
    second = torch.arange(same.shape[1]) > text.shape[1] + 1
    return same, other, second & (same != SEP)


def attention_to_copies(model: MAELM, tokens, corruption: Corruption) -> list[float]:
    """By layer of what reads the gaps, the mean weight of the best head from a gap in the second A to its copy."""
    at, formula, found = model.predicted(corruption.masked), maelm.attention, []
    row = torch.arange(len(at))[:, None]

    def recorded(q, k, v, bias=None, p=0.0):
        logits = q @ k.mT * q.shape[-1] ** -0.5 + (0 if bias is None else bias)
        weights = logits.softmax(-1)[row, :, at, at - tokens.shape[1] // 2]  # (B, k, heads)
        found.append(weights.mean((0, 1)).max().item())
        return formula(q, k, v, bias, p)

    positions, h = torch.arange(tokens.shape[1])[None], model.encode(corruption)
    maelm.attention = recorded
    if model.decoder is None:
        model.encoder(corruption.tokens, positions)
    else:
        model.decoder(model.decoder_input(h, corruption), h, positions)
    maelm.attention = formula
    return found


def explained(h, groups) -> float:
    """The share of the variance of h (N, d) that lies between groups (N,) int64, such as those of one token."""
    h = h - h.mean(0)
    means = torch.zeros(int(groups.max()) + 1, h.shape[1]).index_add(0, groups, h)
    means /= groups.bincount().clamp(min=1)[:, None]
    return float(means[groups].square().sum() / h.square().sum())


@torch.no_grad()
def describe(name: str) -> str:
    """What a run predicts, and what its vectors hold: printable lines."""
    model, _ = load_model(Path(name))
    rows = measurement_of_run(name, RankConfig(), torch.device("cpu")).rows
    tokens = evaluation_tokens(rows, TrainConfig(eval_rows=512))
    masks = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    loss, at = losses(model, tokens, masks)
    shown = tokens.masked_fill(masks.masked, -1)[:, None, :]
    repeated = (tokens.gather(1, at)[:, :, None] == shown).any(2)  # (B, k)
    without = copy.deepcopy(model)
    for block in without.encoder.stack.blocks:
        for parameter in block.self_attention.output.parameters():
            parameter.zero_()
    cost = losses(without, tokens, masks)[0].mean() - loss.mean()
    same, other, second = twice(tokens)
    drawn = [corrupt(text, model.config, torch.Generator().manual_seed(1), second) for text in (same, other)]
    first, control = [losses(model, *pair)[0].mean() for pair in zip((same, other), drawn)]
    weights = attention_to_copies(model, same, drawn[0])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    states = [h.flatten(0, 1) for h in model.encoder(tokens, positions, all_layers=True)]
    shares = [[explained(h, groups.flatten()) for h in states] for groups in (tokens, positions)]
    return f"""{name}: loss {loss.mean():.3f}
  {repeated.float().mean():.0%} of the masked tokens stand elsewhere in their row: {loss[repeated].mean():.3f}
  the others: {loss[~repeated].mean():.3f}
  masks in the second A of A [SEP] A: {first:.2f}; of B [SEP] A: {control:.2f}
  attention of a gap to its copy, best head, by layer: {', '.join(f'{weight:.3f}' for weight in weights)}
  without the encoder's attention: {cost:+.2f}
  variance that the token explains, by layer: {', '.join(f'{share:.0%}' for share in shares[0])}
  variance that the position explains: {', '.join(f'{share:.0%}' for share in shares[1])}"""


def main(argv=None):
    parser = Parser("course.copying", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or checkpoint of train.py")
    with clear_errors("course.copying"):
        for name in parser.parse_args(argv).runs:
            print(describe(name), flush=True)


if __name__ == "__main__":
    main()
