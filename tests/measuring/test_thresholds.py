"""The paper's family of thresholds: known answers, a slow loop, ties, empty shares and saturated softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offramp.measuring.policy import exits_taken
from offramp.measuring.thresholds import Q_GRID, exit_counts, midway, q_thresholds


def test_known_answer() -> None:
    # q = 0.5 over three exits: shares 4/7, 2/7, 1/7; of 7 samples 4 leave at exit 1 and 2 at exit 2
    first = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    second = [0.1, 0.1, 0.1, 0.1, 0.2, 0.6, 0.4]
    confidences = np.array([first, second, [0.5] * 7], np.float32)
    thresholds = q_thresholds(confidences, 0.5)
    assert thresholds == (pytest.approx(0.55), pytest.approx(0.3))
    assert exits_taken(confidences, thresholds).tolist() == [1, 1, 1, 1, 3, 2, 2]


def slow(confidences: np.ndarray, q: float) -> list[int]:
    """The rule in words: who leaves where, sample by sample."""
    num_exits, samples = confidences.shape
    taken = [num_exits] * samples
    left = list(range(samples))
    for k, count in enumerate(exit_counts(samples, num_exits, q)[:-1]):
        if not 0 < count <= len(left):
            continue
        ranked = sorted(left, key=lambda i: -confidences[k, i])
        least = confidences[k, ranked[count - 1]]
        for i in [i for i in left if confidences[k, i] >= least]:
            taken[i] = k + 1
            left.remove(i)
    return taken


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_slow_loop_with_ties(seed: int) -> None:
    draw = np.random.default_rng(seed)
    exits, samples = int(draw.integers(2, 6)), int(draw.integers(1, 60))
    confidences = draw.random((exits, samples)).astype(np.float32)
    if seed % 2:
        confidences = np.round(confidences, 1)  # many ties
    for q in (*Q_GRID[::6], 5.0, 0.01):
        thresholds = q_thresholds(confidences, q)
        assert exits_taken(confidences, thresholds).tolist() == slow(confidences, q)


def test_shares_that_round_to_zero_let_nobody_leave() -> None:
    confidences = np.random.default_rng(0).random((3, 10)).astype(np.float32)
    assert q_thresholds(confidences, 100.0)[:2] == (math.inf, math.inf)
    assert (exits_taken(confidences, (math.inf, math.inf)) == 3).all()


def test_saturated_softmax_leaves_together_and_the_rest_goes_on() -> None:
    confidences = np.ones((3, 10), np.float32)
    confidences[:, 7:] = [0.2, 0.5, 0.3]
    thresholds = q_thresholds(confidences, 1.0)  # three samples wanted at exit 1, seven are tied
    assert 0.5 < thresholds[0] < 1
    assert exits_taken(confidences, thresholds).tolist() == [1] * 7 + [2] * 3
    assert q_thresholds(np.ones((3, 10), np.float32), 1.0) == (0.5, math.inf)  # too few are left at exit 2


def test_thresholds_lie_midway_so_that_rounding_decides_nothing() -> None:
    confidences = np.random.default_rng(1).random((4, 500)).astype(np.float32)
    thresholds = q_thresholds(confidences, 0.9)
    taken = exits_taken(confidences, thresholds)
    for k, threshold in enumerate(thresholds):
        there = np.sort(confidences[k][taken > k])
        above, below = there[there >= threshold].min(), there[there < threshold].max()
        assert threshold == pytest.approx((float(above) + float(below)) / 2, abs=1e-7)
    noise = np.random.default_rng(2).uniform(-1, 1, confidences.shape) * 1e-8
    np.testing.assert_array_equal(exits_taken((confidences + noise).astype(np.float32), thresholds), taken)


def test_neighbouring_floats_are_still_parted() -> None:
    one = np.float32(1)
    below = np.nextafter(one, np.float32(0))
    assert below < midway(below, one) <= one
    two_below = np.nextafter(below, np.float32(0))
    assert two_below < midway(two_below, below) <= below


def test_a_confidence_that_is_not_a_number_never_leaves_early() -> None:
    confidences = np.full((3, 2), np.nan, np.float32)
    assert exits_taken(confidences, (0.0, 0.0)).tolist() == [3, 3]


def test_a_bad_q_is_a_sentence() -> None:
    for q in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="q must be a number above 0"):
            q_thresholds(np.ones((2, 3), np.float32), q)
