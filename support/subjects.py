"""The encoders that rank.py measures, from runs and from the Hub, and the texts that they read."""
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from maelm import CLS, MASK, NUM_SPECIAL, SEP
from support.checkpoints import Pretrained, hidden_states
from support.program import UserError, fields_of
from support.corpus import Rows, Text, corpus_of_run, documents, in_validation, sample


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


# ---- 2. An encoder and its text, for ranks ---------------------------------------------------------------------
class Subject(NamedTuple):
    """An encoder and its text, in sequences of n tokens."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # sequences: rows[indices] is (B, n) int64
    text: str  # the source of the text, such as docs
    mask_id: int  # of [MASK]
    specials: list[int]  # ids of the tokens that are never masked
    reads_mask: bool  # whether the encoder read [MASK] in training
    step: int | None = None  # of its pre-training, if known


def subject_of_run(name: str, selected: dict, tokens: int, device: torch.device) -> Subject:
    """The encoder in a run folder or checkpoint, and its validation text or, if fields of a Text are `selected`, about
    this many tokens of that text."""
    pretrained = Pretrained(name)
    state, config = pretrained.state, pretrained.config
    encoder = pretrained.new_encoder(seed=1).eval().to(device)
    text = Text(**fields_of(Text, asdict(config) | state["settings"] | selected))
    if "corpus" in state and not selected:
        rows = Rows(corpus_of_run(text, state), "val", config.seq_len)
    else:
        rows = text_rows(text, state["tokenizer"].encode, ([CLS], [SEP], []), config.seq_len, tokens)
    reads_mask = config.mask_in_encoder > 0 and config.encoder_fill != "random"
    specials = list(range(NUM_SPECIAL))
    encode = partial(hidden_states, encoder)
    return Subject(name, encode, rows, text.data, MASK, specials, reads_mask, pretrained.step)


def subject_of_hub(name: str, selected: dict, tokens: int, seq_len: int, device: torch.device) -> Subject:
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
