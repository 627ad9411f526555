"""Pre-training, from a laptop to many machines.

    python train.py                                         # a true MAE-LM in minutes, nothing is downloaded
    python train.py --ablation mlm                          # the same for standard MLM; any row of Table 2 works
    torchrun --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of both configurations is a flag. The same command again continues an unfinished run. Everything
random in a step is a function of (seed, step): rows, masks and dropout do not depend on the number of
processes, and a run that was stopped and continued equals one that was not.
"""
import argparse
import ctypes
import inspect
import json
import os
import re
import shutil
import signal
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from data import Parser, Rows, Tokenizer, UserError, atomic, clear_errors, corpus, rows_of_step, seed_of, write_json
from maelm import ABLATIONS, CLS, MAELM, MASK, NUM_SPECIAL, PRESETS, SEP, Block, Config, Corruption, corrupt


# ---- 1. Configuration: Table 4 ------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainConfig:
    """How it is trained. The defaults are the paper's base setting; raises ValueError naming a bad field."""
    data: str = "docs"  # docs, a file, a folder, hf:NAME[:CONFIG], joined by +; or a folder made by data.py
    uncased: bool = True  # lower-case all text
    val_share: float = 0.01  # share of documents held out for validation
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    micro_batch_size: int = 32  # sequences at a time on a device; the rest by accumulation
    max_steps: int = 125_000  # length of the learning-rate schedule
    stop_at: int = 0  # end early with a checkpoint, schedule unchanged; 0 = max_steps
    optimizer: str = "adamw"  # adamw | muon: Muon for the matrices of the layers, AdamW for the rest
    learning_rate: float = 5e-4  # peak, of AdamW
    muon_learning_rate: float = 2e-2  # peak, of Muon
    warmup_steps: int = 10_000  # linear warm-up, then linear decay to 0
    weight_decay: float = 0.01  # of all parameters
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    clip_norm: float = 2.0  # of the gradient over all parameters
    precision: str = "auto"  # auto | fp32 | bf16: of matrix products; auto = bf16 where the hardware has it
    compile: bool = False  # torch.compile the model
    checkpointing: bool = False  # compute each layer again for its gradient: a tenth of the activations, 4/3 the work
    seed: int = 0
    log_interval: int = 100  # steps between lines of log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # validation rows, always the same with the same masks
    checkpoint_interval: int = 10_000  # steps between checkpoints
    keep_checkpoints: int = 2  # how many are kept; 0 = all (Figure 3)
    cache: str = "~/.cache/maelm"  # where tokenized corpora are kept

    def __post_init__(self):
        for field, sound, fix in (
            *((f, getattr(self, f) > 0, "use a positive number") for f in (
                "batch_size", "micro_batch_size", "max_steps", "learning_rate", "muon_learning_rate", "clip_norm",
                "log_interval", "eval_interval", "eval_rows", "checkpoint_interval", "adam_epsilon")),
            *((f, getattr(self, f) >= 0, "use 0 or a positive number") for f in (
                "stop_at", "warmup_steps", "weight_decay", "keep_checkpoints")),
            ("seed", 0 <= self.seed < 2 ** 63, "use 0 <= seed < 2^63"),
            *((f, 0 <= getattr(self, f) < 1, "use 0 <= beta < 1") for f in ("adam_beta1", "adam_beta2")),
            ("val_share", 0 < self.val_share < 1, "use 0 < val_share < 1"),
            ("optimizer", self.optimizer in ("adamw", "muon"), "use adamw or muon"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "use auto, fp32 or bf16"),
            ("warmup_steps", self.warmup_steps <= self.max_steps, f"it exceeds max_steps={self.max_steps}; pass both"),
        ):
            if not sound:
                raise ValueError(f"{field}={getattr(self, field)!r}: {fix}")

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.stop_at or self.max_steps, self.max_steps)


