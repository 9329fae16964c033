"""Numbers about saved outputs: how good each exit is, how well its confidence can be trusted, what policies give.

Plain functions of arrays. Fractions are between 0 and 1; costs are in the unit they are given in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.measuring.confidence import Predictions, chunks
from offramp.measuring.policy import Policy, exits_taken, outcome

BINS = 15  # of the calibration error, equally wide


@dataclass(frozen=True)
class ExitMetrics:
    """How good one exit is on everything, and how far its confidence can be trusted."""

    exit: int
    top1: float
    top5: float
    nll: float
    ece: float
    aurc: float


def exit_metrics(logits: np.ndarray, labels: np.ndarray, given: Predictions | None = None) -> list[ExitMetrics]:
    """One row per exit; `given` are its predictions with max softmax as the confidence, if they are known already."""
    given = Predictions.of(logits, labels) if given is None else given
    return [
        ExitMetrics(
            k + 1,
            float(given.right[k].mean()),
            top_share(logits[k], labels, 5),
            negative_log_likelihood(logits[k], labels),
            calibration_error(given.confidences[k], given.right[k]),
            area_under_risk(given.confidences[k], given.right[k]),
        )
        for k in range(len(logits))
    ]


def top_share(logits_NC: np.ndarray, labels: np.ndarray, count: int) -> float:
    """How often the right class is among the best `count`."""
    count, hits = min(count, logits_NC.shape[-1]), 0
    for _, rows, part in chunks(logits_NC[None]):
        best = np.argpartition(part, -count, axis=-1)[:, -count:]
        hits += int((best == labels[rows, None]).any(-1).sum())
    return hits / len(labels)


def negative_log_likelihood(logits_NC: np.ndarray, labels: np.ndarray) -> float:
    """Mean -log of the softmax at the right class."""
    total = 0.0
    for _, rows, part in chunks(logits_NC[None]):
        below = part.astype(np.float64) - part.max(-1, keepdims=True)
        own = below[np.arange(len(part)), labels[rows]]
        total += float((np.log(np.exp(below).sum(-1)) - own).sum())
    return total / len(labels)


def reliability(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, ...]:
    """Per bin of confidence: how many samples, their mean confidence, how many of them are right (a fraction)."""
    at = np.clip((confidences * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(at, minlength=bins)
    size = np.maximum(counts, 1)
    sure = np.bincount(at, confidences.astype(np.float64), bins) / size
    hits = np.bincount(at, right.astype(np.float64), bins) / size
    return counts, sure, hits


def calibration_error(confidences: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error: the gap between confidence and accuracy, averaged over bins by their size."""
    counts, sure, hits = reliability(confidences, right)
    return float((counts * np.abs(sure - hits)).sum() / counts.sum())


def area_under_risk(confidences: np.ndarray, right: np.ndarray) -> float:
    """AURC: the error among the c most confident samples, averaged over all c; tied samples count as their mean."""
    order = np.argsort(-confidences, kind="stable")
    wrong, own = (~right[order]).astype(np.float64), confidences[order]
    begins = np.flatnonzero(np.append(True, own[1:] != own[:-1]))
    sizes = np.diff(np.append(begins, len(own)))
    wrong = np.repeat(np.add.reduceat(wrong, begins) / sizes, sizes)
    return float((np.cumsum(wrong) / np.arange(1, len(own) + 1)).mean())


@dataclass(frozen=True)
class Overthinking:
    """What going on loses: right at exit k and wrong at the last, per exit; at any exit; and right anywhere."""

    right_then_wrong: tuple[float, ...]
    ever: float
    oracle_top1: float


def overthinking(right: np.ndarray) -> Overthinking:
    """How often an early exit is right where the last one is wrong."""
    undone = right[:-1] & ~right[-1]
    return Overthinking(
        tuple(undone.mean(1).tolist()), float(undone.any(0).mean()) if len(undone) else 0.0, float(right.any(0).mean())
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks, tied values sharing their mean rank; 0 where one never varies."""
    ranks = np.stack([_ranks(first), _ranks(second)])
    ranks -= ranks.mean(1, keepdims=True)
    lengths = np.sqrt((ranks**2).sum(1))
    return float((ranks[0] * ranks[1]).sum() / lengths.prod()) if lengths.prod() else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[group]


def exit_difficulty(given: Predictions, thresholds: Sequence[float], difficulty: np.ndarray) -> float:
    """Rank correlation between a sample's true difficulty and the exit it takes."""
    return rank_correlation(difficulty, exits_taken(given.confidences, thresholds))


@dataclass(frozen=True)
class Curve:
    """Accuracy against mean cost, cheapest first: one point per policy."""

    costs: tuple[float, ...]
    top1: tuple[float, ...]

    def at(self, budgets: Sequence[float] | np.ndarray) -> np.ndarray:
        """Accuracy at budgets, between neighbouring points by a straight line.

        A budget below the cheapest point gives no number; above the most expensive, what is left of it is not spent.
        """
        return np.asarray(np.interp(budgets, self.costs, self.top1, left=np.nan))

    def cost_of(self, top1: float) -> float | None:
        """The least cost at which the curve reaches an accuracy; None if it never does."""
        best = np.maximum.accumulate(self.top1)
        at = int(np.searchsorted(best, top1))
        if at == len(best):
            return None
        if at == 0:
            return self.costs[0]
        share = (top1 - best[at - 1]) / (best[at] - best[at - 1])
        return float(self.costs[at - 1] + share * (self.costs[at] - self.costs[at - 1]))

    def area(self, low: float, high: float) -> float:
        """The area under the curve between two budgets, divided by their distance: the mean accuracy there."""
        if not self.costs[0] <= low < high:
            raise ValueError(f"the curve begins at {self.costs[0]:,.0f}; no area from {low:,.0f} to {high:,.0f}")
        inner = [c for c in self.costs if low < c < high]
        at = np.array([low, *inner, high])
        return float(np.trapezoid(self.at(at), at) / (high - low))


def curve(given: Predictions, policies: Sequence[Policy], costs: Sequence[float]) -> Curve:
    """What policies found on the calibration split give on other samples."""
    found = sorted((o.cost, o.top1) for o in (outcome(given, p.thresholds, costs) for p in policies))
    best = dict(found)  # of two at the same cost, the better one
    return Curve(tuple(best), tuple(best.values()))
