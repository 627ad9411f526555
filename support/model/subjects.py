"""The encoders that rank.py and course/ measure, from runs or from the Hub, and their texts as token ids."""
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from maelm import CLS, MASK, NUM_SPECIAL, SEP
from support.model.checkpoints import load_encoder
from support.program import UserError, fields_of
from support.text.corpus import Rows, Text, corpus_of_run, documents, in_validation, sample


class Subject(NamedTuple):
    """An encoder and its text, in sequences of n tokens."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # sequences: rows[indices] is (B, n) int64
    text: str  # the source of the text, such as docs
    mask_id: int  # of [MASK]
    specials: list[int]  # ids of the tokens that are never masked
    reads_mask: bool  # whether the encoder read [MASK] in training


# ---- 1. A run -----------------------------------------------------------------------------------------------
def subject_of_run(name: str, selected: dict, tokens: int, device: torch.device) -> Subject:
    """The encoder in a run folder or checkpoint, and its validation text or, if fields of a Text are `selected`, about
    this many tokens of that text."""
    encoder, state = load_encoder(name)
    encoder = encoder.to(device)
    config = state["config"]
    text = Text(**fields_of(Text, asdict(config) | state["settings"] | selected))
    if "corpus" in state and not selected:
        rows = Rows(corpus_of_run(text, state), "val", config.seq_len)
    else:
        rows = text_rows(text, state["tokenizer"].encode, ([CLS], [SEP], []), config.seq_len, tokens)
    positions = torch.arange(config.seq_len, device=device)[None]  # (1, n)

    def encode(tokens):
        return encoder.hidden_states(tokens.to(device), positions)

    reads_mask = config.mask_in_encoder > 0 and config.encoder_fill != "random"
    return Subject(name, encode, rows, text.data, MASK, list(range(NUM_SPECIAL)), reads_mask)


# ---- 2. An encoder of the Hub -------------------------------------------------------------------------------
def transformers_library():
    """The library `transformers`, with its messages silenced. Raises UserError if it is missing or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.55")
    except ImportError as error:
        raise UserError("this needs transformers 4.55 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def subject_of_hub(name: str, selected: dict, tokens: int, seq_len: int, device: torch.device) -> Subject:
    """An encoder that transformers' AutoModel loads, in fp32; its own code never runs. It reads validation documents of
    docs, unless fields of a Text are `selected`: about this many tokens, in sequences of seq_len, unless its own limit
    is lower."""
    library, source = transformers_library(), name.removeprefix("hf:")
    try:
        model, loading = library.AutoModel.from_pretrained(source, trust_remote_code=False, output_loading_info=True)
        tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged file can make it raise anything
        raise UserError(f"{name}: transformers cannot load it without its own code ({str(error):.99})") from error
    missing = [key for key in loading["missing_keys"] if not key.startswith("pooler.")]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {min(missing)}")
    model = model.float().eval().to(device)
    cls, sep, mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
    if None in (cls, sep, mask) or model.config.is_encoder_decoder:
        raise UserError(f"{name}: use an encoder trained with MLM, whose tokenizer has [CLS], [SEP] and [MASK]")

    def encode_text(text):
        text = text.replace(tokenizer.mask_token, "")
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(tokens):
        tokens = tokens.to(device)
        out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        # In some model families, the last entry of hidden_states lacks the final LayerNorm.
        return [*out.hidden_states[:-1], out.last_hidden_state]

    # RoBERTa counts positions from its padding id plus 1, so it reads 512 tokens with 514 positions. XLNet has -1.
    positions = getattr(model.config, "max_position_embeddings", 514) - 2
    n = min(seq_len, tokenizer.model_max_length, positions if positions > 0 else 512)
    text = Text(**selected)
    rows = text_rows(text, encode_text, ([cls], [sep], [sep]), n, tokens)
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text.data, mask, specials, reads_mask=True)


# ---- 3. Its text --------------------------------------------------------------------------------------------
def text_rows(text: Text, encode: Callable, frame: tuple, n: int, tokens: int) -> np.ndarray:
    """Validation documents, spaced evenly over a text, as sequences (N, n) int64, of about this many tokens. The frame
    holds the special tokens before a sequence, between documents and after a sequence. Raises UserError if the text is
    too short for one sequence."""
    before, between, after = frame
    room = n - len(before) - len(after)
    held_out = (document for document in documents(text) if in_validation(document, text.val_share))
    ids = []
    for document in tqdm(sample(held_out, 20 * tokens), "tokenizing", unit="text", leave=False, disable=None):
        ids += [*encode(document.decode()), *between]
    count = len(ids) // room if room > 0 else 0
    if count == 0:
        raise UserError(f"--data {text.data}: {len(ids)} tokens, but a sequence has {n}; use --val-share 1")
    rows = [[*before, *ids[i * room:(i + 1) * room], *after] for i in range(count)]
    return np.array(rows, np.int64)
