"""The settings of a run: RunOptions, which values are allowed, which may change later, and what follows from them."""
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from maelm import Config
from support.model.build import seed_of
from support.program.cli import require, short_name
from support.text.documents import CACHE


@dataclass(frozen=True)
class RunOptions:
    """The settings of a run that do not decide its weights, except `init` and, by dropout's masks, the micro-batch."""
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
        intervals = ("micro_batch_size", "log_interval", "eval_interval", "eval_rows", "checkpoint_interval")
        require(
            self,
            *[(name, getattr(self, name) >= 1, "1 or more") for name in intervals],
            ("keep_checkpoints", self.keep_checkpoints >= 0, "0 or more"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"))


# The settings that may change when a run continues. The model, the text and its tokens must stay; `data` may change,
# because the text may have moved.
MAY_CHANGE = {field.name for field in fields(RunOptions) if field.name != "init"}
MAY_CHANGE |= {
    "max_steps", "warmup_steps", "learning_rate", "muon_learning_rate", "weight_decay", "muon_weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm", "precision", "seed", "data"}


class Settings(NamedTuple):
    """All settings of a run."""
    config: Config
    recipe: object  # train.Recipe
    options: RunOptions

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.options.stop_at or self.recipe.max_steps, self.recipe.max_steps)

    @property
    def data_seed(self) -> int:
        """The seed of the data order and the masks. A run with --init does not repeat its predecessor's batches."""
        name = self.options.init.encode()  # bytes, which are numbers
        return seed_of(self.recipe.seed, *name) if name else self.recipe.seed

    def fields(self) -> dict:
        """All settings by name."""
        return asdict(self.config) | asdict(self.recipe) | asdict(self.options)


def default_out(preset: str, ablation: str | None, init: str) -> Path:
    """The run folder without --out: out/toy, out/toy-mlm or, with --init out/toy, out/toy-more or out/toy-mlm."""
    if init:
        return Path("out", f"{short_name(init)}-{ablation or 'more'}")
    return Path("out", preset if ablation in (None, "mae-lm") else f"{preset}-{ablation}")
