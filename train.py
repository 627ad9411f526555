"""Pre-training, from a laptop to many machines.

    python train.py                                         # a small MAE-LM in minutes; nothing is downloaded
    python train.py --ablation mlm                          # a standard MLM, a row of Table 2
    python train.py --init out/toy --data texts/            # start from the weights and settings of another run
    python train.py --preset base --data texts/ --prepare   # tokenize into --cache, and do not train
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of Config, Recipe and RunOptions is a flag; -h shows its value in --preset. Repeat a command to continue an
unfinished run.
"""
import shutil
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple

import torch
from torch import nn

from maelm import ABLATIONS, MAELM, Config, Corruption, corrupt
from support.checkpoints import checkpoints, load_checkpoint, save_checkpoint, set_damaged_aside
from support.cli import (Parser, UserError, add_flags, clear_errors, explain_out_of_memory, fields_of, noted_signals,
                         require, require_positive, root_cause)
from support.corpus import (SPLITS, VAL_SHARE, Rows, describe, evenly, prepared_corpus, rows_of_step, seed_of,
                            unigram_entropy)
from support.documents import CACHE
from support.files import changes, lock_folder, write_json
from support.fill_mask import examples
from support.log import Progress, draw_loss, start_wandb
from support.models import check, make_model
from support.optim import make_optimizers
from support.start import (Start, copy_fitting_weights, default_out, inputs_of, load_start, refuse_many_masks,
                           settings_to_resume)
from support.tokenizer import Tokenizer
from support.worker import Worker, compile_model, make_worker


