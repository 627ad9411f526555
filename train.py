"""Pre-training, from a laptop to many machines.

    python train.py                                  # the toy, in minutes; nothing is downloaded
    python train.py --ablation mlm                   # a standard MLM, a row of Table 2
    python train.py --data texts/ --prepare          # tokenize into --cache, and do not train
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data texts/

Every field of Config (maelm.py) and Recipe (below) is a flag; -h shows its value in --preset.
Repeat a command to continue an unfinished run.
"""
from argparse import Namespace
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from signal import SIGTERM
from typing import Literal

import torch
from torch import nn

from maelm import ABLATIONS, MAELM, Config, corrupt
from support.model import check, make_model, seed_of
from support.checkpoints import newest_checkpoint, restore, save_run
from support.optim import Muon, parameter_groups, set_rates
from support.program import CACHE, Parser, UserError, add_flags, clear_errors, compare, fields_of, lock_folder, path_of
from support.corpus import SPLITS, Rows, Text, corpus_of_run, indices_of_step, prepared_corpus
from support.tokenizer import Tokenizer
from support.evaluation import evaluate
from support.run import Log, draw_loss, losses_of
from support.worker import Worker, compile_model, joined_processes, make_worker, noted_signals


# ---- 1. Settings: Table 4 ------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """The settings of training. The defaults are the paper's base model's. A field's comment is also its help."""
    data: str = "docs"  # docs, a file, a folder, or hf:NAME[:CONFIG]; join several with +
    column: str = "text"  # field that holds the text of a record (.jsonl, .parquet, hf:)
    uncased: bool = True  # whether to lower-case all text
    val_share: float = 0.01  # share of documents held out for validation
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    max_steps: int = 125_000  # training steps, and length of the learning-rate schedule
    warmup_steps: int = 10_000  # steps until the peak learning rate; the rate then falls to 0
    optimizer: Literal["adamw", "muon"] = "adamw"  # Muon for the matrices of the layers, AdamW for the rest
    learning_rate: float = 5e-4  # peak learning rate of AdamW
    muon_learning_rate: float = 2e-2  # peak learning rate of Muon
    weight_decay: float = 0.01  # weight decay of the parameters that AdamW updates
    muon_weight_decay: float = 0.1  # weight decay of the matrices that Muon updates
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients
    adam_beta2: float = 0.98  # decay of AdamW's mean of squared gradients
    adam_epsilon: float = 1e-6  # term added to AdamW's denominator
    clip_norm: float = 2.0  # maximum norm of the whole gradient, to which larger ones are scaled; 0 for none
    position_init: Literal["normal", "sinusoid"] = "normal"  # initial values of the learned positions
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # for matrix products; auto is bf16 where it is fast
    seed: int = 0  # seed of weights, data order, masks and dropout
    # The rest decides no weights, except, by dropout's masks, the micro-batch:
    micro_batch_size: int = 64  # largest number of sequences per forward pass; gradients are accumulated
    stop_at: int = 0  # step at which to end early, without changing the schedule; 0 for never
    log_interval: int = 100  # steps between lines in the terminal and in log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # number of validation sequences; the sequences and their masks are fixed
    checkpoint_interval: int = 1_000  # steps between checkpoints
    keep_checkpoints: int = 2  # number of checkpoints to keep; 0 keeps all, for Figure 3
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to train
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto is on for CUDA if encoder_dim is at least 256
    cache: str = CACHE  # folder for tokenized corpora
    wandb: str = ""  # Weights & Biases project that also receives log.jsonl

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.stop_at or self.max_steps, self.max_steps)


