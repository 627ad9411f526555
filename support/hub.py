"""Encoders of the library `transformers`, which is needed for these only."""
import torch
from torch import nn

from support.files import UserError


def transformers_library():
    """The module transformers, silent. UserError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("this needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def open_hub(name: str) -> tuple[nn.Module, object, int]:
    """The encoder hf:NAME of the Hub, or of a folder, in float32 (of BART, the encoder only), its tokenizer, and its
    longest input in tokens. UserError if it cannot be loaded or knows no mask token."""
    transformers = transformers_library()
    name = name.removeprefix("hf:")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # what a checkpoint lacks, RoBERTa's pooler, is drawn: the same in every process
            model = transformers.AutoModel.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"hf:{name}: transformers cannot load it ({' '.join(str(error).split())[:200]})") from error
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    # Some tokenizers know a mask token that their model has no embedding for.
    if tokenizer.mask_token_id is None or tokenizer.mask_token_id >= model.get_input_embeddings().num_embeddings:
        raise UserError(f"hf:{name}: it has no mask token; use an encoder trained with MLM")
    longest = min(tokenizer.model_max_length, positions_of(model))  # a tokenizer may state a limit, or a huge number
    return model.float().eval(), tokenizer, longest


def positions_of(model: nn.Module) -> int:
    """How many positions an encoder of transformers has. RoBERTa and its like count them from after their padding id:
    a table of 514 rows with padding id 1 has 512. A model without a table has its stated limit."""
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            first = 0 if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - first
    return getattr(model.config, "max_position_embeddings", 512)
