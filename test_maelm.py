"""Claims about the method, as tests: the file to read after maelm.py. A claim with @task is worth a point in the
course. tests/test_mistakes.py has wrong versions of the code, which these claims find.

    pytest test_maelm.py
    python test_maelm.py -h         # for classes: --blank or --handout makes an assignment, --grade marks it
"""
if __name__ == "__main__":  # before other imports, one of which may be of a file that a student has changed
    from course.assign import main
    raise SystemExit(main())

import math

import pytest
import torch
import torch.nn.functional as F

import maelm
from conftest import generator, model_and_batch, random_tokens, tiny

task = pytest.mark.task
close = torch.testing.assert_close


def exact(ours, expected):
    """Fails unless two tensors are equal, in dtype and shape, too."""
    close(ours, expected, rtol=0, atol=0)


def at_positions(x, at):
    """x (B, n, d) at the positions at (B, k): (B, k, d)."""
    return torch.take_along_dim(x, at[:, :, None], dim=1)


# ---- Section 3: removing the masked positions -----------------------------------------------------------------------
@task("corrupt")
def test_every_sequence_has_exactly_m_masks():
    for rate, m in ((0.25, 6), (0.15, 4)):  # of 24 tokens, rounded to the nearest
        corrupted, masked, kept = maelm.corrupt(random_tokens(50), tiny(mask_rate=rate), generator(0))
        assert masked.shape == (50, m) and kept.shape == (50, 24 - m)
        assert [len(row.unique()) for row in masked] == [m] * 50
        assert (corrupted == maelm.MASK).sum(1).tolist() == [m] * 50
    assert maelm.Config().num_masked(512) == 77  # App. C


@task("corrupt")
def test_only_real_or_given_positions_are_masked():
    tokens = random_tokens(50)
    tokens[:, 3:6] = torch.tensor([maelm.PAD, maelm.SEP, maelm.MASK])
    masked = maelm.corrupt(tokens, tiny(), generator(0)).masked
    assert tokens.gather(1, masked).min() >= maelm.NUM_SPECIAL
    given = (torch.arange(24) < 6).expand(50, -1)  # as many as there are masks, special tokens among them
    exact(maelm.draw_masks(given, 6, generator(0)).sort(1).values, torch.arange(6).expand(50, -1))


@task("corrupt")
def test_kept_positions_are_the_rest_in_order():
    corrupted, masked, kept = maelm.corrupt(random_tokens(), tiny(), generator(0))
    for row in range(6):
        assert kept[row].tolist() == [i for i in range(24) if i not in masked[row]]


@task("corrupt")
def test_the_masked_text_differs_from_the_text_at_masks_only():
    tokens = random_tokens()
    corrupted, masked, _ = maelm.corrupt(tokens, tiny(), generator(0))
    exact(corrupted, tokens.scatter(1, masked, maelm.MASK))


@task("corrupt")
def test_masks_are_uniform_over_real_tokens():
    """Any two positions are masked together equally often, and equally often seen by the encoder together."""
    tokens = random_tokens(4000)
    corrupted, masked, kept = maelm.corrupt(tokens, tiny(mask_in_encoder=0.5), generator(0))
    is_masked = torch.zeros_like(tokens).scatter(1, masked, 1)
    seen = is_masked * torch.zeros_like(tokens).scatter(1, kept, 1)
    for drawn, m in ((is_masked, 6), (seen, 3)):
        x = drawn[:, 1:-1].double()
        p = torch.full((22, 22), m / 22 * (m - 1) / 21).fill_diagonal_(m / 22)
        deviations = (x.T @ x / 4000 - p).abs() / (p * (1 - p) / 4000).sqrt()
        assert deviations.max() < 5


@task("corrupt")
def test_corrupt_is_a_pure_function():
    tokens, config = random_tokens(), tiny(mask_in_encoder=0.5)
    before, state = tokens.clone(), torch.get_rng_state()
    first, second, other = (maelm.corrupt(tokens, config, generator(seed)) for seed in (3, 3, 4))
    close(first, second)
    exact(tokens, before)
    exact(torch.get_rng_state(), state)
    assert first.masked.tolist() != other.masked.tolist()


