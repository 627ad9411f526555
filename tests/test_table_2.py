"""Claims about sizes, the rows of Table 2, and the start of training. None is homework."""
import itertools

import pytest
import torch
import torch.nn.functional as F

import maelm
from conftest import generator, model_and_batch, tiny
from support import cross_attention
from support.model import make_model
from test_maelm import all_learn, at_positions, close, copy_attention, copy_layer, exact
from tests.common import PAPER_ROWS


# ---- Cross-attention ------------------------------------------------------------------------------------------------
def test_cross_layer_equals_pytorchs_own():
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        block = cross_attention.CrossBlock(tiny(norm=norm, decoder="bi+cross"), 32, 4, 0.0).eval()
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
    a, b = [model.decode(h, maelm.Corruption(text, at, corruption.kept)) for text in (tokens, changed)]
    exact(a[:, :15], b[:, :15])
    assert not torch.allclose(a[:, 15:], b[:, 15:])
    log_p = model.head(a, model.encoder.token_embedding.weight).log_softmax(-1)
    by_hand = [-log_p[row, i - 1, tokens[row, i]] for row in range(6) for i in range(1, 24)]
    close(model(tokens, corruption), torch.stack(by_hand).mean())


# ---- Sizes and rows -------------------------------------------------------------------------------------------------
def by_hand(model, corruption, row):
    """The logits (6, m, V) of a model with this row of Table 2, from the parts of the model and the paper's words."""
    corrupted, masked, kept = corruption
    everywhere = torch.arange(24).expand(6, -1)
    reads = everywhere if row in ("mlm", "enc-mask", "enc-mask-dec-resets", "random-replace") else kept
    h = model.encoder(corrupted.gather(1, reads), torch.arange(20).expand(6, -1) if row == "misaligned" else reads)
    e_mask = model.encoder.token_embedding.weight[maelm.MASK]
    x = e_mask.expand(6, 24, -1).scatter(1, reads[:, :, None].expand_as(h), h)
    if row == "enc-mask-dec-resets":
        x = x.scatter(1, masked[:, :, None].expand(-1, -1, 32), e_mask.expand(6, 4, -1))
    if row == "cross":
        z = model.decoder.norm(x + model.decoder.position_embedding(everywhere))
        for block in model.decoder.stack.blocks:
            z = block(z, h, None)
        z = at_positions(model.decoder.stack.final_norm(z), masked)
    elif row == "bi+cross":
        z = model.decoder(x, h, masked)
    elif row == "uni+cross":  # position i reads x-hat before i
        before = torch.cat([corrupted[:, :1], corrupted[:, :-1]], dim=1)
        z = model.decoder(model.encoder.token_embedding(before), h, masked)
    else:
        z = at_positions(x if row == "mlm" else model.decoder(x, everywhere), masked)
    dense, _, norm = model.head.transform
    z = norm(F.gelu(dense(z)))
    return z @ model.encoder.token_embedding.weight.T + model.head.bias


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_each_row_of_table_2_does_what_its_name_says(row):
    fields = dict(decoder_layers=4, mask_rate=0.15) | maelm.ABLATIONS[row]
    fields["decoder_dim"] = fields.get("decoder_dim", 0) // 8  # 64 for 512, 128 for 1024
    model, tokens, corruption = model_and_batch(**fields, decoder_relative=True)
    close(model.logits(corruption), by_hand(model, corruption, row), atol=1e-5, rtol=1e-4)
    all_learn(model(tokens, corruption), model)
    fill = corruption.corrupted.gather(1, corruption.masked)
    assert (fill == maelm.MASK).all() == (row != "random-replace")
    blocks = [] if row == "mlm" else model.decoder.stack.blocks
    assert len(blocks) == {"mlm": 0, "dec-2": 2, "dec-6": 6}.get(row, 4)
    layers = [layer for layer in model.modules() if isinstance(layer, maelm.Attention)]
    assert {layer.query.in_features // layer.heads for layer in layers} == {8}  # dimensions of a head
    assert all(block.ffn_norm.bias.numel() == {"dec-512": 64, "dec-1024": 128}.get(row, 32) for block in blocks)
    for block in blocks:
        assert hasattr(block, "cross_attention") == (row in ("bi+cross", "uni+cross", "cross"))
        assert (block.self_attention is None) == (row == "cross")
    tables = [name for name, _ in model.named_parameters() if "table" in name]
    assert len(tables) == {"no-relative": 0, "mlm": 1, "uni+cross": 1, "cross": 1}.get(row, 2)


# ---- The start, and dropout ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decoder", cross_attention.DECODERS)
def test_initial_weights_are_normal(decoder):
    torch.manual_seed(0)
    model = make_model(tiny(encoder_dim=256, init_std=0.02, decoder=decoder))
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases, and gains of LayerNorms
            assert p.unique().tolist() == [float(name.endswith("weight"))], name
        elif p.numel() > 5000:
            assert p.std().item() == pytest.approx(0.02, abs=0.001), name
            assert p.abs().max() > 0.06, name  # normal, not truncated


def test_sinusoids_have_the_size_that_the_start_needs():
    for decoder, size in (("bi", 0.25), ("uni+cross", 0.1)):
        model = make_model(tiny(init_std=0.1, decoder=decoder), "sinusoid")
        waves = model.encoder.position_embedding.weight / 0.1 / 2 ** 0.5
        close(waves[:, 0] + 1j * waves[:, 16], torch.arange(24).sin() + 1j * torch.arange(24).cos())
        close(waves[:, 15], (torch.arange(24) / 10000).sin())
        assert model.decoder.position_embedding.weight.square().mean().sqrt().item() == pytest.approx(size)


def test_each_layer_of_the_encoder_has_dropout_twice():
    for norm, layer in itertools.product(("post", "pre"), ("self_attention", "ffn")):
        block, x = maelm.Block(tiny(norm=norm), 32, 4, 0.5), torch.randn(6, 24, 32)
        block.attention_norm = block.ffn_norm = torch.nn.Identity()
        for name in ("self_attention", "ffn"):
            value = float(name == layer)
            getattr(block, name).forward = lambda x, *others, value=value: torch.full_like(x, value)
        added = (block(x) - x).round(decimals=3)
        assert added.unique().tolist() == [0, 2] and added.mean().item() == pytest.approx(1, abs=0.1)
