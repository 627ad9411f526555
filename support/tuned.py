"""Fine-tuned models, and their checkpoints."""
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from maelm import NUM_SPECIAL, Encoder
from support.checkpoints import write_checkpoint
from support.subjects import Pretrained, hidden_states


class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, t) int64, padding (B, t) bool -> the head's float32 logits."""
        return self.head(hidden_states(self.encoder, tokens, padding)[-1], padding).float()


def write_tuned(path: Path, model: Tuned, pretrained: Pretrained, **entries):
    """Write a fine-tuned model, which can be exported or fine-tuned further. For the export, `entries` have its `task`,
    the names of its `labels` (list), the `scale` of its numbers, and the `longest` input of fine-tuning in tokens. The
    logits of `example`, a few tokens, are compared with those of the export."""
    tokens = NUM_SPECIAL + torch.arange(8, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        logits = model.eval()(tokens, tokens < 0)
    head = vars(type(model.head)).get("exported", ())  # not that of a class from which the head is derived
    write_checkpoint(path, entries | {
        "config": asdict(pretrained.config), "settings": pretrained.settings, "model": model.state_dict(),
        "tokenizer": pretrained.tokenizer.to_json(), "head": list(head), "example": logits.cpu()})
