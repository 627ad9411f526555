"""A run: how it begins, with new weights, with those of --init or from its last checkpoint; and its checkpoints."""
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from maelm import MAELM, Config
from support.model.build import make_model
from support.model.checkpoints import CODE, checkpoint_of, checkpoints, read_checkpoint, write_checkpoint
from support.model.optim import make_optimizers
from support.program.cli import path_of
from support.program.errors import UserError, say
from support.program.files import compare
from support.program.worker import Worker
from support.text.corpus import SPLITS, Rows, prepared_corpus
from support.text.tokenizer import Tokenizer
from support.training.settings import MAY_CHANGE, RunOptions, Settings

# The fields of Config that do not shape the encoder. All others stay as they are in a run with --init.
NOT_OF_ENCODER = {"decoder_layers", "dropout", "mask_rate", "init_std", "decoder_relative", "mask_in_encoder",
                  "encoder_fill", "decoder_reset", "aligned_positions", "decoder_dim", "decoder"}
# The fields of Config that make a model a row of Table 2, except sizes.
OF_ROWS = {"mask_in_encoder", "encoder_fill", "decoder_reset", "aligned_positions", "decoder"}
# The settings of a run that another run does not take over with --init.
NOT_INHERITED = {"init", "stop_at", "keep_checkpoints", "device", "cache", "wandb"}


# ---- 1. The run that --init names ---------------------------------------------------------------------------
class Start(NamedTuple):
    """The weights and the tokenizer with which a run begins; by default, both are new."""
    settings: dict = {}  # those of the run that --init names, except NOT_INHERITED
    encoder_settings: dict = {}  # those on which the encoder's weights and its tokens depend
    tokenizer: Tokenizer | None = None
    weights: dict | None = None  # by name

    def inherited(self, ablation: str | None) -> dict:
        """The settings that the new run takes over. A row of Table 2 is a difference from an MAE-LM; for a row, they do
        not include what made the old run another row."""
        old_row = OF_ROWS if ablation else set()
        if ablation and self.settings.get("decoder_layers") == 0:  # an MLM; the preset knows how many there should be
            old_row = OF_ROWS | {"decoder_layers"}
        return {name: value for name, value in self.settings.items() if name not in old_row}

    def check(self, init: str, settings: Settings):
        """Raises UserError if a flag changes a setting of the encoder."""
        now = {name: settings.fields()[name] for name in self.encoder_settings}
        compare(Path(init), self.encoder_settings, now, advice="with --init, these cannot change")


def load_start(init: str, out: Path) -> Start:
    """Read the run folder or checkpoint of --init. If a run in `out` began there, its own checkpoint has the same
    settings, so its start may be gone. Raises UserError if there is no checkpoint."""
    begun = checkpoints(out)
    state = read_checkpoint(begun[-1]) if begun else None
    if state is None or state["settings"].get("init") != init:
        state = read_checkpoint(checkpoint_of(path_of(init)), "step")
    config = asdict(state["config"])
    settings = {name: value for name, value in (config | state["settings"]).items() if name not in NOT_INHERITED}
    encoder_settings = {name: value for name, value in config.items() if name not in NOT_OF_ENCODER}
    encoder_settings["uncased"] = state["tokenizer"].uncased
    return Start(settings, encoder_settings, state["tokenizer"], state["model"])


# ---- 2. A run -----------------------------------------------------------------------------------------------
@dataclass
class Run:
    """The state of a run after `step` steps."""
    out: Path
    settings: Settings
    worker: Worker
    tokenizer: Tokenizer
    corpus: str  # the name of its folder in the cache
    rows: dict[str, Rows]  # by split
    model: MAELM
    optimizers: list
    changed: dict[str, list]  # settings and code that differ from the last checkpoint's
    step: int = 0
    seconds: float = 0.0  # of training, excluding evaluations and checkpoints


def changes(out: Path, saved: dict, settings: Settings) -> dict[str, list]:
    """The settings, and the code, that differ from those of a checkpoint in `out`. Raises UserError if one of them must
    stay."""
    defaults = asdict(type(settings.recipe)()) | asdict(RunOptions())  # for fields that the checkpoint lacks
    code = saved.get("code", CODE)
    before = asdict(saved["config"]) | defaults | saved["settings"] | code
    now = settings.fields() | CODE
    if saved["step"] >= settings.last_step:  # a finished run uses no setting, so only the code may differ
        return compare(out, before, now, code | CODE)
    changed = compare(out, before, now, MAY_CHANGE | code.keys() | CODE.keys())
    if changed.get("keep_checkpoints", [1])[0] == 0:
        raise UserError(f"{out}: keep_checkpoints=0 there; repeat the command with --keep-checkpoints 0, because "
                        "otherwise its older checkpoints would be deleted")
    return changed


