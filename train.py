"""Pre-training, from a laptop to many machines.

    python train.py                                         # a real, small MAE-LM in minutes; nothing is downloaded
    python train.py --ablation mlm                          # the same for standard MLM, a row of Table 2
    python train.py --preset base --data texts/ --prepare   # only tokenize, into --cache
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of both configurations is a flag; -h shows the values of --preset. The same command continues an unfinished
run. A step's rows do not depend on the number of processes; masks and dropout may.
"""
import argparse
import math
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from maelm import ABLATIONS, MAELM, Config, Corruption, corrupt
from support.cli import (Interrupt, Parser, UserError, add_flags, clear_errors, explain_out_of_memory,
                         fields_of, require, require_positive)
from support.corpus import (SPLITS, Rows, describe, evenly, prepared_corpus, rows_of_step, seed_of,
                            unigram_entropy)
from support.documents import CACHE, VAL_SHARE
from support.files import lock_folder, open_folder, short_hash
from support.fill_mask import examples, fill_mask
from support.log import RunLog, draw_loss
from support.models import (check, checkpoint_of, checkpoints, copy_weights, load_model, load_weights, make_model,
                            read_tensors, run_settings, save_checkpoint, use_of_gpu)
from support.optim import make_optimizers
from support.tokenizer import Tokenizer
from support.worker import Worker, compile_model, make_worker


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
    position_init: str = "normal"  # normal | sinusoid: where learned positions start
    clip_norm: float = 2.0  # of the gradient over all parameters
    precision: str = "auto"  # auto | fp32 (TF32 on CUDA) | bf16: of matrix products; auto = bf16 if in hardware
    device: str = "auto"  # auto | cpu | cuda | mps
    compile: str = "auto"  # auto | on | off | graphs (with CUDA graphs); auto = on, on CUDA if encoder_dim >= 256
    seed: int = 0  # 0 or more, below 2^63
    log_interval: int = 100  # steps between lines of log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # validation rows, always the same with the same masks
    checkpoint_interval: int = 10_000  # steps between checkpoints
    keep_checkpoints: int = 2  # how many are kept, 0 or more; 0 = all (Figure 3)
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
            position_init=self.position_init in ("normal", "sinusoid"),
            precision=self.precision in ("auto", "fp32", "bf16"),
            compile=self.compile in ("auto", "on", "off", "graphs"),
            seed=0 <= self.seed < 2 ** 63, keep_checkpoints=self.keep_checkpoints >= 0,
            stop_at=0 <= self.stop_at <= self.max_steps,
            weight_decay=self.weight_decay >= 0, muon_weight_decay=self.muon_weight_decay >= 0,
            adam_beta1=0 <= self.adam_beta1 < 1, adam_beta2=0 <= self.adam_beta2 < 1,
            adam_epsilon=self.adam_epsilon >= 0, cache=self.cache != "",
        )

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.stop_at or self.max_steps


# Differs from the paper: with these, small models learn in minutes; bench/results/presets.md.
SMALL = dict(norm="pre", decoder_relative=True, position_init="sinusoid", optimizer="muon", log_interval=20)
PRESETS = {  # as differences from the defaults of Config and TrainConfig; section 4.1 and Table 4
    "toy": SMALL | dict(
        vocab_size=2048, seq_len=64, encoder_layers=3, encoder_dim=128, encoder_heads=2, decoder_layers=1, dropout=0.0,
        init_std=0.06, batch_size=64, max_steps=1900, learning_rate=6e-3, weight_decay=0.1, warmup_steps=100,
        eval_interval=100, eval_rows=512, checkpoint_interval=500),
    "small": SMALL | dict(
        vocab_size=8192, seq_len=128, encoder_layers=6, encoder_dim=384, encoder_heads=6, decoder_layers=2,
        init_std=0.03, batch_size=256, micro_batch_size=256, max_steps=20_000, learning_rate=2e-3, warmup_steps=1000,
        eval_interval=500, checkpoint_interval=1000),
    "base": dict(),
    "base++": dict(vocab_size=64000, rel_pos_buckets=64, uncased=False, max_steps=2_000_000, learning_rate=2e-4),
    "large++": dict(
        vocab_size=64000, encoder_layers=24, encoder_dim=1024, encoder_heads=16, rel_pos_buckets=128,
        rel_pos_max_distance=256, uncased=False, micro_batch_size=32, max_steps=1_000_000, learning_rate=1e-4,
        clip_norm=1.0),
}
PRESETS["laptop"] = PRESETS["toy"] | dict(  # the toy for 100 million tokens
    max_steps=24_500, learning_rate=3e-3, muon_learning_rate=1e-2, weight_decay=0.01, warmup_steps=500,
    log_interval=100, eval_interval=500, checkpoint_interval=2000)
