"""uvicorn as offramp runs it: a listening socket, connections that are accepted in turn, and an end that finishes
what has begun.

Connections are accepted here and not by asyncio: of several processes that listen on one socket, none shall take all
that wait before the others wake up.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from offramp.serve.connections import BACKLOG, ServerConfig

DRAIN_S = 30  # for requests inside once the server was told to stop
SENT_S = 0.25  # until all that was sent before is read, whoever had connected
RETRY_ACCEPT_S = 1.0  # after the system had nothing left for another connection


class Server(uvicorn.Server):
    """uvicorn that calls `ready` when it is: answers come, and signals reach it.

    One that is not `alone` accepts one connection at a time, so that those it shares a socket with get theirs.
    """

    config: ServerConfig

    def __init__(self, config: ServerConfig, ready: Callable[[], None], alone: bool = True) -> None:
        super().__init__(config)
        self.ready = ready
        self._at_once = config.backlog if alone else 1
        self._arriving: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # it is to listen to none itself
        for listening in sockets or []:
            listening.setblocking(False)
            self._accept_from(listening)

    async def main_loop(self) -> None:
        self.ready()
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: answers that are still to come say that their connection closes."""
        self.config.connections.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what had been sent, on connections that wait to be accepted too; then take no more and end."""
        connections = self.config.connections
        connections.drain()
        self._at_once = self.config.backlog
        await asyncio.sleep(SENT_S)
        connections.close_unsent()
        for listening in sockets or []:
            asyncio.get_running_loop().remove_reader(listening)
        await super().shutdown(sockets)

    def _accept_from(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Let in who waits: all of them, or one if others listen too."""
        loop = asyncio.get_running_loop()
        for _ in range(self._at_once):
            try:
                made = listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor, or no memory: better later than over and over
                loop.remove_reader(listening)
                loop.call_later(RETRY_ACCEPT_S, self._accept_from, listening)
                return
            made.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._new_connection, made))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _new_connection(self) -> asyncio.Protocol:
        new = self.config.http_protocol_class
        return new(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port that is taken is an OSError."""
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 to 65535, got {port}")
    # with the protocol named: without it asyncio does not switch off Nagle's algorithm, and answers take 40 ms more
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return made


def address_of(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI) -> ServerConfig:
    """uvicorn as offramp runs it; the peer is the peer, whatever headers say."""
    return ServerConfig(
        app,
        ws="none",
        loop="asyncio",  # whatever else is installed
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


@contextmanager
def signals_stay_here(server: Server) -> Iterator[None]:
    """uvicorn listens to signals while it runs and raises the one that stopped it once more at its end.

    Here one that comes before counts, and a drained server has ended well.
    """

    def stop(signum: int, frame: Any) -> None:
        server.should_exit = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
