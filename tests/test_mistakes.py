"""Wrong versions of the code: for each, a claim detects the mistake."""
import sys
import types
from pathlib import Path

import pytest
import torch

import conftest
import test_maelm
from tests import random_inputs, test_homework
from tests.common import ROOT

MISTAKES = [  # claim, without test_; a piece of our code; wrong code in its place
    ("every_sequence_has_exactly_m_masks", "number.topk(m, largest=False).indices",
     "torch.randint(1, maskable.shape[1] - 1, (len(maskable), m))"),
    ("only_real_or_given_positions_are_masked", "number.masked_fill(~maskable, 2.0)", "number"),
    ("all_else_is_kept_in_order_and_unchanged", ".view(B, -1)", ".view(B, -1).flip(1)"),
    ("masks_are_uniform_over_real_tokens", "number.masked_fill(~maskable, 2.0)",
     "F.pad(number[:, 1:-1:2].repeat_interleave(2, 1), (1, 1)).masked_fill(~maskable, 2.0)"),
    ("corrupt_is_a_pure_function", ", generator=generator, device=maskable.device", ""),
    ("delta_is_the_share_of_masks_that_the_encoder_sees", "round(config", "int(config"),
    ("any_number_of_masks_can_be_applied", "is_masked.sum() != B * m", "False"),
    ("only_real_or_given_positions_are_masked", "maskable.sum(1).min()", "maskable.sum(1).max()"),
    ("masked_tokens_do_not_leak", "tokens.scatter(1, masked, replacement)", "tokens"),
    ("removing_equals_hiding", "positions = corruption.kept ", "positions = corruption.kept // 2 "),
    ("gaps_are_filled_by_the_two_case_formula", "if self.config.decoder_reset", "if False"),
    ("the_mask_embedding_learns_from_every_gap", "[MASK].to(h.dtype)", "[MASK]", "[MASK].detach().to(h.dtype)"),
    ("near_distances_have_buckets_of_their_own", "where(distance > 0", "where(distance < 0"),
    ("relative_bias_is_of_key_minus_query", "index = distance", "index = -distance"),
    ("each_sequence_has_positions_of_its_own", "positions[:, None, :]", "positions[:1, None, :]"),
    ("the_gradient_of_a_bias_counts_its_uses", "self.table(self.bucket)", "self.table(self.bucket).detach()"),
    ("attention_and_its_gradients_are_the_formulas", "s + bias", "s + bias.detach()", "s + bias[:1]"),
    ("attention_and_its_gradients_are_the_formulas", "d_h ** -0.5", "d_h ** -1", "1", "0.5"),
    ("each_head_has_a_bias_of_its_own", "v, bias, self.p", "v, None, self.p"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "z.transpose(1, 2).f", "z.f"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "layer(norm(x), *arguments))", "layer(x, *arguments))"),
    ("mlm_is_the_textbook_mlm", "= x.take_along_dim(at", "= x.take_along_dim(at.sort(1).values"),
    ("all_layers_are_listed_and_learn", "self.dropout(self.norm(h))", "self.dropout(h)"),
    ("padding_and_other_sequences_change_nothing", "stack(h, positions, padding,", "stack(h, positions, None,"),
    ("loss_is_the_mean_over_the_masked_positions", "tokens.gather(1, corruption.masked)",
     "tokens.gather(1, corruption.masked.sort(1).values)"),
    ("mae_lm_is_the_papers_figure_2", "h.device)[:, None]", "h.device)[:, None] // 2 * 2"),
    ("warm_up_ends_at_the_peak", "(step + 1) / warmup_steps", "step / warmup_steps"),
    ("the_rate_falls_linearly_to_zero", "/ (max_steps - warmup_steps)", "/ max_steps"),
    ("rank_is_the_smallest_k_that_reaches_tau", "values.cumsum(0)", "values.sqrt().cumsum(0)"),
    ("zeros_have_rank_0_and_a_bad_tau_is_refused", "if values[0] == 0:", "if False:"),
    ("zeros_have_rank_0_and_a_bad_tau_is_refused", "0 < tau < 1:", "0 <= tau < 1:", "0 < tau <= 1:"),
    ("equal_singular_values_count_exactly", "(tau - 1e-9)", "tau"),
    ("rank_is_exact_for_known_singular_values", "svdvals(x) ** 2", "svdvals(x)"),
    ("any_real_dtype_is_measured_in_float64", "torch.as_tensor(h).double()", "torch.as_tensor(h).float()"),
    ("the_mean_is_not_subtracted", "svdvals(x)", "svdvals(x - x.mean(0))"),
    ("inputs_without_a_rank_are_refused", "not x.isfinite().all()", "x.isnan().all()"),
    ("matthews_of_two_labels_is_the_formula", "math.sqrt((t * t).sum() * (p * p).sum())", "(t * t).sum()"),
    ("matthews_of_several_labels_is_gorodkins", "    p = p - p.mean(0)\n", ""),
    # Silent errors: gradients, sequences that depend on each other, hard-coded sizes, dtypes, changed arguments.
    ("every_sequence_has_exactly_m_masks", "masked, kept)", "masked, kept.int())"),
    ("only_real_or_given_positions_are_masked", "tokens >= NUM_SPECIAL", "(tokens >= NUM_SPECIAL) & (tokens < 300)",
     "tokens > NUM_SPECIAL"),
    ("masks_are_uniform_over_real_tokens", "torch.rand(maskable.shape,", "torch.rand(maskable[:1].shape,"),
    ("masks_are_uniform_over_real_tokens", "(corrupted, masked,", "(corrupted, masked.sort(1).values,"),
    ("corrupt_is_a_pure_function", "tokens.scatter(", "tokens.scatter_("),
    ("corrupt_is_a_pure_function", "config.vocab_size, generator=generator", "config.vocab_size"),
    ("a_random_fill_is_any_real_token", "NUM_SPECIAL, config.vocab_size,", "0, config.vocab_size,",
     "NUM_SPECIAL, 300,", "NUM_SPECIAL, config.vocab_size - 1,"),
    ("a_random_fill_is_any_real_token", "replacement.random_(NUM_SPECIAL, config.vocab_size, generator=generator)",
     "replacement = torch.randint(config.vocab_size, (B, m), generator=generator).clamp(min=NUM_SPECIAL)"),
    ("corrupt_is_a_pure_function", "        replacement.random_(",
     "        generator = torch.Generator().manual_seed(generator.initial_seed())\n        replacement.random_("),
    ("corrupt_is_a_pure_function", "    fewest =", "    generator.manual_seed(generator.initial_seed())\n    fewest ="),
    ("gaps_are_filled_by_the_two_case_formula", "expand(B, n, -1)", "expand(B, 5, 32)"),
    ("near_distances_have_buckets_of_their_own", "half + bucket, bucket)", "half + bucket, bucket).int()"),
    ("far_buckets_begin_where_t5s_begin", " + 1e-9", "", " + 0.5"),
    ("far_buckets_begin_where_t5s_begin", "num_buckets // 2", "16"),
    ("far_buckets_begin_where_t5s_begin", "math.log(max_distance /", "math.log(128 /"),
    ("relative_bias_is_of_key_minus_query", "len(values) // 2", "23"),
    ("a_bias_can_hide_keys", "logits + bias", "logits + bias.transpose(-2, -1)"),
    ("a_bias_can_hide_keys", ".to(q.dtype)\n", "\n"),
    ("attention_drops_weights_out", "F.dropout(weights, p) @ v", "weights @ v", "F.dropout(weights @ v, p)",
     "(weights * F.dropout(torch.ones_like(weights[:, :1]), p)) @ v"),
    ("attention_has_dropout_in_training_only", "self.p if self.training else 0.0)", "self.p)",
     "0.0); z = F.dropout(z, self.p, self.training)"),
    ("cross_attention_reads_its_memory", "x if memory is None else memory", "x"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "query(x)", "query(x.detach())", "query(x).detach()"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "(self.heads, -1)", "(-1, 8)"),
    ("the_first_state_sums_embeddings", "(tokens) + self.position_embedding(positions)",
     "(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))",
     "(tokens) + self.position_embedding(positions - positions[:, :1])"),
    ("all_layers_are_listed_and_learn", "self.token_embedding(tokens)", "self.token_embedding(tokens).detach()"),
    ("all_layers_are_listed_and_learn", "stack(h, positions, padding, at)", "stack(h, positions, padding)"),
    ("embeddings_have_dropout_in_training_only", "self.dropout(self.norm(h))", "self.norm(self.dropout(h))",
     "self.norm(h) * self.dropout(torch.ones(h.shape[-1]))",
     "self.dropout(self.norm(h)) if torch.is_grad_enabled() else self.norm(h)"),
    ("loss_is_the_mean_over_the_masked_positions", ".float(), targets.flatten())", ", targets.flatten())",
     ", targets.flatten()).float()", '.float(), targets.flatten(), reduction="sum")'),
    ("mlm_is_the_textbook_mlm", "self.logits(corruption)", "self.logits(corruption).detach()"),
    ("rank_is_the_smallest_k_that_reaches_tau", "int(torch.searchsorted(values.cumsum(0), enough))",
     "torch.searchsorted(values.cumsum(0), enough)"),
    ("the_mean_is_not_subtracted", "    x = torch.as", "    h = h.sub_(1)\n    x = torch.as"),
    ("inputs_without_a_rank_are_refused", "x.ndim != 2", "x.ndim < 2"),
    ("matthews_of_several_labels_is_gorodkins", "len(labels)", "4"),
    ("a_single_label_correlates_with_nothing", " or np.ptp(predicted) == 0", ""),
    ("attention_drops_weights_out", "d_h = q.shape[-1]", "d_h = q.shape[-1]; q = F.dropout(q, p)",
     "d_h = q.shape[-1]; k = F.dropout(k, p)"),
    ("attention_and_its_gradients_are_the_formulas", "d_h = q.shape[-1]", "d_h = q.shape[-1]; torch.manual_seed(1)"),
    ("any_real_dtype_is_measured_in_float64", "x = torch.as_tensor(h).double()",
     "x = torch.as_tensor(h); x = x.double() if x.sum().isfinite() else x[:0]"),
    ("matthews_of_two_labels_is_the_formula", "    both = np.concatenate",
     "    if set(true) == {0, 1}:\n        tp, tn = (true & predicted).sum(), ((1 - true) & (1 - predicted)).sum()\n"
     "        a, b, c, d = (n.sum() for n in (true, predicted, 1 - true, 1 - predicted))\n"
     "        return float((tp * tn - (a - tp) * (b - tp)) / math.sqrt(a * b * c * d))\n    both = np.concatenate"),
    ("only_real_or_given_positions_are_masked", "number.topk(m, largest=False).indices",
     "torch.multinomial(maskable + 1e-4, m, generator=generator)"),
    ("a_random_fill_is_any_real_token", "replacement.random_(NUM_SPECIAL, config.vocab_size, generator=generator)",
     "replacement = NUM_SPECIAL + torch.rand(B, config.vocab_size - 4, generator=generator).topk(m).indices"),
    ("far_buckets_begin_where_t5s_begin", "(size.clamp(min=max_exact).double() / max_exact).log()",
     "(size.clamp(min=max_exact).float() / max_exact).log()"),
    ("the_gradient_of_a_bias_counts_its_uses", "values = self.table",
     "self.register_buffer('at', positions); values = self.table"),
    ("the_loss_falls_as_ours_does", "= self.fill_gaps(h,", "= self.fill_gaps(h.detach(),"),
    ("attention_has_dropout_in_training_only", "= attention(q", "= attention(F.dropout(q, self.p, self.training)"),
]
RANDOM = [  # task; a piece of our code; wrong code in its place. Only the effects of random calls differ.
    ("learning_rate_factor", "return (max_steps - step)", "return max(2, max_steps - step)"),
    ("tau_rank", "(tau - 1e-9)", "(tau - 1e-7)"),
    ("matthews", "predicted])", "predicted]).astype(np.uint8)"),
    ("effective_rank", "svdvals(x)", "svdvals(x.float()).double()", "svdvals(x[:2048])"),
    ("relative_bucket", "num_buckets // 2", "(num_buckets + 1) // 2"),
    ("relative_bucket", "distance.abs()", "distance.abs().clamp(max=300)", "distance.abs_()", "distance.short().abs()"),
    ("attention", "logits.float()", "logits.clamp(-50, 50).float()"),
    ("RelativeBias.forward", "        values = self",
     "        positions -= positions[:, :1].clone()\n        values = self"),
    ("attention", ".softmax(dim=-1)", ".softmax(dim=-1).add(1e-3)"),
    ("RelativeBias.forward", "index = distance + len(values) // 2",
     "index = self.kept = getattr(self, 'kept', distance + len(values) // 2)"),
    ("RelativeBias.forward", "index = distance", "index = torch.zeros(distance.shape, dtype=torch.int64) + distance"),
    ("MAELM.fill_gaps", "= e_mask.expand(B, n, -1).clone()", "= self.encoder.dropout(e_mask.expand(B, n, -1).clone())"),
    ("MAELM.forward", "logits = self.logits(corruption)", "self.encoder.eval(); logits = self.logits(corruption)",
     "logits = F.dropout(self.logits(corruption), self.config.dropout, self.training)"),
    ("Attention.forward", "z = attention(q, k, v, bias,", "z = attention(q, k, v, None if self.training else bias,"),
    ("corrupt", "is_masked.sum() != B * m", "(masked[:, 1:] == masked[:, :-1]).any()"),
    ("Attention.forward", "else memory\n", "else memory.detach()\n"),
    ("corrupt", "0 < m <=", "0 <= m <="),
    ("corrupt", "masked, replacement)",
     "masked, replacement.where(torch.arange(m) < round(config.mask_in_encoder * m), MASK))"),
    ("Encoder.hidden_states", "stack(h, positions, padding, at)", "stack(h, positions, padding, at)[:-1] + [h]"),
    ("Encoder.hidden_states", "h = self.token_embedding(tokens)", "self.eval(); h = self.token_embedding(tokens)"),
    ("MAELM.fill_gaps", "if self.config.decoder_reset:", "if self.config.decoder_reset and not self.training:"),
    ("MAELM.fill_gaps", "row = torch.arange(B, device=h.device)", "row = torch.arange(B).clamp(max=63)"),
    ("MAELM.forward", "targets.flatten())", "targets.flatten(), ignore_index=5)",
     "targets.flatten(), label_smoothing=0.1 * self.training)"),
    ("Encoder.hidden_states", "h = self.token_embedding(tokens)",
     "self.register_buffer('at', positions); h = self.token_embedding(tokens)",
     "torch.manual_seed(1); h = self.token_embedding(tokens)"),
    ("attention", "logits = logits + bias", "logits = logits + bias.squeeze(1)",
     "logits = logits + bias.clamp(min=-100)"),
    ("Attention.forward", "self.p if self.training else", "self.p if self.training and torch.is_grad_enabled() else"),
    ("Encoder.hidden_states", "self.position_embedding(positions)",
     "vars(self).setdefault(str(positions), self.position_embedding(positions))"),
    ("learning_rate_factor", "(max_steps - step) / (max_steps - warmup_steps)",
     "max(0.01, (max_steps - step) / (max_steps - warmup_steps))",
     "round((max_steps - step) / (max_steps - warmup_steps), 4)"),
    ("together", "/ (max_steps - warmup_steps)", "/ (max_steps - warmup_steps + 1)"),
]
CASES, RANDOM_CASES = [[(claim, piece, mistake) for claim, piece, *mistakes in rows for mistake in mistakes]
                       for rows in (MISTAKES, RANDOM)]
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
FILES = ["maelm.py", "rank.py", "train.py", "support/tasks/classification.py"]


