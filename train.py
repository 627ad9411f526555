"""Pre-training, from a laptop to many machines.

    python train.py                                         # a real, small MAE-LM in minutes; nothing is downloaded
    python train.py --ablation mlm                          # the same for standard MLM, a row of Table 2
    python train.py --preset base --data texts/ --prepare   # only tokenize, into --cache
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of both configurations is a flag; -h shows the values of --preset. The same command again continues an
unfinished run. A step's rows never depend on the number of processes; masks and dropout do only if a process gets fewer
than micro_batch_size rows.
"""
import importlib.util
import json
import math
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from maelm import ABLATIONS, MAELM, NUM_SPECIAL, PRESETS, Config, Corruption, corrupt
from support.checkpoints import (checkpoint_of, checkpoints, load_checkpoint, load_model, run_settings,
                                 save_checkpoint)
from support.corpus import SPLITS, VAL_SHARE, corpus_folder, corpus_settings, prepared_corpus
from support.cost import describe_epochs, estimate, flops, peak_of
from support.device import Interrupt, Worker, explain_out_of_memory, make_worker
from support.files import (CACHE, UserError, atomic, clear_errors, lock_folder, read_json, refuse_other_files,
                           same_settings, short_hash, write_json)
from support.flags import Parser, add_flags, given_flags, require, require_positive, value_in
from support.log import draw_loss, open_wandb, read_log
from support.muon import make_optimizers
from support.predict import examples, fill_mask
from support.rows import Rows, rows_of_step, seed_of
from support.tokenizer import Tokenizer


# ---- 1. Configuration: Table 4 ------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainConfig:
    """How it is trained. The defaults are the paper's base setting. ValueError names a field that is wrong."""
    init: str = ""  # begin with the weights of this run folder or checkpoint; for --fill-mask, the model
    data: str = "docs"  # docs, a file, folder or pattern, or hf:NAME[:CONFIG] (split train); several joined by +
    column: str = "text"  # the field of records (.jsonl, .parquet, hf:) that holds the text
    tokenizer: str = ""  # a byte-level BPE's tokenizer.json, or hf:NAME; without it, one is learned from --data
    uncased: bool = True  # lower-case all text; --no-uncased keeps upper case
    val_share: float = VAL_SHARE  # share of documents held out for validation, between 0 and 1
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    micro_batch_size: int = 64  # sequences at a time on a device; gradients accumulate over the rest
    max_steps: int = 125_000  # length of the learning-rate schedule, below 10^7
    stop_at: int = 0  # end early with a checkpoint, schedule unchanged; at most max_steps; 0 = max_steps
    optimizer: str = "adamw"  # adamw | muon: Muon for the matrices of the layers, AdamW for the rest
    learning_rate: float = 5e-4  # peak, of AdamW
    muon_learning_rate: float = 2e-2  # peak, of Muon
    warmup_steps: int = 10_000  # linear warm-up, then linear decay to 0; at most max_steps
    weight_decay: float = 0.01  # of all parameters that AdamW has, 0 or more
    muon_weight_decay: float = 0.1  # of those that Muon has, 0 or more
    adam_beta1: float = 0.9  # 0 or more, below 1
    adam_beta2: float = 0.98  # 0 or more, below 1
    adam_epsilon: float = 1e-6  # 0 or more
    clip_norm: float = 2.0  # of the gradient over all parameters
    precision: str = "auto"  # auto | fp32 (TF32 on CUDA) | bf16: of matrix products; auto = bf16 if in hardware
    device: str = "auto"  # auto | cpu | cuda | mps
    compile: str = "auto"  # auto | on | off | graphs (with CUDA graphs); auto = on, on CUDA if encoder_dim >= 256
    seed: int = 0  # 0 or more, below 2^63
    log_interval: int = 100  # steps between lines of log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # validation rows, always the same with the same masks
    checkpoint_interval: int = 10_000  # steps between checkpoints
    keep_checkpoints: int = 2  # how many are kept; 0 = all (Figure 3)
    cache: str = CACHE  # folder for tokenized corpora
    wandb: str = ""  # a project of Weights & Biases that gets the numbers of log.jsonl, too

    def __post_init__(self):
        require_positive(self, "batch_size", "micro_batch_size", "learning_rate", "muon_learning_rate", "clip_norm",
                         "log_interval", "eval_interval", "eval_rows", "checkpoint_interval")
        require(
            self,
            val_share=0 < self.val_share < 1,
            max_steps=0 < self.max_steps < 10 ** 7,
            warmup_steps=0 <= self.warmup_steps <= self.max_steps,
            optimizer=self.optimizer in ("adamw", "muon"),
            precision=self.precision in ("auto", "fp32", "bf16"),
            compile=self.compile in ("auto", "on", "off", "graphs"),
            seed=0 <= self.seed < 2 ** 63,
            stop_at=0 <= self.stop_at <= self.max_steps,
            weight_decay=self.weight_decay >= 0, muon_weight_decay=self.muon_weight_decay >= 0,
            adam_beta1=0 <= self.adam_beta1 < 1, adam_beta2=0 <= self.adam_beta2 < 1,
            adam_epsilon=self.adam_epsilon >= 0, cache=self.cache != "",
        )

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.stop_at or self.max_steps


