"""Claims about two short functions outside of maelm.py and rank.py that students write in the course."""
import math

import numpy as np
import pytest

from conftest import catches, run_with_wrong_version, wrong_versions  # not for students
from support import run, tasks

task = pytest.mark.task


@task("learning_rate_factor")
@catches("support.run.learning_rate_factor", "(step + 1) / warmup_steps", "step / warmup_steps")
def test_warm_up_rises_in_equal_steps_and_ends_at_the_peak():
    assert [run.learning_rate_factor(step, 4, 12) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])


@task("learning_rate_factor")
@catches("support.run.learning_rate_factor", "/ (max_steps - warmup_steps)", "/ max_steps")
@catches("support.run.learning_rate_factor", "step < warmup_steps", "step <= warmup_steps")
@catches("support.run.learning_rate_factor", "(max_steps - step)", "(max_steps - step - 1)")
def test_after_warm_up_the_rate_falls_linearly_to_zero():
    factors = [run.learning_rate_factor(step, 4, 12) for step in range(4, 12)]
    assert factors == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert [run.learning_rate_factor(step, 0, 2) for step in range(2)] == pytest.approx([1, 0.5])


@task("matthews")
@catches("support.tasks.matthews", "math.sqrt((t * t).sum() * (p * p).sum())", "(t * t).sum()")
def test_matthews_of_two_labels_is_the_textbook_formula():
    true = np.array([1] * 8 + [0] * 4)
    guess = np.array([1] * 6 + [0] * 2 + [0] * 3 + [1])  # TP 6, FN 2, TN 3, FP 1
    assert tasks.matthews(guess, true) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5))
    assert tasks.matthews(1 - guess, true) == pytest.approx((2 * 1 - 3 * 6) / math.sqrt(5 * 8 * 4 * 7))


@task("matthews")
@catches("support.tasks.matthews", "    p = p - p.mean(0)\n", "")
@catches("support.tasks.matthews", "if np.ptp(true) == 0 or np.ptp(predicted) == 0:", "if False:")
@catches("support.tasks.matthews", "np.eye(len(labels))[index.reshape(2, -1)]", "1.0 * index.reshape(2, -1)",
         "np.eye(len(labels))[:, np.isin(labels, true)][index.reshape(2, -1)]")
def test_matthews_of_several_labels_is_gorodkins():
    true, guess = np.random.default_rng(1).integers(3, size=(2, 60))
    true[:30] = guess[:30]
    guess[50:] = 3  # a label that is never true
    right, t, p = (true == guess).sum(), np.bincount(true, minlength=4), np.bincount(guess)
    expected = (60 * right - t @ p) / math.sqrt((60 ** 2 - t @ t) * (60 ** 2 - p @ p))
    assert [tasks.matthews(true, true), tasks.matthews(guess, 0 * true)] == pytest.approx([1, 0])
    for names in ([0, 1, 2, 3], [1, 7, 0, -2]):
        assert tasks.matthews(np.array(names)[guess], np.array(names)[true]) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, monkeypatch):
    run_with_wrong_version(claim, wrong, monkeypatch)
