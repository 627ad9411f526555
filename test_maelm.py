"""Claims about the method, as tests: the file to read after maelm.py. In the course, a claim with @task is worth a
point. A gate is a claim about a silent error: a task that fails it gets no points.

    pytest test_maelm.py
"""
import pytest
import torch
import torch.nn.functional as F

import maelm
from conftest import close, generator, model_and_batch, on_meta, random_tokens, task, tiny

OTHER = dict(vocab_size=50, seq_len=40, encoder_dim=24, encoder_heads=2, rel_pos_buckets=8, rel_pos_max_distance=20)


def exact(found, expected, hint=""):
    """Fails with a hint unless two tensors are equal and have the same shape and dtype."""
    close(found, expected, hint, rtol=0, atol=0)


def at_positions(x, at):
    """x (B, n, d) at the positions `at` (B, k) -> (B, k, d)."""
    return torch.take_along_dim(x, at[:, :, None], dim=1)


def all_learn(loss, module):
    """Fails unless a loss has a gradient for every parameter of a module."""
    assert loss.requires_grad, "no gradient flows back from this result: is it detached?"
    loss.backward()
    lost = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert lost == [], f"after one backward pass, {lost} have no gradient: they would never learn"


def is_masked(corruption):
    """(B, n) bool, True at the masked positions."""
    return torch.zeros_like(corruption.corrupted).scatter(1, corruption.masked, 1).bool()


# ---- Section 3: removing the masked positions -----------------------------------------------------------------------
@task("corrupt", gate=True)
def test_every_sequence_has_exactly_m_masks():
    for rate, n, m in ((0.25, 24, 6), (0.15, 24, 4), (0.25, 30, 8)):  # rounded to the nearest integer; half to even
        corrupted, masked, kept = maelm.corrupt(random_tokens(50, n), tiny(mask_rate=rate), generator(0))
        assert masked.shape == (50, m) and kept.shape == (50, n - m), f"rate {rate}: {m} of {n} tokens must be masked"
        assert {x.dtype for x in (corrupted, masked, kept)} == {torch.int64}, "tokens and positions must be int64"
        assert (corrupted == maelm.MASK).sum(1).tolist() == [m] * 50, "a sequence has too few or too many [MASK] tokens"


@task("corrupt", gate=True)
def test_only_real_or_given_positions_are_masked():
    tokens = random_tokens(50)
    tokens[:, 3:6] = torch.tensor([maelm.PAD, maelm.SEP, maelm.MASK])
    masked = maelm.corrupt(tokens, tiny(), generator(0)).masked
    assert tokens.gather(1, masked).min() >= maelm.NUM_SPECIAL, "a special token is masked"
    given = (torch.arange(24) < 6).expand(4000, -1)  # as many positions as masks, some with special tokens
    masked = maelm.draw_masks(given, 6, generator(0))
    exact(masked.sort(1).values, torch.arange(6).expand(4000, -1), "only these six positions may be masked")
    single = torch.tensor([[3], [23], [0]])
    masked = maelm.draw_masks(torch.arange(24) == single, 1, generator(0))
    exact(masked, single, "a sequence has a single maskable token")
    tokens[2] = torch.tensor([maelm.NUM_SPECIAL, 9999, 5, 6, 7] + [maelm.CLS] * 19)  # five real tokens
    for refused, rate in ((tokens, 0.25), (random_tokens(), 0.02)):  # 5 real tokens for 6 masks; 0 masks
        with pytest.raises(ValueError):
            maelm.corrupt(refused, tiny(mask_rate=rate), generator(0))
    masked = maelm.corrupt(tokens, tiny(mask_rate=0.2, vocab_size=10000), generator(0)).masked[2]
    assert sorted(masked.tolist()) == [0, 1, 2, 3, 4], "all ids from NUM_SPECIAL up must be maskable"