@task("corrupt")
def test_delta_is_the_share_of_masks_that_the_encoder_sees():
    for delta, seen in ((0, 0), (0.25, 2), (0.5, 3), (0.75, 4), (1, 6)):  # of 6; round half to even
        corrupted, masked, kept = maelm.corrupt(random_tokens(), tiny(mask_in_encoder=delta), generator(0))
        assert (corrupted.gather(1, kept) == maelm.MASK).sum(1).tolist() == [seen] * 6
        assert kept.shape == (6, 18 + seen)


@task("corrupt")
def test_any_number_of_masks_can_be_applied():
    tokens = random_tokens(3)
    for m in (1, 2, 23):  # the config's mask_rate would have 6
        masked = torch.arange(m).expand(3, -1)
        corruption = maelm.apply_masks(tokens, masked, tiny(), generator(0))
        exact(corruption.masked, masked)
        exact(corruption.kept, torch.arange(m, 24).expand(3, -1))
    twice = torch.tensor([[1, 2], [3, 3], [4, 5]])
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError):
            maelm.apply_masks(tokens, twice, tiny(mask_in_encoder=delta), generator(0))


@task("corrupt")
def test_a_random_fill_is_any_real_token():
    tokens = random_tokens(4000)
    config = tiny(mask_in_encoder=1.0, encoder_fill="random")
    corrupted, masked, _ = maelm.corrupt(tokens, config, generator(0))
    assert corrupted.gather(1, masked).unique().tolist() == list(range(4, 300))
    exact(corrupted.scatter(1, masked, 0), tokens.scatter(1, masked, 0))


@task("corrupt")
def test_too_few_tokens_or_no_mask_are_refused():
    tokens = random_tokens()
    tokens[2] = maelm.SEP
    tokens[2, :6] = maelm.NUM_SPECIAL  # the first id that is real
    assert sorted(maelm.corrupt(tokens, tiny(), generator(0)).masked[2].tolist()) == [0, 1, 2, 3, 4, 5]
    tokens[2, 0] = maelm.CLS
    for refused, rate in ((tokens, 0.25), (random_tokens(), 0.02)):
        with pytest.raises(ValueError):
            maelm.corrupt(refused, tiny(mask_rate=rate), generator(0))


@task("corrupt")
def test_masked_tokens_do_not_leak():
    for name in ("mae-lm", "mlm", "enc-mask", "random-replace"):
        config, tokens = tiny(**maelm.ABLATIONS[name]), random_tokens()
        corruption = maelm.corrupt(tokens, config, generator(1))
        changed = tokens.scatter(1, corruption.masked, 42)
        close(maelm.corrupt(changed, config, generator(1)), corruption)


@task("Encoder.hidden_states")
def test_removing_equals_hiding():
    """The encoder on the kept tokens = the encoder on all tokens whose masked keys are hidden."""
    for norm in ("post", "pre"):
        model, tokens, (corrupted, masked, kept) = model_and_batch(norm=norm)
        hidden = torch.zeros_like(tokens).scatter(1, masked, 1).bool()
        h = model.encoder(tokens, torch.arange(24).expand(6, -1), padding=hidden)
        found = model.encode(maelm.Corruption(corrupted, masked, kept))
        close(found, at_positions(h, kept), atol=1e-5, rtol=1e-4)


def test_positions_skip_removed_tokens_if_aligned():
    for aligned in (True, False):
        model, _, corruption = model_and_batch(aligned_positions=aligned)
        positions = corruption.kept if aligned else torch.arange(18).expand(6, -1)
        seen = corruption.corrupted.gather(1, corruption.kept)
        close(model.encode(corruption), model.encoder(seen, positions))


