"""How far an accuracy from some images can be off: 95 % intervals of a share, and of the difference of two.

Counts, or what was right sample by sample, go in; the ends of an interval come out.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np


def proportion_interval(right: int, samples: int, probability: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share of which `right` of `samples` were seen, as shares."""
    if samples < 1:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + probability / 2)
    share, weight = right / samples, z * z / samples
    middle = (share + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(share * (1 - share) / samples + weight / (4 * samples))
    return min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))


def paired_interval(right_a: np.ndarray, right_b: np.ndarray, probability: float = 0.95) -> tuple[float, float]:
    """An interval, in points, of how much more often a is right than b, both on the same samples."""
    difference = np.asarray(right_a, np.float64) - np.asarray(right_b, np.float64)
    samples = len(difference)
    if samples < 2:
        return -100.0, 100.0
    z = NormalDist().inv_cdf(0.5 + probability / 2)
    reach = z * float(difference.std(ddof=1)) / math.sqrt(samples)
    mean = float(difference.mean())
    return 100 * (mean - reach), 100 * (mean + reach)


def samples_needed(right_a: np.ndarray, right_b: np.ndarray, points: float = 2.0, probability: float = 0.95) -> int:
    """How many samples like these would make that interval reach no further than `points` either way."""
    low, high = paired_interval(right_a, right_b, probability)
    return max(len(right_a), math.ceil(len(right_a) * ((high - low) / 2 / points) ** 2))
