"""Encoders of the library `transformers`, which is needed for these only."""
from torch import nn

from support.files import UserError


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


def open_hub(name: str) -> tuple[nn.Module, object, int]:
    """The encoder hf:NAME of the Hub or a folder, its tokenizer, its longest input in tokens. UserError without one."""
    transformers = transformers_library()
    name = name.removeprefix("hf:")
    try:
        model = transformers.AutoModel.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"hf:{name}: transformers cannot load it ({str(error)[:200]})") from error
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if tokenizer.mask_token_id is None:
        raise UserError(f"hf:{name}: it has no mask token; use an encoder trained with MLM")
    # RoBERTa and its like count positions from after their padding id: of 514 they have 512.
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 514) - 2)
    return model.float().eval(), tokenizer, longest
