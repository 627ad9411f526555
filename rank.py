"""How many dimensions a text encoder uses: Figure 1, Table 3, Lemma 2.1 and Theorem 2.2 of the paper, for any model.

    python rank.py out/toy out/toy-mlm                     # run folders of train.py or finetune.py, or checkpoints
    torchrun --nproc_per_node 8 rank.py hf:roberta-base --data PATH --tokens 5000000
    python rank.py --collapse                              # rank collapse of pure attention, no model needed

Three curves over the layers 0 (embeddings) to L, from the same text:

    with_mask     all tokens, 15 % of them replaced by [MASK] as in MLM: H^l of section 2.2
    without_mask  all tokens of the unmasked text, as downstream tasks have it: H~^l of section 2.2
    mask_only     of the masked text, the representations at [MASK] alone: H_M^l, Figure 1(b)

MAE-LM's encoder never reads [MASK] in training: there, the curves with it show a token that it has not learned to use.
The paper's formula takes the singular values of H itself ("uncentered"); its text speaks of variance ("centered": the
mean row is subtracted first). A mean that is common to all rows can make the first one 1 whatever else H holds, so
both are reported. H is never stored: Gram matrices are streamed, in memory O(d^2 x layers) for any number of tokens.

    paper                                                          function
    2.2         rank_tau(H)                                        tau_rank, effective_rank; of streamed rows: Moments
    Figure 1    rank_0.9 with and without [MASK], by layer         analyse, draw
    Table 3     rank_0.9 of H^L, text without [MASK]               table_3
    Lemma 2.1   ranks of P, E, H_M^0 and H_M^L                     lemma_2_1
    Eq. (3)     H_M = U H_R, and how far a model is from it        both_sides
    Theorem 2.2 ||R'|| <= 4 epsilon ||R||^3, and its epsilon       both_sides, theorem_2_2
    App. A      the residual R' of one layer of pure attention     attention_only; of many layers: collapse

Beside the ranks it says, by layer, how much of H^l one knows from the tokens alone, and how much each sub-layer writes.
"""
import argparse
import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from data import VAL_SHARE, Rows, Tokenizer, documents, in_validation, mix, parts, seed_of, what_is_read
from files import Parser, UserError, atomic, claim_folder, clear_errors, refuse_other_kind, write_json
from maelm import CLS, MASK, NUM_SPECIAL, SEP, Encoder, check_field
from run import (Place, add_flags, choose_place, figure, first_alone, first_speaks, given_flags, load_encoder,
                 open_corpus, open_hub, run_settings)

CURVES = {"with_mask": "with", "without_mask": "without", "mask_only": "[MASK]"}  # and their names in a table
CENTERINGS = {"uncentered": False, "centered": True}
MASK_RATE = 0.15  # section 2.2
SAMPLE = 16_384  # tokens whose states are held, to see what layers are made of
CHUNKS = 20  # of consecutive rows: the units of the bootstrap and the points of the convergence line


# ---- 1. Effective rank: section 2.2 -------------------------------------------------------------------------
def tau_rank(values: Tensor, tau: float) -> int:
    """rank_tau from all squared singular values: the smallest k whose k largest sum to at least tau of all.

    values (d,) float64, sigma_i^2 in descending order, none below 0. Returns k in [1, d], or 0 if all values are 0.
    Shares within 1e-9 of tau reach it: 9 of 10 equal values are 0.9 of all, whatever rounding says. ValueError for
    tau outside (0, 1). Section 2.2."""
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}: use 0 < tau < 1")
    if values[0] == 0:  # the largest
        return 0
    reached = values.cumsum(0) >= (tau - 1e-9) * values.sum()
    return int((~reached).sum()) + 1


def effective_rank(h_or_gram: Tensor | np.ndarray, tau: float = 0.9) -> int:
    """rank_tau(H) = the smallest k whose k largest squared singular values sum to tau of all, section 2.2.

    Takes H (N, d) of any real type, or its Gram matrix H^T H (d, d), whose eigenvalues are the squared singular values
    of H. A square matrix that equals its transpose (to 1e-9 of each entry or 1e-12 of the largest) is taken as a Gram
    matrix, every other one as H. As in the paper's formula nothing is centred: subtract H.mean(0) yourself. Computed in
    float64 by `tau_rank`, of the squares as they are: a zero matrix has rank 0. ValueError for tau outside (0, 1), NaN
    or infinity, an empty matrix, another number of dimensions than two, or a Gram matrix with a negative eigenvalue,
    which none has (below -1e-6 of the largest; smaller ones are rounding and count as 0)."""
    x = torch.as_tensor(h_or_gram).double()
    if x.ndim != 2 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError("effective_rank: needs a matrix (N, d) or (d, d), not empty and without NaN or infinity; "
                         f"this one has shape {tuple(x.shape)}")
    square = x.shape[0] == x.shape[1]
    is_gram = square and torch.allclose(x, x.T, rtol=1e-9, atol=1e-12 * float(x.abs().max()))
    if not is_gram:
        return tau_rank(torch.linalg.svdvals(x) ** 2, tau)
    values = torch.linalg.eigvalsh(x).flip(0)  # ascending -> descending
    if values[-1] < -1e-6 * values.abs().max():
        raise ValueError(f"effective_rank: this Gram matrix has the eigenvalue {values[-1]:.3g} < 0")
    return tau_rank(values.clamp(min=0), tau)


def rankme(values: Tensor) -> float:
    """RankMe: exp(-sum p_i log p_i), p_i = sigma_i / sum sigma, of singular values (not of their squares), in [1, d].
    Takes sigma^2 (d,). Garrido et al., "RankMe", 2023, without its 1e-7."""
    sigma = values.sqrt()
    p = sigma / sigma.sum().clamp(min=1e-300)
    return float(torch.special.entr(p).sum().exp())


