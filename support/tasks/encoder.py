"""The encoder of a task: where it comes from, how it gets a head to be fine-tuned, and how it is frozen for a probe."""
import copy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from support.model.build import make_model
from support.model.checkpoints import load_encoder, write_checkpoint
from support.program.cli import path_of
from support.program.files import short_hash
from support.tasks.heads import by_length, collate
from support.tasks.table1 import Encoded, Labels


class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str):
        encoder, state = load_encoder(path_of(name.removeprefix("random:")))
        self.tokenizer, self.settings = state["tokenizer"], state["settings"]
        self.config = state["config"]
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def with_dropout(self, dropout: float) -> "Pretrained":
        """The same encoder, with another dropout."""
        other = copy.copy(self)
        other.config = replace(self.config, dropout=dropout)
        return other

    def weights_hash(self) -> str:
        """A hash of the weights or, if they are random, of the weights that seed 0 draws."""
        weights = [tensor.numpy().tobytes() for tensor in self.new_encoder(seed=0).state_dict().values()]
        return short_hash(b"".join(weights))

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder. If its weights are random, the seed determines them."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        return encoder


class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, m) int64, padding (B, m) bool -> the head's float32 logits and H^L (B, m, d)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        h = self.encoder(tokens, positions, padding)
        return self.head(h, padding).float(), h


def write_tuned(path: Path, model: Tuned, pretrained: Pretrained, task: str, labels: Labels, longest: int):
    """Write a fine-tuned model, which can be exported or fine-tuned further."""
    write_checkpoint(path, {
        "config": asdict(pretrained.config), "settings": pretrained.settings, "model": model.state_dict(),
        "tokenizer": pretrained.tokenizer.to_json(), "task": task, "labels": list(labels.names), "scale": labels.scale,
        "longest": longest, "head": list(getattr(model.head, "exported", ()))})


class Probe(nn.Module):
    """A linear classifier of vectors (N, d), which are first standardized with the mean and deviation of `train`."""
    def __init__(self, train: torch.Tensor, classes: int):
        super().__init__()
        self.register_buffer("mean", train.mean(0))
        self.register_buffer("deviation", train.std(0).clamp(min=1e-6))
        self.linear = nn.Linear(train.shape[1], classes)

    def forward(self, vectors):
        """vectors (B, d) -> logits (B, classes)."""
        return self.linear((vectors - self.mean) / self.deviation)


def predict(model: Tuned | Probe, encoded: Encoded, chosen, device: torch.device):
    """The logits of chosen inputs, their targets, and their padding (None for a Probe, which reads vectors)."""
    if encoded.vectors is not None:
        return model(encoded.vectors[chosen]), encoded.targets[chosen].to(device), None
    tokens, padding, targets = collate(encoded, chosen, device)
    logits, _ = model(tokens, padding)
    return logits, targets, padding


@torch.no_grad()
def with_vectors(encoded: Encoded, encoder: nn.Module, pooling: str, batch_size: int) -> Encoded:
    """A split with a vector of the frozen encoder for each input: the mean over its tokens, or that at [CLS]."""
    encoder, vectors, device = encoder.eval(), [], encoder.token_embedding.weight.device
    chunks = by_length(encoded, batch_size)
    for chosen in chunks:
        tokens, padding, _ = collate(encoded, chosen, device)
        h = encoder(tokens, torch.arange(tokens.shape[1], device=device)[None], padding).float()
        if pooling == "cls":
            vectors.append(h[:, 0])
        else:
            real = (~padding)[:, :, None]
            vectors.append((h * real).sum(1) / real.sum(1))
    order = np.concatenate(chunks)
    return encoded._replace(vectors=torch.cat(vectors)[np.argsort(order)])  # back in the order of the inputs
