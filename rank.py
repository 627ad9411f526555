"""How many dimensions a text encoder uses: Figure 1 and Table 3 of the paper, for your models and the Hub's.

    python rank.py out/toy out/toy-mlm                     # run folders of train.py or finetune.py, or checkpoints
    python rank.py hf:roberta-base --data PATH --tokens 5000000
    python rank.py out/toy out/toy-mlm --probe docs        # and what can be read from each layer

The effective rank of H (N, d) is the smallest number of singular values whose squares make up a fraction tau of the
total. It is measured at layers 0 (embeddings) to L, in three ways (Figure 1; Table 3 uses the second way at L), and
with --controls in two more, which the paper does not have:

    with_mask     all tokens of the text with 15% [MASK], as an MLM reads it: H^l in section 2.2
    without_mask  all tokens of the unmasked text, as a downstream task reads it: H~^l in section 2.2
    mask_only     only the vectors at [MASK] in the masked text: H_M^l, Figure 1(b)
    with_random   all tokens of the text with random tokens in place of [MASK]
    token_only    only the vectors at one ordinary token in place of every [MASK]

The paper's formula uses the singular values of H itself ("uncentered"), but the text speaks of variance ("centered":
the mean vector is subtracted first). In our small presets, which have pre-LN, layers 1 to L - 1 are measured before
any LayerNorm. support/subjects.py loads the models and their texts.
"""
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pandas
import torch
from torch import nn

from maelm import Config, draw_masks
from support.model import text_states
from support.program import Parser, UserError, clear_errors, compare, figure, path_of, progress, read_json
from support.program import short_name, write_json
from support.results import draw_steps
from support.subjects import Subject, open_subjects
from support.tasks import TASKS

CENTERINGS = {"uncentered": False, "centered": True}
MASK_RATE = Config.mask_rate  # of the masked text, whatever the rate in training: 15% (section 2.2)
PROBE_TASKS = [name for name, task in TASKS.items() if task.kind == "classification" and name != "custom"]
VECTORS_PER_DIM = 10  # at least, by a rule of thumb: too few would cap the rank


# ---- 1. Effective rank: section 2.2 --------------------------------------------------------------
def tau_rank(values, tau: float) -> int:
    """The smallest k such that the first k values sigma_i^2, (K,) float64 in descending order, make
    up at least a fraction tau of the sum of all K (rank_tau of section 2.2); 0 if all are 0. Raises
    ValueError for a bad tau."""
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}: use 0 < tau < 1")
    if values[0] == 0:  # the largest
        return 0
    # 1e-9, because rounding may put 9 of 10 equal values just below 0.9.
    enough = (tau - 1e-9) * values.sum()
    return int(torch.searchsorted(values.cumsum(0), enough)) + 1


def effective_rank(h, tau: float = 0.9) -> int:
    """rank_tau(H) of H (N, d) in float64, by its definition in section 2.2. Raises ValueError if H
    is not 2-D, empty or not finite."""
    x = torch.as_tensor(h).double()
    if x.ndim != 2 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError(f"effective_rank: needs finite numbers of shape (N, d), not {tuple(x.shape)}")
    return tau_rank(torch.linalg.svdvals(x) ** 2, tau)


class Moments:
    """The count, sum and Gram matrix of the rows of H (N, d) in float64. They give its rank, so H
    is not kept."""
    def __init__(self):
        self.count = 0
        self.total = 0.0  # (d,) after the first add
        self.gram = 0.0  # (d, d)

    def add(self, h):
        """Include the rows of h (..., d)."""
        if h.device.type == "mps":
            h = h.cpu()  # mps has no float64
        h = h.flatten(0, -2).double()
        self.count += len(h)
        self.total += h.sum(0)
        self.gram += h.T @ h

    def spectrum(self, centered: bool):
        """sigma_i^2 of H, or of H minus its mean row: (d,) float64, descending. Raises UserError if
        H is not finite."""
        if not self.gram.isfinite().all():
            raise UserError("the hidden states contain NaN or infinity; use another checkpoint")
        gram = self.gram
        if centered:
            gram = gram - torch.outer(self.total, self.total) / self.count
            # If all rows are equal, centering leaves only rounding errors, which would look like a high rank.
            if gram.trace() <= 1e-12 * self.gram.trace():
                return torch.zeros_like(self.total)
        squares = torch.linalg.eigvalsh(gram).flip(0)  # the eigenvalues of H^T H
        return squares.clamp(min=0)  # rounding can push them below 0


