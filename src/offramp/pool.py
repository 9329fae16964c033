"""Throughput: survivors of successive batches are pooled, so that late stages run full batches too.

Samples wait at a stage until it has a full batch, or until the oldest has waited long enough. `predict` feeds a
pool from files, the server from requests; each sample is answered the moment it leaves.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offramp.policy import Policy
from offramp.runtime import Engine, State


@dataclass
class Ticket:
    """One sample on its way: whose it is, how far it may go, and when it must be out."""

    key: Any
    max_exit: int
    deadline: float | None = None
    cancelled: bool = False
    guesses: list[tuple[int, float]] = field(default_factory=list)  # label and confidence of every exit passed


@dataclass(frozen=True)
class Left:
    """A sample that has left."""

    ticket: Ticket
    label: int
    confidence: float
    exit: int
    forced: bool


@dataclass
class _Part:
    """Samples waiting at a stage: rows of a state, and since when."""

    state: State
    rows: np.ndarray
    tickets: list[Ticket]
    since: float


class Pool:
    """Queues before each stage, and the rule that says which of them runs next."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        batch: int,
        wait_s: float,
        patience_s: float = math.inf,
        guesses: bool = False,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be 1 or more, got {batch}")
        self.engine, self.policy, self.batch, self.wait_s = engine, policy, batch, wait_s
        self.patience_s = patience_s  # who has waited so long goes before any full batch
        self.guesses = guesses  # whether tickets note what every exit said
        self.queues: list[deque[_Part]] = [deque() for _ in range(engine.num_exits)]
        self.counts = [0] * engine.num_exits

    @property
    def waiting(self) -> int:
        """Samples that have not left yet."""
        return sum(self.counts)

    def add(self, images: np.ndarray, tickets: Sequence[Ticket]) -> None:
        """Normalised images [n, 3, h, w], with a ticket each."""
        assert len(images) == len(tickets)
        with self.engine.active():
            state = self.engine.begin(images)
        part = _Part(state, np.arange(len(images)), list(tickets), time.perf_counter())
        self._enqueue(0, part)

    def ready(self, flush: bool = False) -> bool:
        """Whether a stage should run now."""
        return self._next(flush) is not None

    def work(self, flush: bool = False) -> list[Left]:
        """Run one stage on one batch, if one should run; whoever leaves there. With `flush` nobody waits."""
        at = self._next(flush)
        if at is None:
            return []
        with self.engine.active():
            return self._run(at)

    def due_in(self) -> float:
        """Seconds until somebody has waited long enough for a full batch."""
        since = min(queue[0].since for queue in self.queues if queue)
        return max(0.0, since + self.wait_s - time.perf_counter())

    def tickets(self) -> Iterator[Ticket]:
        """Whoever waits at any stage."""
        return (ticket for queue in self.queues for part in queue for ticket in part.tickets)

    def _next(self, flush: bool) -> int | None:
        """The stage of whoever lost patience; else the deepest full one; else the deepest with a long enough wait."""
        now = time.perf_counter()
        heads = [(queue[0].since, at) for at, queue in enumerate(self.queues) if queue]
        if heads and now - min(heads)[0] >= self.patience_s:
            return min(heads)[1]
        for at in reversed(range(len(self.queues))):
            if self.counts[at] >= self.batch:
                return at
        for at in reversed(range(len(self.queues))):
            if self.counts[at] and (flush or now - self.queues[at][0].since >= self.wait_s):
                return at
        return None

    def _run(self, at: int) -> list[Left]:
        parts = self._take(at)
        if not parts:
            return []
        tickets = [ticket for part in parts for ticket in part.tickets]
        state = self.engine.gather(at + 1, [(part.state, part.rows) for part in parts])
        logits, state = self.engine.run(at + 1, state)
        confidences, labels = self.engine.judge(at + 1, logits)
        leaves, confident = self._leaves(at, tickets, confidences)
        if self.guesses:
            for ticket, label, sure in zip(tickets, labels.tolist(), confidences.tolist(), strict=True):
                ticket.guesses.append((label, sure))
        rows = np.flatnonzero(~leaves)
        if len(rows):
            kept, places = self.engine.keep(state, rows)
            part = _Part(kept, places, [tickets[row] for row in rows.tolist()], time.perf_counter())
            self._enqueue(at + 1, part)
        return [
            Left(tickets[row], int(labels[row]), float(confidences[row]), at + 1, not confident[row])
            for row in np.flatnonzero(leaves).tolist()
        ]

    def _leaves(self, at: int, tickets: list[Ticket], confidences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Who leaves after stage `at` (from 0), and who of them because the exit is confident."""
        if at == len(self.queues) - 1:
            everybody = np.ones(len(tickets), bool)
            return everybody, everybody
        confident = confidences >= np.float32(self.policy.thresholds[at])
        now = time.perf_counter()
        forced = [t.max_exit <= at + 1 or (t.deadline is not None and now >= t.deadline) for t in tickets]
        return confident | np.array(forced), confident

    def _enqueue(self, at: int, part: _Part) -> None:
        self.queues[at].append(part)
        self.counts[at] += len(part.tickets)

    def _take(self, at: int) -> list[_Part]:
        """Up to a batch of samples from the front of a queue; those nobody waits for any more are dropped."""
        taken: list[_Part] = []
        room = self.batch
        while room and self.queues[at]:
            part = self.queues[at].popleft()
            self.counts[at] -= len(part.tickets)
            wanted = [i for i, ticket in enumerate(part.tickets) if not ticket.cancelled]
            now, later = wanted[:room], wanted[room:]
            if later:
                rest = _Part(part.state, part.rows[later], [part.tickets[i] for i in later], part.since)
                self.queues[at].appendleft(rest)
                self.counts[at] += len(later)
            if now:
                taken.append(_Part(part.state, part.rows[now], [part.tickets[i] for i in now], part.since))
            room -= len(now)
        return taken
