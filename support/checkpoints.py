"""Checkpoints: files of tensors with everything that a model needs, written atomically and read without running code.
And the models that they hold.

A checkpoint of train.py (`step_*.pt`) holds its whole run: config (a Config), settings (of a Recipe), preset, ablation,
tokenizer (the content of tokenizer.json), corpus (the name of its folder), step, seconds, model and optimizers. The
encoder.pt of finetune.py holds config, settings, tokenizer, model, and what the export of its head needs.
"""
import copy
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from maelm import MAELM, NUM_SPECIAL, Config, Encoder
from support.corpus import Corpus, open_corpus
from support.model import make_model, text_states
from support.program import UserError, atomic, fields_of, path_of, short_hash
from support.text import Text
from support.tokenizer import Tokenizer


# ---- 1. Files -----------------------------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Only files with these names are loaded or deleted."""
    return sorted(out.glob(f"step_{7 * '[0-9]'}.pt"))


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
    if path.suffix != ".pt" and step and last and step != last:  # finetune.py's encoder.pt has no step
        print(f"{files[-1]}: step {step:,} of {last:,}; the run is unfinished")
    return state


def weights_hash(weights: dict[str, Tensor]) -> str:
    """A hash of the values of weights."""
    return short_hash(b"".join(tensor.numpy().tobytes() for tensor in weights.values()))


def starting_point(init: str, out: Path) -> dict:
    """The checkpoint that gives settings, tokenizer and weights to a run in `out` with --init: `init` or, if the run
    has begun, its own, because the first one may be gone. Its `start` is a hash of the weights with which the run
    begins. Raises UserError if it began with others."""
    own = checkpoints(out)
    if not own:
        first = load_checkpoint(init)
        another_order = {"seed": first["settings"].get("seed", 0) + 1}  # also other masks and dropout
        return first | {"settings": first["settings"] | another_order, "start": weights_hash(first["model"])}
    saved = read_checkpoint(own[-1])
    if init != saved["settings"].get("init") and weights_hash(load_checkpoint(init)["model"]) != saved.get("start"):
        raise UserError(f"--init {init}: the run in {out} began with other weights; choose another --out")
    return saved


def load_model(path: Path | str) -> tuple[MAELM, Tokenizer]:
    """Load the model of a run folder or checkpoint, in evaluation mode, and its tokenizer."""
    state = load_checkpoint(path)
    if "task" in state:
        raise UserError(f"{path}: is fine-tuned, and has no decoder; name a run of train.py")
    model = make_model(state["config"])
    model.load_state_dict(state["model"])
    return model.eval(), state["tokenizer"]


# ---- 2. Encoders -------------------------------------------------------------------------------------------
class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str):
        self.state = load_checkpoint(name.removeprefix("random:"))
        self.tokenizer = self.state["tokenizer"]
        self.settings = self.state["settings"]
        self.config = self.state["config"]
        self.is_random = name.startswith("random:")
        self.step = None if self.is_random else self.state.get("step")  # nor has finetune.py's encoder.pt a step

    def with_dropout(self, dropout: float) -> "Pretrained":
        """The same weights, with this dropout in training."""
        other = copy.copy(self)
        other.config = replace(self.config, dropout=dropout)
        return other

    def corpus(self) -> Corpus:
        """The text of a run, in tokens. Raises UserError if it has changed."""
        text = Text(**fields_of(Text, self.settings))
        return open_corpus(text, self.config.vocab_size, self.config.seq_len, self.tokenizer, self.state)

    def weights_hash(self) -> str:
        """A hash of the weights or, if they are random, of the weights that seed 0 draws."""
        return weights_hash(self.new_encoder(seed=0).state_dict())

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder. If its weights are random, the seed determines them."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if not self.is_random:
            weights = self.state["model"]
            encoder.load_state_dict({name: weights[f"encoder.{name}"] for name in encoder.state_dict()})
        return encoder


# ---- 3. Fine-tuned models -----------------------------------------------------------------------------------
class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, t) int64, padding (B, t) bool -> the head's float32 logits."""
        return self.head(text_states(self.encoder, tokens, padding)[-1], padding).float()

    def save(self, path: Path, pretrained: Pretrained, **entries):
        """Write a fine-tuned model, which can be exported or fine-tuned further. For the export, `entries` have its
        `task`, names as `labels`, `center` and `scale` of its Labels, and the `longest` input of fine-tuning in
        tokens. The logits of `example`, a few tokens, are compared with those of the export."""
        tokens = NUM_SPECIAL + torch.arange(8, device=next(self.parameters()).device)[None]
        with torch.no_grad():
            logits = self.eval()(tokens, tokens < 0)
        write_checkpoint(path, entries | {
            "config": asdict(pretrained.config), "settings": pretrained.settings, "model": self.state_dict(),
            "tokenizer": pretrained.tokenizer.to_json(), "example": logits.cpu()})
