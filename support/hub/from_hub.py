"""Models from the Hugging Face Hub, read with the transformers library, which is not needed otherwise."""
from torch import nn

from support.program.cli import UserError, root_cause


def transformers_library():
    """The transformers module, with its messages silenced. Raises UserError if it is missing or too old."""
    try:
        import transformers
        transformers.utils.versions.require_version("transformers>=4.55")
    except ImportError as error:
        raise UserError("this needs transformers 4.55 or later: pip install -U transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_hub(auto: str, name: str, **options):
    """Call from_pretrained of a class in transformers, such as AutoConfig, for hf:NAME or a folder. Code that comes
    with a model never runs. Raises UserError if the library cannot read the model."""
    auto_class = getattr(transformers_library(), auto)
    name = name.removeprefix("hf:")
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # a damaged file can make it raise anything
        why = f"{type(error).__name__}: {root_cause(error)}"
        raise UserError(f"hf:{name}: transformers cannot load it; model code never runs here ({why})") from error


def model_from_hub(auto: str, name: str) -> nn.Module:
    """A model in fp32 and in evaluation mode. Its head may be random. Raises UserError if weights of the encoder are
    missing."""
    model, loading = from_hub(auto, name, output_loading_info=True)
    missing = [key for key in loading["missing_keys"] if not key.startswith(("pooler.", "lm_head."))]
    if missing:
        raise UserError(f"{name}: it lacks weights of the encoder, such as {min(missing)}")
    return model.float().eval()