TRAIN_PRESETS = {  # as differences from the defaults; Table 4
    "toy": dict(batch_size=64, micro_batch_size=64, max_steps=1900, optimizer="muon", learning_rate=6e-3,
                muon_learning_rate=3e-2, warmup_steps=100, log_interval=20, eval_interval=100, eval_rows=512,
                checkpoint_interval=500),
    "small": dict(batch_size=256, max_steps=20_000, optimizer="muon", learning_rate=2e-3, warmup_steps=1000,
                  log_interval=20, eval_interval=500, checkpoint_interval=1000),
    "base": dict(),
    "base++": dict(uncased=False, max_steps=2_000_000, learning_rate=2e-4),
    "large++": dict(uncased=False, max_steps=1_000_000, learning_rate=1e-4, clip_norm=1.0),
}
MAY_CHANGE = {"stop_at", "micro_batch_size", "compile", "checkpointing", "log_interval", "eval_interval",
              "checkpoint_interval", "keep_checkpoints", "cache"}  # when a run is continued


def make_config(preset: str = "base", ablation: str = "mae-lm", **flags) -> Config:
    """Default < preset < ablation < flag. Decoder sizes of Table 2 are base's: elsewhere they keep their ratio
    to the encoder, in whole heads, and in whole layers where it divides. Raises ValueError for a bad field."""
    size = Config(**{**PRESETS[preset], **flags, "mask_in_encoder": 1.0})
    change = dict(ABLATIONS[ablation])
    if "decoder_dim" in change:
        heads = round(change["decoder_dim"] / Config.encoder_dim * size.encoder_heads)
        change["decoder_dim"] = heads * (size.encoder_dim // size.encoder_heads)
    layers, rest = divmod(change.get("decoder_layers", 0) * size.encoder_layers, Config.encoder_layers)
    if layers and not rest:
        change["decoder_layers"] = layers
    return Config(**{**PRESETS[preset], **change, **flags})


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for every field of a dataclass, with the comment behind the field as its help."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.M))
    group = parser.add_argument_group(config.__name__)
    for field in fields(config):
        kind = dict(action=argparse.BooleanOptionalAction) if field.type is bool else dict(
            type=field.type, metavar=field.type.__name__.upper())
        text = f"{comments.get(field.name, '')} [{field.default}]".replace("%", "%%").strip()
        group.add_argument("--" + field.name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **kind)


def parse(argv: list[str] | None) -> tuple[Config, TrainConfig, argparse.Namespace]:
    """Command line -> what is computed, how it is trained, and the rest. Default < preset < ablation < flag."""
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="toy", choices=PRESETS, help="section 4.1 and Table 4 [toy]")
    parser.add_argument("--ablation", default="mae-lm", choices=ABLATIONS, help="a row of Table 2 [mae-lm]")
    parser.add_argument("--out", type=Path, help="run folder [out/PRESET, or out/PRESET-ABLATION]")
    parser.add_argument("--resume", action="store_true", help="fail if there is no run to continue")
    parser.add_argument("--estimate", action="store_true", help="print FLOPs, memory and time, and do not train")
    at_hand = int(os.environ.get("WORLD_SIZE", 0)) or max(1, torch.cuda.device_count())
    parser.add_argument("--devices", type=int, default=at_hand, help="for --estimate: how many [%(default)s at hand]")
    parser.add_argument("--peak", type=float, default=312.0, help="for --estimate: TFLOP/s of a device [312, an A100]")
    parser.add_argument("--mfu", type=float, default=0.5, help="for --estimate: the share of it in use [%(default)s]")
    parser.add_argument("--fill-mask", metavar="TEXT", help="predict each [MASK] of TEXT with the model of --init")
    parser.add_argument("--init", type=Path, help="a run folder, for --fill-mask")
    for config in (Config, TrainConfig):
        add_flags(parser, config)
    options = parser.parse_args(argv)
    given = vars(options)
    flags = [{f.name: given[f.name] for f in fields(config) if f.name in given} for config in (Config, TrainConfig)]
    for name in ("devices", "peak", "mfu"):
        if not 0 < given[name] <= (1 if name == "mfu" else 1e6):
            parser.error(f"--{name} {given[name]:g}: use a positive number" + ", at most 1" * (name == "mfu"))
    if options.init and options.fill_mask is None:
        parser.error(f"--init {options.init}: for --fill-mask only; pre-training starts from random weights")
    suffix = "" if options.ablation == "mae-lm" else f"-{options.ablation}"
    options.out = options.out or Path("out") / f"{options.preset}{suffix}"
    try:
        return (make_config(options.preset, options.ablation, **flags[0]),
                TrainConfig(**TRAIN_PRESETS[options.preset] | flags[1]), options)
    except ValueError as error:
        parser.error(str(error))


