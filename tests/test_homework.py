"""Claims about the four short functions that students write outside maelm.py, and about all functions together."""
import itertools
import math

import numpy as np
import pytest
import torch

import maelm
import rank
import train
from conftest import generator, task, tiny
from support import classification

TAUS = (0.5, 0.8, 0.9, 0.95, 0.99)
LOSS, DEVIATION = 0.72, 0.04  # of our solutions after 50 steps, over seeds 0 to 4


# ---- The learning rate ----------------------------------------------------------------------------------------------
@task("learning_rate_factor")
def test_warm_up_ends_at_the_peak():
    for n, expected in ((4, [0.25, 0.5, 0.75, 1]), (2, [0.5, 1])):
        found = [train.learning_rate_factor(step, n, 12) for step in range(n)]
        assert found == pytest.approx(expected), f"{n} steps of warm-up: 1/{n} at step 0, the peak at step {n - 1}"
    assert train.learning_rate_factor(2, 3, 3) == pytest.approx(1), "warmup_steps may equal max_steps"


@task("learning_rate_factor")
def test_the_rate_falls_linearly_to_zero():
    found = [train.learning_rate_factor(step, 4, 12) for step in range(4, 12)]
    expected = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert found == pytest.approx(expected), "the rate must fall in equal steps from 1 after warm-up to 0 at max_steps"
    found = [train.learning_rate_factor(step, 0, 2) for step in range(2)]
    assert found == pytest.approx([1, 0.5]), "warmup_steps may be 0"


# ---- A metric -------------------------------------------------------------------------------------------------------
@task("matthews", gate=True)
def test_matthews_of_two_labels_is_the_formula():
    true = np.array([1] * 8 + [0] * 4)
    guess = np.array([1] * 6 + [0] * 2 + [0] * 3 + [1])  # TP 6, FN 2, TN 3, FP 1
    before = guess.copy(), true.copy()
    found = classification.matthews(guess, true)
    assert found == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5)), "not the formula for two labels"
    assert isinstance(found, float), "the result must be a number, not an array"
    many = np.arange(120_000) % 2
    assert classification.matthews(many, many) == pytest.approx(1), "120,000 rows: products of counts exceed an integer"
    opposite = classification.matthews(1 - guess, true)
    assert opposite == pytest.approx((2 * 1 - 3 * 6) / math.sqrt(5 * 8 * 4 * 7)), "the opposite guess must score < 0"
    assert np.array_equal([guess, true], before), "an argument has changed: the caller still needs it"


@task("matthews", gate=True)
def test_matthews_of_several_labels_is_gorodkins():
    true, guess = np.random.default_rng(1).integers(5, size=(2, 60))
    true[:30] = guess[:30]
    guess[50:] = 5  # a label not in `true`
    right, t, p = (true == guess).sum(), np.bincount(true, minlength=6), np.bincount(guess)
    expected = (60 * right - t @ p) / math.sqrt((60 ** 2 - t @ t) * (60 ** 2 - p @ p))
    assert classification.matthews(true, true) == pytest.approx(1), "a perfect guess must score 1"
    for names in ([0, 1, 2, 3, 4, 5], [1, 7, 0, -2, 9, 4]):
        found = classification.matthews(np.array(names)[guess], np.array(names)[true])
        assert found == pytest.approx(expected), f"labels {names}: any integer can be a label, even one not in `true`"


@task("matthews")
def test_a_single_label_correlates_with_nothing():
    labels = np.array([0, 1, 2, 1])
    for predicted, true in ((labels, 0 * labels), (0 * labels, labels), (1 + 0 * labels, labels), (0 * labels,) * 2):
        assert classification.matthews(predicted, true) == 0, "must be 0 if `true` or `predicted` has a single label"


# ---- Effective rank -------------------------------------------------------------------------------------------------
@task("tau_rank", gate=True)
def test_rank_is_the_smallest_k_that_reaches_tau():
    values = torch.tensor([16.0, 9, 4, 1], dtype=torch.float64)
    before = values.clone()
    taus = (0.5, 0.5333333, 0.5333334, 0.8, 0.9, 0.97)  # 16 of 30 is 0.53333333...
    for scale in (1, 1e-15):
        found = [rank.tau_rank(scale * values, tau) for tau in taus]
        assert found == [1, 1, 2, 2, 3, 4], f"wrong ranks for the values 16, 9, 4, 1 times {scale}, tau in {taus}"
    assert type(rank.tau_rank(values, 0.9)) is int, "a rank must be an int"
    assert torch.equal(values, before), "the values have changed: the caller still needs them"


@task("tau_rank")
def test_zeros_have_rank_0_and_a_bad_tau_is_refused():
    values = torch.tensor([16.0, 9, 4, 1], dtype=torch.float64)
    assert rank.tau_rank(0 * values, 0.9) == 0, "a matrix of zeros must have rank 0"
    for tau in (-0.1, 0, 1, 1.5, math.nan):
        with pytest.raises(ValueError):
            rank.tau_rank(values, tau)


@task("tau_rank")
def test_equal_singular_values_count_exactly():
    for d, tau, value in itertools.product((3, 10, 64), TAUS, (1, 0.1, 1 / 3)):
        k = int(np.ceil(tau * d - 1e-9))
        found = rank.tau_rank(torch.full((d,), value, dtype=torch.float64), tau)
        assert found == k, f"{k} of {d} equal values reach {tau} of the sum: does rounding change the rank?"


