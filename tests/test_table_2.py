"""Claims about sizes, the rows of Table 2, the start of training, and shortcuts that save time. None is homework."""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import maelm
from conftest import generator, model_and_batch, random_tokens, tiny
from support.model import cross_attention
from support.model.build import check, make_model
from test_maelm import all_learn, close, copy_attention, copy_layer, exact
from tests.common import SHAPE, make_config


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


def test_uni_decoder_predicts_each_token_from_those_before_it():
    model, tokens, corruption = model_and_batch(decoder="uni+cross")
    at, h = torch.arange(1, 24).expand(6, -1), model.encode(corruption)
    changed = tokens.clone()
    changed[:, 15:] = 42
    a, b = model.decode_text(h, tokens, at), model.decode_text(h, changed, at)
    exact(a[:, :15], b[:, :15])
    assert not torch.allclose(a[:, 15:], b[:, 15:])
    exact(model.decode(h, corruption), model.decode_text(h, corruption.corrupted, corruption.masked))
    log_p = model.head(a, model.encoder.token_embedding.weight).log_softmax(-1)
    by_hand = [-log_p[row, i - 1, tokens[row, i]] for row in range(6) for i in range(1, 24)]
    close(model(tokens, corruption), torch.stack(by_hand).mean())


def test_an_mlm_refuses_removed_positions():
    mlm, tokens, _ = model_and_batch(**maelm.ABLATIONS["mlm"])
    for removed in (maelm.corrupt(tokens, tiny(mask_in_encoder=delta), generator(0)) for delta in (0.0, 0.5)):
        with pytest.raises(ValueError, match="the encoder must see all masks"):
            mlm(tokens, removed)


# ---- Sizes and rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field, values", [("rel_pos_buckets", (-4, 7)), ("decoder_dim", (-64, 100)), ("seq_len", (1,)),
                                           ("vocab_size", (260, 1 << 30)),
                                           ("decoder_layers", (0, -1)), ("encoder_heads", (0, 7)),
                                           ("init_std", (-1.0, 0.0, math.nan, math.inf)), ("decoder", ("uni",))])
def test_an_invalid_field_is_named(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field}={value!r}: use "):
            check(maelm.Config(mask_in_encoder=float(value == -1), **{field: value}))


@pytest.mark.parametrize("ablation", maelm.ABLATIONS)
def test_every_row_of_table_2_learns_and_uses_all_its_parameters(ablation):
    config = make_config("small", ablation, **SHAPE)
    torch.manual_seed(0)
    model = make_model(replace(config, init_std=0.1, decoder_dim=config.decoder_dim // 8))  # 64 for 512, 128 for 1024
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


def test_relative_tables_are_where_the_config_says():
    for tables, fields in ((1, dict(decoder_relative=False)), (2, dict(decoder_dim=64)), (0, dict(rel_pos_buckets=0)),
                           (2, dict(decoder="bi+cross")), (1, dict(decoder="uni+cross"))):
        model, tokens, corruption = model_and_batch(**{"decoder_relative": True, **fields})
        assert len([name for name, _ in model.named_parameters() if "table" in name]) == tables
        all_learn(model(tokens, corruption), model)


# ---- The start, and dropout ------------------------------------------------------------------------------------------
def test_initial_weights_are_normal():
    torch.manual_seed(0)
    model = maelm.MAELM(tiny(encoder_dim=256, init_std=0.02))
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases, and gains of LayerNorms
            assert p.unique().tolist() == [float(name.endswith("weight"))], name
        elif p.numel() > 5000:
            assert p.std().item() == pytest.approx(0.02, abs=0.001), name
            assert p.abs().max() > 0.06, name  # normal, not truncated


def test_dropout_is_in_the_encoder_only():
    model, tokens, corruption = model_and_batch(dropout=0.5)
    model.train()
    h, other = model.encode(corruption), model.encode(corruption)
    assert not torch.allclose(h, other)
    x, positions = model.fill_gaps(h, corruption), torch.arange(24)[None]
    exact(model.decoder(x, positions), model.decoder(x, positions))


# ---- Shortcuts ------------------------------------------------------------------------------------------------------
def test_a_prediction_does_not_depend_on_which_others_are_asked_for():
    """If the encoder sees all masks, a loss at fewer positions needs the same model input."""
    for fields in (dict(**maelm.ABLATIONS["mlm"]), dict(mask_in_encoder=1.0), dict(mask_in_encoder=1.0, norm="pre"),
                   dict(mask_in_encoder=1.0, decoder="bi+cross"), dict(mask_in_encoder=1.0, decoder="cross")):
        model, _, corruption = model_and_batch(**fields)
        fewer = corruption._replace(masked=corruption.masked[:, [4, 1]])
        close(model.logits(fewer), model.logits(corruption)[:, [4, 1]], atol=1e-5, rtol=1e-4)