CAUTIOUS = dict(batch_size=256, max_steps=10_000, learning_rate=1e-4, warmup_steps=600, eval_interval=500,
                checkpoint_interval=1000)  # for --init with weights without a run

SHAPE = ("vocab_size", "seq_len", "encoder_layers", "encoder_dim", "encoder_heads", "norm", "rel_pos_buckets",
         "rel_pos_max_distance")  # fields that the encoder's weights decide
OBJECTIVE = set().union(*ABLATIONS.values()) - set(SHAPE)  # fields that rows of Table 2 decide
RECIPE = ("batch_size", "micro_batch_size", "max_steps", "optimizer", "learning_rate", "muon_learning_rate",
          "warmup_steps", "weight_decay", "muon_weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm",
          "position_init", "log_interval", "eval_interval", "eval_rows", "checkpoint_interval")  # --init takes it along
MAY_CHANGE = ("init", "tokenizer", "stop_at", "micro_batch_size", "device", "compile", "log_interval", "eval_interval",
              "checkpoint_interval", "keep_checkpoints", "cache", "wandb")  # when a run is continued


def make_config(preset: str = "base", ablation: str | None = None, there: Config | None = None, **flags) -> Config:
    """Default < preset, or the model `there` of --init < ablation < flag. ValueError for what is not possible."""
    start = fields_of(Config, PRESETS[preset]) if there is None else asdict(there)
    if there is not None and ablation is not None:
        start |= {name: getattr(Config, name) for name in OBJECTIVE}
        # A decoder that is new is as deep as those of the presets.
        start["decoder_layers"] = there.decoder_layers or max(1, min(4, there.encoder_layers // 3))
    config = check(Config(**start | ABLATIONS[ablation or "mae-lm"] | flags))
    for name in SHAPE if there is not None else ():
        if getattr(config, name) != getattr(there, name):
            raise ValueError(f"{name}={getattr(config, name)!r}: the weights of --init have {getattr(there, name)!r}")
    return config


def make_recipe(preset: str | None, init: str, flags: dict) -> TrainConfig:
    """Default < preset, or the run of --init if no preset is given < flag."""
    if preset is not None or not init:
        return TrainConfig(**fields_of(TrainConfig, PRESETS[preset or "toy"]) | flags)
    folder = checkpoint_of(Path(init)).parent
    there = run_settings(folder)
    if "max_steps" not in there:
        return TrainConfig(**CAUTIOUS | flags)
    try:
        rates = {name: round(there[name] / 5, 12) for name in ("learning_rate", "muon_learning_rate")}
        start = {name: there[name] for name in RECIPE} | rates
        return TrainConfig(**start | flags)
    except (TypeError, KeyError) as error:
        raise UserError(f"{folder}/config.json: damaged ({error!r}); give --preset, or restore it") from error


class Command(NamedTuple):
    """What the command line asks for."""
    config: Config
    train: TrainConfig
    out: Path
    start: MAELM | None  # the model of --init, to begin with
    tokenizer: Tokenizer | None  # that of --init or --tokenizer; without it, the corpus has its own
    options: argparse.Namespace  # the other flags


def parse(argv) -> Command:
    """Read the command line. It ends the program for flags that are not possible."""
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="section 4.1 and Table 4 [toy; with --init, the recipe only]")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm; with --init, what that run is]")
    add("--out", type=Path, help="run folder [out/PRESET, or out/PRESET-ABLATION; with --init, its name for PRESET]")
    add("--resume", action="store_true", help="fail if there is no run to continue")
    add("--prepare", action="store_true", help="only tokenize --data, into --cache")
    add("--fill-mask", metavar="TEXT", help="only predict each [MASK] of TEXT with the model of --init")
    shown = PRESETS[parser.parse_known_args(argv)[0].preset or "toy"]
    add_flags(parser, Config, shown)
    add_flags(parser, TrainConfig, shown)
    options = parser.parse_args(argv)
    try:
        return command_of(options)
    except ValueError as error:
        parser.error(str(error))


