"""Running a server: loopback unless told otherwise, in this process or in several, to its orderly end."""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from offramp.common.console import console, say
from offramp.common.cores import usable_cores
from offramp.running.bundle import load_bundle
from offramp.running.engines.protocol import warm
from offramp.serve.app import create_app
from offramp.serve.config import ServeConfig
from offramp.serve.metrics import Rows
from offramp.serve.processes import Job, run_processes
from offramp.serve.server import Server, address_of, listen, server_config, signals_stay_here

BUNDLE_APP = "offramp.serve.run:bundle_app"


def serve(
    bundle_path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServeConfig | None = None,
    device: str = "auto",
    workers: int = 1,
    threads: int | None = None,
) -> None:
    """Load a bundle and answer until SIGTERM or SIGINT; then take no more and finish what is inside.

    Several `workers` are processes that share the address, the cores, the queue and what a client may use. A worker's
    stages run on so many `threads`; by default, on its share of the cores, and with one worker on all cores but one.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be 1 or more, got {threads}")
    config = (config or ServeConfig()).divided(workers)
    words = app_words(bundle_path, config, device, threads or stage_threads(workers))
    if workers == 1:
        run_app(bundle_app(**words), host, port)
    else:
        run_processes(Job(BUNDLE_APP, words), workers, host, port)


def stage_threads(workers: int) -> int:
    """A worker's share of the cores. One that has all of them leaves one to HTTP: a stage waits for its last thread."""
    return max(1, usable_cores() - 1 if workers == 1 else usable_cores() // workers)


def app_words(bundle_path: str | Path, config: ServeConfig, device: str, threads: int) -> dict[str, Any]:
    """What another process makes the same application of, as JSON can hold it."""
    return {"bundle_path": str(bundle_path), "settings": asdict(config), "device": device, "threads": threads}


def bundle_app(
    bundle_path: str,
    settings: dict[str, Any],
    device: str,
    threads: int,
    digest: str | None = None,
    rows: Rows | None = None,
) -> FastAPI:
    """The application around a bundle, in a process that runs nothing else; `threads` are for its stages.

    Where a digest is given, another bundle in the same place is refused.
    """
    bundle = load_bundle(bundle_path, device=device, threads=threads)
    if digest not in (None, bundle.digest):
        raise ValueError(f"{bundle_path} on {socket.gethostname()} is another bundle than the one to be served")
    config = ServeConfig(**settings)
    for size in (1, config.batch):  # the first requests shall not wait for this
        warm(bundle.engine, np.zeros((size, *bundle.card.input_shape), np.float32))
    return create_app(bundle, config, rows=rows)


def run_app(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Run an application of `create_app`; port 0 takes any that is free."""
    with listen(host, port) as listening:
        where = address_of(host, listening.getsockname()[1])
        server = Server(server_config(app), lambda: say(f"serving on {where} (Ctrl-C stops)"))
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would log every malformed form
        with signals_stay_here(server):
            server.run([listening])
    console.print("stopped")
