"""The encoder to fine-tune: where it comes from, and how it gets a head."""
from dataclasses import replace

import torch
from torch import nn

from support.model.build import make_model
from support.model.checkpoints import load_encoder
from support.program.cli import path_of
from support.program.files import short_hash


class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str, dropout: float):
        encoder, state = load_encoder(path_of(name.removeprefix("random:")))
        self.tokenizer, self.settings = state["tokenizer"], state["settings"]
        self.config = replace(state["config"], dropout=dropout)
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def weights_hash(self) -> str:
        """A hash of the weights; if they are random, of those drawn with seed 0."""
        weights = [tensor.numpy().tobytes() for tensor in self.new_encoder(seed=0).state_dict().values()]
        return short_hash(b"".join(weights))

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder, with dropout. If its weights are random, the seed determines them."""
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
        return self.head(h).float(), h
