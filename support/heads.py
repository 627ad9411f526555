"""The heads of fine-tuned models. An export contains this file, so that `transformers` computes with the same code.

A head takes H^L (B, t, d) and padding (B, t) bool.
"""
import torch
from torch import nn


class ClassifierHead(nn.Sequential):
    """H^L at [CLS] -> logits (B, C), as in RoBERTa: dropout, dense, tanh, dropout, linear."""
    def __init__(self, d: int, classes: int, dropout: float):
        super().__init__(
            nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(),
            nn.Dropout(dropout), nn.Linear(d, classes))

    def forward(self, h, padding):
        first = (~padding).int().argmax(1)  # the position of [CLS]; transformers may pad on the left
        row = torch.arange(len(h), device=h.device)
        return super().forward(h[row, first])


class SpanHead(nn.Linear):
    """H^L -> logits of the first and the last token of the answer, (B, t, 2)."""
    def __init__(self, d: int):
        super().__init__(d, 2)

    def forward(self, h, padding):
        return super().forward(h)