TRAIN_PRESETS = {  # as differences from the defaults; Table 4
    "toy": dict(batch_size=64, micro_batch_size=64, max_steps=1900, optimizer="muon", learning_rate=6e-3,
                weight_decay=0.1, warmup_steps=100, log_interval=20, eval_interval=100, eval_rows=512,
                checkpoint_interval=500),
    "small": dict(batch_size=256, micro_batch_size=256, max_steps=20_000, optimizer="muon", learning_rate=2e-3,
                  warmup_steps=1000, log_interval=20, eval_interval=500, checkpoint_interval=1000),
    "base": dict(),
    "base++": dict(uncased=False, max_steps=2_000_000, learning_rate=2e-4),
    "large++": dict(micro_batch_size=32, uncased=False, max_steps=1_000_000, learning_rate=1e-4, clip_norm=1.0),
}
TRAIN_PRESETS["laptop"] = TRAIN_PRESETS["toy"] | dict(  # 100 million tokens
    max_steps=24_500, learning_rate=3e-3, muon_learning_rate=1e-2, weight_decay=0.01, warmup_steps=500,
    log_interval=100, eval_interval=500, checkpoint_interval=2000)
RECIPE = ("batch_size", "micro_batch_size", "max_steps", "optimizer", "learning_rate", "muon_learning_rate",
          "warmup_steps", "weight_decay", "muon_weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm",
          "log_interval", "eval_interval", "eval_rows", "checkpoint_interval")  # what --init takes along
CAUTIOUS = dict(batch_size=256, max_steps=10_000, learning_rate=1e-4, warmup_steps=600, eval_interval=500,
                checkpoint_interval=1000)  # for weights without a run
MAY_CHANGE = {"init", "tokenizer", "stop_at", "micro_batch_size", "device", "compile", "log_interval", "eval_interval",
              "checkpoint_interval", "keep_checkpoints", "cache", "wandb"}  # when a run is continued


