"""Wrong versions of the code, each of which a claim detects."""
import ast
import sys
import types

import pytest
import torch

import conftest
import test_maelm
from course.grade import find
from tests import test_homework, test_random_inputs, test_rank, test_table_2, test_train
from tests.common import ROOT

MISTAKES = [  # claim, without test_; module.function or module.Class.method; a piece of it; what may not stand for it
    ("every_sequence_has_exactly_m_masks", "maelm.draw_masks", "number.topk(m, largest=False).indices",
     "torch.randint(1, maskable.shape[1] - 1, (len(maskable), m))"),
    ("only_real_or_given_positions_are_masked", "maelm.draw_masks", "number.masked_fill(~maskable, 2.0)", "number"),
    ("all_else_is_kept_in_order_and_unchanged", "maelm.apply_masks", ".view(B, -1)", ".view(B, -1).flip(1)"),
    ("masks_are_uniform_over_real_tokens", "maelm.draw_masks", "number.masked_fill(~maskable, 2.0)",
     "F.pad(number[:, 1:-1:2].repeat_interleave(2, 1), (1, 1)).masked_fill(~maskable, 2.0)"),
    ("corrupt_is_a_pure_function", "maelm.draw_masks",
     "torch.rand(maskable.shape, generator=generator, device=maskable.device)", "torch.rand(maskable.shape)"),
    ("delta_is_the_share_of_masks_that_the_encoder_sees", "maelm.apply_masks", "round(config", "int(config"),
    ("any_number_of_masks_can_be_applied", "maelm.apply_masks", "is_masked.sum() != B * m", "False"),
    ("a_random_fill_is_any_real_token", "maelm.apply_masks", "random_(NUM_SPECIAL,", "random_(0,"),
    ("only_real_or_given_positions_are_masked", "maelm.draw_masks", "maskable.sum(1).min()", "maskable.sum(1).max()"),
    ("masked_tokens_do_not_leak", "maelm.apply_masks", "tokens.scatter(1, masked, replacement)", "tokens"),
    ("removing_equals_hiding", "maelm.MAELM.encode", "positions = corruption.kept", "positions = corruption.kept // 2"),
    ("positions_skip_removed_tokens_if_aligned", "maelm.MAELM.encode", "not self.config.aligned_positions",
     "self.config.aligned_positions"),
    ("an_mlm_refuses_removed_positions", "maelm.MAELM.encode", "if at is not None and r < n:", "if False:"),
    ("gaps_are_filled_by_the_two_case_formula", "maelm.MAELM.fill_gaps", "if self.config.decoder_reset", "if False"),
    ("the_mask_embedding_learns_from_every_gap", "maelm.MAELM.fill_gaps", "weight[MASK].to(h.dtype)",
     "weight[MASK]", "weight[MASK].detach().to(h.dtype)"),
    ("uni_decoder_cannot_see_the_future", "support.cross_attention.CrossDecoder.forward", "triu(1)", "tril(-1)",
     "triu(2)"),
    ("near_distances_have_buckets_of_their_own", "maelm.relative_bucket", "where(distance > 0", "where(distance < 0"),
    ("far_buckets_begin_where_t5s_begin", "maelm.relative_bucket", "max_exact = half // 2", "max_exact = half // 4"),
    ("relative_tables_are_where_the_config_says", "maelm.Decoder.__init__", "0.0, config.decoder_relative)",
     "0.0, True)"),
    ("relative_bias_is_of_key_minus_query", "maelm.RelativeBias.forward",
     "positions[:, None, :] - positions[:, :, None]", "positions[:, :, None] - positions[:, None, :]"),
    ("each_sequence_has_positions_of_its_own", "maelm.RelativeBias.forward", "positions[:, None, :]",
     "positions[:1, None, :]"),
    ("the_fast_bias_is_the_plain_lookup_and_hides_padding", "maelm.Stack.attention_bias", "hidden[:, None, None, :]",
     "hidden[:, None, :, None]"),
    ("the_gradient_of_a_bias_counts_its_uses", "maelm.RelativeBias.forward", "self.table(self.bucket)",
     "self.table(self.bucket).detach()"),
    ("attention_and_its_gradients_are_the_formulas", "maelm.attention", "s + bias", "s + bias.detach()",
     "s + bias[:1]"),
    ("attention_and_its_gradients_are_the_formulas", "maelm.attention", "d_h ** -0.5", "d_h ** -1", "1", "0.5"),
    ("each_head_has_a_bias_of_its_own", "maelm.Attention.forward", "v, bias, self.p", "v, None, self.p"),
    ("attention_has_dropout_in_training_only", "maelm.Attention.forward", "self.p if self.training else 0.0", "self.p"),
    ("cross_layer_equals_pytorchs_own", "support.cross_attention.CrossBlock.forward",
     "self.cross_norm, None, memory)", "self.cross_norm)"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "maelm.Attention.forward", "z.transpose(1, 2).f", "z.f"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "maelm.Block.forward", "self.ffn_norm(x))", "x)"),
    ("mlm_is_the_textbook_mlm", "maelm.Block.forward", "at[:, :, None]", "at.sort(1).values[:, :, None]"),
    ("all_layers_are_listed_and_learn", "maelm.Encoder.hidden_states", "self.norm(h)", "h"),
    ("padding_and_other_sequences_change_nothing", "maelm.Encoder.hidden_states", "padding, at)", "None, at)"),
    ("a_prediction_does_not_depend_on_which_others_are_asked_for", "maelm.MAELM.logits", "at=corruption.masked",
     "at=corruption.masked.sort(1).values"),
    ("a_prediction_does_not_depend_on_which_others_are_asked_for", "maelm.MAELM.decode", "at=corruption.masked",
     "at=corruption.masked.sort(1).values"),
    ("dropout_is_in_the_encoder_only", "maelm.Decoder.__init__", "config.decoder_layers, 0.0,",
     "config.decoder_layers, config.dropout,"),
    ("initial_weights_are_normal", "maelm.MAELM.init_parameters", "normal_(parameter, std=self.config.init_std)",
     "trunc_normal_(parameter, std=self.config.init_std, a=-0.04, b=0.04)"),
    ("loss_is_the_mean_over_the_masked_positions", "maelm.MAELM.forward", ".flatten())",
     '.flatten(), reduction="sum")'),
    ("loss_is_the_mean_over_the_masked_positions", "maelm.MAELM.forward", "tokens.gather(1, corruption.masked)",
     "tokens.gather(1, corruption.masked.sort(1).values)"),
    ("uni_predicts_all_tokens_but_the_first", "support.cross_attention.CrossMAELM.forward", "torch.arange(1, n",
     "torch.arange(0, n - 1"),
    ("mlm_is_the_textbook_mlm", "maelm.MAELM.logits", "at=corruption.masked", "at=corruption.masked.flip(1)"),
    ("mae_lm_is_the_papers_figure_2", "maelm.MAELM.fill_gaps", "h.device)[:, None]", "h.device)[:, None] // 2 * 2"),
    ("warm_up_ends_at_the_peak", "train.learning_rate_factor", "(step + 1) / warmup_steps", "step / warmup_steps"),
    ("the_rate_falls_linearly_to_zero", "train.learning_rate_factor", "/ (max_steps - warmup_steps)", "/ max_steps"),
    ("rank_is_the_smallest_k_that_reaches_tau", "rank.tau_rank", "values.cumsum(0)", "values.sqrt().cumsum(0)"),
    ("no_values_and_no_shares_are_told_apart", "rank.tau_rank", "if values[0] == 0:", "if False:"),
    ("no_values_and_no_shares_are_told_apart", "rank.tau_rank", "0 < tau < 1:", "0 <= tau < 1:", "0 < tau <= 1:"),
    ("equal_singular_values_count_exactly", "rank.tau_rank", "(tau - 1e-9)", "tau"),
    ("rank_is_exact_for_known_singular_values", "rank.effective_rank", "svdvals(x) ** 2", "svdvals(x)"),
    ("any_real_dtype_is_measured_in_float64", "rank.effective_rank", "torch.as_tensor(h).double()",
     "torch.as_tensor(h).float()"),
    ("the_mean_is_not_subtracted", "rank.effective_rank", "svdvals(x)", "svdvals(x - x.mean(0))"),
    ("what_has_no_rank_is_refused", "rank.effective_rank", "not x.isfinite().all()", "x.isnan().all()"),
    ("ranks_are_exact_on_built_spectra", "rank.Moments.spectrum", "if centered:", "if not centered:"),
    ("equal_rows_have_rank_1", "rank.Moments.spectrum", "if gram.trace() <= 1e-12 * self.gram.trace():", "if False:"),
    ("matthews_of_two_labels_is_the_formula", "support.metrics.matthews", "math.sqrt((t * t).sum() * (p * p).sum())",
     "(t * t).sum()"),
    ("matthews_of_several_labels_is_gorodkins", "support.metrics.matthews", "    p = p - p.mean(0)\n", ""),
    # Silent errors: gradients, sequences that depend on each other, sizes of one config, dtypes, changed arguments.
    ("every_sequence_has_exactly_m_masks", "maelm.apply_masks", "masked, kept)", "masked, kept.int())"),
    ("only_real_or_given_positions_are_masked", "maelm.corrupt", "tokens >= NUM_SPECIAL",
     "(tokens >= NUM_SPECIAL) & (tokens < 300)", "tokens > NUM_SPECIAL"),
    ("masks_are_uniform_over_real_tokens", "maelm.draw_masks", "torch.rand(maskable.shape,",
     "torch.rand(maskable[:1].shape,"),
    ("masks_are_uniform_over_real_tokens", "maelm.apply_masks", "Corruption(corrupted, masked,",
     "Corruption(corrupted, masked.sort(1).values,"),
    ("corrupt_is_a_pure_function", "maelm.apply_masks", "tokens.scatter(", "tokens.scatter_("),
    ("corrupt_is_a_pure_function", "maelm.apply_masks", "config.vocab_size, generator=generator", "config.vocab_size"),
    ("a_random_fill_is_any_real_token", "maelm.apply_masks", "config.vocab_size", "300", "config.vocab_size - 1"),
    ("a_random_fill_is_any_real_token", "maelm.apply_masks", "        replacement.random_(",
     "        replacement = replacement[:, :1].expand(B, m)\n        replacement[:, :1].random_("),
    ("gaps_are_filled_by_the_two_case_formula", "maelm.MAELM.fill_gaps", "expand(B, n, -1)", "expand(B, 5, 32)"),
    ("the_mask_embedding_learns_from_every_gap", "maelm.MAELM.fill_gaps", "= h\n", "= h.detach()\n"),
    ("near_distances_have_buckets_of_their_own", "maelm.relative_bucket", "half + bucket, bucket)",
     "half + bucket, bucket).int()"),
    ("near_distances_have_buckets_of_their_own", "maelm.relative_bucket", "distance.abs()", "distance.abs_()"),
    ("far_buckets_begin_where_t5s_begin", "maelm.relative_bucket", " + 1e-9", "", " + 0.5"),
    ("far_buckets_begin_where_t5s_begin", "maelm.relative_bucket", "num_buckets // 2", "16"),
    ("far_buckets_begin_where_t5s_begin", "maelm.relative_bucket", "math.log(max_distance /", "math.log(128 /"),
    ("relative_bias_is_of_key_minus_query", "maelm.RelativeBias.forward", "len(values) // 2", "23"),
    ("each_sequence_has_positions_of_its_own", "maelm.RelativeBias.forward", "        values =",
     "        positions -= positions[:, :1].clone()\n        values ="),
    ("attention_and_its_gradients_are_the_formulas", "maelm.attention", "(q *", "(q.detach() *"),
    ("a_bias_can_hide_keys_and_is_not_changed", "maelm.attention", "logits + bias", "bias.add_(0.1) + logits",
     "logits + bias.transpose(-2, -1)"),
    ("a_bias_can_hide_keys_and_is_not_changed", "maelm.attention", ".to(q.dtype)\n", "\n"),
    ("attention_drops_weights_out", "maelm.attention", "F.dropout(weights, p) @ v", "weights @ v",
     "F.dropout(weights @ v, p)", "(weights * F.dropout(torch.ones_like(weights[:, :1]), p)) @ v"),
    ("attention_has_dropout_in_training_only", "maelm.Attention.forward", "self.p if self.training else 0.0)",
     "0.0); z = F.dropout(z, self.p, self.training)"),
    ("cross_attention_reads_its_memory", "maelm.Attention.forward", "x if memory is None else memory", "x"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "maelm.Attention.forward", "self.query(x)",
     "self.query(x.detach())", "self.query(x).detach()"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "maelm.Attention.forward", "(self.heads, -1)", "(-1, 8)"),
    ("the_first_state_sums_embeddings", "maelm.Encoder.hidden_states", "embedding(positions)",
     "embedding(torch.arange(tokens.shape[1]))", "embedding(positions[:1])",
     "embedding(positions - positions[:, :1])"),
    ("all_layers_are_listed_and_learn", "maelm.Encoder.hidden_states", "self.token_embedding(tokens)",
     "self.token_embedding(tokens).detach()"),
    ("all_layers_are_listed_and_learn", "maelm.Encoder.hidden_states", "padding, at)", "padding)"),
    ("embeddings_have_dropout_in_training_only", "maelm.Encoder.hidden_states", "self.dropout(self.norm(h))",
     "self.norm(h) * self.dropout(torch.ones(h.shape[-1]))"),
    ("loss_is_the_mean_over_the_masked_positions", "maelm.MAELM.forward", ".float()", ""),
    ("mlm_is_the_textbook_mlm", "maelm.MAELM.forward", "self.logits(corruption)", "self.logits(corruption).detach()"),
    ("rank_is_the_smallest_k_that_reaches_tau", "rank.tau_rank", "int((~reached).sum())", "(~reached).sum()"),
    ("the_mean_is_not_subtracted", "rank.effective_rank", "    x =", "    h = h.sub_(1)\n    x ="),
    ("what_has_no_rank_is_refused", "rank.effective_rank", "x.ndim != 2", "x.ndim < 2"),
    ("matthews_of_two_labels_is_the_formula", "support.metrics.matthews", "    both =", "    true.sort()\n    both ="),
    ("matthews_of_several_labels_is_gorodkins", "support.metrics.matthews", "len(labels)", "4"),
    ("a_single_label_correlates_with_nothing", "support.metrics.matthews", " or np.ptp(predicted) == 0", ""),
    # Kinds that only random inputs find.
    ("random_schedules", "train.learning_rate_factor", "return (max_steps - step)", "return max(2, max_steps - step)"),
    ("rank_of_random_values", "rank.tau_rank", "(tau - 1e-9)", "(tau - 1e-7)"),
    ("matthews_of_random_labels", "support.metrics.matthews", "predicted])", "predicted]).astype(np.uint8)"),
    ("rank_of_random_matrices", "rank.effective_rank", "svdvals(x)", "svdvals(x.float()).double()"),
    ("random_distances", "maelm.relative_bucket", "num_buckets // 2", "(num_buckets + 1) // 2"),
    ("attention_of_random_heads", "maelm.attention", "logits.float()", "logits.clamp(-50, 50).float()"),
    ("biases_of_random_positions", "maelm.RelativeBias.forward", "lookup(values,", "lookup(values.float(),"),
    ("layers_of_random_sizes", "maelm.Attention.forward", "else memory)", "else memory.detach())"),
    ("masks_of_random_texts", "maelm.draw_masks", "0 < m <=", "0 <= m <="),
    ("states_of_random_texts", "maelm.Encoder.hidden_states", "padding, at)", "padding, at)[:-1] + [h]"),
    ("random_gaps", "maelm.MAELM.fill_gaps", "corruption.masked] = e_mask", "corruption.masked] = e_mask.detach()"),
    ("losses_of_random_texts", "maelm.MAELM.forward", "targets.flatten()", "targets.flatten(), ignore_index=5"),
    ("the_loss_falls_as_ours_does", "maelm.MAELM.decode", "fill_gaps(h,", "fill_gaps(h.detach(),"),
]
CASES = [(claim, place, piece, mistake) for claim, place, piece, *mistakes in MISTAKES for mistake in mistakes]


