"""How many dimensions a text encoder uses: Figure 1 and Table 3 of the paper, for your models and the Hub's.

    python rank.py out/toy out/toy-mlm                     # run folders of train.py or finetune.py, or checkpoints
    python rank.py hf:roberta-base --data PATH --tokens 5000000

The effective rank of H (N, d) is the smallest number of singular values whose squares make up a fraction tau of the
total. It is measured at layers 0 (embeddings) to L, in three ways (Figure 1; Table 3 uses the second way at L):

    with_mask     all tokens of the text with 15% [MASK], as an MLM reads it: H^l in section 2.2
    without_mask  all tokens of the unmasked text, as a downstream task reads it: H~^l in section 2.2
    mask_only     only the vectors at [MASK] in the masked text: H_M^l, Figure 1(b)

The paper's formula uses the singular values of H itself ("uncentered"), but the text speaks of variance ("centered":
the mean vector is subtracted first). support/hub/subjects.py loads the models and their texts.
"""
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from maelm import draw_masks
from support.hub.subjects import Subject, subject_of_hub, subject_of_run
from support.program.cli import (Parser, UserError, add_flags, clear_errors, fields_of, path_of, printable, require,
                                 say, short_name)
from support.program.files import code_hash, compare, figure, lock_folder, read_json, write_json
from support.program.worker import make_worker



class Curve(NamedTuple):
    """A curve of Figure 1."""
    text: str  # name of the text that the encoder reads; see texts_for
    masked_only: bool  # whether only the vectors at masked positions count
    panel: int  # of the figure
    style: str  # of the line in the figure
    label: str  # in the figure
    column: str  # heading in the table


CURVES = {
    "with_mask": Curve("masked", False, 0, "o-", "input with [MASK]", "with"),
    "without_mask": Curve("unmasked", False, 0, "s--", "input without [MASK]", "without"),
    "mask_only": Curve("masked", True, 1, "^-", "[MASK] vectors", "[MASK]"),
}
CENTERINGS = {"uncentered": False, "centered": True}
# The code that measures. rank.json never mixes measurements of different code.
CODE = ("maelm.py", "rank.py", "support/hub/subjects.py", "support/model/*.py", "support/text/*.py")
MASK_RATE = 0.15  # section 2.2
ENOUGH = 10  # vectors per dimension, by a rule of thumb: too few would cap the rank


# ---- 1. Effective rank: section 2.2 -------------------------------------------------------------------------
def tau_rank(values, tau: float) -> int:
    """The smallest k such that the first k values sigma_i^2, (d,) float64 in descending order, make up at least a
    fraction tau of the sum of all d (rank_tau of section 2.2); 0 if all are 0."""
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}: use 0 < tau < 1")
    if values[0] == 0:  # the largest
        return 0
    # 1e-9, because rounding may put 9 of 10 equal values just below 0.9.
    reached = values.cumsum(0) >= (tau - 1e-9) * values.sum()
    return int((~reached).sum()) + 1


def effective_rank(h, tau: float = 0.9) -> int:
    """rank_tau(H) of H (N, d) in float64, by its definition in section 2.2. Raises ValueError if H is empty or not
    finite."""
    x = torch.as_tensor(h).double()
    if x.ndim != 2 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError(f"effective_rank: needs finite numbers of shape (N, d), not {tuple(x.shape)}")
    return tau_rank(torch.linalg.svdvals(x) ** 2, tau)


class Moments:
    """The count, sum and Gram matrix of the rows of H (N, d) in float64; `measure` needs no more, so H is not kept."""
    def __init__(self):
        self.count, self.total, self.gram = 0, 0.0, 0.0  # later: an int, (d,) and (d, d)

    def add(self, h):
        """Include the rows of h (..., d)."""
        if h.device.type == "mps":
            h = h.cpu()  # mps has no float64
        h = h.flatten(0, -2).double()
        self.count += len(h)
        self.total += h.sum(0)
        self.gram += h.T @ h

    def spectrum(self, centered: bool):
        """sigma_i^2 of H, or of H minus its mean row: (d,) float64, descending. Raises UserError if H has NaN."""
        gram = self.gram
        if centered:
            gram = gram - torch.outer(self.total, self.total) / self.count
        if not gram.isfinite().all():
            raise UserError("the hidden states contain NaN or infinity; use another checkpoint")
        # Centering equal rows leaves only rounding errors, whose flat spectrum would look like a high rank.
        if gram.trace() <= 1e-12 * self.gram.trace():
            return torch.zeros_like(self.total)
        squares = torch.linalg.eigvalsh(gram).flip(0)  # the eigenvalues of H^T H
        return squares.clamp(min=0)  # rounding can push them below 0