@task("corrupt", gate=True)
def test_all_else_is_kept_in_order_and_unchanged():
    tokens = random_tokens()
    corrupted, masked, kept = maelm.corrupt(tokens, tiny(), generator(0))
    rest = [[i for i in range(24) if i not in row] for row in masked.tolist()]
    assert kept.tolist() == rest, "the encoder must see all positions that are not masked, from left to right"
    exact(corrupted, tokens.scatter(1, masked, maelm.MASK), "the text differs at a position that is not masked")


@task("corrupt", gate=True)
def test_masks_are_uniform_over_real_tokens():
    tokens = random_tokens(4000)
    corruption = maelm.corrupt(tokens, tiny(mask_in_encoder=0.5), generator(0))
    seen = is_masked(corruption) * torch.zeros_like(tokens).scatter(1, corruption.kept, 1)
    for drawn, m in ((is_masked(corruption), 6), (seen, 3)):
        x = drawn[:, 1:-1].double()
        p = torch.full((22, 22), m / 22 * (m - 1) / 21).fill_diagonal_(m / 22)
        deviations = (x.T @ x / 4000 - p).abs() / (p * (1 - p) / 4000).sqrt()
        assert deviations.max() < 5, "some positions, or pairs of positions, are drawn more often than others"
    pairs = maelm.draw_masks(torch.ones(4000, 4).bool(), 2, generator(0))
    rising = (pairs[:, 0] < pairs[:, 1]).double().mean()
    assert 0.45 < rising < 0.55, "not all orders of the masked positions are equally likely"
    sets = corruption.masked.sort(1).values.unique(dim=0)  # by chance, 106 of 4,000 are double
    assert 3850 < len(sets) < 3940, "sequences share masks: each must draw its own"
    first = maelm.draw_masks(torch.ones(10_000, 1000).bool(), 1, generator(0)).double().mean()
    assert 486 < first < 513, f"of 1,000 positions, {first:.0f} is the mean of the first mask: are some numbers equal?"


@task("corrupt", gate=True)
def test_corrupt_is_a_pure_function():
    tokens, config = random_tokens(), tiny(mask_in_encoder=0.5, encoder_fill="random")
    before, state = tokens.clone(), torch.get_rng_state()
    first, second = (maelm.corrupt(tokens, config, generator(3)) for _ in range(2))
    close(first, second, "the same seed gave a different result: do all random numbers come from `generator`?")
    exact(torch.get_rng_state(), state, "the global random generator was used")
    draw = generator(3)
    a, b = (maelm.corrupt(tokens, config, draw) for _ in range(2))
    assert a.masked.tolist() != b.masked.tolist(), "a second call gave the same masks: is the generator reset?"
    maskable = tokens >= maelm.NUM_SPECIAL
    masked = maelm.draw_masks(maskable, 6, generator(0))
    given = [before, before >= maelm.NUM_SPECIAL, masked.clone()]
    a, b = (maelm.apply_masks(tokens, masked, config, draw).corrupted for _ in range(2))
    assert not torch.equal(a, b), "a second call filled the gaps with the same tokens"
    exact([tokens, maskable, masked], given, "an argument has changed: the caller still needs it")


@task("corrupt")
def test_delta_is_the_share_of_masks_that_the_encoder_sees():
    for delta, seen in ((0, 0), (0.25, 2), (0.5, 3), (0.75, 4), (1, 6)):  # of 6; round half to even
        corrupted, masked, kept = maelm.corrupt(random_tokens(), tiny(mask_in_encoder=delta), generator(0))
        found = (corrupted.gather(1, kept) == maelm.MASK).sum(1).tolist()
        assert found == [seen] * 6, f"at delta {delta}, the encoder must see {seen} of 6 masks in each sequence"


