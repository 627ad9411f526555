"""Pre-training, from a laptop to many machines.

    python train.py                                  # the toy, in minutes; nothing is downloaded
    python train.py --ablation mlm                   # a standard MLM, a row of Table 2
    python train.py --init out/toy --data texts/     # continue pre-training on other text
    python train.py --data texts/ --prepare          # tokenize into --cache, and do not train
    torchrun --standalone --nproc_per_node 8 train.py --preset base --data texts/

Every field of Config (maelm.py) and Recipe (below) is a flag; with --preset NAME, -h shows the
values of that preset.
Repeat a command to continue an unfinished run.
"""
from argparse import Namespace
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from maelm import ABLATIONS, MAELM, NUM_SPECIAL, Config, apply_masks, corrupt, draw_masks
from support.checkpoints import starting_point
from support.corpus import Corpus, evenly_spaced, indices_of_step, open_corpus
from support.model import check, losses_of, make_model, seed_of
from support.optim import Muon, split_parameters, take_step
from support.program import Parser, UserError, clear_errors, fields_of, short_name
from support.run import Run
from support.text import Text
from support.worker import Worker, joined_processes


# ---- 1. Settings: Table 4 ------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe(Text):
    """The settings of training, after those of Text. The defaults are the paper's base model's."""
    init: str = ""  # run folder or checkpoint to begin from: settings, tokenizer and weights
    batch_size: int = 2048  # sequences per optimizer step, over all processes
    max_steps: int = 125_000  # training steps, and length of the schedule; warm-up keeps its share
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
    # The rest decides no weights of a step, except by rounding; with dropout, micro_batch_size and
    # device do:
    micro_batch_size: int = 64  # largest number of sequences per forward pass; gradients are accumulated
    stop_at: int = 0  # step at which to end early, without changing the schedule; 0 for never
    log_interval: int = 100  # steps between lines in the terminal and in log.jsonl
    eval_interval: int = 2_000  # steps between validation losses
    eval_rows: int = 2_048  # number of validation sequences; the sequences and their masks are fixed
    checkpoint_interval: int = 1_000  # steps between checkpoints
    keep_checkpoints: int = 2  # number of checkpoints to keep; 0 keeps all, for Figure 3
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to train
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto is on for CUDA if encoder_dim is at least 256
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
    of_config = fields_of(Config, values)
    rest = {name: value for name, value in values.items() if name not in of_config}
    return check(Config(**of_config)), Recipe(**rest)


# The settings that stay when a run continues: they decide the model and its first weights, the text,
# its order, the optimizer's state, and whether old checkpoints are deleted. (open_corpus compares the
# text itself.)
FIXED = asdict(Config()).keys() | {"column", "uncased", "val_share", "seed", "batch_size", "optimizer",
                                   "position_init", "keep_checkpoints"}


# ---- 2. One training step ------------------------------------------------------------------------
def learning_rate_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Fraction of the peak rate at a step: linear warm-up (Table 4), then linear decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / (max_steps - warmup_steps)


def make_optimizers(model: MAELM, recipe: Recipe, dtype: torch.dtype) -> list:
    """AdamW and, with optimizer "muon", Muon in `dtype` for the matrices of the layers."""
    betas = recipe.adam_beta1, recipe.adam_beta2
    adamw = partial(torch.optim.AdamW, lr=recipe.learning_rate, betas=betas, eps=recipe.adam_epsilon,
                    weight_decay=recipe.weight_decay, fused=True)
    if recipe.optimizer == "adamw":
        return [adamw(model.parameters())]
    matrices, rest = split_parameters(model)
    return [adamw(rest), Muon(matrices, recipe.muon_learning_rate, recipe.muon_weight_decay, dtype)]


