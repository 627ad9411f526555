"""Checkpoints: files of tensors with everything that a model needs, written atomically and read without running code.

A checkpoint of train.py holds its whole run: config (a Config), settings (of Recipe and RunOptions), corpus (the name
of its folder in the cache), tokenizer (the content of tokenizer.json), step, seconds, model and optimizers. The
encoder.pt of finetune.py holds config, settings, tokenizer, model, and what the export of its head needs. Both record
the code that made them.
"""
import io
import pickle
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from maelm import MAELM, NUM_SPECIAL, Config, Encoder
from support.model.build import make_model
from support.program.cli import path_of
from support.program.errors import UserError, is_first, say
from support.program.files import atomic, code_hashes, short_hash
from support.text.tokenizer import Tokenizer

# The code that decides weights, as it was when this program began.
CODE = code_hashes("maelm.py", "train.py", "support/model/build.py", "support/model/cross_attention.py",
                   "support/model/optim.py", "support/text/corpus.py")


# ---- 1. Files -----------------------------------------------------------------------------------------------
def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Only files with these names are loaded or deleted."""
    return sorted(path for path in out.glob(f"step_{7 * '[0-9]'}.pt") if path.is_file())


def write_checkpoint(path: Path, state: dict):
    """Write a checkpoint atomically. It may hold only tensors, numbers and texts, so that reading it runs no code."""
    state = {"code": CODE} | state
    content = io.BytesIO()  # if PyTorch wrote the file, its error for a full disk would not say so
    torch.save(state, content)
    with atomic(path) as temporary:
        temporary.write_bytes(content.getbuffer())


def read_checkpoint(path: Path, *wanted: str) -> dict:
    """Read a checkpoint to the CPU. Its `config` becomes a Config, and its `tokenizer` a Tokenizer. Says if other code
    made it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # compares checksums, which torch.load does not
        if damaged:
            raise zipfile.BadZipFile(damaged)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if "can't allocate memory" in str(error):
            raise
        raise UserError(f"{path}: damaged, or not written by this program; if you delete it, the checkpoint before it "
                        "is used") from error
    missing = [name for name in ("config", "settings", "tokenizer", "model", *wanted) if name not in state]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; use a checkpoint of train.py, from this version of maelm")
    try:
        state["config"] = Config(**state["config"])  # a missing field gets its default
    except TypeError as error:
        raise UserError(f"{path}: from another version of maelm ({error}); use that version") from error
    state["tokenizer"] = Tokenizer.of_json(state["tokenizer"])
    changed = [name for name, code in state.get("code", {}).items() if CODE.get(name) != code]
    if changed and is_first():
        names = " and the ".join(changed)
        say(f"{path} was made, at least in part, before a change of the {names}; to see its effect, train again with "
            "another --out")
    return state


def checkpoint_of(path: Path) -> Path:
    """The checkpoint at a path, the newest in a run folder, or finetune.py's encoder.pt. Raises UserError if none."""
    path = Path(path)  # which may be a text in a notebook
    files = [path] if path.suffix == ".pt" else [*checkpoints(path), *path.glob("encoder.pt")]
    if not files:
        raise UserError(f"{path}: no run folder with checkpoints; make one with train.py (a linear probe saves none)")
    return files[-1]


def load_model(path: Path) -> tuple[MAELM, Tokenizer]:
    """Load the model of a run folder or checkpoint, in evaluation mode, and its tokenizer."""
    state = read_checkpoint(checkpoint_of(path), "step")  # encoder.pt of finetune.py has no step and no decoder
    model = make_model(state["config"])
    model.load_state_dict(state["model"])
    return model.eval(), state["tokenizer"]


def load_encoder(path: Path) -> tuple[Encoder, dict]:
    """Load an encoder as checkpoint_of finds it, in evaluation mode, and the other entries of its checkpoint."""
    state = read_checkpoint(checkpoint_of(path))
    encoder = Encoder(state["config"])
    prefix, weights = "encoder.", state.pop("model")
    encoder.load_state_dict({name.removeprefix(prefix): weight for name, weight in weights.items()
                             if name.startswith(prefix)})
    return encoder.eval(), state


# ---- 2. Encoders that are fine-tuned ------------------------------------------------------------------------
class Pretrained:
    """The encoder of a run; `random:` keeps only its shape and tokenizer. Raises UserError if it is missing."""
    def __init__(self, name: str):
        encoder, state = load_encoder(path_of(name.removeprefix("random:")))
        self.tokenizer = state["tokenizer"]
        self.settings = state["settings"]
        self.config = state["config"]
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def weights_hash(self) -> str:
        """A hash of the weights or, if they are random, of the weights that seed 0 draws."""
        weights = [tensor.numpy().tobytes() for tensor in self.new_encoder(seed=0).state_dict().values()]
        return short_hash(b"".join(weights))

    def new_encoder(self, seed: int) -> Encoder:
        """A copy of the encoder. If its weights are random, the seed determines them."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        return encoder


def last_layer(encoder: Encoder, tokens, padding):
    """tokens (B, t) int64, padding (B, t) bool -> H^L (B, t, d)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return encoder(tokens, positions, padding)


class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, t) int64, padding (B, t) bool -> the head's float32 logits."""
        return self.head(last_layer(self.encoder, tokens, padding), padding).float()


def write_tuned(path: Path, model: Tuned, pretrained: Pretrained, **entries):
    """Write a fine-tuned model, which can be exported or fine-tuned further. For the export, `entries` have its `task`,
    the names of its `labels` (list), the `scale` of its numbers, and the `longest` input of fine-tuning in tokens. The
    `example` has tokens and their logits, with which the export is compared."""
    tokens = torch.arange(NUM_SPECIAL, NUM_SPECIAL + 8, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        logits = model.eval()(tokens, tokens < 0)
    head = vars(type(model.head)).get("exported", ())  # not that of a class from which the head is derived
    write_checkpoint(path, entries | {
        "config": asdict(pretrained.config), "settings": pretrained.settings, "model": model.state_dict(),
        "tokenizer": pretrained.tokenizer.to_json(), "head": list(head), "example": [tokens.cpu(), logits.cpu()]})