class Moments:
    """Count, sum and Gram matrix of the rows of H (N, d), batch by batch; H is never held.

    Rows are taken relative to a `shift`, the mean of the first batch, multiplied in float32 and accumulated in float64.
    Why the shift: a mean row far from 0 would fill the float32 products, and what remains when it is subtracted from
    the Gram matrix afterwards would be rounding. Any shift gives the same moments in exact numbers."""

    def __init__(self, d: int, device: torch.device | str = "cpu"):
        if torch.device(device).type == "mps":
            device = "cpu"  # mps has no float64
        self.count = 0.0
        self.shift = torch.zeros(d, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.shift)  # sum of rows - shift
        self.gram = torch.zeros(d, d, dtype=torch.float64, device=device)  # (rows - shift)^T (rows - shift)
        self.units = torch.zeros_like(self.shift)  # sum of the rows themselves, each of length 1

    def add(self, h: Tensor) -> None:
        """Include the rows of h (N, d) float32."""
        if not len(h):
            return
        if not self.count:
            self.shift = h.mean(0).to(self.shift)
        y = h - self.shift.to(h)
        lengths = h.norm(dim=1).clamp(min=1e-12)
        self.count += len(h)
        self.total += y.sum(0).to(self.gram)
        self.gram += (y.T @ y).to(self.gram)
        self.units += (lengths.reciprocal() @ h).to(self.gram)

    def about(self, shift: Tensor) -> "Moments":
        """The same rows relative to another shift (d,) float64."""
        if shift is self.shift:
            return self
        delta = self.shift - shift  # every row - shift is longer by this
        cross = torch.outer(self.total, delta)
        moved = Moments(len(shift), shift.device)
        moved.count, moved.shift, moved.units = self.count, shift, self.units.clone()
        moved.total = self.total + self.count * delta
        moved.gram = self.gram + cross + cross.T + self.count * torch.outer(delta, delta)
        return moved

    def spectrum(self, centered: bool) -> Tensor:
        """sigma_i^2 of H, or of H minus its mean row: (d,) float64, descending. ValueError for NaN or infinity."""
        whole = self.about(torch.zeros_like(self.shift)).gram  # H^T H
        gram = whole
        if centered:
            mean = self.shift + self.total / max(1.0, self.count)
            gram = self.about(mean).gram
        if not gram.isfinite().all():
            raise ValueError("hidden states with NaN or infinity")
        # Equal rows minus their mean leave float32 noise, about 1e-14 of the squares. Its spectrum is flat and would
        # pass for a high rank: so little counts as zero.
        if gram.trace() <= 1e-12 * whole.trace():
            return torch.zeros_like(self.shift)
        return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)

    def mean_cosine(self) -> float:
        """Mean cosine of two different rows of H, uncentred, in [-1, 1]: Ethayarajh, 2019, over all pairs."""
        # The square of the sum of unit rows holds every pair twice, and every row with itself once.
        pairs = max(1.0, self.count * (self.count - 1))
        return float((self.units @ self.units - self.count) / pairs)

    def over_processes(self, place: Place) -> "Moments":
        """The moments of the rows of all processes together."""
        if place.world == 1:
            return self
        # The sums of two processes add up if both are about one shift: that of the first.
        shift = self.shift.clone()
        dist.broadcast(shift, 0)
        moved = self.about(shift)
        moved.count = place.sum(self.count)[0]
        for part in (moved.total, moved.units, moved.gram):
            dist.all_reduce(part)
        return moved


def combine(moments: list[Moments], weights: list[float] | None = None) -> Moments:
    """The moments of several sets of rows together; each row of moments[i] counts weights[i] times (once). Weight -1
    takes rows out again."""
    if weights is None:
        weights = [1.0] * len(moments)
    shift = moments[0].shift
    whole = Moments(len(shift), shift.device)
    whole.shift = shift
    for part, weight in zip(moments, weights):
        part = part.about(shift)  # sums about different shifts do not add up
        whole.count += weight * part.count
        whole.total += weight * part.total
        whole.gram += weight * part.gram
        whole.units += weight * part.units
    return whole


# ---- 2. What is measured, on which text ---------------------------------------------------------------------
@dataclass(frozen=True)
class RankConfig:
    """What is measured and how it is shown; every field is a flag. ValueError for values outside their range."""
    data: str = ""  # docs, a file, a folder, or hf:NAME[:CONFIG]; without it a run's own validation rows, else docs
    val_share: float = VAL_SHARE  # share of --data to use
    tokens: int = 1_000_000  # at most so many, special tokens included
    tau: Sequence[float] = (0.9,)  # one or more; the first is printed and plotted
    plot: str = "uncentered"  # which to plot: uncentered, the paper's formula, or centered
    specials: bool = True  # count [CLS], [SEP] and their like
    bootstrap: int = 0  # 95 % intervals from so many resamples of blocks of documents
    theory: bool = False  # also compute Lemma 2.1 and both sides of Theorem 2.2
    collapse: bool = False  # draw the rank collapse of pure attention: collapse.png
    seq_len: int = 512  # tokens in a row for hf: models, or their limit
    batch_size: int = 32  # rows at a time
    seed: int = 0  # of the masks and resamples
    out: Path = Path("out/rank")  # folder for rank.json, rank.csv, rank.png

    def __post_init__(self):
        for name in ("tokens", "seq_len", "batch_size"):
            check_field(self, name, getattr(self, name) > 0, "use a positive number")
        for name in ("bootstrap", "seed"):
            check_field(self, name, getattr(self, name) >= 0, "use 0 or a positive number")
        check_field(self, "val_share", 0 < self.val_share <= 1, "use 0 < share <= 1")
        check_field(self, "tau", all(0 < tau < 1 for tau in self.tau), "use 0 < tau < 1")
        check_field(self, "plot", self.plot in CENTERINGS, "use uncentered or centered")


