"""A model for any Config, and where its position embeddings start."""
import torch

from maelm import MAELM, Config
from support.cross_attention import CrossMAELM


def make_model(config: Config, position_init: str = "normal") -> MAELM:
    """A new model; only decoders with cross-attention have a class of their own. position_init: normal | sinusoid."""
    model = MAELM(config) if config.decoder == "bi" else CrossMAELM(config)
    if position_init == "sinusoid":
        sinusoid_(model.encoder.position_embedding.weight, config.init_std)
        if model.decoder is not None:
            # Between init_std, which is lost beside h_i^L (about 1), and 1, which takes up its dimensions.
            std = config.init_std if config.decoder == "uni+cross" else 0.25
            sinusoid_(model.decoder.position_embedding.weight, std)
    return model


def sinusoid_(table, std: float):
    """Fill a table (n, d) with waves of root mean square std; Vaswani et al., 2017."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # an odd d has one less
    table.data.copy_(std * 2 ** 0.5 * waves)  # sin and cos have 1 / sqrt(2)
