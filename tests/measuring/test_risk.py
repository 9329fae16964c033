"""Promises: the binomial is exact, the order is fixed before it is tested, and violations stay within bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import upper_bound
from offramp.measuring.policy import outcome
from offramp.measuring.risk import binomial_tail, certify, halves, lost, promised, safe_to_cheap
from offramp.measuring.thresholds import NEVER, Q_GRID, q_thresholds

COSTS = (1.0, 2.0, 4.0)


def exact_tail(hits: int, trials: int, chance: Fraction) -> float:
    terms = (math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits + 1))
    return float(sum(terms, Fraction(0)))


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (0, 300), (3, 20), (20, 20), (7, 500), (499, 500)])
def test_the_binomial_tail_is_exact(hits: int, trials: int) -> None:
    for chance in (Fraction(1, 100), Fraction(1, 3), Fraction(99, 100)):
        assert binomial_tail(hits, trials, float(chance)) == pytest.approx(exact_tail(hits, trials, chance), rel=1e-9)
    assert binomial_tail(hits, trials, 0.0) == 1
    assert binomial_tail(hits, trials, 1.0) == (1 if hits == trials else 0)


def test_the_upper_bound_is_the_textbooks() -> None:
    assert upper_bound(0, 300, 0.95) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-9)
    assert upper_bound(300, 300, 0.95) == 1
    assert upper_bound(5, 100, 0.95) == pytest.approx(0.10225, abs=2e-5)


def test_lost_counts_what_the_last_exit_would_have_got_right() -> None:
    confidences = np.array([[0.9, 0.9, 0.9, 0.1], [1, 1, 1, 1]], np.float32)
    right = np.array([[True, False, False, False], [True, True, False, True]])
    assert lost(Predictions(confidences, right), (0.5,)) == 1
    assert lost(Predictions(confidences, right), (NEVER,)) == 0


def population(samples: int, seed: int) -> Predictions:
    """Predictions whose true risk under any thresholds a large sample gives."""
    draw = np.random.default_rng(seed)
    sure = draw.random((3, samples)) ** np.array([[1.0], [0.7], [0.5]])
    right = draw.random((3, samples)) < 0.35 + 0.65 * sure
    return Predictions(sure.astype(np.float32), right)


WORLD = population(200_000, 1_000_000)


def violations(draws: int, samples: int, risk: float, choose) -> tuple[int, float]:
    broken, cost = 0, 0.0
    for seed in range(draws):
        thresholds = choose(population(samples, seed))
        broken += lost(WORLD, thresholds) / WORLD.samples > risk
        cost += outcome(WORLD, thresholds, COSTS).cost / draws
    return broken, cost


def within_three_errors(broken: int, draws: int) -> bool:
    return broken / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


def test_the_promise_holds_over_a_thousand_draws() -> None:
    def choose(data: Predictions) -> tuple[float, ...]:
        choosing, certifying = (data.rows(rows) for rows in halves(data.samples, 0))
        family = [q_thresholds(choosing.confidences, q) for q in (*Q_GRID, 3.0, 5.0, 8.0, 12.0, 20.0)]
        return certify(safe_to_cheap(choosing, COSTS, family), certifying, 0.05, 0.95)[0]

    broken, cost = violations(1000, 600, 0.05, choose)
    assert within_three_errors(broken, 1000)
    assert cost < 0.95 * COSTS[-1]  # and it is not kept by never leaving


@pytest.mark.slow
def test_the_promise_holds_over_a_thousand_draws_with_searched_candidates() -> None:
    broken, cost = violations(1000, 600, 0.05, lambda data: promised(data, COSTS, 0.05, 0.95, 0)[0])
    assert within_three_errors(broken, 1000)
    assert cost < 0.9 * COSTS[-1]


def test_trying_without_a_certifying_half_would_break_it() -> None:
    """The test above can fail: choosing and judging on the same samples is caught by it."""

    def choose(data: Predictions) -> tuple[float, ...]:
        family = [q_thresholds(data.confidences, q) for q in (*Q_GRID, 3.0, 5.0, 8.0, 12.0, 20.0)]
        safe = [t for t in family if lost(data, t) / data.samples <= 0.05]
        return min(safe, key=lambda t: outcome(data, t, COSTS).cost, default=(NEVER, NEVER))

    broken, _ = violations(200, 600, 0.05, choose)
    assert not within_three_errors(broken, 200)


def test_certifying_stops_at_the_first_failure() -> None:
    data = population(2000, 3)
    safe, risky = q_thresholds(data.confidences, 20.0), q_thresholds(data.confidences, 0.05)
    assert certify([safe, risky, safe], data, 0.1, 0.95)[0] == safe
    assert certify([risky, safe], data, 0.1, 0.95)[0] == (NEVER, NEVER)  # leaving nobody loses nothing
    promise = certify([safe], data, 0.1, 0.95)[1]
    assert (promise.samples, promise.lost) == (2000, lost(data, safe))


def test_the_order_runs_from_safe_to_cheap() -> None:
    data = population(1000, 5)
    order = safe_to_cheap(data, COSTS, [q_thresholds(data.confidences, q) for q in Q_GRID])
    losses, costs = [lost(data, t) for t in order], [outcome(data, t, COSTS).cost for t in order]
    assert losses == sorted(losses) and costs == sorted(costs, reverse=True) and len(order) > 10


def test_bad_requests_are_sentences() -> None:
    with pytest.raises(ValueError, match="at least two calibration samples"):
        promised(population(1, 0), COSTS, 0.01, 0.95, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        promised(population(10, 0), COSTS, 1.5, 0.95, 0)
