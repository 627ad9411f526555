"""From a prepared corpus to the rows of a step."""
import functools
from pathlib import Path

import numpy as np
import torch

from maelm import CLS, NUM_SPECIAL, SEP
from support.cli import UserError
from support.corpus import read_meta
from support.run_folder import read_json


class Rows:
    """All rows of a split ("train", "val"): `[CLS]` and the next seq_len - 1 tokens of a prepared corpus, which stay
    on the disk until they are read. UserError if the corpus is damaged, or too small for a row."""
    def __init__(self, folder: Path, split: str, seq_len: int):
        meta = read_meta(folder)
        tokens = meta["tokens"][split]
        count = tokens // (seq_len - 1)
        if count == 0:
            raise UserError(f"--data {meta['data']}: its {split} split has {tokens} tokens, too few for a row of "
                            f"seq_len={seq_len}; use more text, a smaller --seq-len, or another --val-share")
        self.pieces = np.memmap(folder / f"{split}.bin", meta["dtype"], "r", shape=(count, seq_len - 1))
        self.vocabulary = len(read_json(folder / "tokenizer.json")["model"]["vocab"])

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, indices):
        """Rows (B, seq_len) int64 at indices (B,). UserError for ids that the text of a corpus cannot have."""
        found = np.asarray(self.pieces[indices], np.int64)
        if found.min() < SEP or found.max() >= self.vocabulary:
            raise UserError(f"{self.pieces.filename}: damaged; delete its folder, and it is made again")
        return np.insert(found, 0, CLS, axis=1)

    def fewest_real_tokens(self) -> int:
        """The fewest tokens in a row that are not special. It reads the whole text."""
        return int(np.count_nonzero(self.pieces >= NUM_SPECIAL, axis=1).min())


def evenly(rows: Rows | np.ndarray, most: int):
    """At most so many of the rows, spaced evenly over the whole text: a tensor (rows, seq_len) int64."""
    indices = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)
    return torch.from_numpy(rows[indices])


def unigram_entropy(tokens) -> float:
    """Entropy in nats of real tokens: the loss of a model that knows only how frequent each token is."""
    real = tokens[tokens >= NUM_SPECIAL]
    return float(torch.special.entr(real.bincount().double() / len(real)).sum())


def seed_of(*numbers: int) -> int:
    """One seed in [0, 2^63) from whole numbers, such as (seed, step)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@functools.lru_cache(maxsize=2)  # a step can be in two epochs
def permutation(seed: int, epoch: int, total: int):
    """The order (total,) int64 of the rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(total)


def rows_of_step(seed: int, step: int, batch_size: int, total: int):
    """Row numbers (batch_size,) int64 of a step: every epoch is a new permutation of all `total` rows."""
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), total)
    rows = [permutation(seed, epoch, total)[place] for epoch, place in zip(epochs.tolist(), places)]
    return np.array(rows)
