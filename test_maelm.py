"""Claims about the method, as tests: the file to read after maelm.py. A decorator @catches above a claim shows a wrong
version of the code that the claim finds out: in the function that it names, the second piece stands for the first.
Claims about the other files are in tests/.

    pytest                          # all of it, 10 minutes on one core; -n 2 uses two
    python test_maelm.py -h         # for classes: --blank makes an assignment, --grade marks it; docs/teaching.md
"""
if __name__ == "__main__":  # before all imports, one of which may be of a file that a student has changed
    import classroom
    classroom.main()

import contextlib
import doctest
import itertools
import math
import re
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import maelm
import rank
import train
from conftest import (TAUS, TINY, built, catches, generator, model_and_batch, moments_of, random_tokens,
                      run_with_wrong_version, svd_ranks, tiny, wrong_versions)


# ---- Section 3: removing the masked positions -----------------------------------------------------------------------
@catches("maelm.corrupt", "order.topk(k, largest=False).indices", "torch.randint(1, n - 1, (B, k))")
@catches("maelm.corrupt", "noise.order.masked_fill(special, 2.0)", "noise.order")
@catches("maelm.corrupt", "none.scatter(1, chosen[:, shown:], True)", "none")
def test_every_row_has_exactly_k_masks_and_no_special_token_among_them():
    tokens = random_tokens(50)
    masked, kept, inputs = maelm.corrupt(tokens, tiny(), generator(0))
    assert (masked.sum(1) == 6).all() and (tokens[masked] >= maelm.NUM_SPECIAL).all()
    assert kept.shape == inputs.shape == (50, 18)


def test_the_paper_masks_77_of_512():
    assert maelm.Config().masks_per_row(512) == 77


@catches("maelm.corrupt", ".view(B, -1)", ".view(B, -1).flip(1)")
def test_kept_positions_are_the_rest_in_ascending_order():
    tokens = random_tokens()
    masked, kept, inputs = maelm.corrupt(tokens, tiny(), generator(0))
    for row in range(len(tokens)):
        assert kept[row].tolist() == [i for i in range(24) if not masked[row, i]]
    assert torch.equal(inputs, tokens.gather(1, kept))


@catches("maelm.corrupt", "noise.order.masked_fill(special, 2.0)",
         "(noise.order * torch.linspace(1, 2, n)).masked_fill(special, 2.0)")
@catches("maelm.corrupt", "noise.order.masked_fill(special, 2.0)",
         "F.pad(noise.order[:, 1:-1:2].repeat_interleave(2, 1), (1, 1)).masked_fill(special, 2.0)")
@catches("maelm.corrupt", "chosen[:, shown:]", "chosen.sort(1).values[:, shown:]")
def test_masks_are_uniform_over_real_tokens():
    """Any two positions are masked together equally often, and equally often shown to the encoder together."""
    masked, kept, _ = maelm.corrupt(random_tokens(4000), tiny(mask_in_encoder=0.5), generator(0))
    shown = masked & torch.zeros_like(masked).scatter(1, kept, True)
    for drawn, k in ((masked, 6), (shown, 3)):
        x = drawn[:, 1:-1].double()
        p = torch.full((22, 22), k / 22 * (k - 1) / 21).fill_diagonal_(k / 22)
        assert ((x.T @ x / 4000 - p).abs() < 5 * (p * (1 - p) / 4000).sqrt()).all()


@catches("maelm.draw_noise", "torch.rand(2, B, n, generator=generator, device=generator.device)", "torch.rand(2, B, n)")
def test_corrupt_is_a_pure_function():
    tokens = random_tokens()
    before, state = tokens.clone(), torch.get_rng_state()
    first, second = (maelm.corrupt(tokens, tiny(), generator(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(tokens, before) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.masked, maelm.corrupt(tokens, tiny(), generator(4)).masked)


@catches("maelm.corrupt", "chosen[:, shown:]", "chosen[:, :shown]")
@catches("maelm.corrupt", "round(config.mask_in_encoder * k)", "int(config.mask_in_encoder * k)")
def test_delta_is_the_share_of_masks_that_the_encoder_reads():
    tokens = random_tokens()
    for delta, shown in ((0, 0), (0.25, 2), (0.5, 3), (0.75, 4), (1, 6)):  # of 6; round half to even
        masked, kept, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=delta), generator(0))
        at_kept = masked.gather(1, kept)
        assert masked.sum() == 6 * len(tokens) and (at_kept.sum(1) == shown).all()
        assert (inputs[at_kept] == maelm.MASK).all()
        assert torch.equal(inputs[~at_kept], tokens.gather(1, kept)[~at_kept])


@catches("maelm.draw_noise", "torch.randint(NUM_SPECIAL,", "torch.randint(0,")
@catches("maelm.draw_noise", "config.vocab_size,", "config.vocab_size - 1,")
@catches("maelm.corrupt", "fill(tokens, config, noise)", "fill(tokens, config, noise).clamp(max=config.vocab_size - 2)")
def test_random_fill_is_a_real_token_and_mostly_not_the_true_one():
    tokens = random_tokens(4000)
    masked, _, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=1.0, encoder_fill="random"), generator(0))
    assert inputs[masked].min() == maelm.NUM_SPECIAL and inputs[masked].max() == 299  # all of them are drawn
    assert (inputs[masked] == tokens[masked]).float().mean() < 0.03
    assert torch.equal(inputs[~masked], tokens[~masked])


