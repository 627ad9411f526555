"""Pre-training, from a laptop to many machines.

    python train.py                                         # a true MAE-LM in minutes, nothing is downloaded
    python train.py --ablation mlm                          # the same for standard MLM, a row of Table 2
    torchrun --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of both configurations is a flag. The same command again continues an unfinished run. Everything
random in a step is a function of (seed, step): rows, masks and dropout do not depend on the number of
processes (dropout does where batch_size / processes falls below micro_batch_size), and a run that was stopped and
continued equals one that was not.
"""
import argparse
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from data import CACHE, VAL_SHARE, Rows, Tokenizer, check_prepared, corpus_identity, rows_of_step, seed_of
from files import (Parser, UserError, append_line, atomic, claim_folder, clear_errors, compare_runs, file_hash,
                   read_json, remove_temporaries, write_json)
from maelm import (ABLATIONS, CLS, MAELM, MASK, NUM_SPECIAL, PRESETS, SEP, Block, Config, Corruption, Noise,
                   check_field, corrupt, draw_noise, fill)
from run import (DEVICES, Clock, Interrupt, Place, add_flags, check_fields, check_weights, checkpoint_path, checkpoints,
                 choose_place, figure, first_alone, first_line, first_speaks, given_flags, load_checkpoint, load_model,
                 open_corpus, read_log, save_checkpoint)


# ---- 1. Configuration: Table 4 ------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainConfig:
    """How it is trained. The defaults are the paper's base setting; raises ValueError naming a bad field."""
    init: str = ""  # begin with the weights of this run folder or checkpoint; of --fill-mask, the model
    data: str = "docs"  # docs, a file, a folder, hf:NAME[:CONFIG], joined by +; or a folder made by data.py
    uncased: bool = True  # lower-case all text
    val_share: float = VAL_SHARE  # share of documents held out for validation
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    micro_batch_size: int = 32  # sequences at a time on a device; the rest by accumulation
    max_steps: int = 125_000  # length of the learning-rate schedule
    stop_at: int = 0  # end early with a checkpoint, schedule unchanged; 0 = max_steps
    optimizer: str = "adamw"  # adamw | muon: Muon for the matrices of the layers, AdamW for the rest
    learning_rate: float = 5e-4  # peak, of AdamW
    muon_learning_rate: float = 2e-2  # peak, of Muon
    warmup_steps: int = 10_000  # linear warm-up, then linear decay to 0
    weight_decay: float = 0.01  # of all parameters that AdamW has
    muon_weight_decay: float = 0.1  # of those that Muon has
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    clip_norm: float = 2.0  # of the gradient over all parameters
    precision: str = "auto"  # auto | fp32 | bf16: of matrix products; auto = bf16 where the hardware has it
    device: str = "auto"  # auto | cpu | cuda | mps: where it is computed
    compile: str = "auto"  # auto | on | off: torch.compile the model; auto = on CUDA
    checkpointing: bool = False  # compute each layer again for its gradient: a tenth of the activations, 4/3 the work
    seed: int = 0
    log_interval: int = 100  # steps between lines of log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # validation rows, always the same with the same masks
    checkpoint_interval: int = 10_000  # steps between checkpoints
    keep_checkpoints: int = 2  # how many are kept; 0 = all (Figure 3)
    cache: str = CACHE  # where tokenized corpora are kept

    def __post_init__(self):
        for field in ("batch_size", "micro_batch_size", "max_steps", "learning_rate", "muon_learning_rate",
                      "adam_epsilon", "clip_norm", "log_interval", "eval_interval", "eval_rows", "checkpoint_interval"):
            check_field(self, field, getattr(self, field) > 0, "use a positive number")
        for field in ("stop_at", "warmup_steps", "weight_decay", "muon_weight_decay", "keep_checkpoints"):
            check_field(self, field, getattr(self, field) >= 0, "use 0 or a positive number")
        for field in ("adam_beta1", "adam_beta2"):
            check_field(self, field, 0 <= getattr(self, field) < 1, "use 0 <= beta < 1")
        check_field(self, "seed", 0 <= self.seed < 2 ** 63, "use 0 <= seed < 2^63")
        check_field(self, "val_share", 0 < self.val_share < 1, "use 0 < val_share < 1")
        check_field(self, "optimizer", self.optimizer in ("adamw", "muon"), "use adamw or muon")
        check_field(self, "precision", self.precision in ("auto", "fp32", "bf16"), "use auto, fp32 or bf16")
        check_field(self, "device", self.device in DEVICES, f"use {', '.join(DEVICES)}")
        check_field(self, "compile", self.compile in ("auto", "on", "off"), "use auto, on or off")
        check_field(self, "warmup_steps", self.warmup_steps <= self.max_steps,
                    f"it exceeds max_steps={self.max_steps}; pass both")
        check_field(self, "max_steps", self.max_steps < 10 ** 7, "use less than 10^7: checkpoints have seven digits")

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.stop_at or self.max_steps, self.max_steps)


TRAIN_PRESETS = {  # as differences from the defaults; Table 4
    "toy": dict(batch_size=64, micro_batch_size=64, max_steps=1900, optimizer="muon", learning_rate=6e-3,
                weight_decay=0.1, warmup_steps=100, log_interval=20, eval_interval=100, eval_rows=512,
                checkpoint_interval=500),
    "small": dict(batch_size=256, max_steps=20_000, optimizer="muon", learning_rate=2e-3, warmup_steps=1000,
                  log_interval=20, eval_interval=500, checkpoint_interval=1000),
    "base": dict(uncased=True),
    "base++": dict(uncased=False, max_steps=2_000_000, learning_rate=2e-4),
    "large++": dict(uncased=False, max_steps=1_000_000, learning_rate=1e-4, clip_norm=1.0),
}
TRAIN_PRESETS["laptop"] = TRAIN_PRESETS["toy"] | dict(  # 100 million tokens: docs/evidence.md
    max_steps=24_500, learning_rate=3e-3, muon_learning_rate=1e-2, weight_decay=0.01, warmup_steps=500,
    log_interval=100, eval_interval=500, checkpoint_interval=2000)
