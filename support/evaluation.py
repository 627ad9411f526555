"""How well a model predicts masked tokens: its validation loss, and its guesses for a text."""
from dataclasses import replace

import torch
import torch.nn.functional as F

from maelm import MAELM, MASK, NUM_SPECIAL, Config, apply_masks, draw_masks
from support.program import UserError
from support.corpus import Rows, evenly_spaced
from support.tokenizer import Tokenizer
from support.worker import Worker

Guess = list[tuple[str, float]]  # the three best tokens at a position, with their probabilities


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, most: int, micro_batch: int, worker: Worker) -> tuple[float, float]:
    """Mean loss in nats, and accuracy in [0, 1], on at most this many sequences, with single tokens masked at the
    paper's rate: the same for all runs, whatever their masks and their loss in training. (The decoder of uni+cross,
    which reads true tokens in training, reads [MASK] here.)"""
    model.eval()
    tokens = evenly_spaced(rows, most)
    generator = torch.Generator().manual_seed(0)
    m = max(1, Config().num_masked(tokens.shape[1]))
    masked = draw_masks(tokens >= NUM_SPECIAL, m, generator)
    corruption = apply_masks(tokens, masked, model.config, generator)
    total = 0.0
    right = 0
    for batch in worker.micro_batches(tokens, corruption, micro_batch):
        truth, masks = worker.put(batch)
        with worker.autocast():
            logits = model.logits(masks)  # (B, m, V)
        targets = truth.gather(1, masks.masked)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        total += loss.item() * len(truth)  # the last batch may be smaller
        right += int((logits.argmax(-1) == targets).sum())
    model.train()
    total, right = worker.all_reduce(total, right)
    return total / len(tokens), right / masked.numel()


@torch.no_grad()
def logits_at(model: MAELM, tokens, at):
    """The logits (1, k, V) for tokens (1, n) int64 when those at the positions `at` (1, k) int64 are masked. As in an
    exported model, the encoder sees all of them or none."""
    config = replace(model.config, mask_in_encoder=float(model.config.mask_in_encoder > 0.5))
    return model.logits(apply_masks(tokens, at, config, torch.Generator().manual_seed(0)))


def guess_masks(model: MAELM, tokenizer: Tokenizer, text: str) -> list[Guess]:
    """Guess each [MASK] in a text. Raises UserError if the text has no [MASK] or too many tokens."""
    tokens = torch.tensor([tokenizer.with_masks().encode(text).ids])
    if MASK not in tokens:
        raise UserError(f"{text!r:.40}: has no [MASK]")
    if tokens.shape[1] > model.config.seq_len:
        raise UserError(f"{text!r:.40}: has {tokens.shape[1] - 2} tokens; at most {model.config.seq_len - 2} fit")
    at = (tokens[0] == MASK).nonzero().mT  # (1, k)
    best = logits_at(model, tokens, at)[0].float().softmax(-1).topk(3)
    return [[(tokenizer.decode([i]).strip() or repr(tokenizer.decode([i])), p) for i, p in zip(ids, probabilities)]
            for ids, probabilities in zip(best.indices.tolist(), best.values.tolist())]


def format_guess(guess: Guess) -> str:
    """A guess as text, such as `the 0.61  a 0.20  its 0.03`."""
    return "  ".join(f"{word} {p:.2f}" for word, p in guess)
