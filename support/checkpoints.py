"""Checkpoints, written atomically and read without running code, and the models in them."""
import pickle
import struct
import sys
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from maelm import MAELM, Config, Encoder
from support.cli import UserError, fields_of
from support.files import atomic, check_fields, read_json, short_hash
from support.models import make_model
from support.tokenizer import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """The fields of config.json, besides the settings, that describe the inputs of a run."""
    corpus: str = ""  # the name of its folder in the cache
    vocabulary: str = ""  # a hash of tokenizer.json
    init_weights: str | None = None  # a hash of the checkpoint that --init loaded


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Only files with these names are loaded or deleted."""
    return sorted(path for path in out.glob(f"step_{7 * '[0-9]'}.pt") if path.is_file())


def write_tensors(path: Path, state: dict):
    """Write only tensors and numbers, so that reading the file runs no code. The write is atomic."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise (error.__context__ or error) from None  # the disk's error, which PyTorch's writer hides


class Damaged(UserError):
    """A file is incomplete, or was not written by this project."""


def read_tensors(path: Path, *wanted: str) -> dict:
    """Load a .pt file to the CPU without running code; its configuration becomes a Config. Raises Damaged if the file
    is damaged, or UserError if it lacks a field or is from a newer version. Disk and memory errors pass through."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    state = None
    try:
        if zipfile.ZipFile(path).testzip() is None:  # compares the checksums; torch.load does not
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError,
            pickle.UnpicklingError) as error:
        if "can't allocate memory" in str(error):
            raise
    if not isinstance(state, dict):
        raise Damaged(f"{path}: damaged, or not written by this project; if you delete it, the previous checkpoint "
                      "is used, or its run is repeated")
    if not state.keys() >= {"config", *wanted}:
        raise UserError(f"{path}: the wrong kind of file; it must contain config, {', '.join(wanted)}")
    check_fields(path, state["config"], Config)
    return state | {"config": Config(**state["config"])}  # a missing field gets its default


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int):
    """Write step_STEP.pt and, unless `keep` is 0, remove all but the newest `keep` checkpoints. `seconds` is the
    training time so far. Raises UserError if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"step {step}: {name} is not finite; continue from the last checkpoint with "
                            "--change-recipe and a lower --learning-rate")
    write_tensors(out / f"step_{step:07d}.pt", {
        "step": step, "seconds": seconds, "config": asdict(model.config),
        "inputs": fields_of(Inputs, run_settings(out)),
        "model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]})
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()


def set_damaged_aside(out: Path):
    """Rename all damaged checkpoints that are newer than the newest intact one. Raises Damaged if none is intact."""
    for path in reversed(checkpoints(out)):
        try:
            read_tensors(path)
            return
        except Damaged:
            if path == checkpoints(out)[0]:
                raise
            aside = path.replace(path.with_name(f"{path.name}.damaged"))
            print(f"warning: {path} is damaged and was renamed to {aside.name}; the run continues from an "
                  "earlier checkpoint", file=sys.stderr)


def load_checkpoint(path: Path, model: MAELM, optimizers: list) -> tuple[int, float]:
    """Load a checkpoint into a model and its optimizers. Returns its step and the seconds of training. Raises UserError
    if it does not belong to this run."""
    state = read_tensors(path, "step", "seconds", "model", "optimizers")
    inputs = fields_of(Inputs, run_settings(path.parent))
    if (state["config"] != model.config or state.get("inputs", inputs) != inputs
            or path.name != f"step_{state['step']:07d}.pt"):
        raise UserError(f"{path}: a checkpoint of another run or step; remove it")
    load_weights(model, state["model"], path)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:  # groups also contain the recipe, which --change-recipe may change
            group |= {name: optimizer.defaults[name] for name in group.keys() & optimizer.defaults.keys()}
    return state["step"], state["seconds"]


def load_weights(module: nn.Module, weights: dict, path: Path):
    """Load weights from a file into a module. Raises UserError if they do not fit."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: its weights have different names or shapes in this version of maelm; use the "
                        "version that wrote the file, or train again") from error


def checkpoint_of(path: Path) -> Path:
    """The checkpoint at a path, the newest checkpoint in a run folder, or the encoder.pt of finetune.py (for
    load_encoder). Raises UserError if there is none."""
    found = [path] if path.suffix == ".pt" else [*checkpoints(path), *path.glob("encoder.pt")]
    if not found:
        raise UserError(f"{path}: not a run folder with checkpoints; make one with train.py or support.convert")
    return found[-1]


def load_model(path: Path) -> tuple[MAELM, Tokenizer]:
    """Load the model of a run folder or checkpoint, in evaluation mode, and its tokenizer. Raises UserError if there is
    none."""
    file = checkpoint_of(path)
    state = read_tensors(file, "model", "step")  # encoder.pt of finetune.py has no step and no decoder
    model = make_model(state["config"])
    load_weights(model, state["model"], file)
    return model.eval(), load_tokenizer(file.parent, state["config"], run_settings(file.parent))


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config, dict]:
    """Load the encoder in evaluation mode, its tokenizer, its Config, and the settings of its run from a run folder, a
    checkpoint or a folder that finetune.py wrote. Raises UserError if there is no encoder."""
    file = checkpoint_of(path)
    state = read_tensors(file, "model")
    encoder = Encoder(state["config"])
    names = [name.removeprefix("encoder.") for name in state["model"] if name.startswith("encoder.")]
    load_weights(encoder, {name: state["model"][f"encoder.{name}"] for name in names}, file)
    settings = run_settings(file.parent)
    tokenizer = load_tokenizer(file.parent, state["config"], settings)
    return encoder.to(device).eval(), tokenizer, state["config"], settings


class Pretrained:
    """The encoder to fine-tune; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str, dropout: float):
        encoder, self.tokenizer, config, self.settings = load_encoder(Path(name.removeprefix("random:")))
        self.config = replace(config, dropout=dropout)
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def weights_hash(self) -> str:
        """A hash of the weights; if they are random, of those drawn with seed 0."""
        weights = [tensor.numpy().tobytes() for tensor in self.new_encoder(seed=0).state_dict().values()]
        return short_hash(b"".join(weights))

    def inherited(self) -> dict:
        """The settings of its run that a fine-tuned copy passes on."""
        kept = {name: self.settings[name] for name in ("position_init", "val_share") if name in self.settings}
        return kept | {"vocabulary": short_hash(self.tokenizer.model.to_str())}

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder, with dropout. If its weights are random, the seed determines them."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        return encoder


def load_tokenizer(folder: Path, config: Config, settings: dict) -> Tokenizer:
    """Load the tokenizer of a run folder with these run_settings. Raises UserError if the run was trained with another
    tokenizer."""
    tokenizer, recorded = Tokenizer.load(folder), settings.get("vocabulary")
    other = recorded and recorded != short_hash((folder / "tokenizer.json").read_bytes())
    if other or len(tokenizer) > config.vocab_size:
        raise UserError(f"{folder / 'tokenizer.json'}: not the tokenizer of this run; restore it from a copy")
    return tokenizer


def run_settings(folder: Path) -> dict:
    """Read config.json in a run folder; {} if there is none."""
    path = folder / "config.json"
    return read_json(path, "init") if path.is_file() else {}
