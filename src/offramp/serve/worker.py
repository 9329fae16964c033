"""The one thread that runs stages. Images with their tickets go in; what became of each ticket comes out.

The thread owns the pool: whoever arrives while a stage runs joins those already waiting, and each image is told of
the moment it leaves. A stage that fails takes down its own batch only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offramp.running.pool import Left, Pool, Ticket

STOP_S = 30.0  # for the images inside, once no more come

log = logging.getLogger("offramp")


@dataclass(frozen=True)
class Over:
    """The end of a ticket's way: it left, or, with nothing in `left`, it was dropped or its stage failed."""

    ticket: Ticket
    left: Left | None


class Worker:
    """Runs a pool in a thread of its own and calls `tell` there with every ticket that is over."""

    def __init__(self, pool: Pool, tell: Callable[[list[Over]], None]) -> None:
        self.pool, self.tell = pool, tell
        self.coming = 0  # requests that are still being read; while there are none nobody needs to wait for them
        self._inside: dict[int, Ticket] = {}
        self._arrived: list[tuple[np.ndarray, Sequence[Ticket]]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._stage_s = 0.0  # how long a stage takes of late
        self._thread = threading.Thread(target=self._run, name="offramp-stages", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, images: np.ndarray, tickets: Sequence[Ticket]) -> None:
        """Send normalised images [n, 3, h, w] on their way; may be called from any thread."""
        with self._changed:
            self._arrived.append((images, tickets))
            self._changed.notify()

    def stop(self) -> None:
        """Finish what is inside, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while self._take_in():
                self._expire()
                if self._busy:
                    self._step()
        except Exception:  # not of a stage: a mistake of our own, after which nobody must be left waiting
            log.exception("the server can no longer answer; it must be started again")
            with self._changed:
                arrived = [ticket for _, own in self._arrived for ticket in own]
            self.tell([Over(ticket, None) for ticket in [*self._inside.values(), *arrived]])

    @property
    def _hurry(self) -> bool:
        return self._stopping or not self.coming

    @property
    def _busy(self) -> bool:
        return bool(self.pool.running) or self.pool.ready(self._hurry)

    def _take_in(self) -> bool:
        """Wait until there is something to do and let in who has arrived; False once stopped and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._stopping, self._idle_s())
            arrived, self._arrived = self._arrived, []
        if arrived:
            self._add([images for images, _ in arrived], [ticket for _, own in arrived for ticket in own])
        return bool(self.pool.waiting or not self._stopping)

    def _idle_s(self) -> float | None:
        if not self.pool.waiting:
            return None
        return 0.0 if self._busy else self.pool.due_in()

    def _add(self, images: list[np.ndarray], tickets: list[Ticket]) -> None:
        self._inside.update((id(ticket), ticket) for ticket in tickets)
        try:
            self.pool.add(np.concatenate(images), tickets)
        except Exception:
            self._failed()
        self._tell([])

    def _step(self) -> None:
        left: list[Left] = []
        try:
            left = self.pool.work(self._hurry)
        except Exception:
            self._failed()
        self._stage_s = max(self.pool.took_s, 0.8 * self._stage_s)
        self._tell(left)

    def _failed(self) -> None:
        log.exception("a stage failed; the images in it are answered with an error, the server goes on")

    def _expire(self) -> None:
        """Whoever could not finish another stage in time leaves with the answer it has; not out of a stage."""
        until = time.perf_counter() + self._stage_s
        late = [t for t in self._inside.values() if t.deadline is not None and t.deadline <= until and t.guesses]
        if late and self.pool.running:
            within = {id(ticket) for stage in self.pool.running for ticket in stage.tickets}
            late = [ticket for ticket in late if id(ticket) not in within]
        for ticket in late:
            ticket.cancelled = True  # the pool drops it
        if late:
            self._tell([Left(t, *t.guesses[-1], exit=len(t.guesses), forced=True) for t in late])

    def _tell(self, left: list[Left]) -> None:
        """Report those who left, and those who are no longer in the pool without having left."""
        over = [Over(one.ticket, one) for one in left if self._inside.pop(id(one.ticket), None)]
        if len(self._inside) != self.pool.waiting:
            still = {id(ticket) for ticket in self.pool.tickets()}
            gone = [key for key in self._inside if key not in still]
            over += [Over(self._inside.pop(key), None) for key in gone]
        if over:
            self.tell(over)