@task("corrupt")
def test_any_number_of_masks_can_be_applied():
    tokens = random_tokens(3)
    for m, seen in ((1, 0), (2, 1), (23, 12)):  # the config's mask_rate would give 6
        masked = torch.arange(m).expand(3, -1)
        corruption = maelm.apply_masks(tokens, masked, tiny(mask_in_encoder=0.5), generator(0))
        exact(corruption.masked, masked, "apply_masks must apply the masks that it is given")
        assert corruption.kept.tolist() == [[*range(seen), *range(m, 24)]] * 3, f"kept must hold {seen} of {m} masks"
    for delta, refused in ((0.0, [[1, 2], [3, 3], [4, 5]]), (1.0, [[1, 2], [3, 3], [4, 5]]), (1.0, [[], [], []])):
        with pytest.raises(ValueError):  # a position twice; no masks
            maelm.apply_masks(tokens, torch.tensor(refused).long(), tiny(mask_in_encoder=delta), generator(0))


@task("corrupt", gate=True)
def test_a_random_fill_is_any_real_token():
    for V in (300, 50):
        tokens = random_tokens(4000, vocab_size=V // 2)
        config = tiny(mask_in_encoder=1.0, encoder_fill="random", vocab_size=V)
        corrupted, masked, _ = maelm.corrupt(tokens, config, generator(0))
        fill = corrupted.gather(1, masked)
        ids, counts = fill.unique(return_counts=True)
        assert ids.tolist() == list(range(4, V)), "every real token, and no other, must be able to fill a gap"
        spread = (counts - fill.numel() / (V - 4)).abs().max() / (fill.numel() / (V - 4)) ** 0.5
        assert spread < 6, "some tokens fill gaps more often than others"
        exact(corrupted.scatter(1, masked, 0), tokens.scatter(1, masked, 0), "other positions must keep their tokens")
        same = [(a == b).double().mean() for a, b in ((fill[:, 1:], fill[:, :1]), (fill[1:], fill[:1]))]
        assert max(same) < 2 / V, "gaps get the same token: each must draw its own"
        assert min(same) > 0.5 / V, "gaps never get the same token: each must draw from all"
        true = (fill == tokens.gather(1, masked)).double().mean()
        assert 0.7 < true * (V - 4) < 1.3, "the fill must equal the true token as often as chance says"


@task("corrupt", gate=True)
def test_masked_tokens_do_not_leak():
    for name in ("mae-lm", "mlm", "enc-mask", "random-replace"):
        config, tokens = tiny(**maelm.ABLATIONS[name]), random_tokens()
        corruption = maelm.corrupt(tokens, config, generator(1))
        changed = tokens.scatter(1, corruption.masked, 42)
        leak = f"{name}: the result depends on the true tokens at masked positions: can the model see them?"
        close(maelm.corrupt(changed, config, generator(1)), corruption, leak)


@task("Encoder.hidden_states", gate=True)
def test_removing_equals_hiding():
    for fields in (dict(norm="post"), dict(norm="pre")):
        model, tokens, corruption = model_and_batch(**fields)
        h = model.encoder(tokens, torch.arange(24).expand(6, -1), padding=is_masked(corruption))
        hint = "removing tokens must equal hiding them: does each token keep its own position?"
        close(model.encode(corruption), at_positions(h, corruption.kept), hint, atol=1e-5, rtol=1e-4)


# ---- Section 3: the decoder's input ---------------------------------------------------------------------------------
@task("MAELM.fill_gaps", gate=True)
def test_gaps_are_filled_by_the_two_case_formula():
    masked = torch.tensor([[1, 2, 4], [3, 0, 1]])
    kept = torch.tensor([[0, 1, 2, 3], [0, 2, 3, 4]])  # two of three masked positions are kept
    for fields, dim in ((dict(), 32), (OTHER, 24)):
        h = torch.randn(2, 4, dim, generator=generator(0))
        (a, b, c, d), (p, q, r, s) = h
        for reset in (False, True):
            model, _, _ = model_and_batch(mask_in_encoder=0.5, decoder_reset=reset, **fields)
            e = model.encoder.token_embedding.weight[maelm.MASK]
            rows = [[a, e, e, d, e], [e, e, q, e, s]] if reset else [[a, b, c, d, e], [p, e, q, r, s]]
            expected = torch.stack([torch.stack(row) for row in rows])
            corruption = maelm.Corruption(torch.zeros(2, 5, dtype=torch.int64), masked, kept)
            exact(model.fill_gaps(h, corruption), expected, f"decoder_reset={reset}: h_i or e_[MASK] is misplaced")
            on_meta(model.to("meta").fill_gaps, h, corruption)


@task("MAELM.fill_gaps")
def test_the_mask_embedding_learns_from_every_gap():
    model, _, corruption = model_and_batch()
    h = torch.zeros(6, 18, 32, dtype=torch.bfloat16, requires_grad=True)
    x = model.fill_gaps(h, corruption)
    assert x.dtype == torch.bfloat16, "the result does not have the dtype of h"
    x.sum().backward()
    gradient = model.encoder.token_embedding.weight.grad
    assert gradient is not None and h.grad is not None, "no gradient reaches e_[MASK], or none reaches the encoder"
    assert gradient[maelm.MASK].tolist() == [36] * 32, "e_[MASK] must get a gradient from each of the 36 gaps"
    exact(h.grad, torch.ones_like(h), "each h_i must be used once")


# ---- Section 4.1: relative positions --------------------------------------------------------------------------------
@task("relative_bucket")
def test_near_distances_have_buckets_of_their_own():
    found = maelm.relative_bucket(torch.tensor([[-7, -2, -1, 0], [1, 2, 6, 7]]), 32, 128)
    assert found.dtype == torch.int64, "buckets must be int64: they index a table"
    assert found.tolist() == [[7, 2, 1, 0], [17, 18, 22, 23]], "distances from -7 to 7 must not share buckets"
    on_meta(maelm.relative_bucket, torch.arange(9), 32, 128)


@task("relative_bucket", gate=True)
def test_far_buckets_begin_where_t5s_begin():
    """In integer arithmetic: distance s reaches range i if s^r >= exact^(r - i) farthest^i."""
    for buckets, farthest in ((32, 128), (64, 128), (8, 20), (10, 60), (16, 64), (40, 320), (34, 27), (38, 49)):
        half, own = buckets // 2, buckets // 4
        starts = [own ** (half - own - i) * farthest ** i for i in range(half - own)]
        far = [own - 1 + sum(s ** (half - own) >= start for start in starts) for s in range(own, 600)]
        left = maelm.relative_bucket(-torch.arange(600), buckets, farthest).tolist()
        right = maelm.relative_bucket(torch.arange(600), buckets, farthest).tolist()
        wrong = [(-s, left[s], far[s - own]) for s in range(own, 600) if left[s] != far[s - own]]
        assert wrong == [], f"{buckets} buckets up to {farthest}: distance, bucket and the right bucket: {wrong[:3]}"
        assert right[1:] == [half + bucket for bucket in left[1:]], "the right must have the upper half of the buckets"


def bias_table(heads=4, **fields):
    """A RelativeBias whose entry for a bucket and a head is bucket + 100 * head."""
    bias = maelm.RelativeBias(tiny(**fields), heads)
    bias.table.weight.data[:] = torch.arange(len(bias.table.weight))[:, None] + 100 * torch.arange(heads)
    return bias


@task("RelativeBias.forward", gate=True)
def test_relative_bias_is_of_key_minus_query():
    keys = torch.tensor([[0, 3, 4, 23]])
    buckets = torch.tensor([[0, 19, 20, 27], [3, 0, 17, 26], [4, 1, 0, 26], [11, 10, 10, 0]])
    expected = torch.stack([buckets + 100 * head for head in range(4)])
    bias = bias_table()
    bias.eval()(keys.flip(1))  # of which nothing may remain
    exact(bias(keys), expected[None].float(), "row i, column j: the bucket of key j as query i sees it")
    on_meta(bias.to("meta"), keys)
    buckets = torch.tensor([[0, 7, 7], [3, 0, 5], [3, 1, 0]])  # 8 buckets up to distance 20, 40 positions
    expected = torch.stack([buckets, buckets + 100])[None].float()
    exact(bias_table(2, **OTHER)(torch.tensor([[2, 31, 32]])), expected, "wrong for other numbers of buckets and heads")


@task("RelativeBias.forward", gate=True)
def test_each_sequence_has_positions_of_its_own():
    positions = torch.tensor([[0, 1, 7], [2, 4, 9]])
    buckets = torch.tensor([[[0, 17, 23], [1, 0, 22], [7, 6, 0]], [[0, 18, 23], [2, 0, 21], [7, 5, 0]]])
    exact(bias_table()(positions)[:, 3], 300 + buckets.float(), "sequences with different gaps must differ in bias")


@task("RelativeBias.forward")
def test_the_gradient_of_a_bias_counts_its_uses():
    bias, positions = bias_table(), torch.tensor([[0, 1, 3]])
    all_learn(bias(positions).sum(), bias)
    used = {0: 3, 1: 1, 17: 1, 3: 1, 19: 1, 2: 1, 18: 1}
    assert [*bias.state_dict()] == ["table.weight"], "a call has added a buffer, which checkpoints would hold"
    found = bias.table.weight.grad.tolist()
    assert found == [[used.get(b, 0)] * 4 for b in range(32)], "each bucket must learn as often as it is used"


# ---- Section 2.1: attention -----------------------------------------------------------------------------------------
def random_heads(*lengths, d=4):
    """Tensors (2, 3, length, d)."""
    return [torch.randn(2, 3, length, d, generator=generator(i)) for i, length in enumerate(lengths)]


@task("attention", gate=True)
def test_attention_and_its_gradients_are_the_formulas():
    for d in (4, 9):
        inputs = [x.double() for x in random_heads(5, 7, 7, d=d)]
        inputs.append(torch.randn(2, 3, 5, 7, generator=generator(3)).double())
        seed = torch.initial_seed()
        results, gradients = [], []
        for function in (maelm.attention, F.scaled_dot_product_attention):
            leaves = [x.clone().requires_grad_() for x in inputs]
            results.append(function(*leaves))
            assert results[-1].requires_grad, "no gradient flows back through attention"
            found = torch.autograd.grad(results[-1].sin().sum(), leaves, allow_unused=True)
            assert all(x is not None for x in found), "q, k, v or bias has no gradient: is it detached?"
            gradients.append(found)
        close(*results, f"d_h = {d}: not the formula", any_dtype=True, atol=1e-6, rtol=1e-6)
        close(*gradients, "the gradients of q, k, v and bias differ from the formula's", atol=1e-6, rtol=1e-5)
        assert torch.initial_seed() == seed, "torch's random generator was seeded: only the program may do this"


@task("attention", gate=True)
def test_a_bias_can_hide_keys():
    q, k, v = random_heads(4, 4, 4)
    chosen = torch.tensor([2, 3, 1, 0])
    bias = torch.full((4, 4), -torch.inf).scatter(1, chosen[:, None], 0)[None, None]
    close(maelm.attention(q, k, v, bias), v[:, :, chosen], "each query can see one key, so it returns that key's value")
    assert maelm.attention(*[x.bfloat16() for x in (q, k, v)]).dtype == torch.bfloat16, "the result must have q's dtype"
    on_meta(maelm.attention, q, k, v, bias, 0.2)


@task("attention", gate=True)
def test_attention_drops_weights_out():
    q, k, v = torch.zeros(2, 3, 50, 4), torch.zeros(2, 3, 500, 4), torch.ones(2, 3, 500, 4)
    out, again = (maelm.attention(q, k, v, None, 0.2) for _ in range(2))
    close(out, out[..., :1].expand(-1, -1, -1, 4), "dropout must drop whole keys, not features of the result")
    assert out.mean().item() == pytest.approx(1, abs=0.02), "the weights that stay are not scaled up by 1 / (1 - p)"
    assert 0.015 < out[..., 0].std(-1).mean() < 0.03, "each query must drop its own share p of the keys"
    assert len(torch.cat([out, again]).flatten(0, 1).unique(dim=0)) == 12, "heads, sequences or calls share a mask"
    sharp = 1000 * torch.eye(50)[None, None]  # query i sees key i only
    with torch.no_grad():
        found = maelm.attention(sharp, sharp, torch.ones(1, 1, 50, 50), None, 0.2)
    assert found.isfinite().all(), "exp overflows for large logits: subtract their largest first, as softmax does"
    assert found.unique().tolist() == [0, 1.25], "dropout must act on the softmax, not on q or k, also under no_grad"


def attention_layer(dropout=0.0):
    """A layer with two heads, and its input (3, 5, 8)."""
    torch.manual_seed(0)
    return maelm.Attention(8, 2, dropout).eval(), torch.randn(3, 5, 8, generator=generator(0))


@task("Attention.forward")
def test_each_head_has_a_bias_of_its_own():
    layer, x = attention_layer()
    chosen = torch.tensor([[0, 1, 2, 3, 4], [3, 2, 4, 1, 0]])  # head, query -> key
    v = layer.key_value(x).chunk(2, dim=-1)[1]
    expected = torch.cat([v[:, chosen[0], :4], v[:, chosen[1], 4:]], dim=-1)
    got = layer(x, 1000 * F.one_hot(chosen, 5).float()[None])
    close(got, layer.output(expected), "the bias makes each head read one key per query", atol=1e-5, rtol=1e-4)
    on_meta(layer.to("meta"), x, got.new_zeros(1, 1, 5, 5), x)


@task("Attention.forward", gate=True)
def test_attention_has_dropout_in_training_only():
    layer, x = attention_layer(dropout=0.2)
    calm = layer(x)
    exact(layer(x), calm, "two results differ in evaluation mode")
    assert not torch.allclose(layer.train()(x), calm), "training mode has no dropout"
    layer.key_value.weight.data.zero_()
    layer.key_value.bias.data.fill_(1)  # equal keys, and values of ones
    layer.output.load_state_dict(dict(weight=torch.eye(8), bias=torch.zeros(8)))
    for given in ((x,), (x, torch.zeros(1, 1, 5, 5), x)):  # alone, and with bias and memory
        heads = layer(*given).unflatten(-1, (2, 4))
        assert heads.std(dim=(1, 2)).min() > 0, "dropout must act on the attention weights, not on the input"
        close(4 * heads, (4 * heads).round(), "not a multiple of 1/4, which is 1/5 times 1 / (1 - p): is p = self.p?")
        close(heads, heads[..., :1].expand_as(heads), "dropout must act on the attention weights, not on features")
    layer, x = attention_layer(dropout=0.2)
    layer.query.weight.data.mul_(20)
    mean = layer.train()(x[:1].expand(20000, -1, -1)).mean(0)
    close(mean, layer.eval()(x)[0], "dropout changes the mean: does it act before the softmax?", atol=0.015, rtol=0)


@task("Attention.forward")
def test_cross_attention_reads_its_memory():
    layer, x = attention_layer()
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    copy_attention(layer, theirs)
    bias = torch.randn(5, 7, generator=generator(2))
    for memory in torch.randn(2, 3, 7, 8, generator=generator(1)):
        expected, _ = theirs(x, memory, memory, attn_mask=bias)
        close(layer(x, bias[None, None], memory), expected, "not cross-attention to memory", atol=1e-5, rtol=1e-5)


# ---- Section 2.1: layers and the encoder ----------------------------------------------------------------------------
def copy_attention(ours, theirs):
    """Copy the weights of our attention to PyTorch's."""
    theirs.in_proj_weight.data = torch.cat([ours.query.weight, ours.key_value.weight]).detach()
    theirs.in_proj_bias.data = torch.cat([ours.query.bias, ours.key_value.bias]).detach()
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_layer(ours, theirs):
    """Copy the weights of our layer to PyTorch's."""
    copy_attention(ours.self_attention, theirs.self_attn)
    theirs.linear1.load_state_dict(ours.ffn[0].state_dict())
    theirs.linear2.load_state_dict(ours.ffn[2].state_dict())


@task("Attention.forward", gate=True)
def test_a_layer_and_its_gradients_equal_pytorchs_own():
    for norm, d, heads in (("post", 32, 4), ("pre", 24, 2)):
        torch.manual_seed(0)
        block = maelm.Block(tiny(norm=norm), d, heads, 0.0)
        theirs = torch.nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, F.gelu, norm_first=norm == "pre",
                                                  batch_first=True)
        copy_layer(block, theirs)
        x, y = (torch.randn(2, 7, d, generator=generator(0)).requires_grad_() for _ in range(2))
        found, expected = block(x), theirs(y)
        close(found, expected, f"{heads} heads of size {d // heads}: not PyTorch's result", atol=1e-5, rtol=1e-5)
        all_learn(found.sin().sum(), block)
        expected.sin().sum().backward()
        ours = torch.cat([block.self_attention.query.weight.grad, block.self_attention.key_value.weight.grad])
        expected = [theirs.self_attn.in_proj_weight.grad, y.grad]
        close([ours, x.grad], expected, "not PyTorch's gradients: is something detached?", atol=1e-4, rtol=1e-4)


