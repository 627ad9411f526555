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
    ("every_sequence_has_exactly_m_masks", "masked, kept)", "masked, kept.int())"),
    ("only_real_or_given_positions_are_masked", "tokens >= NUM_SPECIAL", "tokens > NUM_SPECIAL"),
    ("all_else_is_kept_in_order_and_unchanged", ".view(B, -1)", ".view(B, -1).flip(1)"),
    ("masks_are_uniform_over_real_tokens", "(corrupted, masked,", "(corrupted, masked.sort(1).values,"),
    ("corrupt_is_a_pure_function", "    fewest =", "    generator.manual_seed(generator.initial_seed())\n    fewest ="),
    ("delta_is_the_share_of_masks_that_the_encoder_sees", "round(config", "int(config"),
    ("any_number_of_masks_can_be_applied", "is_masked.sum() != B * m", "False"),
    ("masked_tokens_do_not_leak", "tokens.scatter(1, masked, replacement)", "tokens"),
    ("removing_equals_hiding", "positions = corruption.kept ", "positions = corruption.kept // 2 "),
    ("gaps_are_filled_by_the_two_case_formula", "expand(B, n, -1)", "expand(B, 5, 32)"),
    ("the_mask_embedding_learns_from_every_gap", "[MASK].to(h.dtype)", "[MASK].detach().to(h.dtype)"),
    ("near_distances_have_buckets_of_their_own", "half + bucket, bucket)", "half + bucket, bucket).int()"),
    ("relative_bias_is_of_key_minus_query", "len(values) // 2", "23"),
    ("each_sequence_has_positions_of_its_own", "positions[:, None, :]", "positions[:1, None, :]"),
    ("the_gradient_of_a_bias_counts_its_uses", "self.table(self.bucket)", "self.table(self.bucket).detach()"),
    ("attention_and_its_gradients_are_the_formulas", "d_h = q.shape[-1]", "d_h = q.shape[-1]; torch.manual_seed(1)"),
    ("each_head_has_a_bias_of_its_own", "v, bias, self.p", "v, None, self.p"),
    ("a_layer_and_its_gradients_equal_pytorchs_own", "(self.heads, -1)", "(-1, 8)"),
    ("mlm_is_the_textbook_mlm", "self.logits(corruption)", "self.logits(corruption).detach()"),
    ("all_layers_are_listed_and_learn", "stack(h, positions, padding, at)", "stack(h, positions, padding)"),
    ("padding_and_other_sequences_change_nothing", "stack(h, positions, padding,", "stack(h, positions, None,"),
    ("loss_is_the_mean_over_the_masked_positions", ".float(), targets.flatten())", ", targets.flatten()).float()"),
    ("mae_lm_is_the_papers_figure_2", "h.device)[:, None]", "h.device)[:, None] // 2 * 2"),
    ("warm_up_ends_at_the_peak", "(step + 1) / warmup_steps", "step / warmup_steps"),
    ("the_rate_falls_linearly_to_zero", "/ (max_steps - warmup_steps)", "/ max_steps"),
    ("rank_is_the_smallest_k_that_reaches_tau", "values.cumsum(0)", "values.sqrt().cumsum(0)"),
    ("zeros_have_rank_0_and_a_bad_tau_is_refused", "0 < tau < 1:", "0 < tau <= 1:"),
    ("equal_singular_values_count_exactly", "(tau - 1e-9)", "tau"),
    ("rank_is_exact_for_known_singular_values", "svdvals(x) ** 2", "svdvals(x)"),
    ("any_real_dtype_is_measured_in_float64", "torch.as_tensor(h).double()", "torch.as_tensor(h).float()"),
    ("the_mean_is_not_subtracted", "    x = torch.as", "    h = h.sub_(1)\n    x = torch.as"),
    ("inputs_without_a_rank_are_refused", "x.ndim != 2", "x.ndim < 2"),
    ("matthews_of_two_labels_is_the_formula", "math.sqrt((t * t).sum() * (p * p).sum())", "(t * t).sum()"),
    ("matthews_of_several_labels_is_gorodkins", "len(labels)", "4"),
    ("a_random_fill_is_any_real_token", "NUM_SPECIAL, config.vocab_size,", "NUM_SPECIAL, config.vocab_size - 1,"),
    ("far_buckets_begin_where_t5s_begin", "math.log(max_distance /", "math.log(128 /"),
    ("a_bias_can_hide_keys", ".to(q.dtype)\n", "\n"),
    ("attention_drops_weights_out", "d_h = q.shape[-1]", "d_h = q.shape[-1]; k = F.dropout(k, p)"),
    ("attention_has_dropout_in_training_only", "= attention(q", "= attention(F.dropout(q, self.p, self.training)"),
    ("cross_attention_reads_its_memory", "x if memory is None else memory", "x"),
    ("the_first_state_sums_embeddings", "(tokens) + self.position_embedding(positions)",
     "(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))"),
    ("embeddings_have_dropout_in_training_only", "self.dropout(self.norm(h))", "self.norm(self.dropout(h))"),
    ("a_single_label_correlates_with_nothing", " or np.ptp(predicted) == 0", ""),
    ("the_loss_falls_as_ours_does", "= self.fill_gaps(h,", "= self.fill_gaps(h.detach(),"),
]
RANDOM = [  # task; a piece of our code; wrong code in its place. Only the effects of random calls differ.
    ("learning_rate_factor", "return (max_steps - step)", "return max(2, max_steps - step)"),
    ("tau_rank", "(tau - 1e-9)", "(tau - 1e-7)"),
    ("matthews", "predicted])", "predicted]).astype(np.uint8)"),
    ("effective_rank", "svdvals(x)", "svdvals(x[:2048])"),
    ("relative_bucket", "distance.abs()", "distance.short().abs()"),
    ("attention", "logits = logits + bias", "logits = logits + bias.clamp(min=-100)"),
    ("RelativeBias.forward", "index = distance", "index = torch.zeros(distance.shape, dtype=torch.int64) + distance"),
    ("MAELM.fill_gaps", "row = torch.arange(B, device=h.device)", "row = torch.arange(B).clamp(max=63)"),
    ("MAELM.forward", "targets.flatten())", "targets.flatten(), label_smoothing=0.1 * self.training)"),
    ("Attention.forward", "self.p if self.training else", "self.p if self.training and torch.is_grad_enabled() else"),
    ("corrupt", "0 < m <=", "0 <= m <="),
    ("Encoder.hidden_states", "h = self.token_embedding(tokens)", "self.eval(); h = self.token_embedding(tokens)"),
    ("together", "/ (max_steps - warmup_steps)", "/ (max_steps - warmup_steps + 1)"),
]
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
FILES = ["maelm.py", "rank.py", "train.py", "support/tasks/classification.py"]