def module_with(place, piece, mistake):
    """(the last name of `place`, its module with a mistake for a piece of it)."""
    parts = place.split(".")
    length = 2 if parts[0] == "support" else 1
    path = ROOT.joinpath(*parts[:length]).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    function = ast.get_source_segment(text, find(text, ".".join(parts[length:])))
    count = function.count(piece)
    assert count == 1, f"{piece!r} is {count} times in {place}, not once: change its row in MISTAKES"
    module = types.ModuleType("wrong")
    sys.modules["wrong"] = module  # where dataclasses look for their module
    exec(compile(text.replace(function, function.replace(piece, mistake)), path, "exec"), vars(module))
    return parts[length - 1], module


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("claim, place, piece, mistake", CASES, ids=[f"{case[0][:45]}" for case in CASES])
def test_the_claim_finds_the_mistake(claim, place, piece, mistake, monkeypatch):
    files = (test_maelm, test_table_2, test_homework, test_random_inputs, test_rank, test_train)
    test = next(getattr(file, f"test_{claim}") for file in files if hasattr(file, f"test_{claim}"))
    name, module = module_with(place, piece, mistake)
    for names in (test.__globals__, vars(test_maelm), vars(conftest)):
        monkeypatch.setitem(names, name, module)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError,
                        pytest.fail.Exception)):  # but no NameError: a mistake, not a slip
        test()