MAY_CHANGE = {"init", "stop_at", "micro_batch_size", "device", "compile", "checkpointing", "log_interval",
              "eval_interval", "checkpoint_interval", "keep_checkpoints", "cache"}  # when a run is continued


def make_config(preset: str = "base", ablation: str = "mae-lm", start: dict | None = None, **flags) -> Config:
    """Default < preset (or the fields `start`) < ablation < flag. The decoder sizes of Table 2 are base's. With another
    preset they keep their ratios, to the encoder's width in whole heads and to the depth of the preset's own decoder.
    Raises ValueError for a bad field, and where such a depth is no whole number."""
    own = PRESETS[preset] if start is None else start
    # A flag wins over all, and needs no scaling.
    change = {field: value for field, value in ABLATIONS[ablation].items() if field not in flags}
    if "decoder_layers" in change:
        depth = own.get("decoder_layers", Config.decoder_layers)
        layers = change["decoder_layers"] * depth / Config.decoder_layers
        if not layers.is_integer():
            raise ValueError(f"decoder_layers={layers:g}: {ablation} has {change['decoder_layers']} layers in place of "
                             f"base's {Config.decoder_layers}, and {'--init' if start else preset} has {depth}; give "
                             "--decoder-layers")
        change["decoder_layers"] = int(layers)
    if "decoder_dim" in change:
        size = {"encoder_dim": Config.encoder_dim, "encoder_heads": Config.encoder_heads} | own | flags
        encoder_heads = max(1, size["encoder_heads"])  # Config refuses fewer
        heads = round(change["decoder_dim"] / Config.encoder_dim * encoder_heads)
        change["decoder_dim"] = heads * (size["encoder_dim"] // encoder_heads)
    return Config(**own | change | flags)


SHAPE = ("vocab_size", "seq_len", "encoder_layers", "encoder_dim", "encoder_heads", "norm", "rel_pos_buckets",
         "rel_pos_max_distance")  # fields that the encoder's weights decide


class Start(NamedTuple):
    """What another run begins with."""
    model: MAELM
    uncased: bool  # its tokenizer
    folder: Path  # where that is
    weights: str  # a hash of the checkpoint


def open_start(path: Path) -> Start:
    """The weights of a run folder or of a checkpoint. UserError as load_model."""
    model, tokenizer = load_model(path)
    file = path if path.suffix == ".pt" else checkpoints(path)[-1]
    return Start(model, tokenizer.uncased, file.parent, file_hash(file))


def config_from(there: Config, ablation: str | None, flags: dict) -> Config:
    """The configuration of a run that begins with the weights of a model of configuration `there`. Its SHAPE stays;
    only relative positions may be added where there are none. So does all else, unless an ablation is named: that
    decides about masks and decoder, which, if it is new, is as deep as those of the presets: a third of the encoder, at
    most 4. Raises ValueError for a flag that contradicts the weights, and as make_config."""
    for name in SHAPE:
        has = getattr(there, name)
        may_be_added = name.startswith("rel_pos") and there.rel_pos_buckets == 0
        if flags.get(name, has) != has and not may_be_added:
            raise ValueError(f"{name}={flags[name]!r}: the weights of --init have {name}={has!r}; leave this flag out")
    if ablation is None:
        return Config(**asdict(there) | flags)
    kept = (*SHAPE, "dropout", "init_std", "position_init", "decoder_position_std", "mask_rate")
    start = {name: getattr(there, name) for name in kept}
    start["decoder_layers"] = there.decoder_layers or max(1, min(4, there.encoder_layers // 3))
    config = make_config(ablation=ablation, start=start, **flags)
    if config.rel_pos_buckets == 0 < there.rel_pos_buckets:
        raise ValueError(f"ablation {ablation}: the weights of --init have relative positions")
    return config


def parse(argv: list[str] | None) -> tuple[Config, TrainConfig, argparse.Namespace]:
    """Command line -> what is computed, how it is trained, and the rest. Default < preset < ablation < flag."""
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    at_hand = int(os.environ.get("WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())
    add("--preset", default="toy", choices=PRESETS, help="section 4.1 and Table 4 [toy]")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm; with --init, what that run is]")
    add("--out", type=Path, help="run folder [out/PRESET, or out/PRESET-ABLATION; with --init, its name for PRESET]")
    add("--resume", action="store_true", help="fail if there is no run to continue")
    add("--estimate", action="store_true", help="print FLOPs, memory and time, and do not train")
    add("--devices", type=int, default=at_hand, help="for --estimate: how many [%(default)s at hand]")
    add("--peak", type=float, default=312.0, help="for --estimate: TFLOP/s of a device [312, an A100]")
    add("--mfu", type=float, default=0.5, help="for --estimate: the share of it in use [%(default)s]")
    add("--fill-mask", metavar="TEXT", help="predict each [MASK] of TEXT with the model of --init")
    add_flags(parser, Config)
    add_flags(parser, TrainConfig)
    options = parser.parse_args(argv)
    # Written so that NaN is refused, too.
    for name, most in (("devices", 1_000_000), ("peak", 1_000_000), ("mfu", 1)):
        value = getattr(options, name)
        if not 0 < value <= most:
            parser.error(f"--{name} {value:g}: use a positive number, at most {most:,}")
    init = getattr(options, "init", None)
    if init == "":
        parser.error("--init: the name is empty; give a run folder or a checkpoint")
    if init and init.startswith("hf:"):
        parser.error(f"--init {init}: first python convert.py import {init} FOLDER, then --init FOLDER")
    options.start = None
    if init and options.fill_mask is None:
        options.start = open_start(Path(init))
    if options.out is None:
        name = options.preset
        if options.start is not None:
            name = f"{options.start.folder.resolve().name}-{options.ablation or 'more'}"
        elif options.ablation not in (None, "mae-lm"):
            name += f"-{options.ablation}"
        options.out = Path("out") / name
    flags, recipe = given_flags(options, Config), given_flags(options, TrainConfig)
    try:
        if options.start is None:
            config = make_config(options.preset, options.ablation or "mae-lm", **flags)
        else:
            config = config_from(options.start.model.config, options.ablation, flags)
            uncased = options.start.uncased
            if recipe.setdefault("uncased", uncased) != uncased:
                raise ValueError(f"uncased={not uncased}: the tokenizer of --init has {uncased}; leave this flag out")
        train = TrainConfig(**TRAIN_PRESETS[options.preset] | recipe)
    except ValueError as error:
        parser.error(str(error))
    return config, train, options


# ---- 2. Optimization: Table 4 -------------------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate in step 0 <= step < max_steps: it rises in equal steps, from 1 / warmup_steps in
    step 0 to 1 in step warmup_steps - 1, and falls linearly from 1 in step warmup_steps to what would be 0 in step
    max_steps."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices x (B, rows, columns) -> about U V^T of each x = U S V^T, in `dtype`: singular values between about 0.5
    and 1.5. Five steps of a Newton-Schulz iteration with the coefficients of Jordan et al., "Muon", 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[1] > x.shape[2]
    y = x.to(dtype)
    if tall:  # the products are of the shorter side
        y = y.mT
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        gram = y @ y.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, gram, y, beta=a)  # a y + b (y y^T) y + c (y y^T)^2 y
    return y.mT if tall else y


class Muon(torch.optim.Optimizer):
    """Momentum SGD with orthogonalized updates (Jordan et al., 2024), for matrices. In bf16 a step equals that of
    torch.optim.Muon.

    Why not that one, where elsewhere a library is better than our own code: it always multiplies in bf16, which costs
    a CPU without bf16 units 4 to 40 times the time of float32, and one matrix after the other, which costs a GPU a
    thousand small kernels a step. Here the dtype is the run's, and matrices of one shape are multiplied together."""

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, dtype: torch.dtype):
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay, momentum=0.95))
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """One step; every matrix needs a gradient."""
        group, = self.param_groups
        by_shape = {}
        for matrix in group["params"]:
            by_shape.setdefault(matrix.shape, []).append(matrix)
            if matrix not in self.state:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        for (rows, columns), matrices in by_shape.items():
            gradients = [matrix.grad for matrix in matrices]
            momentum = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(momentum, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, momentum, group["momentum"])
            update = orthogonalize(torch.stack(nesterov), self.dtype).to(gradients[0].dtype)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            scale = max(1, rows / columns) ** 0.5  # tall matrices move farther
            torch._foreach_add_(matrices, list(update), alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, train: TrainConfig, dtype: torch.dtype) -> list:
    """AdamW, or AdamW and Muon, which multiplies in `dtype`, for the matrices of the layers; together they have all
    parameters. Weight decay is decoupled and on everything."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        if train.optimizer == "muon" and ".blocks." in name and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    betas = (train.adam_beta1, train.adam_beta2)
    adamw = torch.optim.AdamW(rest, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon,
                              weight_decay=train.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, train.muon_learning_rate, train.muon_weight_decay, dtype)]


# ---- 3. Batches: functions of (seed, step) ------------------------------------------------------------------
Batch = tuple[Tensor, Corruption]  # tokens (B, n) int64, and what is masked in them


def batch_of_step(step: int, rows: Rows, config: Config, train: TrainConfig, place: Place) -> Batch:
    """This process's rows of a step, tokens (batch_size / world, n) int64 and their masks: its micro-batches one after
    the other. Micro-batch i of the batch belongs to process i modulo `world`."""
    size = micro_batch(train, place.world)
    mine = np.arange(train.batch_size).reshape(-1, place.world, size)[:, place.rank].flatten()
    chosen = rows_of_step(train.seed, step, train.batch_size, len(rows))
    tokens = torch.from_numpy(rows[chosen[mine]])
    # The random numbers are drawn for the whole batch: so the masks of a row do not depend on the processes.
    generator = torch.Generator().manual_seed(seed_of(train.seed, step))
    noise = draw_noise(train.batch_size, config.seq_len, config, generator)
    if place.world > 1:
        noise = Noise(*[x[torch.from_numpy(mine)] for x in noise])
    corruption = corrupt(tokens, config, noise=noise)
    if place.device.type == "cuda":  # from pinned memory a copy does not wait for the GPU
        return tokens.pin_memory(), Corruption(*[x.pin_memory() for x in corruption])
    return tokens, corruption


def piece(batch: Batch, start: int, size: int, device: torch.device) -> Batch:
    """Rows start ... start + size - 1 of a batch, on a device."""
    tokens, corruption = batch
    tokens, *part = [x[start:start + size].to(device, non_blocking=True) for x in (tokens, *corruption)]
    return tokens, Corruption(*part)


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


# ---- 4. A training step, and evaluation ---------------------------------------------------------------------
class NotFinite(ArithmeticError):
    """A gradient that is not finite; holds the numbers of this process's micro-batches whose loss is not."""


