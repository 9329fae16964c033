"""`offramp bench predict --ray`: workers on Ray against plain processes on the same cores, in one run.

Plain is `running.predict` over all images of a process at once; on Ray it is what `offramp predict --ray` does, parts
written. Each is pinned to as many cores as there are workers. The rate of a worker counts from the end of its first
part to the end of its last: the steady state; what comes before is the start-up, which has a column of its own. The
parts of a plan for more machines are measured beside them: bytes and milliseconds for each image.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from offramp.common.console import say
from offramp.common.formatting import Table
from offramp.common.ray_connection import LOCAL
from offramp.running.bundle import load_bundle, read_golden
from offramp.running.predict import predict
from offramp.scaling.cluster import Task, WorkerShape, now, ray_cluster, spread
from offramp.scaling.offline import SMALLEST_PART, Asked, Job, PackedBundle, PartWriter, limit_threads, planned
from offramp.scaling.parts import PartCount, claim, part_name
from offramp.scaling.places import joined
from offramp.scaling.sources import FileSource, Source, open_source

WARM_UP = 256  # images
SIDE = 2  # drawn files have sides so many times those that the network takes


@dataclass(frozen=True)
class PredictRow:
    """Images/s of one worker, plain and on Ray, and what Ray takes until the first worker begins."""

    workers: int
    nodes: int
    plain: float
    on_ray: float
    start_s: float

    @property
    def ratio(self) -> float:
        return self.on_ray / self.plain

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class ImageCost:
    """What one image takes: bytes read, sent to a worker, written; milliseconds of a core for decoding, and in all."""

    read_bytes: float
    task_bytes: float
    written_bytes: float
    decode_ms: float
    predict_ms: float


def bench_predict(
    bundle: str | Path,
    workers: Sequence[int],
    images: str | None = None,
    parts: int = 4,
    nodes: int = 1,
    silent: bool = False,
) -> tuple[list[PredictRow], ImageCost]:
    """Plain processes and workers on Ray, for each number of workers; each worker has `parts` parts and one before."""
    if min(workers) < 1 or parts < 1 or nodes < 1:
        raise ValueError("--workers, --parts and --nodes must be 1 or more")
    rows = []
    with tempfile.TemporaryDirectory(prefix="offramp-bench-") as scratch:
        source = _images(bundle, images, (parts + 1) * max(workers) * SMALLEST_PART, Path(scratch))
        cost = _cost(bundle, source, Path(scratch))
        for count in workers:
            if not silent:
                say(f"{count} workers: plain, then on Ray, then plain again")
            with _pinned(count):
                before = plain_rate(bundle, source, count, parts)
                on_ray, start_s = ray_rate(bundle, source, count, parts, nodes, Path(scratch) / f"out-{count}")
                after = plain_rate(bundle, source, count, parts)
            rows.append(PredictRow(count, nodes, (before + after) / 2, on_ray, start_s))
    return rows, cost


def _images(bundle: str | Path, given: str | None, count: int, scratch: Path) -> FileSource:
    """The folder given, or names for the bundle's own golden images as JPEG files; as many as are needed."""
    if given is None:
        golden, _ = read_golden(load_bundle(bundle, device="cpu", threads=1).folder)
        originals = [scratch / f"golden-{at}.jpg" for at in range(len(golden))]
        for image, path in zip(golden, originals, strict=True):
            picture = Image.fromarray(image.transpose(1, 2, 0))
            picture.resize((SIDE * picture.width, SIDE * picture.height)).save(path, quality=90)
        folder = str(scratch)
    else:
        found = open_source(given)
        if not isinstance(found, FileSource):
            raise ValueError(f"--images is a folder or a list of image files, got {given}")
        places = list(found.reader.read(found.task(0, found.size))[1])
        folder, originals = "", [Path(place) for place in places if isinstance(place, str)]
        if len(originals) < len(places):
            raise ValueError(f"--images names files of this machine; {given} has some that lie in a store")
    (scratch / "images").mkdir()
    for at in range(count):
        os.symlink(originals[at % len(originals)].absolute(), scratch / "images" / f"{at:07d}.jpg")
    return FileSource(folder or str(given), str(scratch / "images"), os.listdir(scratch / "images"))


@contextmanager
def _pinned(cores: int) -> Iterator[None]:
    """This process and what it starts, on so many cores at most."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:cores]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def plain_rate(bundle: str | Path, source: FileSource, count: int, parts: int) -> float:
    """Images/s of one of `count` processes that run at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(count), context.Queue()
    paths = [os.path.join(_base(source), key) for key in source.keys]
    shares = [paths[at * parts * SMALLEST_PART : (at + 1) * parts * SMALLEST_PART] for at in range(count)]
    started = [context.Process(target=_plain, args=(str(bundle), share, barrier, found)) for share in shares]
    for process in started:
        process.start()
    rates = [found.get(timeout=600) for _ in started]
    for process in started:
        process.join()
    return float(np.mean(rates))