@catches("maelm.fill", "noise.u < 0.2", "noise.u < 0.1")
def test_bert_trick_is_80_10_10():
    tokens = random_tokens(2000)
    masked, _, inputs = maelm.corrupt(tokens, tiny(mask_in_encoder=1.0, bert_trick=True), generator(0))
    filled, true = inputs[masked], tokens[masked]
    for share, event in ((0.8, filled == maelm.MASK), (0.1, filled == true), (0.1, (filled != true) & (filled > 3))):
        assert abs(event.float().mean() - share) < 0.015


def logits_at(model, tokens, corruption, at):
    """The predictions (B, k, V) of a model at positions at (B, k)."""
    h = model.encode(corruption, at)
    return model.logits(model.decode(h, tokens, corruption, at))


def test_a_row_with_too_few_real_tokens_is_refused():
    tokens = torch.full((1, 24), maelm.SEP)
    tokens[0, :5] = 10
    with pytest.raises(ValueError):
        maelm.corrupt(tokens, tiny(), generator(0))


@catches("maelm.corrupt", "read.gather(1, kept)", "tokens.gather(1, kept)")
def test_what_the_encoder_reads_does_not_depend_on_the_masked_tokens():
    for name in ("mae-lm", "mlm", "enc-mask", "random-replace"):
        config, tokens = tiny(**maelm.ABLATIONS[name]), random_tokens()
        corruption = maelm.corrupt(tokens, config, generator(1))
        changed = torch.where(corruption.masked, (tokens + 1).clamp(4, 299), tokens)
        again = maelm.corrupt(changed, config, generator(1))
        assert torch.equal(again.tokens, corruption.tokens) and torch.equal(again.kept, corruption.kept)


@catches("maelm.corrupt", "read.gather(1, kept)", "tokens.gather(1, kept)")
def test_masked_tokens_cannot_reach_the_encoder():
    for name in ("mae-lm", "mlm", "enc-mask", "cross"):
        model, tokens, corruption = model_and_batch(**maelm.ABLATIONS[name])
        changed = torch.where(corruption.masked, (tokens + 1).clamp(4, 299), tokens)
        again = maelm.corrupt(changed, model.config, generator(1))
        at = model.predicted(corruption.masked)
        assert torch.equal(logits_at(model, tokens, corruption, at), logits_at(model, changed, again, at))


@catches("maelm.MAELM.encode", "positions = kept", "pass")
@catches("maelm.RelativeBias.forward", "keys[:, None, :] - queries[:, :, None]",
         "torch.arange(keys.shape[1])[None, None] - torch.arange(queries.shape[1])[None, :, None] + 0 * keys[:, None]")
def test_removing_equals_hiding():
    """The encoder on the kept tokens = the encoder on all tokens whose masked keys are hidden."""
    for norm in ("post", "pre"):
        model, tokens, corruption = model_and_batch(norm=norm)
        all_positions = torch.arange(24).expand(len(tokens), -1)
        hidden = model.encoder(tokens, all_positions, padding=corruption.masked)
        torch.testing.assert_close(model.encode(corruption), maelm.take(hidden, corruption.kept), atol=1e-5, rtol=1e-5)


@catches("maelm.MAELM.encode", "if self.config.aligned_positions", "if not self.config.aligned_positions")
def test_encoder_positions_skip_the_removed_tokens_only_if_aligned():
    for aligned in (True, False):
        model, tokens, corruption = model_and_batch(aligned_positions=aligned)
        positions = corruption.kept if aligned else torch.arange(18).expand(6, -1)
        torch.testing.assert_close(model.encode(corruption), model.encoder(corruption.tokens, positions))
        other = torch.arange(18).expand(6, -1) if aligned else corruption.kept
        assert not torch.allclose(model.encode(corruption), model.encoder(corruption.tokens, other))


# ---- Section 3: the decoder's input ---------------------------------------------------------------------------------
@catches("maelm.MAELM.decoder_input", "if self.config.decoder_reset", "if False")
@catches("maelm.MAELM.decoder_input", "if self.config.decoder_reset", "if True")
@catches("maelm.MAELM.decoder_input", "weight[MASK]", "weight[SEP]")
def test_decoder_input_is_the_two_case_formula():
    for reset in (False, True):
        model, tokens, corruption = model_and_batch(mask_in_encoder=0.5, decoder_reset=reset)
        h = torch.randn(6, 21, 32, generator=generator(0))
        full = model.decoder_input(h, corruption)
        e_mask = model.encoder.token_embedding.weight[maelm.MASK]
        for b, i in itertools.product(range(6), range(24)):
            where = (corruption.kept[b] == i).nonzero()
            fill = len(where) == 0 or reset and corruption.masked[b, i]
            assert torch.equal(full[b, i], e_mask if fill else h[b, where[0, 0]])


def decoder_input_case(dtype=torch.float32, **fields):
    model, tokens, corruption = model_and_batch(**fields)
    h = torch.randn(*corruption.kept.shape, 32, generator=generator(0)).to(dtype).requires_grad_()
    return model.encoder.token_embedding.weight, h, corruption, model.decoder_input(h, corruption)


@catches("maelm.MAELM.decoder_input", "row_numbers(n, kept)",
         "row_numbers(n, torch.arange(kept.shape[1]).expand_as(kept))")
def test_kept_positions_get_their_representation_back():
    _, h, corruption, full = decoder_input_case()
    assert full.shape == (6, 24, 32) and torch.equal(maelm.take(full, corruption.kept), h)


def test_every_gap_holds_the_mask_embedding():
    embeddings, _, corruption, full = decoder_input_case()
    assert (full[corruption.masked] == embeddings[maelm.MASK]).all()


