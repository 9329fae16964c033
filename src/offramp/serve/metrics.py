"""What a server counts, as Prometheus text: requests, latency, exits taken, and their drift from calibration.

A process writes its numbers into a row of its own; what is shown is added up over the rows of all processes that serve
together. Drift is the total variation distance between the shares of the last images and those the policy had on the
calibration split: 0 if they agree, 1 if no image leaves where it was expected to.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

WINDOW = 1000  # images that the live shares of a process look back on
ENOUGH = 100  # images before drift means anything; with fewer it is mostly chance
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COUNTS = {
    "images": "Images that left with an answer.",
    "forced_images": "Images that a limit forced out.",
    "mul_adds": "Mul-adds used, by images that were dropped too.",
    "dropped_images": "Images whose client went away.",
    "failed_images": "Images whose stage failed.",
    "overload_images": "Images taken in overload mode.",
}

# where a number stands in a row
MOST_EXITS = 128
STATUS = 0  # + the HTTP status
BUCKET = 600  # + the bucket of the histogram
TOTAL_S = BUCKET + len(SECONDS) + 1
COUNT = {name: TOTAL_S + 1 + at for at, name in enumerate(COUNTS)}
EXITS = TOTAL_S + 1 + len(COUNTS)  # + the exit, from 0
QUEUE = EXITS + MOST_EXITS  # from here on: of this moment, forgotten when the process ends
RECENT = QUEUE + 1  # + the exit: the last images
FREE = RECENT + MOST_EXITS  # + the exit: the last images without a limit
SLOTS = FREE + MOST_EXITS

Row: TypeAlias = "memoryview[float]"


class Rows(Protocol):
    """The rows of all processes that serve together."""

    @property
    def own(self) -> Row:
        """This process's, which nobody else writes."""

    async def all(self) -> Sequence[Row | np.ndarray]:
        """Everybody's, this process's too."""


class OwnRow:
    """The row of a process that serves alone."""

    def __init__(self) -> None:
        self.own = new_row(SLOTS)

    async def all(self) -> Sequence[Row | np.ndarray]:
        return [self.own]


def new_row(slots: int) -> Row:
    return memoryview(bytearray(8 * slots)).cast("d")


def forget_moment(row: Row) -> None:
    """Clear what was true only while the row's process lived; its counters stay."""
    for at in range(QUEUE, SLOTS):
        row[at] = 0.0


class Window:
    """How many of the last images left at each exit."""

    def __init__(self, num_exits: int, size: int = WINDOW, counts: Row | None = None) -> None:
        self.counts = new_row(num_exits) if counts is None else counts
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
        return shares_of(self.counts)


def shares_of(counts: Iterable[float]) -> list[float]:
    """Counts as parts of their sum."""
    counts = list(counts)
    return [count / max(sum(counts), 1) for count in counts]


def distance(shares: Sequence[float], expected: Sequence[float]) -> float:
    """Total variation distance: half of the summed differences."""
    return sum(abs(a - b) for a, b in zip(shares, expected, strict=True)) / 2


class Metrics:
    """The counters of one process."""

    def __init__(self, expected: Sequence[float], row: Row) -> None:
        self.expected, self.row = tuple(expected), row
        exits = len(self.expected)
        if exits > MOST_EXITS:
            raise ValueError(f"a server can count at most {MOST_EXITS} exits, this network has {exits}")
        forget_moment(row)  # a process that was here before may have left something
        self.recent, self.free = self._window(RECENT), self._window(FREE)  # every image; only these can drift

    def _window(self, at: int) -> Window:
        return Window(len(self.expected), counts=self.row[self._exits(at)])

    def _exits(self, at: int) -> slice:
        return slice(at, at + len(self.expected))

    def count(self, name: str, by: float = 1) -> None:
        """Add to one of `COUNTS`."""
        self.row[COUNT[name]] += by

    @property
    def queue(self) -> int:
        """Images inside this process."""
        return int(self.row[QUEUE])

    @queue.setter
    def queue(self, images: int) -> None:
        self.row[QUEUE] = images

    def left(self, exit_: int, forced: bool, limited: bool) -> None:
        """An image has its answer."""
        self.count("images")
        self.row[EXITS + exit_ - 1] += 1
        self.recent.add(exit_)
        if forced:
            self.count("forced_images")
        if not limited:
            self.free.add(exit_)

    def answered(self, status: int, seconds: float) -> None:
        """A request has its response."""
        self.row[STATUS + status] += 1
        self.row[BUCKET + bisect_left(SECONDS, seconds)] += 1
        self.row[TOTAL_S] += seconds

    def recent_counts(self, rows: Sequence[Row | np.ndarray]) -> list[int]:
        """How many of the last images left at each exit, in all processes."""
        return [int(count) for count in _summed(rows)[self._exits(RECENT)]]

    def text(self, rows: Sequence[Row | np.ndarray]) -> bytes:
        """Everything, added up over processes, as Prometheus reads it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self, _summed(rows)))
        return generate_latest(registry)

    def families(self, sums: np.ndarray) -> Iterator[Metric]:
        """The sums as families of metrics."""
        requests = CounterMetricFamily("offramp_requests", "Requests to /predict by status.", labels=["status"])
        for status in range(STATUS, BUCKET):
            if sums[status]:
                requests.add_metric([str(status - STATUS)], sums[status])
        yield requests
        within = np.cumsum(sums[BUCKET:TOTAL_S])
        buckets = [(str(edge), count) for edge, count in zip((*SECONDS, "+Inf"), within, strict=True)]
        yield HistogramMetricFamily("offramp_request_seconds", "Time to answer /predict.", buckets, sums[TOTAL_S])
        for name, about in COUNTS.items():
            yield CounterMetricFamily(f"offramp_{name}", about, sums[COUNT[name]])
        exits = CounterMetricFamily("offramp_exit_images", "Images that left at each exit.", labels=["exit"])
        for exit_, count in enumerate(sums[self._exits(EXITS)], 1):
            exits.add_metric([str(exit_)], count)
        yield exits
        yield GaugeMetricFamily("offramp_queue_images", "Images inside the server.", sums[QUEUE])
        about = "Distance of the shares from calibration."
        yield GaugeMetricFamily("offramp_share_drift", about, self._drift(sums[self._exits(FREE)]))

    def _drift(self, counts: Iterable[float]) -> float:
        """How far the shares of unlimited images are from calibration; not a number before there are enough."""
        counts = list(counts)
        return distance(shares_of(counts), self.expected) if sum(counts) >= ENOUGH else math.nan


def _summed(rows: Sequence[Row | np.ndarray]) -> np.ndarray:
    return np.sum([np.asarray(row) for row in rows], axis=0)


class _Families(Collector):
    def __init__(self, metrics: Metrics, sums: np.ndarray) -> None:
        self.metrics, self.sums = metrics, sums

    def collect(self) -> Iterable[Metric]:
        return self.metrics.families(self.sums)
