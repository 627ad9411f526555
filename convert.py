"""To Hugging Face and back.

    python convert.py export out/toy DIR [--format auto|mpnet|roberta|maelm]   # a folder for transformers
    python convert.py import hf:roberta-base out/roberta                       # a run folder, for train.py --init

`export` takes a run folder, a checkpoint, or what finetune.py leaves. A post-LN encoder is a RoBERTa if it has no
relative positions, and an MPNet if it has 32 buckets up to distance 128: such a folder needs no code of ours. For all
others, and for every decoder, modeling_maelm.py and maelm.py go into the folder. It is loaded as others will load it,
and compared with our model, before it gets its name. `import` reads a RoBERTa or MPNet with a byte-level BPE.
"""
import argparse
import gc
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import SPECIALS, Tokenizer
from files import (Parser, UserError, claim_folder, clear_errors, file_hash, kind_of, read_json, refuse_other_kind,
                   write_json)
from maelm import CLS, MAELM, MASK, NUM_SPECIAL, PAD, SEP, Config, Corruption, Encoder
from run import (check_weights, checkpoint_path, checkpoints, first_line, load_encoder, load_model, read_log,
                 run_settings, step_of, transformers_library, write_tensors)

LIMIT = 1e-5  # the largest difference of two models that compute the same, as a share of the largest number
OFFSET = 2  # RoBERTa and MPNet count positions from behind their padding id, 1
EPS = nn.LayerNorm(1).eps  # of all our LayerNorms
KINDS = {"roberta": "RoBERTa", "mpnet": "MPNet", "maelm": "a model with code of its own"}

# ---- 1. Weights: our names and theirs -----------------------------------------------------------------------
ROBERTA_LAYER = {
    "self_attention.f.query": ["attention.self.query"],
    "self_attention.f.key_value": ["attention.self.key", "attention.self.value"],  # its first half are keys
    "self_attention.f.output": ["attention.output.dense"],
    "self_attention.norm": ["attention.output.LayerNorm"],
    "ffn.f.0": ["intermediate.dense"],
    "ffn.f.2": ["output.dense"],
    "ffn.norm": ["output.LayerNorm"],
}
MPNET_LAYER = ROBERTA_LAYER | {
    "self_attention.f.query": ["attention.attn.q"],
    "self_attention.f.key_value": ["attention.attn.k", "attention.attn.v"],
    "self_attention.f.output": ["attention.attn.o"],
    "self_attention.norm": ["attention.LayerNorm"],
}
LAYERS = {"roberta": ROBERTA_LAYER, "mpnet": MPNET_LAYER}


def names(kind: str, layers: int, head: bool) -> dict[str, list[str]]:
    """Our name of each weight -> its name, or two, in a model of this kind."""
    found = {
        "encoder.token_embedding.weight": [f"{kind}.embeddings.word_embeddings.weight"],
        "encoder.position_embedding.weight": [f"{kind}.embeddings.position_embeddings.weight"],
    }
    if kind == "mpnet":
        found["encoder.bias.table.weight"] = ["mpnet.encoder.relative_attention_bias.weight"]
    modules = {"encoder.norm": [f"{kind}.embeddings.LayerNorm"]}
    for i in range(layers):
        for ours, theirs in LAYERS[kind].items():
            modules[f"encoder.blocks.{i}.{ours}"] = [f"{kind}.encoder.layer.{i}.{name}" for name in theirs]
    if head:
        modules["head.transform.0"] = ["lm_head.dense"]
        modules["head.transform.2"] = ["lm_head.layer_norm"]
        found["head.bias"] = ["lm_head.bias"]
    for ours, theirs in modules.items():
        for part in ("weight", "bias"):
            found[f"{ours}.{part}"] = [f"{name}.{part}" for name in theirs]
    return found


