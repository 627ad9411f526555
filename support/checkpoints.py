"""Checkpoints of a run folder: written whole, read without running code, loaded as models."""
import pickle
import zipfile
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import nn

from maelm import MAELM, Config, Encoder
from support.cli import UserError
from support.models import make_model
from support.run_folder import atomic, read_json
from support.tokenizer import Tokenizer


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. Only files of this name are ours to load or to delete."""
    return sorted(out.glob(f"step_{7 * '[0-9]'}.pt"))


def write_tensors(path: Path, state: dict):
    """Write tensors and numbers atomically. No objects of ours: so reading them back runs no code."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise (error.__context__ or error) from None  # PyTorch's writer hides the disk's error behind its own


def read_tensors(path: Path, *wanted: str) -> dict:
    """What a .pt file holds, on the CPU, with its configuration as a Config; it runs no code. UserError if the file is
    damaged, lacks a field, or is of another version of this code."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a run folder, a checkpoint, or a folder that finetune.py wrote")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # compares the checksums, which torch.load does not
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError):
        state = None
    if not isinstance(state, dict):
        raise UserError(f"{path}: damaged, or not written by this project; delete it: then the checkpoint before it is "
                        "used, or its run is done again")
    if not state.keys() >= {"config", *wanted}:
        raise UserError(f"{path}: lacks config, {', '.join(wanted)}: not a file of the kind that is needed here")
    try:
        differs = state["config"].keys() ^ {field.name for field in fields(Config)}
        if not differs:
            return state | {"config": Config(**state["config"])}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged configuration ({error}); delete it, or use another") from error
    raise UserError(f"{path}: written by another version of maelm, which differs in {', '.join(sorted(differs))}; use "
                    "that version, or delete the folder and train again")


def save_checkpoint(out: Path, step: int, model: MAELM, optimizers: list, seconds: float, keep: int):
    """Write step_STEP.pt, then remove the oldest but `keep` (0 = none). UserError if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"step {step}: {name} is not finite; start again with a lower --learning-rate")
    write_tensors(out / f"step_{step:07d}.pt", {
        "step": step,
        "seconds": seconds,  # of training, evaluations not counted
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    })
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()


def copy_weights(model: MAELM, start: MAELM) -> str:
    """Copy the weights of `start` that have the same name and shape in a model. Returns the names of what is new."""
    here = model.state_dict()
    taken = {name: x for name, x in start.state_dict().items() if name in here and x.shape == here[name].shape}
    model.load_state_dict(taken, strict=False)
    return ", ".join(dict.fromkeys(".".join(name.split(".")[:3]) for name in here if name not in taken))


def load_weights(module: nn.Module, weights: dict, path: Path):
    """Load the weights of a file. UserError if they do not fit, or are not finite."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: its weights do not fit its configuration; delete it, or use another") from error
    for name, weight in module.state_dict().items():
        if not weight.isfinite().all():
            raise UserError(f"{path}: {name} is not finite; delete it, or use another")


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path names, or the newest one of a run folder. UserError if there is none."""
    found = [path] if path.suffix == ".pt" else checkpoints(path)
    if not found:
        raise UserError(f"{path}: not a run folder with checkpoints; train.py makes one; support.convert imports hf:")
    return found[-1]


def load_model(path: Path) -> tuple[MAELM, Tokenizer]:
    """The model of a run folder or checkpoint, in evaluation mode, and its tokenizer. UserError if there is none."""
    file = checkpoint_of(path)
    state = read_tensors(file, "model", "step")  # finetune.py's encoder.pt has no step, and no decoder
    model = make_model(state["config"])
    load_weights(model, state["model"], file)
    return model.eval(), Tokenizer.load(file.parent)


def load_encoder(path: Path, device: torch.device | str = "cpu") -> tuple[Encoder, Tokenizer, Config, dict]:
    """The encoder of a run folder, a checkpoint, or finetune.py (encoder.pt), in evaluation mode; its tokenizer, shape
    and run's settings. UserError if none."""
    file = path / "encoder.pt" if (path / "encoder.pt").is_file() else checkpoint_of(path)
    state = read_tensors(file, "model")
    encoder = Encoder(state["config"])
    weights = {name: weight for name, weight in state["model"].items() if name.startswith("encoder.")}
    load_weights(encoder, {name.removeprefix("encoder."): weight for name, weight in weights.items()}, file)
    return encoder.to(device).eval(), Tokenizer.load(file.parent), state["config"], run_settings(file.parent)


def run_settings(folder: Path) -> dict:
    """What config.json of a run folder holds; {} if there is none."""
    path = folder / "config.json"
    return read_json(path, "init") if path.is_file() else {}  # all that write one write that