def make_config(preset: str = "base", ablation: str = "mae-lm", start: dict | None = None, **flags) -> Config:
    """Default < preset (or the fields `start`) < ablation < flag. Table 2 has base's decoder sizes: other presets keep
    their ratios, in whole heads and to the preset's own depth. ValueError for a bad field or a broken depth."""
    own = PRESETS[preset] if start is None else start
    change = {field: value for field, value in ABLATIONS[ablation].items() if field not in flags}
    if "decoder_layers" in change:
        depth = own.get("decoder_layers", Config.decoder_layers)
        layers = change["decoder_layers"] * depth / Config.decoder_layers
        if not layers.is_integer():
            raise ValueError(f"decoder_layers={layers:g}: {ablation} scaled from base's {Config.decoder_layers} layers "
                             f"to {depth}; give --decoder-layers")
        change["decoder_layers"] = int(layers)
    if "decoder_dim" in change:
        size = {"encoder_dim": Config.encoder_dim, "encoder_heads": Config.encoder_heads} | own | flags
        encoder_heads = max(1, size["encoder_heads"])  # Config refuses fewer
        heads = round(change["decoder_dim"] / Config.encoder_dim * encoder_heads)
        change["decoder_dim"] = heads * (size["encoder_dim"] // encoder_heads)
    return Config(**own | change | flags)


SHAPE = ("vocab_size", "seq_len", "encoder_layers", "encoder_dim", "encoder_heads", "norm", "rel_pos_buckets",
         "rel_pos_max_distance")  # fields that the encoder's weights decide
OBJECTIVE = set().union(*ABLATIONS.values()) - {*SHAPE}  # fields that rows of Table 2 decide


def config_from(there: Config, ablation: str | None, flags: dict) -> Config:
    """The configuration `there` of a model, with flags and the OBJECTIVE of an ablation. ValueError: another SHAPE."""
    if ablation is None:
        config = replace(there, **flags)
    else:
        # A decoder that is new is as deep as those of the presets.
        depth = there.decoder_layers or max(1, min(4, there.encoder_layers // 3))
        start = asdict(there) | {name: getattr(Config, name) for name in OBJECTIVE} | {"decoder_layers": depth}
        config = make_config(ablation=ablation, start=start, **flags)
    for name in SHAPE:
        if getattr(config, name) != getattr(there, name):
            raise ValueError(f"{name}={getattr(config, name)!r}: the weights of --init have {getattr(there, name)!r}")
    return config


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""
    config: Config
    train: TrainConfig
    out: Path
    resume: bool
    prepare: bool
    estimate: bool
    fill_mask: str | None
    start: MAELM | None  # the model of --init, to begin with
    tokenizer: Tokenizer | None  # that of --init or --tokenizer; without it, the corpus has its own
    origin: str  # whose recipe it is


def parse(argv) -> Command:
    """Read the command line. It ends the program for flags that are not possible."""
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="section 4.1 and Table 4 [toy; with --init, the recipe only]")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm; with --init, what that run is]")
    add("--out", type=Path, help="run folder [out/PRESET, or out/PRESET-ABLATION; with --init, its name for PRESET]")
    add("--resume", action="store_true", help="fail if there is no run to continue")
    add("--prepare", action="store_true", help="only tokenize --data, into --cache")
    add("--estimate", action="store_true", help="only print parameters, FLOPs and time")
    add("--fill-mask", metavar="TEXT", help="only predict each [MASK] of TEXT with the model of --init")
    preset = value_in(argv, "--preset", "toy")
    add_flags(parser, Config, PRESETS.get(preset, {}))
    add_flags(parser, TrainConfig, TRAIN_PRESETS.get(preset, {}))
    options = parser.parse_args(argv)
    flags, recipe = given_flags(options, Config), given_flags(options, TrainConfig)
    preset, start, tokenizer = options.preset or "toy", None, None
    name, start_recipe, origin = preset, TRAIN_PRESETS[preset], f"that of {preset}"
    try:
        if "init" in recipe and "tokenizer" in recipe:
            raise ValueError("--tokenizer: --init comes with its own")
        if recipe.get("wandb") and importlib.util.find_spec("wandb") is None:
            raise ValueError("--wandb: this needs the package wandb: pip install wandb")
        if "init" in recipe and options.fill_mask is None:
            start, tokenizer = load_model(Path(options.init))
            config = config_from(start.config, options.ablation, flags)
            name = f"{checkpoint_of(Path(options.init)).resolve().parent.name}-{options.ablation or 'more'}"
            if options.preset is None:
                start_recipe, origin = recipe_of(Path(options.init))
        else:
            if "tokenizer" in recipe:
                tokenizer = Tokenizer.read(recipe["tokenizer"])
                flags.setdefault("vocab_size", len(tokenizer))
            config = make_config(preset, options.ablation or "mae-lm", **flags)
            if options.ablation not in (None, "mae-lm"):
                name += f"-{options.ablation}"
        if tokenizer is not None:
            check_tokenizer(tokenizer, config, recipe)
        train = TrainConfig(**start_recipe | recipe)
        refuse_idle_flags(config, train, flags | recipe)
    except ValueError as error:
        parser.error(str(error))
    return Command(config, train, options.out or Path("out") / name, options.resume, options.prepare, options.estimate,
                   options.fill_mask, start, tokenizer, origin)


def recipe_of(init: Path) -> tuple[dict, str]:
    """The recipe of a run that begins with weights, and whose it is: their own run's, or a cautious one."""
    folder = checkpoint_of(init).parent
    there = run_settings(folder)
    if "max_steps" not in there:
        return CAUTIOUS, "a cautious one, as the weights come without"
    rates = {name: round(there[name] / 5, 12) for name in ("learning_rate", "muon_learning_rate")}
    return {name: there[name] for name in RECIPE} | rates, f"that of {folder} with a fifth of its peak rates"


def refuse_idle_flags(config: Config, train: TrainConfig, given: dict):
    """ValueError for a flag that is given and has no effect."""
    idle = ("muon_learning_rate", "muon_weight_decay") if train.optimizer == "adamw" else ()
    idle += ("encoder_fill", "decoder_reset") if config.mask_in_encoder == 0 else ()
    idle += ("decoder_dim", "decoder_relative") if config.decoder_layers == 0 else ()
    for field in idle:
        if given.get(field):
            raise ValueError(f"{field}={given[field]!r} has no effect here: leave it out")


def check_tokenizer(tokenizer: Tokenizer, config: Config, recipe: dict):
    """Take `uncased` from a tokenizer that is given. ValueError for flags that contradict it."""
    if recipe.setdefault("uncased", tokenizer.uncased) != tokenizer.uncased:
        raise ValueError(f"uncased={recipe['uncased']}: the given tokenizer has {tokenizer.uncased}")
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size}: the given tokenizer has {len(tokenizer)} tokens")