def command_of(options: argparse.Namespace) -> Command:
    """The command of parsed options. ValueError for flags that are not possible together."""
    flags, train_flags = fields_of(Config, vars(options)), fields_of(TrainConfig, vars(options))
    init = train_flags.get("init", "") if options.fill_mask is None else ""
    start = there = tokenizer = None
    if init and "tokenizer" in train_flags:
        raise ValueError("--tokenizer: --init comes with its own")
    if init:
        start, tokenizer = load_model(Path(init))
        there = start.config
    elif "tokenizer" in train_flags:
        tokenizer = Tokenizer.read(train_flags["tokenizer"])
        flags = {"vocab_size": len(tokenizer)} | flags
    if tokenizer is not None:
        train_flags = {"uncased": tokenizer.uncased} | train_flags

    config = make_config(options.preset or "toy", options.ablation, there, **flags)
    train = make_recipe(options.preset, init, train_flags)
    if tokenizer is not None and train.uncased != tokenizer.uncased:
        raise ValueError(f"uncased={train.uncased}: the given tokenizer has {tokenizer.uncased}")
    if tokenizer is not None and config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size}: the given tokenizer has {len(tokenizer)} tokens")
    refuse_idle_flags(config, train, flags | train_flags)

    name = f"{options.preset or 'toy'}-{options.ablation or 'mae-lm'}".removesuffix("-mae-lm")
    if init:
        name = f"{checkpoint_of(Path(init)).resolve().parent.name}-{options.ablation or 'more'}"
    return Command(config, train, options.out or Path("out") / name, start, tokenizer, options)


def refuse_idle_flags(config: Config, train: TrainConfig, given: dict):
    """ValueError for a flag that is given and has no effect."""
    idle = ("muon_learning_rate", "muon_weight_decay") if train.optimizer == "adamw" else ()
    idle += ("encoder_fill", "decoder_reset") if config.mask_in_encoder == 0 else ()
    idle += ("decoder_relative",) if config.decoder_layers == 0 else ()
    for field in idle:
        if given.get(field):
            raise ValueError(f"{field}={given[field]!r} has no effect here: leave it out")


# ---- 2. One training step, and evaluation -------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then linear decay to 0 (Table 4)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def micro_batch(train: TrainConfig, world: int) -> int:
    """Sequences at a time on each of `world` devices. UserError if the batch is not a whole number of them."""
    size = min(train.micro_batch_size, train.batch_size // world)
    if size == 0 or train.batch_size % (size * world):
        raise UserError(f"batch_size={train.batch_size} is not a multiple of micro_batch_size={size} times {world} "
                        "processes; change --batch-size or --micro-batch-size")
    return size


def batch_of_step(step: int, rows: Rows, config: Config, train: TrainConfig, worker: Worker) -> list[tuple]:
    """This process's micro-batches (tokens, corruption): rows by (seed, step), masks by (seed, step, micro-batch)."""
    size = micro_batch(train, worker.world_size)
    chosen = rows_of_step(train.seed, step, train.batch_size, len(rows)).reshape(-1, size)
    batches = []
    for number in range(worker.rank, len(chosen), worker.world_size):
        tokens = torch.from_numpy(rows[chosen[number]])  # (size, n)
        corruption = corrupt(tokens, config, torch.Generator().manual_seed(seed_of(train.seed, step, number)))
        if worker.device.type == "cuda":  # from pinned memory a copy does not wait for the GPU
            tokens, corruption = tokens.pin_memory(), Corruption(*[x.pin_memory() for x in corruption])
        batches.append((tokens, corruption))
    return batches


def train_step(model: nn.Module, optimizers: list, batches: list[tuple], step: int, train: TrainConfig, worker: Worker):
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
                loss = model(*worker.put(*batch)) / len(batches)
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


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, train: TrainConfig, worker: Worker) -> float:
    """Mean loss on eval_rows rows with fixed masks, in nats per masked token."""
    model.eval()
    tokens = evenly(rows, train.eval_rows)
    corruption = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    size, total, count = train.micro_batch_size, 0.0, 0
    # Each process takes every world-th micro-batch; the last one may be smaller, so rows are counted.
    for start in range(worker.rank * size, len(tokens), worker.world_size * size):
        part = tokens[start:start + size]
        with worker.autocast():
            loss = model(*worker.put(part, Corruption(*[x[start:start + size] for x in corruption])))
        total += loss.item() * len(part)
        count += len(part)
    model.train()
    total, count = worker.all_reduce(total, count)
    return total / count


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
    since: float = 0.0  # the time from which seconds are still to be counted
    log: RunLog | None = None  # of the first process


