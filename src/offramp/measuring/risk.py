"""A promise about a policy: with a given probability, the share of samples it loses stays under a given risk.

A sample is lost when the policy gets it wrong and the whole network gets it right. Candidates come from one half
of the calibration split, ordered from safe to cheap; the other half certifies them one after the other until the
first that fails (fixed-sequence testing), so that trying many costs no certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import Promise, outcome, rights
from offramp.measuring.thresholds import NEVER, Thresholds, search

CANDIDATES = 100


def check_promise(risk: float, probability: float) -> None:
    """Both are shares, not per cent."""
    for name, share in (("risk", risk), ("probability", probability)):
        if not 0 < share < 1:
            percent = f"; {share:g} % is {share / 100:g}" if 1 <= share < 100 else ""
            raise ValueError(f"{name} must lie between 0 and 1, got {share:g}{percent}")


def lost(given: Predictions, thresholds: Sequence[float]) -> int:
    """How many samples the policy gets wrong that the last exit gets right."""
    return int((given.right[-1] & ~rights(given, thresholds)).sum())


def binomial_tail(hits: int, trials: int, chance: float) -> float:
    """The chance of at most `hits` successes in `trials`, exactly."""
    if hits >= trials or chance <= 0:
        return 1.0
    if chance >= 1:
        return 0.0
    k = np.arange(hits + 1)
    choose = math.lgamma(trials + 1) - _log_factorial(k) - _log_factorial(trials - k)
    return float(min(1.0, np.exp(choose + k * math.log(chance) + (trials - k) * math.log1p(-chance)).sum()))


def _log_factorial(counts: np.ndarray) -> np.ndarray:
    return np.array([math.lgamma(count + 1) for count in counts.tolist()])


def certify(
    tried: Sequence[Thresholds], given: Predictions, risk: float, probability: float
) -> tuple[Thresholds, Promise]:
    """The last of those that are tried, in order, before the first whose risk cannot be shown to be small enough.

    Leaving nobody early loses nothing, so that is the answer where even the first candidate fails.
    """
    best: Thresholds = (NEVER,) * (given.num_exits - 1)
    promise = Promise(risk, probability, given.samples, 0)
    for candidate in tried:
        count = lost(given, candidate)
        if binomial_tail(count, given.samples, risk) > 1 - probability:
            break
        best, promise = candidate, Promise(risk, probability, given.samples, count)
    return best, promise


def safe_to_cheap(given: Predictions, costs: Sequence[float], found: Sequence[Thresholds]) -> list[Thresholds]:
    """Candidates in the order to be tried: each loses more than the one before it and costs less."""
    judged = sorted((lost(given, t), outcome(given, t, costs).cost, t) for t in set(found))
    kept: list[Thresholds] = []
    cheapest = math.inf
    for _, cost, candidate in judged:
        if cost < cheapest:
            kept.append(candidate)
            cheapest = cost
    return kept


def halves(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two random halves of the rows: one to choose on, one to certify on."""
    if samples < 2:
        raise ValueError("a promise needs at least two calibration samples")
    order = np.random.default_rng(seed).permutation(samples)
    return np.sort(order[: samples // 2]), np.sort(order[samples // 2 :])


def promised(
    given: Predictions, costs: Sequence[float], risk: float, probability: float, seed: int
) -> tuple[Thresholds, Promise]:
    """The cheapest policy found whose promise holds."""
    check_promise(risk, probability)
    choosing, certifying = (given.rows(rows) for rows in halves(given.samples, seed))
    return certify(candidates(choosing, costs), certifying, risk, probability)


def candidates(given: Predictions, costs: Sequence[float]) -> list[Thresholds]:
    """Those that lose least of these samples at costs from the first exit's to the last's, from safe to cheap."""
    not_lost = Predictions(given.confidences, given.right | ~given.right[-1])
    found = search(not_lost, costs, np.linspace(costs[0], costs[-1], CANDIDATES))
    return safe_to_cheap(given, costs, found)