# ---- 2. One training step, and evaluation -------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then linear decay to 0 (Table 4)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


Batch = tuple[Tensor, Corruption]  # tokens (B, n) int64, and what is masked in them


def micro_batch(train: TrainConfig, world: int) -> int:
    """Sequences at a time on each of `world` devices. UserError if the batch is not a whole number of them."""
    size = min(train.micro_batch_size, train.batch_size // world)
    if size == 0 or train.batch_size % (size * world):
        raise UserError(f"batch_size={train.batch_size} is not a multiple of micro_batch_size={size} times {world} "
                        "processes; change --batch-size or --micro-batch-size")
    return size


def batch_of_step(step: int, rows: Rows, config: Config, train: TrainConfig, worker: Worker) -> list[Batch]:
    """This process's micro-batches of a step: rows by (seed, step), masks by (seed, step, micro-batch)."""
    size = micro_batch(train, worker.world_size)
    chosen = rows_of_step(train.seed, step, train.batch_size, len(rows))
    batches = []
    for number in range(worker.rank, train.batch_size // size, worker.world_size):
        tokens = torch.from_numpy(rows[chosen[number * size:(number + 1) * size]])  # (size, n)
        generator = torch.Generator().manual_seed(seed_of(train.seed, step, number))
        batch = tokens, corrupt(tokens, config, generator)
        if worker.device.type == "cuda":  # from pinned memory a copy does not wait for the GPU
            batch = tokens.pin_memory(), Corruption(*[x.pin_memory() for x in batch[1]])
        batches.append(batch)
    return batches


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    tokens, *fields = [x.to(device, non_blocking=True) for x in (batch[0], *batch[1])]
    return tokens, Corruption(*fields)


def train_step(model: nn.Module, optimizers: list, batches: list[Batch], step: int, train: TrainConfig, worker: Worker):
    """One optimizer step -> this process's mean loss, and the norm of the gradient before clipping, scalars."""
    total = torch.zeros((), device=worker.device)
    if train.compile == "graphs":  # else a graph's output is p.grad, and the next micro-batch overwrites it
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    for i, batch in enumerate(batches):  # their gradients add up in p.grad
        torch.manual_seed(seed_of(train.seed, step, i * worker.world_size + worker.rank, 1))  # for dropout
        wait = worker.world_size > 1 and i < len(batches) - 1
        # DDP averages the gradients over processes in the backward pass, unless it is told to wait.
        with model.no_sync() if wait else nullcontext():
            with worker.autocast():
                loss = model(*to_device(batch, worker.device)) / len(batches)
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
    factor = learning_rate_factor(step, train.warmup_steps, train.max_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * optimizer.defaults["lr"]  # the peak
        optimizer.step()
        optimizer.zero_grad()
    return total, norm


def evaluation_tokens(rows: Rows, train: TrainConfig):
    """At most eval_rows validation rows (rows, n) int64, evenly spaced over the whole text."""
    chosen = np.linspace(0, len(rows) - 1, min(train.eval_rows, len(rows))).astype(np.int64)
    return torch.from_numpy(rows[chosen])


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, train: TrainConfig, worker: Worker) -> float:
    """Mean loss on the evaluation_tokens with fixed masks, in nats per masked token."""
    model.eval()
    tokens = evaluation_tokens(rows, train)
    corruption = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    size, total, count = train.micro_batch_size, 0.0, 0
    # Each process takes every world-th micro-batch; the last one may be smaller, so rows are counted.
    for start in range(worker.rank * size, len(tokens), worker.world_size * size):
        part = tokens[start:start + size], Corruption(*[x[start:start + size] for x in corruption])
        with worker.autocast():
            total += model(*to_device(part, worker.device)).item() * len(part[0])
        count += len(part[0])
    model.train()
    total, count = worker.all_reduce(total, count)
    return total / count


def unigram_entropy(rows: Rows, train: TrainConfig) -> float:
    """Entropy in nats of the real evaluation_tokens: the loss of a model that knows only how frequent each token is."""
    tokens = evaluation_tokens(rows, train)
    p = tokens[tokens >= NUM_SPECIAL].bincount().double() / (tokens >= NUM_SPECIAL).sum()
    return float(torch.special.entr(p).sum())


# ---- 3. The run and its loop --------------------------------------------------------------------------------
@dataclass
class Run:
    """A run, as far as it is after `step` steps."""
    out: Path
    train: TrainConfig
    worker: Worker
    rows: dict[str, Rows]
    model: MAELM
    optimizers: list
    step: int = 0
    seconds: float = 0.0  # of training: evaluations and checkpoints are not counted
    wandb: object = None  # its run there, of the first process if --wandb is given


def loop(run: Run) -> int:
    """Train from run.step to train.last_step. Returns 0, or the number of the signal that ended it."""
    model, train, worker, out, step = run.model, run.train, run.worker, run.out, run.step
    network = model
    if worker.world_size > 1:
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        network.broadcast_buffers = False  # they never change (as an argument, it has another name in each version)
    tokens = train.batch_size * model.config.seq_len  # in a step
    losses, norms = [], []  # since the last line of the log
    stopped = False
    start = time.perf_counter() - run.seconds  # later by the time of what is not training
    logged = run.seconds  # seconds at the last line of the log
    draw = partial(batch_of_step, rows=run.rows["train"], config=model.config, train=train, worker=worker)
    bar = tqdm(total=train.last_step, initial=step, unit="step", disable=None if worker.is_main else True)
    # Rows and masks of the next step are drawn by a thread while this step is computed.
    with Interrupt() as interrupt, bar, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(draw, step)
        while step < train.last_step and not stopped:
            batches = coming.result()
            coming = ahead.submit(draw, step + 1)

            # ---- one training step ----
            loss, norm = train_step(network, run.optimizers, batches, step, train, worker)
            losses.append(loss)
            norms.append(norm)
            step += 1
            bar.update()
            # ---------------------------

            # All processes stop if one is told to. To ask them makes a GPU wait: not after every step.
            if worker.world_size == 1 or step % 4 == 0:
                stopped = sum(worker.all_reduce(interrupt.signal)) > 0
            last = step == train.last_step or stopped
            saving = step % train.checkpoint_interval == 0 or last

            # ---- log, evaluate, save ----
            if step % train.log_interval == 0 or saving:  # also where a run can go on: its lines stay the same
                # The mean over steps and processes: each process has an equal share of every batch.
                loss = sum(worker.all_reduce(sum(losses))) / worker.world_size / len(losses)
                if not math.isfinite(loss):
                    raise UserError(f"step {step}: the loss is not finite; start again with a lower --learning-rate")
                seconds = time.perf_counter() - start
                speed = len(losses) * tokens / (seconds - logged)
                if worker.is_main:
                    norm = float(sum(norms)) / len(norms)
                    write_log(run, step=step, loss=loss, grad_norm=norm, seconds=seconds, tokens_per_second=speed,
                              **progress(run, step, speed))
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                losses, norms, logged = [], [], seconds
            seconds = time.perf_counter() - start
            if step % train.eval_interval == 0 or (last and not stopped):
                val_loss = evaluate(model, run.rows["val"], train, worker)
                if worker.is_main:
                    write_log(run, step=step, val_loss=val_loss, seconds=seconds)
                    left = (train.last_step - step) / step * seconds / 60
                    bar.write(f"step {step:>6,}/{train.last_step:,}  validation loss {val_loss:.3f}  "
                              f"{step * tokens / seconds:,.0f} tokens/s  {left:.1f} min left")
                    sys.stdout.flush()
            if saving and worker.is_main:
                save_checkpoint(out, step, model, run.optimizers, logged, train.keep_checkpoints)
                draw_loss(out)
            start = time.perf_counter() - seconds  # evaluating and saving is not training
    worker.all_reduce(0)  # until the first process has saved
    return (interrupt.signal or 15) if stopped else 0


def progress(run: Run, step: int, speed: float) -> dict[str, float]:
    """What a line of log.jsonl says about rates, progress and the device, at a speed in tokens per second."""
    rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers]
    rows = step * run.train.batch_size
    found = dict(zip(("lr", "muon_lr"), rates)) | {
        "tokens": rows * run.model.config.seq_len, "epoch": round(rows / len(run.rows["train"]), 4)}
    if run.worker.device.type == "cuda":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak = peak_of(torch.cuda.get_device_name(), run.worker.dtype)
        if peak is not None:
            config = run.model.config
            found["mfu"] = speed / config.seq_len * flops(config) / (peak * run.worker.world_size)
    return found


def write_log(run: Run, **line):
    """Append a JSON object to log.jsonl, as a line."""
    with open(run.out / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    if run.wandb is not None:
        run.wandb.log(line)


def copy_weights(model: MAELM, start: MAELM) -> str:
    """Copy the weights of `start` that have the same name and shape in a model. Returns the names of what is new."""
    here = model.state_dict()
    taken = {name: x for name, x in start.state_dict().items() if name in here and x.shape == here[name].shape}
    model.load_state_dict(taken, strict=False)
    return ", ".join(dict.fromkeys(".".join(name.split(".")[:3]) for name in here if name not in taken))


def open_run(command: Command, folder: Path, worker: Worker) -> Run:
    """A run on the prepared corpus `folder`: new, or as far as it is in --out. UserError if that is another run."""
    config, train, out, start = command.config, command.train, command.out, command.start
    n = config.seq_len
    rows = {split: Rows(folder, split, n) for split in SPLITS}
    k, least = config.masks_per_row(n), (n - 1) // 2  # real tokens in a row, if all documents are of one token
    if not 0 < k <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens in a row: use 1 to {least}")
    torch.manual_seed(train.seed)
    model = MAELM(config)
    if worker.is_main:  # the others wait in join
        vocabulary = short_hash((folder / "tokenizer.json").read_bytes())
        settings = {"corpus": folder.name, "vocabulary": vocabulary, "init_weights": None}
        settings |= asdict(config) | asdict(train)
        if start is not None:
            settings["init_weights"] = short_hash(checkpoint_of(Path(train.init)).read_bytes())
        check_run_folder(out, settings, command.resume)
        shutil.copyfile(folder / "tokenizer.json", out / "tokenizer.json")
    worker.init_process_group()
    worker.all_reduce(0)  # until the first process is here
    state = load_checkpoint(out)
    if start is not None and state is None:
        new = copy_weights(model, start)
        if worker.is_main:
            print(f"the weights of --init are copied; new: {new or 'nothing'}")
    model = model.to(worker.device)
    run = Run(out, train, worker, rows, model, make_optimizers(model, train, worker.dtype))
    if state is not None:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.seconds = state["step"], state["seconds"]
    if sum(worker.all_reduce(run.step)) != worker.world_size * run.step:
        raise UserError(f"{out}: not all processes see the same checkpoints; --out must be one folder for all of them")
    return run


def check_run_folder(out: Path, settings: dict, resume: bool):
    """Write config.json to a new run folder, or compare it: UserError if the folder is of another run."""
    path = out / "config.json"
    if path.is_file() and checkpoints(out):
        same_settings(out, read_json(path), {name: settings[name] for name in settings if name not in MAY_CHANGE})
    elif resume:
        raise UserError(f"--resume: {out} holds no run to continue")
    elif not path.is_file():  # a run without a checkpoint can begin anew
        refuse_other_files(out)
    for stale in out.glob(".*.tmp"):  # of a process that was killed while it wrote
        stale.unlink()
    write_json(path, settings)


def pretrain(run: Run) -> int:
    """Run or continue a pre-training run. Returns the exit code: 0, or 128 + the number of the signal that ended it."""
    config, train, worker, out = run.model.config, run.train, run.worker, run.out
    if run.step >= train.last_step:
        if worker.is_main:
            print(f"{out} is finished at step {run.step}: nothing to do; choose another --out for another run")
        return 0
    small = config.encoder_dim < 256  # a whole run takes less time than the compilation
    on = train.compile in ("on", "graphs")
    if on or (train.compile == "auto" and worker.device.type == "cuda" and not small):
        torch._dynamo.config.suppress_errors = train.compile == "auto"  # without a compiler, run as it is
        torch._dynamo.config.optimize_ddp = False  # it would cut the model into pieces
        mode = "reduce-overhead" if train.compile == "graphs" else None
        run.model.compile(dynamic=False, mode=mode)  # in place: names of parameters stay as they are
        if worker.is_main:
            print("compiling the model in its first steps takes a minute or two (--compile off: without)", flush=True)
    entropy = unigram_entropy(run.rows["val"], train)
    if worker.is_main:
        parameters = sum(p.numel() for p in run.model.parameters())
        print(f"{out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, "
              f"decoder {config.decoder_layers} x {config.decoder_width}\n"
              f"{describe_epochs(train, config, len(run.rows['train']))}\n"
              f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, "
              f"{'continuing at' if run.step else 'from'} step {run.step}\n"
              f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context", flush=True)
        # What an interrupted run logged after its checkpoint goes: those steps are trained again.
        kept = [line for line in read_log(out) if line["step"] <= run.step and run.step > 0]
        with atomic(out / "log.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if train.wandb:
            run.wandb = open_wandb(train.wandb, out, asdict(config) | asdict(train))
    with explain_out_of_memory():
        if run.step == 0:
            val_loss = evaluate(run.model, run.rows["val"], train, worker)
            if worker.is_main:
                write_log(run, step=0, unigram_entropy=entropy, val_loss=val_loss)
        stopped = loop(run)
    if worker.is_main:
        if run.wandb is not None:
            run.wandb.finish()
        if stopped:
            print(f"stopped by signal {stopped}; the same command continues")
        else:
            print(examples(run.model, Tokenizer.load(out), run.rows["val"]))
        print(f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}", flush=True)
    return 128 + stopped if stopped else 0


def main(argv=None):
    with clear_errors("train.py"), ExitStack() as held:
        command = parse(argv)
        config, train = command.config, command.train
        if command.fill_mask is not None:
            model, tokenizer = load_model(Path(train.init or command.out))
            print(fill_mask(model, tokenizer, command.fill_mask))
            return
        source = corpus_settings(config, asdict(train), command.tokenizer)
        if command.estimate:
            folder = corpus_folder(source)
            there = (folder / "meta.json").is_file()
            print(estimate(config, train, len(Rows(folder, "train", config.seq_len)) if there else None))
            return
        worker = make_worker(train.precision, train.device, small=config.encoder_dim < 256)
        micro_batch(train, worker.world_size)
        if worker.is_main and command.start is not None:
            print(f"recipe: {command.origin}; {train.optimizer}, learning rate {train.learning_rate:g}, "
                  f"{train.max_steps:,} steps of {train.batch_size} rows", flush=True)
        if worker.is_main and not command.prepare:
            held.enter_context(lock_folder(command.out))  # until this process ends
        folder = prepared_corpus(source)
        if command.prepare:
            print(f"{folder}: prepared")
            return
        run = open_run(command, folder, worker)
        code = pretrain(run)
        worker.destroy_process_group(code)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
