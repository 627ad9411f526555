"""Pre-training, from a laptop to many machines.

    python train.py                                         # a small MAE-LM in minutes; nothing is downloaded
    python train.py --ablation mlm                          # a standard MLM, a row of Table 2
    python train.py --init out/toy --data texts/            # start from the weights and the tokenizer of another run
    python train.py --preset base --data texts/ --prepare   # tokenize into --cache, and do not train
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data hf:wikimedia/wikipedia:20231101.en

Every field of Config, Recipe and RunOptions is a flag; -h shows its value in --preset. Repeat a command to continue an
unfinished run.
"""
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple

import torch
from torch import nn

from maelm import ABLATIONS, MAELM, Config, Corruption, corrupt
from support.fill_mask import examples
from support.model.build import check
from support.model.checkpoints import checkpoints
from support.model.optim import set_rates
from support.program.cli import (Parser, UserError, add_flags, clear_errors, fields_of, noted_signals, path_of, require,
                                 root_cause, say, short_name)
from support.program.files import compare, lock_folder, read_json
from support.program.worker import Worker, compile_model, make_worker
from support.text.corpus import VAL_SHARE, Rows, evenly, prepared_corpus, rows_of_step, seed_of, unigram_entropy
from support.text.documents import CACHE
from support.training.begin import Run, Start, begin, load_start, save_checkpoint
from support.training.log import Progress, draw_loss


# ---- 1. Settings: Table 4 -----------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class Recipe:
    """The settings that, with Config, define a run. The defaults are those of the paper's base model."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG] (its train split); join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = VAL_SHARE  # share of documents held out for validation
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    max_steps: int = 125_000  # training steps, and length of the learning-rate schedule
    warmup_steps: int = 10_000  # steps until the peak learning rate; the rate then falls to 0
    optimizer: str = "adamw"  # adamw | muon: Muon updates the matrices of the layers, AdamW all other parameters
    learning_rate: float = 5e-4  # peak learning rate of AdamW
    muon_learning_rate: float = 2e-2  # peak learning rate of Muon
    weight_decay: float = 0.01  # weight decay of the parameters that AdamW updates
    muon_weight_decay: float = 0.1  # weight decay of the matrices that Muon updates
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients
    adam_beta2: float = 0.98  # decay of AdamW's mean of squared gradients
    adam_epsilon: float = 1e-6  # term added to AdamW's denominator
    clip_norm: float = 2.0  # maximum norm of the whole gradient; larger gradients are scaled down
    position_init: str = "normal"  # normal | sinusoid: initial values of the learned positions
    precision: str = "auto"  # auto | fp32 | bf16: for matrix products; auto is bf16 if the hardware supports it
    seed: int = 0  # seed of weights, data order, masks and dropout

    def __post_init__(self):
        require(
            self,
            ("val_share", 0 < self.val_share < 1, "a number between 0 and 1"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("max_steps", 0 < self.max_steps < 10 ** 7, "1 to 9,999,999"),
            ("warmup_steps", 0 <= self.warmup_steps <= self.max_steps, f"0 to max_steps={self.max_steps}"),
            ("optimizer", self.optimizer in ("adamw", "muon"), "adamw or muon"),
            *[(name, 0 < getattr(self, name) < inf, "a number above 0")
              for name in ("learning_rate", "muon_learning_rate", "adam_epsilon", "clip_norm")],
            *[(name, 0 <= getattr(self, name) < inf, "0 or more") for name in ("weight_decay", "muon_weight_decay")],
            *[(name, 0 <= getattr(self, name) < 1, "0 or more, below 1") for name in ("adam_beta1", "adam_beta2")],
            ("position_init", self.position_init in ("normal", "sinusoid"), "normal or sinusoid"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"),
            ("seed", 0 <= self.seed < 2 ** 63, "0 or more, below 2^63"))


@dataclass(frozen=True)
class RunOptions:
    """The settings that may change when a run continues, except `init`."""
    init: str = ""  # run folder or checkpoint from which to take the model's shape, weights and tokenizer
    micro_batch_size: int = 64  # largest number of sequences per forward pass; gradients are accumulated
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
        intervals = "micro_batch_size", "log_interval", "eval_interval", "eval_rows", "checkpoint_interval"
        require(
            self,
            *[(name, getattr(self, name) >= 1, "1 or more") for name in intervals],
            ("stop_at", self.stop_at >= 0, "0 or more"),
            ("keep_checkpoints", self.keep_checkpoints >= 0, "0 or more"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"))


# Settings that may change when a run continues; the model, the text and its tokens must stay.
MAY_CHANGE = {field.name for field in fields(RunOptions)} - {"init"} | {
    "max_steps", "warmup_steps", "learning_rate", "muon_learning_rate", "weight_decay", "muon_weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm", "precision", "seed"}


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


class Settings(NamedTuple):
    """All settings of a run."""
    config: Config
    recipe: Recipe
    options: RunOptions

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.options.stop_at or self.recipe.max_steps, self.recipe.max_steps)

    @property
    def data_seed(self) -> int:
        """The seed of the data order and the masks. A run with --init does not repeat its predecessor's batches."""
        return seed_of(self.recipe.seed, *self.options.init.encode()) if self.options.init else self.recipe.seed

    def fields(self) -> dict:
        """All settings by name."""
        return asdict(self.config) | asdict(self.recipe) | asdict(self.options)