def module_with(piece, mistake):
    """The name of the module that has this piece, and the module with a mistake in place of the piece."""
    texts = {Path(file).stem: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    name = next((name for name in texts if piece in texts[name]), None)
    if name is None:
        pytest.skip(f"{piece!r} is no longer in {FILES}")
    module = types.ModuleType("wrong")
    sys.modules["wrong"] = module  # where dataclasses look for their module
    exec(compile(texts[name].replace(piece, mistake), name, "exec"), vars(module))
    return name, module


@pytest.mark.parametrize("claim, piece, mistake", MISTAKES, ids=[claim[:45] for claim, *_ in MISTAKES])
def test_the_claim_finds_the_mistake(claim, piece, mistake, monkeypatch):
    test = getattr(test_maelm, f"test_{claim}", None) or getattr(test_homework, f"test_{claim}")
    name, module = module_with(piece, mistake)
    for names in (test.__globals__, vars(conftest)):
        monkeypatch.setitem(names, name, module)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError,
                        pytest.fail.Exception)):  # but not NameError, which would be a typo here
        test()


@pytest.mark.parametrize("task, piece, mistake", RANDOM, ids=[task for task, *_ in RANDOM])
def test_random_calls_have_other_effects(task, piece, mistake, monkeypatch):
    expected = list(random_inputs.effects(task))
    name, module = module_with(piece, mistake)
    for names in (vars(random_inputs), vars(test_homework)):
        monkeypatch.setitem(names, name, module)
    with pytest.raises((AssertionError, RuntimeError, LookupError)):
        assert not random_inputs.difference([*random_inputs.effects(task)], expected)  # by the grader's own tolerance