@catches("maelm.MAELM.decoder_input", "weight[MASK]", "weight[MASK].detach()")
def test_the_mask_embedding_learns_from_every_gap():
    embeddings, h, corruption, full = decoder_input_case()
    full.sum().backward()
    assert (embeddings.grad[maelm.MASK] == corruption.masked.sum()).all() and (h.grad == 1).all()


@catches("maelm.MAELM.decoder_input", ".to(h.dtype)", "")
def test_the_decoder_input_has_the_precision_of_the_encoder():
    assert decoder_input_case(torch.bfloat16)[3].dtype == torch.bfloat16


@catches("maelm.MAELM.decode", "torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)", "tokens")
@catches("maelm.causal_bias", "keys[:, None, None, :] > queries", "keys[:, None, None, :] < queries")
def test_uni_decoder_cannot_see_the_future():
    model, tokens, corruption = model_and_batch(decoder_self="uni", decoder_cross=True)
    at = model.predicted(corruption.masked)
    assert at[0].tolist() == list(range(1, 24))
    changed = tokens.clone()
    changed[:, 15:] = 42
    a, b = logits_at(model, tokens, corruption, at), logits_at(model, changed, corruption, at)
    assert torch.equal(a[:, :15], b[:, :15]) and not torch.allclose(a[:, 15:], b[:, 15:])


# ---- Section 4.1: relative positions --------------------------------------------------------------------------------
@catches("maelm.relative_bucket", "where(distance > 0", "where(distance < 0")
@catches("maelm.relative_bucket", "exact = half // 2", "exact = half // 4")
def test_relative_buckets_are_t5s():
    def naive(r, buckets, farthest):
        half, size = buckets // 2, abs(r)
        exact = half // 2
        if size >= exact:  # the largest bucket whose start exact * (farthest / exact)^(i / (half - exact)) is <= size
            size = max(i for i in range(half - exact)
                       if exact ** (half - exact - i) * farthest ** i <= size ** (half - exact)) + exact
        return size + half * (r > 0)

    for buckets, farthest in ((32, 128), (64, 128), (128, 256), (8, 20)):
        found = maelm.relative_bucket(torch.arange(-600, 601), buckets, farthest)
        assert torch.equal(found, torch.tensor([naive(i, buckets, farthest) for i in range(-600, 601)]))


def test_relative_buckets_agree_with_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention
    r = torch.arange(-511, 512)
    for buckets, farthest in ((32, 128), (64, 128), (128, 256)):
        theirs = T5Attention._relative_position_bucket(r, True, buckets, farthest)
        assert torch.equal(maelm.relative_bucket(r, buckets, farthest), theirs)


@catches("maelm.relative_bucket", "where(distance > 0", "where(distance >= 0")
def test_near_distances_have_buckets_of_their_own():
    r = torch.tensor([[-7, -2, -1, 0], [1, 2, 6, 7]])
    assert maelm.relative_bucket(r, 32, 128).tolist() == [[7, 2, 1, 0], [17, 18, 22, 23]]


@catches("maelm.relative_bucket", "distance.abs()", "distance.clamp(min=0)")
def test_the_right_half_mirrors_the_left():
    r = torch.arange(1, 300)
    assert torch.equal(maelm.relative_bucket(r, 32, 128), 16 + maelm.relative_bucket(-r, 32, 128))


@catches("maelm.relative_bucket", "far = far.clamp(max=half - 1)", "pass")
def test_all_far_distances_share_the_last_bucket():
    r = torch.tensor([128, 129, 1000, 10 ** 6])
    assert (maelm.relative_bucket(r, 32, 128) == 31).all() and (maelm.relative_bucket(-r, 32, 128) == 15).all()