def make_settings(values: dict) -> Settings:
    """Settings from values by name; a missing value is the default. Raises ValueError if a value is not allowed."""
    config, recipe, options = [part(**fields_of(part, values)) for part in (Config, Recipe, RunOptions)]
    return Settings(check(config), recipe, options)  # the other two check themselves


# ---- 2. One training step, and evaluation -------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then linear decay to 0 (Table 4)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def micro_batches(tokens, corruption: Corruption, size: int, worker: Worker) -> list[tuple]:
    """Cut a batch of sequences (B, n) and their masks into micro-batches of `size`, and take this process's share."""
    batches = []
    for start in range(worker.rank * size, len(tokens), worker.world_size * size):
        part = slice(start, start + size)
        batches.append((tokens[part], Corruption(*[x[part] for x in corruption])))
    return batches


def batch_of_step(step: int, rows: Rows, settings: Settings, worker: Worker) -> list[tuple]:
    """This process's micro-batches (tokens, corruption). The whole batch depends only on the seed and the step."""
    config, recipe, options = settings
    chosen = rows_of_step(settings.data_seed, step, recipe.batch_size, len(rows))  # (B,)
    tokens = torch.from_numpy(rows[chosen])  # (B, n)
    mask_seed = seed_of(settings.data_seed, step, 0)  # 0, because dropout has a 1 there
    corruption = corrupt(tokens, config, torch.Generator().manual_seed(mask_seed))
    if worker.device.type == "cuda":  # a copy from pinned memory does not wait for the GPU
        tokens, corruption = tokens.pin_memory(), Corruption(*[x.pin_memory() for x in corruption])
    size = worker.micro_batch(recipe.batch_size, options.micro_batch_size)
    return micro_batches(tokens, corruption, size, worker)


def train_step(model: nn.Module, optimizers: list, batches: list[tuple], step: int, recipe: Recipe, worker: Worker):
    """Take one optimizer step. Returns this process's mean loss and the gradient norm before clipping, both scalars."""
    total = torch.zeros((), device=worker.device)
    for i, batch in enumerate(batches):  # gradients accumulate in p.grad
        number = worker.rank + i * worker.world_size  # of this micro-batch in the whole batch
        torch.manual_seed(seed_of(recipe.seed, step, number, 1))  # for dropout
        # DDP averages the gradients over processes in the backward pass, except under no_sync. Because all processes
        # have equally many micro-batches of equal size, this average is the mean over the whole batch.
        more_follow = worker.world_size > 1 and i < len(batches) - 1
        with model.no_sync() if more_follow else nullcontext():
            with worker.autocast():
                loss = model(*worker.put(*batch)) / len(batches)
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
    factor = learning_rate_factor(step, recipe.warmup_steps, recipe.max_steps)
    for optimizer in optimizers:
        set_rates(optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, options: RunOptions, worker: Worker) -> tuple[float, float]:
    """Mean loss in nats per masked token, and accuracy in [0, 1], on eval_rows sequences with fixed masks."""
    model.eval()
    tokens = evenly(rows, options.eval_rows)
    corruption = corrupt(tokens, model.config, torch.Generator().manual_seed(0))
    total, right, count = 0.0, 0, 0
    for part, masks in micro_batches(tokens, corruption, options.micro_batch_size, worker):
        part, masks = worker.put(part, masks)
        with worker.autocast():  # two passes, because the loss of uni+cross is not that of its logits
            loss, guess = model(part, masks), model.logits(masks).argmax(-1)  # (B, m)
        total += loss.item() * len(part)  # the last micro-batch may be smaller
        right += int((guess == part.gather(1, masks.masked)).sum())
        count += len(part)
    model.train()
    total, right, count = worker.all_reduce(total, right, count)
    return total / count, right / (count * corruption.masked.shape[1])