def module_with(piece, mistake):
    """The name of the module that has this piece, and the module with a mistake in place of the piece."""
    texts = {Path(file).stem: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    name = next((name for name in texts if piece in texts[name]), None)
    assert name, f"{piece!r} is in none of {FILES}: change its row"
    module = types.ModuleType("wrong")
    sys.modules["wrong"] = module  # where dataclasses look for their module
    exec(compile(texts[name].replace(piece, mistake), name, "exec"), vars(module))
    return name, module


@pytest.mark.parametrize("claim, piece, mistake", CASES, ids=[claim[:45] for claim, *_ in CASES])
def test_the_claim_finds_the_mistake(claim, piece, mistake, monkeypatch):
    test = getattr(test_maelm, f"test_{claim}", None) or getattr(test_homework, f"test_{claim}")
    name, module = module_with(piece, mistake)
    for names in (test.__globals__, vars(conftest)):
        monkeypatch.setitem(names, name, module)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError,
                        pytest.fail.Exception)):  # but not NameError, which would be a typo here
        test()


@pytest.mark.parametrize("task, piece, mistake", RANDOM_CASES, ids=[task for task, *_ in RANDOM_CASES])
def test_random_calls_have_other_effects(task, piece, mistake, monkeypatch):
    expected = list(random_inputs.effects(task))
    name, module = module_with(piece, mistake)
    for names in (vars(random_inputs), vars(test_homework)):
        monkeypatch.setitem(names, name, module)
    with pytest.raises((AssertionError, RuntimeError, LookupError)):
        assert not random_inputs.difference([*random_inputs.effects(task)], expected)  # by the grader's own tolerance
