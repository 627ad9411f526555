"""A model's guesses at [MASK] in a text.

    python -m support.fill_mask out/toy "Return the [MASK] of the array."
"""
from support.checkpoints import load_model
from support.program import Parser, clear_errors, path_of
from support.evaluation import format_guess, guess_masks


def main(argv=None):
    with clear_errors("support.fill_mask"):
        parser = Parser("support.fill_mask", __doc__)
        parser.add_argument("run", metavar="RUN", type=path_of, help="a run folder or checkpoint of train.py")
        parser.add_argument("text", metavar="TEXT", help="a text with [MASK] in place of one or more words")
        flags = parser.parse_args(argv)
        model, tokenizer = load_model(flags.run)
        for number, guess in enumerate(guess_masks(model, tokenizer, flags.text), start=1):
            print(f"[MASK] {number}: {format_guess(guess)}")


if __name__ == "__main__":
    main()
