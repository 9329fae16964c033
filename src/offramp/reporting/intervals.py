"""How far an accuracy, or the difference of two on the same samples, may be off: 95 % intervals from counts."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]


def proportion_interval(right: int, samples: int, probability: float = 0.95) -> Interval:
    """The share of right answers, of which `right` of `samples` were seen (Wilson's score interval), as shares."""
    z = NormalDist().inv_cdf((1 + probability) / 2)
    share, extra = right / samples, z * z / samples
    middle = (share + extra / 2) / (1 + extra)
    reach = z * sqrt(share * (1 - share) / samples + extra / (4 * samples)) / (1 + extra)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def paired_interval(right_a: np.ndarray, right_b: np.ndarray, probability: float = 0.95) -> Interval:
    """How many points more of the samples `a` gets right than `b`, both having seen the same (Bonett and Price)."""
    z = NormalDist().inv_cdf((1 + probability) / 2)
    samples = len(right_a) + 2
    a, b = ((int(only.sum()) + 1) / samples for only in (right_a & ~right_b, right_b & ~right_a))
    reach = z * sqrt((a + b - (a - b) ** 2) / samples)
    return 100 * max(-1.0, a - b - reach), 100 * min(1.0, a - b + reach)
