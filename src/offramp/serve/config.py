"""What an operator may choose about a server, checked once at its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offramp.common.images import MAX_PIXELS


@dataclass(frozen=True)
class ServeConfig:
    """Limits of a server; the defaults suit one machine on a trusted network."""

    batch: int = 64  # images that a stage runs together at most
    wait_ms: float = 2.0  # how long an image may wait at a stage for a full batch while others are arriving
    queue: int = 256  # images inside at most, wherever they wait
    max_bytes: int = 10_000_000  # of one request's body
    max_images: int = 64  # in one request
    max_pixels: int = MAX_PIXELS  # of one image
    client_mul_adds_per_s: float | None = None  # what one client may use; None: as much as it likes
    overload_exit: int | None = None  # the last exit while over half the queue is taken; None: see `exit_within`
    reveal_exit: bool = False  # whether answers say which exit was taken
    deadline_ms: float | None = None  # for requests that bring none of their own
    trust_forwarded: bool = False  # whether a proxy in front names the client in X-Forwarded-For

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "max_bytes", "max_images", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.wait_ms < math.inf:
            raise ValueError(f"wait_ms must be 0 or more, got {self.wait_ms}")
        for name in ("client_mul_adds_per_s", "deadline_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {value}")

    def divided(self, workers: int) -> ServeConfig:
        """The share that each of several processes has of what is a whole server's: the queue, and a client's ceiling.

        A request of `max_images` fits into each, however many they are.
        """
        if workers < 1:
            raise ValueError(f"workers must be 1 or more, got {workers}")
        queue = self.queue if workers == 1 else max(-(-self.queue // workers), self.most_images)
        ceiling = self.client_mul_adds_per_s
        return replace(self, queue=queue, client_mul_adds_per_s=None if ceiling is None else ceiling / workers)

    @property
    def most_images(self) -> int:
        """Images that one request may bring: never more than would fit into an empty queue."""
        return min(self.max_images, self.queue)

    def overload_ceiling(self, costs: Sequence[int], planned_mul_adds: float) -> int:
        """The last exit in overload mode: the one asked for, or the last that costs no more than planned."""
        if self.overload_exit is None:
            return exit_within(costs, planned_mul_adds)
        if not 1 <= self.overload_exit <= len(costs):
            raise ValueError(f"overload_exit must lie between 1 and {len(costs)}, got {self.overload_exit}")
        return self.overload_exit


def exit_within(costs: Sequence[int], mul_adds: float) -> int:
    """The last exit whose cost stays within `mul_adds`; the first one if none does."""
    return max(1, sum(cost <= mul_adds for cost in costs))
