"""Throughput: survivors of successive batches are pooled, so that late stages run full batches too.

Samples wait at a stage until it has a full batch, or until the oldest has waited long enough. `predict` feeds a
pool from files, the server from requests; each sample is answered the moment it leaves.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from offramp.measuring.policy import Policy, leaves
from offramp.running.engines.protocol import Engine, EngineState


@dataclass
class Ticket:
    """One sample on its way: whose it is, how far it may go, and when it must be out."""

    key: Any
    max_exit: int
    deadline: float | None = None
    cancelled: bool = False
    guesses: list[tuple[int, float]] = field(default_factory=list)  # label and confidence of every exit passed


class Left(NamedTuple):
    """A sample that has left."""

    ticket: Ticket
    label: int
    confidence: float
    exit: int
    forced: bool


@dataclass
class _Part:
    """Samples waiting at a stage: the first rows of a state, one for each ticket, and since when.

    `free`: rows behind them that others may still take. `again`: the memory is the pool's own, to be used again.
    """

    state: EngineState
    tickets: list[Ticket]
    since: float
    free: int = 0
    again: bool = False


@dataclass(frozen=True)
class _Running:
    """A stage (from 0) that was told to run: when, who is in it, what it will say and leave, rooms to be used again."""

    began: float
    at: int
    tickets: list[Ticket]
    logits: Any
    state: EngineState
    again: list[EngineState]


_AHEAD: weakref.WeakKeyDictionary[Engine, weakref.ref[Pool]] = weakref.WeakKeyDictionary()  # who last ran ahead


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
        self.rooms: list[list[EngineState]] = [[] for _ in range(engine.num_exits)]  # memory to be used again, by stage
        self.running: deque[_Running] = deque()  # stages that were told to run and not judged yet
        self.took_s = 0.0  # what the stage that was judged last took, from its start
        self._slot = 0

    @property
    def waiting(self) -> int:
        """Samples that have not left yet."""
        return sum(self.counts) + sum(len(stage.tickets) for stage in self.running)

    def add(self, images: np.ndarray, tickets: Sequence[Ticket]) -> None:
        """Normalised images [n, 3, h, w], with a ticket each."""
        assert len(images) == len(tickets)
        with self.engine.active():
            state = self.engine.begin(images)
        self.queues[0].append(_Part(state, list(tickets), time.perf_counter()))
        self.counts[0] += len(tickets)

    def ready(self, flush: bool = False) -> bool:
        """Whether a stage should be told to run now."""
        return self._next(flush) is not None

    def work(self, flush: bool = False) -> list[Left]:
        """One batch through one stage; whoever leaves there. With `flush` nobody waits.

        Where the engine allows it, a full batch is started before the last is judged, one call later: a device has
        something to run while the host decides. Fewer samples wait for those who come back, or they would run alone.
        A call without anything to start judges what was started.
        """
        with self.engine.active():
            ahead, started = self._ahead(), False
            while len(self.running) <= ahead:
                at = self._next(flush)
                if at is None or (self.running and self.counts[at] < self.batch):
                    break
                self._start(at, ahead)
                started = True
            if not self.running or (started and len(self.running) <= ahead):
                return []
            return self._end(self.running.popleft())

    def _ahead(self) -> int:
        """How many stages may be under way beside one; none while another pool has some in the engine's slots."""
        last = _AHEAD.get(self.engine, lambda: None)()
        if last is not None and last is not self and last.running:
            return 0
        _AHEAD[self.engine] = weakref.ref(self)
        return self.engine.ahead

    def due_in(self) -> float:
        """Seconds until somebody has waited long enough for a full batch."""
        since = min(queue[0].since for queue in self.queues if queue)
        return max(0.0, since + self.wait_s - time.perf_counter())

    def tickets(self) -> Iterator[Ticket]:
        """Whoever waits at any stage or is in one."""
        waiting = (ticket for queue in self.queues for part in queue for ticket in part.tickets)
        return chain(waiting, (ticket for stage in self.running for ticket in stage.tickets))

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

    def _start(self, at: int, ahead: int) -> None:
        """Tell the engine to run stage `at` (from 0) on a batch of those who wait there."""
        began, parts = time.perf_counter(), self._take(at)
        tickets = [part.tickets[row] for part, rows in parts for row in rows]
        if not tickets:
            return
        self.engine.use(1 + self._slot if ahead else 0)
        try:
            logits, state = self.engine.run(at + 1, self._state(at, parts))
        finally:
            self.engine.use(0)
        again = [part.state for part, _ in parts if part.again]
        self.running.append(_Running(began, at, tickets, logits, state, again))
        self._slot = (self._slot + 1) % (ahead + 1)  # one that failed leaves its slot to the next

    def _end(self, stage: _Running) -> list[Left]:
        """Wait for what a stage says: some leave, the others go on."""
        at, tickets = stage.at, stage.tickets
        confidences, labels = self.engine.judge(at + 1, stage.logits)
        self.took_s = time.perf_counter() - stage.began
        leaving, confident = self._leaving(at, tickets, confidences)
        if self.guesses:
            for ticket, label, sure in zip(tickets, labels.tolist(), confidences.tolist(), strict=True):
                ticket.guesses.append((label, sure))
        self._go_on(at + 1, stage.state, np.flatnonzero(~leaving), tickets)
        self.rooms[at] += stage.again
        rows = np.flatnonzero(leaving)
        found = (array[rows].tolist() for array in (labels, confidences, ~confident))
        return [
            Left(tickets[row], label, sure, at + 1, forced)
            for row, label, sure, forced in zip(rows.tolist(), *found, strict=True)
        ]

    def _state(self, at: int, parts: list[tuple[_Part, list[int]]]) -> EngineState:
        """One state for some rows of some parts; copied only where it must be."""
        first, rows = parts[0]
        if len(parts) == 1 and rows[-1] == len(rows) - 1:
            return _first(first.state, len(rows))
        return self.engine.gather(at + 1, [(part.state, np.array(rows)) for part, rows in parts if rows])

    def _go_on(self, at: int, state: EngineState, rows: np.ndarray, tickets: list[Ticket]) -> None:
        """Copy samples behind those that wait for stage `at` already, room by room."""
        queue = self.queues[at] if len(rows) else deque()
        while len(rows):
            part = queue[-1] if queue and queue[-1].free else self._new_part(at, state)
            some, rows = rows[: part.free], rows[part.free :]
            self.engine.put(state, some, part.state, len(part.tickets))
            if not part.tickets:
                queue.append(part)
            part.tickets += [tickets[row] for row in some.tolist()]
            part.free -= len(some)
            self.counts[at] += len(some)

    def _new_part(self, at: int, state: EngineState) -> _Part:
        """A room for a batch before stage `at`, nobody in it yet."""
        room = self.rooms[at].pop() if self.rooms[at] else self.engine.room(state, self.batch)
        return _Part(room, [], time.perf_counter(), self.batch, again=True)

    def _leaving(self, at: int, tickets: list[Ticket], confidences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Who leaves after stage `at` (from 0), and who of them because the exit is confident."""
        if at == len(self.queues) - 1:
            everybody = np.ones(len(tickets), bool)
            return everybody, everybody
        confident = leaves(confidences, self.policy.thresholds[at])
        now = time.perf_counter()
        forced = [t.max_exit <= at + 1 or (t.deadline is not None and now >= t.deadline) for t in tickets]
        return confident | np.array(forced), confident

    def _take(self, at: int) -> list[tuple[_Part, list[int]]]:
        """Up to a batch of samples from the front of a queue, as rows of parts; what is too much is cut off.

        Others may cancel at any moment, so each ticket is asked once.
        """
        taken: list[tuple[_Part, list[int]]] = []
        space, queue = self.batch, self.queues[at]
        while space and queue:
            part = queue.popleft()
            self.counts[at] -= len(part.tickets)
            wanted = [row for row, ticket in enumerate(part.tickets) if not ticket.cancelled]
            if len(wanted) > space:
                cut = wanted[space]
                queue.appendleft(_Part(_from(part.state, cut), part.tickets[cut:], part.since))
                self.counts[at] += len(part.tickets) - cut
                part, wanted = _Part(part.state, part.tickets, part.since), wanted[:space]
            taken.append((part, wanted))
            space -= len(wanted)
        return taken


def _first(state: EngineState, samples: int) -> EngineState:
    """The first samples of a state, without copying."""
    return state if samples == len(state[0]) else tuple(array[:samples] for array in state)


def _from(state: EngineState, sample: int) -> EngineState:
    """The samples of a state from one on, without copying."""
    return tuple(array[sample:] for array in state)
