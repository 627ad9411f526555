"""Claims about sizes, the rows of Table 2, and the three of them with cross-attention."""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import maelm
import train
from conftest import generator, model_and_batch, random_tokens, tiny
from support import cross_attention
from support.models import check, make_model
from test_maelm import close, copy_attention, copy_layer, exact
from tests.common import SHAPE


# ---- Cross-attention ------------------------------------------------------------------------------------------------
def test_cross_layer_equals_pytorchs_own():
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        block = cross_attention.CrossBlock(tiny(norm=norm, decoder="bi+cross"), 32, 4).eval()
        theirs = torch.nn.TransformerDecoderLayer(32, 4, 128, 0.0, F.gelu, norm_first=norm == "pre", batch_first=True)
        copy_layer(block, theirs)
        copy_attention(block.cross_attention, theirs.multihead_attn)
        x, memory = torch.randn(2, 2, 7, 32, generator=generator(0))
        close(block(x, memory[:, :5], None), theirs(x, memory[:, :5]), atol=1e-5, rtol=1e-5)


def test_uni_decoder_cannot_see_the_future():
    model, tokens, corruption = model_and_batch(decoder="uni+cross")
    at, h = torch.arange(1, 24).expand(6, -1), model.encode(corruption)
    changed = tokens.clone()
    changed[:, 15:] = 42
    a, b = model.decode_text(h, tokens, at), model.decode_text(h, changed, at)
    exact(a[:, :15], b[:, :15])
    assert not torch.allclose(a[:, 15:], b[:, 15:])
    exact(model.decode(h, corruption), model.decode_text(h, corruption.corrupted, corruption.masked))


def test_uni_predicts_all_tokens_but_the_first():
    model, tokens, corruption = model_and_batch(decoder="uni+cross")
    z = model.decode_text(model.encode(corruption), tokens, torch.arange(24).expand(6, -1))
    log_p = model.head(z, model.encoder.token_embedding.weight).log_softmax(-1)
    by_hand = [-log_p[row, i, tokens[row, i]] for row in range(6) for i in range(1, 24)]
    close(model(tokens, corruption), torch.stack(by_hand).mean())


# ---- Sizes and rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field, values", [("rel_pos_buckets", (-4, 7)), ("decoder_dim", (-64, 100)), ("seq_len", (1,)),
                                           ("decoder_layers", (0, -1)), ("encoder_heads", (0, 7)),
                                           ("init_std", (-1.0, 0.0, math.nan, math.inf)), ("decoder", ("uni",))])
def test_a_field_that_is_not_possible_is_named(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field}={value!r}: use "):
            check(maelm.Config(mask_in_encoder=float(value == -1), **{field: value}))


@pytest.mark.parametrize("ablation", maelm.ABLATIONS)
def test_every_row_of_table_2_learns_and_uses_all_its_parameters(ablation):
    config = train.make_config("small", ablation, **SHAPE)
    torch.manual_seed(0)
    model = make_model(replace(config, init_std=0.1, decoder_dim=config.decoder_dim // 8))  # of 512 and 1024: 64, 128
    tokens = random_tokens(4)
    corruption = maelm.corrupt(tokens, config, generator(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = model(tokens, corruption)
    first.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    for _ in range(60):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(tokens, corruption)
        loss.backward()
    assert loss < first / 2