# ---- 1. Settings: Table 4 -----------------------------------------------------------------------------------
# The comment after a field is also its text in -h and in error messages.
@dataclass(frozen=True)
class Recipe:
    """The settings that, with Config, define a run. The defaults are those of the paper's base model."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG] (its train split); join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = VAL_SHARE  # share of documents held out for validation, between 0 and 1
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    max_steps: int = 125_000  # training steps, and length of the learning-rate schedule; below 10^7
    warmup_steps: int = 10_000  # steps until the peak learning rate, at most --max-steps; the rate then falls to 0
    optimizer: str = "adamw"  # adamw | muon: Muon updates the matrices of the layers, AdamW all other parameters
    learning_rate: float = 5e-4  # peak learning rate of AdamW
    muon_learning_rate: float = 2e-2  # peak learning rate of Muon
    weight_decay: float = 0.01  # weight decay of the parameters that AdamW updates, 0 or more
    muon_weight_decay: float = 0.1  # weight decay of the matrices that Muon updates, 0 or more
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients, 0 or more, below 1
    adam_beta2: float = 0.98  # decay of AdamW's mean of squared gradients, 0 or more, below 1
    adam_epsilon: float = 1e-6  # term added to AdamW's denominator
    clip_norm: float = 2.0  # maximum norm of the whole gradient; larger gradients are scaled down
    position_init: str = "normal"  # normal | sinusoid: initial values of the learned positions
    precision: str = "auto"  # auto | fp32 | bf16: for matrix products; auto is bf16 if the hardware supports it
    seed: int = 0  # seed of weights, data order, masks and dropout, 0 or more, below 2^63

    def __post_init__(self):
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps}: longer than the run, max_steps={self.max_steps}; "
                             "lower --warmup-steps")
        require_positive(self, "batch_size", "learning_rate", "muon_learning_rate", "adam_epsilon", "clip_norm")
        require(
            self,
            val_share=0 < self.val_share < 1, max_steps=0 < self.max_steps < 10 ** 7,
            warmup_steps=self.warmup_steps >= 0, optimizer=self.optimizer in ("adamw", "muon"),
            weight_decay=self.weight_decay >= 0, muon_weight_decay=self.muon_weight_decay >= 0,
            adam_beta1=0 <= self.adam_beta1 < 1, adam_beta2=0 <= self.adam_beta2 < 1,
            position_init=self.position_init in ("normal", "sinusoid"),
            precision=self.precision in ("auto", "fp32", "bf16"), seed=0 <= self.seed < 2 ** 63,
        )


@dataclass(frozen=True)
class RunOptions:
    """The settings that may change when a run continues, although a new micro_batch_size changes the masks."""
    init: str = ""  # run folder or checkpoint to start from, with its settings in place of a preset
    tokenizer: str = ""  # tokenizer.json of a byte-level BPE, or hf:NAME; by default, a BPE is learned from --data
    micro_batch_size: int = 64  # sequences per device and forward pass; gradients are accumulated
    stop_at: int = 0  # step at which to end early, without changing the schedule; 0 for never
    log_interval: int = 100  # steps between lines in the terminal and in log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # number of validation sequences; the sequences and their masks are fixed
    checkpoint_interval: int = 1_000  # steps between checkpoints
    keep_checkpoints: int = 2  # number of checkpoints to keep; 0 keeps all, for Figure 3
    device: str = "auto"  # auto | cpu | cuda | mps
    compile: str = "auto"  # auto | on | off: torch.compile; auto is on for CUDA if encoder_dim is at least 256
    cache: str = CACHE  # folder for tokenized corpora
    wandb: str = ""  # Weights & Biases project that also receives log.jsonl

    def __post_init__(self):
        require_positive(self, "micro_batch_size", "log_interval", "eval_interval", "eval_rows", "checkpoint_interval")
        require(self, stop_at=self.stop_at >= 0, keep_checkpoints=self.keep_checkpoints >= 0,
                compile=self.compile in ("auto", "on", "off"), cache=self.cache != "")


# Differs from the paper: small models learn in minutes with these settings; see bench/results/presets.md.
SMALL = dict(norm="pre", decoder_relative=True, position_init="sinusoid", optimizer="muon", log_interval=20)
PRESETS = {  # differences from the defaults of Config, Recipe and RunOptions; section 4.1 and Table 4
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
PRESETS["laptop"] = PRESETS["toy"] | dict(  # the toy preset, trained on 100 million tokens
    max_steps=24_500, learning_rate=3e-3, muon_learning_rate=1e-2, weight_decay=0.01, warmup_steps=500,
    log_interval=100, eval_interval=500, checkpoint_interval=2000)

KINDS = Config, Recipe, RunOptions  # the dataclasses whose fields are flags


class Settings(NamedTuple):
    """All settings of a run."""
    config: Config
    recipe: Recipe
    options: RunOptions

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        if self.options.stop_at == 0:
            return self.recipe.max_steps
        return min(self.options.stop_at, self.recipe.max_steps)

    def fields(self) -> dict:
        """All settings by name."""
        return asdict(self.config) | asdict(self.recipe) | asdict(self.options)


def make_settings(base: dict, flags: dict) -> Settings:
    """Combine settings: `flags` override `base`, for example a preset. Raises ValueError if a value is invalid."""
    config, recipe, options = [kind(**fields_of(kind, base | flags)) for kind in KINDS]
    check(config)  # the other two check themselves
    return Settings(config, recipe, options)


def make_config(preset: str = "base", ablation: str = "mae-lm", **flags) -> Config:
    """The Config of a preset. Flags override the ablation, which overrides the preset. Bad values raise ValueError."""
    return make_settings(PRESETS[preset] | ABLATIONS[ablation], flags).config


class Command(NamedTuple):
    """A command line."""
    settings: Settings
    out: Path
    start: Start
    flags: Namespace


def parse(argv) -> Command:
    """Read the command line. Exits with code 2 if flags are invalid."""
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="size and recipe (section 4.1, Table 4) [toy]; with --init, only the recipe")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm, or with --init the row of that run]")
    add("--out", type=Path, help="run folder [out/PRESET-ABLATION; with --init, the name of that run replaces PRESET]")
    add("--prepare", action="store_true", help="tokenize --data into --cache, and do not train")
    add("--change-recipe", action="store_true", help="continue the run in --out with another recipe")
    shown = PRESETS[parser.parse_known_args(argv)[0].preset or "toy"]  # -h shows its values
    for kind in KINDS:
        add_flags(parser, kind, shown)
    try:
        return make_command(parser.parse_args(argv))
    except ValueError as error:
        parser.error(str(error))


def start_of(given: dict, out: Path, flags: Namespace) -> Start:
    """The run that --init names, or a preset. `given` holds those `flags` that are fields of KINDS."""
    if given.get("init"):
        preset = PRESETS[flags.preset] if flags.preset else None  # None keeps the recipe of that run
        return load_start(given["init"], out, preset, flags.ablation, *KINDS)
    preset = PRESETS[flags.preset or "toy"]
    if not given.get("tokenizer"):
        return Start(preset)
    tokenizer = Tokenizer.read(given["tokenizer"])
    return Start(preset | {"vocab_size": len(tokenizer), "uncased": tokenizer.uncased}, tokenizer, fixed=("uncased",))


def make_command(flags: Namespace) -> Command:
    """Combine settings: a flag overrides --ablation, which overrides the preset or the run of --init. Raises ValueError
    for flags that conflict."""
    given = {}
    for kind in KINDS:
        given |= fields_of(kind, vars(flags))
    out = flags.out or default_out(given.get("init", ""), flags.preset, flags.ablation)
    start = start_of(given, out, flags)
    row = ABLATIONS[flags.ablation] if flags.ablation else {}  # without the flag, `start` keeps its own row
    settings = make_settings(start.settings | row, given)
    start.require_fixed(settings.fields())
    return Command(settings, out, start, flags)


# ---- 2. A run and its folder --------------------------------------------------------------------------------
@dataclass
class Run:
    """The state of a run after `step` steps."""
    out: Path
    settings: Settings
    worker: Worker
    rows: dict[str, Rows]
    model: MAELM
    optimizers: list
    changed: dict[str, list]  # settings that have changed since the last start: name -> [before, now]
    wandb: object = None  # the run of Weights & Biases
    step: int = 0
    seconds: float = 0.0  # of training, excluding evaluations and checkpoints


def open_run(command: Command, worker: Worker) -> Run:
    """Start a run, or resume the run in --out. Raises UserError if --out holds another run."""
    settings, out, start, flags = command
    config, recipe, options = settings
    before = settings_to_resume(out, settings, start, flags.change_recipe)  # config.json, or {} for a new run
    wandb = start_wandb(options.wandb if worker.is_main else "", out, settings.fields())  # early, because it may fail

    # A run that resumes keeps its corpus, before["corpus"], even if the text of --data has changed.
    corpus = prepared_corpus(before | settings.fields(), start.tokenizer)
    # config.json will hold all settings, the corpus, and hashes of the tokenizer and of the weights of --init.
    record = settings.fields() | inputs_of(out, corpus, before, start)
    rows = {split: Rows(corpus, split, config.seq_len) for split in SPLITS}
    refuse_many_masks(config, list(rows.values()))
    torch.manual_seed(recipe.seed)
    model = make_model(config, recipe.position_init).to(worker.device)
    changed = changes(before, settings.fields()) if before else {}
    run = Run(out, settings, worker, rows, model, make_optimizers(model, recipe, worker.dtype), changed, wandb)

    if worker.is_main:
        write_json(out / "config.json", record)
        shutil.copyfile(corpus / "tokenizer.json", out / "tokenizer.json")
        set_damaged_aside(out)
    worker.init_process_group()  # not earlier: preparing a corpus may take longer than torch.distributed waits
    worker.barrier()  # until the first process has checked --out
    if found := checkpoints(out):
        run.step, run.seconds = load_checkpoint(found[-1], model, run.optimizers)
    elif start.model is not None:
        copy_fitting_weights(start.model, model)
    worker.agree(record | {"step": run.step})
    return run


# ---- 3. One training step, and evaluation -------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then linear decay to 0 (Table 4)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def batch_of_step(step: int, rows: Rows, settings: Settings, worker: Worker) -> list[tuple]:
    """This process's micro-batches (tokens, corruption). The sequences depend on the seed and the step; the
    masks also depend on the index of the micro-batch."""
    config, recipe, options = settings
    size = worker.micro_batch(recipe.batch_size, options.micro_batch_size)
    chosen = rows_of_step(recipe.seed, step, recipe.batch_size, len(rows)).reshape(-1, size)  # (micro-batches, size)
    batches = []
    # Each process gets equally many (see Worker.micro_batch), so that DDP's average is the mean over the whole batch.
    for number in range(worker.rank, len(chosen), worker.world_size):
        tokens = torch.from_numpy(rows[chosen[number]])  # (size, n)
        corruption = corrupt(tokens, config, torch.Generator().manual_seed(seed_of(recipe.seed, step, number)))
        if worker.device.type == "cuda":  # a copy from pinned memory does not wait for the GPU
            tokens, corruption = tokens.pin_memory(), Corruption(*[x.pin_memory() for x in corruption])
        batches.append((tokens, corruption))
    return batches


def train_step(model: nn.Module, optimizers: list, batches: list[tuple], step: int, recipe: Recipe, worker: Worker):
    """Take one optimizer step. Returns this process's mean loss and the gradient norm before clipping, both scalars."""
    total = torch.zeros((), device=worker.device)
    for i, batch in enumerate(batches):  # gradients accumulate in p.grad
        number = worker.rank + i * worker.world_size  # of this micro-batch, as in batch_of_step
        torch.manual_seed(seed_of(recipe.seed, step, number, 1))  # for dropout; the masks use the seed without the 1
        # DDP averages the gradients over processes in the backward pass, except under no_sync.
        more_follow = worker.world_size > 1 and i < len(batches) - 1
        with model.no_sync() if more_follow else nullcontext():
            with worker.autocast():
                loss = model(*worker.put(*batch)) / len(batches)
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
    factor = learning_rate_factor(step, recipe.warmup_steps, recipe.max_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * optimizer.defaults["lr"]  # the peak
        optimizer.step()
        optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, options: RunOptions, worker: Worker) -> float:
    """Mean loss on eval_rows sequences with fixed masks, in nats per masked token."""
    model.eval()
    tokens = evenly(rows, options.eval_rows)
    corruption = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    size, total, count = options.micro_batch_size, 0.0, 0
    # The processes share the micro-batches; sequences are counted, because the last batch may be smaller.
    for start in range(worker.rank * size, len(tokens), worker.world_size * size):
        chosen = slice(start, start + size)
        part, masks = tokens[chosen], Corruption(*[x[chosen] for x in corruption])
        with worker.autocast():
            loss = model(*worker.put(part, masks))
        total += loss.item() * len(part)
        count += len(part)
    model.train()
    total, count = worker.all_reduce(total, count)
    return total / count


