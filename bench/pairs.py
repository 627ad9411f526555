"""Which encoders compare two texts? bash runs/pairs.sh trains and measures them.

    python -m bench.pairs DATA               # write DATA/train.jsonl and DATA/dev.jsonl, for --task custom
    python -m bench.pairs DATA out/toy ...   # the attention of each layer from one text to the other

A second text is the first one, or another text of the same library; five of its twelve words are then replaced.
"""
import json
import random
import sys
from pathlib import Path

import torch

import maelm
from maelm import CLS, SEP
from support.model.checkpoints import load_encoder
from support.tasks.table1 import TASKS
from support.text.documents import read_docs

LENGTH, REPLACED = 12, 5  # words
TOKENS = 20  # of each text, to measure attention


def excerpt(words: list[str], generator: random.Random) -> list[str]:
    start = generator.randint(0, len(words) - LENGTH)
    return words[start:start + LENGTH]


def write_pairs(folder: Path):
    """4,000 pairs for training and 1,000 for dev; half of them have the label `same`."""
    generator = random.Random(0)
    texts = {library: [] for library in TASKS["docs"].labels}
    for library, text in read_docs():
        if library in texts and len(text.split()) >= LENGTH:
            texts[library].append(text.split())
    everything = [words for library in texts.values() for words in library]
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in ("train", 4000), ("dev", 1000):
        with open(folder / f"{split}.jsonl", "w") as file:
            for number in range(size):
                one, other = generator.sample(generator.choice(list(texts.values())), 2)
                first = excerpt(one, generator)
                label = ("other", "same")[number % 2]
                second = list(first) if label == "same" else excerpt(other, generator)
                for place in generator.sample(range(LENGTH), REPLACED):
                    second[place] = generator.choice(generator.choice(everything))
                print(json.dumps({"text": " ".join(first), "text2": " ".join(second), "label": label}), file=file)


@torch.no_grad()
def attention_to_copy(run: str, texts: list[str]) -> list[str]:
    """For each layer of the encoder, the mean attention from a token of the second A in [CLS] A [SEP] A [SEP] to the
    same token in the first A, and to the token after it; of the head that attends most. A fifth of the second A is
    replaced, and not counted."""
    encoder, state = load_encoder(Path(run))
    rows = [state["tokenizer"].encode(text) for text in texts]
    a = torch.tensor([row[:TOKENS].tolist() for row in rows if len(row) >= TOKENS])
    generator = torch.Generator().manual_seed(0)
    replaced = torch.rand(a.shape, generator=generator) < 0.2
    second = torch.where(replaced, a[torch.randperm(len(a), generator=generator)], a)
    cls, sep = torch.full_like(a[:, :1], CLS), torch.full_like(a[:, :1], SEP)
    weights = []

    def attention(q, k, v, bias, p):
        weights.append((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(-1))
        return weights[-1] @ v

    maelm.attention = attention
    tokens = torch.cat([cls, a, sep, second, sep], dim=1)
    encoder.eval()(tokens, torch.arange(tokens.shape[1])[None])
    lines = []
    for layer in weights:
        between = layer[:, :, TOKENS + 2:-1, 1:TOKENS + 1].transpose(0, 1)  # (heads, B, 20, 20)
        same = between.diagonal(dim1=-2, dim2=-1)[:, ~replaced].mean(1).max()
        after = between[..., :-1, 1:].diagonal(dim1=-2, dim2=-1)[:, ~replaced[:, :-1]].mean(1).max()
        lines.append(f"same {same:.2f}, next {after:.2f}")
    return lines


def main():
    folder, *runs = sys.argv[1:]
    if not runs:
        write_pairs(Path(folder))
    texts = [json.loads(line)["text"] for line in open(Path(folder, "dev.jsonl"))]
    for run in runs:
        print(run, *attention_to_copy(run, texts), sep="  ")


if __name__ == "__main__":
    main()