# ---- Section 3: the decoder's input ---------------------------------------------------------------------------------
@task("MAELM.fill_gaps")
def test_gaps_are_filled_by_the_two_case_formula():
    masked = torch.tensor([[1, 2], [3, 0]])
    kept = torch.tensor([[0, 1, 3], [1, 2, 3]])  # one of two masked positions is kept
    h = torch.randn(2, 3, 32, generator=generator(0))
    for reset in (False, True):
        model, _, _ = model_and_batch(mask_in_encoder=0.5, decoder_reset=reset)
        e = model.encoder.token_embedding.weight[maelm.MASK]
        rows = [[h[0, 0], e if reset else h[0, 1], e, h[0, 2]], [e, h[1, 0], h[1, 1], e if reset else h[1, 2]]]
        expected = torch.stack([torch.stack(row) for row in rows])
        corruption = maelm.Corruption(torch.zeros(2, 4, dtype=torch.int64), masked, kept)
        exact(model.fill_gaps(h, corruption), expected)


@task("MAELM.fill_gaps")
def test_the_mask_embedding_learns_from_every_gap():
    model, _, corruption = model_and_batch()
    h = torch.zeros(6, 18, 32, dtype=torch.bfloat16, requires_grad=True)
    x = model.fill_gaps(h, corruption)
    assert x.dtype == torch.bfloat16
    x.sum().backward()
    assert model.encoder.token_embedding.weight.grad[maelm.MASK].tolist() == [36] * 32
    exact(h.grad, torch.ones_like(h))


# ---- Section 4.1: relative positions --------------------------------------------------------------------------------
@task("relative_bucket")
def test_near_distances_have_buckets_of_their_own():
    r = torch.tensor([[-7, -2, -1, 0], [1, 2, 6, 7]])
    assert maelm.relative_bucket(r, 32, 128).tolist() == [[7, 2, 1, 0], [17, 18, 22, 23]]