# ---- 2. Measuring a model -----------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class RankConfig:
    """Settings of a measurement; every field is a flag. Raises ValueError if a value is not allowed."""
    data: str = ""  # docs, a file, a folder, or hf:NAME[:CONFIG]; default: the text of the run, or docs
    column: str = ""  # field that holds the text of a record; default: the run's, or text
    val_share: float = 0.0  # fraction of the documents to use; 0 means the run's validation share, or 1%
    tokens: int = 1_000_000  # largest number of tokens to read, including special tokens
    tau: float = 0.9  # fraction of the sum of squared singular values
    seq_len: int = 512  # tokens per sequence for hf: models, unless their limit is lower
    batch_size: int = 32  # sequences per batch
    seed: int = 0  # seed of the masks
    device: str = "auto"  # auto | cpu | cuda | mps
    out: Path = Path()  # folder for rank.json and rank.png; default: out/rank-MODEL-MODEL...

    def __post_init__(self):
        require(
            self,
            *[(name, getattr(self, name) >= 1, "1 or more") for name in ("tokens", "seq_len", "batch_size")],
            ("tau", 0 < self.tau < 1, "a number between 0 and 1"),
            ("seed", 0 <= self.seed < 2 ** 63, "0 or more, below 2^63"),
            ("val_share", 0 <= self.val_share <= 1, "0 to 1"))


def masks_for(subject: Subject, tokens, seed: int):
    """Choose 15% of the positions in each sequence of `tokens` (B, n), but no special tokens -> (B, n) bool."""
    maskable = ~torch.isin(tokens, torch.tensor(subject.specials))
    generator = torch.Generator().manual_seed(seed)
    positions = draw_masks(maskable, round(MASK_RATE * tokens.shape[1]), generator)  # (B, m)
    return torch.zeros_like(maskable).scatter(1, positions, True)


def texts_for(subject: Subject, tokens, masked) -> dict:
    """The texts (B, n) int64 that the encoder reads, by name, given tokens (B, n) int64 and masked (B, n) bool."""
    return {"masked": tokens.masked_fill(masked, subject.mask), "unmasked": tokens}


@torch.no_grad()
def measure(subject: Subject, config: RankConfig) -> dict[str, list[Moments]]:
    """The moments of layers 0 to L for each curve. Raises UserError if there is too little text."""
    rows = subject.sample(config.tokens)  # (N, n) int64
    count, n = rows.shape
    states = subject.encode(rows[:1])  # H^0 ... H^L, (1, n, d) each, to get L and d
    vectors, least = count * round(MASK_RATE * n), ENOUGH * states[-1].shape[-1]
    if vectors < least:
        raise UserError(f"{subject.name}: {vectors:,} [MASK] are fewer than {ENOUGH} d = {least:,}, which a "
                        "rank needs; raise --tokens, or give more text: --data, --val-share 1")
    moments = {curve: [Moments() for _ in states] for curve in CURVES}
    masks = masks_for(subject, rows, config.seed)  # of all sequences, so that the batch size does not matter
    for start in tqdm(range(0, count, config.batch_size), subject.name, leave=False, disable=None):
        batch = slice(start, start + config.batch_size)
        tokens, masked = rows[batch], masks[batch]  # (B, n)
        for text, read in texts_for(subject, tokens, masked).items():
            states = subject.encode(read)
            for curve in [name for name in CURVES if CURVES[name].text == text]:
                for layer, h in enumerate(states):
                    moments[curve][layer].add(h[masked.to(h.device)] if CURVES[curve].masked_only else h)
    return moments


