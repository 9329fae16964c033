"""How many samples leave at each exit for a given q: the shares are p_k = q^k / sum of q^j, k = 1..K."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache


@lru_cache
def exit_counts(samples: int, num_exits: int, q: float) -> tuple[int, ...]:
    """floor(N * p_k) samples at every exit but the last, which takes the rest; exact, without rounding."""
    if not 0 < q < float("inf"):
        raise ValueError(f"q must be a number above 0, got {q}")
    exact = Fraction(repr(float(q)))
    powers = [exact**k for k in range(1, num_exits + 1)]
    total = sum(powers)
    counts = [int(samples * power / total) for power in powers[:-1]]
    return (*counts, samples - sum(counts))