def with_squares(*squares):
    """A matrix (20, d) float64 with these d squared singular values."""
    left, right = (torch.randn(n, n, dtype=torch.float64, generator=generator(n)) for n in (20, len(squares)))
    u, v = torch.linalg.qr(left).Q[:, :len(squares)], torch.linalg.qr(right).Q
    return u * torch.tensor(squares, dtype=torch.float64).sqrt() @ v


@task("effective_rank", gate=True)
def test_rank_is_exact_for_known_singular_values():
    for squares, ranks in (((16.0, 9, 4, 1), [1, 2, 3, 3, 4]), ((100.0, 1, 1, 1, 1), [1, 1, 1, 1, 4])):
        h = with_squares(*squares)
        for matrix in (h, h.T, h.float().numpy()):
            found = [rank.effective_rank(matrix, tau) for tau in TAUS]
            assert found == ranks, f"squared singular values {squares}, a matrix {tuple(matrix.shape)}, tau in {TAUS}"
    assert rank.effective_rank(h) == 1, "the default of tau must be 0.9"
    assert rank.effective_rank(torch.eye(300)) == 270, "300 equal singular values: all rows and columns must count"
    symmetric = torch.diag(torch.tensor([2.0, 1.0]))
    assert rank.effective_rank(symmetric, 0.75) == 1, "4 / 5 is more than 0.75"
    assert type(rank.effective_rank(symmetric)) is int, "a rank must be an int"


@task("effective_rank")
def test_any_real_dtype_is_measured_in_float64():
    h = with_squares(1.0, 4e-8, 4e-8, 1e-14)
    found = [rank.effective_rank(h, 1 - rest) for rest in (1e-7, 6e-8, 2e-8)]
    assert found == [1, 2, 3], "small singular values are lost: what is the precision of the sum?"
    whole = torch.tensor([[3, 0], [0, 1], [0, 0]])
    assert rank.effective_rank(torch.full((300, 300), 10).half()) == 1, "sums of 300 x 300 values overflow in float16"
    for matrix in (whole, whole.bfloat16(), whole.numpy(), whole.float().requires_grad_()):
        assert rank.effective_rank(matrix, 0.95) == 2, f"a matrix of {matrix.dtype}"


@task("effective_rank", gate=True)
def test_the_mean_is_not_subtracted():
    h = 10 + torch.randn(200, 8, dtype=torch.float64, generator=generator(0))  # which needs no copy
    before = h.clone()
    assert rank.effective_rank(h, 0.95) == 1, "nearly equal vectors have rank 1: do not subtract the mean"
    assert rank.effective_rank(h - h.mean(0), 0.95) == 8, "without its mean, this matrix has rank 8"
    assert torch.equal(h, before), "h has changed: the caller still needs it"


@task("effective_rank")
def test_inputs_without_a_rank_are_refused():
    for h in (np.ones(5), np.full((5, 3), np.nan), np.full((5, 3), np.inf), np.ones((0, 3)), np.ones((2, 3, 4))):
        with pytest.raises(ValueError):
            rank.effective_rank(h)


# ---- All together ---------------------------------------------------------------------------------------------------
def train_tiny(seed, steps=50):
    """Train a tiny model on texts that count up from one of four numbers -> model, corruption, tokens, losses."""
    config = tiny(vocab_size=20, encoder_heads=2, decoder_layers=1, init_std=0.1, norm="pre", rel_pos_buckets=8,
                  rel_pos_max_distance=20)
    torch.manual_seed(0)
    model, draw, losses = maelm.MAELM(config), generator(seed), []
    parameters = [*model.parameters()]
    # Adam, written out because torch.optim takes a second to load.
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step in range(steps):
        first = torch.randint(4, (32, 1), generator=draw)
        tokens = maelm.NUM_SPECIAL + (5 * first + torch.arange(24)) % 16
        corruption = maelm.corrupt(tokens, config, draw)
        loss = model(tokens, corruption)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        rate = 0.01 * train.learning_rate_factor(step, 5, 50)
        rate *= math.sqrt(1 - 0.95 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        for parameter, mean, square, gradient in zip(parameters, means, squares, gradients):
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient ** 2, 0.05)
            parameter.data -= rate * mean / (square.sqrt() + 1e-8)
        losses.append(loss.item())
    return model, corruption, tokens, losses


@task("together")
def test_the_loss_falls_as_ours_does():
    loss = np.mean([train_tiny(seed)[3][-10:] for seed in range(3)])
    assert not loss < LOSS - 4 * DEVIATION, f"loss {loss:.2f}, ours {LOSS}: too low; can the model see the answers?"
    assert loss < LOSS + 4 * DEVIATION, f"loss {loss:.2f}, ours {LOSS} (deviation {DEVIATION}): what is not learned?"


@task("together")
def test_a_trained_model_can_be_measured():
    model, corruption, tokens, _ = train_tiny(0)
    h = model.encode(corruption).flatten(0, 1)
    found = rank.effective_rank(h, 0.9)
    assert 4 <= found <= 13, f"the hidden states have effective rank {found}, ours 8"
    guess = model.logits(corruption).argmax(-1)
    found = classification.matthews(guess.flatten().numpy(), tokens.gather(1, corruption.masked).flatten().numpy())
    assert 0.5 < found < 1, f"the guesses' correlation with the masked tokens is {found:.2f}; ours is 0.9"