@task("Encoder.hidden_states", gate=True)
def test_the_first_state_sums_embeddings():
    for fields in (dict(), OTHER):
        model, _, (corrupted, _, kept) = model_and_batch(**fields)
        kept = kept[:, 1:]  # does not begin with 0
        tokens = corrupted.gather(1, kept) % 50
        words, places = model.encoder.token_embedding.weight[tokens], model.encoder.position_embedding.weight[kept]
        state = model.encoder.hidden_states(tokens, kept)[0]
        close(state, model.encoder.norm(words + places), "H^0 is not e_x + p_i with each token's own position")


@task("Encoder.hidden_states")
def test_all_layers_are_listed_and_learn():
    model, tokens, _ = model_and_batch(norm="pre")
    states = model.encoder.hidden_states(tokens, torch.arange(24)[None])
    assert [state.shape for state in states] == [(6, 24, 32)] * 3, "the L + 1 states must be H^0, ..., H^L"
    at = torch.tensor([[4, 1]] * 6)
    last = model.encoder(tokens, torch.arange(24)[None], at=at)
    close(last, at_positions(states[-1], at), "with `at`, H^L must have only these positions", atol=1e-5, rtol=1e-4)
    all_learn(states[-1].sin().sum(), model.encoder)


@task("Encoder.hidden_states", gate=True)
def test_padding_and_other_sequences_change_nothing():
    for buckets in (32, 0):  # with and without relative positions
        model, tokens, _ = model_and_batch(rel_pos_buckets=buckets)
        positions, lengths = torch.arange(24)[None], torch.tensor([10, 24, 13, 2, 20, 5])
        padding = positions >= lengths[:, None]
        states = model.encoder.hidden_states(tokens.masked_fill(padding, maelm.PAD), positions, padding)
        for b, length in enumerate(lengths):
            short = model.encoder.hidden_states(tokens[b:b + 1, :length], positions[:, :length])
            hint = "a sequence has different states alone and in a batch with padding"
            close([state[b:b + 1, :length] for state in states], short, hint, atol=1e-5, rtol=1e-4)
        on_meta(model.to("meta").encoder.hidden_states, tokens, positions, padding)