def train_step(model: nn.Module, optimizers: list, batch: Batch, step: int, train: TrainConfig, place: Place) -> Tensor:
    """One optimizer step; returns this process's share of the loss, a scalar. Every row has the same number of
    masks and every micro-batch the same number of rows, so the mean of means is the mean over masked tokens. Raises
    NotFinite, in all processes, instead of a step from a gradient that is not finite."""
    size = micro_batch(train, place.world)
    count = train.batch_size // size // place.world
    losses = {}  # by the number of the micro-batch in the batch
    # The gradients of `count` micro-batches add up in p.grad.
    for i in range(count):
        number = i * place.world + place.rank
        torch.manual_seed(seed_of(train.seed, step, number))  # for dropout
        wait = place.world > 1 and i < count - 1
        # DDP averages the gradients over processes in the backward pass, unless it is told to wait.
        with model.no_sync() if wait else nullcontext():
            with place.autocast():
                loss = model(*piece(batch, i * size, size, place.device)) / count
            loss.backward()
        losses[number] = loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
    if not norm.isfinite():  # of the mean over processes, so it is the same in all of them
        raise NotFinite([number for number, loss in losses.items() if not loss.isfinite()])
    factor = learning_rate_factor(step, train.warmup_steps, train.max_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * optimizer.defaults["lr"]  # the peak, as make_optimizers gave it
        optimizer.step()
        optimizer.zero_grad()
    return sum(losses.values())


def checkpoint_activations(model: nn.Module) -> None:
    """Have each layer keep its input alone, and compute the rest again, with the same dropout, in the backward pass."""
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def evaluation_rows(rows: Rows, train: TrainConfig) -> np.ndarray:
    """Numbers (at most eval_rows,) of validation rows, evenly spaced: all parts of the text have a share in them."""
    return np.linspace(0, len(rows) - 1, min(train.eval_rows, len(rows))).astype(np.int64)


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, train: TrainConfig, place: Place) -> float:
    """Mean loss over the evaluation_rows with fixed masks, nats a masked token."""
    model.eval()
    tokens = torch.from_numpy(rows[evaluation_rows(rows, train)])
    batch = tokens, corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    size, total, count = train.micro_batch_size, 0.0, 0
    # Each process takes every world-th micro-batch; the last one may be smaller, so rows are counted.
    for start in range(place.rank * size, len(tokens), place.world * size):
        part = piece(batch, start, size, place.device)
        with place.autocast():
            total += model(*part).item() * len(part[0])
        count += len(part[0])
    model.train()
    total, count = place.sum(total, count)
    return total / count


