"""A bundle on Ray Serve: the same application in every replica, behind Ray's proxy, at one address.

Each replica holds the whole bundle and batches by stage, as a worker does; Ray starts more of them while requests wait.
What replicas count is brought together by a small actor, so `/metrics` and `/shares` tell everybody's from any of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from offramp.common.console import console, say
from offramp.common.formatting import counted
from offramp.common.pretrained import bundle_folder
from offramp.common.ray_connection import LOCAL, ray_connection
from offramp.running.bundle import load_bundle
from offramp.running.engines.onnx_engine import cores
from offramp.serve.config import ServeConfig
from offramp.serve.metrics import QUEUE, SLOTS, Row, new_row
from offramp.serve.processes import Job
from offramp.serve.run import BUNDLE_APP, app_words
from offramp.serve.server import DRAIN_S, address_of, listen

log = logging.getLogger("offramp")

NAME = "offramp"  # of the application: what is deployed under it again replaces what is there
TELL_S = 0.5  # between two reports of a replica
SILENT_S = 10.0  # after which what a replica had inside is gone with it
FORGET_S = 3600.0  # after which its counts are kept only in the sum
COUNTS_S = 5.0  # for the counts of others to come


@dataclass(frozen=True)
class Replicas:
    """How many replicas there are at least and at most, and what each takes of a machine."""

    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0:
            raise ValueError(f"a replica needs some CPUs and no less than 0 GPUs, got {self.cpus:g} and {self.gpus:g}")

    @property
    def threads(self) -> int:
        return max(1, round(self.cpus))

    def __str__(self) -> str:
        return (
            f"{self.least} to {counted(self.most, 'replica')}"
            if self.least < self.most
            else counted(self.most, "replica")
        )

    @classmethod
    def parse(cls, text: str, cpus: float = 1.0, gpus: float = 0.0) -> Replicas:
        """`2`, or `1:8` for as many as those who wait need."""
        least, _, most = text.partition(":")
        try:
            numbers = int(least), int(most or least)
        except ValueError:
            raise ValueError(f"--replicas is a number, or a range such as 1:8, got {text!r}") from None
        found = cls(*numbers, cpus, gpus)
        if not 1 <= found.least <= found.most:
            raise ValueError(f"--replicas needs 1 or more, the least first, got {text!r}")
        return found


def serve_on_ray(
    bundle_path: str | Path,
    address: str = LOCAL,
    replicas: Replicas | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServeConfig | None = None,
    device: str = "auto",
) -> None:
    """Serve a bundle by replicas on Ray.

    Without an address Ray is started here and ends with this process, at SIGTERM or SIGINT. On a cluster the
    application stays when this returns; calling it again, with another bundle perhaps, replaces it without losing a
    request.
    """
    replicas, config = replicas or Replicas(), config or ServeConfig()
    folder = bundle_folder(bundle_path)
    load_bundle(folder, device="cpu").check_golden()  # one that does not load must not take the place of one that does
    own = replace(config.divided(replicas.most), queue=config.queue)
    job = Job(BUNDLE_APP, app_words(folder.resolve(), own, device, threads=replicas.threads))
    cores_needed = math.ceil(replicas.most * replicas.cpus)
    with ray_here(address, num_cpus=max(cores(), cores_needed)):
        where = deploy(job, replicas, own, host, port)
        if address != LOCAL:
            say(f"serving on {where} with {replicas}; it stays until the same command replaces it")
            return
        say(f"serving on {where} with {replicas} (Ctrl-C stops)")
        _until_signalled()
        remove()
    console.print("stopped")


@contextmanager
def ray_here(address: str = LOCAL, **started_with: Any) -> Iterator[None]:
    """A Ray of one's own on this machine, which ends with this; or the cluster at an address."""
    from ray.serve.context import _disconnect

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_connection(address, **started_with):
        try:
            yield
        finally:
            _disconnect()  # else the next cluster would be asked at this one's address