def _base(source: FileSource) -> str:
    from offramp.scaling.sources import FileReader

    assert isinstance(source.reader, FileReader)
    return source.reader.base


def _plain(bundle: str, paths: list[str], barrier: Any, found: Any) -> None:
    loaded = load_bundle(bundle, device="cpu", threads=1)
    limit_threads(1)
    predict(loaded, paths[:WARM_UP], silent=True)
    barrier.wait(600)
    found.put(predict(loaded, paths, silent=True).images_per_s)


def ray_rate(bundle: str | Path, source: Source, count: int, parts: int, nodes: int, out: Path) -> tuple[float, float]:
    """Images/s of one worker in the steady state, and the seconds until the first began."""
    shape = WorkerShape(workers=count)
    packed = PackedBundle.of(bundle, "cpu", shape.threads)
    plan, _, policy = planned(packed, source, Asked(part_images=SMALLEST_PART))
    claim(str(out), plan, {"bundle": str(bundle), "source": source.about})
    job = Job(packed, plan, policy, source.reader, str(out), Asked().batch)
    tasks = [Task(part, source.task(*plan.bounds(part))) for part in range((parts + 1) * count)]
    began = now()
    with _nodes(nodes, count) as address, ray_cluster(address, shape) as workers:
        counts = [PartCount.from_json(found.data) for found in spread(PartWriter, (job,), tasks, workers, shape)]
    return steady_rate(counts), min(own.ended - own.seconds for own in counts) - began


def steady_rate(counts: Sequence[PartCount]) -> float:
    """The mean over workers of their images/s from the end of their first part to the end of their last."""
    rates = []
    for worker in {count.worker for count in counts}:
        own = sorted((count for count in counts if count.worker == worker), key=lambda count: count.ended)
        if len(own) > 1:
            rates.append(sum(count.images for count in own[1:]) / (own[-1].ended - own[0].ended))
    return float(np.mean(rates)) if rates else 0.0


@contextmanager
def _nodes(nodes: int, cpus: int) -> Iterator[str]:
    """The address of a cluster of several nodes on this machine, which share the cores; one needs no cluster."""
    if nodes == 1:
        yield LOCAL
        return
    from ray.cluster_utils import Cluster

    from offramp.common.console import only_ours

    with only_ours():
        each = -(-cpus // nodes)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": each, "include_dashboard": False})
        try:
            for _ in range(nodes - 1):
                cluster.add_node(num_cpus=each)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


def _cost(bundle: str | Path, source: FileSource, scratch: Path) -> ImageCost:
    """What an image takes, by one part of them in this process."""
    keys = source.keys[:SMALLEST_PART]
    paths = [os.path.join(_base(source), key) for key in keys]
    encoded = [Path(path).read_bytes() for path in paths]
    packed = PackedBundle.of(bundle, "cpu", 1)
    plan, _, policy = planned(packed, source, Asked(part_images=SMALLEST_PART))
    out = str(scratch / "cost")
    claim(out, plan, {})
    writer = PartWriter(Job(packed, plan, policy, source.reader, out, Asked().batch))
    own = writer.bundle.card.preprocessing
    predict(writer.bundle, paths[:WARM_UP], silent=True)
    task, began = source.task(0, len(keys)), time.process_time()
    for data in encoded:
        own.read(data)
    decoded = time.process_time()
    writer(0, task)
    ended, written = time.process_time(), os.path.getsize(joined(out, part_name(0)))
    parts = (sum(map(len, encoded)), len(task), written, 1e3 * (decoded - began), 1e3 * (ended - decoded))
    return ImageCost(*(value / len(keys) for value in parts))


def predict_table(bundle: str | Path, rows: Sequence[PredictRow]) -> Table:
    """Title, columns and rows for people."""
    cells = [
        [str(r.workers), str(r.nodes), f"{r.plain:,.0f}", f"{r.on_ray:,.0f}", f"{r.ratio:.2f}", f"{r.start_s:.1f}"]
        for r in rows
    ]
    columns = ["workers", "nodes", "plain images/s", "Ray images/s", "Ray / plain", "start-up s"]
    return f"{bundle}: images/s of each worker", columns, cells


def cost_line(cost: ImageCost) -> str:
    """What an image takes, in words."""
    return (
        f"each image: {cost.read_bytes:,.0f} bytes read, {cost.task_bytes:.1f} sent to its worker, "
        f"{cost.written_bytes:.1f} written; {cost.decode_ms:.2f} ms of a core to decode, {cost.predict_ms:.2f} in all"
    )