class Subject(NamedTuple):
    """An encoder and the rows of tokens to measure it on."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # rows[indices] is (B, n) int64
    text: str  # where the rows are from
    dim: int
    seq_len: int
    mask: int  # id of [MASK]
    specials: list[int]  # ids of tokens that are never masked
    encoder: Encoder | None = None  # of maelm, for --theory
    reads_mask: bool = True  # whether it was trained on [MASK]


class Frame(NamedTuple):
    """The special tokens that a model expects around its text: ids."""
    before: list[int]  # each row
    after: list[int]  # each row
    separator: list[int]  # after each document


def run_subject(name: str, config: RankConfig, place: Place) -> Subject:
    """A model of this repository, on the text of --data, else on the validation rows of its own corpus, else (if
    fine-tuned) on docs. UserError if there is no model, or --data was prepared with another tokenizer."""
    path = Path(name)
    encoder, tokenizer, shape = load_encoder(path, place.device)
    home = path if path.is_dir() else path.parent
    settings = run_settings(home)
    if config.data or "data" not in settings:  # finetune.py's folders do not say how their encoder was pre-trained
        text = config.data or "docs"
        folder = Path(text).expanduser()
    else:
        text = settings["data"]
        folder = open_corpus(shape, settings, home)
    if (folder / "meta.json").is_file():
        rows = Rows(folder, "val", shape.vocab_size, shape.seq_len)
        if Tokenizer.load(folder).model.get_vocab() != tokenizer.model.get_vocab():
            raise UserError(f"--data {text}: prepared with another tokenizer than that of {name}; give its text")
    else:
        rows = text_rows(text, tokenizer.encode, Frame([CLS], [], [SEP]), shape.seq_len, config, place)
    positions = torch.arange(shape.seq_len, device=place.device)[None]  # (1, n)

    def encode(tokens: Tensor) -> list[Tensor]:
        return encoder(tokens.to(place.device), positions, all_layers=True)

    return Subject(name, encode, rows, text, dim=shape.encoder_dim, seq_len=shape.seq_len, mask=MASK,
                   specials=list(range(NUM_SPECIAL)), encoder=encoder,
                   reads_mask=shape.mask_in_encoder > 0 and shape.encoder_fill == "mask")


def hub_subject(name: str, config: RankConfig, place: Place) -> Subject:
    """Any encoder of transformers' AutoModel (of BART, the encoder alone) with its own tokenizer and mask token, on the
    validation documents of --data or docs. UserError as `open_hub` and `text_rows`."""
    hub = open_hub(name)
    model, tokenizer = hub.model.to(place.device), hub.tokenizer

    def encode_text(text: str) -> list[int]:
        text = text.replace(tokenizer.mask_token, "")
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(tokens: Tensor) -> list[Tensor]:
        tokens = tokens.to(place.device)
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        # The last of hidden_states lacks the final LayerNorm in some families.
        return [*out.hidden_states[:-1], out.last_hidden_state]

    text = config.data or "docs"
    n = min(config.seq_len, hub.seq_len)
    rows = text_rows(text, encode_text, hub_frame(tokenizer), n, config, place)
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text, dim=hub.dim, seq_len=n, mask=tokenizer.mask_token_id, specials=specials)


def hub_frame(tokenizer) -> Frame:
    """The special tokens that a tokenizer of transformers puts around a text, found by the example of one letter."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    # Where the letter begins in what has the special tokens; a tokenizer that hides it has nothing before a row.
    places = [i for i in range(len(framed)) if framed[i:i + len(plain)] == plain]
    start = places[0] if places else 0
    separators = [i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None]
    return Frame(framed[:start], framed[start + len(plain):], separators[:1])


