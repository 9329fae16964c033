"""What a server counts, as Prometheus text: requests, latency, exits taken, and their drift from calibration.

Drift is the total variation distance between the shares of the last images and those the policy had on the
calibration split: 0 if they agree, 1 if no image leaves where it was expected to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW = 1000  # images that the live shares look back on
ENOUGH = 100  # images before drift means anything; with fewer it is mostly chance
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Window:
    """How many of the last images left at each exit."""

    def __init__(self, num_exits: int, size: int = WINDOW) -> None:
        self.counts = [0] * num_exits
        self._exits: deque[int] = deque()
        self._size = size

    def __len__(self) -> int:
        return len(self._exits)

    def add(self, exit_: int) -> None:
        self._exits.append(exit_)
        self.counts[exit_ - 1] += 1
        if len(self._exits) > self._size:
            self.counts[self._exits.popleft() - 1] -= 1

    def shares(self) -> list[float]:
        return [count / max(len(self), 1) for count in self.counts]


def distance(shares: Sequence[float], expected: Sequence[float]) -> float:
    """Total variation distance: half of the summed differences."""
    return sum(abs(a - b) for a, b in zip(shares, expected, strict=True)) / 2


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, expected: Sequence[float], queue: Callable[[], int]) -> None:
        self.expected = tuple(expected)
        self.recent = Window(len(self.expected))  # every image
        self.free = Window(len(self.expected))  # images without a limit: only these can drift
        own = self.registry = CollectorRegistry()
        self.requests = Counter("offramp_requests", "Requests to /predict by status.", ["status"], registry=own)
        self.seconds = Histogram("offramp_request_seconds", "Time to answer /predict.", buckets=SECONDS, registry=own)
        self.images = Counter("offramp_images", "Images that left with an answer.", registry=own)
        self.exits = Counter("offramp_exit_images", "Images that left at each exit.", ["exit"], registry=own)
        self.forced = Counter("offramp_forced_images", "Images that a limit forced out.", registry=own)
        self.mul_adds = Counter("offramp_mul_adds", "Mul-adds used, by images that were dropped too.", registry=own)
        self.dropped = Counter("offramp_dropped_images", "Images whose client went away.", registry=own)
        self.failed = Counter("offramp_failed_images", "Images whose stage failed.", registry=own)
        self.overload = Counter("offramp_overload_images", "Images taken in overload mode.", registry=own)
        Gauge("offramp_queue_images", "Images inside the server.", registry=own).set_function(queue)
        Gauge("offramp_share_drift", "Distance of the shares from calibration.", registry=own).set_function(self.drift)
        for exit_ in range(1, len(self.expected) + 1):
            self.exits.labels(str(exit_))

    def left(self, exit_: int, forced: bool, limited: bool) -> None:
        """An image has its answer."""
        self.images.inc()
        self.exits.labels(str(exit_)).inc()
        self.recent.add(exit_)
        if forced:
            self.forced.inc()
        if not limited:
            self.free.add(exit_)

    def answered(self, status: int, seconds: float) -> None:
        """A request has its response."""
        self.requests.labels(str(status)).inc()
        self.seconds.observe(seconds)

    def drift(self) -> float:
        """How far the shares of unlimited images are from calibration; not a number before there are enough."""
        return distance(self.free.shares(), self.expected) if len(self.free) >= ENOUGH else math.nan

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)