def unigram_entropy(rows: Rows, train: TrainConfig) -> float:
    """Entropy in nats of the real tokens of the evaluation_rows: the loss of a model that knows nothing but how
    frequent each token is."""
    tokens = rows[evaluation_rows(rows, train)]
    counts = np.bincount(tokens[tokens >= NUM_SPECIAL])
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


# ---- 5. Run folder ------------------------------------------------------------------------------------------
@dataclass
class Run:
    """A run that can go on: its folder, what it reads, its state after `step` steps."""
    out: Path
    train: TrainConfig
    place: Place
    identity: dict  # the settings and hashes that must stay
    folder: Path  # of shards
    rows: dict[str, Rows]
    model: MAELM
    optimizers: list
    said: str = ""  # which weights are from --init, and which are not
    step: int = 0
    seconds: float = 0.0  # of training, evaluations apart


def check_folder(out: Path, settings: dict, resume: bool) -> None:
    """Check that `out` is new or holds an earlier part of this very run; UserError lists what differs."""
    path = out / "config.json"
    if path.is_file():
        saved = read_json(path, {"model": dict, "train": dict})
        compare_runs(out, {"init_weights": None} | saved | saved["model"] | saved["train"], settings)
    elif any(out.glob("step_[0-9]*.pt*")):
        raise UserError(f"{path}: missing, beside checkpoints; restore it from a copy, or choose another --out")
    elif resume:
        raise UserError(f"--resume: {out} holds no run to continue")


def check_corpus(out: Path, source: str, hashes: dict) -> None:
    """UserError if the run in `out` began with another text or tokenizer than it would read now."""
    there = read_json(out / "config.json") if (out / "config.json").is_file() else {}
    if there and "tokenizer" not in there and (out / "tokenizer.json").is_file():  # of an earlier version
        there["tokenizer"] = file_hash(out / "tokenizer.json")
    changed = [name for name, value in hashes.items() if there.get(name, value) != value]
    if changed:
        raise UserError(f"{out}: another {' and '.join(changed)} than this run began with: what --data "
                        f"{source} reads has changed since; bring it back, or choose another --out")


def check_masks(config: Config, rows: dict[str, Rows]) -> None:
    """UserError unless every row has as many real tokens as are masked, and one is masked."""
    n = config.seq_len
    k = config.masks_per_row(n)
    least = min(rows["train"].min_real, rows["val"].min_real)
    if not 0 < k <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens, but the smallest row has {least} real "
                        f"tokens; use a --mask-rate from {1 / n:.3f} to {least / n:.2f}")


def check_disk(run: Run) -> None:
    """UserError if the checkpoints to come have no room."""
    interval, step, last = run.train.checkpoint_interval, run.step, run.train.last_step
    coming = last // interval - step // interval
    if last % interval:
        coming += 1  # the last step has one in any case
    if run.train.keep_checkpoints:
        # While one is written, those are still there that it will be one too many for.
        coming = min(coming, max(1, run.train.keep_checkpoints + 1 - len(checkpoints(run.out))))
    free = shutil.disk_usage(run.out).free
    need = coming * 12 * sum(p.numel() for p in run.model.parameters())  # weights and two moments in float32
    if free < need:
        raise UserError(f"--out {run.out}: {coming} checkpoints need {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are "
                        "free; free some space or choose another folder")


