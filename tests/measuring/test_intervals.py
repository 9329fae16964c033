"""Intervals: the textbooks' numbers, and that they cover as often as they say, however few samples there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from offramp.measuring.calibrate import PARTS, PolicyRequest, _apart, _asked_for, _pooled, judged, with_intervals
from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import (
    discordant_interval,
    incomplete_beta,
    paired_interval,
    proportion_interval,
    reach,
    samples_needed,
)
from offramp.measuring.policy import Policy, rights
from offramp.measuring.risk import binomial_tail, certify, halves, lost, safe_to_cheap
from offramp.measuring.thresholds import NEVER, Thresholds, midway

SIZES = (20, 100, 1000, 5000)
COSTS = (1, 3)


def seldom(broken: int, draws: int, allowed: float = 0.05) -> bool:
    """At most as often as allowed, but for three standard errors."""
    return broken / draws <= allowed + 3 * math.sqrt(allowed * (1 - allowed) / draws)


def test_the_textbooks_numbers() -> None:
    assert proportion_interval(3, 20) == pytest.approx((0.03207094, 0.37892683), abs=1e-8)
    assert proportion_interval(0, 10) == pytest.approx((0, 1 - 0.025**0.1))
    assert proportion_interval(10, 10) == pytest.approx((0.025**0.1, 1))
    assert proportion_interval(450, 500) == pytest.approx((0.87029091, 0.92486418), abs=1e-8)
    assert proportion_interval(45_000, 50_000) == pytest.approx((0.89733717, 0.90261629), abs=1e-8)
    # of 100 pairs, none differs: z^2 / (n + z^2)
    assert discordant_interval(0, 0, 100) == pytest.approx((-3.699350, 3.699350), abs=1e-5)


def test_the_beta_function_is_the_binomials() -> None:
    for hits, trials, chance in ((3, 20, 0.2), (0, 5, 0.9), (499, 1000, 0.5), (70, 5000, 0.02)):
        assert 1 - incomplete_beta(hits + 1, trials - hits, chance) == pytest.approx(
            binomial_tail(hits, trials, chance), rel=1e-8
        )
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0, 1)


def test_pairs_are_told_from_points() -> None:
    a, b = np.array([1, 1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 1, 0, 1], bool)
    low, high = paired_interval(a, b)
    assert paired_interval(b, a) == pytest.approx((-high, -low)) and low < 0 < high
    assert paired_interval(a, b) == discordant_interval(1, 1, 6)
    assert -100 == discordant_interval(0, 9, 9)[0] < discordant_interval(0, 9, 9)[1] < 0
    for wrong in ((a, b[:3]), (a[:0], b[:0])):
        with pytest.raises(ValueError, match="pairs need"):
            paired_interval(*wrong)
    with pytest.raises(ValueError, match="3 of 2"):
        proportion_interval(3, 2)


def log_choose(n: int, k: np.ndarray) -> np.ndarray:
    gone = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    return gone[n] - gone[k] - gone[n - k]


@pytest.mark.parametrize("samples", [1, 5, 20, 100, 1000])
def test_an_accuracys_interval_covers_at_every_accuracy(samples: int) -> None:
    """Exactly, by adding up all outcomes."""
    k = np.arange(samples + 1)
    low, high = np.array([proportion_interval(int(right), samples) for right in k]).T
    for top1 in (0.003, 0.05, 0.31, 0.5, 0.77, 0.92, 0.985, 0.9996):
        chances = np.exp(log_choose(samples, k) + k * math.log(top1) + (samples - k) * math.log1p(-top1))
        assert chances[(low <= top1) & (top1 <= high)].sum() >= 0.95


RATES = [(lose, gain) for lose in (0.003, 0.01, 0.03, 0.08, 0.15) for gain in (1e-9, 0.003, 0.01, 0.04, 0.1)]


def test_a_drops_interval_covers_at_every_drop() -> None:
    """Exactly, by adding up all outcomes of 60 pairs; nearly always, and never much less than it says."""
    n = 60
    counts = [(b, c) for b in range(n + 1) for c in range(n + 1 - b) if b + c <= 40]
    b, c = np.array(counts).T
    low, high = np.array([discordant_interval(one, other, n) for one, other in counts]).T / 100
    chosen = log_choose(n, b) + np.array([math.lgamma(m + 1) for m in n - b])
    chosen -= np.array([math.lgamma(i + 1) + math.lgamma(j + 1) for i, j in zip(c, n - b - c, strict=True)])
    covered = []
    for lose, gain in RATES:
        chances = np.exp(chosen + b * math.log(lose) + c * math.log(gain) + (n - b - c) * math.log1p(-lose - gain))
        covered.append(chances[(low <= lose - gain) & (lose - gain <= high)].sum())
    assert min(covered) >= 0.945 and np.mean(covered) >= 0.955


@pytest.mark.parametrize("samples", SIZES)
def test_over_a_thousand_draws_intervals_cover_as_often_as_they_say(samples: int) -> None:
    draw = np.random.default_rng(samples)
    for lose, gain in ((0.02, 0.012), (0.05, 0.001), (0.004, 0.004)):
        seen = draw.multinomial(samples, [lose, gain, 0.85, 1 - 0.85 - lose - gain], size=1000)
        drops = np.array([discordant_interval(int(b), int(c), samples) for b, c, _, _ in seen]) / 100
        missed = (drops[:, 0] > lose - gain) | (drops[:, 1] < lose - gain)
        assert seldom(int(missed.sum()), 1000)
        own = np.array([proportion_interval(int(b + right), samples) for b, _, right, _ in seen])
        missed = (own[:, 0] > 0.85 + lose) | (own[:, 1] < 0.85 + lose)
        assert seldom(int(missed.sum()), 1000)
    if samples >= 1000:  # and they are not bought with width: against the normal approximation
        usual = 2 * 1.96 * math.sqrt((lose + gain) / samples)
        assert np.mean(drops[:, 1] - drops[:, 0]) < 1.25 * usual


def world(samples: int, draw: np.random.Generator) -> Predictions:
    """Two exits of equal skill: whoever chooses thresholds by what seems to gain is fooled most easily."""
    ease = draw.random(samples)
    right = draw.random((2, samples)) < 0.5 + 0.5 * ease
    sure = 0.5 * ease + 0.5 * draw.random((2, samples))
    return Predictions(sure.astype(np.float32), right)


WORLD = world(400_000, np.random.default_rng(10**6))
BY_CONFIDENCE = np.argsort(WORLD.confidences[0])
SURE = WORLD.confidences[0][BY_CONFIDENCE]
LOST_ABOVE = np.append(np.cumsum((WORLD.right[1] * 1 - WORLD.right[0])[BY_CONFIDENCE][::-1])[::-1], 0) / WORLD.samples
RIGHT_ABOVE = np.append(np.cumsum(WORLD.right[0][BY_CONFIDENCE][::-1])[::-1], 0)
RIGHT_BELOW = np.append(0, np.cumsum(WORLD.right[1][BY_CONFIDENCE]))
TOP1 = (RIGHT_ABOVE + RIGHT_BELOW) / WORLD.samples


def place(thresholds: Thresholds) -> int:
    return int(np.searchsorted(SURE, np.float32(thresholds[0])))


def sums(given: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Confidences at exit 1, rising, and what would be lost in all if those from each one on left there."""
    order = np.argsort(given.confidences[0])
    change = (given.right[1].astype(int) - given.right[0])[order]
    return given.confidences[0][order], np.append(np.cumsum(change[::-1])[::-1], 0)


