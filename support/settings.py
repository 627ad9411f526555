"""Settings from the run that train.py's --init names, the content of a run, and settings that do not fit together."""
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from maelm import ABLATIONS, MAELM, Config
from support.cli import UserError
from support.corpus import Rows
from support.files import changes, check_fields, read_json, read_settings, refuse_changes, short_hash
from support.models import checkpoint_of, checkpoints, load_model
from support.tokenizer import Tokenizer

IMPORTED = dict(batch_size=256, max_steps=10_000, learning_rate=1e-4, warmup_steps=600, eval_interval=500,
                checkpoint_interval=1000)  # the recipe for weights that support.convert imported
ENCODER = ("vocab_size", "seq_len", "encoder_layers", "encoder_dim", "encoder_heads", "norm", "rel_pos_buckets",
           "rel_pos_max_distance")  # fields of Config on which the encoder's weights depend
TEXT = ("data", "column", "uncased", "val_share")  # settings that decide the corpus
NOT_PASSED_ON = ("init", "tokenizer", "stop_at", "device", "compile", "cache", "wandb")


# ---- 1. The run of --init takes the place of a preset -------------------------------------------------------
class Start(NamedTuple):
    """What --init names."""
    folder: Path
    model: MAELM
    tokenizer: Tokenizer
    settings: dict  # config.json
    weights: str  # a hash of the checkpoint


def load_start(init: str, *kinds: type) -> Start:
    """Load a run folder or a checkpoint, whose config.json has fields of these dataclasses. Raises UserError if a file
    is missing or damaged."""
    file = checkpoint_of(Path(init))
    path = file.parent / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: missing, and --init takes the run's settings from it; restore it from a copy")
    settings = read_json(path)
    check_fields(path, settings, *kinds, Inputs)
    return Start(file.parent, *load_model(file), settings, short_hash(file.read_bytes()))


def settings_of_start(start: Start, preset: dict | None, ablation: str | None) -> dict:
    """The settings that --init gives: those of the run, at a fifth of its peak rates unless it also began with --init.
    With a preset, the recipe is the preset's; with an ablation, decoder and masks are those of its row of Table 2."""
    there, config = start.settings, start.model.config
    if preset is not None:
        values = preset | {name: there[name] for name in TEXT if name in there}
    elif "max_steps" not in there:
        values = there | IMPORTED
    else:
        values = {name: value for name, value in there.items() if name not in NOT_PASSED_ON}
        if not there.get("init"):
            for name in {"learning_rate", "muon_learning_rate"} & there.keys():
                values[name] = round(there[name] / 5, 12)
    values |= asdict(config) | {"uncased": start.tokenizer.uncased, "tokenizer": str(start.folder / "tokenizer.json")}
    if ablation is not None:
        row_decides = set().union(*ABLATIONS.values()) - set(ENCODER)
        values |= {name: getattr(Config, name) for name in row_decides}
        # A new decoder is as deep as those of the presets.
        values["decoder_layers"] = config.decoder_layers or max(1, min(4, config.encoder_layers // 3))
    return values


# ---- 2. The content that a run is made of -------------------------------------------------------------------
@dataclass(frozen=True)
class Inputs:
    """The content that a run is made of. config.json holds it beside the settings."""
    corpus: str = ""  # the name of its folder in the cache
    vocabulary: str = ""  # a hash of tokenizer.json
    init_weights: str | None = None  # a hash of the checkpoint that --init loaded


def inputs_of(corpus: Path, init: str, start: Start | None, earlier: dict) -> dict:
    """The fields of Inputs for a prepared corpus and --init, if `earlier` was in config.json."""
    weights = None if start is None else start.weights
    if earlier.get("init") == init:
        weights = earlier["init_weights"]  # the run of that name may have been trained further since then
    return asdict(Inputs(corpus.name, short_hash((corpus / "tokenizer.json").read_bytes()), weights))


def earlier_settings(out: Path, settings, change_recipe: bool) -> dict:
    """config.json of the run that a folder holds; {} if it has no checkpoint, since it can then begin anew. Raises
    UserError if Settings differ that may not change: all but RunOptions and, with --change-recipe, most of Recipe."""
    found = checkpoints(out)
    if not found:
        return {}
    earlier = read_settings(out / "config.json", *map(type, settings), Inputs)
    in_recipe = asdict(settings.recipe).keys() - {*TEXT, "optimizer", "position_init"}
    changed = changes(earlier, settings.fields(), asdict(settings.options))
    advice = "choose another --out"
    if "max_steps" in changed and int(found[-1].stem.removeprefix("step_")) == earlier["max_steps"]:
        advice = f"the run is finished: to train it for longer, start another --out from it with --init {out}"
    elif changed.keys() <= in_recipe:
        if change_recipe:
            return earlier
        advice += ", or continue this run with --change-recipe"
    refuse_changes(out, changed, advice)
    return earlier


# ---- 3. Settings that do not fit together -------------------------------------------------------------------
def refuse_misfits(settings, start: Start | None, tokenizer: Tokenizer | None, given: dict):
    """Raises ValueError for Settings that the weights of --init or a given tokenizer do not have, and for given flags
    that have no effect."""
    config = settings.config
    if start is not None and given.get("tokenizer"):
        raise ValueError("--tokenizer: --init comes with its own")
    for name in ENCODER if start is not None else ():
        here, there = getattr(config, name), getattr(start.model.config, name)
        if here != there:
            raise ValueError(f"{name}={here!r}: the weights of --init have {there!r}")
    if tokenizer is not None and settings.recipe.uncased != tokenizer.uncased:
        raise ValueError(f"uncased={settings.recipe.uncased}: the given tokenizer has {tokenizer.uncased}")
    if tokenizer is not None and config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size}: the given tokenizer has {len(tokenizer)} tokens")
    idle = ("muon_learning_rate", "muon_weight_decay") if settings.recipe.optimizer == "adamw" else ()
    idle += ("encoder_fill", "decoder_reset") if config.mask_in_encoder == 0 else ()
    idle += ("decoder_relative",) if config.decoder_layers == 0 else ()
    for name in idle:
        if given.get(name):
            raise ValueError(f"{name}={given[name]!r} has no effect here: leave it out")


def refuse_many_masks(config: Config, splits: list[Rows]):
    """Raises UserError if a sequence of these splits has fewer words than are masked."""
    n = config.seq_len
    m, least = config.num_masked(n), (n - 1) // 2  # maskable tokens in a sequence, even if each document has one
    if m > least:
        least = min(split.fewest_real_tokens() for split in splits)
    if not 0 < m <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {m} of {n} tokens in a row: use 1 to {least}")