def take_weights(model: MAELM, start: MAELM) -> str:
    """Copy the weights of `start` into a model: the encoder's, and those of decoder and head whose shapes agree.
    Relative positions that `start` did not have begin with a bias of 0, so that the encoder computes what it did.
    Returns what is new, and what is left behind, for print."""
    here, there = model.state_dict(), start.state_dict()
    taken = {name: x for name, x in there.items() if name in here and x.shape == here[name].shape}
    model.load_state_dict(taken, strict=False)
    if model.encoder.bias is not None and start.encoder.bias is None:
        nn.init.zeros_(model.encoder.bias.table.weight)
    said = []
    for what, weights in (("new", here), ("left behind", there)):
        # Such as decoder.blocks.0: the first three parts of a name say enough.
        parts = [".".join(name.split(".")[:3]) for name in weights if name not in taken]
        said.append(f"{what}: {', '.join(dict.fromkeys(parts)) or 'nothing'}")
    return "; ".join(said)


def open_run(config: Config, train: TrainConfig, out: Path, resume: bool, stated: dict, place: Place,
             start: Start | None = None) -> Run:
    """A run of this configuration, new or as far as it is in `out`. `stated`: the settings that the command line or the
    preset gave; `start`: what it begins with in place of random weights. What can be wrong is found here, before
    anything is written to `out`; UserError says what to change."""
    micro_batch(train, place.world)
    identity = {field: x for field, x in (asdict(config) | asdict(train)).items() if field not in MAY_CHANGE}
    identity["init_weights"] = start.weights if start is not None else None
    check_folder(out, identity, resume)
    check_prepared(train.data, {field: stated[field] for field in ("uncased", "val_share") if field in stated})
    folder = open_corpus(config, asdict(train), start.folder if start is not None else out)
    rows = {}
    for part in ("train", "val"):
        rows[part] = Rows(folder, part, config.vocab_size, config.seq_len, place.rank, place.world)
    Tokenizer.load(folder)  # whether it is whole
    hashes = corpus_identity(folder)
    if start is not None and hashes["tokenizer"] != file_hash(start.folder / "tokenizer.json"):
        raise UserError(f"--data {train.data}: prepared with another tokenizer than that of --init {train.init}; "
                        f"prepare it again with data.py prepare --tokenizer {start.folder}")
    check_corpus(out, train.data, hashes)
    check_masks(config, rows)
    torch.manual_seed(train.seed)
    model = MAELM(config)
    said = take_weights(model, start.model) if start is not None else ""
    model = model.to(place.device)
    optimizers = make_optimizers(model, train, place.dtype)
    run = Run(out, train, place, identity | hashes, folder, rows, model, optimizers, said)
    restore(run)
    if place.first:
        check_disk(run)
    return run


def restore(run: Run) -> None:
    """Load the newest checkpoint of a run, if there is one. UserError if it is another run's, or not whole."""
    state = load_checkpoint(run.out, mend=True)
    if state is None:
        return
    path = checkpoint_path(run.out, state["step"])
    state = {"run": {}} | state  # earlier versions wrote none
    check_fields(path, state, config=dict, run=dict, model=dict, optimizers=list, seconds=(int, float))
    there = state["run"] | state["config"]
    compare_runs(path, there, {field: x for field, x in run.identity.items() if field in there})
    check_weights(path, run.model, state["model"])
    run.model.load_state_dict(state["model"])
    try:
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: the state of the optimizer is missing, or another's ({first_line(error)}); restore "
                        "the file from a copy") from error
    run.step, run.seconds = state["step"], state["seconds"]
    if len(read_log(run.out)) < state.get("logged", 0):
        raise UserError(f"{run.out / 'log.jsonl'}: missing, or cut off before step {run.step}; restore it from a copy, "
                        "or choose another --out")


def write_start(run: Run, entropy: float) -> None:
    """Write to the run folder what it is from the first step on."""
    remove_temporaries(run.out)
    with atomic(run.out / "tokenizer.json") as temporary:
        shutil.copyfile(run.folder / "tokenizer.json", temporary)
    # Of the log, what an interrupted run wrote up to the step that continues.
    kept = [line for line in read_log(run.out) if line.get("step", 0) <= run.step and run.step > 0]
    with atomic(run.out / "log.jsonl") as temporary:
        temporary.touch()
        for line in kept:
            append_line(temporary, line)
    if run.step > 0 and not any("unigram_entropy" in line for line in kept):  # the log was deleted
        write_log(run.out, step=run.step, unigram_entropy=entropy)
    hashes = {name: run.identity[name] for name in ("corpus", "tokenizer", "init_weights")}
    settings = {"model": asdict(run.model.config), "train": asdict(run.train), **hashes}
    write_json(run.out / "config.json", settings)


def write_log(out: Path, **line) -> None:
    """Append a JSON object to log.jsonl, as a line."""
    append_line(out / "log.jsonl", line)


