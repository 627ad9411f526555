"""A model's guesses at [MASK] in a text.

    python -m support.fill_mask out/toy "Return the [MASK] of the array."
"""
from dataclasses import replace
from pathlib import Path

import torch

from maelm import MAELM, MASK, apply_masks
from support.checkpoints import load_model
from support.program import Parser, UserError, clear_errors
from support.tokenizer import Tokenizer


@torch.no_grad()
def logits_at(model: MAELM, tokens, at):
    """The logits (1, k, V) for tokens (1, n) int64 when those at the positions `at` (1, k) int64 are masked. As in an
    exported model, the encoder sees all of them or none."""
    config = replace(model.config, mask_in_encoder=float(model.config.mask_in_encoder > 0.5))
    return model.logits(apply_masks(tokens, at, config, torch.Generator().manual_seed(0)))


def guess_masks(model: MAELM, tokenizer: Tokenizer, text: str) -> list[list[tuple[str, float]]]:
    """The three best tokens at each [MASK] in a text, with their probabilities. Raises UserError if the text has no
    [MASK] or too many tokens."""
    tokens = torch.tensor([tokenizer.with_masks().encode(text).ids])
    if MASK not in tokens:
        raise UserError(f"{text!r:.40}: has no [MASK]")
    if tokens.shape[1] > model.config.seq_len:
        raise UserError(f"{text!r:.40}: has {tokens.shape[1] - 2} tokens; at most {model.config.seq_len - 2} fit")
    at = (tokens[0] == MASK).nonzero().mT  # (1, k)
    best = logits_at(model, tokens, at)[0].float().softmax(-1).topk(3)
    return [[(tokenizer.decode([i]).strip() or repr(tokenizer.decode([i])), p) for i, p in zip(ids, probabilities)]
            for ids, probabilities in zip(best.indices.tolist(), best.values.tolist())]


def main(argv=None):
    with clear_errors("support.fill_mask"):
        parser = Parser("support.fill_mask", __doc__)
        parser.add_argument("run", metavar="RUN", type=Path, help="a run folder or checkpoint of train.py")
        parser.add_argument("text", metavar="TEXT", help="a text with [MASK] in place of one or more words")
        flags = parser.parse_args(argv)
        model, tokenizer = load_model(flags.run)
        for number, guess in enumerate(guess_masks(model, tokenizer, flags.text), start=1):
            print(f"[MASK] {number}:", "  ".join(f"{word} {p:.2f}" for word, p in guess))


if __name__ == "__main__":
    main()
