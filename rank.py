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
"""
import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from data import (Parser, Rows, Tokenizer, UserError, atomic, clear_errors, documents, in_validation, mix, parts,
                  seed_of, write_json)
from maelm import CLS, MASK, NUM_SPECIAL, SEP, Config, Encoder
from train import Place, TrainConfig, load_corpus, load_model, set_up

CURVES = {"with_mask": "with", "without_mask": "without", "mask_only": "[MASK]"}
CENTERINGS = {"uncentered": False, "centered": True}
MASK_RATE = 0.15  # section 2.2
CHUNKS = 20  # of consecutive rows: the units of the bootstrap and the points of the convergence line


# ---- 1. Effective rank: section 2.2 -------------------------------------------------------------------------
def effective_rank(h_or_gram: Tensor | np.ndarray, tau: float = 0.9) -> int:
    """rank_tau(H) = the smallest k whose k largest squared singular values sum to tau of all, section 2.2.

    Takes H (N, d), or its Gram matrix H^T H (d, d): a square matrix that equals its transpose is a Gram matrix. As
    the paper's formula, not centred: subtract H.mean(0) yourself. A zero matrix has rank 0. ValueError for tau outside
    (0, 1), NaN or infinity, another shape, or a Gram matrix with negative eigenvalues."""
    x = torch.as_tensor(h_or_gram).double()
    if x.ndim != 2 or not x.numel() or not x.isfinite().all():
        raise ValueError(f"effective_rank: needs a finite matrix (N, d) or (d, d), got shape {tuple(x.shape)}"
                         f"{'' if x.isfinite().all() else ' with NaN or infinity'}")
    if x.shape[0] != x.shape[1] or not torch.allclose(x, x.T, rtol=1e-9, atol=1e-12 * float(x.abs().max())):
        return tau_rank(torch.linalg.svdvals(x) ** 2, tau)
    values = torch.linalg.eigvalsh(x).flip(0)
    if values[-1] < -1e-6 * values.abs().max():
        raise ValueError(f"effective_rank: this Gram matrix has the eigenvalue {values[-1]:.3g} < 0")
    return tau_rank(values.clamp(min=0), tau)


def tau_rank(values: Tensor, tau: float) -> int:
    """rank_tau from all sigma_i^2, values (d,) float64 in descending order; 0 if all are 0. Shares within 1e-9 of tau
    reach it, so that equal singular values count exactly. ValueError for tau outside (0, 1). Section 2.2."""
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}: use 0 < tau < 1")
    reached = values.cumsum(0) >= (tau - 1e-9) * values.sum()
    return int((~reached).sum()) + 1 if values[0] > 0 else 0


def rankme(values: Tensor) -> float:
    """RankMe: exp(-sum p_i log p_i), p_i = sigma_i / sum sigma, of singular values (not of their squares), in [1, d].
    Takes sigma^2 (d,). Garrido et al., "RankMe", 2023, without its 1e-7."""
    p = values.sqrt() / values.sqrt().sum().clamp(min=1e-300)
    return float(torch.special.entr(p).sum().exp())


def participation_ratio(values: Tensor) -> float:
    """(sum sigma^2)^2 / sum sigma^4, in [1, d]: d if all are equal. Takes sigma^2 (d,). Gao et al., 2017, there of the
    covariance, so of the centred matrix."""
    return float(values.sum() ** 2 / (values ** 2).sum().clamp(min=1e-300))


def stable_rank(values: Tensor) -> float:
    """||H||_F^2 / ||H||_2^2 = sum sigma^2 / sigma_1^2, in [1, d]. Takes sigma^2 (d,). Rudelson and Vershynin, 2007."""
    return float(values.sum() / values[0].clamp(min=1e-300))


MEASURES = {"rankme": rankme, "participation_ratio": participation_ratio, "stable_rank": stable_rank}


class Moments:
    """Count, sum and Gram matrix of the rows of H (N, d), batch by batch; H is never held. Exact for any mean: rows are
    taken relative to a `shift` near it, the first batch's mean, multiplied in float32 and accumulated in float64."""

    def __init__(self, d: int, device: torch.device | str = "cpu"):
        device = "cpu" if torch.device(device).type == "mps" else device  # mps has no float64
        self.count, self.shift, self.total, self.units = 0.0, *torch.zeros(3, d, dtype=torch.float64, device=device)
        self.gram = torch.zeros(d, d, dtype=torch.float64, device=device)

    def add(self, h: Tensor) -> None:
        """Include the rows of h (N, d) float32."""
        if not len(h):
            return
        if not self.count:
            self.shift = h.mean(0).to(self.shift)
        y = h - self.shift.to(h)
        self.count += len(h)
        self.total += y.sum(0).to(self.gram.device)
        self.gram += (y.T @ y).to(self.gram.device)
        self.units += (h.norm(dim=1).clamp(min=1e-12).reciprocal() @ h).to(self.gram.device)

    def about(self, shift: Tensor) -> "Moments":
        """The same rows relative to another shift (d,) float64."""
        if shift is self.shift:
            return self
        moved, delta = Moments(len(shift), shift.device), self.shift - shift
        cross = torch.outer(self.total, delta)
        moved.count, moved.shift, moved.units = self.count, shift, self.units
        moved.total = self.total + self.count * delta
        moved.gram = self.gram + cross + cross.T + self.count * torch.outer(delta, delta)
        return moved

    def spectrum(self, centered: bool) -> Tensor:
        """sigma_i^2 of H, or of H minus its mean row: (d,) float64, descending. A centred matrix with less than 1e-12
        of the squares is float32 noise about equal rows, and counts as zero."""
        whole = self.about(torch.zeros_like(self.shift)).gram
        gram = self.about(self.shift + self.total / max(1.0, self.count)).gram if centered else whole
        if not gram.isfinite().all():
            raise ValueError("hidden states with NaN or infinity")
        noise = gram.trace() <= 1e-12 * whole.trace()
        return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0) * ~noise

    def mean_cosine(self) -> float:
        """Mean cosine of two different rows of H, uncentred, in [-1, 1]: Ethayarajh, 2019, over all pairs."""
        return float((self.units @ self.units - self.count) / max(1.0, self.count * (self.count - 1)))

    def over_processes(self, place: Place) -> "Moments":
        """The moments of the rows of all processes together."""
        if place.world == 1:
            return self
        shift = self.shift.clone()
        dist.broadcast(shift, 0)
        moved = self.about(shift)
        moved.count, moved.units = place.sum(self.count)[0], self.units.clone()
        for part in (moved.total, moved.units, moved.gram):
            dist.all_reduce(part)
        return moved


