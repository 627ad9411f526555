"""Does a head that attends to copies compare two texts? bash runs/copies.sh trains and measures the models.

    python -m bench.copies pairs FOLDER                # write FOLDER/train.jsonl and dev.jsonl, for --task custom
    python -m bench.copies train FLAGS...              # train.py, but all copies of a masked token are masked as well
    python -m bench.copies attention FOLDER RUN ...    # the attention of each head from one text to its copy
    python -m bench.copies zero FOLDER RUN OUT [other] # RUN without its copying head, or without the other head

A second text is the first one, or another text of the same library; five of its twelve words are then replaced. A head
is removed by setting its queries and keys to zero. Their gradients are then zero also: fine-tuning cannot restore it.
"""
import json
import random
import sys
from pathlib import Path

import torch

import maelm
import train
from maelm import CLS, NUM_SPECIAL, SEP, apply_masks
from support.model.checkpoints import checkpoint_of, load_encoder
from support.tasks.types import TASKS
from support.text.documents import read_docs

LENGTH, REPLACED = 12, 5  # words
TOKENS = 20  # of each text, to measure attention


def excerpt(words, generator):
    start = generator.randint(0, len(words) - LENGTH)
    return words[start:start + LENGTH]


def write_pairs(folder):
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
def attention_to_copy(run, texts):
    """The mean attention from a token of the second A in [CLS] A [SEP] A [SEP] to the same token in the first A, for
    each head: (layers, heads). A fifth of the second A is replaced, and not counted."""
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
    between = torch.stack(weights)[..., TOKENS + 2:-1, 1:TOKENS + 1].transpose(1, 2)  # (layers, heads, B, 20, 20)
    return between.diagonal(dim1=-2, dim2=-1)[:, :, ~replaced].mean(2)


def zero_head(texts, run, out, other):
    """Copy a run, without the head that attends most to copies, or without the other head of its layer."""
    found = attention_to_copy(run, texts)
    layer, head = divmod(int(found.argmax()), found.shape[1])
    head = (head + 1) % found.shape[1] if other else head
    state = torch.load(checkpoint_of(Path(run)), weights_only=True)
    name = f"encoder.stack.blocks.{layer}.self_attention."
    size = state["config"]["encoder_dim"] // state["config"]["encoder_heads"]
    rows = slice(head * size, (head + 1) * size)
    for part in ("weight", "bias"):
        state["model"][f"{name}query.{part}"][rows] = 0
        state["model"][f"{name}key_value.{part}"][rows] = 0  # keys come first
    Path(out).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(out, checkpoint_of(Path(run)).name))
    print(f"{out}: {run} without head {head} of layer {layer + 1}; attention to copies {found.tolist()}")


def corrupt_with_copies(tokens, config, generator):
    """As maelm.corrupt, but one random number per token and sequence, so all copies of a token are masked together,
    except those of the last token that is masked, of which there may be too many."""
    m = config.num_masked(tokens.shape[1])
    number = torch.rand(len(tokens), config.vocab_size, generator=generator).gather(1, tokens)
    number += 1e-6 * torch.rand(tokens.shape, generator=generator)  # which of the last token's copies
    number = number.masked_fill(tokens < NUM_SPECIAL, 2.0)
    masked = number.topk(m, largest=False).indices
    return apply_masks(tokens, masked, config, generator)


def main():
    command, *rest = sys.argv[1:]
    if command == "train":
        train.corrupt = corrupt_with_copies
        return train.main(rest)
    folder, *rest = rest
    if command == "pairs":
        return write_pairs(Path(folder))
    texts = [json.loads(line)["text"] for line in open(Path(folder, "dev.jsonl"))]
    if command == "zero":
        return zero_head(texts, *rest[:2], other=len(rest) > 2)
    for run in rest:
        layers = attention_to_copy(run, texts).tolist()
        print(run, *["  ".join(f"{head:.2f}" for head in layer) for layer in layers], sep="   ")


if __name__ == "__main__":
    main()