@torch.no_grad()
def encoder_ranks(encoder: nn.Module, batches: Iterable[tuple]) -> dict[str, int] | None:
    """The ranks (tau = 0.9) of an encoder's last layer, uncentered and centered, for the batches of
    Encoded.by_length. None if there are too few vectors, or if they are not finite."""
    encoder.eval()
    moments = Moments()
    for _, tokens, padding, _ in batches:
        moments.add(text_states(encoder, tokens, padding)[-1][~padding])
    if moments.count < VECTORS_PER_DIM * len(moments.total) or not moments.gram.isfinite().all():
        return None
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


# ---- 2. Measuring a model ------------------------------------------------------------------------
@dataclass(frozen=True)
class RankOptions:
    """Settings of a measurement; every field is a flag."""
    data: str = ""  # docs, a file, a folder, or hf:NAME[:CONFIG]; default: the text of the run, or docs
    column: str = ""  # field that holds the text of a record; default: the run's field, or text
    val_share: float = 0.0  # fraction of the documents to use; 0 means the run's validation share, or 1%
    tokens: int = 1_000_000  # largest number of tokens to read, with special tokens
    tau: float = 0.9  # fraction of the sum of squared singular values
    seq_len: int = 512  # tokens per sequence for hf: models, unless their limit is lower
    batch_size: int = 32  # sequences per batch
    seed: int = 0  # seed of the masks
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to measure
    steps: bool = False  # measure all checkpoints of one run, and draw ranks and scores over its steps: Figure 3
    controls: bool = False  # also measure the text with random tokens, or one token, in place of [MASK]
    probe: Literal["", *PROBE_TASKS] = ""  # also probe each layer for the labels of a task of finetune.py, such as docs


class Curve(NamedTuple):
    """Which of an encoder's vectors are measured, and how they are shown."""
    text: str  # the name of the text that the encoder reads; see texts_for
    masked_only: bool  # whether only the vectors at masked positions count: Figure 1(b)
    style: str
    label: str  # in the figure


CURVES = {
    "with_mask": Curve("masked", False, "o-", "input with [MASK]"),
    "without_mask": Curve("unmasked", False, "s--", "input without [MASK]"),
    "mask_only": Curve("masked", True, "^-", "[MASK] vectors"),
    "with_random": Curve("random", False, "x:", "input with random tokens"),  # controls
    "token_only": Curve("one token", True, "x:", "vectors at one ordinary token"),
}


def texts_for(subject: Subject, rows, maskable, masks, options: RankOptions) -> dict:
    """The texts (N, n) int64 that the encoder reads, by name; they differ at the masked positions.
    Random tokens are drawn from the text itself, and the ordinary token is its most frequent
    one."""
    texts = {"masked": rows.masked_fill(masks, subject.mask_id), "unmasked": rows}
    if options.controls:
        real = rows[maskable]
        drawn = torch.randint(len(real), rows.shape, generator=torch.Generator().manual_seed(options.seed))
        texts["random"] = torch.where(masks, real[drawn], rows)
        texts["one token"] = rows.masked_fill(masks, real.mode().values)
    return texts


@torch.no_grad()
def measure(subject: Subject, options: RankOptions) -> dict[str, list[Moments]]:
    """The moments of layers 0 to L for each curve. Raises UserError if there is too little text."""
    rows = subject.rows
    count, n = rows.shape
    m = round(MASK_RATE * n)
    mask_count = count * m
    example = subject.encode(rows[:1])  # H^0 ... H^L, (1, n, d) each, to get L and d
    least = VECTORS_PER_DIM * example[-1].shape[-1]
    if mask_count < least:
        raise UserError(f"{subject.name}: {mask_count:,} [MASK] tokens, fewer than {VECTORS_PER_DIM} d = {least:,}, "
                        "the least for a rank; raise --tokens, or give more text: --data, --val-share 1")
    maskable = ~torch.isin(rows, torch.tensor(subject.specials))
    # Masks of all sequences are drawn together, so that the batch size does not matter.
    positions = draw_masks(maskable, m, torch.Generator().manual_seed(options.seed))  # (N, m)
    masks = torch.zeros_like(maskable).scatter(1, positions, True)  # (N, n)
    texts = texts_for(subject, rows, maskable, masks, options)
    moments = {curve: [Moments() for _ in example] for curve in CURVES if CURVES[curve].text in texts}
    for start in progress(range(0, count, options.batch_size), subject.name):
        batch = slice(start, start + options.batch_size)
        is_masked = masks[batch].to(example[0].device)  # (B, n)
        states = {text: subject.encode(sequences[batch]) for text, sequences in texts.items()}
        for curve, layers in moments.items():
            look = CURVES[curve]
            for moments_of_layer, h in zip(layers, states[look.text]):  # H^l (B, n, d)
                moments_of_layer.add(h[is_masked] if look.masked_only else h)
    return moments