def combine(parts: list[Moments], weights: list[float] | None = None) -> Moments:
    """The moments of several sets of rows together; each row of parts[i] counts weights[i] times (once). Weight -1
    takes rows out again."""
    shift = parts[0].shift
    whole = Moments(len(shift), shift.device)
    whole.shift = shift
    for part, weight in zip(parts, [1.0] * len(parts) if weights is None else weights):
        part = part.about(shift)
        whole.count += weight * part.count
        for name in ("total", "units", "gram"):
            getattr(whole, name).add_(getattr(part, name), alpha=float(weight))
    return whole


# ---- 2. Models and their text -------------------------------------------------------------------------------
class Subject(NamedTuple):
    """An encoder and the rows of tokens to measure it on."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # rows[indices] is (B, n) int64
    text: str  # where the rows are from
    dim: int
    seq_len: int
    mask: int  # id of [MASK]
    specials: list[int]  # ids of tokens that are never masked
    encoder: Encoder | None = None  # of maelm, for --theory
    reads_mask: bool = True  # whether it was trained on [MASK]


def load_encoder(path: Path, device: torch.device) -> tuple[Encoder, Tokenizer, Config]:
    """The encoder of a run folder of train.py, of one of its checkpoints, or of finetune.py (encoder.pt), in evaluation
    mode. UserError if there is none."""
    file = path / "encoder.pt" if path.is_dir() else path
    if file.name != "encoder.pt" or not file.is_file():
        model, tokenizer = load_model(path, device)
        return model.encoder, tokenizer, model.config
    state = torch.load(file, map_location=device, weights_only=True)
    config = Config(**state["config"])
    encoder = Encoder(config).to(device).eval()
    encoder.load_state_dict(state["encoder"])
    return encoder, Tokenizer.load(file.parent), config


def load_ours(name: str, options: argparse.Namespace, place: Place) -> Subject:
    """A model of this repository, on the text of --data, else on the validation rows of its own corpus, else (if
    fine-tuned) on docs. UserError if there is no model, or --data was prepared with another tokenizer."""
    encoder, tokenizer, config = load_encoder(Path(name), place.device)
    run = Path(name) if Path(name).is_dir() else Path(name).parent
    text, folder = options.data or "docs", Path(options.data or "").expanduser()
    if options.data is None and not (run / "encoder.pt").is_file():
        settings = TrainConfig(**json.loads((run / "config.json").read_text())["train"])
        text, folder = settings.data, load_corpus(config, settings, place)
    if (folder / "meta.json").is_file():
        rows = Rows(folder, "val", config.vocab_size, config.seq_len)
        if Tokenizer.load(folder).model.get_vocab() != tokenizer.model.get_vocab():
            raise UserError(f"--data {text}: prepared with another tokenizer than that of {name}; give its text")
    else:
        rows = text_rows(text, tokenizer.encode, ([CLS], [], [SEP]), config.seq_len, options)
    positions = torch.arange(config.seq_len, device=place.device)[None]
    return Subject(name, lambda tokens: encoder(tokens, positions, all_layers=True), rows, text, config.encoder_dim,
                   config.seq_len, MASK, list(range(NUM_SPECIAL)), encoder,
                   config.mask_in_encoder > 0 and config.encoder_fill == "mask")


def open_hub(name: str) -> tuple:
    """The encoder and the tokenizer that transformers loads from the Hub or a folder. UserError if there is no
    transformers, if it cannot load them, or if they know no mask token."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"hf:{name}: needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModel.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, by what is missing or damaged
        raise UserError(f"hf:{name}: transformers cannot load it ({' '.join(str(error).split())[:200]})") from error
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    if tokenizer.mask_token_id is None or tokenizer.mask_token_id >= model.get_input_embeddings().num_embeddings:
        raise UserError(f"hf:{name}: it has no mask token to measure; use an encoder trained with MLM")
    return model.float().eval(), tokenizer


