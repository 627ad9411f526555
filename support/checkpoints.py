"""Checkpoints: files of tensors with everything that a model needs, written atomically and read without running code.

A checkpoint of train.py (`step_*.pt`) holds its whole run: config (a Config), settings (of a Recipe), preset, ablation,
tokenizer (the content of tokenizer.json), corpus (the name of its folder), step, seconds, model and optimizers. The
encoder.pt of finetune.py holds config, settings, tokenizer, model, and what the export of its head needs.
"""
import pickle
from pathlib import Path

import torch

from maelm import MAELM, Config, Encoder
from support.model import make_model
from support.program import UserError, atomic, path_of
from support.tokenizer import Tokenizer


# ---- 1. Files -----------------------------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Only files with these names are loaded or deleted."""
    return sorted(path for path in out.glob(f"step_{7 * '[0-9]'}.pt") if path.is_file())


def write_checkpoint(path: Path, state: dict):
    """Write a checkpoint atomically. It may hold only tensors, numbers and texts, so that reading it runs no code."""
    with atomic(path) as temporary:
        torch.save(state, temporary)


def read_checkpoint(path: Path) -> dict:
    """Read a checkpoint to the CPU. Its `config` becomes a Config, and its `tokenizer` a Tokenizer."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return state | {"config": Config(**state["config"]), "tokenizer": Tokenizer.of_json(state["tokenizer"])}
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged, or not of this version of train.py ({error!r:.75}); without it, the "
                        "checkpoint before it in its folder is used") from error


def load_checkpoint(path: Path | str) -> dict:
    """Read the checkpoint at a path, the newest in a run folder, or finetune.py's encoder.pt. Raises UserError if there
    is none."""
    path = path_of(str(path))
    files = [path] if path.suffix == ".pt" else [*checkpoints(path), *path.glob("encoder.pt")]
    if not files:
        raise UserError(f"{path}: no run folder with checkpoints; make one with train.py (a linear probe saves none)")
    state = read_checkpoint(files[-1])
    step, last = state.get("step"), state["settings"].get("max_steps")
    if step and last and step != last:  # finetune.py's encoder.pt has no step
        print(f"{files[-1]}: step {step:,} of {last:,}; the run is unfinished")
    return state


def load_model(path: Path | str) -> tuple[MAELM, Tokenizer]:
    """Load the model of a run folder or checkpoint, in evaluation mode, and its tokenizer."""
    state = load_checkpoint(path)
    model = make_model(state["config"])
    model.load_state_dict(state["model"])
    return model.eval(), state["tokenizer"]


def load_encoder(path: Path | str) -> tuple[Encoder, dict]:
    """Load an encoder as load_checkpoint finds it, in evaluation mode, and the other entries of its checkpoint."""
    state = load_checkpoint(path)
    encoder = Encoder(state["config"])
    prefix, weights = "encoder.", state.pop("model")
    encoder.load_state_dict({name.removeprefix(prefix): weight for name, weight in weights.items()
                             if name.startswith(prefix)})
    return encoder.eval(), state


# ---- 2. Runs of train.py ------------------------------------------------------------------------------------
def newest_checkpoint(out: Path) -> dict | None:
    """The newest checkpoint of a run, or None."""
    found = checkpoints(out)
    return read_checkpoint(found[-1]) if found else None


def restore(saved: dict, model: MAELM, optimizers: list):
    """Load the weights and the optimizers' states of a checkpoint. The settings of the optimizers' groups stay: they
    come from flags."""
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state | {"param_groups": optimizer.state_dict()["param_groups"]})


def save_run(out: Path, record: dict, step: int, seconds: float, model: MAELM, optimizers: list, keep: int):
    """Write the checkpoint of a run, whose `record` stays the same, and remove older ones except the last `keep`."""
    write_checkpoint(out / f"step_{step:07d}.pt", record | {
        "step": step, "seconds": seconds, "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers]})
    if keep > 0:
        for old in checkpoints(out)[:-keep]:
            old.unlink()
