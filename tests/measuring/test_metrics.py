"""Metrics of hand-made numbers with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.saved import logits_and_labels
from offramp.measuring.confidence import Predictions
from offramp.measuring.metrics import (
    Curve,
    area_under_risk,
    calibration_error,
    curve,
    exit_difficulty,
    exit_metrics,
    negative_log_likelihood,
    overthinking,
    rank_correlation,
    top_share,
)
from offramp.measuring.policy import Policy


def test_likelihood_and_top_share() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]], np.float32))
    assert negative_log_likelihood(logits, np.array([0, 2])) == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2)
    assert top_share(logits, np.array([0, 2]), 1) == 0.5
    assert top_share(logits, np.array([0, 2]), 2) == 1.0
    assert top_share(logits, np.array([0, 2]), 5) == 1.0
    assert negative_log_likelihood(np.array([[1e4, 0.0]]), np.array([1])) == 1e4


def test_calibration_error_is_the_gap_between_words_and_deeds() -> None:
    sure = np.array([0.95, 0.95, 0.55, 0.55], np.float32)
    assert calibration_error(sure, np.array([True, True, True, False])) == pytest.approx(0.05)
    assert calibration_error(sure, np.zeros(4, bool)) == pytest.approx(0.75)
    assert calibration_error(np.ones(3, np.float32), np.ones(3, bool)) == 0


def test_area_under_risk() -> None:
    sure = np.array([0.9, 0.8, 0.7, 0.6], np.float32)
    right = np.array([True, True, False, False])
    assert area_under_risk(sure, right) == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert area_under_risk(sure, right[::-1]) == pytest.approx((1 + 1 + 2 / 3 + 1 / 2) / 4)
    tied = np.ones(4, np.float32)
    assert area_under_risk(tied, right) == area_under_risk(tied, right[::-1]) == 0.5  # order says nothing


def test_overthinking() -> None:
    right = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], bool)
    found = overthinking(right)
    assert found.right_then_wrong == (0.25, 0.25)
    assert found.ever == 0.5 and found.oracle_top1 == 1.0
    assert overthinking(right[:1]).ever == 0


def test_rank_correlation_with_ties() -> None:
    assert rank_correlation(np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])) == pytest.approx(1)
    assert rank_correlation(np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])) == pytest.approx(-1)
    ranks = np.corrcoef([0, 1.5, 1.5, 3], [0.5, 0.5, 2, 3])[0, 1]
    assert rank_correlation(np.array([1, 2, 2, 9]), np.array([5, 5, 6, 7])) == pytest.approx(ranks)
    assert rank_correlation(np.array([1, 2, 3]), np.array([1, 1, 1])) == 0


def test_harder_samples_leave_later() -> None:
    logits, labels, difficulty = logits_and_labels(2000, 0)
    assert exit_difficulty(Predictions.of(logits, labels), (0.8, 0.8), difficulty) > 0.3


def test_a_curve_answers_between_its_points() -> None:
    line = Curve((10.0, 20.0, 40.0), (0.5, 0.7, 0.8))
    np.testing.assert_allclose(line.at([10, 15, 40, 99]), [0.5, 0.6, 0.8, 0.8])
    assert np.isnan(line.at([9])[0])
    assert line.cost_of(0.5) == 10 and line.cost_of(0.75) == pytest.approx(30) and line.cost_of(0.9) is None
    assert line.cost_of(0.1) == 10
    assert line.area(10, 20) == pytest.approx(0.6)
    assert line.area(15, 40) == pytest.approx((5 * 0.65 + 20 * 0.75) / 25)
    assert line.area(40, 80) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="begins at 10"):
        line.area(5, 20)


def test_a_dip_does_not_make_an_accuracy_dearer() -> None:
    assert Curve((1.0, 2.0, 3.0, 4.0), (0.5, 0.7, 0.6, 0.8)).cost_of(0.65) == pytest.approx(1.75)


def test_the_curve_of_policies_is_sorted_and_keeps_the_better_of_two() -> None:
    given = Predictions(np.array([[0.9, 0.1], [1, 1]], np.float32), np.array([[True, False], [True, True]]))
    policies = [Policy("q", 1.0, (t,), 0.0, (), 0.0) for t in (math.inf, 0.5, 0.0)]
    found = curve(given, policies, (2.0, 6.0))
    assert found == Curve((2.0, 4.0, 6.0), (0.5, 1.0, 1.0))
    assert curve(given, [policies[1], policies[1]], (2.0, 6.0)).costs == (4.0,)


def test_every_exit_has_its_row() -> None:
    logits, labels, _ = logits_and_labels(300, 1)
    rows = exit_metrics(logits, labels)
    assert [row.exit for row in rows] == [1, 2, 3]
    for k, row in enumerate(rows):
        assert row.top1 == (logits[k].argmax(-1) == labels).mean()
        assert row.top1 <= row.top5 <= 1 and row.nll > 0 and 0 <= row.ece <= 1 and 0 <= row.aurc <= 1
