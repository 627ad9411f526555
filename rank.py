"""How many dimensions a text encoder uses: Figure 1 and Table 3 of the paper, for any model.

    python rank.py out/toy out/toy-mlm                     # run folders of train.py or finetune.py, or checkpoints
    python rank.py hf:roberta-base --data PATH --tokens 5000000

The effective rank of H (N, d) is the smallest number of singular values whose squares sum to a share tau of all. Three
curves over the layers 0 (embeddings) to L, of the same text (Figure 1; the second one at L is Table 3):

    with_mask     all tokens, 15 % of them replaced by [MASK] as in MLM: H^l of section 2.2
    without_mask  all tokens of the unmasked text, as downstream tasks have it: H~^l of section 2.2
    mask_only     of the masked text, the representations at [MASK] only: H_M^l, Figure 1(b)

The paper's formula takes the singular values of H itself ("uncentered"); its text speaks of variance ("centered": the
mean row is subtracted first).
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from maelm import CLS, MASK, NUM_SPECIAL, SEP, Encoder, draw_masks
from support.cli import (Parser, UserError, add_flags, clear_errors, explain_out_of_memory, fields_of,
                         require, require_positive)
from support.corpus import Rows, evenly, prepared_corpus, seed_of
from support.documents import VAL_SHARE, documents, in_validation, sources
from support.files import figure, lock_folder, write_json
from support.models import load_encoder
from support.worker import make_worker

CURVES = ("with_mask", "without_mask", "mask_only")
CENTERINGS = {"uncentered": False, "centered": True}
MASK_RATE = 0.15  # section 2.2


# ---- 1. Effective rank: section 2.2 -------------------------------------------------------------------------
def tau_rank(values, tau: float) -> int:
    """The smallest k such that the k first of the values sigma_i^2, (d,) float64 in descending order, hold at least a
    share tau of their sum (rank_tau of section 2.2); 0 if all are 0."""
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}: use 0 < tau < 1")
    if values[0] == 0:  # the largest
        return 0
    reached = values.cumsum(0) >= (tau - 1e-9) * values.sum()  # 9 of 10 equal values are 0.9, despite rounding
    return int((~reached).sum()) + 1


def effective_rank(h, tau: float = 0.9) -> int:
    """rank_tau(H) of H (N, d) of any real dtype, in float64; section 2.2. Raises ValueError for what has none."""
    x = torch.as_tensor(h).double()
    if x.ndim != 2 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError(f"effective_rank: needs finite numbers of shape (N, d), not {tuple(x.shape)}")
    return tau_rank(torch.linalg.svdvals(x) ** 2, tau)


def gram_spectrum(gram):
    """The squared singular values of H from H^T H (d, d) float64, whose eigenvalues they are: (d,), descending."""
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)  # rounding can push them below 0


class Moments:
    """Count, sum and Gram matrix of the rows of H (N, d) in float64, batch by batch; H is never held."""
    count = total = gram = 0  # until the first rows come

    def add(self, h):
        """Include the rows of h (..., d)."""
        if h.device.type == "mps":
            h = h.cpu()  # mps has no float64
        h = h.flatten(0, -2).double()
        self.count += len(h)
        self.total += h.sum(0)
        self.gram += h.T @ h

    def spectrum(self, centered: bool):
        """sigma_i^2 of H, or of H minus its mean row: (d,) float64, descending. UserError for NaN or infinity."""
        gram = self.gram
        if centered:
            gram = gram - torch.outer(self.total, self.total) / self.count
        if not gram.isfinite().all():
            raise UserError("hidden states with NaN or infinity; use another checkpoint")
        # Equal rows minus their mean leave rounding errors, whose flat spectrum would pass for a high rank.
        if gram.trace() <= 1e-12 * self.gram.trace():
            return torch.zeros_like(self.total)
        return gram_spectrum(gram)


# ---- 2. What is measured, on which text ---------------------------------------------------------------------
@dataclass(frozen=True)
class RankConfig:
    """What is measured and how it is shown; every field is a flag. ValueError names a field that is wrong."""
    data: str = ""  # docs, a file, a folder, or hf:NAME[:CONFIG]; without it a run's own validation rows, else docs
    column: str = "text"  # the field of its records that holds the text
    val_share: float = VAL_SHARE  # share of the documents of --data that is used, above 0, at most 1
    tokens: int = 1_000_000  # at most so many, special tokens included
    tau: float = 0.9  # share of the squared singular values, between 0 and 1
    seq_len: int = 512  # tokens in a row for hf: models, or their limit
    batch_size: int = 32  # rows at a time
    seed: int = 0  # of the masks, 0 or more, below 2^63
    device: str = "auto"  # auto | cpu | cuda | mps
    out: Path = Path("out/rank")  # folder for rank.json and rank.png

    def __post_init__(self):
        require_positive(self, "tokens", "seq_len", "batch_size")
        require(self, tau=0 < self.tau < 1, seed=0 <= self.seed < 2 ** 63, val_share=0 < self.val_share <= 1)


class Subject(NamedTuple):
    """What is measured: an encoder, on rows of tokens."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # rows[numbers] is (B, n) int64
    text: str  # where the rows are from
    dim: int
    seq_len: int
    mask: int  # id of [MASK]
    specials: list[int]  # ids of tokens that are never masked
    encoder: Encoder | None = None  # of a model of this repository
    reads_mask: bool = True  # whether it was trained on [MASK]