def cut(sure: np.ndarray, at: int) -> Thresholds:
    return (NEVER,) if at == len(sure) else (midway(sure[at - 1] if at else 0.0, sure[at]),)


def cheapest_within_half_a_point(given: Predictions) -> Thresholds:
    sure, losses = sums(given)
    return cut(sure, int(np.argmax(losses <= 0.005 * given.samples)))


def best(given: Predictions) -> Thresholds:
    sure, losses = sums(given)
    return cut(sure, int(np.argmin(losses)))


def missed(policy: Policy) -> tuple[bool, bool]:
    """Whether the true drop, and the true accuracy, lie outside of their intervals."""
    assert policy.drop_interval is not None and policy.top1_interval is not None
    low, high = policy.drop_interval
    drop, top1 = 100 * LOST_ABOVE[place(policy.thresholds)], TOP1[place(policy.thresholds)]
    slack = 0.05  # points: the world too is a sample
    return (
        not low - slack <= drop <= high + slack,
        not policy.top1_interval[0] - slack / 100 <= top1 <= policy.top1_interval[1] + slack / 100,
    )


def misses(samples: int, choose: Callable[[Predictions], Thresholds], draws: int, view: str = "both") -> np.ndarray:
    """How often drop and accuracy lie outside, judged on these samples, on parts that others chose for, or on both."""
    count = np.zeros(2, int)
    for seed in range(draws):
        given = world(samples, np.random.default_rng([samples, seed]))
        policy = judged(given, COSTS, "searched", choose(given))
        apart = [] if view == "these" else _apart(given, choose)
        found = with_intervals(policy, given, apart)
        if view == "parts":
            last, own = _pooled(apart)
            top1 = proportion_interval(int(own.sum()), samples)
            found = replace(found, drop_interval=paired_interval(last, own), top1_interval=top1)
        count += missed(found)
    return count


