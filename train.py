"""Pre-training, from a laptop to many machines.

    python train.py                                  # the toy, in minutes; nothing is downloaded
    python train.py --ablation mlm                   # a standard MLM, a row of Table 2
    python train.py --init out/toy --data texts/     # start from the weights of another run
    python train.py --data texts/ --prepare          # tokenize into --cache, and do not train
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data texts/

Every field of Config (maelm.py), Recipe (below) and RunOptions (support/training/settings.py) is a
flag; -h shows its value in --preset. Repeat a command to continue an unfinished run.

main -> parse (settings), begin (weights and text), pretrain -> loop -> train_step, evaluate
"""
import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from signal import SIGTERM

import torch
from torch import nn

from maelm import ABLATIONS, MAELM, NUM_SPECIAL, Config, apply_masks, corrupt, draw_masks
from support.model.build import check, seed_of
from support.model.optim import set_rates
from support.program.cli import Parser, add_flags, fields_of, path_of, require
from support.program.errors import clear_errors, noted_signals, say
from support.program.worker import Worker, compile_model, join_processes, make_worker, prepared_ahead
from support.text.corpus import VAL_SHARE, Rows, evenly_spaced, indices_of_step, prepared_corpus, summary
from support.training.log import Progress, draw_loss
from support.training.run import Run, Start, begin, load_start, save_checkpoint
from support.training.settings import RunOptions, Settings, default_out


# ---- 1. Settings: Table 4 ------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class Recipe:
    """The settings of training. The defaults are those of the paper's base model."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG]; join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = VAL_SHARE  # share of documents held out for validation
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    max_steps: int = 125_000  # training steps, and length of the learning-rate schedule
    warmup_steps: int = 10_000  # steps until the peak learning rate; the rate then falls to 0
    optimizer: str = "adamw"  # adamw | muon: Muon for the matrices of the layers, AdamW for the rest
    learning_rate: float = 5e-4  # peak learning rate of AdamW
    muon_learning_rate: float = 2e-2  # peak learning rate of Muon
    weight_decay: float = 0.01  # weight decay of the parameters that AdamW updates
    muon_weight_decay: float = 0.1  # weight decay of the matrices that Muon updates
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients
    adam_beta2: float = 0.98  # decay of AdamW's mean of squared gradients
    adam_epsilon: float = 1e-6  # term added to AdamW's denominator
    clip_norm: float = 2.0  # maximum norm of the whole gradient; larger gradients are scaled down
    position_init: str = "normal"  # normal | sinusoid: initial values of the learned positions
    precision: str = "auto"  # auto | fp32 | bf16: for matrix products; auto is bf16 where it is fast
    seed: int = 0  # seed of weights, data order, masks and dropout

    def __post_init__(self):
        require(
            self,
            ("val_share", 0 < self.val_share < 1, "a number between 0 and 1"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("max_steps", 0 < self.max_steps < 10 ** 7, "1 to 9,999,999"),
            ("warmup_steps", 0 <= self.warmup_steps <= self.max_steps, f"0 to max_steps={self.max_steps}"),
            ("optimizer", self.optimizer in ("adamw", "muon"), "adamw or muon"),
            ("position_init", self.position_init in ("normal", "sinusoid"), "normal or sinusoid"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"))


# Differs from the paper: small models learn faster with these; see bench/results/presets.md.
SMALL_MODELS = dict(norm="pre", decoder_relative=True, position_init="sinusoid", optimizer="muon")
PRESETS = {  # differences from the defaults of Config, Recipe and RunOptions; Table 4
    "toy": SMALL_MODELS | dict(
        vocab_size=2048, seq_len=64, encoder_layers=3, encoder_dim=128, encoder_heads=2, decoder_layers=1,
        dropout=0.0, init_std=0.06, batch_size=64, max_steps=1900, warmup_steps=100, learning_rate=6e-3,
        weight_decay=0.1, log_interval=20, eval_interval=100, eval_rows=512, checkpoint_interval=500),
    "small": SMALL_MODELS | dict(
        vocab_size=8192, seq_len=128, encoder_layers=6, encoder_dim=384, encoder_heads=6,
        decoder_layers=2, init_std=0.03, batch_size=256, micro_batch_size=256, max_steps=20_000,
        learning_rate=2e-3, warmup_steps=1000, log_interval=20, eval_interval=500, checkpoint_interval=1000),
    "base": dict(),
    "base++": dict(vocab_size=64000, rel_pos_buckets=64, uncased=False, max_steps=2_000_000, learning_rate=2e-4),
    "large++": dict(
        vocab_size=64000, encoder_layers=24, encoder_dim=1024, encoder_heads=16, rel_pos_buckets=128,
        rel_pos_max_distance=256, uncased=False, micro_batch_size=32, max_steps=1_000_000, learning_rate=1e-4,
        clip_norm=1.0),
}
PRESETS["laptop"] = PRESETS["toy"] | dict(  # the toy preset, trained on 100 million tokens
    max_steps=24_500, learning_rate=3e-3, muon_learning_rate=1e-2, weight_decay=0.01,
    warmup_steps=500, log_interval=100, eval_interval=500, checkpoint_interval=2000)


def make_settings(values: dict) -> Settings:
    """Settings from values by name, or the defaults. Raises UserError if a value is not allowed."""
    config = Config(**fields_of(Config, values))
    recipe = Recipe(**fields_of(Recipe, values))
    options = RunOptions(**fields_of(RunOptions, values))
    return Settings(check(config), recipe, options)


# ---- 2. One training step, and evaluation --------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Fraction of the peak rate at a step: linear warm-up (Table 4), then linear decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def batch_of_step(step: int, rows: Rows, settings: Settings, worker: Worker) -> list[tuple]:
    """This process's micro-batches (tokens, corruption) of a step."""
    config, recipe, options = settings
    indices = indices_of_step(settings.data_seed, step, recipe.batch_size, len(rows))  # (B,)
    tokens = torch.from_numpy(rows[indices])  # (B, n)
    mask_seed = seed_of(settings.data_seed, step, 0, 0)  # last: 0 for masks, 1 for dropout
    corruption = corrupt(tokens, config, torch.Generator().manual_seed(mask_seed))
    return [worker.pin(batch) for batch in worker.micro_batches(tokens, corruption, options.micro_batch_size)]