@task("Encoder.hidden_states", gate=True)
def test_embeddings_have_dropout_in_training_only():
    model, tokens, _ = model_and_batch(dropout=0.3, encoder_layers=1)
    with torch.no_grad():  # training mode, not the gradients, decides
        calm, again, training = (model.encoder.train(on).hidden_states(tokens, torch.arange(24)[None])[0]
                                 for on in (False, False, True))
    exact(calm, again, "two results differ in evaluation mode")
    assert (training == 0).float().mean().item() == pytest.approx(0.3, abs=0.05), "a share p of H^0 must be 0"
    assert len((training == 0).flatten(0, 1).unique(dim=0)) == 6 * 24, "each vector must drop its own numbers"
    model.encoder.stack.forward = lambda h, *given, **named: [h, 2 * h]
    many = [model.encoder.hidden_states(tokens[:1], torch.arange(24)[None])[0] for _ in range(2000)]
    close(sum(many) / 2000, calm[:1], "dropout changes the mean: does it act before the LayerNorm?", atol=0.3, rtol=0)
    first, last = model.encoder.hidden_states(tokens, torch.arange(24)[None], tokens < 0)
    exact(last, 2 * first, "the stack must get H^0 after dropout, and its results must stay as they are")
    assert (first == 0).any(), "with padding, H^0 has no dropout"


