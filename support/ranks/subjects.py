"""The encoders that rank.py and course/ measure, from runs or from the Hub, and their texts as token ids."""
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from maelm import CLS, MASK, NUM_SPECIAL, SEP
from support.model.checkpoints import load_encoder
from support.program.cli import path_of
from support.program.errors import UserError, root_cause
from support.text.corpus import VAL_SHARE, Rows, evenly_spaced, in_validation, prepared_corpus, sample
from support.text.documents import CACHE, documents, sources


class Subject(NamedTuple):
    """An encoder and its text, in sequences of n tokens."""
    name: str
    encode: Callable[[Tensor], list[Tensor]]  # (B, n) int64 on the CPU -> H^0 ... H^L, (B, n, d) float32
    rows: np.ndarray | Rows  # sequences: rows[indices] is (B, n) int64
    text: str  # the source of the text, such as docs
    mask_id: int  # of [MASK]
    specials: list[int]  # ids of the tokens that are never masked
    reads_mask: bool  # whether the encoder read [MASK] in training

    def sample(self, tokens: int) -> Tensor:
        """Sequences (N, n) int64, spaced evenly over the text, of about this many tokens in total, or all sequences."""
        n = self.rows[[0]].shape[1]
        return evenly_spaced(self.rows, math.ceil(tokens / n))


# ---- 1. A run -----------------------------------------------------------------------------------------------
def subject_of_run(name: str, options, device: torch.device) -> Subject:
    """The encoder in a run folder or checkpoint. The fields data, column, val_share and tokens of a rank.RankOptions
    select its text. Without the first three, it is the run's validation text."""
    encoder, state = load_encoder(path_of(name))
    encoder = encoder.to(device)
    config = state["config"]
    tokenizer = state["tokenizer"]
    settings = state["settings"]
    text = options.data or settings.get("data", "docs")
    if "corpus" in state and not (options.data or options.column or options.val_share):
        given = tokenizer if settings["init"] else None
        rows = Rows(prepared_corpus(asdict(config) | settings, given, state["corpus"]), "val", config.seq_len)
    else:
        rows = text_rows(text, tokenizer.encode, ([CLS], [SEP], []), config.seq_len, options, settings)
    positions = torch.arange(config.seq_len, device=device)[None]  # (1, n)

    def encode(tokens):
        return encoder.hidden_states(tokens.to(device), positions)

    reads_mask = config.mask_in_encoder > 0 and config.encoder_fill != "random"
    return Subject(name, encode, rows, text, MASK, list(range(NUM_SPECIAL)), reads_mask)


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


def encoder_of_hub(name: str) -> tuple[nn.Module, object]:
    """The encoder of hf:NAME or hf:FOLDER in fp32 and evaluation mode, and its tokenizer. Its own code never runs."""
    library, source = transformers_library(), name.removeprefix("hf:")
    try:
        model, loading = library.AutoModel.from_pretrained(source, trust_remote_code=False, output_loading_info=True)
        tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged file can make it raise anything
        why = f"{type(error).__name__}: {root_cause(error)}"
        raise UserError(f"{name}: transformers cannot load it; model code never runs here ({why})") from error
    missing = [key for key in loading["missing_keys"] if not key.startswith("pooler.")]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {min(missing)}")
    return model.float().eval(), tokenizer


def subject_of_hub(name: str, options, device: torch.device) -> Subject:
    """An encoder that transformers' AutoModel loads. It reads the validation documents of --data, or of docs."""
    model, tokenizer = encoder_of_hub(name)
    model = model.to(device)
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

    text = options.data or "docs"
    # RoBERTa counts positions from its padding id plus 1, so it reads 512 tokens with 514 positions. XLNet has -1.
    positions = getattr(model.config, "max_position_embeddings", 514) - 2
    n = min(options.seq_len, tokenizer.model_max_length, positions if positions > 0 else 512)
    rows = text_rows(text, encode_text, ([cls], [sep], [sep]), n, options, {})
    specials = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return Subject(name, encode, rows, text, mask, specials, reads_mask=True)


# ---- 3. Text of --data --------------------------------------------------------------------------------------
def text_rows(source: str, encode: Callable, frame: tuple, n: int, options, settings: dict) -> np.ndarray:
    """Documents of a source, spaced evenly over its text, as sequences (N, n) int64. Their share is that of the options
    or of the run with these settings. The frame holds the special tokens before a sequence, between documents and after
    a sequence. Raises UserError if the text is too short for one sequence."""
    before, between, after = frame
    room = n - len(before) - len(after)
    share = options.val_share or settings.get("val_share", VAL_SHARE)
    column = options.column or settings.get("column", "text")
    read = documents(sources(source), column, settings.get("cache", CACHE))
    texts = sample((text for text in filter(None, read) if in_validation(text, share)), 20 * options.tokens)
    ids = []
    for text in tqdm(texts, "tokenizing", unit="text", leave=False, disable=None):
        ids += [*encode(text.decode()), *between]
    count = len(ids) // room if room > 0 else 0
    if count == 0:
        raise UserError(f"--data {source}: {len(ids)} tokens, but a sequence has {n}; use --val-share 1")
    rows = [[*before, *ids[i * room:(i + 1) * room], *after] for i in range(count)]
    return np.array(rows, np.int64)
