"""How far an accuracy, or the difference of two on the same samples, may be off: intervals from counts.

An accuracy has the exact interval (Clopper-Pearson), which covers at least as often as it says. The difference of two
has Tango's score interval of the pairs on which they differ (Statistics in Medicine 17, 1998), which holds for small
counts too, joined with Bonett and Price's (2012): each is a little short where the other is not.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]
PROBABILITY = 0.95
HALVINGS = 50  # of a bracket within [-1, 1]


@lru_cache(1 << 16)
def upper_bound(hits: int, trials: int, probability: float) -> float:
    """The exact (Clopper-Pearson) upper bound on a chance: with this probability it lies below."""
    if hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # at most `hits` successes are as likely as that a beta variable exceeds the chance
        exceeds = 1 - incomplete_beta(hits + 1, trials - hits, middle)
        low, high = (low, middle) if exceeds <= 1 - probability else (middle, high)
    return high


def proportion_interval(right: int, samples: int, probability: float = PROBABILITY) -> Interval:
    """The share of right answers, of which `right` of `samples` were seen; exact, as shares."""
    if not 0 <= right <= samples or not samples:
        raise ValueError(f"an interval needs samples, and no more right ones than there are: {right} of {samples}")
    each = (1 + probability) / 2
    return 1 - upper_bound(samples - right, samples, each), upper_bound(right, samples, each)


def right_interval(right: np.ndarray) -> Interval:
    """The same of samples of which it is known whether each is right."""
    return proportion_interval(int(right.sum()), len(right))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The chance that a beta(a, b) variable is at most x, by its continued fraction."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side is the one that converges
        return 1 - incomplete_beta(b, a, 1 - x)
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(front) * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d1 / (1 + d2 / ...)) by Lentz's method; about the root of a + b terms are needed."""
    tiny = 1e-300
    numerator, denominator = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = denominator
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            denominator = 1 / (1 + term * denominator or tiny)
            numerator = 1 + term / numerator or tiny
            change *= numerator * denominator
        value *= change
        if abs(change - 1) < 1e-15:
            break
    return value


def paired_interval(right_a: np.ndarray, right_b: np.ndarray, probability: float = PROBABILITY) -> Interval:
    """How many points more of the samples `a` gets right than `b`, both having seen the same ones, as an interval."""
    only_a, only_b = discordant(right_a, right_b)
    return discordant_interval(only_a, only_b, len(right_a), probability)


def discordant(right_a: np.ndarray, right_b: np.ndarray) -> tuple[int, int]:
    """How many samples only `a` gets right, and how many only `b`."""
    if len(right_a) != len(right_b) or not len(right_a):
        raise ValueError(f"pairs need as many of one as of the other: {len(right_a)} and {len(right_b)}")
    return int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())


@lru_cache(1 << 16)
def discordant_interval(only_a: float, only_b: float, samples: float, probability: float = PROBABILITY) -> Interval:
    """The same from the two counts, in points."""
    z = NormalDist().inv_cdf((1 + probability) / 2)
    score, adjusted = _score_interval(only_a, only_b, samples, z), _adjusted_interval(only_a, only_b, samples, z)
    return 100 * max(-1.0, min(score[0], adjusted[0])), 100 * min(1.0, max(score[1], adjusted[1]))


def _score_interval(only_a: float, only_b: float, samples: float, z: float) -> Interval:
    """The differences that the score test does not refuse (Tango)."""
    seen, ends = (only_a - only_b) / samples, []
    for end, side in ((-1.0, 1.0), (1.0, -1.0)):
        inside, outside = seen, end
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            refused = side * _score(only_a, only_b, samples, middle) > z
            inside, outside = (inside, middle) if refused else (middle, outside)
        ends.append(inside)
    return ends[0], ends[1]


def _score(only_a: float, only_b: float, samples: float, difference: float) -> float:
    """How many standard deviations lie between what was seen and a true difference."""
    # The chance of `only b` that is most likely at this difference solves a quadratic equation.
    second = 2 * samples
    first = -only_a - only_b + (2 * samples - only_a + only_b) * difference
    zeroth = -only_b * difference * (1 - difference)
    chance_b = (math.sqrt(max(first**2 - 4 * second * zeroth, 0.0)) - first) / (2 * second)
    variance = samples * (2 * chance_b + difference * (1 - difference))
    gap = only_a - only_b - samples * difference
    return gap / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gap)


def _adjusted_interval(only_a: float, only_b: float, samples: float, z: float) -> Interval:
    """The usual interval, after one more sample of either kind (Bonett and Price)."""
    a, b = (only_a + 1) / (samples + 2), (only_b + 1) / (samples + 2)
    reach = z * math.sqrt((a + b - (a - b) ** 2) / (samples + 2))
    return a - b - reach, a - b + reach


def reach(estimate: float, interval: Interval) -> float:
    """How far an interval goes beyond its estimate, on the side where that is more."""
    return max(interval[1] - estimate, estimate - interval[0])


def samples_needed(
    right_a: np.ndarray, right_b: np.ndarray, points: float = 2.0, probability: float = PROBABILITY
) -> int:
    """How many samples bring a paired interval within so many points of its estimate, if these are typical."""
    only_a, only_b = (count / len(right_a) for count in discordant(right_a, right_b))

    def wide(samples: float) -> bool:
        own = discordant_interval(only_a * samples, only_b * samples, samples, probability)
        return reach(100 * (only_a - only_b), own) > points

    enough = 1
    while wide(enough):
        enough *= 2
    low = enough // 2
    while enough - low > max(1, enough // 200):
        middle = (low + enough) // 2
        low, enough = (middle, enough) if wide(middle) else (low, middle)
    return enough
