"""The encoder of a task: where it comes from, and how it gets a head to be fine-tuned."""
import copy
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from support.model.build import make_model
from support.model.checkpoints import load_encoder, write_checkpoint
from support.program.cli import path_of
from support.program.files import short_hash
from support.tasks.types import Labels


class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str):
        encoder, state = load_encoder(path_of(name.removeprefix("random:")))
        self.tokenizer = state["tokenizer"]
        self.settings = state["settings"]
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


def last_states(encoder: nn.Module, tokens, padding):
    """tokens (B, m) int64, padding (B, m) bool -> H^L (B, m, d)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return encoder(tokens, positions, padding)


class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, m) int64, padding (B, m) bool -> the head's float32 logits."""
        return self.head(last_states(self.encoder, tokens, padding), padding).float()


def write_tuned(path: Path, model: Tuned, pretrained: Pretrained, task: str, labels: Labels, longest: int):
    """Write a fine-tuned model, which can be exported or fine-tuned further."""
    write_checkpoint(path, {
        "config": asdict(pretrained.config), "settings": pretrained.settings, "model": model.state_dict(),
        "tokenizer": pretrained.tokenizer.to_json(), "task": task, "labels": list(labels.names), "scale": labels.scale,
        "longest": longest, "head": list(getattr(model.head, "exported", ()))})