def load_hub(name: str, options: argparse.Namespace, place: Place) -> Subject:
    """Any encoder of transformers' AutoModel (of BART, the encoder alone) with its own tokenizer and mask token, on the
    validation documents of --data or docs. UserError as `open_hub` and `text_rows`."""
    model, tokenizer = open_hub(name.removeprefix("hf:"))
    model.to(place.device)
    # RoBERTa's family counts positions from behind its padding id
    offset = max((m.padding_idx + 1 for m_name, m in model.named_modules() if m_name.endswith("position_embeddings")
                  and getattr(m, "padding_idx", None) is not None), default=0)
    n = min(options.seq_len, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512) - offset)
    plain, framed = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    start = next((i for i in range(len(framed)) if framed[i:i + len(plain)] == plain), 0)
    separator = [i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None][:1]

    def encode_text(text: str) -> list[int]:
        return tokenizer(text.replace(tokenizer.mask_token, ""), add_special_tokens=False, verbose=False)["input_ids"]

    def encode(tokens: Tensor) -> list[Tensor]:
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        return [*out.hidden_states[:-1], out.last_hidden_state]

    text = options.data or "docs"
    rows = text_rows(text, encode_text, (framed[:start], framed[start + len(plain):], separator), n, options)
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text, model.config.hidden_size, n, tokenizer.mask_token_id, specials)


