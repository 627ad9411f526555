"""From a run to a folder that the library `transformers` loads, with our code in it.

    python -m support.export out/toy DIR
"""
import math
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from maelm import MASK, NUM_SPECIAL, PAD
from support.checkpoints import load_checkpoint
from support.fill_mask import logits_at
from support.model import make_model, text_states
from support.program import ROOT, Parser, UserError, clear_errors, write_json
from support.subjects import transformers_library
from support.tokenizer import Tokenizer


def weights_of(state: dict) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """The weights in a checkpoint of train.py or in encoder.pt, under their names in modeling_maelm.py, the suffix of
    their class name there, and the labels of a classifier (one for regression)."""
    config, weights = state["config"], state["model"]
    if "task" not in state:
        if config.decoder == "bi" and config.encoder_fill != "random":
            return dict(weights), "ForMaskedLM", []
        # Other decoders cannot fill in a [MASK] in a text, so only the encoder is exported.
        return {name: weight for name, weight in weights.items() if name.startswith("encoder.")}, "", []
    has_spans = state["task"] == "squad2"
    name_there = "qa_outputs" if has_spans else "classifier"
    weights = {re.sub("^head", name_there, name): weight for name, weight in weights.items()}
    if has_spans:
        return weights, "ForQuestionAnswering", []
    return weights, "ForSequenceClassification", state["labels"] or ["number"]


def hub_config(state: dict, head: str, labels: list[str]) -> dict:
    """The content of config.json: our fields under "maelm", and the fields that other programs look for. Logits are
    multiplied by `scale` and moved by `center`, so that numbers have their original unit."""
    config = state["config"]
    code = "modeling_maelm.MAELM"  # our file, and the beginning of its class names
    fields = {
        "model_type": "maelm", "vocab_size": config.vocab_size, "hidden_size": config.encoder_dim,
        "num_hidden_layers": config.encoder_layers, "num_attention_heads": config.encoder_heads,
        "intermediate_size": 4 * config.encoder_dim, "hidden_dropout_prob": config.dropout, "pad_token_id": PAD,
        "max_position_embeddings": config.seq_len, "maelm": asdict(config),
        "architectures": ["MAELM" + (head or "Model")],
        "center": state.get("center", 0.0), "scale": state.get("scale", 1.0),
        "auto_map": {"AutoConfig": code + "Config"},
    }
    for name in ("", "ForSequenceClassification", "ForQuestionAnswering", head):
        fields["auto_map"]["AutoModel" + name] = code + (name or "Model")
    if labels:
        fields["problem_type"] = "regression" if labels == ["number"] else "single_label_classification"
        fields["id2label"] = dict(enumerate(labels))
        fields["label2id"] = {label: i for i, label in enumerate(labels)}
    return fields


def save_tokenizer(tokenizer: Tokenizer, seq_len: int, head: str, out: Path):
    """Write a tokenizer for transformers: it puts [CLS] and [SEP] around a text, and [MASK] absorbs the space before
    it. For the heads of finetune.py, special tokens in a text are plain text, as in finetune.py."""
    model = tokenizer.with_masks()
    model.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len, "cls_token": "[CLS]",
        "pad_token": "[PAD]", "sep_token": "[SEP]", "mask_token": "[MASK]",
        "split_special_tokens": head not in ("", "ForMaskedLM"),
        "model_input_names": ["input_ids", "attention_mask"]})


def export(source: Path, out: Path):
    """Write a run, a checkpoint or a fine-tuned model as a folder for transformers."""
    if out.exists():
        raise UserError(f"{out}: already exists; name a new folder")
    transformers_library()  # raises UserError if it is missing
    import safetensors.torch  # comes with transformers
    state = load_checkpoint(source)
    weights, head, labels = weights_of(state)
    for name, buffer in make_model(state["config"]).named_buffers():  # transformers does not compute them
        if name.startswith("encoder.") or head == "ForMaskedLM":
            weights.setdefault(name, buffer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        folder = Path(temporary, out.name)
        folder.mkdir()
        for code in ("support/modeling_maelm.py", "support/heads.py", "maelm.py"):
            shutil.copy(ROOT / code, folder)
        # The inputs of fine-tuning may be shorter than those of pre-training.
        longest = min(state["config"].seq_len, state.get("longest", math.inf))
        save_tokenizer(state["tokenizer"], longest, head, folder)
        # Not save_file, which makes a file that only its owner can read.
        (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
        write_json(folder / "config.json", hub_config(state, head, labels))
        check(folder, head, state)
        folder.rename(out)  # only now: a folder with this name is whole, and computes what our model does
    print(f"{out}: for AutoModel{head} with trust_remote_code=True; another class would have a random head")


@torch.no_grad()
def check(out: Path, head: str, state: dict):
    """Raises UserError if transformers computes other logits from the folder, or other vectors without a head."""
    theirs = getattr(transformers_library(), f"AutoModel{head}").from_pretrained(out, trust_remote_code=True)
    tokens = NUM_SPECIAL + torch.arange(8)[None]  # as in Tuned.save
    if "task" in state:
        found = torch.stack(theirs(tokens).to_tuple(), -1)
        expected = state.get("center", 0.0) + state["scale"] * state["example"]
    else:
        model = make_model(state["config"]).eval()
        model.load_state_dict(state["model"])
        at = torch.tensor([[2, 5]])
        found = theirs(tokens)[0]
        expected = text_states(model.encoder, tokens)[-1]
        if head:
            found = theirs(tokens.scatter(1, at, MASK)).logits[:, at[0]]
            expected = logits_at(model, tokens, at)
    if not torch.allclose(found.flatten(), expected.flatten(), rtol=1e-3, atol=1e-3):
        raise UserError(f"{out}: transformers computes other results; modeling_maelm.py may lack a change of maelm.py")


def main(argv=None):
    with clear_errors("support.export"):
        parser = Parser("support.export", __doc__)
        parser.add_argument("source", type=Path, help="a run folder, a checkpoint or encoder.pt")
        parser.add_argument("out", type=Path, help="the folder to write")
        flags = parser.parse_args(argv)
        export(flags.source, flags.out)


if __name__ == "__main__":
    main()