class Trainer:
    """A model, its optimizers, and this process's part of each step."""
    def __init__(self, config: Config, recipe: Recipe, worker: Worker):
        self.config = config
        self.recipe = recipe
        self.worker = worker
        torch.manual_seed(recipe.seed)
        self.model = make_model(config, recipe.position_init).to(worker.device)
        self.optimizers = make_optimizers(self.model, recipe, worker.dtype)
        # The same weights, compiled and with gradients averaged over processes, for `step`:
        self.network = worker.parallel(self.model, recipe.compile)

    def batches(self, rows, step: int) -> list[tuple]:
        """This process's micro-batches (tokens, corruption) of a step. rows[indices] gives sequences
        (B, n) int64; the seed decides their order and masks."""
        recipe = self.recipe
        indices = indices_of_step(recipe.seed, step, recipe.batch_size, len(rows))  # (B,)
        tokens = torch.from_numpy(rows[indices])  # (B, n)
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, step, 0, 0))
        corruption = corrupt(tokens, self.config, generator)
        m = self.config.num_masked(tokens.shape[1])
        assert corruption.masked.shape[1] == m, f"mask {m} tokens: FLOPs and shapes follow mask_rate"
        batches = self.worker.micro_batches(tokens, corruption, recipe.micro_batch_size)
        return [self.worker.pin(batch) for batch in batches]

    def step(self, batches: list[tuple], step: int) -> dict:
        """Take one optimizer step. Returns scalars by name: this process's mean `loss` and, if it
        is a sum, the means of its terms, and the unclipped `grad_norm`."""
        recipe = self.recipe
        worker = self.worker
        means = defaultdict(float)
        sequences = sum(len(tokens) for tokens, _ in batches)  # of this process
        for i, batch in enumerate(batches):  # gradients accumulate in p.grad
            number = worker.rank * len(batches) + i  # of the micro-batch, over all processes
            torch.manual_seed(seed_of(recipe.seed, step, number, 1))  # for dropout
            tokens, corruption = worker.put(batch)
            weight = len(tokens) / sequences  # in the mean; the last micro-batch may be smaller
            is_last = i == len(batches) - 1
            with worker.averaging(self.network, is_last):
                with worker.autocast():
                    losses = losses_of(self.network(tokens, corruption))
                (losses["loss"] * weight).backward()
            for name, loss in losses.items():
                means[name] += loss.detach() * weight
        limit = recipe.clip_norm or inf
        means["grad_norm"] = nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        factor = learning_rate_factor(step, recipe.warmup_steps, recipe.max_steps)
        take_step(self.optimizers, factor)
        return means

    @torch.no_grad()
    def validate(self, rows) -> tuple[float, float]:
        """Mean loss in nats, and accuracy in [0, 1], on `eval_rows` sequences, with tokens masked
        at the paper's rate: the same ones for all runs, whatever their masks and their loss in
        training. (The decoder of uni+cross, which reads true tokens in training, reads [MASK]
        here.)"""
        self.model.eval()
        tokens = evenly_spaced(rows, self.recipe.eval_rows)
        generator = torch.Generator().manual_seed(0)
        m = max(1, Config().num_masked(tokens.shape[1]))  # the paper's rate, not this run's
        masked = draw_masks(tokens >= NUM_SPECIAL, m, generator)
        corruption = apply_masks(tokens, masked, self.config, generator)
        total = 0.0
        right = 0
        for batch in self.worker.micro_batches(tokens, corruption, self.recipe.micro_batch_size):
            truth, masks = self.worker.put(batch)
            with self.worker.autocast():
                logits = self.model.logits(masks)  # (B, m, V)
            targets = truth.gather(1, masks.masked)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            total += loss.item() * len(truth)  # the last batch may be smaller
            right += int((logits.argmax(-1) == targets).sum())
        self.model.train()
        total, right = self.worker.sums(total, right)
        return total / len(tokens), right / masked.numel()


# ---- 3. A run ------------------------------------------------------------------------------------
def pretrain(config: Config, recipe: Recipe, start: dict | None, flags: Namespace, worker: Worker) -> int:
    """Begin or continue the run in flags.out, and train it to its end. A new run has random
    weights, or those of the checkpoint `start`. Returns 0, or 128 + the signal that ended
    training."""
    if recipe.batch_size % worker.world_size > 0:  # means over processes would not be the batch's
        raise UserError(f"batch_size={recipe.batch_size}: use a multiple of {worker.world_size}, the "
                        "number of processes")
    run = Run(flags.out, config, recipe, FIXED, worker)  # at its newest checkpoint, or at step 0
    if run.step >= recipe.last_step:
        print(f"{run.out} is finished at step {run.step}; for more, use a larger --max-steps or "
              "--stop-at")
        return 0
    trainer = Trainer(config, recipe, worker)
    run.restore(trainer.model, trainer.optimizers, start)  # its newest checkpoint, or else start
    corpus = open_corpus(recipe, config.vocab_size, config.seq_len, run.tokenizer, run.saved)
    run.begin(trainer.model, corpus, preset=flags.preset, ablation=flags.ablation)
    if run.step == 0:
        run.log_validation(*trainer.validate(corpus.val))
    with worker.noted_signals() as noted:
        signal = train_and_report(trainer, run, corpus, noted)
    worker.wait()  # for the first process to save
    if run.step < recipe.last_step:
        print(f"stopped by signal {signal}; repeat the command to continue")
        return 128 + signal
    print(f"{run.out}: {', '.join(sorted(path.name for path in run.out.glob('[!.]*.*')))}; to see its guesses:")
    print(f'python -m support.fill_mask {run.out} "Return the [MASK] of the array."')
    return 0