# Differs from the paper: small models learn faster with these; see docs/differences.md.
SMALL_MODELS = dict(norm="pre", decoder_relative=True, position_init="sinusoid", optimizer="muon")
PRESETS = {  # differences from the defaults of Config and Recipe; Table 4
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


def make_settings(values: dict) -> tuple[Config, Recipe]:
    """Settings from values by name, or the defaults. Raises UserError if a value is not allowed."""
    return check(Config(**fields_of(Config, values))), Recipe(**fields_of(Recipe, values))


for name, row in (PRESETS | ABLATIONS).items():
    unknown = row.keys() - asdict(Config()).keys() - asdict(Recipe()).keys()
    if unknown:
        raise UserError(f"{name}: no preset or row can set {', '.join(unknown)}, only fields of Config and Recipe")
# The settings that stay when a run continues: they decide the model, the text, its order, and old checkpoints.
FIXED = asdict(Config()).keys() | {"data", "column", "uncased", "val_share", "batch_size", "optimizer", "position_init",
                                   "keep_checkpoints"}


# ---- 2. One training step ---------------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Fraction of the peak rate at a step: linear warm-up (Table 4), then linear decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def batch_of_step(rows: Rows, config: Config, recipe: Recipe, worker: Worker, step: int) -> list[tuple]:
    """This process's micro-batches (tokens, corruption) of a step. The seed decides order and masks."""
    indices = indices_of_step(recipe.seed, step, recipe.batch_size, len(rows))  # (B,)
    tokens = torch.from_numpy(rows[indices])  # (B, n)
    generator = torch.Generator().manual_seed(seed_of(recipe.seed, step, 0, 0))  # last: 0 for masks, 1 for dropout
    corruption = corrupt(tokens, config, generator)
    m = corruption.masked.shape[1]
    expected = config.num_masked(tokens.shape[1])
    if m != expected:
        raise UserError(f"corrupt masks {m} tokens; FLOPs and shapes need the {expected} of mask_rate="
                        f"{config.mask_rate}")
    return [worker.pin(batch) for batch in worker.micro_batches(tokens, corruption, recipe.micro_batch_size)]


def train_step(network: nn.Module, optimizers: list, batches: list[tuple], step: int, recipe: Recipe, worker: Worker):
    """Take one optimizer step. Returns scalars by name: this process's mean `loss` and, if it is a sum, the means of
    its terms, and the unclipped `grad_norm`."""
    means = defaultdict(float)
    share = sum(len(tokens) for tokens, _ in batches)  # sequences of this process
    for i, batch in enumerate(batches):  # gradients accumulate in p.grad
        number = worker.rank * len(batches) + i  # of this micro-batch in the whole batch
        torch.manual_seed(seed_of(recipe.seed, step, number, 1))
        tokens, corruption = worker.put(batch)
        averaging = nullcontext()
        if worker.world_size > 1 and i < len(batches) - 1:
            # In the last backward pass, DDP takes the mean over all processes, whose shares are equal.
            averaging = network.no_sync()
        with averaging:
            with worker.autocast():
                losses = losses_of(network(tokens, corruption))
            part = len(tokens) / share  # the last may be smaller
            (losses["loss"] * part).backward()
        for name, loss in losses.items():
            means[name] += loss.detach() * part
    means["grad_norm"] = nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm or inf)
    factor = learning_rate_factor(step, recipe.warmup_steps, recipe.max_steps)
    for optimizer in optimizers:
        set_rates(optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    return means


def make_optimizers(model: MAELM, recipe: Recipe, dtype: torch.dtype) -> list:
    """AdamW and, with optimizer "muon", Muon in `dtype` for the matrices of the layers."""
    betas = recipe.adam_beta1, recipe.adam_beta2
    adamw = partial(torch.optim.AdamW, lr=recipe.learning_rate, betas=betas, eps=recipe.adam_epsilon,
                    weight_decay=recipe.weight_decay, fused=True)
    if recipe.optimizer == "adamw":
        return [adamw(model.parameters())]
    single, double, rest = parameter_groups(model)
    groups = [{"params": single, "parts": 1}, {"params": double, "parts": 2}]
    return [adamw(rest), Muon(groups, recipe.muon_learning_rate, recipe.muon_weight_decay, dtype)]


# ---- 3. A run ------------------------------------------------------------------------------------
def pretrain(config: Config, recipe: Recipe, flags: Namespace, worker: Worker) -> int:
    """Begin or continue the run in flags.out, and train it to its end. Returns 0, or 128 + the signal that ended
    training."""
    out = flags.out
    last_step = recipe.last_step
    settings = asdict(config) | asdict(recipe)
    saved = newest_checkpoint(out)
    step = saved["step"] if saved else 0
    if worker.all_reduce(step)[0] != step * worker.world_size:
        raise UserError(f"--out {out}: the processes find different checkpoints; use a folder that all of them share")
    changed = {}
    if saved:
        before = asdict(saved["config"]) | asdict(Recipe(**fields_of(Recipe, saved["settings"])))
        changed = compare(out, before, settings, FIXED)
        if step >= last_step:
            print(f"{out} is finished at step {step}; for more, use a larger --max-steps or --stop-at")
            return 0

    # Data: the tokens and their order
    text = Text(**fields_of(Text, settings))
    folder = corpus_of_run(text, saved) if saved else prepared_corpus(text)
    tokenizer = saved["tokenizer"] if saved else Tokenizer.load(folder)
    rows = {split: Rows(folder, split, config.seq_len) for split in SPLITS}
    if recipe.batch_size % worker.world_size > 0:  # the mean of the processes' gradients would be another
        raise UserError(f"batch_size={recipe.batch_size}: use a multiple of the {worker.world_size} processes")

    # The model and its optimizers
    torch.manual_seed(recipe.seed)
    model = make_model(config, recipe.position_init).to(worker.device)
    optimizers = make_optimizers(model, recipe, worker.dtype)
    if saved:
        restore(saved, model, optimizers)
    compile_model(model, recipe.compile, worker.device)
    network = worker.parallel(model)  # only for train_step

    # The loop
    record = {"config": asdict(config), "settings": asdict(recipe), "preset": flags.preset,
              "ablation": flags.ablation, "tokenizer": tokenizer.to_json(), "corpus": folder.name}
    log = Log(out, record, step, last_step, saved["seconds"] if saved else 0.0, worker)
    log.describe(model, rows, changed)
    validate = partial(evaluate, model, rows["val"], recipe.eval_rows, recipe.micro_batch_size, worker)
    if step == 0:
        log.validation(*validate())
    with noted_signals() as signals:
        log.start_clock()
        while step < last_step:
            # While a GPU computes, the CPU prepares the next batch: nothing waits for a result until it is logged.
            batches = batch_of_step(rows["train"], config, recipe, worker, step)
            log.add(train_step(network, optimizers, batches, step, recipe, worker))
            step += 1
            # All processes stop together. The check makes them wait, hence only every fourth step.
            stopped = False
            if worker.world_size == 1 or step % 4 == 0:
                stopped = worker.all_reduce(len(signals))[0] > 0
            saving = stopped or step == last_step or step % recipe.checkpoint_interval == 0
            evaluating = step == last_step or step % recipe.eval_interval == 0
            # All processes log and evaluate, because they exchange losses; only the first one saves.
            if saving or evaluating or step % recipe.log_interval == 0:
                log.steps(optimizers)
                if evaluating:
                    log.validation(*validate())
                if saving and worker.is_main:
                    save_run(out, record, step, log.seconds, model, optimizers, recipe.keep_checkpoints)
                    draw_loss(out)
                log.start_clock()
            if stopped:
                break
    worker.all_reduce(0)  # waits until the first process has saved
    signal = 0
    if step < last_step:
        signal = signals[0] if signals else SIGTERM  # another process may have received it
        print(f"stopped by signal {signal}; repeat the command to continue")
    else:
        print(f"{out}: {', '.join(sorted(path.name for path in out.glob('[!.]*.*')))}; to see its guesses:")
        print(f'python -m support.fill_mask {out} "Return the [MASK] of the array."')
    return 128 + signal if signal else 0


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> tuple[Config, Recipe, Namespace]:
    """Read the command line. The Namespace lacks fields that are not given."""
    first = Parser("train.py", __doc__, add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="toy", help="size and recipe (Table 4) [toy]")
    preset = first.parse_known_args(argv)[0].preset  # whose values -h shows
    parser = Parser("train.py", __doc__, parents=[first])
    add = parser.add_argument
    add("--ablation", choices=ABLATIONS, default="mae-lm", help="a row of Table 2 [mae-lm]")
    add("--out", type=path_of, help="run folder [out/PRESET[-ABLATION]]")
    add("--prepare", action="store_true", help="tokenize --data into --cache, and do not train")
    for part in (Config, Recipe):
        add_flags(parser, part, PRESETS[preset])
    flags = parser.parse_args(argv)
    flags.out = flags.out or Path("out", preset if flags.ablation == "mae-lm" else f"{preset}-{flags.ablation}")
    values = PRESETS[preset] | ABLATIONS[flags.ablation]
    if "max_steps" in flags:  # warm up for the same share of the steps
        recipe = Recipe(**fields_of(Recipe, values))
        values["warmup_steps"] = round(recipe.warmup_steps / recipe.max_steps * flags.max_steps)
    return *make_settings(values | vars(flags)), flags


def main(argv=None):
    code = 0
    with clear_errors("train.py"), joined_processes():
        config, recipe, flags = parse(argv)
        worker = make_worker(recipe.precision, recipe.device, config.encoder_dim)
        if flags.prepare:
            text = Text(**fields_of(Text, asdict(config) | asdict(recipe)))
            print(f"{prepared_corpus(text)}: prepared")
        else:
            lock = lock_folder(flags.out, "log.jsonl", "step_*.pt") if worker.is_main else nullcontext()
            with lock:  # refuses a folder with other files
                code = pretrain(config, recipe, flags, worker)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
