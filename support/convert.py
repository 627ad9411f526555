"""To Hugging Face and back.

    python -m support.convert export out/toy DIR                  # a folder for transformers, with our code in it
    python -m support.convert import hf:roberta-base out/roberta  # a run folder, for --init

`import` reads a RoBERTa with a byte-level BPE.
"""
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
from torch import nn

from maelm import MAELM, PAD, Config
from support.checkpoints import checkpoint_of, load_tokenizer, read_tensors, run_settings, save_checkpoint
from support.cli import Parser, UserError, clear_errors
from support.files import refuse_other_files, write_json
from support.from_hub import from_hub, model_from_hub, transformers_library
from support.models import check
from support.tokenizer import Tokenizer

# ---- 1. Export ----------------------------------------------------------------------------------------------
def read_weights(file: Path) -> tuple[Config, dict[str, torch.Tensor], str, list[str]]:
    """Read a checkpoint of train.py or the encoder.pt of finetune.py. Returns its Config, its weights under their names
    in modeling_maelm.py, the suffix of its class name there, and the labels of a classifier (one for regression)."""
    state = read_tensors(file, "model")
    config, weights = state["config"], state["model"]
    if "task" not in state:
        if config.decoder == "bi" and config.encoder_fill == "mask":
            return config, weights, "ForMaskedLM", []
        # Other decoders cannot fill in a [MASK] in a text, so only the encoder is exported.
        return config, {name: weight for name, weight in weights.items() if name.startswith("encoder.")}, "", []
    if state["task"] == "squad2":
        return config, renamed(weights, "qa_outputs"), "ForQuestionAnswering", []
    for name in ("head.4.weight", "head.4.bias"):
        weights[name] *= state["scale"]  # so that the last layer predicts a number in its original unit
    return config, renamed(weights, "classifier"), "ForSequenceClassification", state["labels"] or ["number"]


def renamed(weights: dict[str, torch.Tensor], head: str) -> dict[str, torch.Tensor]:
    """Weights from finetune.py with their head renamed."""
    return {re.sub("^head", head, name): weight for name, weight in weights.items()}


def hub_config(config: Config, head: str, labels: list[str]) -> dict:
    """The content of config.json: our fields under "maelm", and the fields that other programs look for."""
    code = "modeling_maelm.MAELM"  # our file, and the beginning of its class names
    found = {
        "model_type": "maelm", "vocab_size": config.vocab_size, "hidden_size": config.encoder_dim,
        "num_hidden_layers": config.encoder_layers, "num_attention_heads": config.encoder_heads,
        "intermediate_size": 4 * config.encoder_dim, "hidden_dropout_prob": config.dropout, "pad_token_id": PAD,
        "max_position_embeddings": config.seq_len, "maelm": asdict(config),
        "architectures": ["MAELM" + (head or "Model")], "auto_map": {"AutoConfig": code + "Config"},
    }
    for name in ("", "ForSequenceClassification", "ForQuestionAnswering", head):
        found["auto_map"]["AutoModel" + name] = code + (name or "Model")
    if labels:
        found["problem_type"] = "regression" if labels == ["number"] else "single_label_classification"
        found["id2label"] = dict(enumerate(labels))
        found["label2id"] = {label: i for i, label in enumerate(labels)}
    return found


def save_tokenizer(tokenizer: Tokenizer, seq_len: int, head: str, out: Path):
    """Write a tokenizer for transformers: it puts [CLS] and [SEP] around a text, and [MASK] absorbs the space before
    it. For the heads of finetune.py, special tokens in a text are plain text, as in finetune.py."""
    model = tokenizer.framed()
    model.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    model.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len, "cls_token": "[CLS]",
        "pad_token": "[PAD]", "sep_token": "[SEP]", "mask_token": "[MASK]",
        "split_special_tokens": head not in ("", "ForMaskedLM"),
        "model_input_names": ["input_ids", "attention_mask"]})


