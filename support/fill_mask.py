"""A model's guesses at [MASK], also the examples at the end of a run.

    python -m support.fill_mask out/toy "Return the [MASK] of the array."
"""
import re
from pathlib import Path

import torch

from maelm import CLS, MAELM, MASK, SEP, apply_masks
from support.cli import Parser, UserError, clear_errors, printable
from support.corpus import Rows, evenly
from support.models import load_model
from support.tokenizer import Tokenizer

SHOWN = 6  # examples at the end of a run


@torch.no_grad()
def best_tokens(model: MAELM, tokenizer: Tokenizer, tokens, at) -> list[list[tuple[str, float]]]:
    """For each position of at (1, k) int64 in tokens (1, n), the best three and their probabilities."""
    corruption = apply_masks(tokens, at, model.config, torch.Generator().manual_seed(0))
    logits = model.logits(corruption)  # (1, k, V)
    best = logits[0].float().softmax(-1).topk(3)
    found = []
    for ids, probabilities in zip(best.indices.tolist(), best.values.tolist()):
        guess = []
        for i, p in zip(ids, probabilities):
            text = printable(tokenizer.decode([i]))
            guess.append((text.strip() or repr(text), p))
        found.append(guess)
    return found


def guess_masks(model: MAELM, tokenizer: Tokenizer, text: str) -> list[list[tuple[str, float]]]:
    """The best three words and their probabilities for each [MASK] of a text. UserError without [MASK]."""
    text = text.encode(errors="replace").decode()  # a terminal can send half a character
    # A word has its space before it, so [MASK] stands for both.
    ids = []
    for part in text.replace(" [MASK]", "[MASK]").split("[MASK]"):
        ids += [*tokenizer.encode(part).tolist(), MASK]
    ids.pop()  # no [MASK] after the last part
    tokens = torch.tensor([[CLS, *ids, SEP]])
    count, longest = ids.count(MASK), model.config.seq_len - 2
    if count == 0 or len(ids) > longest:
        raise UserError(f"{text!r:.40}: needs [MASK] and at most {longest} tokens; has {count} and {len(ids)}")
    return best_tokens(model, tokenizer, tokens, (tokens[0] == MASK).nonzero().mT)  # (1, k)


def format_guess(guess: list[tuple[str, float]]) -> str:
    """Words and probabilities such as `the 0.61  a 0.20  its 0.03`."""
    return "  ".join(f"{word} {p:.2f}" for word, p in guess)


def examples(model: MAELM, tokenizer: Tokenizer, rows: Rows) -> str:
    """The model's guesses at a whole word in the middle of SHOWN validation sequences."""
    model.eval()
    lines = ["held-out text: the word in [brackets] was masked; below it are the model's three best guesses"]
    for row in evenly(rows, 20 * SHOWN):  # not all have such a word
        if len(lines) > 2 * SHOWN:
            break
        texts = [printable(tokenizer.decode([i]).replace("\n", " ")) for i in row]
        for at in range(len(row) // 2, len(row) - 1):
            if re.fullmatch(" [^\\W\\d_]+" * 2, texts[at] + texts[at + 1]):  # two words, each in one token
                guess, = best_tokens(model, tokenizer, row[None], torch.tensor([[at]]))
                before, after = "".join(texts[at - 7:at]), "".join(texts[at + 1:at + 8])
                lines.append(f"  ...{before} [{texts[at].strip()}]{after} ...")
                lines.append(f"      {format_guess(guess)}")
                break
    return "\n".join(lines)


def main(argv=None):
    parser = Parser("support.fill_mask", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder or checkpoint of train.py")
    parser.add_argument("text", metavar="TEXT", help="a text with [MASK] in the place of one or more words")
    options = parser.parse_args(argv)
    with clear_errors("support.fill_mask"):
        model, tokenizer = load_model(options.run)
        for number, guess in enumerate(guess_masks(model, tokenizer, options.text), start=1):
            print(f"[MASK] {number}: {format_guess(guess)}")


if __name__ == "__main__":
    main()