def subject_of_run(name: str, config: RankConfig, device: torch.device) -> Subject:
    """A model of ours on --data, else on its own validation rows, else (fine-tuned or imported) on docs."""
    encoder, tokenizer, shape, settings = load_encoder(Path(name), device)
    text = config.data or settings.get("data", "docs")
    if config.data or "data" not in settings:
        rows = text_rows(text, tokenizer.encode, ([CLS], [SEP], []), shape.seq_len, config)
    else:
        rows = Rows(prepared_corpus(settings, tokenizer), "val", shape.seq_len)
    positions = torch.arange(shape.seq_len, device=device)[None]  # (1, n)

    def encode(tokens):
        return encoder(tokens.to(device), positions, all_layers=True)

    reads_mask = shape.mask_in_encoder > 0 and shape.encoder_fill == "mask"
    return Subject(name, encode, rows, text, shape.encoder_dim, shape.seq_len, MASK, list(range(NUM_SPECIAL)), encoder,
                   reads_mask)


def subject_of_hub(name: str, config: RankConfig, device: torch.device) -> Subject:
    """Any encoder of transformers' AutoModel with its own tokenizer, on the validation documents of --data or docs."""
    from support.convert import open_hub  # here: it needs transformers
    model, tokenizer, longest = open_hub(name)
    model = model.to(device)

    def encode_text(text: str) -> list[int]:
        return tokenizer(text.replace(tokenizer.mask_token, ""), add_special_tokens=False, verbose=False)["input_ids"]

    def encode(tokens):
        tokens = tokens.to(device)
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        # The last of hidden_states lacks the final LayerNorm in some families.
        return [*out.hidden_states[:-1], out.last_hidden_state]

    text, n = config.data or "docs", min(config.seq_len, longest)
    rows = text_rows(text, encode_text, frame_of(tokenizer), n, config)
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text, model.config.hidden_size, n, tokenizer.mask_token_id, specials)


Frame = tuple[list[int], list[int], list[int]]  # ids of special tokens: before a row, between documents, after a row


def frame_of(tokenizer) -> Frame:
    """The frame that a tokenizer of transformers makes: of RoBERTa's, which turns "a" into `<s> a </s>`, the ids of
    `<s>`, `</s>` and `</s>`."""
    letter, framed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = [i for i in range(len(framed)) if framed[i:i + len(letter)] == letter]
    start = starts[0] if starts else 0  # some tokenizers write it in another way there
    separator = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    between = [] if separator is None else [separator]
    return framed[:start], between, framed[start + len(letter):]