def text_rows(source: str, encode: Callable, frame: tuple[list, list, list], n: int,
              options: argparse.Namespace) -> np.ndarray:
    """Validation documents of `source`, as --val-share draws them, as full rows (rows, n) int64 of at most --tokens
    tokens: frame = (tokens before a row, after it, after each document). UserError if there is not one row."""
    before, after, separator = frame
    room, pieces, size = n - len(before) - len(after), [], 0
    texts = (text for part in parts(source) for text in documents(part) if in_validation(text, options.val_share))
    for text in tqdm(texts, "tokenizing", unit="text", leave=False, disable=not sys.stderr.isatty()):
        pieces.append(np.array([*encode(text), *separator], np.int64))
        size += len(pieces[-1])
        if size >= options.tokens:
            break
    count = min(size // max(1, room), -(-options.tokens // n))
    if room < 1 or not count:
        raise UserError(f"--data {source}: its validation part has {size} tokens, less than a row of {n}; use more "
                        "text, or all of it with --val-share 1")
    body = np.concatenate(pieces)[:count * room].reshape(count, room)
    return np.concatenate([np.tile(before, (count, 1)), body, np.tile(after, (count, 1))], axis=1).astype(np.int64)


# ---- 3. Measuring -------------------------------------------------------------------------------------------
def draw_masks(special: np.ndarray, indices: np.ndarray, seed: int) -> np.ndarray:
    """special (B, n) bool, row numbers (B,) -> masked (B, n) bool, round(0.15 n) real tokens of each row (or all of
    them): a function of (seed, row number), whatever the batches and processes."""
    n = special.shape[1]
    noise = mix(mix(indices.astype(np.uint64) + np.uint64(seed_of(seed)))[:, None] + np.arange(n, dtype=np.uint64))
    first = np.where(special, np.uint64(2 ** 64 - 1), noise).argsort(axis=1)[:, :round(MASK_RATE * n)]
    masked = np.zeros_like(special)
    np.put_along_axis(masked, first, True, axis=1)
    return masked & ~special


@torch.no_grad()
def stream(subject: Subject, indices: np.ndarray, options: argparse.Namespace,
           place: Place) -> dict[str, list[Moments]]:
    """Run the encoder on rows `indices`, masked and unmasked -> for each curve the moments of layers 0 to L, over all
    processes. Special tokens are read, but with --no-specials not counted."""
    moments = {curve: [] for curve in CURVES}
    mine = indices[place.rank::place.world]
    for batch in (mine[i:i + options.batch_size] for i in range(0, len(mine), options.batch_size)):
        tokens = subject.rows[batch]
        special = np.isin(tokens, subject.specials)
        masked, counted = draw_masks(special, batch, options.seed), ~special | options.specials
        passes = ((np.where(masked, subject.mask, tokens), {"with_mask": counted, "mask_only": masked}),
                  (tokens, {"without_mask": counted}))
        for inputs, chosen in passes:
            at = {curve: torch.from_numpy(np.flatnonzero(rows)).to(place.device) for curve, rows in chosen.items()}
            for layer, h in enumerate(subject.encode(torch.from_numpy(inputs).to(place.device))):
                for curve, rows in at.items():
                    if layer == len(moments[curve]):
                        moments[curve].append(Moments(subject.dim, place.device))
                    h_rows = h.flatten(0, 1)
                    moments[curve][layer].add(h_rows if len(rows) == tokens.size else h_rows[rows])
    return {curve: [m.over_processes(place) for m in of_layers] for curve, of_layers in moments.items()}


def measure(subject: Subject, options: argparse.Namespace, place: Place) -> tuple[dict, list[dict]]:
    """-> the moments of all rows, curve -> layers, and those of each of CHUNKS blocks of consecutive rows: of all
    layers for --bootstrap, else of the last. UserError if [MASK], or any curve, has fewer than 10 d rows."""
    n, d, masks = subject.seq_len, subject.dim, round(MASK_RATE * subject.seq_len)
    total = min(len(subject.rows), -(-options.tokens // n))
    if total * masks < 10 * d or total < place.world:
        raise UserError(f"{subject.name}: {total} rows of {n} tokens hold {total * masks:,} [MASK], fewer than 10 d = "
                        f"{10 * d:,}, or fewer rows than processes: too little for a rank among d = {d} dimensions. "
                        "Raise --tokens, or give more text: --data, --val-share 1")
    indices = np.linspace(0, len(subject.rows) - 1, total).astype(np.int64)  # from everywhere in the text
    chunks = np.array_split(indices, min(CHUNKS, total // place.world))
    whole, kept = {}, []
    for chunk in progress(chunks, subject.name, place, unit="tokens", unit_scale=len(chunks[0]) * n):
        part = stream(subject, chunk, options, place)
        whole = {curve: [combine([*pair]) for pair in zip(whole[curve], part[curve])] for curve in whole} or part
        kept.append(part if options.bootstrap else {curve: part[curve][-1:] for curve in part})
    return whole, kept


def progress(steps: Iterable, name: str, place: Place, **flags) -> tqdm:
    """A progress bar over `steps`, in the first process, on a terminal."""
    return tqdm(steps, name, leave=False, disable=place.rank > 0 or not sys.stderr.isatty(), **flags)


def summary(moments: Moments, blocks: list[Moments], centered: bool, options: argparse.Namespace) -> dict:
    """Ranks at each tau, the other measures, and with --bootstrap the interval of each rank."""
    values = moments.spectrum(centered)
    found = {str(tau): tau_rank(values, tau) for tau in options.tau}
    found |= {name: measure(values) for name, measure in MEASURES.items()}
    found["mean_cosine"] = None if centered else moments.mean_cosine()
    return found | ({"interval": bootstrap(blocks, centered, options)} if blocks else {})


def bootstrap(blocks: list[Moments], centered: bool, options: argparse.Namespace) -> dict[str, list[int]]:
    """95 % percentile interval of each rank over --bootstrap resamples of the blocks with replacement (Efron, 1979).
    A block is 1 / CHUNKS of the text, in consecutive rows, so that documents stay together, and enters by its Gram
    matrix times the number of its draws: no token is run twice; memory O(d^2 x CHUNKS x layers)."""
    random = np.random.default_rng(options.seed)
    blocks = [block.about(blocks[0].shift) for block in blocks]
    draws = random.multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), options.bootstrap)
    spectra = [combine(blocks, list(draw)).spectrum(centered) for draw in draws]
    ranks = {str(tau): [tau_rank(values, tau) for values in spectra] for tau in options.tau}
    return {tau: [round(x) for x in np.percentile(found, (2.5, 97.5))] for tau, found in ranks.items()}


def analyse(subject: Subject, options: argparse.Namespace, place: Place) -> tuple[dict, dict]:
    """-> the model's part of rank.json, and its moments (curve -> layers). UserError for states with NaN."""
    whole, kept = measure(subject, options, place)

    def of_layer(layer: int) -> dict:
        blocks = {curve: [part[curve][layer] for part in kept if options.bootstrap] for curve in CURVES}
        return {centering: {curve: summary(whole[curve][layer], blocks[curve], centered, options) for curve in CURVES}
                for centering, centered in CENTERINGS.items()}

    try:
        layers = [of_layer(layer) for layer in progress(range(len(whole["with_mask"])), "spectra", place)]
    except ValueError as error:
        raise UserError(f"{subject.name}: {error}; is the checkpoint whole?") from error
    convergence = []
    for count in sorted({-(-len(kept) * i // 8) for i in (1, 2, 4, 8)}):
        first = combine([part["without_mask"][-1] for part in kept[:count]])
        ranks = {name: tau_rank(first.spectrum(centered), options.tau[0]) for name, centered in CENTERINGS.items()}
        convergence.append({"n": round(first.count), **ranks})
    return {"d": subject.dim, "n": {curve: round(whole[curve][0].count) for curve in CURVES}, "text": subject.text,
            "trained_on_mask": subject.reads_mask, "layers": layers, "convergence": convergence}, whole


# ---- 4. Theory: Lemma 2.1, Theorem 2.2, App. A --------------------------------------------------------------
def norm(x: Tensor) -> float:
    """||X||_{1,inf} = sqrt(||X||_1 ||X||_inf), the largest column and row sums of |X|; section 2.2."""
    return float((torch.linalg.matrix_norm(x, 1) * torch.linalg.matrix_norm(x, torch.inf)).sqrt())


def single_head(attention: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """W^QK = W^Q W^K^T / sqrt(d) and W^VO = W^V W^O, (d, d) float64, of a maelm.Attention with all its heads taken as
    one and without biases, as App. A assumes."""
    query, output = attention.query.weight.double().cpu(), attention.output.weight.double().cpu()
    key, value = attention.key_value.weight.double().cpu().chunk(2)
    return query.T @ key / len(query) ** 0.5, value.T @ output.T


def both_sides(real: Tensor, masks: Tensor, qk: Tensor, vo: Tensor) -> dict[str, float]:
    """||R'||_{1,inf} and its bound 4 epsilon ||R||^3_{1,inf} in Theorem 2.2, for one layer of pure attention.

    real H_R (n, d), masks H_M (m, d) float64. U is the best solution of H_M = U H_R with U 1 = 1, and U H_R then takes
    H_M's place, as the proof supposes. `eq3`: ||H_M - U H_R|| / ||H_M||, 0 if the supposition holds. `spread`: max_i of
    f_max - f_min; the proof's exp(x) <= 1 + 2x needs it to be at most 1.256. Section 2.2, App. A."""
    h = real.mean(0)
    R = real - h
    U = (masks - h) @ torch.linalg.pinv(R, rtol=1e-6) + 1 / len(real)  # 1^T R = 0, so that U 1 = 1
    keys = torch.cat([R, U @ R])
    F, g = R @ qk @ keys.T, keys @ qk.T @ h
    w = g.softmax(0)
    r = w[:len(real)] + w[len(real):] @ U
    out = (F + g).softmax(1) @ keys @ vo  # H'_R - 1 h^T W^VO; terms c_i of App. A cancel
    size = float(torch.linalg.matrix_norm(U, torch.inf))
    epsilon = float(torch.linalg.matrix_norm(qk, 1)) * norm(vo) * size * (1 + size)
    return {"left": norm(out - r @ R @ vo), "right": 4 * epsilon * norm(R) ** 3,
            "spread": float((F.amax(1) - F.amin(1)).max()), "eq3": float((masks - U @ real).norm() / masks.norm())}


def attention_only(R: Tensor, h: Tensor, qk: Tensor, vo: Tensor, skip: bool = False) -> tuple[Tensor, Tensor]:
    """One single-head attention layer H -> A H W^VO (+ H with `skip`) on H = R + 1 h^T, R (n, d) with columns of mean
    0, h (d,), float64. R is carried apart from h, so that it stays exact far below 1e-16 of h; Eq. (5)."""
    F, log_r = R @ qk @ R.T, (R @ qk.T @ h).log_softmax(0)
    r = log_r.exp()
    small = F.abs().amax(1) < 1  # log sum_j r_j exp(F_ij), exact for tiny F and for large
    scale = torch.where(small, torch.log1p(torch.expm1(F) @ r), (F + log_r).logsumexp(1))
    new = (r * torch.expm1(F - scale[:, None])) @ R @ vo  # (A - 1 r^T) R W^VO, without cancellation
    new, shift = new + skip * R, (r @ R + h) @ vo + skip * h
    return new - new.mean(0), shift + new.mean(0)


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

    h, R = normal(d), normal(n, d)
    R, found = R - R.mean(0), []
    for _ in range(layers):
        found.append(relative_residual(R, h))
        R, h = attention_only(R, h, normal(d, d) / d, torch.linalg.qr(normal(d, d)).Q, skip)
    return [*found, relative_residual(R, h)]


@torch.no_grad()
def theory(subject: Subject, moments: dict[str, list[Moments]], options: argparse.Namespace, place: Place) -> str:
    """What Lemma 2.1 and Theorem 2.2 say about a model of this repository, computed, in printable lines: ranks of P, E,
    H_M^0 and H_M^L, and by layer the residuals of real tokens in masked text and both sides of the bound."""
    encoder, tau = subject.encoder, options.tau[0]
    P, E = (table.weight.double().cpu() for table in (encoder.position_embedding, encoder.token_embedding))
    matrices = {"P": P, "E": E, "H_M^0 = 1 e^T + P": E[subject.mask] + P}
    full = {name: int(torch.linalg.matrix_rank(matrix)) for name, matrix in matrices.items()}
    lines = [f"Lemma 2.1 and Theorem 2.2 for {subject.name}, d = {subject.dim}",
             *(f"  {name:<22} rank_{tau} {effective_rank(matrix, tau):>5}   numerical rank {full[name]:>5}"
               for name, matrix in matrices.items()),
             *(f"  {name:<22} rank_{tau} {tau_rank(moments['mask_only'][layer].spectrum(False), tau):>5}"
               for name, layer in (("H_M^0 (LayerNorm)", 0), ("H_M^L", -1))),
             f"  the proof has rank(P) <= d - rank(E); here {full['P']} and {subject.dim} - {full['E']}",
             "  layer  rank-1 residual  1h^T residual  pure attention  ||R'||_1,inf        bound     spread  "
             "Eq.(3) error"]
    tokens = subject.rows[np.arange(1)]
    masked = draw_masks(np.isin(tokens, subject.specials), np.arange(1), options.seed)
    states = subject.encode(torch.from_numpy(np.where(masked, subject.mask, tokens)).to(place.device))
    at = torch.from_numpy(masked[0])
    states = [h[0].double().cpu() for h in states]
    h = states[0][~at].mean(0)
    R = states[0][~at] - h
    for layer, state in enumerate(states):
        every = combine([moments["with_mask"][layer], moments["mask_only"][layer]], [1, -1])  # the real tokens
        values, centered = every.spectrum(False), every.spectrum(True)
        line = (f"  {layer:>5}  {(1 - float(values[0] / values.sum())) ** 0.5:15.3f}  "
                f"{float(centered.sum() / values.sum()) ** 0.5:13.3f}  {relative_residual(R, h):14.2e}")
        if layer < len(encoder.blocks):
            qk, vo = single_head(encoder.blocks[layer].self_attention.f)
            sides = both_sides(state[~at], state[at], qk, vo)
            line += f"  {sides['left']:12.3e} {sides['right']:12.3e} {sides['spread']:10.2f}  {sides['eq3']:12.3f}"
            R, h = attention_only(R, h, qk, vo)
        lines.append(line)
    return "\n".join([*lines, ASSUMPTIONS.format(encoder.blocks[0].self_attention.f.heads)])


ASSUMPTIONS = """\
  Residuals are shares of ||H_R||: real tokens of the masked text to the best rank-1 matrix, and to the best 1 h^T;
  then one row through the model's own attention weights alone. ||R'|| and bound: one row, one layer of such attention.
  App. A assumes what this model has not: no skip connection, no FFN, no LayerNorm, one head (here {}), no biases, no
  relative positions. A bound far above ||R'|| says nothing; a spread above 1.256 breaks the proof's exp(x) <= 1 + 2x;
  an error in Eq. (3) above 0 is the theorem's own conclusion: H_M is not in the row space of H_R."""


# ---- 5. Table, rank.json, rank.csv, Figure 1 ----------------------------------------------------------------
def table(name: str, found: dict, options: argparse.Namespace) -> str:
    """The printed table of a model: ranks at the first tau by layer and curve, both centrings, and other measures."""
    tau, n = str(options.tau[0]), found["n"]

    def cell(entry: dict) -> str:
        low_high = "[{}, {}]".format(*entry["interval"][tau]) if "interval" in entry else ""
        return f"{entry[tau]:>8}{low_high:>{13 * bool(low_high)}}"

    width = 3 * len(cell(found["layers"][0]["centered"]["with_mask"]))
    heads = "".join(f"{label:>{width // 3}}" for label in CURVES.values())
    lines = [f"{name}: rank_{tau} of n = {n['without_mask']:,} tokens ({n['mask_only']:,} [MASK]) in d = {found['d']} "
             f"dimensions, text {found['text']}",
             f"     {'uncentered (formula)':>{width}} |{'centered (variance)':>{width}} | without, {options.plot}",
             f"layer{heads} |{heads} |  RankMe  partic.   stable   cosine"]
    for number, layer in enumerate(found["layers"]):
        both = " |".join("".join(cell(layer[centering][curve]) for curve in CURVES) for centering in CENTERINGS)
        shown = layer[options.plot]["without_mask"]
        others = "".join(f"{shown[name]:9.1f}" for name in MEASURES)
        lines.append(f"{number:>5}{both} |{others[1:]}{layer['uncentered']['without_mask']['mean_cosine']:9.3f}")
    path = ", ".join(f"{point['n']:,}: {point[options.plot]}" for point in found["convergence"])
    lines.append(f"convergence (last layer, without [MASK], {options.plot}), rank of the first tokens: {path}")
    if not found["trained_on_mask"]:
        lines.append("its encoder never read [MASK] in training: with and [MASK] are a token unknown to it")
    return "\n".join(lines)


def table_3(models: dict, options: argparse.Namespace) -> str:
    """Rank of H^L of text without [MASK], for several models, as Table 3 compares them: printable lines."""
    width, tau = max(map(len, models)), str(options.tau[0])
    lines = [f"as Table 3: rank_{tau}(H^L), text without [MASK]", f"{'':<{width}}  uncentered  centered      d"]
    for name, found in models.items():
        ranks = [found["layers"][-1][centering]["without_mask"][tau] for centering in CENTERINGS]
        lines.append(f"{name:<{width}}  {ranks[0]:>10}  {ranks[1]:>8}  {found['d']:>5}")
    return "\n".join(lines)


def write_csv(path: Path, head: list[str], lines: Iterable[list]) -> None:
    """Write a table as CSV, atomically."""
    with atomic(path) as temporary, open(temporary, "w", newline="") as file:
        csv.writer(file).writerows([head, *lines])


def csv_table(models: dict, options: argparse.Namespace) -> tuple[list[str], list[list]]:
    """Head and lines of rank.csv: a line for each model, layer, centring and curve."""
    names = [*map(str, options.tau), *MEASURES, "mean_cosine"]
    ends = [str(tau) for tau in options.tau if options.bootstrap]
    head = ["model", "layer", "centering", "curve", "n", "d", *(f"rank_{tau}" for tau in options.tau), *MEASURES,
            "mean_cosine", *(f"{end}_{tau}" for tau in ends for end in ("low", "high"))]
    return head, [[name, number, centering, curve, found["n"][curve], found["d"], *(entry[x] for x in names),
                   *(end for tau in ends for end in entry["interval"][tau])]
                  for name, found in models.items() for number, layer in enumerate(found["layers"])
                  for centering, entries in layer.items() for curve, entry in entries.items()]


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[tuple]:
    """Yield a matplotlib figure and its axes, `panels` side by side, without a display; then write it to `path`."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    drawn, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.2), layout="constrained")
    yield drawn, axes
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=120, format="png")
    plt.close(drawn)


def draw(models: dict, options: argparse.Namespace) -> None:
    """rank.png as Figure 1: (a) rank with and without [MASK] in the input, (b) rank of [MASK], by layer."""
    tau = str(options.tau[0])
    sizes = [f"{name}: n = {found['n']['without_mask']:,} tokens ({found['n']['mask_only']:,} [MASK]), d = {found['d']}"
             for name, found in models.items()]
    caption = [f"Dimensions that hold {tau} of the squared singular values {PLOTTED[options.plot]}.", *sizes]
    with figure(options.out / "rank.png", 2) as (drawn, axes):
        for color, (name, found) in enumerate(models.items()):
            for curve, (panel, style, label) in LINES.items():
                entries = [layer[options.plot][curve] for layer in found["layers"]]
                axes[panel].plot([entry[tau] for entry in entries], style, color=f"C{color}", label=f"{name}, {label}")
                if options.bootstrap:
                    low, high = zip(*(entry["interval"][tau] for entry in entries))
                    axes[panel].fill_between(range(len(entries)), low, high, color=f"C{color}", alpha=0.15)
        for axis, title in zip(axes, ("(a) all tokens", "(b) [MASK] tokens")):
            axis.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, tau = {tau}", title=title)
            axis.set_ylim(bottom=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small")
        drawn.supxlabel("\n".join(caption), fontsize="small")


PLOTTED = {"uncentered": "of H itself (the paper's formula)", "centered": "of H minus its mean row (variance)"}
LINES = {"with_mask": (0, "o-", "input w. [MASK]"), "without_mask": (0, "s--", "input w/o. [MASK]"),
         "mask_only": (1, "^-", "[MASK] representations")}  # curve: panel, style, label


def write_spectra(spectra: dict[tuple, Tensor], options: argparse.Namespace) -> None:
    """spectrum.csv, sigma_i^2 as shares of their sum for each (model, layer, curve, centring), and spectrum.png of each
    model's last layer."""
    shares = {key: (values / values.sum().clamp(min=1e-300)).tolist() for key, values in spectra.items()}
    write_csv(options.out / "spectrum.csv", ["model", "layer", "curve", "centering", "i", "share"],
              ([*key, i, share] for key, values in shares.items() for i, share in enumerate(values, start=1)))
    last = {key[0]: key[1] for key in shares}
    with figure(options.out / "spectrum.png") as (_, axis):
        for (name, layer, curve, centering), values in shares.items():
            if layer == last[name] and centering == options.plot:
                axis.loglog(range(1, len(values) + 1), np.maximum(values, 1e-12), label=f"{name}, {curve}")
        axis.set(xlabel="i", ylabel="share of squared singular value i", title=f"last layer, {options.plot}")
        axis.legend(fontsize="small")


def draw_collapse(options: argparse.Namespace) -> str:
    """collapse.png: the toy of `collapse`, with and without skip connections; returns its numbers, printable."""
    lines = ["||H - 1 h^T|| / ||H|| after 0, 1, ... layers of random single-head attention:"]
    with figure(options.out / "collapse.png") as (_, axis):
        for skip, label in ((False, "attention only"), (True, "with skip connections")):
            residuals = collapse(skip=skip, seed=options.seed)
            lines.append(f"  {label:<22} " + "  ".join(f"{value:.1e}" for value in residuals))
            axis.semilogy(residuals, "o-", label=label)
        axis.set(xlabel="layer", ylabel="||H - 1 h^T|| / ||H||", title="Rank collapse of pure attention (n = d = 32)")
        axis.legend()
    return "\n".join([*lines, f"{options.out}: collapse.png"])


# ---- 6. Command line ----------------------------------------------------------------------------------------
def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line -> options; a bad value gets one line and exit code 2."""
    parser = Parser(prog="rank.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="a run folder, a checkpoint, or hf:NAME_OR_FOLDER")
    add("--data", help="docs, a file, a folder, or hf:NAME[:CONFIG] [the run's own validation rows; for others docs]")
    add("--val-share", type=float, default=TrainConfig.val_share, help="share of --data to use [%(default)s]")
    add("--tokens", type=int, default=1_000_000, help="at most so many, special tokens included [%(default)s]")
    add("--tau", type=float, nargs="+", default=[0.9], help="one or more; the first is printed and plotted [0.9]")
    add("--plot", choices=CENTERINGS, default="uncentered", help="which to plot [uncentered: the paper's formula]")
    add("--specials", action=argparse.BooleanOptionalAction, default=True, help="count [CLS], [SEP] and their like")
    add("--bootstrap", type=int, default=0, metavar="N", help="95 %% intervals from N resamples of blocks of documents")
    add("--spectrum", action="store_true", help="also write spectrum.csv and spectrum.png")
    add("--theory", action="store_true", help="also compute Lemma 2.1 and both sides of Theorem 2.2")
    add("--collapse", action="store_true", help="draw the rank collapse of pure attention: collapse.png")
    add("--seq-len", type=int, default=512, help="tokens in a row for hf: models [%(default)s, or their limit]")
    add("--batch-size", type=int, default=32, help="rows at a time [%(default)s]")
    add("--seed", type=int, default=0, help="of the masks and resamples [%(default)s]")
    add("--out", type=Path, default=Path("out/rank"), help="folder for rank.json, rank.csv, rank.png [%(default)s]")
    options = parser.parse_args(argv)
    hub = [name for name in options.models if name.startswith("hf:")]
    for flag, sound, fix in (
        ("--tau", all(0 < tau < 1 for tau in options.tau), "use 0 < tau < 1"),
        ("--val-share", 0 < options.val_share <= 1, "use 0 < share <= 1"),
        *((f"--{name}", vars(options)[name.replace("-", "_")] > 0, "use a positive number")
          for name in ("tokens", "batch-size", "seq-len")),
        *((f"--{name}", vars(options)[name] >= 0, "use 0 or a positive number") for name in ("bootstrap", "seed")),
        ("MODEL", options.models or options.collapse, "name a run folder or hf:NAME, or use --collapse"),
        ("MODEL", len(set(options.models)) == len(options.models), "name each model once"),
        ("--theory", not (options.theory and hub), f"for run folders of train.py only, not for {' '.join(hub)}"),
    ):
        if not sound:
            parser.error(f"{flag}: {fix}")
    return options


def analyse_all(options: argparse.Namespace, place: Place) -> None:
    """Measure the models one after the other, print, write and draw."""
    models, spectra = {}, {}
    for name in options.models:
        subject = (load_hub if name.startswith("hf:") else load_ours)(name, options, place)
        models[name], moments = analyse(subject, options, place)
        if options.spectrum:
            spectra |= {(name, layer, curve, centering): m.spectrum(centered).cpu() for curve in CURVES
                        for layer, m in enumerate(moments[curve]) for centering, centered in CENTERINGS.items()}
        if place.rank == 0:
            print(table(name, models[name], options), flush=True)
        if place.rank == 0 and options.theory:
            print(theory(subject, moments, options, place), flush=True)
    if place.rank > 0:
        return
    write_json(options.out / "rank.json", {
        "tau": options.tau, "plotted": options.plot, "mask_rate": MASK_RATE, "specials": options.specials,
        "bootstrap": options.bootstrap, "seed": options.seed, "models": models})
    write_csv(options.out / "rank.csv", *csv_table(models, options))
    draw(models, options)
    if options.spectrum:
        write_spectra(spectra, options)
    if len(models) > 1:
        print(table_3(models, options))
    print("with: all tokens of the text with 15 % [MASK]; without: of the same text unmasked; [MASK]: at masks\n"
          f"{options.out}: rank.json, rank.csv, rank.png ({options.plot})"
          f"{', spectrum.csv, spectrum.png' * options.spectrum}")


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    with clear_errors("rank.py"):
        for name in options.models:  # before the first is measured
            if not name.startswith("hf:") and not Path(name).exists():
                raise UserError(f"{name}: no such run folder or checkpoint")
        place = set_up("fp32")
        torch.set_float32_matmul_precision("highest")  # TF32, as in training, is too coarse for a covariance
        if options.models:
            analyse_all(options, place)
        if options.collapse and place.rank == 0:
            print(draw_collapse(options))
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