def loop(run: Run) -> int:
    """Train from run.step to train.last_step. Returns 0, or the number of the signal that ended it."""
    model, train, worker = run.model, run.train, run.worker
    network = model
    if worker.world_size > 1:
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        network.broadcast_buffers = False  # they never change (as an argument, it has another name in each version)
    draw = partial(batch_of_step, rows=run.rows["train"], config=model.config, train=train, worker=worker)
    bar = tqdm(total=train.last_step, initial=run.step, unit="step", disable=None if worker.is_main else True)
    recent = []  # loss and norm of the steps since the last line of the log
    stopped = False
    run.since = time.perf_counter()
    # Rows and masks of the next step are drawn by a thread while this step is computed.
    with Interrupt() as interrupt, bar, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(draw, run.step)
        while run.step < train.last_step and not stopped:
            batches = coming.result()
            coming = ahead.submit(draw, run.step + 1)
            recent.append(train_step(network, run.optimizers, batches, run.step, train, worker))
            run.step += 1
            bar.update()

            # All processes stop if one is told to. To ask them makes a GPU wait: not after every step.
            if worker.world_size == 1 or run.step % 4 == 0:
                stopped = sum(worker.all_reduce(interrupt.signal)) > 0
            last = run.step == train.last_step or stopped
            saving = run.step % train.checkpoint_interval == 0 or last
            evaluating = run.step % train.eval_interval == 0 or (last and not stopped)
            if run.step % train.log_interval == 0 or saving or evaluating:
                log_steps(run, recent, bar)
                recent = []
                if evaluating:
                    log_validation(run, bar)
                if saving and worker.is_main:
                    save_checkpoint(run.out, run.step, model, run.optimizers, run.seconds, train.keep_checkpoints)
                    draw_loss(run.out)
                run.since = time.perf_counter()
    worker.wait()  # until the first process has saved
    return (interrupt.signal or 15) if stopped else 0


def log_steps(run: Run, recent: list[tuple], bar: tqdm):
    """Log the mean loss and norm of recent steps, and the speed. UserError if the loss is not finite."""
    losses, norms = zip(*recent)
    # The mean over steps and processes: each process has an equal share of every batch.
    total, = run.worker.all_reduce(float(sum(losses)))
    loss = total / run.worker.world_size / len(losses)
    if not math.isfinite(loss):
        raise UserError(f"step {run.step}: the loss is not finite; start again with a lower --learning-rate")
    lap = time.perf_counter() - run.since  # a GPU has ended its work, as the loss is known
    run.seconds += lap
    config, rows = run.model.config, run.step * run.train.batch_size
    speed = len(losses) * run.train.batch_size * config.seq_len / lap
    bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
    if run.worker.is_main:
        rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers]
        run.log.write(step=run.step, loss=loss, grad_norm=float(sum(norms)) / len(norms), seconds=run.seconds,
                      tokens_per_second=speed, **dict(zip(("lr", "muon_lr"), rates)), tokens=rows * config.seq_len,
                      epoch=round(rows / len(run.rows["train"]), 4), **use_of_gpu(config, run.worker, speed))


def log_validation(run: Run, bar: tqdm):
    """Log the validation loss, and print it with the time that is left."""
    val_loss = evaluate(run.model, run.rows["val"], run.train, run.worker)
    if run.worker.is_main:
        step, last, seconds = run.step, run.train.last_step, run.seconds
        run.log.write(step=step, val_loss=val_loss, seconds=seconds)
        speed = step * run.train.batch_size * run.model.config.seq_len / seconds
        bar.write(f"step {step:>6,}/{last:,}  validation loss {val_loss:.3f}  {speed:,.0f} tokens/s  "
                  f"{(last - step) / step * seconds / 60:.1f} min left")


