"""Models of the Hugging Face Hub, read by the library transformers, which only these features need."""
from torch import nn

from support.cli import UserError, root_cause


def transformers_library():
    """The module transformers, made silent. Raises UserError if it is missing or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.55")
    except ImportError as error:
        raise UserError("this needs the package transformers, 4.55 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_hub(auto: str, name: str, **options):
    """What a class of transformers, such as AutoConfig, reads from hf:NAME or a folder. Code that comes with a model
    never runs. Raises UserError if the library cannot read it."""
    auto_class = getattr(transformers_library(), auto)
    name = name.removeprefix("hf:")
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # a damaged file can make it raise anything
        if "trust_remote_code" in str(error):
            raise UserError(f"hf:{name}: this model comes with its own code, which never runs here; if support.convert "
                            "exported it, name the run folder instead") from error
        why = f"{type(error).__name__}: {root_cause(error)}"
        raise UserError(f"hf:{name}: transformers cannot load it ({why})") from error


def model_from_hub(auto: str, name: str) -> tuple[nn.Module, bool]:
    """A model in fp32 and evaluation mode, and whether its head is new. Raises UserError if weights of its encoder are
    missing."""
    model, loading = from_hub(auto, name, output_loading_info=True)
    missing = [key for key in loading["missing_keys"] if not key.startswith(("pooler.", "lm_head."))]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {min(missing)}")
    return model.float().eval(), bool(loading["missing_keys"])


def encoder_from_hub(name: str) -> tuple[nn.Module, object, int]:
    """An encoder, its tokenizer, and its longest input in tokens. Raises UserError if it was not trained on [MASK]."""
    model, _ = model_from_hub("AutoModel", name)
    tokenizer = from_hub("AutoTokenizer", name)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if tokenizer.mask_token_id is None:
        raise UserError(f"{name}: it has no mask token; use an encoder trained with MLM")
    # RoBERTa and its like count positions from after their padding id: of 514 they have 512.
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 514) - 2)
    return model, tokenizer, longest