def draw_loss(out: Path) -> None:
    """Draw loss.png from log.jsonl: training and validation loss by step, and the unigram entropy."""
    log = read_log(out)
    with figure(out / "loss.png") as (_, axes):
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", ".-")):
            points = [(line["step"], line[name]) for line in log if name in line]
            if points:
                axes.plot(*zip(*points), style, label=label)
        for line in log:
            if "unigram_entropy" in line:
                axes.axhline(line["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per masked token)", title=str(out))
        axes.legend()


# ---- 6. Filling in [MASK] -----------------------------------------------------------------------------------
def masks_at(tokens: Tensor, at: Tensor, config: Config, generator: torch.Generator) -> Corruption:
    """What `corrupt` makes of one row tokens (n,) if the positions at (k,) are those that it masks, on the CPU."""
    n, k = len(tokens), len(at)
    nothing = torch.zeros(n, dtype=torch.bool)
    masked = nothing.index_fill(0, at, True)
    # A random part of the masks is shown to the encoder, as a `fill`; the others are removed.
    shown = round(config.mask_in_encoder * k)
    removed = at[torch.randperm(k, generator=generator)[shown:]]
    kept = (~nothing.index_fill(0, removed, True)).nonzero()[:, 0]
    noise = draw_noise(1, n, config, generator)
    read = torch.where(masked, fill(tokens[None], config, noise)[0], tokens)
    return Corruption(masked[None], kept[None], read[kept][None])


@torch.no_grad()
def predict(model: MAELM, tokens: Tensor, at: Tensor, generator: torch.Generator,
            top: int = 3) -> tuple[Tensor, Tensor]:
    """Mask positions at (k,) of tokens (n,) int64 as in pre-training -> the `top` best tokens there and their
    probabilities, (k, top) each. MAE-LM needs its decoder for this: the encoder alone predicts nothing."""
    corruption = masks_at(tokens, at, model.config, generator)
    tokens, at, *parts = [x.to(model.head.bias.device) for x in (tokens[None], at[None], *corruption)]
    corruption = Corruption(*parts)
    # The three calls of MAELM.forward, on a batch of one row.
    h = model.encode(corruption, at)
    z = model.decode(h, tokens, corruption, at)
    best = model.logits(z)[0].float().softmax(-1).topk(top)
    return best.indices, best.values


def fill_mask(model: MAELM, tokenizer: Tokenizer, text: str) -> str:
    """`text` with [MASK]s -> a printable line for each, with three words and their probabilities."""
    # A word has its space before it, so [MASK] stands for both.
    ids = tokenizer.encode(text.replace(" [MASK]", "[MASK]"), special=True).astype(np.int64)
    tokens = torch.tensor([CLS, *ids, SEP])
    at = (tokens == MASK).nonzero()[:, 0]
    if not len(at) or len(tokens) > model.config.seq_len:
        raise UserError(f"--fill-mask: needs [MASK] and at most {model.config.seq_len - 2} tokens; "
                        f"got {len(at)} masks, {len(ids)} tokens")
    found = []
    for ids, probabilities in zip(*predict(model, tokens, at, torch.Generator().manual_seed(0))):
        found.append(f"[MASK] {len(found) + 1}: {describe(tokenizer, ids, probabilities)}")
    return "\n".join(found)


def describe(tokenizer: Tokenizer, ids: Tensor, probabilities: Tensor) -> str:
    """Words with probabilities, such as `the 0.61  a 0.20  its 0.03`."""
    return "  ".join(f"{word(tokenizer, int(i))} {p:.2f}" for i, p in zip(ids, probabilities))


def word(tokenizer: Tokenizer, token: int) -> str:
    """A token in print: its text without the space before, or quoted if nothing else is left."""
    text = tokenizer.decode([token])
    return text.strip() or repr(text)


def kind_of(text: str) -> str:
    """The kind of a token with this text: w begins a word, p is a later part of one, and - is no word."""
    if not text.removeprefix(" ").isalpha():
        return "-"
    return "w" if text.startswith(" ") else "p"


def examples(model: MAELM, tokenizer: Tokenizer, rows: Rows, shown: int = 6, counted: int = 100) -> str:
    """What the model expects in place of a masked word of held-out text, for print.

    The rule: rows in order (at most 10,000); of each the first 15 tokens in a row that are nothing but words, the
    eighth of them a whole word, which is masked. What the model says there has no part in it. The first `shown` are
    printed; hits are counted over the first `counted`."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    kinds = [kind_of(tokenizer.decode([i])) for i in range(rows.vocab_size)]
    printed, hits = [], []
    for number in range(min(len(rows), 10_000)):
        row = rows[np.array([number])][0]
        # Seven tokens, a whole word (for another one begins after it), and seven tokens.
        match = re.search("([wp]{7})w(w[wp]{6})", "".join(kinds[i] for i in row))
        if match is None:
            continue
        at = match.end(1)  # the word between the two groups
        ids, probabilities = predict(model, torch.from_numpy(row), torch.tensor([at]), generator)
        hits.append((ids[0] == row[at]).tolist())  # for each guess, best first
        before, after = tokenizer.decode(row[match.start():at]), tokenizer.decode(row[at + 1:match.end()])
        printed.append(f"  ...{before} [{word(tokenizer, row[at])}]{after} ...\n"
                       f"      {describe(tokenizer, ids[0], probabilities[0])}")
        if len(hits) == counted:
            break
    head = ("held-out text: in each row the first 15 tokens that are nothing but words, the whole word in the middle\n"
            "masked (in brackets), and what the model expects there:")
    if not hits:
        return "no held-out row has 15 tokens in a row that are nothing but words: no examples"
    tail = (f"of the first {len(hits)} such words, {sum(hit[0] for hit in hits)} are the model's first guess, "
            f"{sum(map(any, hits))} among its first three")
    return "\n".join([head, *printed[:shown], tail])


# ---- 7. What a run will take ---------------------------------------------------------------------------------
def tokens_read(config: Config, n: int) -> int:
    """m: how many of n tokens the encoder reads, as `corrupt` leaves them."""
    k = config.masks_per_row(n)
    return n - k + round(config.mask_in_encoder * k)


def tokens_predicted(config: Config, n: int) -> int:
    """How many of n tokens have a loss, as MAELM.predicted has them."""
    return n - 1 if config.decoder_self == "uni" else config.masks_per_row(n)


def products_of_stack(layers: int, dim: int, length: int, last: int, sources: list[int]) -> int:
    """Multiply-adds of layers that compute `length` positions, the last layer `last`, with attention to each of
    `sources`, their numbers of positions."""
    total = 0
    for q in [length] * (layers - 1) + [last]:
        total += 8 * q * dim ** 2  # FFN
        for s in sources:
            total += 2 * (q + s) * dim ** 2  # W^Q and W^O, W^K and W^V
            total += 2 * q * s * dim  # Q K^T, and the weights times V
    return total


def flops(config: Config, n: int = 0, predicted: int = 0) -> int:
    """FLOPs of all matrix products in one training step on one row of n (0 = seq_len) tokens: 2 a multiply-add, and
    three times the forward pass, as each product has two in the backward pass. Exact: only what is computed counts.
    `predicted` positions have a loss; 0 = as many as MAELM has."""
    n = n or config.seq_len
    m = tokens_read(config, n)
    d, D = config.encoder_dim, config.decoder_dim
    predicted = predicted or tokens_predicted(config, n)
    # Only positions with a loss go through the last layer before the head.
    last = m if config.decoder_layers else predicted
    products = products_of_stack(config.encoder_layers, d, m, last, [m])
    if config.decoder_layers:
        sources = []
        if config.decoder_self != "none":
            sources.append(n)
        if config.decoder_cross:
            sources.append(m)
        products += products_of_stack(config.decoder_layers, D, n, predicted, sources)
        if D != d:  # the projection of the decoder's input, and of what cross-attention reads
            products += n * d * D
            if config.decoder_cross:
                products += m * d * D
    products += predicted * (D * d + d * config.vocab_size)  # the head
    return 3 * 2 * products


def memory(config: Config, train: TrainConfig, parameters: int, rows: int) -> tuple[float, float]:
    """Bytes of weights, gradients and Adam's moments in float32, and about those of the activations of `rows` rows in
    bf16 with a fused attention kernel: 40 d a token and layer, 10 a logit, 4 an entry of the attention bias."""
    n = config.seq_len
    m = tokens_read(config, n)
    layers = [m * config.encoder_dim] * config.encoder_layers + [n * config.decoder_dim] * config.decoder_layers
    if train.checkpointing:  # 4 bytes of input a layer, and one whole layer at a time
        activations = 4 * sum(layers) + 40 * max(layers)
    else:
        activations = 40 * sum(layers)
    activations += 10 * tokens_predicted(config, n) * config.vocab_size
    if config.rel_pos_buckets:
        activations += 4 * m * m * config.encoder_heads
    return 16.0 * parameters, float(rows * activations)


def estimate(config: Config, train: TrainConfig, devices: int, peak: float, mfu: float) -> str:
    """What a run will take on `devices` devices of `peak` TFLOP/s each, of which the share `mfu` is used; for print."""
    with torch.device("meta"):  # shapes without memory
        model = MAELM(config)
    parameters = sum(p.numel() for p in model.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    rows, steps = micro_batch(train, devices), train.last_step
    state, activations = memory(config, train, parameters, rows)
    row = flops(config)
    step = row * train.batch_size
    tokens = train.batch_size * config.seq_len
    hours = step * steps / (devices * peak * 1e12 * mfu) / 3600
    lines = {
        "parameters": f"{parameters:,}, of which {encoder:,} are the encoder's",
        "FLOPs per token": f"{row / config.seq_len / 1e9:.3f} G = 3 x 2 x (sum over layers of 8 q d^2 + 2 (q + s) d^2 "
                           "+ 2 q s d, with q queries and s keys, + k (d^2 + d V) of the head) / n",
        "step": f"{train.batch_size:,} sequences, {tokens:,} tokens, {step / 1e15:.3f} PFLOP",
        "accumulation": f"{train.batch_size // rows // devices} micro-batches of {rows} on each of {devices} devices",
        "memory per device": f"{state / 1e9:.1f} GB for weights, gradients and Adam, and about "
                             f"{activations / 1e9:.1f} GB for activations",
        "run": f"{steps:,} steps, {tokens * steps / 1e9:,.1f} G tokens, {step * steps / 1e18:.3g} EFLOP",
        "time": f"{hours:,.1f} hours ({devices * hours:,.0f} device-hours) at {mfu:.0%} of {peak:g} TFLOP/s each",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())


# ---- 8. The run ---------------------------------------------------------------------------------------------
def loop(run: Run) -> int:
    """Train from run.step to train.last_step. Returns 0, or the number of the signal that ended it."""
    model, train, place, out, step = run.model, run.train, run.place, run.out, run.step
    network = model
    if place.world > 1:
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        network.broadcast_buffers = False  # they never change (as an argument, it has another name in each version)
    tokens = train.batch_size * model.config.seq_len  # in a step
    losses = []  # since the last line of the log
    stopped = 0
    clock = Clock(run.seconds)
    draw = partial(batch_of_step, rows=run.rows["train"], config=model.config, train=train, place=place)
    hidden = None if place.first else True  # None: where stderr is no terminal
    bar = tqdm(total=train.last_step, initial=step, unit="step", disable=hidden)
    # Rows and masks of the next step are drawn by a thread while this step is computed.
    with Interrupt() as interrupt, bar, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(draw, step)
        while step < train.last_step and not stopped:
            asked = clock.now()
            batch = coming.result()
            clock.waited += clock.now() - asked
            coming = ahead.submit(draw, step + 1)

            # ---- one training step ----
            try:
                losses.append(train_step(network, run.optimizers, batch, step, train, place))
            except NotFinite as error:
                raise not_finite(run, step, error.args[0]) from error
            step += 1
            # ---------------------------

            # All processes stop if one is told to. To ask them makes a GPU wait: not after every step.
            if place.world == 1 or step % 16 == 0:
                stopped = int(place.max(interrupt.signal))
            last = step == train.last_step or stopped > 0
            seconds = clock.now()
            speed = len(losses) * tokens / (seconds - clock.mark)
            bar.update()

            # ---- log, evaluate, save ----
            if step % train.log_interval == 0 or last:
                # The mean over steps and processes: each process has an equal share of every batch.
                loss = place.sum(sum(losses))[0] / place.world / len(losses)
                if place.first:
                    write_log(out, step=step, loss=loss, lr=run.optimizers[0].param_groups[0]["lr"], seconds=seconds,
                              tokens_per_second=speed, waiting=clock.waited / (seconds - clock.mark))
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                clock.lap(seconds)
                losses.clear()
            if step % train.eval_interval == 0 or (last and not stopped):
                with clock.paused():
                    val_loss = evaluate(model, run.rows["val"], train, place)
                if place.first:
                    write_log(out, step=step, val_loss=val_loss, seconds=seconds)
                    left = (train.last_step - step) * tokens / speed / 60
                    interrupt.say(bar, f"step {step:>6,}/{train.last_step:,}  validation loss {val_loss:.3f}  "
                                       f"{speed:,.0f} tokens/s  {left:.1f} min left")
            if place.first and (step % train.checkpoint_interval == 0 or last):
                save_checkpoint(out, step, model, run.optimizers, seconds, run.identity, train.keep_checkpoints)
    return stopped


def not_finite(run: Run, step: int, numbers: list[int]) -> UserError:
    """What to say of a gradient that is not finite. `numbers`: of this process's micro-batches whose loss is not."""
    size = micro_batch(run.train, run.place.world)
    numbers = sorted(sum(run.place.gather(numbers), []))  # of all processes
    text = f"step {step + 1}: the gradient is not finite"
    if numbers:
        drawn = rows_of_step(run.train.seed, step, run.train.batch_size, len(run.rows["train"]))
        first = ", ".join(str(row) for row in drawn[numbers[0] * size:][:size])
        text += f", nor is the loss of {len(numbers)} of its micro-batches; the first has the training rows {first}"
    saved = checkpoints(run.out)
    kept = f"{saved[-1].name} is as it was" if saved else "there is no checkpoint yet"
    return UserError(f"{text}. {kept}; start again with a lower --learning-rate or --clip-norm in another --out")


def pretrain(run: Run) -> int:
    """Run or continue a pre-training run. Returns 0, or the number of the signal that ended it."""
    train, place, out = run.train, run.place, run.out
    found = place.gather((run.step, run.seconds))
    if len(set(found)) > 1:
        steps = ", ".join(f"process {rank} step {step}" for rank, (step, _) in enumerate(found))
        raise UserError(f"{out}: not all processes continue from the same checkpoint: {steps}; --out must be one "
                        "folder that all of them see")
    if run.step >= train.last_step:
        if place.first:
            if not (out / "loss.png").is_file():  # a signal came while it was drawn
                draw_loss(out)
            print(f"{out} is finished at step {run.step}: nothing to do; choose another --out for another run")
        return 0
    if train.checkpointing:
        checkpoint_activations(run.model)
    if train.compile == "on" or (train.compile == "auto" and place.device.type == "cuda"):
        run.model.compile(dynamic=False)  # in place: names of parameters stay as they are

    entropy = unigram_entropy(run.rows["val"], train)
    if place.first:
        write_start(run, entropy)
        parameters = sum(p.numel() for p in run.model.parameters())
        print(f"{out}: {parameters:,} parameters, "
              f"{len(run.rows['train']):,} rows of {run.model.config.seq_len} tokens, "
              f"{place.world} x {place.device.type} in {str(place.dtype).removeprefix('torch.')}, "
              f"{'continuing at' if run.step else 'from'} step {run.step}\n"
              f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context", flush=True)
    if run.step == 0:
        if place.first and run.said:
            print(f"the weights are those of {train.init}; {run.said}", flush=True)
        val_loss = evaluate(run.model, run.rows["val"], train, place)
        if place.first:
            write_log(out, step=0, unigram_entropy=entropy, val_loss=val_loss)

    stopped = loop(run)
    if place.first:
        draw_loss(out)
        if stopped:
            print(f"stopped by signal {stopped}; the same command continues")
        else:
            print(examples(run.model, Tokenizer.load(out), run.rows["val"]))
        print(f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}", flush=True)
    return stopped


def main(argv: list[str] | None = None) -> None:
    stopped = 0
    with clear_errors("train.py"), first_speaks(), ExitStack() as held:
        with first_alone():
            config, train, options = parse(argv)
            if options.fill_mask is not None:
                model, tokenizer = load_model(Path(train.init or options.out))
                print(fill_mask(model, tokenizer, options.fill_mask))
                return
            if options.estimate:
                print(estimate(config, train, options.devices, options.peak, options.mfu))
                return
            place = choose_place(train.precision, train.device, small=config.encoder_dim < 256)
            if place.first:
                held.enter_context(claim_folder(options.out, "run"))  # until this process ends
            stated = TRAIN_PRESETS[options.preset] | given_flags(options, TrainConfig)
            if options.start is not None:
                stated["uncased"] = train.uncased  # as its tokenizer, whatever the preset says
            run = open_run(config, train, options.out, options.resume, stated, place, options.start)
            options.start = None  # its memory is wanted
        stopped = pretrain(run)
        if dist.is_initialized():
            dist.destroy_process_group()
    if stopped:
        sys.exit(128 + stopped)


if __name__ == "__main__":
    main()