# ---- 4. The loop --------------------------------------------------------------------------------------------
def loop(run: Run, progress: Progress) -> int:
    """Train from run.step to the last step. Returns 0, or the number of the signal that ended training."""
    model, worker = run.model, run.worker
    rows, settings, options = run.rows["train"], run.settings, run.settings.options
    network = worker.parallel(model)  # only for train_step
    stopped = False
    progress.since = time.perf_counter()  # log_steps counts run.seconds from here
    # A thread prepares the next step's sequences and masks during this step.
    with noted_signals() as signals, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(batch_of_step, run.step, rows, settings, worker)
        while run.step < settings.last_step and not stopped:
            batches = coming.result()
            coming = ahead.submit(batch_of_step, run.step + 1, rows, settings, worker)  # unused after the last step
            progress.recent.append(train_step(network, run.optimizers, batches, run.step, settings.recipe, worker))
            run.step += 1

            # If a signal reaches one process, all stop. This check makes GPUs wait, so it runs only every fourth step.
            if worker.world_size == 1 or run.step % 4 == 0:
                stopped = worker.all_reduce(len(signals))[0] > 0
            finished = run.step == settings.last_step
            saving = stopped or finished or run.step % options.checkpoint_interval == 0
            evaluating = finished or run.step % options.eval_interval == 0
            # All processes log and evaluate together, because they exchange losses; only the first one saves.
            if saving or evaluating or run.step % options.log_interval == 0:
                progress.log_steps()  # also adds the time since the last line to run.seconds
                if evaluating:
                    progress.log_validation(evaluate(model, run.rows["val"], options, worker))
                if saving and worker.is_main:
                    save_checkpoint(run.out, run.step, model, run.optimizers, run.seconds, options.keep_checkpoints)
                    draw_loss(run.out)
                progress.since = time.perf_counter()  # evaluating and saving are not training
    worker.barrier()  # until the first process has saved
    if not stopped:
        return 0
    return signals[0] if signals else SIGTERM  # if this process received no signal, another process did