# ---- 2. Hardware --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where this process computes: its rank of `world` processes, its device, and autocast's dtype."""
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        """A fresh context in which matrix products are in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over all processes."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest of a number over all processes."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX)
        return total.item()


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; elsewhere bf16 is slower than fp32."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and bool({"amx_bf16", "avx512_bf16"} & set(info.read_text().split()))


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: to give each activation back and fault it in again cost 7 % of a toy step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def set_up(precision: str) -> Place:
    """Join the process group if torchrun started this process, and choose device and dtype."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    keep_freed_memory()
    fast = {"cuda": kind == "cuda" and torch.cuda.is_bf16_supported(), "cpu": cpu_has_bf16(), "mps": False}
    bf16 = precision == "bf16" or precision == "auto" and fast[kind]
    return Place(rank, world, device, torch.bfloat16 if bf16 else torch.float32)


# ---- 3. Optimization: Table 4 -------------------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate in step 0 <= step < max_steps: linear warm-up, linear decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def make_optimizers(model: nn.Module, train: TrainConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    """(optimizer, peak learning rate) pairs over all parameters. Weight decay is decoupled and on everything."""
    matrices = [p for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2]
    muon = {id(p) for p in matrices} if train.optimizer == "muon" else set()
    found = [(torch.optim.AdamW([p for p in model.parameters() if id(p) not in muon], lr=train.learning_rate,
                                betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon,
                                weight_decay=train.weight_decay, fused=True), train.learning_rate)]
    if muon:
        found.append((torch.optim.Muon(matrices, lr=train.muon_learning_rate, weight_decay=train.weight_decay),
                      train.muon_learning_rate))
    return found


# ---- 4. Batches: functions of (seed, step) ------------------------------------------------------------------
def batch_of_step(step: int, rows: Rows, config: Config, train: TrainConfig) -> tuple[Tensor, Corruption]:
    """Tokens (batch_size, n) int64 of a step and their masks, for all processes together."""
    tokens = torch.from_numpy(rows[rows_of_step(train.seed, step, train.batch_size, len(rows))])
    return tokens, corrupt(tokens, config, torch.Generator().manual_seed(seed_of(train.seed, step)))


def piece(batch: tuple[Tensor, Corruption], start: int, size: int, device: torch.device) -> tuple[Tensor, Corruption]:
    """Rows start ... start + size - 1 of a batch, on a device."""
    tokens, *corruption = (x[start:start + size].to(device, non_blocking=True) for x in (batch[0], *batch[1]))
    return tokens, Corruption(*corruption)


def micro_batch(train: TrainConfig, world: int) -> int:
    """Sequences at a time on each of `world` devices. UserError if the batch is not a whole number of them."""
    if train.batch_size % world:
        raise UserError(f"batch_size={train.batch_size} is not a multiple of {world} processes; change --batch-size or "
                        "their number")
    size = min(train.micro_batch_size, train.batch_size // world)
    if train.batch_size % (size * world):
        raise UserError(f"batch_size={train.batch_size} is not a multiple of micro_batch_size={size} times {world} "
                        "processes; change --micro-batch-size")
    return size


def train_step(model: nn.Module, optimizers: list, batch: tuple[Tensor, Corruption], step: int,
               train: TrainConfig, place: Place) -> Tensor:
    """One optimizer step; returns this process's share of the loss, a scalar. Every row has the same number of
    masks and every micro-batch the same number of rows, so the mean of means is the mean over masked tokens."""
    size = micro_batch(train, place.world)
    count = train.batch_size // size // place.world
    total = torch.zeros((), device=place.device)
    for i in range(count):
        number = i * place.world + place.rank  # of this micro-batch in the batch
        torch.manual_seed(seed_of(train.seed, step, number))  # for dropout
        waiting = model.no_sync() if place.world > 1 and i < count - 1 else nullcontext()
        with waiting:
            with place.autocast():
                loss = model(*piece(batch, number * size, size, place.device)) / count
            loss.backward()
        total += loss.detach()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm, error_if_nonfinite=True)
    except RuntimeError as error:
        raise UserError(f"step {step}: the gradient is not finite; start again with a lower "
                        "--learning-rate or --clip-norm in another --out") from error
    factor = learning_rate_factor(step, train.warmup_steps, train.max_steps)
    for optimizer, peak in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
        optimizer.step()
        optimizer.zero_grad()
    return total


