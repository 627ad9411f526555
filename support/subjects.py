"""The encoders that rank.py measures, from runs and from the Hub, and the texts that they read."""
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from maelm import CLS, MASK, NUM_SPECIAL, SEP
from support.checkpoints import Pretrained, checkpoints
from support.corpus import evenly_spaced, text_rows
from support.model import text_states
from support.program import UserError, fields_of, path_of
from support.text import Text
from support.worker import best_device


def transformers_library():
    """The library `transformers`, with its messages silenced. Raises UserError if it is missing or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.56")
    except ImportError as error:
        raise UserError("this needs transformers 4.56 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


# ---- An encoder and its text --------------------------------------------------------------------------------
class Subject(NamedTuple):
    """An encoder and its text, in sequences of n tokens."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: Tensor  # sequences (N, n) int64, evenly spaced over the text
    text: str  # the source of the text, such as docs
    mask_id: int  # of [MASK]
    specials: list[int]  # ids of the tokens that are never masked
    reads_mask: bool  # whether the encoder read [MASK] in training
    device: torch.device  # of its vectors
    step: int | None = None  # of its pre-training, if known


def open_subjects(names: list[str], options) -> Iterator[Subject]:
    """The encoders that rank.py names, one after another, and their texts, with rank.py's RankOptions. With `probe`,
    random weights are added, because they show how much of a score training explains."""
    if options.steps:
        names = [str(path) for path in checkpoints(path_of(names[0]))] if len(names) == 1 else []
        if options.probe or not names:
            raise UserError("--steps: needs the folder of one run with checkpoints, and no --probe")
    if options.probe and any(name.startswith("hf:") for name in names):
        raise UserError(f"--probe {options.probe}: only for runs, not for models of the Hub")
    if options.probe and not any(name.startswith("random:") for name in names):
        names = [*names, f"random:{names[0]}"]
    selected = {field: value for field, value in fields_of(Text, asdict(options)).items() if value}
    for name in names:
        if name.startswith("hf:"):
            yield subject_of_hub(name, selected, options.tokens, options.seq_len, options.device)
        else:
            yield subject_of_run(name, selected, options.tokens, options.device)


def subject_of_run(name: str, selected: dict, tokens: int, device_name: str) -> Subject:
    """The encoder in a run folder or checkpoint, and its validation text or, if fields of a Text are `selected`, about
    this many tokens of that text."""
    pretrained = Pretrained(name)
    state, config = pretrained.state, pretrained.config
    device = best_device(device_name, config.encoder_dim)
    encoder = pretrained.new_encoder(seed=1).eval().to(device)
    text = Text(**fields_of(Text, asdict(config) | state["settings"] | selected))
    if "corpus" in state and not selected:
        rows = pretrained.corpus().val
    else:
        rows = text_rows(text, state["tokenizer"].encode, ([CLS], [SEP], []), config.seq_len, tokens)
    reads_mask = config.mask_in_encoder > 0 and config.encoder_fill != "random"
    specials = list(range(NUM_SPECIAL))
    encode = partial(text_states, encoder)
    rows = evenly_spaced(rows, math.ceil(tokens / config.seq_len))
    return Subject(name, encode, rows, text.data, MASK, specials, reads_mask, device, pretrained.step)


def subject_of_hub(name: str, selected: dict, tokens: int, seq_len: int, device_name: str) -> Subject:
    """An encoder that transformers' AutoModel loads, in fp32. It reads validation documents of docs, unless fields of a
    Text are `selected`: about this many tokens, in sequences of seq_len, unless its own limit is lower."""
    library, source = transformers_library(), name.removeprefix("hf:")
    model, loading = library.AutoModel.from_pretrained(source, output_loading_info=True, dtype=torch.float32)
    tokenizer = library.AutoTokenizer.from_pretrained(source)
    missing = [key for key in loading["missing_keys"] if not key.startswith("pooler.")]
    cls, sep, mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
    if missing or None in (cls, sep, mask):
        raise UserError(f"{name}: use an encoder with [CLS], [SEP] and [MASK] whose weights are all there, not without "
                        f"{missing[:1]}")
    device = best_device(device_name, model.config.hidden_size)
    model.eval().to(device)

    def encode(tokens):
        out = model(input_ids=tokens.to(device), output_hidden_states=True)
        # In some model families, the last entry of hidden_states lacks the final LayerNorm.
        return [*out.hidden_states[:-1], out.last_hidden_state]

    def encode_text(text):
        text = text.replace(tokenizer.mask_token, "")
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    # RoBERTa counts positions from its padding id plus 1, so it reads 512 tokens with 514 positions. XLNet has -1.
    positions = getattr(model.config, "max_position_embeddings", 514) - 2
    n = min(seq_len, tokenizer.model_max_length, positions if positions > 0 else 512)
    text = Text(**selected)
    rows = evenly_spaced(text_rows(text, encode_text, ([cls], [sep], [sep]), n, tokens), math.ceil(tokens / n))
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text.data, mask, specials, True, device)
