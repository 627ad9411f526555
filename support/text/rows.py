"""The sequences of a prepared corpus: their order in training, a sample, and the entropy of their tokens."""
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from maelm import CLS, NUM_SPECIAL
from support.program.errors import UserError
from support.program.files import read_json


class Rows:
    """All sequences of a split ("train", "val"): `[CLS]` and the next seq_len - 1 tokens of a prepared corpus. Tokens
    stay on disk until they are read. Raises UserError if the corpus is too small for one sequence."""
    def __init__(self, folder: Path, split: str, seq_len: int):
        meta = read_json(folder / "meta.json")
        tokens = meta["tokens"][split]
        count = tokens // (seq_len - 1)
        if count == 0:
            raise UserError(f"--data {meta['data']}: its {split} split has {tokens} tokens, too few for a sequence "
                            f"of seq_len={seq_len}; use more text, a smaller --seq-len, or another --val-share")
        size = (folder / f"{split}.bin").stat().st_size  # in bytes
        if size != tokens * np.dtype(meta["dtype"]).itemsize:
            raise UserError(f"{folder / split}.bin: damaged ({size:,} bytes, {tokens:,} tokens); delete this folder, "
                            "and it is prepared again")
        self.pieces = np.memmap(folder / f"{split}.bin", meta["dtype"], "r", shape=(count, seq_len - 1))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, indices):
        """Sequences (B, seq_len) int64 at indices (B,)."""
        return np.insert(self.pieces[indices].astype(np.int64), 0, CLS, axis=1)


def evenly_spaced(rows: Rows | np.ndarray, most: int):
    """At most this many sequences (N, seq_len) int64, spaced evenly over the whole text."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)
    return torch.from_numpy(rows[indices])


def unigram_entropy(tokens) -> float:
    """The entropy of real tokens in nats, which is the loss of a model that knows only how frequent each token is."""
    real = tokens[tokens >= NUM_SPECIAL]
    return float(torch.special.entr(real.bincount().double() / len(real)).sum())


@lru_cache(maxsize=2)  # a step can belong to two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order of the sequences in an epoch, (total,) int64."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def indices_of_step(seed: int, step: int, batch_size: int, total: int):
    """The indices of a step's sequences, (batch_size,) int64. Each epoch draws a new permutation of all `total`
    sequences."""
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), total)
    rows = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(rows)
