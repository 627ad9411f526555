"""A model's guesses at [MASK] in a text.

    python -m support.fill_mask out/toy "Return the [MASK] of the array."
"""
from support.model.checkpoints import load_model
from support.model.guesses import format_guess, guess_masks
from support.program.cli import Parser, path_of
from support.program.errors import clear_errors, say


def main(argv=None):
    parser = Parser("support.fill_mask", __doc__)
    parser.add_argument("run", metavar="RUN", type=path_of, help="a run folder or checkpoint of train.py")
    parser.add_argument("text", metavar="TEXT", help="a text with [MASK] in place of one or more words")
    flags = parser.parse_args(argv)
    with clear_errors("support.fill_mask"):
        model, tokenizer = load_model(flags.run)
        for number, guess in enumerate(guess_masks(model, tokenizer, flags.text), start=1):
            say(f"[MASK] {number}: {format_guess(guess)}")


if __name__ == "__main__":
    main()
