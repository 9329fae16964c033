"""Connections: never more than there are descriptors for, closed when idle, and an end that answers what was sent.

Beyond the limit, whoever has been idle longest makes room, so that a health check gets in. When the server is told to
stop, everything that had been sent by then is read and answered, and clients with kept connections are told to close.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import OrderedDict
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 20.0  # for the head of a request to arrive, on a new connection or after the last answer
BACKLOG = 2048  # connections that the system may keep waiting, and that are accepted at a time
MOST_DESCRIPTORS = 65_536  # asked for, where the system allows them
SPARE = 24  # descriptors that are not for connections
CLOSE = (b"connection", b"close")

log = logging.getLogger("offramp")


class Connections:
    """Those that are open, and which of them are idle, longest first."""

    def __init__(self, most: int) -> None:
        self.most, self.draining = most, False
        self.open: set[Connection] = set()
        self.idle: OrderedDict[Connection, None] = OrderedDict()
        self._said = False

    def add(self, one: Connection) -> None:
        """A new connection; beyond the limit somebody idle is closed, or the new one if nobody is."""
        self.open.add(one)
        self.rests(one)
        if len(self.open) > self.most:
            if not self._said:
                log.warning("more than %d connections: those that are idle are closed (ulimit -n)", self.most)
                self._said = True
            next(iter(self.idle)).close()

    def works(self, one: Connection) -> None:
        """A request has begun on it."""
        self.idle.pop(one, None)

    def rests(self, one: Connection) -> None:
        """Nothing happens on it now."""
        self.idle[one] = None
        self.idle.move_to_end(one)

    def remove(self, one: Connection) -> None:
        self.open.discard(one)
        self.idle.pop(one, None)

    def drain(self) -> None:
        """From now on every answer says that the connection closes with it."""
        self.draining = True
        for one in self.open:
            one.last_answer()

    def close_unsent(self) -> None:
        """Close those whose request has not arrived as a whole."""
        for one in list(self.open):
            if one.incomplete:
                one.close()


class Connection(H11Protocol):
    """uvicorn's, which notes when it is idle and does not stay so for long."""

    def __init__(self, config: ServerConfig, *given: Any, **more: Any) -> None:
        super().__init__(config, *given, **more)
        self.book = config.connections
        self._idle_task: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def incomplete(self) -> bool:
        """Whether a request is under way whose body has not arrived."""
        return self.busy and self.cycle.more_body and not self.cycle.response_started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_a_request()
        self.book.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_idle()
        self.book.remove(self)

    def close(self) -> None:
        """Close it now; its place is free at once."""
        self.book.remove(self)
        self.transport.close()

    def last_answer(self) -> None:
        """Let the answer that is still to come say that the connection closes.

        One that did not say so leaves the connection open: its client may have sent another request already.
        """
        if self.busy and not self.cycle.response_started and CLOSE not in self.cycle.default_headers:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE]

    def _note(self) -> None:
        """After something happened: is a request under way, or nothing?"""
        if self.transport.is_closing():
            return
        if self.busy:
            self._unset_idle()
            self.book.works(self)
            if self.book.draining:
                self.last_answer()
        elif self._idle_task is None:
            self._wait_for_a_request()
            self.book.rests(self)

    def _wait_for_a_request(self) -> None:
        self._idle_task = self.loop.call_later(IDLE_S, self.close)

    def _unset_idle(self) -> None:
        if self._idle_task is not None:
            self._idle_task.cancel()
            self._idle_task = None


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, and the connections that its server shares."""

    def __init__(self, app: Any, **more: Any) -> None:
        most, burst = connection_limit()
        super().__init__(app, **{**more, "http": Connection, "backlog": burst})
        self.connections = Connections(most)


def connection_limit() -> tuple[int, int]:
    """How many connections there are descriptors for, and how many of them may be accepted at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MOST_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    free = soft - _open_descriptors() - SPARE
    if free < 8:
        raise ValueError(f"a limit of {soft} open files leaves no room for connections; raise it (ulimit -n)")
    burst = min(BACKLOG, free // 8)
    return free - 4 * burst, burst  # some are accepted while those before them are still being closed


def _open_descriptors() -> int:
    """How many this process has open; a guess where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