# ---- 3. The loop --------------------------------------------------------------------------------------------
def loop(run: Run, progress: Progress) -> int:
    """Train from run.step to the last step. Returns 0, or the number of the signal that ended training."""
    model, worker = run.model, run.worker
    settings, options = run.settings, run.settings.options
    network = worker.parallel(model)  # only for train_step
    stopped = False
    progress.since = time.perf_counter()  # from here on, time is training time
    # A thread prepares the next step's sequences and masks during this step.
    with noted_signals() as signals, ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(batch_of_step, run.step, run.rows["train"], settings, worker)
        while run.step < settings.last_step and not stopped:
            batches = coming.result()
            coming = ahead.submit(batch_of_step, run.step + 1, run.rows["train"], settings, worker)
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
                    progress.log_validation(*evaluate(model, run.rows["val"], options, worker))
                if saving and worker.is_main:
                    save_checkpoint(run)
                    draw_loss(run.out)
                progress.since = time.perf_counter()  # evaluating and saving are not training
    worker.all_reduce(0)  # waits until the first process has saved
    if not stopped:
        return 0
    return signals[0] if signals else SIGTERM  # if this process received no signal, another process did


def pretrain(run: Run) -> int:
    """Train a run to its end. Returns the exit code: 0, or 128 + the number of the signal that ended it."""
    worker, out, options = run.worker, run.out, run.settings.options
    if run.step >= run.settings.last_step:
        if worker.is_main:
            say(f"{out} is finished at step {run.step}; to train it for longer, use a larger --max-steps or --stop-at")
        return 0
    large = worker.device.type == "cuda" and run.settings.config.encoder_dim >= 256  # compiling slows all others
    if options.compile == "on" or (options.compile == "auto" and large):
        compile_model(run.model)
    progress = Progress(run)
    progress.start(unigram_entropy(evenly(run.rows["val"], options.eval_rows)))
    if worker.is_main:
        draw_loss(out)  # so that matplotlib fails now, not at the first checkpoint
    if run.step == 0:
        progress.log_validation(*evaluate(run.model, run.rows["val"], options, worker))
    signal = loop(run, progress)
    progress.finish()
    if worker.is_main:
        stop = f"stopped by signal {signal}; repeat the command to continue"
        say(stop if signal else examples(run.model.cpu(), run.tokenizer, run.rows["val"]),
            f"{out}: config.json, tokenizer.json, log.jsonl, loss.png, {checkpoints(out)[-1].name}")
    return 128 + signal if signal else 0


# ---- 4. Command line ----------------------------------------------------------------------------------------
def parse(argv) -> tuple[Settings, Start, Namespace]:
    """Read the command line and the run that --init names. Exits with code 2 if flags are invalid."""
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="toy", help="size and recipe (section 4.1, Table 4) [toy]")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm; with --init, that run's decoder and masks]")
    add("--out", type=path_of, help="run folder [out/PRESET[-ABLATION]; with --init, that run's name for PRESET]")
    add("--prepare", action="store_true", help="tokenize --data into --cache, and do not train")
    preset = PRESETS[parser.parse_known_args(argv)[0].preset]  # -h shows its values
    for part in (Config, Recipe, RunOptions):
        add_flags(parser, part, preset)
    options = parser.parse_args(argv)
    init = getattr(options, "init", "")
    if options.ablation and preset.keys() & {"mask_in_encoder", "encoder_fill", "decoder_reset", "decoder"}:
        parser.error(f"--ablation {options.ablation}: rows of Table 2 change an MAE-LM, but --preset {options.preset} "
                     "is such a row; name the preset of an MAE-LM")
    # toy, toy-mlm or, with --init NAME, NAME-more or NAME-mlm
    last = options.ablation or ("more" if init else "mae-lm")
    name = f"{short_name(init) if init else options.preset}-{last}"
    options.out = options.out or Path("out", name if init else name.removesuffix("-mae-lm"))

    # A flag overrides --ablation, which overrides the run of --init, which overrides --preset.
    start, shape, row = Start(), {}, ABLATIONS[options.ablation or "mae-lm"]
    if init:
        start, config = load_start(init, options.out)
        shape = start.fixed if options.ablation else start.fixed | asdict(config)
    try:
        settings = make_settings(preset | shape | row | vars(options))
    except ValueError as error:
        parser.error(str(error))
    if init:
        now = {name: settings.fields()[name] for name in start.fixed}
        compare(Path(init), start.fixed, now, advice="with --init, these cannot change")
    return settings, start, options


def main(argv=None):
    with clear_errors("train.py", "--micro-batch-size or a smaller model"):
        settings, start, flags = parse(argv)
        config, recipe, options = settings
        worker = make_worker(recipe.precision, options.device, small=config.encoder_dim < 256)
        worker.micro_batch(recipe.batch_size, options.micro_batch_size)  # raises an error early
        if flags.prepare:
            folder = prepared_corpus(settings.fields(), start.tokenizer)
            say(f"{folder}: {read_json(folder / 'meta.json')}")
            return
        try:
            with lock_folder(flags.out, sign="log.jsonl") if worker.is_main else nullcontext():
                code = pretrain(begin(settings, flags.out, start, worker, MAY_CHANGE))
                worker.destroy_process_group(code)  # under torchrun, the process ends here
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(f"the model cannot be compiled ({root_cause(error)}); use --compile off") from error
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