def model_ranks(subject: Subject, moments: dict[str, list[Moments]], tau: float) -> dict:
    """Turn the result of `measure` into an entry of rank.json, with the ranks of layers 0 to L:

    {"step": 1900, "text": "docs", "trained_on_mask": true, "d": 128, "n": {"with_mask": 64000, ...},
     "uncentered": {"with_mask": [61, 73, 78, 72], "without_mask": [...], "mask_only": [...]}, "centered": {...}}"""
    entry = {"step": subject.step, "text": subject.text, "trained_on_mask": subject.reads_mask,
             "d": len(moments["with_mask"][-1].total),
             "n": {curve: layers[-1].count for curve, layers in moments.items()}}
    for name, centered in CENTERINGS.items():
        entry[name] = {}
        for curve, layers in moments.items():
            entry[name][curve] = [tau_rank(layer.spectrum(centered), tau) for layer in layers]
    return entry


# ---- 3. A table, and Figure 1 --------------------------------------------------------------------
def table(name: str, entry: dict, tau: float) -> str:
    """An entry of rank.json as text: the ranks by layer, centering and curve."""
    n = entry["n"]
    parts = {part: pandas.DataFrame(entry[part]) for part in (*CENTERINGS, "probe") if part in entry}
    columns = pandas.concat(parts, axis=1)
    lines = [f"{name}: rank_{tau} of {n['without_mask']:,} tokens ({n['mask_only']:,} [MASK]), d = {entry['d']}, text "
             f"{entry['text']}", columns.rename_axis("layer").round(1).to_string()]
    if not entry["trained_on_mask"]:
        lines.append("its encoder never read [MASK] in training, so it does not know this token")
    return "\n".join(lines)


def draw(entries: dict[str, dict], tau: float, task: str, path: Path):
    """Draw the uncentered ranks by layer: (a) of all tokens of a text, (b) of vectors at [MASK] or
    at a control. More panels have the scores of probes."""
    probes = next(iter(entries.values())).get("probe", {})
    with figure(path, panels=2 + len(probes)) as (left, right, *others):
        for number, (name, entry) in enumerate(entries.items()):
            for curve, ranks in entry["uncentered"].items():
                look = CURVES[curve]
                label = f"{look.label}: {name}"
                axis = right if look.masked_only else left
                axis.plot(ranks, look.style, color=f"C{number}", label=label)
            for pooling, axis in zip(probes, others):
                axis.plot(entry["probe"][pooling], "o-", color=f"C{number}", label=name)
                axis.set(title=f"probe of {pooling}".replace("cls", "[CLS]"), ylabel=f"score on {task}, %")
        for axis, title in ((left, "(a) all tokens"), (right, "(b) [MASK] tokens")):
            axis.set(ylabel=f"effective rank, tau = {tau}", title=title)
            axis.set_ylim(bottom=0)
        for axis in (left, right, *others):
            axis.set(xlabel="layer (0 = embeddings)")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below all curves


# ---- 4. Command line -----------------------------------------------------------------------------
def main(argv=None):
    with clear_errors("rank.py"):
        parser = Parser("rank.py", __doc__)
        parser.add_argument("models", nargs="+", metavar="MODEL", help="run folder, checkpoint, random:RUN or hf:MODEL")
        parser.add_argument("--out", type=Path, help="folder for rank.json and rank.png [out/rank-MODEL-MODEL...]")
        parser.add_fields(RankOptions, {})
        flags, given = parser.read(argv)
        options = RankOptions(**given)
        if not 0 < options.tau < 1:
            raise UserError(f"--tau {options.tau}: use 0 < tau < 1")
        out = flags.out or Path("out", "-".join(["rank", *map(short_name, flags.models)])[:100])
        settings = asdict(options) | {"models": flags.models}
        if (out / "rank.json").is_file():  # other settings are refused
            compare(out, read_json(out / "rank.json")["settings"], settings, settings.keys() - {"device"})
        entries = {}
        for subject in open_subjects(flags.models, options):
            entry = model_ranks(subject, measure(subject, options), options.tau)
            if options.probe:
                from support.probe import scores_by_layer  # here, because its code is also homework
                entry["probe"] = scores_by_layer(subject.name, options.probe, subject.device)
            print(table(subject.name, entry, options.tau))
            entries[subject.name] = entry
            # Now, because another model may fail.
            write_json(out / "rank.json", {"tau": options.tau, "settings": settings, "models": entries})
        if options.steps:
            draw_steps(entries, options.tau, path_of(flags.models[0]), out / "rank.png")
        else:
            draw(entries, options.tau, options.probe, out / "rank.png")
        print(f"{out}: rank.json, rank.png")


if __name__ == "__main__":
    main()
