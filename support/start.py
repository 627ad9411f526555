"""Where a run starts: from a preset, from the run that --init names, or from its own last checkpoint."""
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import nn

from maelm import ABLATIONS, MAELM, Config
from support.checkpoints import Inputs, checkpoint_of, checkpoints, load_model, run_settings
from support.cli import UserError
from support.corpus import Rows, corpus_name
from support.documents import sources, text_hash
from support.files import changes, check_fields, read_json, refuse_changes, short_hash
from support.tokenizer import Tokenizer

IMPORTED = dict(batch_size=256, max_steps=10_000, learning_rate=1e-4, warmup_steps=600, eval_interval=500,
                checkpoint_interval=1000)  # the recipe for weights that support.convert imported
ENCODER = ("vocab_size", "seq_len", "encoder_layers", "encoder_dim", "encoder_heads", "norm", "rel_pos_buckets",
           "rel_pos_max_distance")  # fields of Config on which the encoder's weights depend
TEXT = ("data", "column", "uncased", "val_share")  # settings on which the corpus depends
NOT_PASSED_ON = ("init", "tokenizer", "stop_at", "device", "compile", "cache", "wandb")


class Start(NamedTuple):
    """Where a run starts: a preset, or the run that --init names."""
    settings: dict  # which an ablation and flags override
    tokenizer: Tokenizer | None = None  # of --init or --tokenizer; otherwise one is learned
    fixed: tuple[str, ...] = ()  # settings that flags cannot change
    model: MAELM | None = None  # of --init
    weights: str | None = None  # a hash of the checkpoint of --init

    def require_fixed(self, settings: dict):
        """Raises ValueError if flags have changed a setting that is fixed."""
        for name in self.fixed:
            if settings[name] != self.settings[name]:
                raise ValueError(f"{name}={settings[name]!r}: must be {self.settings[name]!r}, as in the run of "
                                 "--init or in --tokenizer")
        if self.tokenizer is not None and settings["vocab_size"] < len(self.tokenizer):
            raise ValueError(f"vocab_size={settings['vocab_size']}: the tokenizer needs {len(self.tokenizer)} or more")


def default_out(init: str, preset: str | None, ablation: str | None) -> Path:
    """The run folder if --out is not given: toy or toy-mlm; with --init NAME, NAME-more or NAME-mlm."""
    if not init:
        return Path("out", f"{preset or 'toy'}-{ablation or 'mae-lm'}".removesuffix("-mae-lm"))
    folder = Path(init).parent if init.endswith(".pt") else Path(init)
    return Path("out", f"{folder.resolve().name}-{ablation or 'more'}")