@task("relative_bucket")
def test_far_buckets_begin_where_t5s_begin():
    starts = {  # the first distances in the buckets that hold several
        (32, 128): [8, 12, 16, 23, 32, 46, 64, 91],
        (64, 128): [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113],
        (8, 20): [2, 7],
    }
    for (buckets, farthest), expected in starts.items():
        half = buckets // 2
        left = maelm.relative_bucket(-torch.arange(600), buckets, farthest).tolist()
        right = maelm.relative_bucket(torch.arange(600), buckets, farthest).tolist()
        assert left == sorted(left)
        assert left[farthest:] == [half - 1] * (600 - farthest)
        assert right[1:] == [half + bucket for bucket in left[1:]]
        assert [left.index(bucket) for bucket in range(half // 2, half)] == expected


def bias_table():
    """A RelativeBias whose entry for a bucket and a head is bucket + 100 head."""
    bias = maelm.RelativeBias(tiny(), heads=4)
    bias.table.weight.data.copy_(torch.arange(32.0)[:, None] + torch.arange(4) * 100)
    return bias


def test_relative_tables_are_where_the_config_says():
    for fields, tables in [
        (dict(), 1), (dict(decoder_relative=True), 2), (dict(decoder_relative=True, decoder_dim=64), 2),
        (dict(decoder_relative=True, rel_pos_buckets=0), 0), (dict(decoder="bi+cross", decoder_relative=True), 2),
        (dict(decoder="uni+cross", decoder_relative=True), 1), (dict(decoder="cross", decoder_relative=True), 1),
    ]:
        model, tokens, corruption = model_and_batch(**fields)
        model(tokens, corruption).backward()
        assert len([name for name, _ in model.named_parameters() if "table" in name]) == tables
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@task("RelativeBias.forward")
def test_relative_bias_is_of_key_minus_query():
    keys = torch.tensor([[0, 3, 4, 20]])
    buckets = torch.tensor([[0, 19, 20, 26], [3, 0, 17, 26], [4, 1, 0, 26], [10, 10, 10, 0]])
    expected = torch.stack([buckets + 100 * head for head in range(4)])
    exact(bias_table()(keys), expected[None].float())


@task("RelativeBias.forward")
def test_each_row_has_positions_of_its_own():
    positions = torch.tensor([[0, 1, 7], [2, 4, 9]])
    buckets = torch.tensor([[[0, 17, 23], [1, 0, 22], [7, 6, 0]], [[0, 18, 23], [2, 0, 21], [7, 5, 0]]])
    exact(bias_table()(positions)[:, 3], 300 + buckets.float())


def test_the_fast_bias_is_the_plain_lookup_and_hides_padding():
    bias, positions = bias_table(), torch.tensor([[0, 3, 4], [1, 2, 23]])
    plain = bias.table(bias.bucket[positions[:, None, :] - positions[:, :, None] + 23]).permute(0, 3, 1, 2)
    exact(bias(positions), plain)
    padding = torch.tensor([[False, False, True], [False, True, False]])
    hidden = plain.masked_fill(padding[:, None, None, :], -math.inf)
    stack = maelm.Stack(tiny(), 32, 1, 0.0, relative=False)
    assert stack.attention_bias(positions) is None
    exact(stack.attention_bias(positions, padding).expand(-1, 4, 3, -1), hidden - plain)
    stack.relative_bias = bias
    exact(stack.attention_bias(positions, padding), hidden)


@task("RelativeBias.forward")
def test_the_gradient_of_a_bias_counts_its_uses():
    bias, positions = bias_table(), torch.tensor([[0, 1, 3]])
    bias(positions).sum().backward()
    used = {0: 3, 1: 1, 17: 1, 3: 1, 19: 1, 2: 1, 18: 1}
    assert bias.table.weight.grad.tolist() == [[used.get(b, 0)] * 4 for b in range(32)]


# ---- Section 2.1: attention -----------------------------------------------------------------------------------------
def random_heads(*lengths):
    """Tensors (2, 3, length, 4)."""
    return [torch.randn(2, 3, length, 4, generator=generator(i)) for i, length in enumerate(lengths)]


@task("attention")
def test_attention_and_its_gradients_are_the_formulas():
    inputs = [x.double() for x in random_heads(5, 7, 7)]
    inputs.append(torch.randn(2, 3, 5, 7, generator=generator(3)).double())
    results, gradients = [], []
    for function in (maelm.attention, F.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results.append(function(*leaves))
        gradients.append(torch.autograd.grad(results[-1].sin().sum(), leaves))
    close(*results, check_dtype=False, atol=1e-6, rtol=1e-6)
    close(*gradients, atol=1e-6, rtol=1e-5)


@task("attention")
def test_a_bias_can_hide_keys():
    q, k, v = random_heads(4, 4, 4)
    chosen = torch.tensor([2, 3, 1, 0])
    bias = torch.full((4, 4), -torch.inf).scatter(1, chosen[:, None], 0)
    close(maelm.attention(q, k, v, bias[None, None]), v[:, :, chosen])


@task("attention")
def test_logits_are_divided_by_root_d_h():
    for d in (4, 9):
        k = torch.stack([torch.full((d,), math.log(2) / d ** 0.5), torch.zeros(d)])  # logits log(2) and 0
        v = torch.tensor([[3.0], [0.0]])
        found = maelm.attention(torch.ones(1, 1, 1, d), k[None, None], v[None, None])
        assert found.item() == pytest.approx(2)  # 2/3 of 3 and 1/3 of 0


@task("attention")
def test_attention_drops_weights_out():
    q, k = torch.zeros(2, 1, 1, 500, 4)
    out = maelm.attention(q, k, torch.ones(1, 1, 500, 4), None, 0.5)  # of 500 equal weights, half are doubled
    close(out, out[..., :1].expand(-1, -1, -1, 4))
    assert out.mean().item() == pytest.approx(1, abs=0.01)
    assert 0.03 < out.std() < 0.06


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
    close(got, layer.output(expected), atol=1e-5, rtol=1e-4)


@task("Attention.forward")
def test_attention_has_dropout_in_training_only():
    layer, x = attention_layer(dropout=0.5)
    calm = layer(x)
    exact(layer(x), calm)
    assert not torch.allclose(layer.train()(x), calm)


# ---- Section 2.1: layers and the encoder ----------------------------------------------------------------------------
def copy_attention(ours, theirs):
    """Copy the weights of our attention to PyTorch's."""
    theirs.in_proj_weight.data = torch.cat([ours.query.weight, ours.key_value.weight])
    theirs.in_proj_bias.data = torch.cat([ours.query.bias, ours.key_value.bias])
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_layer(ours, theirs):
    """Copy the weights of our layer to PyTorch's."""
    copy_attention(ours.self_attention, theirs.self_attn)
    theirs.linear1.load_state_dict(ours.ffn[0].state_dict())
    theirs.linear2.load_state_dict(ours.ffn[2].state_dict())


@task("Attention.forward")
def test_a_layer_equals_pytorchs_own():
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        block = maelm.Block(tiny(norm=norm), 32, 4, 0.0).eval()
        theirs = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, F.gelu, norm_first=norm == "pre", batch_first=True)
        copy_layer(block, theirs)
        x = torch.randn(2, 7, 32, generator=generator(0))
        close(block(x), theirs(x), atol=1e-5, rtol=1e-5)


@task("Encoder.hidden_states")
def test_the_first_state_sums_embeddings():
    model, _, (corrupted, _, kept) = model_and_batch()
    tokens = corrupted.gather(1, kept)
    model.encoder.norm = torch.nn.Identity()
    model.encoder.token_embedding.weight.data[:] = torch.arange(300)[:, None]
    model.encoder.position_embedding.weight.data[:] = 1000 * torch.arange(24)[:, None]
    state = model.encoder.hidden_states(tokens, kept)[0]
    exact(state[..., 7], (tokens + 1000 * kept).float())


@task("Encoder.hidden_states")
def test_all_layers_are_listed_and_normalised():
    torch.manual_seed(0)
    encoder, tokens, positions = maelm.Encoder(tiny(norm="pre")), random_tokens(), torch.arange(24)[None]
    states = encoder.hidden_states(tokens, positions)
    assert [state.shape for state in states] == [(6, 24, 32)] * 3
    exact(states[-1], encoder(tokens, positions))
    for state in (states[0], states[-1]):
        close(state.var(-1, correction=0), torch.ones(6, 24), atol=1e-3, rtol=0)


@task("Encoder.hidden_states")
def test_padding_changes_nothing():
    for buckets in (32, 0):  # with and without relative positions
        model, tokens, _ = model_and_batch(rel_pos_buckets=buckets)
        positions, lengths = torch.arange(24)[None], torch.tensor([10, 24, 13, 2, 20, 5])
        padding = positions >= lengths[:, None]
        states = model.encoder.hidden_states(tokens.masked_fill(padding, maelm.PAD), positions, padding)
        for row, length in enumerate(lengths):
            short = model.encoder.hidden_states(tokens[row:row + 1, :length], positions[:, :length])
            close([state[row:row + 1, :length] for state in states], short, atol=1e-5, rtol=1e-4)


def test_a_layer_at_some_positions_is_the_same():
    for norm in ("post", "pre"):
        block, at = maelm.Block(tiny(norm=norm), 32, 4, 0.0), torch.tensor([[5, 0], [3, 6]])
        x = torch.randn(2, 7, 32, generator=generator(0))
        close(block(x, at=at), at_positions(block(x), at), atol=1e-5, rtol=1e-5)


def test_a_prediction_does_not_depend_on_which_others_are_asked_for():
    """With masks that the encoder sees all, the loss at fewer positions needs the same model input."""
    for fields in (dict(**maelm.ABLATIONS["mlm"]), dict(mask_in_encoder=1.0), dict(mask_in_encoder=1.0, norm="pre"),
                   dict(mask_in_encoder=1.0, decoder="bi+cross"), dict(mask_in_encoder=1.0, decoder="cross")):
        model, _, corruption = model_and_batch(**fields)
        fewer = corruption._replace(masked=corruption.masked[:, [4, 1]])
        close(model.logits(fewer), model.logits(corruption)[:, [4, 1]], atol=1e-5, rtol=1e-4)


@task("Encoder.hidden_states")
def test_embeddings_have_dropout_in_training_only():
    model, tokens, _ = model_and_batch(dropout=0.5, encoder_layers=1)
    calm, again, training = (model.encoder.train(on).hidden_states(tokens, torch.arange(24)[None])[0]
                             for on in (False, False, True))
    exact(calm, again)
    assert (training == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_dropout_is_in_the_encoder_only():
    model, tokens, corruption = model_and_batch(dropout=0.5)
    model.train()
    h, other = model.encode(corruption), model.encode(corruption)
    assert not torch.allclose(h, other)
    x, positions = model.fill_gaps(h, corruption), torch.arange(24)[None]
    exact(model.decoder(x, positions), model.decoder(x, positions))


def test_initial_weights_are_normal():
    torch.manual_seed(0)
    model = maelm.MAELM(tiny(encoder_dim=256, init_std=0.02))
    for name, p in model.named_parameters():
        if p.ndim == 1:  # gains of LayerNorms and biases
            assert p.unique().tolist() == [float(name.endswith("weight"))], name
        elif p.numel() > 5000:
            assert p.std().item() == pytest.approx(0.02, abs=0.001), name
            assert p.abs().max() > 0.06, name  # normal, not truncated


# ---- Eq. (1): the loss ----------------------------------------------------------------------------------------------
def is_masked(corruption):
    """(B, n) bool, True at the masked positions."""
    return torch.zeros_like(corruption.corrupted).scatter(1, corruption.masked, 1).bool()


@task("MAELM.forward")
def test_loss_is_the_mean_over_masked_positions():
    model, tokens, corruption = model_and_batch()
    log_p = model.logits(corruption).log_softmax(-1)  # (6, m, V)
    by_hand = []
    for b in range(6):
        for j, i in enumerate(corruption.masked[b].tolist()):
            by_hand.append(-log_p[b, j, tokens[b, i]])
    close(model(tokens, corruption), torch.stack(by_hand).mean())


@task("MAELM.forward")
def test_the_loss_is_where_the_corruption_says():
    """Not where the config would mask: here are two masks per sequence, and the config has six."""
    model, tokens, _ = model_and_batch()
    masked = torch.tensor([[7, 2]] * 6)
    corruption = maelm.apply_masks(tokens, masked, model.config, generator(0))
    log_p = model.logits(corruption).log_softmax(-1)
    expected = -(log_p[:, 0, :].gather(1, tokens[:, 7:8]) + log_p[:, 1, :].gather(1, tokens[:, 2:3])) / 2
    close(model(tokens, corruption), expected.mean())


@task("MAELM.forward")
def test_mlm_is_the_textbook_mlm():
    model, tokens, corruption = model_and_batch(**maelm.ABLATIONS["mlm"])
    masked = is_masked(corruption)
    h = model.encoder(tokens.masked_fill(masked, maelm.MASK), torch.arange(24).expand(6, -1))
    logits = model.head(h, model.encoder.token_embedding.weight)
    close(model(tokens, corruption), F.cross_entropy(logits[masked], tokens[masked]))


@task("MAELM.forward")
def test_mae_lm_is_the_papers_figure_2():
    """Encoder without masked positions, e_[MASK] in the gaps, decoder over all positions, head at the masked ones."""
    model, tokens, corruption = model_and_batch()
    masked, everywhere = is_masked(corruption), torch.arange(24).expand(6, -1)
    h = model.encoder(tokens.gather(1, corruption.kept), corruption.kept)
    x = model.encoder.token_embedding.weight[maelm.MASK].expand(6, 24, -1)
    x = x.scatter(1, corruption.kept[:, :, None].expand_as(h), h)
    logits = model.head(model.decoder(x, everywhere), model.encoder.token_embedding.weight)
    close(model(tokens, corruption), F.cross_entropy(logits[masked], tokens[masked]))