# ---- Eq. (1): the loss ----------------------------------------------------------------------------------------------
@task("MAELM.forward", gate=True)
def test_loss_is_the_mean_over_the_masked_positions():
    model, tokens, corruption = model_and_batch()
    fewer = maelm.apply_masks(tokens, torch.tensor([[7, 2]] * 6), model.config, generator(0))  # not the config's six
    for drawn in (corruption, fewer):
        log_p = model.logits(drawn).log_softmax(-1)  # (6, m, V)
        by_hand = []
        for b in range(6):
            for j, i in enumerate(drawn.masked[b].tolist()):
                by_hand.append(-log_p[b, j, tokens[b, i]])
        loss = model(tokens, drawn)
        close(loss, torch.stack(by_hand).mean(), "not the mean of -log p(true token), in the order of `masked`")
    half = model.bfloat16()
    expected = F.cross_entropy(half.logits(corruption).mT.float(), tokens.gather(1, corruption.masked))
    close(half(tokens, corruption), expected, "the loss must be computed in float32 for any dtype of the logits")
    on_meta(model.to("meta"), tokens, corruption)


@task("MAELM.forward")
def test_mlm_is_the_textbook_mlm():
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    masked = is_masked(corruption)
    h = model.encoder(tokens.masked_fill(masked, maelm.MASK), torch.arange(24).expand(6, -1))
    logits = model.head(h, model.encoder.token_embedding.weight)
    loss = model(tokens, corruption)
    close(loss, F.cross_entropy(logits[masked], tokens[masked]), "without a decoder, this is a standard MLM")
    all_learn(loss, model)


@task("MAELM.forward", gate=True)
def test_mae_lm_is_the_papers_figure_2():
    for fields, (B, n, V) in ((dict(), (6, 24, 300)), (OTHER, (3, 31, 50))):
        model, _, _ = model_and_batch(**fields)
        tokens = random_tokens(B, n, V)
        corruption = maelm.corrupt(tokens, model.config, generator(1))
        masked, everywhere = is_masked(corruption), torch.arange(n).expand(B, -1)
        h = model.encoder(tokens.gather(1, corruption.kept), corruption.kept)
        x = model.encoder.token_embedding.weight[maelm.MASK].expand(B, n, -1)
        x = x.scatter(1, corruption.kept[:, :, None].expand_as(h), h)
        logits = model.head(model.decoder(x, everywhere), model.encoder.token_embedding.weight)
        loss = model(tokens, corruption)
        close(loss, F.cross_entropy(logits[masked], tokens[masked]), "not the loss of Figure 2")
        all_learn(loss, model)
