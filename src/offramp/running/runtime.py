"""Running a network stage by stage, so that skipped work is really skipped.

An engine (PyTorch or ONNX Runtime) runs stages; a policy says who leaves. Confident samples leave, the others are
packed together and go on. Nothing here knows which engine it drives or imports anything of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offramp.common.formatting import millions
from offramp.measuring.policy import Policy, leaves, shares_of
from offramp.running.engines.protocol import Engine


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
            raise ValueError(f"max_mul_adds {millions(max_mul_adds)} is below exit 1's cost, {millions(costs[0])}")
        last = min(last, affordable)
    return last


class Packing(Protocol):
    """The rule that decides whether leaving samples are cut out of the batch before the next stage."""

    def worth_it(self, k: int, batch: int, staying: int) -> bool:
        """Whether going on after exit k with `staying` instead of `batch` samples saves more than packing costs."""


class AlwaysPack:
    """Pack whenever anybody leaves."""

    def worth_it(self, k: int, batch: int, staying: int) -> bool:
        return True


class Runtime:
    """A network under a policy: `runtime(images) -> ExitResult`."""

    def __init__(self, engine: Engine, policy: Policy, costs: Sequence[int], packing: Packing | None = None) -> None:
        if len(policy.thresholds) != engine.num_exits - 1 or len(costs) != engine.num_exits:
            raise ValueError(f"the policy has {len(policy.thresholds) + 1} exits, the network {engine.num_exits}")
        self.engine, self.policy, self.costs = engine, policy, tuple(costs)
        self.packing = AlwaysPack() if packing is None else packing
        self._seconds: dict[tuple[int, int], float] = {}  # of each stage when it last ran at about this size

    def __call__(
        self,
        images: np.ndarray,
        *,
        max_exit: int | None = None,
        max_mul_adds: float | None = None,
        deadline_ms: float | None = None,
    ) -> ExitResult:
        """Run normalised images [n, 3, h, w]; no sample goes beyond the limits, and those cut short are `forced`.

        Under a deadline a stage is begun only if it would end in time, judging by how long it took last.
        """
        until = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        last = ceiling(self.costs, max_exit, max_mul_adds)
        result = ExitResult.empty(len(images))
        if len(images):
            with self.engine.active():
                self._walk(images, last, until, result)
        return result

    def _walk(self, images: np.ndarray, last: int, until: float | None, result: ExitResult) -> None:
        state = self.engine.begin(images)
        inside = np.arange(len(images))  # which sample each row of the state is
        going = np.ones(len(images), bool)  # whether that row still waits for its answer
        for k in range(1, last + 1):
            began = time.perf_counter()
            logits, state = self.engine.run(k, state)
            confidences, labels = self.engine.judge(k, logits)
            self._seconds[k, len(going).bit_length()] = time.perf_counter() - began
            leaving = going & self._confident(k, confidences)
            if k == last or self._too_late(k + 1, int((going & ~leaving).sum()), until):
                leaving = going.copy()
            self._record(result, k, inside, leaving, labels, confidences)
            going &= ~leaving
            staying = int(going.sum())
            if not staying:
                break
            if staying < len(going) and self.packing.worth_it(k, len(going), staying):
                rows = np.flatnonzero(going)
                state, inside, going = self.engine.gather(k + 1, [(state, rows)]), inside[rows], np.ones(staying, bool)

    def _too_late(self, k: int, rows: int, until: float | None) -> bool:
        """Whether stage k would end after the deadline; what is expected of it shrinks each time it is not begun."""
        if until is None:
            return False
        key = (k, rows.bit_length())
        late = time.perf_counter() + self._seconds.get(key, 0.0) >= until
        if late and key in self._seconds:
            self._seconds[key] /= 2  # one slow moment must not decide for good
        return late

    def _confident(self, k: int, confidences: np.ndarray) -> np.ndarray:
        """Who may leave at exit k; at the last one everybody. Not a number is never confident."""
        if k == self.engine.num_exits:
            return np.ones(len(confidences), bool)
        return leaves(confidences, self.policy.thresholds[k - 1])

    def _record(
        self,
        result: ExitResult,
        k: int,
        inside: np.ndarray,
        leaving: np.ndarray,
        labels: np.ndarray,
        confidences: np.ndarray,
    ) -> None:
        who = inside[leaving]
        result.labels[who], result.confidences[who] = labels[leaving], confidences[leaving]
        result.exits[who], result.mul_adds[who] = k, self.costs[k - 1]
        result.forced[who] = ~self._confident(k, confidences)[leaving]
