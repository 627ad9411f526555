"""Claims about four short functions outside of maelm.py that students write in the course."""
import itertools
import math

import numpy as np
import pytest
import torch

import rank
import train
from conftest import generator
from support import metrics

task = pytest.mark.task
TAUS = (0.5, 0.8, 0.9, 0.95, 0.99)


@task("learning_rate_factor")
def test_warm_up_ends_at_the_peak():
    assert [train.learning_rate_factor(step, 4, 12) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])


@task("learning_rate_factor")
def test_the_rate_falls_linearly_to_zero():
    factors = [train.learning_rate_factor(step, 4, 12) for step in range(4, 12)]
    assert factors == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert [train.learning_rate_factor(step, 0, 2) for step in range(2)] == pytest.approx([1, 0.5])


@task("matthews")
def test_matthews_of_two_labels_is_the_formula():
    true = np.array([1] * 8 + [0] * 4)
    guess = np.array([1] * 6 + [0] * 2 + [0] * 3 + [1])  # TP 6, FN 2, TN 3, FP 1
    assert metrics.matthews(guess, true) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5))
    assert metrics.matthews(1 - guess, true) == pytest.approx((2 * 1 - 3 * 6) / math.sqrt(5 * 8 * 4 * 7))


@task("matthews")
def test_matthews_of_several_labels_is_gorodkins():
    true, guess = np.random.default_rng(1).integers(3, size=(2, 60))
    true[:30] = guess[:30]
    guess[50:] = 3  # a label that is never true
    right, t, p = (true == guess).sum(), np.bincount(true, minlength=4), np.bincount(guess)
    expected = (60 * right - t @ p) / math.sqrt((60 ** 2 - t @ t) * (60 ** 2 - p @ p))
    assert [metrics.matthews(true, true), metrics.matthews(guess, 0 * true)] == pytest.approx([1, 0])
    for names in ([0, 1, 2, 3], [1, 7, 0, -2]):
        assert metrics.matthews(np.array(names)[guess], np.array(names)[true]) == pytest.approx(expected)


@task("tau_rank")
def test_rank_is_the_smallest_k_that_reaches_tau():
    values = torch.tensor([16.0, 9, 4, 1], dtype=torch.float64)
    taus = (0.5, 0.5333333, 0.5333334, 0.8, 0.9, 0.97)  # 16 of 30 is 0.53333333...
    for scale in (1, 1e-15):
        assert [rank.tau_rank(scale * values, tau) for tau in taus] == [1, 1, 2, 2, 3, 4]
    assert rank.tau_rank(0 * values, 0.9) == 0
    for tau in (-0.1, 0, 1, 1.5):
        with pytest.raises(ValueError):
            rank.tau_rank(values, tau)


@task("tau_rank")
def test_equal_singular_values_count_exactly():
    for d, tau, value in itertools.product((3, 10, 64), TAUS, (1, 0.1, 1 / 3)):
        k = int(np.ceil(tau * d - 1e-9))
        assert rank.tau_rank(torch.full((d,), value, dtype=torch.float64), tau) == k, (d, tau, value)


def with_squares(*squares):
    """A matrix (20, d) float64 with these d squared singular values."""
    left, right = (torch.randn(n, n, dtype=torch.float64, generator=generator(n)) for n in (20, len(squares)))
    u, v = torch.linalg.qr(left).Q[:, :len(squares)], torch.linalg.qr(right).Q
    return u * torch.tensor(squares, dtype=torch.float64).sqrt() @ v


@task("effective_rank")
def test_rank_is_exact_for_known_singular_values():
    for squares, ranks in (((16.0, 9, 4, 1), [1, 2, 3, 3, 4]), ((100.0, 1, 1, 1, 1), [1, 1, 1, 1, 4])):
        h = with_squares(*squares)
        for matrix in (h, h.float().numpy()):
            assert [rank.effective_rank(matrix, tau) for tau in TAUS] == ranks
    symmetric = torch.diag(torch.tensor([2.0, 1.0]))  # 4 of 5 are more than 0.75
    assert rank.effective_rank(symmetric, 0.75) == 1


@task("effective_rank")
def test_small_singular_values_count_in_float64():
    h = with_squares(1.0, 4e-8, 4e-8, 1e-14)
    assert [rank.effective_rank(h, 1 - rest) for rest in (1e-7, 6e-8, 2e-8)] == [1, 2, 3]


@task("effective_rank")
def test_the_mean_is_not_subtracted():
    h = 10 + torch.randn(200, 8, generator=generator(0))
    assert [rank.effective_rank(h, 0.95), rank.effective_rank(h - h.mean(0), 0.95)] == [1, 8]


@task("effective_rank")
def test_what_has_no_rank_is_refused():
    for h in (np.ones(5), np.full((5, 3), np.nan), np.full((5, 3), np.inf), np.ones((0, 3))):
        with pytest.raises(ValueError):
            rank.effective_rank(h)
