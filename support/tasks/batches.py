"""Batches for fine-tuning: padding, similar lengths, and a new order in every epoch."""
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from maelm import PAD
from support.tasks.types import Encoded


def collate(encoded: Encoded, chosen, device: torch.device):
    """Chosen inputs (B,) of a split -> tokens (B, m) int64, padding (B, m) bool, targets. The longest has m tokens."""
    ids = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD).to(device)
    return tokens, tokens == PAD, encoded.targets[chosen].to(device)


def order_of(encoded: Encoded) -> np.ndarray:
    """The indices of all inputs of a split, in the order of their lengths."""
    return np.argsort([len(ids) for ids in encoded.ids], kind="stable")


def by_length(encoded: Encoded, batch_size: int, device: torch.device) -> Iterator[tuple]:
    """Yield all inputs of a split, as collate returns them, in batches of similar length."""
    order = order_of(encoded)
    for start in range(0, len(order), batch_size):
        yield collate(encoded, order[start:start + batch_size], device)


def in_order(results: list, encoded: Encoded):
    """The results for the batches of by_length as one tensor (N, ...), in the order of the inputs."""
    return torch.cat(results)[np.argsort(order_of(encoded))]


def batches(encoded: Encoded, seed: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the indices of each step's inputs, (batch_size,) int64 or, at the end of an epoch, fewer. Every epoch is a
    new permutation of all inputs. Those of sixteen batches are sorted by length, which saves padding."""
    lengths = np.array([len(ids) for ids in encoded.ids])
    for epoch in itertools.count():
        random = np.random.default_rng((seed, epoch))
        order = random.permutation(len(lengths))
        for start in range(0, len(order), 16 * batch_size):
            group = order[start:start + 16 * batch_size]
            group = group[np.argsort(lengths[group], kind="stable")]
            cut = [group[i:i + batch_size] for i in range(0, len(group), batch_size)]
            # Shuffle the batches, so that inputs do not grow longer from step to step.
            yield from [cut[i] for i in random.permutation(len(cut))]
