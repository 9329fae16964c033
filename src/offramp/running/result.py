"""What running a network with exits gives, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.measuring.policy import shares_of


@dataclass(frozen=True)
class ExitResult:
    """Per sample: the class answered, how sure the exit was, the exit (from 1), its cost, whether it was forced out."""

    labels: np.ndarray
    confidences: np.ndarray
    exits: np.ndarray
    mul_adds: np.ndarray
    forced: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def shares(self, num_exits: int) -> tuple[float, ...]:
        """The share of samples that left at each exit."""
        return shares_of(self.exits, num_exits)

    @staticmethod
    def empty(samples: int) -> ExitResult:
        """Room for `samples` results."""
        return ExitResult(
            np.zeros(samples, np.int64),
            np.zeros(samples, np.float32),
            np.zeros(samples, np.int64),
            np.zeros(samples, np.int64),
            np.zeros(samples, bool),
        )


def ceiling(costs: Sequence[int], max_exit: int | None = None, max_mul_adds: float | None = None) -> int:
    """The last exit that may be used under both limits."""
    last = len(costs)
    if max_exit is not None:
        if not 1 <= max_exit <= last:
            raise ValueError(f"max_exit must lie between 1 and {last}, got {max_exit}")
        last = max_exit
    if max_mul_adds is not None:
        affordable = sum(cost <= max_mul_adds for cost in costs)
        if not affordable:
            raise ValueError(f"max_mul_adds {max_mul_adds:,.0f} is below exit 1's cost, {costs[0]:,}")
        last = min(last, affordable)
    return last
