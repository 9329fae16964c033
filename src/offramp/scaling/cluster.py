"""Calls spread over workers that live on Ray.

Ray Data feeds a pool of actors, each of which is made once and then called for one task after another. A worker that
dies is started again and so is the task it was at; a task that ends its worker again and again stops the whole.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from offramp.common.console import only_ours
from offramp.common.ray_connection import LOCAL, RayFailed, last_line, ray_connection
from offramp.common.registry import load_plugin, loaded
from offramp.common.signals import SIGNALS, Stopped

log = logging.getLogger("offramp")

TRIES = 5  # of a task whose worker dies
STORE_BYTES = 512 * 1024**2  # of the object store of a Ray that is started here: keys and the bundle, never images


@dataclass(frozen=True)
class WorkerShape:
    """What one worker takes of a machine, and how many there are: None is as many as fit."""

    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be 1 or more, got {self.workers}")
        if self.cpus <= 0 or self.gpus < 0:
            raise ValueError(f"a worker needs some CPUs and no less than 0 GPUs, got {self.cpus:g} and {self.gpus:g}")

    @property
    def threads(self) -> int:
        return max(1, round(self.cpus))


class Task(NamedTuple):
    """One call of a worker."""

    number: int
    data: bytes


class Found(NamedTuple):
    """What a call gave."""

    number: int
    data: bytes


@contextmanager
def ray_cluster(address: str = LOCAL, shape: WorkerShape | None = None) -> Iterator[int]:
    """Join the cluster at `address`, or start Ray here and end it afterwards; how many workers there can be."""
    import ray

    shape, joined = shape or WorkerShape(), ExitStack()
    cpus = (shape.workers or 1) * shape.cpus
    with only_ours():
        joined.enter_context(ray_connection(address, cpus, object_store_memory=STORE_BYTES))
        nodes, room = ray.nodes(), _room(ray.cluster_resources(), shape)
    _say_if_nobody_has(shape, nodes)
    with only_ours(), joined, _raised_signals():  # the signals last: Ray sets handlers of its own
        yield shape.workers or room


def _say_if_nobody_has(shape: WorkerShape, nodes: Sequence[dict[str, Any]]) -> None:
    """Ray would wait, in silence, for a machine that is large enough; one may come, if the cluster grows by itself."""
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(m.get("CPU", 0) >= shape.cpus and m.get("GPU", 0) >= shape.gpus for m in machines):
        there = ", ".join(f"{m.get('CPU', 0):g} CPUs and {m.get('GPU', 0):g} GPUs" for m in machines)
        log.warning(
            "no machine of the cluster has the %g CPUs and %g GPUs of a worker (there: %s); waiting for one that has",
            shape.cpus,
            shape.gpus,
            there,
        )


def _room(resources: dict[str, float], shape: WorkerShape) -> int:
    """How many workers fit into a cluster as it is now."""
    by_gpus = resources.get("GPU", 0.0) / shape.gpus if shape.gpus else float("inf")
    return max(1, int(min(resources.get("CPU", 1.0) / shape.cpus, by_gpus)))


@contextmanager
def _raised_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the work at once; what is finished is on disk already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise Stopped(signum, "stopped; what is finished is kept, and the same command goes on")

    before = {signum: signal.signal(signum, stop) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def spread(
    make: Callable[..., Callable[[int, bytes], bytes]],
    made_with: Sequence[Any],
    tasks: Sequence[Task],
    workers: int,
    shape: WorkerShape,
) -> Iterator[Found]:
    """Have workers `make(*made_with)` called for every task; results come in the order in which they are ready."""
    import ray
    import ray.data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}  # no other machine takes it along
    starts = ray.remote(**options)(_Starts).remote()
    given = ray.put((make, tuple(made_with), [_movable(plugin) for plugin in loaded]))
    rows = [{"number": task.number, "data": task.data} for task in tasks]
    calls = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        _Actor,
        fn_constructor_args=(given, starts),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows)), max_tasks_in_flight_per_actor=2),
        num_cpus=shape.cpus,
        num_gpus=shape.gpus or None,
    )
    try:
        for row in calls.iter_rows():
            if row["problem"]:
                raise RayFailed(row["problem"])
            yield Found(int(row["number"]), bytes(row["data"]))
    except ray.exceptions.RayError as error:
        raise RayFailed(f"Ray gave up: {last_line(error)}; what is finished is kept") from error


def _movable(plugin: str) -> str:
    return os.path.abspath(plugin) if plugin.endswith(".py") else plugin


class _Starts:
    """Counts how often each task was begun: one that ends its worker would be begun for ever."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def note(self, number: int) -> int:
        self.counts[number] = self.counts.get(number, 0) + 1
        return self.counts[number]


class _Actor:
    """A worker as Ray Data calls it: one task in, one result or the reason why there is none."""

    def __init__(self, given: Any, starts: Any) -> None:
        import ray

        self.starts, self.problem, self.call = starts, "", None
        make, made_with, plugins = ray.get(given)
        try:
            for plugin in plugins:
                load_plugin(plugin)
            self.call = make(*made_with)
        except Exception as error:  # said with the first task: Ray would make others in its place
            self.problem = f"a worker could not be made: {_sentence(error)}"

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        import ray

        number, found = int(batch["number"][0]), b""
        problem = self.problem
        if self.call is not None:
            if ray.get(self.starts.note.remote(number)) > TRIES:
                problem = f"task {number} ended its worker {TRIES} times: too little memory, or an image that is fatal"
            else:
                found, problem = self._called(number, bytes(batch["data"][0]))
        return {"number": [number], "data": [found], "problem": [problem]}

    def _called(self, number: int, data: bytes) -> tuple[bytes, str]:
        assert self.call is not None
        try:
            return self.call(number, data), ""
        except MemoryError:
            return b"", f"{socket.gethostname()} ran out of memory; give each worker more CPUs, so that there are fewer"
        except (ValueError, OSError) as error:
            return b"", _sentence(error)
        except Exception:  # ours: with all that helps to find it
            return b"", traceback.format_exc()


def _sentence(error: BaseException) -> str:
    return str(error) or type(error).__name__


def now() -> float:
    """The clock that workers and the driver share, as far as their machines agree."""
    return time.time()