def begin(settings: Settings, out: Path, start: Start, worker: Worker) -> Run:
    """Begin a run, or continue the run in `out` if only settings that may change differ."""
    config, recipe, _ = settings
    worker.share_of(recipe.batch_size)  # raises an error early
    newest = worker.of_main([path.name for path in checkpoints(out)[-1:]])  # processes may not share a disk
    saved = None
    changed = {}
    given = start.tokenizer
    if newest:
        saved = read_checkpoint(out / newest[0], "corpus", "step")
        changed = changes(out, saved, settings)
        given = saved["tokenizer"] if settings.options.init else None
    # The first process prepares the corpus; the others find it, or prepare the same one on another machine.
    name = saved["corpus"] if saved else ""
    if worker.is_main:
        name = prepared_corpus(settings.fields(), given, name, moved="data" in changed).name
    folder = prepared_corpus(settings.fields(), given, worker.of_main(name))
    tokenizer = Tokenizer.load(folder)
    rows = {split: Rows(folder, split, config.seq_len) for split in SPLITS}
    check_text(config, tokenizer, rows)
    torch.manual_seed(recipe.seed)
    model = make_model(config, recipe.position_init).to(worker.device)
    optimizers = make_optimizers(model, recipe, worker.dtype)
    run = Run(out, settings, worker, tokenizer, folder.name, rows, model, optimizers, changed)
    if saved is not None:
        restore(run, saved)
    elif start.weights is not None:
        new = copy_fitting_weights(start.weights, model)
        if new and worker.is_main:
            names = ", ".join(new[:4])
            say(f"{settings.options.init} lacks {len(new)} weights of this model, which are random: {names} ...")
    return run


def check_text(config: Config, tokenizer: Tokenizer, rows: dict[str, Rows]):
    """Raises UserError if the Config asks for more masks or tokens than the text has."""
    m = config.num_masked(config.seq_len)
    real = rows["train"].fewest_real()
    if m > real:
        raise UserError(f"mask_rate={config.mask_rate}: would mask {m} of {config.seq_len} tokens, but a sequence of "
                        f"this text has only {real} that are not special; use a lower --mask-rate")
    if config.encoder_fill != "mask" and len(tokenizer) < config.vocab_size:
        raise UserError(f"vocab_size={config.vocab_size}: the text has only {len(tokenizer)} different tokens, and "
                        f"encoder_fill={config.encoder_fill} would draw others; use --vocab-size {len(tokenizer)}")


def restore(run: Run, saved: dict):
    """Load the weights, the optimizers' states, the step and the seconds of a checkpoint."""
    run.model.load_state_dict(saved["model"])
    for optimizer, state in zip(run.optimizers, saved["optimizers"], strict=True):
        groups = optimizer.param_groups
        optimizer.load_state_dict(state)
        optimizer.param_groups = groups  # not the saved ones, because their rates and decays may have changed
    run.step = saved["step"]
    run.seconds = saved["seconds"]


def copy_fitting_weights(weights: dict, model: MAELM) -> list[str]:
    """Copy weights to a model. Returns the names of the others: new weights, or weights of another shape."""
    mine = model.state_dict()
    fitting = {name: weight for name, weight in weights.items() if name in mine and weight.shape == mine[name].shape}
    model.load_state_dict(mine | fitting)
    return [name for name in mine if name not in fitting]


# ---- 3. Its checkpoints -------------------------------------------------------------------------------------
def save_checkpoint(run: Run):
    """Write a checkpoint and remove older ones, as --keep-checkpoints says."""
    config, recipe, options = run.settings
    code = {name: "mixed" if name in run.changed else value for name, value in CODE.items()}
    write_checkpoint(run.out / f"step_{run.step:07d}.pt", {
        "code": code, "config": asdict(config), "settings": asdict(recipe) | asdict(options), "corpus": run.corpus,
        "tokenizer": run.tokenizer.to_json(), "step": run.step, "seconds": run.seconds,
        "model": run.model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in run.optimizers]})
    if options.keep_checkpoints > 0:
        for old in checkpoints(run.out)[:-options.keep_checkpoints]:
            old.unlink()
