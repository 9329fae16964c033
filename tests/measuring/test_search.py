"""The direct search: never worse than the paper's family, always within budget, optimal where that can be checked."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from helpers.saved import logits_and_labels
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import outcome
from offramp.measuring.thresholds import Q_GRID, q_at_budget, q_thresholds, search

COSTS = (3.0, 7.0, 20.0)


def given(samples: int, seed: int, exits: int = 3) -> Predictions:
    logits, labels, _ = logits_and_labels(samples, seed, exits)
    return Predictions.of(logits, labels)


@pytest.mark.parametrize("seed", range(4))
def test_at_least_as_good_as_the_family_and_within_budget(seed: int) -> None:
    data = given(400, seed)
    family = [outcome(data, q_thresholds(data.confidences, q), COSTS) for q in Q_GRID]
    budgets = [f.cost for f in family] + [3.0, 20.0]
    found = [outcome(data, t, COSTS) for t in search(data, COSTS, budgets)]
    for budget, own in zip(budgets, found, strict=True):
        assert own.cost <= budget
        assert own.top1 >= max((f.top1 for f in family if f.cost <= budget), default=0)
    assert np.mean([own.top1 - f.top1 for own, f in zip(found, family, strict=False)]) > 0


@pytest.mark.parametrize("seed", range(3))
def test_at_least_as_good_as_any_q_at_any_budget(seed: int) -> None:
    data = given(300, 20 + seed)
    for budget in np.linspace(3.0, 20.0, 25):
        _, rival = q_at_budget(data.confidences, COSTS, float(budget))
        assert outcome(data, rival, COSTS).cost <= budget
        own = outcome(data, search(data, COSTS, [float(budget)])[0], COSTS)
        assert own.cost <= budget and own.top1 >= outcome(data, rival, COSTS).top1


def test_the_ends_are_the_first_exit_and_the_best_there_is() -> None:
    data = given(300, 9)
    low, high = search(data, COSTS, [3.0, 20.0])
    assert outcome(data, low, COSTS).shares == (1.0, 0.0, 0.0)
    assert outcome(data, high, COSTS).top1 >= data.right[-1].mean()


@pytest.mark.parametrize("seed", range(8))
def test_finds_the_best_of_all_thresholds_on_a_few_samples(seed: int) -> None:
    draw = np.random.default_rng(seed)
    confidences = np.round(draw.random((3, 9)), 1).astype(np.float32)
    data = Predictions(confidences, draw.random((3, 9)) < np.array([[0.4], [0.6], [0.8]]))
    cuts = [[*np.unique(own), math.inf] for own in confidences[:-1]]
    every = [outcome(data, t, COSTS) for t in itertools.product(*cuts)]
    gaps = []
    for budget in np.linspace(3, 20, 12):
        best = max(o.top1 for o in every if o.cost <= budget)
        gaps.append(best - outcome(data, search(data, COSTS, [budget])[0], COSTS).top1)
    assert min(gaps) >= 0
    assert np.mean(np.array(gaps) > 1e-9) <= 0.25 and max(gaps) <= 1.01 / 9  # a local search; at most one sample away


def test_one_exit_has_nothing_to_search() -> None:
    data = given(20, 0, exits=1)
    assert search(data, (5.0,), [5.0]) == [()]


def test_samples_that_are_all_alike() -> None:
    data = Predictions(np.ones((3, 8), np.float32), np.array([[False] * 8, [True] * 8, [True] * 8]))
    cheap, enough = search(data, COSTS, [3.0, 7.0])
    assert outcome(data, cheap, COSTS).shares == (1.0, 0.0, 0.0)
    assert outcome(data, enough, COSTS) == outcome(data, (math.inf, 0.5), COSTS)
