"""Models for any Config, their losses and FLOPs, and seeds."""
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from maelm import MAELM, NUM_SPECIAL, Config, Corruption
from support.cross_attention import DECODERS
from support.program import UserError


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
    rates = 10000 ** -torch.linspace(0, 1, d // 2)
    angle = torch.arange(n)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)
    table.data.copy_(std * 2 ** 0.5 * waves)  # the root mean square of sin and cos is 1 / sqrt(2)


def check(config: Config) -> Config:
    """Return the Config. Raises UserError for the first field that would silently give another model."""
    c, d, heads, buckets = config, config.encoder_dim, config.encoder_heads, config.rel_pos_buckets
    width = max(1, d // max(1, heads))  # dimensions of a head
    mlm = c.mask_in_encoder == 1 and c.decoder == "bi" and c.decoder_dim == 0
    for field, holds, advice in (
            ("decoder", c.decoder in DECODERS, ", ".join(DECODERS)),
            ("vocab_size", c.vocab_size >= NUM_SPECIAL + 256, f"{NUM_SPECIAL + 256} or more"),
            ("mask_rate", 0 < c.num_masked(c.seq_len) < c.seq_len, f"a share of 1 to {c.seq_len - 1} tokens"),
            ("mask_in_encoder", 0 <= c.mask_in_encoder <= 1, "0 to 1"),
            ("encoder_heads", heads * width == d, f"a divisor of encoder_dim={d}"),
            ("rel_pos_buckets", buckets == 0 or (buckets > 3 and buckets % 2 == 0), "0, 4, 6, 8 ..."),
            ("rel_pos_max_distance", c.rel_pos_max_distance > buckets // 4, f"more than {buckets // 4}"),
            ("mask_in_encoder", c.decoder != "uni+cross" or c.mask_in_encoder == 0, "0 with uni+cross"),
            ("decoder_layers", c.decoder_layers > 0 or mlm, "1 or more, or 0 with mask_in_encoder=1"),
            ("decoder_dim", c.decoder_dim % width == 0, f"0 or a multiple of {width}")):
        if not holds:
            raise UserError(f"{field}={getattr(c, field)!r}: use {advice}")
    return config


def text_states(encoder: nn.Module, tokens, padding=None) -> list[Tensor]:
    """H^0 ... H^L (B, t, d) for tokens (B, t) int64 at the positions 0 to t - 1. padding (B, t) bool hides keys."""
    device = next(encoder.parameters()).device
    positions = torch.arange(tokens.shape[1], device=device)[None]
    return encoder.hidden_states(tokens.to(device), positions, padding)


def losses_of(result) -> dict:
    """The result of MAELM.forward, a loss or a dictionary of its terms, as the whole loss and the terms by name."""
    if isinstance(result, dict):
        return {"loss": sum(result.values())} | {f"loss_{name}": term for name, term in result.items()}
    return {"loss": result}


def flops(config: Config) -> int:
    """FLOPs of all matrix products in a training step on one sequence; a multiply-add counts as 2."""
    n = config.seq_len
    m = config.num_masked(n)
    r = n - m + round(config.mask_in_encoder * m)  # tokens that the encoder sees
    # Meta tensors have shapes but no data. There, attention runs as matrix products; a GPU kernel would go uncounted.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tokens, masked, kept = [torch.zeros(1, length, dtype=torch.int64) for length in (n, m, r)]
        losses_of(make_model(config)(tokens, Corruption(tokens, masked, kept)))["loss"].backward()
    return counter.get_total_flops()