def pretrain(run: Run) -> int:
    """Run or continue a pre-training run. Returns the exit code: 0, or 128 + the number of the signal that ended it."""
    worker, out, options = run.worker, run.out, run.settings.options
    if run.step >= run.settings.last_step:
        if worker.is_main:
            print(f"{out} is finished at step {run.step}; to train it for longer, use a later --stop-at or, beyond "
                  f"--max-steps, start another run with --init {out}")
        return 0
    large = worker.device.type == "cuda" and run.settings.config.encoder_dim >= 256  # all others are faster uncompiled
    if options.compile == "on" or (options.compile == "auto" and large):
        compile_model(run.model)
    progress = Progress(run)
    entropy = unigram_entropy(evenly(run.rows["val"], options.eval_rows))
    progress.start(entropy)
    if run.step == 0:
        progress.log_validation(evaluate(run.model, run.rows["val"], options, worker))
    signal = loop(run, progress)
    progress.tell_wandb("finish")
    if worker.is_main:
        if signal:
            print(f"stopped by signal {signal}; repeat the command to continue")
        else:
            print(examples(run.model.cpu(), Tokenizer.load(out), run.rows["val"]))
        print(f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}")
    return 128 + signal if signal else 0


def main(argv=None):
    with clear_errors("train.py"):
        command = parse(argv)
        settings, out = command.settings, command.out
        small = settings.config.encoder_dim < 256  # and thus no faster on an Apple GPU
        worker = make_worker(settings.recipe.precision, settings.options.device, small)
        worker.micro_batch(settings.recipe.batch_size, settings.options.micro_batch_size)  # check it early
        if command.flags.prepare:
            print(describe(prepared_corpus(settings.fields(), command.start.tokenizer)))
            return
        # A folder with other files is refused, unless it has a config.json with these two fields.
        locked = lock_folder(out, "config.json", "max_steps", "encoder_dim") if worker.is_main else nullcontext()
        try:
            with locked, explain_out_of_memory():
                code = pretrain(open_run(command, worker))
                worker.destroy_process_group(code)  # under torchrun, the process ends here
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(f"the model cannot be compiled ({root_cause(error)}); use --compile off") from error
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