@catches("maelm.relative_bucket", ".double() / exact)", ".double())")
def test_buckets_never_fall_with_distance_and_all_are_used():
    for buckets, farthest in ((32, 128), (128, 256), (4, 9)):
        found = maelm.relative_bucket(-torch.arange(farthest), buckets, farthest)
        assert found.dtype == torch.int64 and found.unique().tolist() == list(range(buckets // 2))
        assert (found.diff() >= 0).all()


def bias_table():
    bias = maelm.RelativeBias(tiny())
    with torch.no_grad():
        bias.table.weight.copy_(torch.arange(32.0)[:, None] + torch.arange(4) * 100)
    return bias


@catches("maelm.RelativeBias.forward", "keys[:, None, :] - queries[:, :, None]",
         "queries[:, :, None] - keys[:, None, :]")
@catches("maelm.RelativeBias.forward", "// 2)", "// 2 + 1)")
@catches("maelm.RelativeBias.forward", "keys[:, None, :] - queries[:, :, None]",
         "torch.arange(keys.shape[1]) + 0 * keys[:, None] - torch.arange(queries.shape[1])[:, None]")
def test_relative_bias_is_a_function_of_key_minus_query():
    keys = torch.tensor([[0, 3, 4, 20]])
    got = bias_table()(keys, keys)
    for i, j, head in itertools.product(range(4), range(4), range(4)):
        bucket = maelm.relative_bucket(keys[0, j] - keys[0, i], 32, 128)
        assert got[0, head, i, j] == bucket + 100 * head


@catches("maelm.RelativeBias.forward", "keys[:, None, :]", "keys[:1, None, :]")
def test_relative_bias_is_of_query_then_key_in_every_row():
    queries, keys = torch.tensor([[0, 5], [9, 2]]), torch.tensor([[0, 1, 23], [2, 4, 9]])
    distances = torch.tensor([[[0, 1, 23], [-5, -4, 18]], [[-7, -5, 0], [0, 2, 7]]])
    expected = maelm.relative_bucket(distances, 32, 128)[:, None] + 100 * torch.arange(4)[None, :, None, None]
    assert torch.equal(bias_table()(queries, keys), expected.float())


def test_one_row_of_positions_is_enough():
    positions = torch.arange(24)[None]
    got = bias_table()(positions, positions)
    assert got.shape == (1, 4, 24, 24) and torch.equal(got[0, :, :-1, :-1], got[0, :, 1:, 1:])


@catches("maelm.RelativeBias.forward", "self.table(self.bucket)", "self.table(self.bucket).detach()")
def test_the_gradient_of_a_bias_counts_its_uses():
    bias, positions = bias_table(), torch.tensor([[0, 1, 3]])
    bias(positions, positions).sum().backward()
    used = {0: 3, 1: 1, 17: 1, 3: 1, 19: 1, 2: 1, 18: 1}
    assert bias.table.weight.grad.tolist() == [[used.get(b, 0)] * 4 for b in range(32)]


@pytest.mark.parametrize("m", [18, 20, 24])
def test_a_bias_lies_in_memory_as_fused_kernels_want_it(m):
    bias = maelm.RelativeBias(tiny())
    positions = torch.arange(24).expand(3, -1)[:, :m]
    found = bias(positions, positions)
    assert found.shape == (3, 4, m, m) and found.stride(-1) == 1 and all(s % 8 == 0 for s in found.stride()[:-1])


# ---- Section 2.1: attention -----------------------------------------------------------------------------------------
@catches("maelm.attention", "logits + bias", "logits + bias.detach()")
@catches("maelm.attention", "(q * d_h ** -0.5)", "q")
def test_attention_is_the_formula_in_float64_with_gradient_of_the_bias():
    def drawn(i, *shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator(i), requires_grad=True)

    q, k, v = (drawn(i, 2, 3, 5, 4) for i in range(3))
    bias = drawn(3, 2, 3, 5, 5)
    weights = torch.empty(2, 3, 5, 5, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(3), range(5)):
        logits = torch.stack([q[b, h, i] @ k[b, h, j] / 2 + bias[b, h, i, j] for j in range(5)])
        weights[b, h, i] = logits.exp() / logits.exp().sum()
    ours, direct = maelm.attention(q, k, v, bias), weights @ v
    torch.testing.assert_close(ours, direct, check_dtype=False, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v, bias), retain_graph=True) for out in (ours, direct)]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def random_heads(*lengths, d=4):
    return [torch.randn(2, 3, length, d, generator=generator(i)) for i, length in enumerate(lengths)]


@catches("maelm.attention", "softmax(dim=-1)", "softmax(dim=-2)")
def test_equal_keys_get_equal_weights():
    q, k, v = random_heads(5, 7, 7)
    torch.testing.assert_close(maelm.attention(q, 0 * k, v), v.mean(2, keepdim=True).expand_as(q))


@catches("maelm.attention", "logits + bias", "logits + bias.transpose(-2, -1)")
def test_a_key_hidden_by_the_bias_is_as_if_absent():
    q, k, v = random_heads(5, 7, 7)
    bias = torch.zeros(1, 1, 5, 7).index_fill(3, torch.tensor([2]), -torch.inf)
    rest = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(maelm.attention(q, k, v, bias), maelm.attention(q, k[:, :, rest], v[:, :, rest]))


def test_the_bias_is_of_query_then_key():
    q, k, v = random_heads(4, 4, 4)
    chosen = torch.tensor([2, 3, 1, 0])  # query i looks at key chosen[i] only
    bias = 1000 * F.one_hot(chosen).float().expand(1, 3, 4, 4)
    torch.testing.assert_close(maelm.attention(q, k, v, bias), v[:, :, chosen])


@catches("maelm.attention", "** -0.5", "** -1")
def test_logits_are_divided_by_the_root_of_the_head_size():
    for d in (4, 9):
        q, k, v = random_heads(5, 7, 7, d=d)
        theirs = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(maelm.attention(q, k, v), theirs, atol=1e-5, rtol=1e-5)


@catches("maelm.attention", "F.dropout(weights, p) @ v", "weights @ v")
@catches("maelm.attention", "dropout(weights, p) @ v", "dropout(weights @ v, p)")
def test_attention_drops_weights_out():
    q, k = torch.zeros(2, 1, 1, 500, 4)
    out = maelm.attention(q, k, torch.ones(1, 1, 500, 4), None, 0.5)  # of 500 equal weights, half are doubled
    assert torch.allclose(out, out[..., :1]) and abs(out.mean() - 1) < 0.01 and 0.03 < out.std() < 0.06


@catches("maelm.attention", "if q.is_cuda:", "if False:")
def test_on_a_gpu_attention_is_one_fused_kernel(monkeypatch):
    from torch._subclasses import FakeTensorMode
    calls = []

    def fused(q, k, v, attn_mask, dropout_p):
        calls.append((attn_mask.shape, dropout_p))
        return q

    monkeypatch.setattr(maelm.F, "scaled_dot_product_attention", fused)
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, device="cuda")
        maelm.attention(q, q, q, torch.empty(2, 4, 8, 8, device="cuda"), 0.1)
    assert calls == [((2, 4, 8, 8), 0.1)]


@catches("maelm.LayerNorm.forward", "enabled=False", "enabled=True")
@catches("maelm.LayerNorm.forward", "if not x.is_cuda:", "if True:")
def test_on_a_gpu_a_layer_norm_is_in_the_dtype_of_its_input_whatever_autocast_would_do(monkeypatch):
    calls = []

    def autocast(kind, enabled):
        calls.append((kind, enabled))
        return contextlib.nullcontext()

    def layer_norm(x, shape, weight, bias, eps):
        calls.append((weight.dtype, bias.dtype))

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(F, "layer_norm", layer_norm)
    on_gpu = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)
    maelm.LayerNorm(8)(on_gpu)
    assert calls == [("cuda", False), (torch.bfloat16, torch.bfloat16)]


