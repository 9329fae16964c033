"""Thresholds from confidences: the paper's family with its one parameter q, and a direct search beyond it.

Predictions of the calibration split go in, tuples of K - 1 thresholds come out. A threshold lies midway between two
neighbouring confidences of the samples that reach its exit, so that a rounding error decides nothing.

The search finds the most accurate thresholds that fit a budget. With all other thresholds fixed, each sample that
reaches exit k is worth one thing if it leaves there and another if it goes on, so the best threshold is the best
place to cut the samples sorted by confidence. Setting one threshold after the other this way climbs to a local
optimum; starts from many exchange rates between accuracy and cost find good ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import Outcome, exits_taken, leaves, mean_cost, outcome

Thresholds = tuple[float, ...]
Q_GRID = tuple(round(0.05 * step, 2) for step in range(1, 40))  # .05 to 1.95, as in the paper
NEVER = math.inf
SWEEPS = 20  # of the search over all exits; climbing rarely needs more than five
WINDOW = 0.1  # of the samples are averaged over when correctness is smoothed
RATES = np.geomspace(1e-3, 10, 30)  # points of accuracy for the whole span of costs, from cheap talk to misers


@lru_cache(1 << 14)  # many budgets ask for the same ones
def exit_counts(samples: int, num_exits: int, q: float) -> tuple[int, ...]:
    """How many of N samples leave at each exit for a given q: p_k = q^k / sum of q^j, k = 1..K.

    That is floor(N * p_k) at every exit but the last, which takes the rest; exact, without rounding.
    """
    if not 0 < q < float("inf"):
        raise ValueError(f"q must be a number above 0, got {q}")
    exact = Fraction(repr(float(q)))
    powers = [exact**k for k in range(1, num_exits + 1)]
    total = sum(powers)
    counts = [int(samples * power / total) for power in powers[:-1]]
    return (*counts, samples - sum(counts))


def q_thresholds(confidences: np.ndarray, q: float) -> Thresholds:
    """The paper's rule: at exit k the floor(n p_k) most confident of those still there leave, p_k from q.

    Where that is none, or more than are left, nobody leaves. All samples tied with the last one leave with it.
    """
    num_exits, samples = confidences.shape
    return _letting_out(confidences, exit_counts(samples, num_exits, q))


def _letting_out(confidences: np.ndarray, counts: Sequence[int]) -> Thresholds:
    """Thresholds by which so many leave at each exit."""
    staying = np.ones(confidences.shape[1], bool)
    found = []
    for own, count in zip(confidences[:-1], counts[:-1], strict=True):
        left = own[staying]
        found.append(_leaving(left, count) if 0 < count <= len(left) else NEVER)
        staying &= ~leaves(own, found[-1])
    return tuple(found)


def q_at_budget(confidences: np.ndarray, costs: Sequence[float], budget: float) -> tuple[float | None, Thresholds]:
    """The paper's rule with the largest q found whose mean cost fits; without any, everybody leaves at exit 1."""

    @cache
    def rule(counts: tuple[int, ...]) -> tuple[Thresholds, float]:  # soon no other counts lie between two q
        thresholds = _letting_out(confidences, counts)
        return thresholds, mean_cost(exits_taken(confidences, thresholds), costs)

    low, high = 1e-3, 1e3
    best: tuple[float | None, Thresholds] = None, (0.0,) * (len(costs) - 1)
    for _ in range(40):
        q = float((low * high) ** 0.5)
        thresholds, cost = rule(exit_counts(confidences.shape[1], len(confidences), q))
        if cost <= budget:
            low, best = q, (q, thresholds)
        else:
            high = q
    return best


def _leaving(confidences: np.ndarray, count: int) -> float:
    """The threshold that lets the `count` most confident leave, and those tied with the last of them."""
    last = np.partition(confidences, len(confidences) - count)[len(confidences) - count]
    below = confidences[confidences < last]
    return midway(below.max() if len(below) else 0.0, last)


def midway(below: float, above: float) -> float:
    """The float32 halfway between two confidences; never the lower one, however near they are."""
    middle = np.float32((float(below) + float(above)) / 2)
    return float(middle if middle > below else above)


def search(given: Predictions, costs: Sequence[float], budgets: Iterable[float]) -> list[Thresholds]:
    """For each budget the most accurate thresholds found whose mean cost on these samples fits it.

    Accuracy is judged by smoothed correctness, or thresholds would follow single samples. Counted sample by sample,
    they are still at least as accurate here as the paper's rule at any q that was tried and fits, and as the whole
    network where that fits: if not, the best candidate by that count is taken instead.
    """
    problem = _Problem(smoothed(given), costs)
    candidates = sorted(problem.candidates())
    smooth = [(outcome(problem.given, t, costs), t) for t in candidates]
    plain = [(outcome(given, t, costs), t) for t in candidates]
    family = [(outcome(given, t, costs), t) for t in (problem.never, *_family(given))]
    chosen = []
    for budget in budgets:
        found = problem.spend(_best(smooth, budget, problem.none), budget)
        _, own = q_at_budget(given.confidences, costs, budget)
        rivals = [*family, (outcome(given, own, costs), own)]
        least = max(o.top1 for o, _ in rivals if o.cost <= budget)
        enough = outcome(given, found, costs).top1 >= least
        chosen.append(found if enough else _best([*plain, *rivals], budget, problem.none))
    return chosen


