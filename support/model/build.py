"""Models for any Config, and seeds."""
import numpy as np
import torch

from maelm import MAELM, Config
from support.model.cross_attention import DECODERS
from support.program import require


def seed_of(*numbers: int) -> int:
    """Combine whole numbers into one seed in [0, 2^63). Everything random in a step is a function of (seed, step)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def make_model(config: Config, position_init: str = "normal") -> MAELM:
    """A new model, of the class that DECODERS names. position_init: normal | sinusoid."""
    check(config)
    model = DECODERS[config.decoder](config)
    if position_init == "sinusoid":
        sinusoid_(model.encoder.position_embedding.weight, config.init_std)
        if model.decoder is not None:
            # A compromise: init_std is negligible next to h_i^L (about 1), and an std of 1 would drown h_i^L.
            std = config.init_std if config.decoder == "uni+cross" else 0.25
            sinusoid_(model.decoder.position_embedding.weight, std)
    return model


def sinusoid_(table, std: float):
    """Fill a table (n, d) with sinusoids (Vaswani et al., 2017) whose root mean square is std."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # an odd d needs one column fewer
    table.data.copy_(std * 2 ** 0.5 * waves)  # the root mean square of sin and cos is 1 / sqrt(2)


def check(config: Config) -> Config:
    """Return the Config. Raises UserError for the first invalid field."""
    c, d, heads, buckets = config, config.encoder_dim, config.encoder_heads, config.rel_pos_buckets
    width = max(1, d // max(1, heads))  # dimensions of a head
    mlm = c.decoder_layers == 0 and c.mask_in_encoder == 1 and c.decoder == "bi"
    whole = c.decoder_dim == 0 or (c.decoder_dim > 0 and c.decoder_dim % width == 0 and not mlm)
    m = c.num_masked(c.seq_len) if 0 < c.mask_rate < 1 else 0
    require(
        c,
        ("vocab_size", 261 <= c.vocab_size <= 1 << 20, "261 to 1,048,576"),  # a far larger V crashes `tokenizers`
        ("seq_len", c.seq_len >= 2, "2 or more"),
        ("encoder_dim", d >= 1, "1 or more"),
        ("encoder_layers", 1 <= c.encoder_layers <= 1000, "1 to 1,000"),
        ("encoder_heads", heads > 0 and d % heads == 0, f"a divisor of encoder_dim={d}"),
        ("rel_pos_buckets", buckets == 0 or (buckets > 3 and buckets % 2 == 0), "0, 4, 6, 8 ..."),
        ("rel_pos_max_distance", c.rel_pos_max_distance > buckets // 4, f"more than {buckets // 4}"),
        ("mask_rate", 0 < c.mask_rate < 1, "a number between 0 and 1"),
        ("mask_rate", 0 < m < c.seq_len, f"a share that masks 1 to {c.seq_len - 1} tokens"),
        ("norm", c.norm in ("post", "pre"), "post or pre"),
        ("init_std", c.init_std > 0, "a number above 0"),
        ("dropout", c.dropout < 1, "0 or more, below 1"),
        ("mask_in_encoder", c.mask_in_encoder <= 1, "0 to 1"),
        ("encoder_fill", c.encoder_fill in ("mask", "random"), "mask or random"),
        ("decoder", c.decoder in DECODERS, ", ".join(DECODERS)),
        ("mask_in_encoder", c.decoder != "uni+cross" or c.mask_in_encoder == 0, "0 with uni+cross"),
        ("decoder_layers", 1 <= c.decoder_layers <= 1000 or mlm, "1 to 1,000, or 0 with mask_in_encoder=1"),
        ("decoder_dim", whole, f"0 or, with a decoder, a multiple of {width}"))
    return config
