"""Running a server: one process, loopback unless told otherwise, and an end that finishes what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from offramp.common.console import console
from offramp.running.bundle import load_bundle
from offramp.running.engines.protocol import warm
from offramp.serve.app import create_app
from offramp.serve.config import ServeConfig
from offramp.serve.connections import BACKLOG, ServerConfig

DRAIN_S = 30  # for requests inside once the server was told to stop
SENT_S = 0.25  # until all that was sent before is read, whoever had connected


def serve(
    bundle_path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServeConfig | None = None,
    device: str = "auto",
) -> None:
    """Load a bundle and answer until SIGTERM or SIGINT; then take no more and finish what is inside."""
    bundle = load_bundle(bundle_path, device=device, own_process=True)
    config = config or ServeConfig()
    for size in (1, config.batch):  # the first requests shall not wait for this
        warm(bundle.engine, np.zeros((size, *bundle.card.input_shape), np.float32))
    run_app(create_app(bundle, config), host, port)


def run_app(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Run an application of `create_app`; port 0 takes any that is free."""
    with listen(host, port) as listening:
        number = listening.getsockname()[1]
        place = f"[{host}]" if ":" in host else host
        server = Server(server_config(app), f"serving on http://{place}:{number} (Ctrl-C stops)")
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would log every malformed form
        with _signals_stay_here(server):
            server.run([listening])
    console.print("stopped")


class Server(uvicorn.Server):
    """uvicorn that says that it is `ready` when it is: answers come, and signals reach it."""

    config: ServerConfig

    def __init__(self, config: ServerConfig, ready: str) -> None:
        super().__init__(config)
        self.ready = ready

    async def main_loop(self) -> None:
        console.print(self.ready, highlight=False, soft_wrap=True)
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: answers that are still to come say that their connection closes."""
        self.config.connections.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what had been sent, on connections that wait to be accepted too; then take no more and end."""
        connections = self.config.connections
        connections.drain()
        await asyncio.sleep(SENT_S)
        connections.close_unsent()
        await super().shutdown(sockets)


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


def server_config(app: FastAPI) -> ServerConfig:
    """uvicorn as offramp runs it; the peer is the peer, whatever headers say."""
    return ServerConfig(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


@contextmanager
def _signals_stay_here(server: Server) -> Iterator[None]:
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