def to_theirs(weights: dict[str, Tensor], kind: str, layers: int, head: bool) -> dict[str, Tensor]:
    """Our weights, under the names of a kind."""
    found = {}
    for ours, theirs in names(kind, layers, head).items():
        # Two names share our matrix: its first half is that of the first one.
        found.update(zip(theirs, weights[ours].chunk(len(theirs))))
    table = f"{kind}.embeddings.position_embeddings.weight"
    found[table] = F.pad(found[table], (0, 0, OFFSET, 0))  # rows of zeros before the first one
    if kind == "roberta":
        found["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, found[table].shape[1])
    return found


def to_ours(weights: dict[str, Tensor], kind: str, layers: int, order: Tensor) -> dict[str, Tensor]:
    """The weights of a kind under our names, and the rows of its vocabulary in the order (V,) int64."""
    found = {}
    for ours, theirs in names(kind, layers, head=True).items():
        found[ours] = torch.cat([weights[name] for name in theirs])
    positions = found["encoder.position_embedding.weight"][OFFSET:]
    if kind == "roberta":  # all tokens are in its one segment
        positions = positions + weights["roberta.embeddings.token_type_embeddings.weight"][0]
    found["encoder.position_embedding.weight"] = positions
    for name in ("encoder.token_embedding.weight", "head.bias"):
        found[name] = found[name][order]
    return found


# ---- 2. Do two models compute the same? ---------------------------------------------------------------------
TEXTS = ["The cat's 12,345 naïve cafés sat;\n\n  don't they?  ", "ΟΔΟΣ 漢字 🙂\tİı (x_1 != 3.14e-5)", ""]


def batch(config: Config) -> tuple[Tensor, Tensor]:
    """Texts of three lengths, tokens (3, n) int64 with [MASK]s among them, and what is no padding, (3, n) bool."""
    n = config.seq_len
    tokens = torch.randint(NUM_SPECIAL, config.vocab_size, (3, n), generator=torch.Generator().manual_seed(0))
    tokens[:, 1::7] = MASK
    tokens[:, 0] = CLS
    # The longest goes beyond the last bucket of relative positions, the others have padding.
    at, lengths = torch.arange(n), torch.tensor([[n], [max(3, n // 2)], [min(n, 5)]])
    tokens = torch.where(at == lengths - 1, SEP, tokens)
    return torch.where(at < lengths, tokens, PAD), at < lengths


def agree(what: str, ours: Tensor, theirs: Tensor) -> float:
    """The difference of two tensors as a share of the largest number in ours; UserError if it exceeds LIMIT."""
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference <= LIMIT:  # NaN, too
        raise UserError(f"{what} of transformers' model differ from ours by {difference:.1e} of the largest, and "
                        f"{LIMIT:.0e} is allowed: the conversion is wrong, and nothing of it is kept")
    return difference


def masked_logits(model: MAELM, tokens: Tensor) -> Tensor:
    """Logits (k, V) at each [MASK] of a text, tokens (1, n) int64, as pre-training has them: the encoder does not read
    [MASK], unless it mostly did (mask_in_encoder)."""
    masked = tokens == MASK
    at = masked.nonzero()[:, 1][None]  # (1, k)
    removed = masked if model.config.mask_in_encoder <= 0.5 else torch.zeros_like(masked)
    kept = (~removed).nonzero()[:, 1][None]  # (1, m)
    corruption = Corruption(masked, kept, tokens.gather(1, kept))
    return model.logits(model.decode(model.encode(corruption, at), tokens, corruption, at))[0]


@torch.no_grad()
def compare(config: Config, encoder: Encoder, theirs: nn.Module, order: Tensor, model: MAELM | None = None,
            their_lm: nn.Module | None = None) -> float:
    """The largest difference between our encoder and that of transformers, whose token order[i] is our token i, in all
    hidden states of a padded batch; with `model` also in the logits at each [MASK]. UserError if it exceeds LIMIT."""
    tokens, real = batch(config)
    inputs = {"input_ids": order[tokens], "attention_mask": real.long()}
    found = theirs(**inputs, output_hidden_states=True).hidden_states
    wanted = encoder(tokens, torch.arange(tokens.shape[1])[None], ~real, all_layers=True)
    largest = 0.0
    # What comes of padding is nobody's matter.
    for layer, (a, b) in enumerate(zip(wanted, found, strict=True)):
        largest = max(largest, agree(f"hidden states of layer {layer}", a[real], b[real]))
    if model is not None:
        logits = their_lm(**inputs).logits  # (3, n, V)
        # Ours text by text, without padding, and with [MASK] removed and not hidden: another way to the same numbers.
        for row, length in enumerate(real.sum(1)):
            text = tokens[row:row + 1, :length]
            found = logits[row, :length][text[0] == MASK][:, order]
            largest = max(largest, agree("logits at [MASK]", masked_logits(model, text), found))
    return largest


# ---- 3. Export ----------------------------------------------------------------------------------------------
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json",
         "modeling_maelm.py", "maelm.py", "README.md")  # all that an export may hold


class Source(NamedTuple):
    """What is exported, and as what."""
    lines: list[dict]  # of log.jsonl, up to the checkpoint
    data: str  # what the text was, or ""
    encoder: Encoder
    model: MAELM | None  # None for what finetune.py leaves
    tokenizer: Tokenizer
    config: Config
    kind: str  # one of KINDS
    no_head: str  # why it cannot fill in [MASK], or ""
    init: str = ""  # whose weights the run began with


def open_source(path: Path, wanted: str) -> Source:
    """A run folder, a checkpoint, or an encoder.pt, for the format that --format names. UserError as load_model, and if
    that format computes something else."""
    file = path / "encoder.pt" if path.is_dir() else path
    lines, settings = [], {}
    if file.name == "encoder.pt" and file.is_file():
        encoder, tokenizer, config = load_encoder(file)
        model = None
    else:
        model, tokenizer = load_model(path)
        encoder, config = model.encoder, model.config
        file = checkpoints(path)[-1] if path.is_dir() else path
        step = step_of(file)
        if step is not None:
            lines = [line for line in read_log(file.parent) if line.get("step", 0) <= step]
        settings = run_settings(file.parent)

    # Post-LN, a LayerNorm behind the embeddings and exact GELU are BERT's; the formats differ in their positions.
    exact = "maelm"
    if config.norm == "post" and config.rel_pos_buckets == 0:
        exact = "roberta"
    elif config.norm == "post" and (config.rel_pos_buckets, config.rel_pos_max_distance) == (32, 128):
        exact = "mpnet"  # which reads no other numbers, whatever its configuration says
    if wanted not in ("auto", "maelm", exact):
        raise UserError(f"--format {wanted}: not what norm={config.norm}, rel_pos_buckets={config.rel_pos_buckets}, "
                        f"rel_pos_max_distance={config.rel_pos_max_distance} compute; use --format {exact}")
    kind = exact if wanted == "auto" else wanted

    no_head = ""
    if model is None:
        no_head = "It is an encoder alone: what predicts [MASK] is gone."
    elif config.decoder_cross or (config.mask_in_encoder > 0 and config.encoder_fill != "mask"):
        no_head = "It is the encoder alone: what predicts [MASK] needs more than a text with [MASK]."
    elif kind != "maelm" and model.decoder is not None:
        no_head = f"It is the encoder alone, for {KINDS[kind]} has no decoder: --format maelm fills in [MASK], too."
    data, init = settings.get("data", ""), settings.get("init", "")
    return Source(lines, data, encoder, model, tokenizer, config, kind, no_head, init)


def hub_config(source: Source) -> dict:
    """config.json. Under "maelm" it has our own fields, in every format."""
    config, kind = source.config, source.kind
    found = {
        "model_type": kind, "vocab_size": config.vocab_size, "hidden_size": config.encoder_dim,
        "num_hidden_layers": config.encoder_layers, "num_attention_heads": config.encoder_heads,
        "intermediate_size": 4 * config.encoder_dim, "hidden_act": "gelu", "layer_norm_eps": EPS,
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.dropout,
        "initializer_range": config.init_std, "max_position_embeddings": config.seq_len + OFFSET,
        "pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP, "dtype": "float32", "maelm": asdict(config),
    }
    name = {"roberta": "Roberta", "mpnet": "MPNet", "maelm": "MAELM"}[kind]
    found["architectures"] = [f"{name}Model" if source.no_head else f"{name}ForMaskedLM"]
    if kind == "roberta":
        found["type_vocab_size"] = 1  # one segment, whose embedding is 0
    elif kind == "maelm":
        found["max_position_embeddings"] = config.seq_len
        # Which class of our file each class of transformers stands for.
        classes = {"AutoConfig": "Config", "AutoModel": "Model"}
        for head in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
            classes[f"AutoModelFor{head}"] = f"For{head}"
        if source.no_head:
            del classes["AutoModelForMaskedLM"]
        found["auto_map"] = {auto: f"modeling_maelm.MAELM{end}" for auto, end in classes.items()}
    return found


def hub_tokenizer(tokenizer: Tokenizer) -> dict:
    """tokenizer.json: ours, with [CLS] and [SEP] around a text, and a [MASK] that takes the space before it with it."""
    model = tokenizers.Tokenizer.from_str(tokenizer.model.to_str())
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    found = json.loads(model.to_str())
    for token in found["added_tokens"]:
        token["lstrip"] = token["content"] == "[MASK]"
    return found


def write_export(source: Source, name: str, out: Path) -> None:
    """All files of an export of this name, into the folder `out`."""
    import safetensors.torch  # transformers needs it, too
    weights = (source.model or nn.ModuleDict({"encoder": source.encoder})).state_dict()
    if source.kind != "maelm":
        weights = to_theirs(weights, source.kind, source.config.encoder_layers, head=not source.no_head)
    weights = {key: weight.clone() for key, weight in weights.items()}  # keys and values were parts of one tensor
    # Not by its save_file: nobody but the owner could read that file.
    (out / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    n = source.config.seq_len
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": n, "padding_side": "right",
                 "clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}
    tokenizer |= zip(("cls_token", "pad_token", "sep_token", "mask_token"), SPECIALS)
    # By the hash an export is known from what others have trained it to be, and saved with the rest of its fields.
    known = {"maelm_weights": file_hash(out / "model.safetensors")}
    write_json(out / "config.json", hub_config(source) | known, checked=False)
    write_json(out / "tokenizer.json", hub_tokenizer(source.tokenizer), checked=False)
    write_json(out / "tokenizer_config.json", tokenizer, checked=False)
    # Without this, servers would take max_position_embeddings for the longest text.
    write_json(out / "sentence_bert_config.json", {"max_seq_length": n, "do_lower_case": False}, checked=False)
    if source.kind == "maelm":
        for file in ("modeling_maelm.py", "maelm.py"):
            shutil.copyfile(Path(__file__).with_name(file), out / file)
    (out / "README.md").write_text(card(source, name), encoding="utf-8")


def without_folder(name: str) -> str:
    """The name of a text or a model, but not where it lies on this machine."""
    return name if name.startswith("hf:") else Path(name).name


def card(source: Source, name: str) -> str:
    """The model card: what it is, the numbers of its run, how to load it."""
    config = source.config
    rows = {"parameters of the encoder": f"{sum(p.numel() for p in source.encoder.parameters()):,}",
            "longest text": f"{config.seq_len:,} tokens of a vocabulary of {len(source.tokenizer):,}, "
                            + ("lower case" if source.tokenizer.uncased else "upper and lower case"),
            "masked in pre-training": f"{config.mask_rate:.0%}, of which the encoder read {config.mask_in_encoder:.0%}"}
    rows["text"] = " + ".join(map(without_folder, source.data.split("+"))) or "not known"
    if source.init:
        rows["began with the weights of"] = without_folder(source.init)
    for line in source.lines:
        if "unigram_entropy" in line:
            rows["unigram entropy of the validation text"] = f"{line['unigram_entropy']:.3f} nats"
        if "val_loss" in line:
            rows["validation loss"] = f"{line['val_loss']:.3f} nats a masked token, after {line['step']:,} steps"
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    trust = ", trust_remote_code=True" if source.kind == "maelm" else ""
    task, fill = "feature-extraction", ""
    if not source.no_head:
        task = "fill-mask"
        fill = f'print(pipeline("fill-mask", "{name}"{trust})("The cat [MASK] on the mat.")[0]["token_str"])\n'
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags: [maelm]
---
# {name}

A text encoder of maelm, an implementation of MAE-LM ([Representation Deficiency in Masked Language
Modeling](https://arxiv.org/abs/2302.02060), Meng et al., ICLR 2024). For transformers it is {KINDS[source.kind]}.
{source.no_head}

| | |
|---|---|
{table}

```python
from transformers import AutoModel, AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModel.from_pretrained("{name}"{trust})
print(model(**tokenizer("The cat sat on the mat.", return_tensors="pt")).last_hidden_state.shape)
{fill}```
"""


def check_export(source: Source, out: Path) -> float:
    """Load a folder as others will, and compare it with our model: the largest difference. UserError if it is large."""
    hub = transformers_library()
    options = {"trust_remote_code": True, "attn_implementation": "eager"}
    encoder = hub.AutoModel.from_pretrained(out, **options).eval()
    model = their_lm = None
    if not source.no_head:
        model, their_lm = source.model, hub.AutoModelForMaskedLM.from_pretrained(out, **options).eval()
    tokenizer = hub.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    for text in TEXTS:
        if tokenizer(text)["input_ids"] != [CLS, *source.tokenizer.encode(text), SEP]:
            raise UserError(f"transformers' tokenizer reads {text!r} otherwise than ours: nothing is kept")
    same_ids = torch.arange(source.config.vocab_size)
    difference = compare(source.config, source.encoder, encoder, same_ids, model, their_lm)
    del encoder, their_lm
    gc.collect()  # Windows moves no file that a model is still mapped to
    return difference


def is_export(folder: Path) -> bool:
    """Whether a folder is an export that nobody has changed: with the weights that convert.py wrote, and no other file.
    transformers and sentence-transformers copy the fields of config.json when they save a model trained further."""
    names = {path.name for path in folder.iterdir()}
    if not {"config.json", "model.safetensors"} <= names <= set(FILES):
        return False
    return read_json(folder / "config.json").get("maelm_weights") == file_hash(folder / "model.safetensors")


def export(path: Path, out: Path, wanted: str) -> None:
    """Write a folder for transformers. UserError if `out` holds anything but an export as it was written; and if what
    was written now does not compute what our model does: then nothing of it is kept."""
    transformers_library()
    refuse_other_kind(out, "export")
    if out.is_dir() and any(out.iterdir()) and not is_export(out):
        raise UserError(f"{out}: not empty, and not as convert.py left it; choose another folder")
    source = open_source(path, wanted)
    out = out.resolve()
    new, old = out.with_name(f".{out.name}.tmp"), out.with_name(f".{out.name}.old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_export(source, out.name, new)
        difference = check_export(source, new)
        # It has been checked and gets its name: there is never a part of one beside a part of another.
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        new.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{out}: {KINDS[source.kind]}; checked: it differs by at most {difference:.1e} of the largest number")
    print(source.no_head or "It fills in [MASK], too.")


# ---- 4. Import ----------------------------------------------------------------------------------------------
GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # inside of ByteLevel
AS_IT_IS = "finetune.py --init hf:... and rank.py hf:... take it as it is"


def read_config(name: str, theirs) -> Config:
    """The configuration of a RoBERTa or MPNet as ours of a standard MLM. UserError names what ours cannot say."""
    wanted = {"hidden_act": "gelu", "layer_norm_eps": EPS, "intermediate_size": 4 * theirs.hidden_size,
              "pad_token_id": PAD, "type_vocab_size": 1, "relative_attention_num_buckets": 32, "is_decoder": False,
              "position_embedding_type": "absolute", "add_cross_attention": False, "tie_word_embeddings": True}
    for field, value in wanted.items():
        if getattr(theirs, field, value) != value:
            raise UserError(f"{name}: has {field}={getattr(theirs, field)!r}, maelm {value!r}: no import; {AS_IT_IS}")
    return Config(vocab_size=theirs.vocab_size, seq_len=theirs.max_position_embeddings - OFFSET,
                  encoder_layers=theirs.num_hidden_layers, encoder_dim=theirs.hidden_size,
                  encoder_heads=theirs.num_attention_heads, dropout=theirs.hidden_dropout_prob,
                  init_std=theirs.initializer_range, rel_pos_buckets=32 if theirs.model_type == "mpnet" else 0,
                  mask_in_encoder=1.0, decoder_layers=0)


def read_tokenizer(name: str, theirs, size: int) -> tuple[Tokenizer, Tensor]:
    """A byte-level BPE as one of ours, which cuts text into the same pieces; and their ids (size,) int64 in our order:
    specials, bytes, merges, and the rows that none of these uses. UserError if it reads text as ours cannot."""
    found = json.loads(theirs.backend_tokenizer.to_str()) if theirs.is_fast else {"model": {"type": "a slow one"}}
    if found["model"]["type"] != "BPE":
        raise UserError(f"{name}: its tokenizer is no byte-level BPE, but {found['model']['type']}; {AS_IT_IS}")
    if found["normalizer"] not in (None, {"type": "Lowercase"}):
        raise UserError(f"{name}: its tokenizer changes text by {found['normalizer']['type']}, ours lowers its case "
                        f"at most; {AS_IT_IS}")
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in found["model"]["merges"]]
    steps = found["pre_tokenizer"].get("pretokenizers", [])  # ours are two: pieces, and their bytes as letters
    pieces = steps[0]["pattern"]["Regex"] if len(steps) == 2 else GPT2_PIECES
    ours = Tokenizer.of_merges(merges, found["normalizer"] is not None, pieces)

    # Both have the 256 bytes and the merges under the same names, in the letters of GPT-2.
    vocabulary = theirs.get_vocab()
    order = [theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.mask_token_id]
    for i in range(NUM_SPECIAL, len(ours)):
        order.append(vocabulary[ours.model.id_to_token(i)])
    order += sorted(set(range(size)) - set(order))
    if sorted(order) != list(range(size)):
        raise UserError(f"{name}: its tokenizer does not fit its {size:,} embeddings, one for each token; {AS_IT_IS}")
    # What else a tokenizer may do, such as to put a space before the text, shows in what it reads.
    for text in TEXTS:
        ids = [order[i] for i in ours.encode(text)]
        if theirs(text, add_special_tokens=False)["input_ids"] != ids:
            raise UserError(f"{name}: its tokenizer reads {text!r} in a way that ours has not; {AS_IT_IS}")
    return ours, torch.tensor(order)


def import_model(name: str, out: Path) -> None:
    """Write a RoBERTa or MPNet of transformers as a run folder at step 0. UserError if it cannot be loaded, or computes
    what no Config of ours does."""
    hub = transformers_library()
    if (out / "config.json").exists() or kind_of(out) is not None:
        raise UserError(f"{out}: holds a model already; choose another folder")
    path = name.removeprefix("hf:")
    if path == name and not Path(path).is_dir():
        raise UserError(f"{name}: no such folder; before the name of a model of the Hub write hf:")
    try:
        kind = hub.PretrainedConfig.get_config_dict(path)[0].get("model_type")
        if kind == "maelm":
            raise UserError(f"{name}: made by convert.py export; --init takes the run folder that it was made from")
        if kind not in (None, *LAYERS):  # without any, it is no model: the next line says so
            raise UserError(f"{name}: of type {kind}; {' and '.join(LAYERS)} can be imported; {AS_IT_IS}")
        theirs = hub.AutoConfig.from_pretrained(path)
        config = read_config(name, theirs)
        their_lm, loading = hub.AutoModelForMaskedLM.from_pretrained(path, attn_implementation="eager",
                                                                     output_loading_info=True)
        tokenizer, order = read_tokenizer(name, hub.AutoTokenizer.from_pretrained(path), config.vocab_size)
    except UserError:
        raise
    except Exception as error:  # of many kinds, by what is missing or damaged
        raise UserError(f"{name}: transformers cannot load it ({first_line(error)})") from error
    missing = [key for key in loading["missing_keys"] if not key.startswith("lm_head")]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {missing[0]}")
    model, their_lm = MAELM(config).eval(), their_lm.float().eval()
    weights = to_ours(their_lm.state_dict(), kind, config.encoder_layers, order)
    check_weights(Path(path), model, weights)
    model.load_state_dict(weights)
    difference = compare(config, model.encoder, their_lm.base_model, order, model, their_lm)
    # A run that has not begun: finetune.py, rank.py and --init read it as any other.
    with claim_folder(out, "run"):
        tokenizer.save(out)
        state = {"step": 0, "seconds": 0.0, "logged": 0, "run": {}, "optimizers": []}
        write_tensors(checkpoint_path(out, 0), state | {"config": asdict(config), "model": model.state_dict()})
        write_json(out / "config.json", {"model": asdict(config), "train": {"init": name},
                                         "tokenizer": file_hash(out / "tokenizer.json")})
    print(f"{out}: {name}; checked: it differs by at most {difference:.1e} of the largest number")
    if loading["missing_keys"]:
        print("It has nothing that predicts [MASK]: that part begins with random weights.")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="convert.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["export", "import"])
    add("source", help="export: a run folder, a checkpoint, or what finetune.py leaves; import: hf:NAME or a folder")
    add("out", type=Path, help="the folder to be written")
    add("--format", default="auto", choices=["auto", *KINDS], help="of an export: auto is RoBERTa or MPNet where exact")
    options = parser.parse_args(argv)
    with clear_errors("convert.py"):
        if options.command == "export":
            export(Path(options.source), options.out, options.format)
        else:
            import_model(options.source, options.out)


if __name__ == "__main__":
    main()
