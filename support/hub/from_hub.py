"""Models of the Hugging Face Hub, read with the library `transformers`, which is not needed otherwise."""
from torch import nn

from support.program.cli import UserError, root_cause


def transformers_library():
    """The module `transformers`, with its messages silenced. Raises UserError if it is missing or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.55")
    except ImportError as error:
        raise UserError("this needs transformers 4.55 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def encoder_of_hub(name: str) -> tuple[nn.Module, object]:
    """The encoder of hf:NAME or hf:FOLDER in fp32 and evaluation mode, and its tokenizer. Code that comes with a
    model never runs. Raises UserError if the library cannot read the model, or if the encoder lacks weights."""
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