def load_start(init: str, out: Path, preset: dict | None, ablation: str | None, *kinds: type) -> Start:
    """Load a run folder or a checkpoint. Its settings, fields of the dataclasses `kinds`, replace a preset; its peak
    learning rates are divided by 5 unless that run also began with --init. A given preset determines the recipe, and an
    ablation determines the decoder and the masks. Raises UserError if a file is missing or damaged."""
    fixed = (*ENCODER, "uncased", "tokenizer")
    try:
        file = checkpoint_of(Path(init))
        model, tokenizer = load_model(file)
    except UserError:
        there = run_settings(out) if checkpoints(out) else {}
        if there.get("init") != init:
            raise
        # The run in `out` has a checkpoint of its own, and does not need its start, which is gone.
        kept = {name: value for name, value in there.items() if name == "tokenizer" or name not in NOT_PASSED_ON}
        return Start(kept, Tokenizer.load(out), fixed, None, there.get("init_weights"))
    path = file.parent / "config.json"
    there = read_json(path)
    check_fields(path, there, *kinds, Inputs)
    if preset is not None:
        values = preset | {name: there[name] for name in TEXT if name in there}
    else:
        values = {name: value for name, value in there.items() if name not in NOT_PASSED_ON}
        if "max_steps" not in there:
            values |= IMPORTED
        elif not there.get("init"):
            for name in {"learning_rate", "muon_learning_rate"} & there.keys():
                values[name] = round(there[name] / 5, 12)
    values |= asdict(model.config) | {"uncased": tokenizer.uncased, "tokenizer": str(path.with_name("tokenizer.json"))}
    if ablation is not None:
        row_decides = set().union(*ABLATIONS.values()) - set(ENCODER)
        values |= {name: getattr(Config, name) for name in row_decides}
        # A new decoder is as deep as in the presets.
        values["decoder_layers"] = model.config.decoder_layers or max(1, min(4, model.config.encoder_layers // 3))
    return Start(values, tokenizer, fixed, model, short_hash(file.read_bytes()))


def settings_to_resume(out: Path, settings, start: Start, change_recipe: bool) -> dict:
    """config.json of the run in a folder; {} if it has no checkpoint, so that it can start anew. Raises UserError if
    any settings have changed, apart from RunOptions and, with --change-recipe, most of Recipe, or if the `weights`
    of --init are not those with which the run began."""
    found = checkpoints(out)
    if not found:
        return {}
    there, kinds = read_json(out / "config.json"), (*map(type, settings), Inputs)
    check_fields(out / "config.json", there, *kinds)
    for kind in kinds:
        there = asdict(kind()) | there  # a missing field gets its default
    changed = changes(there, asdict(settings.config) | asdict(settings.recipe))
    if settings.options.init != there["init"]:  # a run of the same name may have been trained further
        changed |= changes(there, {"init_weights": start.weights})
    if "data" in changed and there["corpus"]:  # the same text may have another name now
        text = text_hash(sources(settings.recipe.data, settings.recipe.column, settings.options.cache))
        if corpus_name(there, text, start.tokenizer) == there["corpus"]:
            del changed["data"]
    step = int(found[-1].stem.removeprefix("step_"))
    in_recipe = asdict(settings.recipe).keys() - {*TEXT, "batch_size", "optimizer", "position_init"}
    advice = "choose another --out"
    if "max_steps" in changed and step == there["max_steps"]:
        advice = f"the run is finished: to train it for longer, start a run in another --out with --init {out}"
    elif "max_steps" in changed and step >= settings.recipe.max_steps:
        advice = f"the run is already at step {step}: use a larger --max-steps"
    elif changed.keys() <= in_recipe:
        if change_recipe:
            return there
        advice += ", or continue this run with --change-recipe"
    refuse_changes(out, changed, advice)
    return there


def inputs_of(out: Path, corpus: Path, before: dict, start: Start) -> dict:
    """The Inputs of a run as a dictionary; `before` is its earlier config.json or {}. Raises UserError if the run
    had other inputs; an older version may not have recorded them."""
    vocabulary = short_hash((corpus / "tokenizer.json").read_bytes())
    inputs = asdict(Inputs(corpus.name, vocabulary, before["init_weights"] if before else start.weights))
    if before.get("corpus"):
        refuse_changes(out, changes(before, inputs))
        given = start.tokenizer
        if given is not None and given.model.get_vocab() != Tokenizer.load(corpus).model.get_vocab():
            raise UserError(f"{out}: its run began with another tokenizer than that of --tokenizer; choose another "
                            "--out")
    return inputs


def copy_fitting_weights(source: nn.Module, target: nn.Module):
    """Copy the weights of a model to another one. New layers and layers of another shape keep their random weights."""
    weights = target.state_dict()
    for name, weight in source.state_dict().items():
        if name in weights and weight.shape == weights[name].shape:
            weights[name] = weight
    target.load_state_dict(weights)


def refuse_many_masks(config: Config, splits: list[Rows]):
    """Raises UserError if a sequence has too few tokens that can be masked."""
    n = config.seq_len
    m, least = config.num_masked(n), (n - 1) // 2  # even if every document is a single token
    if m > least:
        least = min(split.fewest_real_tokens() for split in splits)
    if not 0 < m <= least:
        raise UserError(f"mask_rate={config.mask_rate} masks {m} of {n} tokens per sequence; it must mask 1 to {least}")