@pytest.mark.parametrize("choose", [cheapest_within_half_a_point, best])
@pytest.mark.parametrize("samples", SIZES)
def test_intervals_cover_although_thresholds_were_chosen_on_the_same_samples(
    samples: int, choose: Callable[[Predictions], Thresholds]
) -> None:
    draws = 1000 if samples < 5000 else 300  # all thousand in the slow test below
    for broken in misses(samples, choose, draws).tolist():
        assert seldom(broken, draws)


@pytest.mark.slow
@pytest.mark.parametrize("choose", [cheapest_within_half_a_point, best])
def test_intervals_cover_over_a_thousand_draws_of_five_thousand(choose: Callable[[Predictions], Thresholds]) -> None:
    for broken in misses(5000, choose, 1000).tolist():
        assert seldom(broken, 1000)


@pytest.mark.parametrize("view", ["these", "parts"])
def test_one_view_alone_would_not_do(view: str) -> None:
    """The test above can fail: thresholds look too good where they were chosen, and parts speak of other thresholds."""
    assert not seldom(int(misses(1000, best, 1000, view)[0]), 1000)


@pytest.mark.parametrize("samples", SIZES)
def test_promises_are_broken_no_more_often_than_promised(samples: int) -> None:
    risk = 0.1 if samples > 20 else 0.3  # ten images certify no tenth
    broken = cheap = 0
    for seed in range(1000):
        given = world(samples, np.random.default_rng([samples, seed]))
        choosing, certifying = (given.rows(rows) for rows in halves(samples, 0))
        candidates = [(float(t),) for t in np.quantile(choosing.confidences[0], np.linspace(0, 1, 25))]
        found, _ = certify(safe_to_cheap(choosing, COSTS, candidates), certifying, risk, 0.95)
        cheap += found[0] < 1
        broken += true_risk(found) > risk
    assert seldom(broken, 1000)
    assert cheap > (900 if samples >= 1000 else 200)  # and not by never leaving


RISK_ABOVE = np.append(np.cumsum((WORLD.right[1] & ~WORLD.right[0])[BY_CONFIDENCE][::-1])[::-1], 0) / WORLD.samples


def true_risk(thresholds: Thresholds) -> float:
    return float(RISK_ABOVE[place(thresholds)])


def test_the_world_is_added_up_rightly() -> None:
    for threshold in (0.2, 0.5, 0.9):
        own = rights(WORLD, (threshold,))
        assert LOST_ABOVE[place((threshold,))] == pytest.approx(WORLD.right[1].mean() - own.mean())
        assert TOP1[place((threshold,))] == pytest.approx(own.mean())
        assert true_risk((threshold,)) == pytest.approx(lost(WORLD, (threshold,)) / WORLD.samples)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [100, 400])
def test_intervals_cover_with_searched_thresholds(samples: int) -> None:
    request = PolicyRequest(max_drop_points=0.5)
    count = misses(samples, lambda given: _asked_for(given, COSTS, request).thresholds, 200)
    assert seldom(int(count[0]), 200) and seldom(int(count[1]), 200)


def test_parts_are_whole_and_see_nothing_of_themselves() -> None:
    given = world(23, np.random.default_rng(0))
    apart = _apart(given, lambda rest: rest)
    assert len(apart) == PARTS and sum(held.samples for held, _ in apart) == 23
    for held, rest in apart:
        both = np.concatenate([held.confidences[0], rest.confidences[0]])
        np.testing.assert_array_equal(np.sort(both), np.sort(given.confidences[0]))
    assert _apart(given.rows(np.array([3])), lambda rest: rest) == []


def test_samples_needed_are_enough_and_hardly_more() -> None:
    draw = np.random.default_rng(0)
    last, own = draw.random(50) < 0.9, draw.random(50) < 0.85
    enough = samples_needed(last, own, points=2.0)
    assert 1000 < enough < 4000
    share = [(last & ~own).mean(), (own & ~last).mean()]
    for samples, wide in ((enough, False), (0.97 * enough, True)):
        own_interval = discordant_interval(share[0] * samples, share[1] * samples, samples)
        assert (reach(100 * (share[0] - share[1]), own_interval) > 2) == wide
    same = np.ones(8, bool)
    assert 150 < samples_needed(same, same) < 250  # nothing differed: still so many, to be sure of that