def attention_layer(dropout=0.0):
    torch.manual_seed(0)
    layer = maelm.Attention(8, 2, dropout).eval()
    x, y = torch.randn(2, 3, 5, 8, generator=generator(0))
    return layer, x, torch.cat([y, x[:, :2]], dim=1)


@catches("maelm.Attention.forward", "k, v = self", "v, k = self")
@catches("maelm.Attention.forward", "self.key_value(y)", "self.key_value(x)")
@catches("maelm.Attention.forward", "self.output(z", "(z")
@catches("maelm.Attention.forward", "z.transpose(1, 2).flatten(2)", "z.reshape(*x.shape)")
def test_queries_are_from_x_and_keys_and_values_from_y():
    layer, x, y = attention_layer()
    q, (k, v) = layer.query(x), layer.key_value(y).chunk(2, dim=-1)
    heads = [(q[..., h] @ k[..., h].transpose(1, 2) / 2).softmax(-1) @ v[..., h] for h in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(layer(x, y), layer.output(torch.cat(heads, -1)), atol=1e-5, rtol=1e-5)


@catches("maelm.Attention.forward", "bias, p)", "None, p)")
def test_each_head_has_a_bias_of_its_own():
    layer, x, y = attention_layer()
    chosen = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])  # head, query -> key
    v = layer.key_value(y).chunk(2, dim=-1)[1]
    expected = torch.cat([v[:, chosen[0], :4], v[:, chosen[1], 4:]], dim=-1)
    got = layer(x, y, 1000 * F.one_hot(chosen, 7).float()[None])
    torch.testing.assert_close(got, layer.output(expected), atol=1e-5, rtol=1e-4)


@catches("maelm.Attention.forward", "self.p if self.training else 0.0", "self.p")
@catches("maelm.Attention.forward", "self.p if self.training else 0.0", "0.0")
def test_attention_has_dropout_in_training_only():
    layer, x, y = attention_layer(dropout=0.5)
    calm = layer(x, y)
    assert torch.equal(layer(x, y), calm) and not torch.allclose(layer.train()(x, y), calm)


# ---- Section 2.1: layers and the encoder ----------------------------------------------------------------------------
@catches("maelm.Block.__init__", "nn.GELU(), nn.Linear(4", 'nn.GELU("tanh"), nn.Linear(4')
@catches("maelm.Residual.after", "return x if self.pre else self.norm(x)", "return self.norm(x)")
def test_a_layer_equals_pytorchs_own():
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        block = maelm.Block(tiny(norm=norm), 32, 0.0).eval()
        theirs = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, F.gelu, norm_first=norm == "pre", batch_first=True)
        attention = block.self_attention.f
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key_value.weight]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key_value.bias]))
        theirs.self_attn.out_proj.load_state_dict(attention.output.state_dict())
        for ours, name in ((block.ffn.f[0], "linear1"), (block.ffn.f[2], "linear2"),
                           (block.self_attention.norm, "norm1"), (block.ffn.norm, "norm2")):
            getattr(theirs, name).load_state_dict(ours.state_dict())
        x = torch.randn(2, 7, 32, generator=generator(0))
        torch.testing.assert_close(block(x), theirs(x), atol=1e-5, rtol=1e-5)


@catches("maelm.Encoder.forward", " + self.position_embedding(positions)", "")
@catches("maelm.Encoder.forward", "embedding(positions)", "embedding(torch.arange(tokens.shape[1]))")
@catches("maelm.Encoder.forward", "self.norm(h)", "h")
@catches("maelm.Encoder.forward", "self.final_norm(", "(")
def test_the_encoder_is_its_parts_in_order():
    for norm in ("post", "pre"):
        model, _, (_, kept, tokens) = model_and_batch(norm=norm)
        e, bias = model.encoder, model.encoder.bias(kept, kept)
        h = e.norm(e.token_embedding(tokens) + e.position_embedding(kept))
        torch.testing.assert_close(e(tokens, kept), e.final_norm(e.blocks[1](e.blocks[0](h, bias), bias)))


@catches("maelm.Encoder.forward", "return states if", "return states[1:] if")
def test_all_layers_are_the_embedding_output_and_every_layer():
    model, tokens, _ = model_and_batch(norm="pre")
    positions = torch.arange(24)[None]
    states = model.encoder(tokens, positions, all_layers=True)
    assert len(states) == 3 and torch.equal(states[-1], model.encoder(tokens, positions))
    embedded = model.encoder.token_embedding(tokens) + model.encoder.position_embedding(positions)
    torch.testing.assert_close(states[0], model.encoder.norm(embedded))


@catches("maelm.attention_bias", "hide(padding)", "hide(~padding)")
@catches("maelm.Encoder.forward", "bias = attention_bias(self.bias, positions, positions, padding)",
         "bias = self.bias(positions, positions)")
def test_padding_changes_nothing():
    model, tokens, _ = model_and_batch()
    positions = torch.arange(24)[None]
    short = model.encoder(tokens[:, :10], positions[:, :10])
    padded = tokens.clone()
    padded[:, 10:] = maelm.PAD
    long = model.encoder(padded, positions, padding=(positions >= 10).expand(6, -1))
    torch.testing.assert_close(short, long[:, :10], atol=1e-5, rtol=1e-5)