def open_run(command: Command, folder: Path, worker: Worker) -> Run:
    """A run on the prepared corpus `folder`: new, or as far as it is in --out. UserError if that is another run."""
    config, train, out, start = command.config, command.train, command.out, command.start
    n = config.seq_len
    rows = {split: Rows(folder, split, n) for split in SPLITS}
    k, least = config.num_masked(n), (n - 1) // 2  # real tokens in a row, even if each document has one
    if k > least:
        least = min(split.fewest_real_tokens() for split in rows.values())
    if not 0 < k <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens in a row: use 1 to {least}")
    torch.manual_seed(train.seed)
    model = make_model(config, train.position_init).to(worker.device)
    if worker.is_main:
        vocabulary = short_hash((folder / "tokenizer.json").read_bytes())
        weights = short_hash(checkpoint_of(Path(train.init)).read_bytes()) if train.init else None
        settings = {"corpus": folder.name, "vocabulary": vocabulary, "init_weights": weights}
        settings |= asdict(config) | asdict(train)
        begun = bool(checkpoints(out))  # a run without a checkpoint can begin anew
        if command.options.resume and not begun:
            raise UserError(f"--resume: {out} holds no run to continue")
        open_folder(out, settings, MAY_CHANGE, begun)
        for stale in out.glob(".*.tmp"):  # of a process that was killed while it wrote
            stale.unlink()
        shutil.copyfile(folder / "tokenizer.json", out / "tokenizer.json")
    worker.init_process_group()
    worker.wait()  # until the first process has checked --out
    run = Run(out, train, worker, rows, model, make_optimizers(model, train, worker.dtype))
    if found := checkpoints(out):
        state = read_tensors(found[-1], "step", "seconds", "model", "optimizers")
        load_weights(model, state["model"], found[-1])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.seconds = state["step"], state["seconds"]
    elif start is not None:
        new = copy_weights(model, start)
        if worker.is_main:
            print(f"the weights of --init are copied; new: {new or 'nothing'}\n"
                  f"recipe: {train.optimizer}, learning rate {train.learning_rate:g}, {train.max_steps:,} steps of "
                  f"{train.batch_size} rows")
    if sum(worker.all_reduce(run.step)) != worker.world_size * run.step:
        raise UserError(f"{out}: not all processes see the same checkpoints; --out must be one folder for all of them")
    return run


def pretrain(run: Run) -> int:
    """Run or continue a pre-training run. Returns the exit code: 0, or 128 + the number of the signal that ended it."""
    config, train, worker, out = run.model.config, run.train, run.worker, run.out
    if run.step >= train.last_step:
        if worker.is_main:
            print(f"{out} is finished at step {run.step}: nothing to do; choose another --out for another run")
        return 0
    small = config.encoder_dim < 256  # a whole run takes less time than the compilation
    if train.compile in ("on", "graphs") or (train.compile == "auto" and worker.device.type == "cuda" and not small):
        compile_model(run.model, train.compile)
        if worker.is_main:
            print("compiling the model in its first steps takes a minute or two (--compile off: without)")
    entropy = unigram_entropy(evenly(run.rows["val"], train.eval_rows))
    if worker.is_main:
        parameters = sum(p.numel() for p in run.model.parameters())
        read, there = train.batch_size * train.last_step, len(run.rows["train"])
        million = config.seq_len / 1e6  # tokens of a row
        print(f"{out}: {parameters:,} parameters, encoder {config.encoder_layers} x {config.encoder_dim}, "
              f"decoder {config.decoder_layers} x {config.decoder_width}\n"
              f"{read * million:,.1f} M tokens of {train.data}, which has {there * million:,.1f} M: "
              f"{read / there:.2f} epochs\n"
              f"{worker.world_size} x {worker.device.type} in {str(worker.dtype).removeprefix('torch.')}, "
              f"{'continuing at' if run.step else 'from'} step {run.step}\n"
              f"unigram entropy of the validation tokens {entropy:.3f} nats: the loss without any context")
        run.log = RunLog(out, run.step, train.wandb, asdict(config) | asdict(train))
    with explain_out_of_memory():
        if run.step == 0:
            val_loss = evaluate(run.model, run.rows["val"], train, worker)
            if worker.is_main:
                run.log.write(step=0, unigram_entropy=entropy, val_loss=val_loss)
        stopped = loop(run)
    if worker.is_main:
        run.log.close()
        if stopped:
            print(f"stopped by signal {stopped}; the same command continues")
        else:
            print(examples(run.model.cpu(), Tokenizer.load(out), run.rows["val"]))
        print(f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}")
    return 128 + stopped if stopped else 0


def main(argv=None):
    with clear_errors("train.py"):
        command = parse(argv)
        config, train = command.config, command.train
        if command.options.fill_mask is not None:
            model, tokenizer = load_model(Path(train.init or command.out))
            print(fill_mask(model, tokenizer, command.options.fill_mask))
            return
        settings = asdict(config) | asdict(train)
        worker = make_worker(train.precision, train.device, small=config.encoder_dim < 256)
        micro_batch(train, worker.world_size)
        if command.options.prepare:
            print(describe(prepared_corpus(settings, command.tokenizer)))
            return
        with lock_folder(command.out) if worker.is_main else nullcontext():
            code = pretrain(open_run(command, prepared_corpus(settings, command.tokenizer), worker))
            worker.destroy_process_group(code)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