def model_ranks(subject: Subject, moments: dict[str, list[Moments]], tau: float) -> dict:
    """Turn the result of `measure` into an entry of rank.json: a list of L + 1 ranks for each centering and curve."""
    entry = {"text": subject.text, "trained_on_mask": subject.reads_mask, "d": len(moments["with_mask"][-1].total),
             "n": {curve: layers[-1].count for curve, layers in moments.items()}}
    for centering, centered in CENTERINGS.items():
        entry[centering] = {curve: [tau_rank(layer.spectrum(centered), tau) for layer in layers]
                            for curve, layers in moments.items()}
    return entry


# ---- 3. Table and figure ------------------------------------------------------------------------------------
def table(name: str, entry: dict, tau: float) -> str:
    """An entry of rank.json as text: the ranks by layer, centering and curve."""
    n = entry["n"]
    width = 9 * len(CURVES)
    columns = "".join(f"{curve.column:>9}" for curve in CURVES.values())
    lines = [f"{name}: rank_{tau} of {n['without_mask']:,} tokens ({n['mask_only']:,} [MASK]), d = {entry['d']}, text "
             f"{entry['text']}",
             f"     {'uncentered (formula)':>{width}} |{'centered (variance)':>{width}}",
             f"layer{columns} |{columns}"]
    for layer in range(len(entry["uncentered"]["with_mask"])):
        halves = ["".join(f"{entry[centering][curve][layer]:>9}" for curve in CURVES) for centering in CENTERINGS]
        lines.append(f"{layer:>5}{' |'.join(halves)}")
    if not entry["trained_on_mask"]:
        lines.append("its encoder never read [MASK] in training, so it does not know this token")
    return "\n".join(lines)


def draw(entries: dict[str, dict], config: RankConfig):
    """Write rank.png as Figure 1: (a) rank with and without [MASK] in the input, (b) rank of [MASK], by layer."""
    with figure(config.out / "rank.png", panels=2) as (_, axes):
        for number, (name, entry) in enumerate(entries.items()):
            for key, curve in CURVES.items():
                label = f"{printable(name)}, {curve.label}"
                axes[curve.panel].plot(entry["uncentered"][key], curve.style, color=f"C{number}", label=label)
        for axis, title in zip(axes, ("(a) all tokens", "(b) [MASK] tokens")):
            axis.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, tau = {config.tau}", title=title)
            axis.set_ylim(bottom=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small")


# ---- 4. Command line ----------------------------------------------------------------------------------------
def main(argv=None):
    parser = Parser("rank.py", __doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a run folder, a checkpoint, or hf:NAME_OR_FOLDER")
    add_flags(parser, RankConfig, {})
    options = parser.parse_args(argv)
    try:
        config = RankConfig(**fields_of(RankConfig, vars(options)))
    except ValueError as error:
        parser.error(str(error))
    for name in options.models:
        if not name.startswith("hf:") and not path_of(name).exists():  # checked before the first measurement
            parser.error(f"{name}: no such run folder or checkpoint; make one with train.py, or name hf:MODEL")
    if config.out == Path():
        config = replace(config, out=Path("out", "-".join(["rank", *map(short_name, options.models)])))
    with clear_errors("rank.py"), lock_folder(config.out, sign="rank.json"):
        path = config.out / "rank.json"
        settings = asdict(config) | {"models": options.models, "out": str(config.out), "code": code_hash(*CODE)}
        before = read_json(path) if path.is_file() else {"settings": settings, "models": {}}
        compare(config.out, before["settings"], settings, may_change=["out", "device", "batch_size"])
        entries = before["models"]  # kept in case a model can no longer be measured
        device = make_worker("fp32", config.device).device
        for name in options.models:
            open_subject = subject_of_hub if name.startswith("hf:") else subject_of_run
            subject = open_subject(name, config, device)
            entries[name] = model_ranks(subject, measure(subject, config), config.tau)
            write_json(path, {"tau": config.tau, "settings": settings, "models": entries})  # another model may fail
            say(table(name, entries[name], config.tau))
        draw(entries, config)
        say(f"{config.out}: rank.json, rank.png")


if __name__ == "__main__":
    main()