@catches("maelm.Block.forward", "layer.f(take(keys, at), keys, bias)", "layer.f(take(keys, at), take(keys, at), bias)")
def test_last_layer_at_masked_positions_equals_the_full_layer():
    for fields in (dict(), dict(norm="pre"), dict(decoder_cross=True), dict(decoder_self="none", decoder_cross=True)):
        model, tokens, corruption = model_and_batch(**fields)
        at, everywhere = model.predicted(corruption.masked), torch.arange(24).expand(6, -1)
        full = logits_at(model, tokens, corruption, everywhere)
        torch.testing.assert_close(logits_at(model, tokens, corruption, at), maelm.take(full, at), atol=1e-5, rtol=1e-4)
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    at = model.predicted(corruption.masked)
    full = maelm.take(model.encode(corruption), at)
    torch.testing.assert_close(model.encode(corruption, at), full, atol=1e-5, rtol=1e-4)


@catches("maelm.Encoder.forward", "self.p, self.training", "self.p, True")
@catches("maelm.Encoder.forward", "self.p, self.training", "0.0, self.training")
def test_embeddings_have_dropout_in_training_only():
    model, tokens, _ = model_and_batch(dropout=0.5, encoder_layers=1)
    calm, again, training = (model.encoder.train(on)(tokens, torch.arange(24)[None], all_layers=True)[0]
                             for on in (False, False, True))
    assert torch.equal(calm, again) and abs((training == 0).float().mean() - 0.5) < 0.05


@catches("maelm.Decoder.__init__", "Block(config, d, 0.0,", "Block(config, d, config.dropout,")
def test_dropout_is_in_the_encoder_and_not_in_the_decoder():
    model, tokens, corruption = model_and_batch(dropout=0.5)
    model.train()
    at = model.predicted(corruption.masked)
    assert not torch.allclose(model.encode(corruption), model.encode(corruption))
    h = model.encode(corruption)
    x = model.decoder_input(h, corruption)
    assert torch.equal(model.decoder(x, h, at), model.decoder(x, h, at))


@catches("maelm.MAELM.init_parameters", "nn.init.normal_(parameter, std=config.init_std)",
         "nn.init.trunc_normal_(parameter, std=config.init_std, a=-0.04, b=0.04)")
def test_initial_weights_are_normal_with_the_stated_deviation():
    torch.manual_seed(0)
    model = maelm.MAELM(tiny(encoder_dim=256, init_std=0.02))
    for name, p in model.named_parameters():
        expected = 1.0 if "norm" in name and "weight" in name or name == "head.transform.2.weight" else 0.0
        if p.ndim == 1:
            assert (p == expected).all(), name
        elif p.numel() > 5000:
            assert abs(p.std() - 0.02) < 0.001 and p.abs().max() > 0.06, name  # normal, not truncated


# ---- Eq. (1): the loss ----------------------------------------------------------------------------------------------
@catches("maelm.MAELM.predicted", "return masked.int().topk(self.config.masks_per_row(n)).indices",
         "return torch.arange(n).expand(B, -1)")
@catches("maelm.MAELM.forward", "self.predicted(corruption.masked)", "corruption.kept")
@catches("maelm.MAELM.forward", ".flatten())", '.flatten(), reduction="sum")')
@catches("maelm.MAELM.forward", "tokens.gather(1, at)", "tokens[:, :at.shape[1]]")
def test_loss_is_the_mean_negative_log_likelihood_over_masked_positions():
    model, tokens, corruption = model_and_batch()
    everywhere = torch.arange(24).expand(6, -1)
    log_p = logits_at(model, tokens, corruption, everywhere).log_softmax(-1)
    by_hand = [-log_p[b, i, tokens[b, i]] for b, i in corruption.masked.nonzero().tolist()]
    assert len(by_hand) == 36
    torch.testing.assert_close(model(tokens, corruption), torch.stack(by_hand).mean())


def test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary():
    model, tokens, corruption = model_and_batch()
    for p in (model.head.bias, model.head.transform[2].weight, model.head.transform[2].bias):
        torch.nn.init.zeros_(p)
    assert model(tokens, corruption).item() == pytest.approx(math.log(300))


@catches("maelm.MAELM.forward", "self.predicted(corruption.masked)", "torch.arange(tokens.shape[1]).expand_as(tokens)")
def test_only_the_masked_tokens_are_targets():
    model, tokens, corruption = model_and_batch()
    loss, other = model(tokens, corruption), tokens.roll(1, dims=0)
    assert torch.equal(model(torch.where(corruption.masked, tokens, other), corruption), loss)
    assert not torch.allclose(model(torch.where(corruption.masked, other, tokens), corruption), loss)


@catches("maelm.MAELM.forward", "self.predicted(corruption.masked)",
         "corruption.masked.int().topk(self.config.masks_per_row(24)).indices")
def test_a_uni_directional_decoder_predicts_all_tokens_but_the_first():
    model, tokens, corruption = model_and_batch(decoder_self="uni", decoder_cross=True)
    log_p = logits_at(model, tokens, corruption, torch.arange(1, 24).expand(6, -1)).log_softmax(-1)
    by_hand = -torch.stack([log_p[b, i - 1, tokens[b, i]] for b, i in itertools.product(range(6), range(1, 24))]).mean()
    torch.testing.assert_close(model(tokens, corruption), by_hand)


@catches("maelm.Encoder.forward", "positions.expand(len(at), -1).gather(1, at)",
         "positions.expand(len(at), -1)[:, :at.shape[1]]")
