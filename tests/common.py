"""Functions that the tests share: a little language, short runs, and a check of commands that fail."""
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

import train
from conftest import TINY
from maelm import ABLATIONS
from support.checkpoints import checkpoints
from support.program import read_lines

ROOT = Path(__file__).resolve().parent.parent

PAPER_ROWS = """mae-lm enc-mask enc-mask-dec-resets random-replace misaligned no-relative bi+cross uni+cross cross dec-2
                dec-6 dec-512 dec-1024 mlm""".split()  # of Table 2; further rows may set any field

# ---- A little language ----------------------------------------------------------------------------------------------
SUBJECTS = "the cat", "a dog", "my friend", "Anna"
VERBS = "sees", "likes", "finds", "has"
OBJECTS = "a tree", "some bread"


def sentence(i):
    """Sentence i of a language with few words and few patterns."""
    when = "today" if i % 3 else "at last"
    return f"{SUBJECTS[i % 4]} {VERBS[i // 4 % 4]} {OBJECTS[i // 16 % 2]} {when}, number {i}."


def little_documents(count=400):
    """Documents of two sentences."""
    return [f"{sentence(i)} {sentence(7 * i)}" for i in range(count)]


def write_corpus(path, count=400):
    """Write a text file of `count` documents; returns its path."""
    path.write_text("\n\n".join(little_documents(count)))
    return path


def make_config(preset="base", ablation="mae-lm", **flags):
    """The Config of a preset and a row of Table 2, with these fields."""
    return train.make_settings(train.PRESETS[preset] | ABLATIONS[ablation] | flags)[0]


# ---- Short runs -----------------------------------------------------------------------------------------------------
QUICK = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if name != "decoder_layers"]
QUICK += """--dropout 0.1 --init-std 0.06 --mask-rate 0.15 --precision fp32 --device cpu --batch-size 8
            --micro-batch-size 4 --max-steps 6 --warmup-steps 2 --val-share 0.1 --log-interval 1 --eval-interval 3
            --eval-rows 16 --checkpoint-interval 3 --keep-checkpoints 0""".split()


def arguments(text, out, *flags):
    """The command line of a short run on a text; the cache of its tokens is next to the text."""
    folders = ["--data", str(text), "--out", str(out), "--cache", str(text.parent / "cache")]
    return [*folders, *QUICK, *map(str, flags)]


def short_run(text, out, *flags):
    """Run train.py for 6 steps of a tiny model; returns the run folder."""
    train.main(arguments(text, out, *flags))
    return out


def last_checkpoint(out):
    """The contents of the newest checkpoint of a run folder."""
    return torch.load(checkpoints(out)[-1], weights_only=True)


def same(out, other):
    """Whether two runs end with bit-identical weights and optimizer states."""
    found, expected = [tree_map_only(torch.Tensor, torch.Tensor.tolist, last_checkpoint(run)) for run in (out, other)]
    return (found["model"], found["optimizers"]) == (expected["model"], expected["optimizers"])


def read_log(out):
    """The lines of a run's log."""
    return read_lines(out / "log.jsonl")


def losses(out, name="loss"):
    """(step, training loss) of each line of a run's log that has a loss; "val_loss" gives the validation loss."""
    return [(line["step"], line[name]) for line in read_log(out) if name in line]


def contents(folder):
    """The bytes of each file in a folder, except hidden files."""
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def fails(command, capsys):
    """Run a command that must end with exit code 2 and one line on stderr; returns that line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command()
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1, error
    return error.strip()
