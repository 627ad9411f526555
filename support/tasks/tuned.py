"""Encoders that are fine-tuned, and their checkpoints."""
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from maelm import NUM_SPECIAL, Encoder
from support.model.build import make_model
from support.model.checkpoints import load_encoder, write_checkpoint
from support.program import short_hash


class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str):
        encoder, state = load_encoder(name.removeprefix("random:"))
        self.tokenizer = state["tokenizer"]
        self.settings = state["settings"]
        self.config = state["config"]
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def weights_hash(self) -> str:
        """A hash of the weights or, if they are random, of the weights that seed 0 draws."""
        weights = [tensor.numpy().tobytes() for tensor in self.new_encoder(seed=0).state_dict().values()]
        return short_hash(b"".join(weights))

    def new_encoder(self, seed: int) -> Encoder:
        """A copy of the encoder. If its weights are random, the seed determines them."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        return encoder


def last_layer(encoder: Encoder, tokens, padding):
    """tokens (B, t) int64, padding (B, t) bool -> H^L (B, t, d)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return encoder(tokens, positions, padding)


class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, t) int64, padding (B, t) bool -> the head's float32 logits."""
        return self.head(last_layer(self.encoder, tokens, padding), padding).float()


def write_tuned(path: Path, model: Tuned, pretrained: Pretrained, **entries):
    """Write a fine-tuned model, which can be exported or fine-tuned further. For the export, `entries` have its `task`,
    the names of its `labels` (list), the `scale` of its numbers, and the `longest` input of fine-tuning in tokens. The
    `example` has tokens and their logits, with which the export is compared."""
    tokens = torch.arange(NUM_SPECIAL, NUM_SPECIAL + 8, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        logits = model.eval()(tokens, tokens < 0)
    head = vars(type(model.head)).get("exported", ())  # not that of a class from which the head is derived
    write_checkpoint(path, entries | {
        "config": asdict(pretrained.config), "settings": pretrained.settings, "model": model.state_dict(),
        "tokenizer": pretrained.tokenizer.to_json(), "head": list(head), "example": [tokens.cpu(), logits.cpu()]})