def test_mlm_is_the_textbook_mlm():
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    h = model.encoder(tokens.masked_fill(corruption.masked, maelm.MASK), torch.arange(24).expand(6, -1))
    logits = F.linear(model.head.transform(h), model.encoder.token_embedding.weight, model.head.bias)
    loss = F.cross_entropy(logits[corruption.masked], tokens[corruption.masked])
    torch.testing.assert_close(model(tokens, corruption), loss)


@catches("maelm.MAELM.logits", "token_embedding.weight", "token_embedding.weight.detach()")
def test_output_embeddings_are_the_input_embeddings():
    model, tokens, corruption = model_and_batch()
    model(tokens, corruption).backward()
    absent = sorted(set(range(4, 300)) - set(tokens.flatten().tolist()))
    assert model.encoder.token_embedding.weight.grad[absent].abs().sum() > 0  # through the softmax alone


@catches("maelm.MAELM.decoder_input", "x.view(B, n, -1)", "h")
def test_the_example_at_the_head_of_maelm_is_what_it_prints():
    found = doctest.testmod(maelm)
    assert found.attempted == 6 and found.failed == 0


# ---- Section 4.1, Table 2: sizes and ablations ----------------------------------------------------------------------
@pytest.mark.parametrize("ablation", maelm.ABLATIONS)
def test_every_row_of_table_2_learns_and_uses_all_its_parameters(ablation):
    config = train.make_config("small", ablation, **{k: v for k, v in TINY.items() if k != "decoder_layers"})
    torch.manual_seed(0)
    model = maelm.MAELM(replace(config, init_std=0.1))
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


@catches("train.make_config", "* encoder_heads)", "* Config.encoder_heads)")
def test_table_2_widths_keep_their_ratio_to_the_encoder_in_whole_heads():
    for ablation, base, half, large in (("dec-512", 512, 256, 704), ("dec-1024", 1024, 512, 1344)):
        assert train.make_config("base", ablation).decoder_dim == base
        assert train.make_config("base", ablation, encoder_dim=384, encoder_heads=6).decoder_dim == half
        assert train.make_config("large++", ablation).decoder_dim == large  # 11 and 21 heads of 64
        assert train.make_config("base", ablation, decoder_dim=64).decoder_dim == 64


@catches("train.make_config", "/ Config.decoder_layers", "/ Config.encoder_layers")
@catches("train.make_config", "if not layers.is_integer():", "if False:")
@catches("train.make_config", "if field not in flags", "")
def test_table_2_depths_keep_their_ratio_to_the_decoder_of_the_preset():
    depth = lambda preset, ablation, **flags: train.make_config(preset, ablation, **flags).decoder_layers  # noqa: E731
    assert [depth("base", "dec-2"), depth("base", "dec-6")] == [2, 6]
    assert [depth("large++", "dec-6"), depth("toy", "mlm")] == [6, 0]
    assert [depth("small", "dec-2"), depth("small", "dec-6"), depth("base", "dec-6", encoder_layers=6)] == [1, 3, 6]
    for ablation, layers in (("dec-2", "0.5"), ("dec-6", "1.5")):  # the toy's decoder has one layer
        with pytest.raises(ValueError, match=f"decoder_layers={layers}: .*give --decoder-layers"):
            train.make_config("toy", ablation)
        assert depth("toy", ablation, decoder_layers=2) == 2


@pytest.mark.parametrize("preset, encoder, total", [("base", 110_616_960, 139_988_098),
                                                    ("base++", 134_603_520, 164_005_890),
                                                    ("large++", 368_375_808, 420_402_690)])
def test_parameter_counts_differ_from_the_official_model_by_two_vocabulary_rows_only(preset, encoder, total):
    config = train.make_config(preset)
    with torch.device("meta"):
        parts = maelm.Encoder(config), maelm.Decoder(config), maelm.Head(config)
    counts = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert counts[0] == encoder - 2 * config.encoder_dim
    assert sum(counts) == total - 2 * (config.encoder_dim + 1)


@pytest.mark.parametrize("fields", [
    dict(mask_rate=1.5), dict(decoder_layers=0), dict(decoder_self="uni"), dict(norm="mid"), dict(encoder_heads=5),
    dict(rel_pos_buckets=7), dict(decoder_dim=33), dict(dropout=1.0), dict(vocab_size=100), dict(encoder_fill="zeros"),
    dict(mask_in_encoder=-0.1), dict(bert_trick=True), dict(decoder_position_std=0.0)])
def test_a_bad_field_is_named_with_its_value(fields):
    (name, value), = fields.items()
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}: "):
        tiny(**fields)


# ---- Section 2: effective rank (rank.py) ----------------------------------------------------------------------------
@catches("rank.tau_rank", "reached = values.cumsum(0)", "values = values.sqrt()\n    reached = values.cumsum(0)")
@catches("rank.Moments.spectrum", "if centered:", "if not centered:")
@catches("rank.Moments.spectrum", "about(torch.zeros_like(self.shift)).gram", "gram")
@catches("rank.Moments.add", "self.shift = h.mean(0).to(self.shift)", "pass")
@catches("rank.Moments.add", "(y.T @ y).to", "(y.bfloat16().T @ y.bfloat16()).to")
@catches("rank.effective_rank", "svdvals(x) ** 2", "svdvals(x)")
@catches("rank.effective_rank", "values.clamp(min=0)", "values.clamp(min=0) ** 2")
@catches("rank.effective_rank", "square and torch", "square or torch")
def test_rank_is_exact_on_built_spectra():
    for kind, centered in itertools.product(("geometric", "power", "two-step", "rogue"), (False, True)):
        h = built(kind)
        expected, squares = svd_ranks(h, centered)
        x = h.astype(np.float64) - h.astype(np.float64).mean(0) * centered
        assert [rank.effective_rank(x, tau) for tau in TAUS] == expected, kind
        assert [rank.effective_rank(torch.from_numpy(x.T @ x), tau) for tau in TAUS] == expected, kind
        for sizes in (2000, 64, [1, 999, 7, 993], [1500, 500]):
            values = moments_of(h, sizes).spectrum(centered)
            assert [rank.tau_rank(values, tau) for tau in TAUS] == expected, (kind, centered, sizes)
            np.testing.assert_allclose(values.numpy(), squares, rtol=2e-5, atol=1e-6 * squares[1])