def deploy(
    job: Job, replicas: Replicas, config: ServeConfig, host: str = "127.0.0.1", port: int = 8000, name: str = NAME
) -> str:
    """Put the application on the cluster that this process has joined, or replace the one of this name; its address."""
    from ray import serve

    _say_if_too_small(replicas)
    where = _start_proxy(host, port)
    _counts_actor(name)
    scaling: dict[str, Any] = {"num_replicas": replicas.most}
    if replicas.least < replicas.most:
        scaling = {"autoscaling_config": autoscaling(replicas, config)}
    options: dict[str, Any] = dict(
        name="bundle",
        max_ongoing_requests=config.queue + 16,  # a replica that is full says so itself
        max_queued_requests=config.queue,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
    )
    made: Any = serve.deployment(serve.ingress()(Replica))
    try:
        serve.run(made.options(**options, **scaling).bind(asdict(job), name), name=name, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the bundle cannot be served on Ray: {_reason(name) or error}") from error
    return where


def _say_if_too_small(replicas: Replicas) -> None:
    """Ray would wait, in silence, until the cluster has room for the least replicas; it may grow by itself."""
    import ray

    there = ray.cluster_resources()
    cpus, gpus = there.get("CPU", 0.0), there.get("GPU", 0.0)
    if cpus < replicas.least * replicas.cpus or gpus < replicas.least * replicas.gpus:
        log.warning(
            "the cluster has %g CPUs and %g GPUs, too few for %s of %g and %g each; waiting for more",
            cpus,
            gpus,
            counted(replicas.least, "replica"),
            replicas.cpus,
            replicas.gpus,
        )


def _reason(name: str) -> str:
    """The last line of what a replica that does not start had to say."""
    from ray import serve

    known = serve.status().applications.get(name)
    said = [one.message for one in known.deployments.values()] if known else []
    lines = [line for text in said for line in text.strip().splitlines()]
    return lines[-1].strip() if lines else ""


def autoscaling(replicas: Replicas, config: ServeConfig) -> dict[str, Any]:
    """Another replica while more than an eighth of the queue is taken: well before any is overloaded."""
    return {
        "min_replicas": replicas.least,
        "max_replicas": replicas.most,
        "target_ongoing_requests": max(1, config.queue // 8),
        "upscale_delay_s": 5,
        "downscale_delay_s": 120,
    }


def remove(name: str = NAME) -> None:
    """Take the application off the cluster; what its replicas have inside is answered first."""
    from ray import serve

    serve.delete(name)


def _start_proxy(host: str, port: int) -> str:
    """Start Ray's proxy on the first node, unless one runs; the address at which it answers."""
    from ray import serve
    from ray.serve.context import _get_global_client

    if _get_global_client(raise_if_no_controller_running=False) is None:
        with listen(host, port) as probe:  # a port that is taken is a sentence, and 0 is one that is free
            port = probe.getsockname()[1]
        serve.start(
            http_options={"host": host, "port": port},
            proxy_location="HeadOnly",
            logging_config={"enable_access_log": False},
        )
    known: Any = _get_global_client()
    return address_of(known.http_config.host, known.http_config.port)


def _until_signalled() -> None:
    caught = threading.Event()
    before = {s: signal.signal(s, lambda *_: caught.set()) for s in (signal.SIGINT, signal.SIGTERM)}
    while not caught.wait(0.5):
        pass
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Replica:
    """What a replica of the deployment is: the application, and whether its stages still run."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.job, self.name = Job(**job), name

    def __serve_build_asgi_app__(self) -> FastAPI:
        made = self.job.app(RayRows(self.name))
        self.stages = made.state.service.worker
        return made

    def check_health(self) -> None:
        if not self.stages.alive:
            raise RuntimeError("the stages of this replica no longer run")


class RayRows:
    """This replica's row, and those of the others as they last told the actor."""

    def __init__(self, name: str) -> None:
        import ray

        self.own: Row = new_row(SLOTS)
        self.name, self.replica = name, ray.get_runtime_context().get_actor_id()
        self._others: list[np.ndarray] = []
        threading.Thread(target=self._tell, name="offramp-counts", daemon=True).start()

    def _tell(self) -> None:
        """Report now and then, where something has changed or others may think this replica gone."""
        said, at = b"", 0.0
        while True:
            time.sleep(TELL_S)
            row, now = self.own.tobytes(), time.monotonic()
            if row == said and now - at < SILENT_S / 2:
                continue
            with _tolerated():
                _counts_actor(self.name).tell.remote(self.replica, row)
                said, at = row, now

    async def all(self) -> Sequence[Row | np.ndarray]:
        """Everybody's; if the actor does not answer, the others' as they were when it last did."""
        with _tolerated():
            self._others = await asyncio.to_thread(self._ask)
        return [self.own, *self._others]

    def _ask(self) -> list[np.ndarray]:
        import ray

        told = ray.get(_counts_actor(self.name).others.remote(self.replica), timeout=COUNTS_S)
        return [np.frombuffer(row) for row in told]


@contextmanager
def _tolerated() -> Iterator[None]:
    """Counting goes on without the actor: it is started again by Ray, or when it is next needed."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, TimeoutError, ValueError) as error:
        logging.getLogger("offramp").info("counts of other replicas are late: %s", error)


class Counts:
    """The actor: the last row of each replica. Those that are gone are counted on, with nothing inside."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[np.ndarray, float]] = {}
        self.gone = np.zeros(SLOTS)

    def tell(self, replica: str, row: bytes) -> None:
        self.rows[replica] = np.frombuffer(row).copy(), time.monotonic()

    def others(self, replica: str) -> list[bytes]:
        now = time.monotonic()
        for name, (row, at) in list(self.rows.items()):
            if now - at > SILENT_S:
                row[QUEUE:] = 0.0
            if now - at > FORGET_S:
                self.gone += row
                del self.rows[name]
        return [self.gone.tobytes(), *(row.tobytes() for name, (row, _) in self.rows.items() if name != replica)]


def _counts_actor(name: str) -> Any:
    """The actor of an application; the first who needs it starts it, on its own node."""
    import ray

    made = ray.remote(num_cpus=0, max_restarts=-1)(Counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made.options(
            name=f"{name}-counts", namespace="offramp", lifetime="detached", get_if_exists=True
        ).remote()
