"""A bundle on Ray Serve: the same application in every replica, behind Ray's proxy, at one address.

Each replica holds the whole bundle and batches by stage, as a worker does; Ray starts more of them while requests wait.
What replicas count is brought together by a small actor, so `/metrics` and `/shares` tell everybody's from any of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
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

from offramp import __version__
from offramp.common.console import console, say
from offramp.common.formatting import counted
from offramp.common.pretrained import bundle_folder
from offramp.common.ray_connection import LOCAL, ray_connection
from offramp.running.bundle import load_bundle
from offramp.serve.config import ServeConfig
from offramp.serve.metrics import QUEUE, SLOTS, Row, new_row
from offramp.serve.processes import Job
from offramp.serve.run import BUNDLE_APP, app_words
from offramp.serve.server import DRAIN_S, address_of, listen

log = logging.getLogger("offramp")

NAME = "offramp"  # of the application: what is deployed under it again replaces what is there
COUNTS = "offramp"  # the namespace of the actors that count
FIRST_NODE = {"node:__internal_head__": 0.001}  # a cluster without it has no proxy either
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
    bundle = load_bundle(folder, device="cpu")
    bundle.check_golden()  # one that does not load must not take the place of one that does
    own = replace(config.divided(replicas.most), queue=config.queue)
    words = app_words(folder.resolve(), own, device, threads=replicas.threads)
    job = Job(BUNDLE_APP, {**words, "digest": bundle.digest})
    with ray_here(address, replicas.most * replicas.cpus):
        where = deploy(job, replicas, own, host, port)
        if address != LOCAL:
            say(f"serving on {where} with {replicas}; it stays until the same command replaces it")
            return
        say(f"serving on {where} with {replicas} (Ctrl-C stops)")
        _until_signalled()
        remove()
    console.print("stopped")


@contextmanager
def ray_here(address: str = LOCAL, cpus: float = 1.0) -> Iterator[None]:
    """A Ray of one's own on this machine, with CPUs for so much, which ends with this; or the cluster at an address."""
    from ray.serve.context import _disconnect

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if address == LOCAL:
        os.environ["FORWARDED_ALLOW_IPS"] = ""  # else its proxy believes what a client on this machine says of its name
    with ray_connection(address, cpus):
        try:
            yield
        finally:
            _disconnect()  # else the next cluster would be asked at this one's address


def deploy(
    job: Job, replicas: Replicas, config: ServeConfig, host: str = "127.0.0.1", port: int = 8000, name: str = NAME
) -> str:
    """Put the application on the cluster that this process has joined, or replace the one of this name; its address."""
    from ray import serve

    _say_if_too_small(replicas, name)
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
        max_surge_percent=100,  # a new replica answers before the old one it replaces takes no more
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
    )
    made: Any = serve.deployment(serve.ingress()(Replica))
    try:
        serve.run(made.options(**options, **scaling).bind(asdict(job), name), name=name, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the bundle cannot be served on Ray: {_reason(name) or error}") from error
    return where


def _say_if_too_small(replicas: Replicas, name: str) -> None:
    """Ray would wait, in silence, until the cluster has room; it may grow by itself, or something else may end."""
    import ray
    from ray import serve

    there, needs = ray.cluster_resources(), f"{replicas.cpus:g} CPUs and {replicas.gpus:g} GPUs"
    if not _has_room(there, replicas, replicas.least):
        there_in_words = f"{there.get('CPU', 0.0):g} CPUs and {there.get('GPU', 0.0):g} GPUs"
        wanted = counted(replicas.least, "replica")
        log.warning("the cluster has %s, too few for %s of %s each; waiting for more", there_in_words, wanted, needs)
    elif name in serve.status().applications and not _has_room(ray.available_resources(), replicas, 1):
        log.warning("the cluster has no %s free for a new replica beside those that serve; waiting for them", needs)


def _has_room(resources: dict[str, float], replicas: Replicas, count: int) -> bool:
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return cpus >= count * replicas.cpus and gpus >= count * replicas.gpus


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
    """Take the application off the cluster, and its counts; what its replicas have inside is answered first."""
    import ray
    from ray import serve

    serve.delete(name)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == COUNTS and actor["name"].startswith(f"{name}-counts-"):  # of older versions too
            ray.kill(ray.get_actor(**actor))


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
        self.rows = RayRows(self.name)
        made = self.job.app(self.rows)
        self.stages = made.state.service.worker
        return made

    async def __del__(self) -> None:
        """Ray calls this once all that was inside is answered."""
        if hasattr(self, "rows"):
            await asyncio.to_thread(self.rows.tell_last)

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

    def tell_last(self) -> None:
        """Report before this replica ends, and wait until that has arrived."""
        import ray

        with _tolerated():
            ray.get(_counts_actor(self.name).tell.remote(self.replica, self.own.tobytes()), timeout=COUNTS_S)

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
    """The actor of an application; the first who needs it starts it. Rows of another version are counted elsewhere."""
    import ray

    made = ray.remote(num_cpus=0, resources=FIRST_NODE, max_restarts=-1)(Counts)
    options: dict[str, Any] = {"name": f"{name}-counts-{__version__}-{SLOTS}", "namespace": COUNTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made.options(**options, lifetime="detached", get_if_exists=True).remote()