@catches("rank.tau_rank", "values.cumsum(0)", "values.sqrt().cumsum(0)")
@catches("rank.tau_rank", "* values.sum()", "* values.sqrt().sum()")
@catches("rank.tau_rank", ".sum()) + 1", ".sum())")
def test_rank_is_the_smallest_k_whose_values_sum_to_tau():
    values = torch.tensor([16.0, 9, 4, 1], dtype=torch.float64)
    assert [rank.tau_rank(values, tau) for tau in (0.5, 0.54, 0.8, 0.9, 0.97)] == [1, 2, 2, 3, 4]


@catches("rank.tau_rank", "(tau - 1e-9)", "tau")
def test_equal_singular_values_count_exactly():
    for d, tau, value in itertools.product((3, 10, 64), TAUS, (1, 0.1, 1 / 3)):
        k = int(np.ceil(tau * d - 1e-9))
        assert rank.tau_rank(torch.full((d,), value, dtype=torch.float64), tau) == k, (d, tau, value)


@catches("rank.tau_rank", "if values[0] == 0:", "if False:")
def test_no_variance_has_rank_none():
    assert rank.tau_rank(torch.zeros(3, dtype=torch.float64), 0.9) == 0


@catches("rank.tau_rank", "0 < tau < 1:", "0 <= tau <= 1:")
def test_tau_must_be_a_share():
    for tau in (-0.1, 0, 1, 1.5):
        with pytest.raises(ValueError):
            rank.tau_rank(torch.ones(3, dtype=torch.float64), tau)


@catches("rank.effective_rank", "eigvalsh(x).flip(0)", "eigvalsh(x)")
@catches("rank.effective_rank", "if not is_gram:", "if not square:")
def test_a_gram_matrix_has_the_rank_of_its_matrix():
    for h in (torch.from_numpy(built("geometric")).double(), torch.eye(10).repeat(3, 1),
              torch.randn(9, 9, generator=generator(0)).triu().double()):
        assert [rank.effective_rank(h.T @ h, tau) for tau in TAUS] == [rank.effective_rank(h, tau) for tau in TAUS]


@catches("rank.effective_rank", "svdvals(x)", "svdvals(x - x.mean(0))")
def test_the_mean_is_not_subtracted():
    h = 10 + torch.randn(200, 8, generator=generator(0))
    assert (rank.effective_rank(h, 0.95), rank.effective_rank(h - h.mean(0), 0.95)) == (1, 8)


@catches("rank.effective_rank", "** 2, tau)", "** 2, 0.9)")
def test_rank_depends_on_the_spectrum_alone():
    h = torch.from_numpy(built("power")).double()
    rotation = torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64, generator=generator(0))).Q
    ranks = {tau: rank.effective_rank(h, tau) for tau in TAUS}
    assert len(set(ranks.values())) > 2
    for same_spectrum in (h @ rotation, 1e-3 * h, h.flip(0), torch.cat([h, h])):
        assert {tau: rank.effective_rank(same_spectrum, tau) for tau in TAUS} == ranks


@catches("rank.effective_rank", "values[-1] < -1e-6", "values[-1] < -1e6")
def test_what_has_no_rank_is_refused():
    for h in (np.ones(5), np.full((5, 3), np.nan), np.ones((0, 3)), -np.eye(3)):
        with pytest.raises(ValueError):
            rank.effective_rank(h)


@catches("rank.Moments.about", "self.count * torch.outer(delta, delta)", "torch.outer(delta, delta)")
@catches("rank.combine", "part = part.about(shift)", "pass")
def test_moments_of_parts_are_the_moments_of_the_whole():
    h = built("rogue")
    whole, parts = moments_of(h, 100), [moments_of(part, 50) for part in np.array_split(h, 5)]
    times = (2, 0, 1, 3, 0)
    again = np.concatenate([np.repeat(part, n, axis=0) for part, n in zip(np.array_split(h, 5), times)])
    for centered in (False, True):
        for ours, theirs in ((rank.combine(parts), whole),
                             (rank.combine([whole, parts[0]], [1, -1]), moments_of(h[400:], 100)),
                             (rank.combine(parts, list(times)), moments_of(again, 100))):
            assert ours.count == theirs.count
            torch.testing.assert_close(ours.spectrum(centered), theirs.spectrum(centered), rtol=2e-5, atol=0.02)
            assert abs(ours.mean_cosine() - theirs.mean_cosine()) < 1e-6


@catches("rank.Moments.spectrum", "if gram.trace() <= 1e-12 * whole.trace():", "if False:")
def test_equal_rows_have_rank_one_and_without_their_mean_none():
    random = np.random.default_rng(0)
    rounding = 1 + 1e-7 * random.standard_normal((500, 16))
    h = (random.standard_normal(16) * rounding).astype(np.float32)
    moments = moments_of(h, 33)
    assert [rank.tau_rank(moments.spectrum(centered), 0.9) for centered in (False, True)] == [1, 0]
    assert abs(moments.mean_cosine() - 1) < 1e-5 and rank.effective_rank(np.zeros((5, 3))) == 0


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)

