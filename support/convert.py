"""To Hugging Face and back.

    python -m support.convert export out/toy DIR [--format auto|maelm]  # a folder for transformers
    python -m support.convert import hf:roberta-base out/roberta        # a run folder, for --init

A post-LN encoder is a RoBERTa, or with 32 buckets up to distance 128 an MPNet; with others go modeling_maelm.py and
maelm.py. `import` reads a RoBERTa with a byte-level BPE.
"""
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
from torch import nn

from maelm import CLS, MAELM, PAD, SEP, Config
from support.cli import Parser, UserError, clear_errors, root_cause
from support.files import atomic, refuse_other_files, write_json
from support.models import check, load_model, read_tensors, save_checkpoint
from support.tokenizer import Tokenizer

OFFSET = 2  # RoBERTa and MPNet count positions from after their padding id, 1
EPS = nn.LayerNorm(1).eps  # of all our LayerNorms
SEGMENT = "roberta.embeddings.token_type_embeddings.weight"
CLASSES = {"roberta": "Roberta", "mpnet": "MPNet", "maelm": "MAELM"}


# ---- 1. The library, and weights under our names and theirs -------------------------------------------------
def transformers_library():
    """The module transformers, silent. UserError if it is not installed, or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.55")
    except ImportError as error:
        raise UserError("this needs the package transformers, 4.55 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_hub(auto: str, name: str, **options):
    """What a class of transformers reads from hf:NAME or a folder, whose code never runs. UserError if it cannot."""
    auto_class = getattr(transformers_library(), auto)
    name = name.removeprefix("hf:")
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # a damaged file can make it raise anything
        why = f"{type(error).__name__}: {root_cause(error)}"
        raise UserError(f"hf:{name}: transformers cannot load it ({why})") from error


def model_from_hub(auto: str, name: str) -> tuple[nn.Module, bool]:
    """A model in fp32, in evaluation mode; whether its head is new. UserError if weights of its encoder are missing."""
    model, loading = from_hub(auto, name, output_loading_info=True)
    missing = [key for key in loading["missing_keys"] if not key.startswith(("pooler.", "lm_head."))]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {min(missing)}")
    return model.float().eval(), bool(loading["missing_keys"])


def open_hub(name: str) -> tuple[nn.Module, object, int]:
    """An encoder of the Hub or a folder, its tokenizer, its longest input in tokens. UserError if there is none."""
    model, _ = model_from_hub("AutoModel", name)
    tokenizer = from_hub("AutoTokenizer", name)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if tokenizer.mask_token_id is None:
        raise UserError(f"{name}: it has no mask token; use an encoder trained with MLM")
    # RoBERTa and its like count positions from after their padding id: of 514 they have 512.
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 514) - 2)
    return model, tokenizer, longest


OUTSIDE = {  # our modules and theirs outside the layers; {} is roberta or mpnet
    "encoder.token_embedding": "{}.embeddings.word_embeddings",
    "encoder.position_embedding": "{}.embeddings.position_embeddings",
    "encoder.norm": "{}.embeddings.LayerNorm",
    "encoder.stack.relative_bias.table": "{}.encoder.relative_attention_bias",
    "head": "lm_head",
    "head.transform.0": "lm_head.dense", "head.transform.2": "lm_head.layer_norm",
    "classifier.1": "classifier.dense", "classifier.4": "classifier.out_proj",
    "qa_outputs": "qa_outputs",
}
LAYER = {  # our modules in a layer, RoBERTa's and MPNet's; the one for keys and values is two of theirs
    "self_attention.query": ("attention.self.query", "attention.attn.q"),
    "self_attention.key_value": ("attention.self.key attention.self.value", "attention.attn.k attention.attn.v"),
    "self_attention.output": ("attention.output.dense", "attention.attn.o"),
    "attention_norm": ("attention.output.LayerNorm", "attention.LayerNorm"),
    "ffn.0": ("intermediate.dense", "intermediate.dense"),
    "ffn.2": ("output.dense", "output.dense"),
    "ffn_norm": ("output.LayerNorm", "output.LayerNorm"),
}


def their_names(ours: str, kind: str) -> list[str]:
    """What a RoBERTa or MPNet calls our weight `ours`: one name, or two for keys and values."""
    module, parameter = ours.rsplit(".", 1)
    if not module.startswith("encoder.stack.blocks."):
        return [f"{OUTSIDE[module].format(kind)}.{parameter}"]
    layer, module = module.removeprefix("encoder.stack.blocks.").split(".", 1)
    roberta, mpnet = LAYER[module]
    theirs = roberta if kind == "roberta" else mpnet
    return [f"{kind}.encoder.layer.{layer}.{name}.{parameter}" for name in theirs.split()]


def to_theirs(weights, kind: str):
    """Our weights under the names of a RoBERTa or MPNet."""
    found = {}
    for ours, weight in weights.items():
        names = their_names(ours, kind)
        found.update(zip(names, weight.chunk(len(names))))  # the first half of our matrix are the keys
    positions = f"{kind}.embeddings.position_embeddings.weight"
    found[positions] = nn.functional.pad(found[positions], (0, 0, OFFSET, 0))  # rows of zeros before the first one
    if kind == "roberta":
        found[SEGMENT] = torch.zeros(1, found[positions].shape[1])
    return found


def to_ours(weights, names: Iterable[str], order):
    """The weights of a RoBERTa under our `names`, with the rows of its vocabulary in the order (V,) int64."""
    found = {}
    for name in names:
        found[name] = torch.cat([weights[part] for part in their_names(name, "roberta")])
    positions = found["encoder.position_embedding.weight"][OFFSET:]
    found["encoder.position_embedding.weight"] = positions + weights[SEGMENT]  # all tokens are in its one segment
    for name in ("encoder.token_embedding.weight", "head.bias"):
        found[name] = found[name][order]
    return found


# ---- 2. Export ----------------------------------------------------------------------------------------------
def read_source(source: Path):
    """What is exported -> configuration, weights, tokenizer, the end of the name of their class, labels."""
    file = source / "encoder.pt" if source.is_dir() else source
    if file.name != "encoder.pt" or not file.is_file():
        model, tokenizer = load_model(source)
        return model.config, model.state_dict(), tokenizer, "ForMaskedLM", []
    state = read_tensors(file, "model", "task", "labels", "scale")
    head, module, labels = "ForSequenceClassification", "classifier", state["labels"] or ["number"]
    if state["task"] == "squad2":
        head, module, labels = "ForQuestionAnswering", "qa_outputs", []
    weights = {}
    for name, weight in state["model"].items():
        if name.startswith("head.4."):  # the last layer gives a number in its own unit
            weight = state["scale"] * weight
        weights[re.sub("^head", module, name)] = weight
    return state["config"], weights, Tokenizer.load(file.parent), head, labels


def exact_format(config: Config) -> str:
    """The format that computes what an encoder of this configuration does, without our code if one does."""
    if config.norm == "post" and config.rel_pos_buckets == 0:
        return "roberta"
    if config.norm == "post" and (config.rel_pos_buckets, config.rel_pos_max_distance) == (32, 128):
        return "mpnet"
    return "maelm"


def hub_config(config: Config, kind: str, head: str, labels: list[str]) -> dict:
    """config.json for the class whose name ends with `head`. Under "maelm" it has our own fields, in every format."""
    found = {
        "model_type": kind, "vocab_size": config.vocab_size, "hidden_size": config.encoder_dim,
        "num_hidden_layers": config.encoder_layers, "num_attention_heads": config.encoder_heads,
        "intermediate_size": 4 * config.encoder_dim, "layer_norm_eps": EPS, "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout, "pad_token_id": PAD, "maelm": asdict(config),
        "max_position_embeddings": config.seq_len + (0 if kind == "maelm" else OFFSET),
        "type_vocab_size": 1,  # one segment, whose embedding is 0
        "architectures": [CLASSES[kind] + (head or "Model")],
    }
    if kind == "maelm":
        code = "modeling_maelm.MAELM"  # our file, and how the names of its classes begin
        found["auto_map"] = {"AutoConfig": code + "Config"}
        for name in ("", "ForSequenceClassification", "ForQuestionAnswering", head):
            found["auto_map"]["AutoModel" + name] = code + (name or "Model")
    if labels:
        found["problem_type"] = "regression" if len(labels) == 1 else "single_label_classification"
        found["id2label"] = dict(enumerate(labels))
        found["label2id"] = {label: i for i, label in enumerate(labels)}
    return found


def save_tokenizer(tokenizer: Tokenizer, seq_len: int, out: Path):
    """Write a tokenizer of transformers: [CLS] and [SEP] around a text; [MASK] takes the space before it along."""
    model = tokenizer.model
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    model.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    model.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len, "cls_token": "[CLS]",
        "pad_token": "[PAD]", "sep_token": "[SEP]", "mask_token": "[MASK]",
        "model_input_names": ["input_ids", "attention_mask"]})


def export(source: Path, out: Path, wanted: str):
    """Write a run folder, a checkpoint or what finetune.py keeps as a folder for transformers."""
    transformers_library()
    config, weights, tokenizer, head, labels = read_source(source)
    kind = exact_format(config) if wanted == "auto" else wanted
    # A format without decoder cannot predict [MASK], nor can a model that reads more than a text with [MASK].
    no_decoder = kind != "maelm" and config.decoder_layers > 0
    if head == "ForMaskedLM" and (no_decoder or config.decoder != "bi" or config.encoder_fill == "random"):
        head = ""
        weights = {name: weight for name, weight in weights.items() if name.startswith("encoder.")}
    if kind != "maelm":
        weights = to_theirs(weights, kind)
    import safetensors.torch  # comes with transformers; its save_file makes a file that only the owner can read
    with atomic(out / "model.safetensors") as temporary:
        temporary.write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    write_json(out / "config.json", hub_config(config, kind, head, labels))
    save_tokenizer(tokenizer, config.seq_len, out)
    if kind == "maelm":
        for file in ("support/modeling_maelm.py", "maelm.py"):
            shutil.copy(Path(__file__).parents[1] / file, out)
    print(f"{out}: {kind}, for AutoModel{head}; any other class of model would have a random head")


# ---- 3. Import ----------------------------------------------------------------------------------------------
def read_config(name: str, theirs) -> Config:
    """The configuration of a RoBERTa as one of ours. UserError names what ours cannot express."""
    if theirs.model_type != "roberta":
        raise UserError(f"{name}: has model_type={theirs.model_type!r}; import takes roberta")
    wanted = {"hidden_act": "gelu", "layer_norm_eps": EPS, "intermediate_size": 4 * theirs.hidden_size,
              "pad_token_id": PAD, "type_vocab_size": 1, "position_embedding_type": "absolute",
              "tie_word_embeddings": True}
    for field, value in wanted.items():
        if getattr(theirs, field, value) != value:
            raise UserError(f"{name}: has {field}={getattr(theirs, field)!r}, and maelm can only do {value!r}")
    return check(Config(
        vocab_size=theirs.vocab_size, seq_len=theirs.max_position_embeddings - OFFSET,
        encoder_layers=theirs.num_hidden_layers, encoder_dim=theirs.hidden_size,
        encoder_heads=theirs.num_attention_heads, dropout=theirs.hidden_dropout_prob,
        rel_pos_buckets=0, mask_in_encoder=1.0, decoder_layers=0))  # a standard MLM


def read_tokenizer(name: str, theirs, size: int):
    """A byte-level BPE as one of ours, and its ids (size,) in our order. UserError if ours reads text otherwise."""
    if not theirs.is_fast:
        raise UserError(f"{name}: its tokenizer is not one of the library tokenizers, so no byte-level BPE")
    ours = Tokenizer.of_json(name, theirs.backend_tokenizer.to_str())
    # Both have the 256 bytes and the merges under the same names, in the letters of GPT-2.
    order = [theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.mask_token_id]
    order += theirs.convert_tokens_to_ids([ours.model.id_to_token(i) for i in range(len(order), len(ours))])
    order += sorted(set(range(size)) - set(order))
    if sorted(order) != list(range(size)):
        raise UserError(f"{name}: its tokenizer does not fit its {size:,} embeddings")
    return ours, torch.tensor(order)


def import_model(name: str, out: Path):
    """Write a RoBERTa of transformers as a run folder at step 0. UserError if maelm cannot compute it."""
    config = read_config(name, from_hub("AutoConfig", name))
    tokenizer, order = read_tokenizer(name, from_hub("AutoTokenizer", name), config.vocab_size)
    theirs, new_head = model_from_hub("AutoModelForMaskedLM", name)
    model = MAELM(config)
    model.load_state_dict(to_ours(theirs.state_dict(), model.state_dict(), order))
    tokenizer.save(out)
    write_json(out / "config.json", asdict(config) | {"init": name})
    save_checkpoint(out, 0, model, [], 0.0, 0)
    print(f"{out}: {name}" + (", with a new head for [MASK]" if new_head else ""))


# ---- 4. Command line ----------------------------------------------------------------------------------------
def main(argv=None):
    """The two commands."""
    parser = Parser("support.convert", __doc__)
    add = parser.add_argument
    add("command", choices=["export", "import"])
    add("source", help="export: a run folder, a checkpoint or an encoder.pt; import: hf:NAME or a folder")
    add("out", type=Path, help="the folder to write")
    add("--format", default="auto", choices=["auto", "maelm"], help="of an export [auto: RoBERTa or MPNet if exact]")
    options = parser.parse_args(argv)
    with clear_errors("support.convert"):
        refuse_other_files(options.out)
        if options.command == "export":
            export(Path(options.source), options.out, options.format)
        else:
            import_model(options.source, options.out)


if __name__ == "__main__":
    main()
