"""Thresholds from confidences: the paper's family with its one parameter q.

Confidences of the calibration split go in, tuples of K - 1 thresholds come out. A threshold lies midway between
two neighbouring confidences of the samples that reach its exit, so that a rounding error decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from offramp.measuring.policy import exits_taken, mean_cost
from offramp.measuring.shares import exit_counts

Thresholds = tuple[float, ...]
Q_GRID = tuple(round(0.05 * step, 2) for step in range(1, 40))  # .05 to 1.95, as in the paper
NEVER = math.inf


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
        staying &= ~(own >= np.float32(found[-1]))
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