def train_step(network: nn.Module, optimizers: list, batches: list[tuple], step: int, recipe: Recipe, worker: Worker):
    """Take one optimizer step. Returns two scalars: this process's mean loss, and the unclipped gradient's norm."""
    total = torch.zeros((), device=worker.device)
    share = sum(len(tokens) for tokens, _ in batches)  # sequences of this process
    for i, batch in enumerate(batches):  # gradients accumulate in p.grad
        number = worker.rank * len(batches) + i  # of this micro-batch in the whole batch
        torch.manual_seed(seed_of(recipe.seed, step, number, 1))
        tokens, corruption = worker.put(batch)
        # In the last backward pass, DDP takes the mean over all processes, whose shares are equal.
        is_last = i == len(batches) - 1
        with worker.average_if(is_last, network):
            with worker.autocast():
                loss = network(tokens, corruption) * (len(tokens) / share)  # the last may be smaller
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm)
    factor = learning_rate_factor(step, recipe.warmup_steps, recipe.max_steps)
    for optimizer in optimizers:
        set_rates(optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(model: MAELM, rows: Rows, options: RunOptions, worker: Worker) -> tuple[float, float]:
    """Mean loss in nats, and accuracy in [0, 1], at single tokens masked at the paper's rate: the same
    for all runs, whatever their masks and their loss in training."""
    model.eval()
    tokens = evenly_spaced(rows, options.eval_rows)
    generator = torch.Generator().manual_seed(0)
    m = max(1, Config().num_masked(tokens.shape[1]))
    masked = draw_masks(tokens >= NUM_SPECIAL, m, generator)
    corruption = apply_masks(tokens, masked, model.config, generator)
    total = 0.0
    right = 0
    for batch in worker.micro_batches(tokens, corruption, options.micro_batch_size):
        truth, masks = worker.put(batch)
        with worker.autocast():
            logits = model.logits(masks)  # (B, m, V)
        targets = truth.gather(1, masks.masked)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        total += loss.item() * len(truth)  # the last batch may be smaller
        right += int((logits.argmax(-1) == targets).sum())
    model.train()
    total, right = worker.all_reduce(total, right)
    return total / len(tokens), right / masked.numel()


# ---- 3. The loop ---------------------------------------------------------------------------------
def loop(run: Run, progress: Progress, signals: list[int]) -> int:
    """Train from run.step to the last step. Returns 0, or the signal that ended training."""
    worker = run.worker
    recipe = run.settings.recipe
    options = run.settings.options
    network = worker.parallel(run.model)  # only for train_step
    prepare = partial(batch_of_step, rows=run.rows["train"], settings=run.settings, worker=worker)
    steps = range(run.step, run.settings.last_step)
    progress.start_clock()
    for step, batches in zip(steps, prepared_ahead(prepare, steps)):  # in a thread
        loss, norm = train_step(network, run.optimizers, batches, step, recipe, worker)
        progress.add(loss, norm)
        run.step = step + 1

        # All processes stop together. The check makes them wait, hence only every fourth step.
        stopped = False
        if worker.world_size == 1 or run.step % 4 == 0:
            stopped = worker.all_reduce(len(signals))[0] > 0
        finished = run.step == run.settings.last_step
        saving = stopped or finished or run.step % options.checkpoint_interval == 0
        evaluating = finished or run.step % options.eval_interval == 0
        # All processes log and evaluate, because they exchange losses; only the first one saves.
        if saving or evaluating or run.step % options.log_interval == 0:
            progress.log_steps()  # this stops the clock
            if evaluating:
                progress.log_validation(*evaluate(run.model, run.rows["val"], options, worker))
            if saving and worker.is_main:
                save_checkpoint(run)
                draw_loss(run.out)
            progress.start_clock()
        if stopped and not finished:
            return signals[0] if signals else SIGTERM  # another process may have received it
    return 0


def pretrain(run: Run) -> int:
    """Train a run to its end. Returns the exit code: 0, or 128 + the signal that ended it."""
    worker = run.worker
    if run.step >= run.settings.last_step:
        if worker.is_main:
            say(f"{run.out} is finished at step {run.step}; to train for longer, use a larger --max-steps or --stop-at")
        return 0
    compile_model(run.model, run.settings.options.compile, worker.device)
    progress = Progress(run)
    progress.describe()
    if run.step == 0:
        progress.log_validation(*evaluate(run.model, run.rows["val"], run.settings.options, worker))
    with noted_signals() as signals:
        signal = loop(run, progress, signals)
    worker.all_reduce(0)  # waits until the first process has saved
    progress.finish(signal)
    return 128 + signal if signal else 0


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> tuple[Settings, Start, Namespace]:
    """Read the command line and the run of --init. The Namespace lacks flags that are not given."""
    parser = Parser("train.py", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="size and recipe (Table 4) [toy; with --init, that run's]")
    add("--ablation", choices=ABLATIONS, help="a row of Table 2 [mae-lm; with --init, that run's decoder and masks]")
    add("--out", type=path_of, help="run folder [out/PRESET[-ABLATION]; with --init, out/RUN-more or out/RUN-ABLATION]")
    add("--prepare", action="store_true", help="tokenize --data into --cache, and do not train")
    preset = PRESETS[parser.parse_known_args(argv)[0].preset or "toy"]  # -h shows its values
    for part in (Config, Recipe, RunOptions):
        add_flags(parser, part, preset)
    flags = parser.parse_args(argv)
    init = vars(flags).get("init", "")
    flags.out = flags.out or default_out(flags.preset or "toy", flags.ablation, init)
    start = load_start(init, flags.out) if init else Start()
    named = make_settings(preset).fields() if flags.preset else {}  # also what it leaves at the default
    row = ABLATIONS[flags.ablation or "mae-lm"]
    values = preset | start.inherited(flags.ablation) | named | start.encoder_settings | row  # the last one wins
    recipe = Recipe(**fields_of(Recipe, values))
    if "max_steps" in flags:  # warm up for the same share of the steps
        values["warmup_steps"] = round(recipe.warmup_steps / recipe.max_steps * flags.max_steps)
    settings = make_settings(values | vars(flags))
    start.check(init, settings)
    return settings, start, flags


def main(argv=None):
    with clear_errors("train.py", "--micro-batch-size or a smaller model"):
        join_processes()
        settings, start, flags = parse(argv)
        config, recipe, options = settings
        worker = make_worker(recipe.precision, options.device, config.encoder_dim)
        code = 0
        if flags.prepare:
            say(summary(prepared_corpus(settings.fields(), start.tokenizer)))
        else:
            with worker.lock(flags.out, "log.jsonl", "step_*.pt"):  # refuses a folder with other files
                code = pretrain(begin(settings, flags.out, start, worker))
        worker.destroy_process_group(code)  # under torchrun, the process ends here
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