def checkpoint_activations(model: nn.Module) -> None:
    """Have each layer keep its input alone, and compute the rest again, with the same dropout, in the backward pass."""
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, train: TrainConfig, place: Place) -> float:
    """Mean loss over the first eval_rows validation rows with fixed masks, nats a masked token."""
    model.eval()
    tokens = torch.from_numpy(rows[np.arange(min(train.eval_rows, len(rows)))])
    batch = tokens, corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    size, total, count = train.micro_batch_size, 0.0, 0
    for start in range(place.rank * size, len(tokens), place.world * size):
        part = piece(batch, start, size, place.device)
        with place.autocast():
            total += model(*part).item() * len(part[0])
        count += len(part[0])
    model.train()
    total, count = place.sum(total, count)
    return total / count


def unigram_entropy(rows: Rows) -> float:
    """Entropy in nats of the real tokens of (at most the first 65,536) rows: the loss of a model that knows
    nothing but how frequent each token is."""
    tokens = rows[np.arange(min(1 << 16, len(rows)))]
    counts = np.bincount(tokens[tokens >= NUM_SPECIAL])
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


# ---- 5. Run folder ------------------------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(out.glob("step_*.pt"))


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int) -> None:
    """Write step_STEP.pt atomically: plain tensors and numbers. Then remove all but the newest `keep`."""
    with atomic(out / f"step_{step:07d}.pt") as temporary:
        torch.save({"step": step, "seconds": seconds, "config": asdict(model.config), "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers]}, temporary)
    for old in checkpoints(out)[:-keep] if keep else []:
        old.unlink()


def load_checkpoint(out: Path, device: torch.device) -> dict | None:
    """The newest whole checkpoint of a run folder, or None; a damaged one is named on stderr and passed over."""
    for path in reversed(checkpoints(out)):
        try:
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(damaged)
            return torch.load(path, map_location=device, weights_only=True)
        except (zipfile.BadZipFile, RuntimeError, EOFError) as error:
            print(f"{path} is damaged ({error}); trying the one before", file=sys.stderr)
    return None


def load_model(folder: Path, device: torch.device | str = "cpu") -> tuple[MAELM, Tokenizer]:
    """The model of a run folder (or of one of its checkpoint files) in evaluation mode, and its tokenizer."""
    folder, path = (folder.parent, folder) if folder.suffix == ".pt" else (folder, None)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder; train.py makes one")
    try:
        state = torch.load(path, map_location=device, weights_only=True) if path else load_checkpoint(folder, device)
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{path}: no checkpoint, or a damaged one ({str(error).splitlines()[0]})") from error
    if state is not None and "model" not in state:
        raise UserError(f"{path}: not a checkpoint of train.py, which alone holds a decoder")
    if state is None:
        raise UserError(f"{folder}: holds no checkpoint; run train.py --out {folder} first")
    model = MAELM(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), Tokenizer.load(folder)


def open_run(out: Path, config: Config, train: TrainConfig, resume: bool) -> None:
    """Check that `out` is new or holds an earlier part of this very run; UserError lists what differs."""
    path = out / "config.json"
    if not path.is_file():
        if resume:
            raise UserError(f"--resume: {out} holds no run to continue")
        if out.exists() and not (out.is_dir() and os.access(out, os.W_OK)):
            raise UserError(f"--out {out}: not a folder that can be written to; choose another")
        return
    saved = json.loads(path.read_text())
    wanted = {"model": asdict(config), "train": asdict(train)}
    differs = [f"{name}={saved[part].get(name)!r} there, {value!r} here" for part in wanted
               for name, value in wanted[part].items() if name not in MAY_CHANGE and saved[part].get(name) != value]
    if differs:
        raise UserError(f"{out} holds another run: {'; '.join(differs)}. Choose another --out")


class Log:
    """log.jsonl of a run: one JSON object a line, without the steps after `step` of an interrupted run."""

    def __init__(self, out: Path, step: int, enabled: bool = True):
        self.path, self.enabled = out / "log.jsonl", enabled
        if not enabled:
            return
        kept = [line for line in read_log(out) if line["step"] <= step] if step else []
        with atomic(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **line) -> None:
        """Append a line, in the first process only."""
        if not self.enabled:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(out: Path) -> list[dict]:
    """The lines of a run's log; a last line that was cut off by a crash is left out."""
    path = out / "log.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [json.loads(line) for line in whole.splitlines()]


def draw_loss(out: Path) -> None:
    """Draw loss.png from log.jsonl: training and validation loss by step, and the unigram entropy."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    log = read_log(out)
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(line["step"], line[name]) for line in log if name in line]
        axes.plot(*zip(*points), label=label, marker="o" if name == "val_loss" else None, markersize=3)
    axes.axhline(log[0]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
    axes.legend()
    with atomic(out / "loss.png") as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


# ---- 6. Filling in [MASK] -----------------------------------------------------------------------------------
@torch.no_grad()
def predict(model: MAELM, tokens: Tensor, at: Tensor, top: int = 3) -> tuple[Tensor, Tensor]:
    """Mask positions at (k,) of tokens (n,) int64 as in pre-training -> the `top` best tokens there and their
    probabilities, (k, top) each. MAE-LM needs its decoder for this: the encoder alone predicts nothing."""
    masked = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, at, True)
    shown = torch.full_like(masked, model.config.mask_in_encoder == 1)
    kept = (~masked | shown).nonzero()[:, 0]
    corruption = Corruption(masked[None], kept[None], torch.where(masked, MASK, tokens)[kept][None])
    best = model.logits(tokens[None], corruption, at[None])[0].float().softmax(-1).topk(top)
    return best.indices, best.values


def fill_mask(model: MAELM, tokenizer: Tokenizer, text: str) -> str:
    """`text` with [MASK]s -> a printable line for each, with three words and their probabilities."""
    ids = tokenizer.encode(text.replace(" [MASK]", "[MASK]"), special=True).astype(np.int64)
    tokens = torch.tensor([CLS, *ids, SEP], device=model.head.bias.device)
    at = (tokens == MASK).nonzero()[:, 0]
    if not len(at) or len(tokens) > model.config.seq_len:
        raise UserError(f"--fill-mask: needs [MASK] and at most {model.config.seq_len - 2} tokens; "
                        f"got {len(at)} masks, {len(ids)} tokens")
    best = zip(*predict(model, tokens, at))
    return "\n".join(f"[MASK] {i}: {describe(tokenizer, *b)}" for i, b in enumerate(best, start=1))


def describe(tokenizer: Tokenizer, ids: Tensor, probabilities: Tensor) -> str:
    """Words with probabilities, such as `the 0.61  a 0.20  its 0.03`."""
    return "  ".join(f"{word(tokenizer, int(i))} {p:.2f}" for i, p in zip(ids, probabilities))


def word(tokenizer: Tokenizer, token: int) -> str:
    """A token in print: its text without the space before, or quoted if nothing else is left."""
    text = tokenizer.decode([token])
    return text.strip() or repr(text)


def examples(model: MAELM, tokenizer: Tokenizer, rows: Rows, count: int = 6) -> str:
    """Pieces of held-out text in which one word is masked, with the model's best three words, for print."""
    found = ["held-out text, one word masked (the true word in brackets), and what the model expects there:"]
    model.eval()
    for row in rows[np.linspace(0, len(rows) - 1, 20 * count).astype(np.int64)]:
        plain = np.array([word(tokenizer, i).isalpha() for i in row])
        words = [i for i in range(8, len(row) - 8) if tokenizer.decode([row[i]])[:1] == " "
                 and len(word(tokenizer, row[i])) > 2 and SEP not in row[i - 8:i + 9]
                 and plain[i - 8:i + 9].sum() > 14]  # prose
        if not words or len(found) > count:
            continue
        at = words[len(words) // 2]
        device = model.head.bias.device
        ids, probabilities = predict(model, torch.from_numpy(row).to(device), torch.tensor([at], device=device))
        before, after = (" ".join(tokenizer.decode(row[part]).split())
                         for part in (slice(max(1, at - 12), at), slice(at + 1, at + 9)))
        found.append(f"  ... {before} [{word(tokenizer, row[at])}] {after} ...\n"
                     f"      {describe(tokenizer, ids[0], probabilities[0])}")
    return "\n".join(found)


# ---- 7. What a run will take ---------------------------------------------------------------------------------
def tokens_read(config: Config, n: int) -> int:
    """m of section 3: how many of n tokens the encoder reads, as `corrupt` leaves them."""
    k = config.masks_per_row(n)
    return n - k + round(config.mask_in_encoder * k)


def flops(config: Config, n: int = 0, predicted: int = 0) -> int:
    """FLOPs of all matrix products in one training step on one row of n (0 = seq_len) tokens: 2 a multiply-add, and
    three times the forward pass, as each product has two in the backward pass. Exact: only what is computed counts.
    `predicted` positions have a loss; 0 = as many as MAELM has."""
    n, d, D = n or config.seq_len, config.encoder_dim, config.decoder_dim
    k, m = config.masks_per_row(n), tokens_read(config, n)
    predicted = predicted or (n - 1 if config.decoder_self == "uni" else k)

    def stack(layers: int, last: int, length: int, dim: int, sources: list[int]) -> int:
        """A stack that computes `last` positions in its last layer, with attention to each of `sources`."""
        return sum(8 * q * dim ** 2 + sum(2 * (q + s) * dim ** 2 + 2 * q * s * dim for s in sources)
                   for q in [length] * (layers - 1) + [last])

    products = stack(config.encoder_layers, m if config.decoder_layers else predicted, m, d, [m])
    products += predicted * (D * d + d * config.vocab_size)  # the head
    if config.decoder_layers:
        sources = [n] * (config.decoder_self != "none") + [m] * config.decoder_cross
        projected = (D != d) * (n + m * config.decoder_cross)
        products += stack(config.decoder_layers, predicted, n, D, sources) + projected * d * D
    return 3 * 2 * products


def memory(config: Config, train: TrainConfig, parameters: int, rows: int) -> tuple[float, float]:
    """Bytes of weights, gradients and Adam's moments in float32, and about those of the activations of `rows` rows in
    bf16 with a fused attention kernel: 40 d a token and layer, 10 a logit, 4 an entry of the attention bias."""
    n, d, k = config.seq_len, config.encoder_dim, config.masks_per_row(config.seq_len)
    m = tokens_read(config, n)
    layers, kept = [m * d] * config.encoder_layers + [n * config.decoder_dim] * config.decoder_layers, 40
    if train.checkpointing:  # 4 bytes of input a layer, and one whole layer at a time
        layers, kept = layers + [10 * max(layers)], 4
    bias = 4 * m * m * config.encoder_heads * (config.rel_pos_buckets > 0)
    return 16.0 * parameters, float(rows * (kept * sum(layers) + 10 * k * config.vocab_size + bias))


def estimate(config: Config, train: TrainConfig, devices: int, peak: float, mfu: float) -> str:
    """What a run will take on `devices` devices of `peak` TFLOP/s each, of which the share `mfu` is used; for print."""
    with torch.device("meta"):
        model = MAELM(config)
    parameters, encoder = (sum(p.numel() for p in part.parameters()) for part in (model, model.encoder))
    rows, steps = micro_batch(train, devices), train.last_step
    state, activations = memory(config, train, parameters, rows)
    row, tokens = flops(config), train.batch_size * config.seq_len
    work = row * train.batch_size * steps
    hours = work / (devices * peak * 1e12 * mfu) / 3600
    return "\n".join(f"{name:<20}{text}" for name, text in (
        ("parameters", f"{parameters:,}, of which {encoder:,} are the encoder's"),
        ("FLOPs per token", f"{row / config.seq_len / 1e9:.3f} G = 3 x 2 x (sum over layers of 8 q d^2 + 2 (q + s) d^2 "
                            "+ 2 q s d, with q queries and s keys, + k (d^2 + d V) of the head) / n"),
        ("step", f"{train.batch_size:,} sequences, {tokens:,} tokens, {row * train.batch_size / 1e15:.3f} PFLOP"),
        ("accumulation", f"{train.batch_size // rows // devices} micro-batches of {rows} on each of {devices} devices"),
        ("memory per device", f"{state / 1e9:.1f} GB for weights, gradients and Adam, and about "
                              f"{activations / 1e9:.1f} GB for activations"),
        ("run", f"{steps:,} steps, {tokens * steps / 1e9:,.1f} G tokens, {work / 1e18:.3g} EFLOP"),
        ("time", f"{hours:,.1f} hours ({devices * hours:,.0f} device-hours) at {mfu:.0%} of {peak:g} TFLOP/s each"),
    ))


# ---- 8. The run ---------------------------------------------------------------------------------------------
class Interrupt:
    """While entered, notes SIGTERM and SIGINT, so that the step in progress ends and a checkpoint is written; a
    second signal acts at once."""

    def __enter__(self) -> "Interrupt":
        self.signal = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: object) -> None:
        """Signal handler."""
        self.signal = number
        signal.signal(number, self.before[number])


def check(config: Config, train: TrainConfig, rows: dict[str, Rows], out: Path, parameters: int, world: int) -> None:
    """What can go wrong later is found before the first step; UserError says what to change."""
    micro_batch(train, world)
    k, least = config.masks_per_row(config.seq_len), min(part.min_real for part in rows.values())
    if not 0 < k <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {k} of {config.seq_len} tokens, but the smallest row has "
                        f"{least} real tokens; use a --mask-rate from {1 / config.seq_len:.3f} to "
                        f"{least / config.seq_len:.2f}")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    need, free = 12 * parameters * (train.keep_checkpoints + 1), shutil.disk_usage(there).free
    if free < need:
        raise UserError(f"--out {out}: checkpoints need {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; free "
                        "some space or choose another folder")


def loop(model: MAELM, optimizers: list, rows: dict[str, Rows], train: TrainConfig, place: Place, out: Path,
         log: "Log", state: dict) -> int:
    """Train from state["step"] to train.last_step. Returns 0, or the number of the signal that ended it."""
    network = DistributedDataParallel(model, gradient_as_bucket_view=True) if place.world > 1 else model
    step, tokens, stopped = state["step"], train.batch_size * model.config.seq_len, 0
    clock = time.perf_counter() - state["seconds"]  # so that now - clock is the time of training, evaluations apart
    total, waited, since, mark = 0.0, 0.0, step, state["seconds"]  # since the last line of the log
    bar = tqdm(total=train.last_step, initial=step, unit="step", disable=place.rank > 0 or not sys.stderr.isatty())
    with Interrupt() as interrupt, bar, ThreadPoolExecutor(1) as ahead:  # draws the next step's rows and masks
        coming = ahead.submit(batch_of_step, step, rows["train"], model.config, train)
        while step < train.last_step and not stopped:
            asked = time.perf_counter()
            batch = coming.result()
            waited += time.perf_counter() - asked
            coming = ahead.submit(batch_of_step, step + 1, rows["train"], model.config, train)
            # ---- one training step
            total += train_step(network, optimizers, batch, step, train, place)
            step += 1
            stopped = int(place.max(interrupt.signal))
            last = step == train.last_step or stopped
            seconds = time.perf_counter() - clock
            speed = (step - since) * tokens / (seconds - mark)
            # ---- log, evaluate, save
            bar.update()
            if step % train.log_interval == 0 or last:
                loss = place.sum(total)[0] / place.world / (step - since)
                log.write(step=step, loss=loss, lr=optimizers[0][0].param_groups[0]["lr"], tokens_per_second=speed,
                          seconds=seconds, waiting=waited / (seconds - mark))
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                total, waited, since, mark = 0.0, 0.0, step, seconds
            if step % train.eval_interval == 0 or last and not stopped:
                val_loss = evaluate(model, rows["val"], train, place)
                log.write(step=step, val_loss=val_loss, seconds=seconds)
                if place.rank == 0:
                    left = (train.last_step - step) * tokens / speed
                    bar.write(f"step {step:>6,}/{train.last_step:,}  validation loss {val_loss:.3f}  "
                              f"{speed:,.0f} tokens/s  {left / 60:.1f} min left")
                clock = time.perf_counter() - seconds
            if (step % train.checkpoint_interval == 0 or last) and place.rank == 0:
                save_checkpoint(out, step, model, optimizers, seconds, train.keep_checkpoints)
    return stopped


def load_corpus(config: Config, train: TrainConfig, place: Place) -> Path:
    """The folder of shards of this run; the first process makes it where there is none yet."""
    arguments = train.data, Path(train.cache), config.vocab_size, config.seq_len, train.uncased, train.val_share
    if place.rank == 0:
        corpus(*arguments)
    if place.world > 1:
        dist.barrier()
    return corpus(*arguments)


def pretrain(config: Config, train: TrainConfig, out: Path, resume: bool, place: Place) -> int:
    """Run or continue a pre-training run in folder `out`. Returns 0, or the number of the signal that ended it."""
    open_run(out, config, train, resume)
    first = place.rank == 0
    folder = load_corpus(config, train, place)
    rows = {part: Rows(folder, part, config.vocab_size, config.seq_len) for part in ("train", "val")}
    torch.manual_seed(train.seed)
    model = MAELM(config).to(place.device)
    parameters = sum(p.numel() for p in model.parameters())
    check(config, train, rows, out, parameters, place.world)
    optimizers = make_optimizers(model, train)
    state = load_checkpoint(out, place.device) or {"step": 0, "seconds": 0.0}
    if state["step"] >= train.last_step:
        print(f"{out} is finished at step {state['step']}: nothing to do; choose another --out for another run")
        return 0
    if state["step"]:
        model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
    if train.checkpointing:
        checkpoint_activations(model)
    if train.compile:
        model.compile(dynamic=False)  # in place: names of parameters stay as they are
    entropy = unigram_entropy(rows["val"])
    tokenizer = Tokenizer.load(folder)
    if first:
        tokenizer.save(out)
        write_json(out / "config.json", {"model": asdict(config), "train": asdict(train)})
        print(f"{out}: {parameters:,} parameters, {len(rows['train']):,} rows of {config.seq_len} tokens, "
              f"{place.world} x {place.device.type} in {str(place.dtype)[6:]}, "
              f"{'continuing at' if state['step'] else 'from'} step {state['step']}\n"
              f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context", flush=True)
    log = Log(out, state["step"], enabled=first)
    if not state["step"]:
        log.write(step=0, unigram_entropy=entropy, val_loss=evaluate(model, rows["val"], train, place))
    stopped = loop(model, optimizers, rows, train, place, out, log, state)
    if first:
        draw_loss(out)
        print(f"stopped by signal {stopped}; the same command continues" if stopped else
              examples(model, tokenizer, rows["val"]))
        print(f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}")
    return stopped


def main(argv: list[str] | None = None) -> None:
    config, train, options = parse(argv)
    with clear_errors("train.py"):
        if options.fill_mask is not None:
            model, tokenizer = load_model(options.init or options.out)
            print(fill_mask(model, tokenizer, options.fill_mask))
            return
        if options.estimate:
            print(estimate(config, train, options.devices, options.peak, options.mfu))
            return
        place = set_up(train.precision)
        stopped = pretrain(config, train, options.out, options.resume, place)
        if dist.is_initialized():
            dist.destroy_process_group()
        if stopped:
            sys.exit(128 + stopped)


if __name__ == "__main__":
    main()