def export(source: Path, out: Path):
    """Write a run, a checkpoint or a fine-tuned model as a folder for transformers."""
    transformers_library()
    import safetensors.torch  # comes with transformers
    file = checkpoint_of(source)
    config, weights, head, labels = read_weights(file)
    settings = run_settings(file.parent)
    seq_len = min(config.seq_len, settings.get("seq_len", config.seq_len))  # finetune.py's may be less
    save_tokenizer(load_tokenizer(file.parent, config, settings), seq_len, head, out)
    # Not save_file, which makes a file that only its owner can read.
    (out / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    for code in ("support/modeling_maelm.py", "maelm.py"):
        shutil.copy(Path(__file__).parents[1] / code, out)
    write_json(out / "config.json", hub_config(config, head, labels))
    print(f"for AutoModel{head} with trust_remote_code=True; another class would have a random head")


# ---- 2. Import ----------------------------------------------------------------------------------------------
OFFSET = 2  # RoBERTa's first position is 2, its padding id plus 1
PARTS = {  # parts of our weights' names -> parts of RoBERTa's names
    "encoder.token_embedding": "roberta.embeddings.word_embeddings",
    "encoder.position_embedding": "roberta.embeddings.position_embeddings",
    "encoder.norm": "roberta.embeddings.LayerNorm", "encoder.stack.blocks": "roberta.encoder.layer",
    "self_attention.query": "attention.self.query", "self_attention.key_value": "attention.self.key_value",
    "self_attention.output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense", "ffn.2": "output.dense", "ffn_norm": "output.LayerNorm",
    "head.transform.0": "lm_head.dense", "head.transform.2": "lm_head.layer_norm", "head.bias": "lm_head.bias",
}


def to_ours(weights, names: Iterable[str], order):
    """The weights of a RoBERTa under our `names`, with its vocabulary in the given order (V,) int64."""
    found = {}
    for name in names:
        theirs = name
        for part, their_part in PARTS.items():
            theirs = theirs.replace(part, their_part)
        # RoBERTa has one matrix for keys and another one for values.
        matrices = [theirs.replace("key_value", "key"), theirs.replace("key_value", "value")]
        found[name] = torch.cat([weights[matrix] for matrix in dict.fromkeys(matrices)])
    positions = found["encoder.position_embedding.weight"][OFFSET:]
    segment = weights["roberta.embeddings.token_type_embeddings.weight"]  # all tokens are in its only segment
    found["encoder.position_embedding.weight"] = positions + segment
    for name in ("encoder.token_embedding.weight", "head.bias"):
        found[name] = found[name][order]
    return found


def read_config(name: str, theirs) -> Config:
    """Convert the configuration of a RoBERTa to ours. Raises UserError if ours does not support a field's value."""
    if theirs.model_type != "roberta":
        raise UserError(f"{name}: has model_type={theirs.model_type!r}; import reads only roberta")
    wanted = {"hidden_act": "gelu", "layer_norm_eps": nn.LayerNorm(1).eps, "intermediate_size": 4 * theirs.hidden_size,
              "pad_token_id": PAD, "type_vocab_size": 1, "position_embedding_type": "absolute",
              "tie_word_embeddings": True}
    for field, value in wanted.items():
        if getattr(theirs, field, value) != value:
            raise UserError(f"{name}: has {field}={getattr(theirs, field)!r}, but maelm supports only {value!r}")
    return check(Config(
        vocab_size=theirs.vocab_size, seq_len=theirs.max_position_embeddings - OFFSET,
        encoder_layers=theirs.num_hidden_layers, encoder_dim=theirs.hidden_size,
        encoder_heads=theirs.num_attention_heads, dropout=theirs.hidden_dropout_prob,
        rel_pos_buckets=0, mask_in_encoder=1.0, decoder_layers=0))  # a standard MLM


def read_tokenizer(name: str, theirs, size: int):
    """Convert a byte-level BPE to ours. Returns the tokenizer, and the original ids (size,) int64 in our order. Raises
    UserError if the BPE does not fit."""
    ours = Tokenizer.of_json(name, theirs.backend_tokenizer.to_str())
    # Both tokenizers write the 256 bytes and the merges in GPT-2's letters.
    order = [theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.mask_token_id]
    order += theirs.convert_tokens_to_ids([ours.model.id_to_token(i) for i in range(len(order), len(ours))])
    order += sorted(set(range(size)) - set(order))
    if sorted(order) != list(range(size)):
        raise UserError(f"{name}: its tokenizer does not fit its {size:,} embeddings")
    return ours, torch.tensor(order)


def import_model(name: str, out: Path):
    """Write a RoBERTa as a run folder at step 0. Raises UserError if maelm cannot run it."""
    config = read_config(name, from_hub("AutoConfig", name))
    tokenizer, order = read_tokenizer(name, from_hub("AutoTokenizer", name), config.vocab_size)
    theirs = model_from_hub("AutoModelForMaskedLM", name)
    model = MAELM(config)
    model.load_state_dict(to_ours(theirs.state_dict(), model.state_dict(), order))
    tokenizer.save(out)
    save_checkpoint(out, 0, model, [], 0.0, 0)
    write_json(out / "config.json", asdict(config) | {"init": name})


# ---- 3. Command line ----------------------------------------------------------------------------------------
def main(argv=None):
    parser = Parser("support.convert", __doc__)
    parser.add_argument("command", choices=["export", "import"])
    parser.add_argument("source", help="export: a run folder, checkpoint or encoder.pt; import: hf:NAME or a folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    options = parser.parse_args(argv)
    with clear_errors("support.convert"):
        out = options.out.resolve()
        refuse_other_files(out)
        unfinished = out.with_name(f".{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a command that was killed
        unfinished.mkdir(parents=True)
        if options.command == "export":
            export(Path(options.source), unfinished)
        else:
            import_model(options.source, unfinished)
        unfinished.replace(out)  # which is empty, if it exists
        print(f"{options.out}: {options.command} of {options.source}")


if __name__ == "__main__":
    main()