def text_rows(source: str, encode: Callable[[str], np.ndarray | list[int]], frame: Frame, n: int, config: RankConfig):
    """Validation documents as rows (rows, n) int64, each in the frame."""
    before, between, after = frame
    room = n - len(before) - len(after)
    texts = (text for text in documents(sources(source, config.column)) if in_validation(text, config.val_share))
    ids = []
    for text in tqdm(texts, "tokenizing", unit="text", leave=False, disable=None):
        ids += [*encode(text), *between]
        if len(ids) >= config.tokens:
            break
    count = min(len(ids) // room, math.ceil(config.tokens / n)) if room > 0 else 0
    if count == 0:
        raise UserError(f"--data {source}: {len(ids)} validation tokens are less than a row of {n}; use --val-share 1")
    rows = [[*before, *ids[i * room:(i + 1) * room], *after] for i in range(count)]
    return np.array(rows, np.int64)


# ---- 3. Measuring -------------------------------------------------------------------------------------------
@torch.no_grad()
def measure(subject: Subject, config: RankConfig) -> dict[str, list[Moments]]:
    """Curve -> the moments of layers 0 to L. UserError if there is too little text."""
    rows = evenly(subject.rows, math.ceil(config.tokens / subject.seq_len))
    count, n = rows.shape
    k, least = round(MASK_RATE * n), 10 * subject.dim
    if count * k < least:
        raise UserError(f"{subject.name}: {count * k:,} [MASK] are fewer than 10 d = {least:,}, too few for a rank; "
                        "raise --tokens, or give more text: --data, --val-share 1")
    moments = {}
    for start in tqdm(range(0, count, config.batch_size), subject.name, leave=False, disable=None):
        tokens = rows[start:start + config.batch_size]  # (B, n)
        maskable = ~torch.isin(tokens, torch.tensor(subject.specials))
        generator = torch.Generator().manual_seed(seed_of(config.seed, start))
        try:
            chosen = draw_masks(maskable, k, generator)
        except ValueError as error:
            raise UserError(f"{subject.name}: rows of too few words ({error}); use another --data") from error
        masked = torch.zeros_like(maskable).scatter(1, chosen, True)
        with_mask = subject.encode(tokens.masked_fill(masked, subject.mask))
        at_masks = [h[masked.to(h.device)] for h in with_mask]
        for curve, states in zip(CURVES, (with_mask, subject.encode(tokens), at_masks)):
            layers = moments.setdefault(curve, [Moments() for _ in states])
            for layer, h in zip(layers, states):
                layer.add(h)
    return moments


def ranks_by_layer(subject: Subject, moments: dict[str, list[Moments]], config: RankConfig) -> dict:
    """A model's entry of rank.json, from what `measure` returns: for each layer ranks by centering, curve and tau."""
    layers = []
    for layer in range(len(moments["with_mask"])):
        ranks = {centering: {} for centering in CENTERINGS}
        for centering, centered in CENTERINGS.items():
            for curve in CURVES:
                values = moments[curve][layer].spectrum(centered)
                ranks[centering][curve] = {str(config.tau): tau_rank(values, config.tau)}
        layers.append(ranks)
    return {"d": subject.dim, "n": {curve: moments[curve][0].count for curve in CURVES}, "text": subject.text,
            "trained_on_mask": subject.reads_mask, "layers": layers}


# ---- 4. Table and figure ------------------------------------------------------------------------------------
def size_of(model: dict) -> str:
    """How many tokens were measured, and of how many dimensions."""
    return f"{model['n']['without_mask']:,} tokens ({model['n']['mask_only']:,} [MASK]), d = {model['d']}"


def format_table(name: str, model: dict, tau: float) -> str:
    """The ranks of a model at one tau, by layer, curve and centering."""
    lines = [f"{name}: rank_{tau} of {size_of(model)}, text {model['text']}",
             "            uncentered (formula) |        centered (variance)",
             "layer     with  without   [MASK] |     with  without   [MASK]"]
    for number, layer in enumerate(model["layers"]):
        halves = []
        for centering in CENTERINGS:
            halves.append("".join(f"{layer[centering][curve][str(tau)]:>9}" for curve in CURVES))
        lines.append(f"{number:>5}{' |'.join(halves)}")
    if not model["trained_on_mask"]:
        lines.append("its encoder never read [MASK] in training: that is a token unknown to it")
    return "\n".join(lines)


LINES = {"with_mask": (0, "o-", "input with [MASK]"), "without_mask": (0, "s--", "input without [MASK]"),
         "mask_only": (1, "^-", "[MASK] vectors")}  # curve: panel, style, label


def draw(models: dict[str, dict], config: RankConfig):
    """rank.png as Figure 1: (a) rank with and without [MASK] in the input, (b) rank of [MASK], by layer."""
    tau = config.tau
    with figure(config.out / "rank.png", panels=2) as (drawn, axes):
        for number, (name, model) in enumerate(models.items()):
            for curve, (panel, style, label) in LINES.items():
                ranks = [layer["uncentered"][curve][str(tau)] for layer in model["layers"]]
                axes[panel].plot(ranks, style, color=f"C{number}", label=f"{name}, {label}")
        for axis, title in zip(axes, ("(a) all tokens", "(b) [MASK] tokens")):
            axis.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, tau = {tau}", title=title)
            axis.set_ylim(bottom=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small")
        sizes = "\n".join(f"{name}: {size_of(model)}" for name, model in models.items())
        drawn.supxlabel(f"Dimensions that hold {tau} of the squared singular values.\n{sizes}", fontsize="small")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def read_options(argv) -> tuple[list[str], RankConfig]:
    """Command line -> names of models, and what to do."""
    parser = Parser("rank.py", __doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a run folder, a checkpoint, or hf:NAME_OR_FOLDER")
    add_flags(parser, RankConfig, {})
    options = parser.parse_args(argv)
    try:
        config = RankConfig(**fields_of(RankConfig, vars(options)))
    except ValueError as error:
        parser.error(str(error))
    for name in options.models:
        if not name.startswith("hf:") and not Path(name).exists():  # before the first is measured
            parser.error(f"{name}: no such run folder or checkpoint")
    return options.models, config


def main(argv=None):
    names, config = read_options(argv)
    with clear_errors("rank.py"), lock_folder(config.out):
        device = make_worker("fp32", config.device).device
        torch.set_float32_matmul_precision("highest")  # TF32, as in training, is too coarse for a covariance
        models = {}
        for name in names:
            open_model = subject_of_hub if name.startswith("hf:") else subject_of_run
            with explain_out_of_memory("--batch-size"):
                subject = open_model(name, config, device)
                models[name] = ranks_by_layer(subject, measure(subject, config), config)
            print(format_table(name, models[name], config.tau))
        write_json(config.out / "rank.json", {"tau": [config.tau], "models": models})
        draw(models, config)
        print("with: all tokens of the text with 15 % [MASK]; without: of the same text unmasked; [MASK]: at masks\n"
              f"{config.out}: rank.json, rank.png")


if __name__ == "__main__":
    main()