def train_and_report(trainer: Trainer, run: Run, corpus: Corpus, noted: list[int]) -> int:
    """Train until the last step, or until a signal is among the `noted` ones. On the way, log,
    evaluate and save. Returns the signal, or 0."""
    recipe = trainer.recipe
    signal = 0
    run.start_clock()
    while run.step < recipe.last_step and not signal:
        # While a GPU computes, the CPU prepares the next batch: results are read for a log line.
        batches = trainer.batches(corpus.train, run.step)
        run.count_step(trainer.step(batches, run.step))
        signal = trainer.worker.signal_of_any(noted, run.step)
        is_last = run.step == recipe.last_step
        evaluating = is_last or is_due(run.step, recipe.eval_interval)
        saving = is_last or signal or is_due(run.step, recipe.checkpoint_interval)
        # All processes log and evaluate, because they exchange losses; only the first one saves.
        if saving or evaluating or is_due(run.step, recipe.log_interval):
            run.log_steps(trainer.optimizers)  # stops the clock
            if evaluating:
                run.log_validation(*trainer.validate(corpus.val))
            if saving:
                run.save(trainer.model, trainer.optimizers)
            run.start_clock()
    return signal


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps, or never for 0, happens after a step."""
    return interval > 0 and step % interval == 0


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> tuple[Config, Recipe, dict | None, Namespace]:
    """Read the command line: settings, the checkpoint of --init or None, and the other flags."""
    # Parse twice, because -h shows the values of the preset.
    first = Parser("train.py", __doc__, add_help=False)
    first.add_argument("--preset", choices=PRESETS, help="size and recipe (Table 4) [toy]")
    preset = first.parse_known_args(argv)[0].preset or "toy"
    parser = Parser("train.py", __doc__, parents=[first])
    add = parser.add_argument
    add("--ablation", choices=ABLATIONS, help="an ablation of Table 2 [mae-lm]")
    add("--out", type=Path, help="run folder [out/PRESET[-ABLATION], or out/RUN-more with --init]")
    add("--prepare", action="store_true", help="tokenize --data into --cache, and do not train")
    for part in (Config, Recipe):
        parser.add_fields(part, PRESETS[preset])
    flags, given = parser.read(argv)
    start = None
    if given.get("init"):
        if flags.preset or flags.ablation:
            raise UserError("--init: its settings are those of that run; leave out --preset and "
                            "--ablation")
        flags.out = flags.out or Path("out", f"{short_name(given['init'])}-more")
        start = starting_point(given["init"], flags.out)
        flags.preset = start.get("preset", "")
        flags.ablation = start.get("ablation", "")
        values = asdict(start["config"]) | fields_of(Recipe, start["settings"])
        values["stop_at"] = 0  # the early end of an earlier run does not apply
    else:
        flags.preset = preset
        flags.ablation = flags.ablation or "mae-lm"
        name = preset if flags.ablation == "mae-lm" else f"{preset}-{flags.ablation}"
        flags.out = flags.out or Path("out", name)
        values = PRESETS[preset] | ABLATIONS[flags.ablation]
        for name, value in ABLATIONS[flags.ablation].items():
            if given.get(name, value) != value:
                raise UserError(f"{name}={given[name]!r}: --ablation {flags.ablation} sets it to {value!r}; "
                                "leave out one of the two")
    if "max_steps" in given:  # warm-up keeps its share
        before = Recipe(**fields_of(Recipe, values))
        values["warmup_steps"] = round(before.warmup_steps / before.max_steps * given["max_steps"])
    config, recipe = make_settings(values | given)
    return config, recipe, start, flags


def main(argv=None):
    code = 0
    with clear_errors("train.py"), joined_processes():
        config, recipe, start, flags = parse(argv)
        worker = Worker.make(recipe.precision, recipe.device, config.encoder_dim)
        if flags.prepare:
            tokenizer = start["tokenizer"] if start else None
            open_corpus(recipe, config.vocab_size, config.seq_len, tokenizer)
        else:
            with worker.lock(flags.out):
                code = pretrain(config, recipe, start, flags, worker)
    if code:  # now that the processes have disconnected
        raise SystemExit(code)


if __name__ == "__main__":
    main()