def smoothed(given: Predictions) -> Predictions:
    """Each answer's correctness replaced by the mean over the samples nearest to it in confidence at that exit."""
    found = np.empty(given.right.shape)
    places = np.arange(given.samples)
    reach = np.minimum(int(WINDOW * given.samples / 2), np.minimum(places, places[::-1]))
    for own, right, out in zip(given.confidences, given.right, found, strict=True):
        order = np.argsort(own, kind="stable")
        sums = np.append(0.0, np.cumsum(right[order]))
        out[order] = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
    return Predictions(given.confidences, found)


def _family(given: Predictions) -> list[Thresholds]:
    return [q_thresholds(given.confidences, q) for q in Q_GRID]


def _best(found: Sequence[tuple[Outcome, Thresholds]], budget: float, otherwise: Thresholds) -> Thresholds:
    """The most accurate that fits, of equals the cheapest."""
    return max(((o.top1, -o.cost, t) for o, t in found if o.cost <= budget), default=(0.0, 0.0, otherwise))[2]


class _Problem:
    """Samples sorted once by each exit's confidence, so that every later step is a scan."""

    def __init__(self, given: Predictions, costs: Sequence[float]) -> None:
        self.given, self.costs = given, np.asarray(costs, np.float64)
        self.right = given.right.astype(np.float64)
        self.orders = [np.argsort(own, kind="stable") for own in given.confidences[:-1]]
        self.never: Thresholds = (NEVER,) * len(self.orders)
        self.none: Thresholds = (0.0,) * len(self.orders)  # nobody goes on

    def candidates(self) -> set[Thresholds]:
        """The paper's family, and what is met climbing from it and from neighbour to neighbour."""
        met = {self.never, *_family(self.given)}
        family = [(outcome(self.given, t, self.costs.tolist()), t) for t in met]
        rates = RATES / max(self.costs[-1] - self.costs[0], 1e-30)
        here = self.never
        for rate in (*rates, *rates[::-1]):
            here = self.climb(here, rate)
            met.add(here)
        for rate in rates:
            best = max(family, key=lambda member: member[0].top1 - rate * member[0].cost)
            met.add(self.climb(best[1], rate))
        return met

    def climb(self, thresholds: Thresholds, rate: float) -> Thresholds:
        """Raise `accuracy - rate * cost`, one threshold at a time, until none helps."""
        here = list(thresholds)
        worth_KN = self.right - rate * self.costs[:, None]
        for _ in range(SWEEPS):
            before = list(here)
            for k in reversed(range(len(here))):
                rows, later = self.reaching(here, k)
                here[k] = self.cut(k, rows, worth_KN[k, rows] - worth_KN[later, rows])
            if here == before:
                break
        return tuple(here)

    def spend(self, thresholds: Thresholds, budget: float) -> Thresholds:
        """Raise accuracy alone, one threshold at a time, by what still fits the budget, until none helps."""
        here = list(thresholds)
        for _ in range(SWEEPS):
            before = list(here)
            for k in reversed(range(len(here))):
                rows, later = self.reaching(here, k)
                fits = self.total([*here[:k], NEVER, *here[k + 1 :]]) - _sums(self.costs[later] - self.costs[k])
                allowed = fits <= budget * self.given.samples
                if allowed.any():
                    here[k] = self.cut(k, rows, self.right[k, rows] - self.right[later, rows], allowed)
            if here == before:
                break
        return tuple(here)

    def total(self, thresholds: Sequence[float]) -> float:
        """The cost of all samples together: exact, as costs in mul-adds are whole numbers."""
        return float(self.costs[exits_taken(self.given.confidences, thresholds) - 1].sum())

    def reaching(self, thresholds: Sequence[float], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples that reach exit k, by rising confidence there, and the exit (from 0) where each goes on to."""
        confidences = self.given.confidences
        reach = exits_taken(confidences[: k + 1], thresholds[:k]) == k + 1
        rows = self.orders[k][reach[self.orders[k]]]
        return rows, exits_taken(confidences[k + 1 :, rows], thresholds[k + 1 :]) + k

    def cut(self, k: int, rows: np.ndarray, gain: np.ndarray, allowed: np.ndarray | None = None) -> float:
        """The threshold above which the summed gain is largest; tied samples are never parted."""
        own = self.given.confidences[k, rows]
        possible = np.ones(len(rows) + 1, bool)
        possible[1:-1] = own[1:] != own[:-1]
        if allowed is not None:
            possible &= allowed
        at = int(np.where(possible, _sums(gain), -np.inf).argmax())
        if at == len(rows):
            return NEVER
        return midway(own[at - 1] if at else 0.0, own[at])


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums over all places from each one on, and zero after the last."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