def text_rows(source: str, encode: Callable, frame: Frame, n: int, config: RankConfig, place: Place) -> np.ndarray:
    """Validation documents of `source`, as --val-share draws them, as full rows (rows, n) int64 of at most --tokens
    tokens, with the frame's tokens around and between. UserError if there is not one row."""
    if place.first:
        print(f"reads {what_is_read(source)}", flush=True)
    room = n - len(frame.before) - len(frame.after)
    texts = (text for part in parts(source) for text in documents(part) if in_validation(text, config.val_share))
    pieces, size = [], 0
    for text in tqdm(texts, "tokenizing", unit="text", leave=False, disable=None):
        pieces.append(np.array([*encode(text), *frame.separator], np.int64))
        size += len(pieces[-1])
        if size >= config.tokens:
            break
    count = min(size // max(1, room), math.ceil(config.tokens / n))
    if room < 1 or count == 0:
        raise UserError(f"--data {source}: its validation part has {size} tokens, less than a row of {n}; use more "
                        "text, or all of it with --val-share 1")
    body = np.concatenate(pieces)[:count * room].reshape(count, room)
    before = np.tile(frame.before, (count, 1))
    after = np.tile(frame.after, (count, 1))
    return np.concatenate([before, body, after], axis=1).astype(np.int64)  # an empty frame is float64


# ---- 3. Measuring -------------------------------------------------------------------------------------------
def draw_masks(special: np.ndarray, indices: np.ndarray, seed: int) -> np.ndarray:
    """special (B, n) bool, row numbers (B,) -> masked (B, n) bool, round(0.15 n) real tokens of each row (or all of
    them): a function of (seed, row number), whatever the batches and processes."""
    n = special.shape[1]
    key = mix(indices.astype(np.uint64) + np.uint64(seed_of(seed)))  # (B,)
    noise = mix(key[:, None] + np.arange(n, dtype=np.uint64))  # (B, n)
    noise = np.where(special, np.uint64(2 ** 64 - 1), noise)  # special tokens come last
    first = noise.argsort(axis=1)[:, :round(MASK_RATE * n)]
    masked = np.zeros_like(special)
    np.put_along_axis(masked, first, True, axis=1)
    return masked & ~special


@torch.no_grad()
def stream(subject: Subject, indices: np.ndarray, config: RankConfig, place: Place) -> dict:
    """Run the encoder on rows `indices`, masked and unmasked -> for each curve the moments of layers 0 to L, over all
    processes. Special tokens are read, but with --no-specials not counted."""
    moments = {curve: [] for curve in CURVES}
    # The rows go round the processes, so that all have as many, to one.
    mine = indices[place.rank::place.world]
    for start in range(0, len(mine), config.batch_size):
        batch = mine[start:start + config.batch_size]
        tokens = subject.rows[batch]  # (B, n)
        special = np.isin(tokens, subject.specials)
        masked = draw_masks(special, batch, config.seed)
        counted = np.ones_like(special) if config.specials else ~special
        replaced = np.where(masked, subject.mask, tokens)
        add_states(moments, subject, replaced, {"with_mask": counted, "mask_only": masked})
        add_states(moments, subject, tokens, {"without_mask": counted})
    for curve, layers in moments.items():
        moments[curve] = [layer.over_processes(place) for layer in layers]
    return moments


def add_states(moments: dict, subject: Subject, tokens: np.ndarray, counted: dict[str, np.ndarray]) -> None:
    """Run the encoder on tokens (B, n) int64, and include its states at counted[curve] (B, n) bool in each curve.
    UserError for states with NaN or infinity."""
    states = subject.encode(torch.from_numpy(tokens))
    if not all(h.isfinite().all() for h in states):
        raise UserError(f"{subject.name}: hidden states with NaN or infinity; is the checkpoint whole?")
    for curve, rows in counted.items():
        if not moments[curve]:
            moments[curve] = [Moments(subject.dim, h.device) for h in states]
        at = torch.from_numpy(np.flatnonzero(rows)).to(states[0].device)
        for whole, h in zip(moments[curve], states):
            h = h.flatten(0, 1)  # (B n, d)
            whole.add(h if rows.all() else h[at])


def rows_with(tokens: int, subject: Subject) -> np.ndarray:
    """Numbers of rows (rows,) int64 from everywhere in the text, with about so many tokens, or all there are."""
    count = min(len(subject.rows), math.ceil(tokens / subject.seq_len))
    return np.linspace(0, len(subject.rows) - 1, count).astype(np.int64)


def measure(subject: Subject, config: RankConfig, place: Place) -> tuple[dict, list[dict], list[dict]]:
    """-> the moments of all rows, curve -> layers; with --bootstrap those of each of CHUNKS blocks of consecutive rows;
    and the convergence: ranks of the last layer without [MASK] for the first eighth, quarter, half and all of the
    blocks. UserError for states with NaN, or if [MASK], or any curve, has fewer than 10 d rows."""
    n, d = subject.seq_len, subject.dim
    indices = rows_with(config.tokens, subject)
    total = len(indices)
    masks = total * round(MASK_RATE * n)
    if masks < 10 * d or total < place.world:
        raise UserError(f"{subject.name}: {total} rows of {n} tokens hold {masks:,} [MASK], fewer than 10 d = "
                        f"{10 * d:,}, or fewer rows than processes: too little for a rank among d = {d} dimensions. "
                        "Raise --tokens, or give more text: --data, --val-share 1")
    chunks = np.array_split(indices, min(CHUNKS, total // place.world))
    points = [math.ceil(len(chunks) * share) for share in (1 / 8, 1 / 4, 1 / 2, 1)]
    whole, blocks, convergence = {}, [], []
    bar = progress(chunks, subject.name, place, unit="tokens", unit_scale=len(chunks[0]) * n)
    for count, chunk in enumerate(bar, start=1):
        block = stream(subject, chunk, config, place)
        for curve, layers in block.items():
            if curve in whole:
                layers = [combine([*pair]) for pair in zip(whole[curve], layers)]
            whole[curve] = layers
        if config.bootstrap:
            blocks.append(block)
        if count in points:
            top = whole["without_mask"][-1]
            point = {"n": round(top.count)}
            for centering, centered in CENTERINGS.items():
                point[centering] = tau_rank(top.spectrum(centered), config.tau[0])
            convergence.append(point)
    return whole, blocks, convergence


def progress(steps: Iterable, name: str, place: Place, **flags) -> tqdm:
    """A progress bar over `steps`, in the first process, on a terminal."""
    return tqdm(steps, name, leave=False, disable=None if place.first else True, **flags)


class Record(NamedTuple):
    """What one curve of a model has at one layer."""
    layer: int  # 0 (embeddings) to L
    centering: str  # of CENTERINGS
    curve: str  # of CURVES
    n: int  # rows
    ranks: dict[float, int]  # tau -> rank_tau
    rankme: float
    mean_cosine: float | None  # of the uncentred rows alone
    interval: dict[float, list[int]]  # tau -> low and high end; empty without --bootstrap


class Result(NamedTuple):
    """All that is measured of a model, in flat records: by layer, then by centring, then by curve."""
    name: str
    d: int
    n: dict[str, int]  # rows of each curve
    text: str
    reads_mask: bool
    records: list[Record]
    convergence: list[dict]  # ranks of the first rows: n, uncentered, centered
    anatomy: list[dict]  # what layers 0 to L hold

    def select(self, curve: str, centering: str) -> list[Record]:
        """The records of one curve, layers 0 to L."""
        return [record for record in self.records if record.curve == curve and record.centering == centering]

    def size(self) -> str:
        """What was measured, in words."""
        return f"n = {self.n['without_mask']:,} tokens ({self.n['mask_only']:,} [MASK])"


def bootstrap(blocks: list[Moments], centered: bool, config: RankConfig) -> dict[float, list[int]]:
    """95 % percentile interval of each rank over --bootstrap resamples of the blocks with replacement (Efron, 1979).
    A block is 1 / CHUNKS of the text, in consecutive rows, so that documents stay together, and enters by its Gram
    matrix times the number of its draws: no token is run twice; memory O(d^2 x CHUNKS x layers)."""
    random = np.random.default_rng(config.seed)
    equal = np.full(len(blocks), 1 / len(blocks))
    draws = random.multinomial(len(blocks), equal, config.bootstrap)  # (resamples, blocks)
    blocks = [block.about(blocks[0].shift) for block in blocks]  # once, not in every resample
    spectra = [combine(blocks, draw.tolist()).spectrum(centered) for draw in draws]
    interval = {}
    for tau in config.tau:
        ranks = [tau_rank(values, tau) for values in spectra]
        low, high = np.percentile(ranks, (2.5, 97.5))
        interval[tau] = [round(low), round(high)]
    return interval


def analyse(subject: Subject, config: RankConfig, place: Place) -> tuple[Result, dict]:
    """-> what is measured of the model, and its moments, curve -> layers. UserError as `measure`."""
    whole, blocks, convergence = measure(subject, config, place)
    n = {curve: round(layers[0].count) for curve, layers in whole.items()}
    records = []
    cases = list(itertools.product(range(len(whole["with_mask"])), CENTERINGS, CURVES))
    for layer, centering, curve in progress(cases, "spectra", place):
        moments, centered = whole[curve][layer], CENTERINGS[centering]
        values = moments.spectrum(centered)
        ranks = {tau: tau_rank(values, tau) for tau in config.tau}
        cosine = None if centered else moments.mean_cosine()
        interval = {}
        if blocks:
            interval = bootstrap([block[curve][layer] for block in blocks], centered, config)
        records.append(Record(layer, centering, curve, n[curve], ranks, rankme(values), cosine, interval))
    made_of = anatomy(subject, config)
    return Result(subject.name, subject.dim, n, subject.text, subject.reads_mask, records, convergence, made_of), whole


@torch.no_grad()
def identity_share(h: Tensor, tokens: Tensor) -> float | None:
    """The share of the variance of h (N, d) that the tokens (N,) int64 explain: 1 if equal tokens have equal rows,
    about 0 if rows have nothing to do with their tokens. None if no token occurs twice, or all rows are equal.

    It is the adjusted R^2 of an analysis of variance: of N random rows, the means of G kinds of tokens would explain
    G / N by chance, which is taken out."""
    kinds, kind = tokens.unique(return_inverse=True)
    N, G = len(tokens), len(kinds)
    h = h.double()
    h = h - h.mean(0)
    sums = torch.zeros(G, h.shape[1], dtype=h.dtype, device=h.device).index_add_(0, kind, h)
    means = sums / kind.bincount(minlength=G)[:, None]  # (G, d), of each kind of token
    total = float(h.square().sum())
    within = float((h - means[kind]).square().sum())
    if N == G or total == 0:
        return None
    return 1 - within / (N - G) / (total / (N - 1))


def add_mean_square(sums: dict[str, float], name: str, module: torch.nn.Module, inputs: tuple, fx: Tensor) -> None:
    """Forward hook: add the mean square of a sub-layer's output to sums[name]."""
    sums[name] += float(fx.float().square().mean())


@contextlib.contextmanager
def listen(encoder: Encoder | None) -> Iterator[list[dict[str, float]]]:
    """While entered, note what the sub-layers of a model of this repository write: for each layer 1 to L, sub-layer ->
    the sum over batches of the mean square of f(x), which is added to the residual stream. Empty for other models."""
    written, hooks = [], []
    for block in encoder.blocks if encoder else []:
        sums = {"attention": 0.0, "ffn": 0.0}
        written.append(sums)
        for name, layer in (("attention", block.self_attention), ("ffn", block.ffn)):
            hooks.append(layer.f.register_forward_hook(partial(add_mean_square, sums, name)))
    try:
        yield written
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def anatomy(subject: Subject, config: RankConfig) -> list[dict[str, float | None]]:
    """What each layer 0 to L holds of about SAMPLE tokens without [MASK]: `identity`, see identity_share; and of models
    of this repository the mean squares that `attention` and `ffn` write, None in layer 0."""
    indices, size = rows_with(SAMPLE, subject), config.batch_size
    batches = [torch.from_numpy(subject.rows[indices[i:i + size]]) for i in range(0, len(indices), size)]
    states = []  # of each batch, by layer, (B n, d)
    with listen(subject.encoder) as written:
        for batch in batches:
            states.append([h.flatten(0, 1).cpu() for h in subject.encode(batch)])
    tokens = torch.cat([batch.flatten() for batch in batches])
    layers = []
    for layer, parts_of_h in enumerate(zip(*states)):
        found = {"identity": identity_share(torch.cat(parts_of_h), tokens), "attention": None, "ffn": None}
        if layer > 0 and written:
            found |= {name: total / len(batches) for name, total in written[layer - 1].items()}
        layers.append(found)
    return layers


# ---- 4. Theory: Lemma 2.1, Theorem 2.2, App. A --------------------------------------------------------------
def norm(x: Tensor) -> float:
    """||X||_{1,inf} = sqrt(||X||_1 ||X||_inf), the largest column and row sums of |X|; section 2.2."""
    columns = torch.linalg.matrix_norm(x, 1)
    rows = torch.linalg.matrix_norm(x, torch.inf)
    return float((columns * rows).sqrt())


def single_head(attention: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """W^QK = W^Q W^K^T / sqrt(d) and W^VO = W^V W^O, (d, d) float64, of a maelm.Attention with all its heads taken as
    one and without biases, as App. A assumes."""
    # nn.Linear holds the transpose of the paper's W.
    query = attention.query.weight.cpu().double()
    key, value = attention.key_value.weight.cpu().double().chunk(2)
    output = attention.output.weight.cpu().double()
    return query.T @ key / len(query) ** 0.5, value.T @ output.T


def both_sides(real: Tensor, masks: Tensor, qk: Tensor, vo: Tensor) -> dict[str, float]:
    """||R'||_{1,inf} and its bound 4 epsilon ||R||^3_{1,inf} in Theorem 2.2, for one layer of pure attention.

    real H_R (n, d), masks H_M (m, d) float64. U is the best solution of H_M = U H_R, Eq. (3), with U 1 = 1, and U H_R
    then takes H_M's place, as the proof supposes. `eq3`: ||H_M - U H_R|| / ||H_M||, 0 if the supposition holds.
    `spread`: max_i of f_max - f_min; the proof's exp(x) <= 1 + 2x needs it to be at most 1.256. Section 2.2, App. A."""
    n = len(real)
    h = real.mean(0)  # of all x the one with the smallest ||H_R - 1 x^T||
    R = real - h
    U = (masks - h) @ torch.linalg.pinv(R, rtol=1e-6) + 1 / n  # (m, n); 1^T R = 0, so that U 1 = 1
    eq3 = float((masks - U @ real).norm() / masks.norm())

    # Attention of H_R to H = [H_R; U H_R] = [R; U R] + 1 h^T; terms c_i of App. A are equal in a row and cancel.
    keys = torch.cat([R, U @ R])  # (n + m, d)
    F = R @ qk @ keys.T  # [F, F'], (n, n + m)
    g = keys @ qk.T @ h  # [g, g'], (n + m,)
    out = (F + g).softmax(1) @ keys @ vo  # H'_R - 1 h^T W^VO
    weights = g.softmax(0)
    r = weights[:n] + weights[n:] @ U  # Eq. (8)
    left = out - r @ R @ vo  # R'

    size = float(torch.linalg.matrix_norm(U, torch.inf))
    epsilon = float(torch.linalg.matrix_norm(qk, 1)) * norm(vo) * size * (1 + size)
    spread = float((F.amax(1) - F.amin(1)).max())
    return {"left": norm(left), "right": 4 * epsilon * norm(R) ** 3, "spread": spread, "eq3": eq3}


def attention_only(R: Tensor, h: Tensor, qk: Tensor, vo: Tensor, skip: bool = False) -> tuple[Tensor, Tensor]:
    """One single-head attention layer H -> A H W^VO (+ H with `skip`) on H = R + 1 h^T, R (n, d) with columns of mean
    0, h (d,), float64. R is carried apart from h, so that it stays exact far below 1e-16 of h; Eq. (5)."""
    F = R @ qk @ R.T  # (n, n)
    log_r = (R @ qk.T @ h).log_softmax(0)
    r = log_r.exp()  # attention where F is 0: the same for every query
    # A = exp(F) r / exp(scale), scale_i = log sum_j r_j exp(F_ij): by expm1 where F is tiny, else by logsumexp.
    tiny = torch.log1p(torch.expm1(F) @ r)
    large = (F + log_r).logsumexp(1)
    scale = torch.where(F.abs().amax(1) < 1, tiny, large)
    new = (r * torch.expm1(F - scale[:, None])) @ R @ vo  # (A - 1 r^T) R W^VO, without cancellation
    shift = (r @ R + h) @ vo
    if skip:
        new = new + R
        shift = shift + h
    mean = new.mean(0)
    return new - mean, shift + mean


def relative_residual(R: Tensor, h: Tensor) -> float:
    """||H - 1 h^T|| / ||H|| (Frobenius) of H = R + 1 h^T with 1^T R = 0: 1 without a common row, 0 for equal rows."""
    size = float(R.norm())
    return size / (size ** 2 + len(R) * float(h @ h)) ** 0.5


def collapse(layers: int = 5, n: int = 32, d: int = 32, skip: bool = False, seed: int = 0) -> list[float]:
    """Relative residuals after 0 ... `layers` layers of random pure attention. Their logarithm about triples in each
    layer: the double exponential of App. A's last bound (Dong et al., 2021). `skip` connections prevent it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    h = normal(d)
    R = normal(n, d)
    R = R - R.mean(0)
    residuals = [relative_residual(R, h)]
    for _ in range(layers):
        qk = normal(d, d) / d
        vo = torch.linalg.qr(normal(d, d)).Q
        R, h = attention_only(R, h, qk, vo, skip)
        residuals.append(relative_residual(R, h))
    return residuals


def lemma_2_1(subject: Subject, moments: dict, tau: float) -> list[str]:
    """Ranks of P, E, H_M^0 and H_M^L of a model of this repository, and whether rank(P) <= d - rank(E), which the
    proof of Lemma 2.1 supposes, holds for numerical ranks and for rank_tau: printable lines."""
    d, lines = subject.dim, []
    P = subject.encoder.position_embedding.weight.cpu().double()
    E = subject.encoder.token_embedding.weight.cpu().double()
    matrices = {"P": P, "E": E, "H_M^0 = 1 e^T + P": E[subject.mask] + P}
    numerical = {name: int(torch.linalg.matrix_rank(matrix)) for name, matrix in matrices.items()}
    effective = {name: effective_rank(matrix, tau) for name, matrix in matrices.items()}
    for name in matrices:
        lines.append(f"  {name:<22} rank_{tau} {effective[name]:>5}   numerical rank {numerical[name]:>5}")
    for name, layer in (("H_M^0 (LayerNorm)", 0), ("H_M^L", -1)):
        values = moments["mask_only"][layer].spectrum(centered=False)
        lines.append(f"  {name:<22} rank_{tau} {tau_rank(values, tau):>5}")
    lines.append("  the proof has rank(P) <= d - rank(E):")
    for sense, rank in (("numerical rank", numerical), (f"rank_{tau}", effective)):
        verdict = "holds" if rank["P"] <= d - rank["E"] else "does not hold"
        lines.append(f"    by {sense:<14}  {rank['P']} <= {d} - {rank['E']} {verdict}")
    return lines


def theorem_2_2(subject: Subject, moments: dict, seed: int) -> list[str]:
    """By layer the residuals of real tokens in masked text, and for one row of it both sides of the bound, of a model
    of this repository: printable lines."""
    number = np.arange(1)  # the first row of the text
    tokens = subject.rows[number]  # (1, n)
    masked = draw_masks(np.isin(tokens, subject.specials), number, seed)
    inputs = torch.from_numpy(np.where(masked, subject.mask, tokens))
    states = [h[0].cpu().double() for h in subject.encode(inputs)]  # L + 1 of (n, d)
    at = torch.from_numpy(masked[0])
    # Beside the model's own states, the embeddings of the row's real tokens go through its attention weights alone.
    h = states[0][~at].mean(0)
    R = states[0][~at] - h
    lines = ["  layer  rank-1 residual  1h^T residual  pure attention  ||R'||_1,inf        bound     spread  "
             "Eq.(3) error"]
    for layer, state in enumerate(states):
        real = combine([moments["with_mask"][layer], moments["mask_only"][layer]], [1, -1])  # without [MASK]
        values = real.spectrum(centered=False)
        squares = float(values.sum())  # ||H_R||^2
        to_rank_1 = (1 - float(values[0]) / squares) ** 0.5
        to_mean = (float(real.spectrum(centered=True).sum()) / squares) ** 0.5
        line = f"  {layer:>5}  {to_rank_1:15.3f}  {to_mean:13.3f}  {relative_residual(R, h):14.2e}"
        if layer < len(subject.encoder.blocks):
            qk, vo = single_head(subject.encoder.blocks[layer].self_attention.f)
            sides = both_sides(state[~at], state[at], qk, vo)
            line += f"  {sides['left']:12.3e} {sides['right']:12.3e} {sides['spread']:10.2f}  {sides['eq3']:12.3f}"
            R, h = attention_only(R, h, qk, vo)
        lines.append(line)
    return lines


ASSUMPTIONS = """\
  Residuals are shares of ||H_R||: real tokens of the masked text to the best rank-1 matrix, and to the best 1 h^T;
  then one row through the model's own attention weights alone. ||R'|| and bound: one row, one layer of such attention.
  App. A assumes what this model has not: no skip connection, no FFN, no LayerNorm, one head (here {}), no biases, no
  relative positions. A bound far above ||R'|| says nothing; a spread above 1.256 breaks the proof's exp(x) <= 1 + 2x;
  an error in Eq. (3) above 0 is the theorem's own conclusion: H_M is not in the row space of H_R."""


@torch.no_grad()
def theory(subject: Subject, moments: dict, config: RankConfig) -> str:
    """What Lemma 2.1 and Theorem 2.2 say about a model of this repository, computed, in printable lines."""
    heads = subject.encoder.blocks[0].self_attention.f.heads
    return "\n".join([f"Lemma 2.1 and Theorem 2.2 for {subject.name}, d = {subject.dim}",
                      *lemma_2_1(subject, moments, config.tau[0]),
                      *theorem_2_2(subject, moments, config.seed),
                      ASSUMPTIONS.format(heads)])


# ---- 5. Table, rank.json, rank.csv, Figure 1 ----------------------------------------------------------------
def table(result: Result, config: RankConfig) -> str:
    """The printed table of a model: ranks at the first tau by layer and curve, both centrings, and other measures."""
    tau = config.tau[0]
    width = 21 if config.bootstrap else 8  # of a column
    half = width * len(CURVES)

    def cell(record: Record) -> str:
        text = f"{record.ranks[tau]:>8}"
        if record.interval:
            low, high = record.interval[tau]
            text += f"{f'[{low}, {high}]':>13}"
        return text

    heads = "".join(f"{label:>{width}}" for label in CURVES.values())
    lines = [f"{result.name}: rank_{tau} of {result.size()} in d = {result.d} dimensions, text {result.text}",
             f"     {'uncentered (formula)':>{half}} |{'centered (variance)':>{half}} | without, {config.plot}",
             f"layer{heads} |{heads} |  RankMe   cosine"]
    # The mean row makes all rows alike: a cosine is of the uncentred ones, whatever is plotted.
    shown = result.select("without_mask", config.plot)
    uncentered = result.select("without_mask", "uncentered")
    for layer in range(len(shown)):
        cells = [cell(record) for record in result.records if record.layer == layer]  # 3 uncentered, 3 centered
        both = "".join(cells[:3]) + " |" + "".join(cells[3:])
        lines.append(f"{layer:>5}{both} |{shown[layer].rankme:8.1f}{uncentered[layer].mean_cosine:9.3f}")
    path = ", ".join(f"{point['n']:,}: {point[config.plot]}" for point in result.convergence)
    lines.append(f"convergence (last layer, without [MASK], {config.plot}), rank of the first tokens: {path}")
    lines.append(anatomy_table(result.anatomy))
    if not result.reads_mask:
        lines.append("its encoder never read [MASK] in training: with and [MASK] are a token unknown to it")
    return "\n".join(lines)


def anatomy_table(layers: list[dict]) -> str:
    """The printed table of `anatomy`."""
    lines = ["layer  token identity  attention writes  FFN writes"]
    for layer, found in enumerate(layers):
        cells = []
        for value in found.values():
            cells.append("" if value is None else f"{value:.3g}")
        lines.append(f"{layer:>5}  {cells[0]:>14}  {cells[1]:>16}  {cells[2]:>10}")
    lines.append("token identity: the share of the variance of H^l that the tokens alone explain\n"
                 "writes: mean squares of what a sub-layer adds to the residual stream")
    return "\n".join(lines)


def table_3(results: list[Result], tau: float) -> str:
    """Rank of H^L of text without [MASK], for several models, as Table 3 compares them: printable lines."""
    width = max(len(result.name) for result in results)
    lines = [f"as Table 3: rank_{tau}(H^L), text without [MASK]", f"{'':<{width}}  uncentered  centered      d"]
    for result in results:
        uncentered = result.select("without_mask", "uncentered")[-1].ranks[tau]
        centered = result.select("without_mask", "centered")[-1].ranks[tau]
        lines.append(f"{result.name:<{width}}  {uncentered:>10}  {centered:>8}  {result.d:>5}")
    return "\n".join(lines)


def as_json(result: Result) -> dict:
    """A model's part of rank.json: layers -> centring -> curve -> measures, with tau as text."""
    layers = []
    for record in result.records:
        if record.layer == len(layers):
            layers.append({centering: {} for centering in CENTERINGS})
        entry = {str(tau): rank for tau, rank in record.ranks.items()}  # JSON has text as keys
        entry["rankme"] = record.rankme
        entry["mean_cosine"] = record.mean_cosine
        if record.interval:
            entry["interval"] = {str(tau): ends for tau, ends in record.interval.items()}
        layers[record.layer][record.centering][record.curve] = entry
    return {"d": result.d, "n": result.n, "text": result.text,
            "trained_on_mask": result.reads_mask, "layers": layers, "convergence": result.convergence,
            "anatomy": result.anatomy}


def write_csv(results: list[Result], config: RankConfig) -> None:
    """rank.csv: a line for each record of each model."""
    lines = []
    for result in results:
        for record in result.records:
            line = {"model": result.name, "layer": record.layer, "centering": record.centering, "curve": record.curve,
                    "n": record.n, "d": result.d}
            line |= {f"rank_{tau}": rank for tau, rank in record.ranks.items()}
            line |= {"rankme": record.rankme, "mean_cosine": record.mean_cosine}
            for tau, (low, high) in record.interval.items():
                line |= {f"low_{tau}": low, f"high_{tau}": high}
            lines.append(line)
    with atomic(config.out / "rank.csv") as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)


PLOTTED = {"uncentered": "of H itself (the paper's formula)", "centered": "of H minus its mean row (variance)"}
LINES = {"with_mask": (0, "o-", "input w. [MASK]"), "without_mask": (0, "s--", "input w/o. [MASK]"),
         "mask_only": (1, "^-", "[MASK] representations")}  # curve: panel, style, label


def draw(results: list[Result], config: RankConfig) -> None:
    """rank.png as Figure 1: (a) rank with and without [MASK] in the input, (b) rank of [MASK], by layer."""
    tau = config.tau[0]
    caption = [f"Dimensions that hold {tau} of the squared singular values {PLOTTED[config.plot]}."]
    with figure(config.out / "rank.png", panels=2) as (drawn, axes):
        for number, result in enumerate(results):
            color = f"C{number}"
            caption.append(f"{result.name}: {result.size()}, d = {result.d}")
            for curve, (panel, style, label) in LINES.items():
                records = result.select(curve, config.plot)
                ranks = [record.ranks[tau] for record in records]
                axes[panel].plot(ranks, style, color=color, label=f"{result.name}, {label}")
                if config.bootstrap:
                    low, high = zip(*(record.interval[tau] for record in records))
                    axes[panel].fill_between(range(len(records)), low, high, color=color, alpha=0.15)
        for axis, title in zip(axes, ("(a) all tokens", "(b) [MASK] tokens")):
            axis.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, tau = {tau}", title=title)
            axis.set_ylim(bottom=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small")
        drawn.supxlabel("\n".join(caption), fontsize="small")


def draw_collapse(config: RankConfig) -> str:
    """collapse.png: the toy of `collapse`, with and without skip connections; returns its numbers, printable."""
    lines = ["||H - 1 h^T|| / ||H|| after 0, 1, ... layers of random single-head attention:"]
    with claim_folder(config.out, "ranks", wait=True), figure(config.out / "collapse.png") as (_, axis):
        for skip, label in ((False, "attention only"), (True, "with skip connections")):
            residuals = collapse(skip=skip, seed=config.seed)
            lines.append(f"  {label:<22} " + "  ".join(f"{value:.1e}" for value in residuals))
            axis.semilogy(residuals, "o-", label=label)
        axis.set(xlabel="layer", ylabel="||H - 1 h^T|| / ||H||", title="Rank collapse of pure attention (n = d = 32)")
        axis.legend()
    return "\n".join([*lines, f"{config.out}: collapse.png"])


# ---- 6. Command line ----------------------------------------------------------------------------------------
def read_options(argv: list[str] | None) -> tuple[list[str], RankConfig]:
    """Command line -> names of models, and what to do; a bad value gets one line and exit code 2."""
    parser = Parser(prog="rank.py", description=__doc__, allow_abbrev=False, conflict_handler="resolve",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a run folder, a checkpoint, or hf:NAME_OR_FOLDER")
    add_flags(parser, RankConfig)
    # In place of the flag made from the field: this one takes several numbers.
    parser.add_argument("--tau", type=float, nargs="+", default=argparse.SUPPRESS,
                        help="one or more; the first is printed and plotted [0.9]")
    options = parser.parse_args(argv)
    try:
        config = RankConfig(**given_flags(options, RankConfig))
    except ValueError as error:
        parser.error(str(error))
    hub = [name for name in options.models if name.startswith("hf:")]
    if not options.models and not config.collapse:
        parser.error("MODEL: name a run folder or hf:NAME, or use --collapse")
    if len(set(options.models)) < len(options.models):
        parser.error("MODEL: name each model once")
    if config.theory and hub:
        parser.error(f"--theory: for run folders of train.py only, not for {' '.join(hub)}")
    return options.models, config


def analyse_all(models: list[str], config: RankConfig, place: Place) -> None:
    """Measure the models one after the other, print, write and draw."""
    results = []
    for name in models:
        prepare_subject = hub_subject if name.startswith("hf:") else run_subject
        subject = prepare_subject(name, config, place)
        result, moments = analyse(subject, config, place)
        results.append(result)
        if place.first:
            print(table(result, config), flush=True)
        if place.first and config.theory:
            print(theory(subject, moments, config), flush=True)
    if not place.first:
        return
    with claim_folder(config.out, "ranks", wait=True):
        write_json(config.out / "rank.json", {
            "tau": config.tau, "plotted": config.plot, "mask_rate": MASK_RATE, "specials": config.specials,
            "bootstrap": config.bootstrap, "seed": config.seed,
            "models": {result.name: as_json(result) for result in results}})
        write_csv(results, config)
        draw(results, config)
    if len(results) > 1:
        print(table_3(results, config.tau[0]))
    print("with: all tokens of the text with 15 % [MASK]; without: of the same text unmasked; [MASK]: at masks\n"
          f"{config.out}: rank.json, rank.csv, rank.png ({config.plot})")


def main(argv: list[str] | None = None) -> None:
    models, config = read_options(argv)
    with clear_errors("rank.py"), first_speaks():
        with first_alone():
            refuse_other_kind(config.out, "ranks")
            for name in models:  # before the first is measured
                if not name.startswith("hf:") and not Path(name).exists():
                    raise UserError(f"{name}: no such run folder or checkpoint")
            place = choose_place("fp32")
        torch.set_float32_matmul_precision("highest")  # TF32, as in training, is too coarse for a covariance
        if models:
            analyse_all(models, config, place)
        if config.collapse and place.first:
            print(draw_collapse(config))
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
