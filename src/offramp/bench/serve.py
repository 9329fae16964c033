"""`offramp bench serve`: servers on loopback, loaded until they have no time to spare, every answer checked:
one worker, several, and replicas on Ray.

`load_test` does so to any running server: clients that send images as fast as it takes them. Each client has a
connection and sends one request at a time. A refused request (503, 429) is counted and tried again a little later;
whatever else is not a right answer is a fault. Requests are made beforehand and sent over plain streams: on two
cores, a general HTTP client would need more time for a request than the server does.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from offramp.common.extras import explained
from offramp.common.formatting import Table, counted
from offramp.running.bundle import Bundle, load_bundle, read_golden

REFUSALS = (429, 503)
BACK_OFF_S = 0.1  # far below Retry-After: the server is to stay saturated
TIMEOUT_S = 60.0
LATE_S = 2.0  # for what other processes counted to be told
WARM_S = 2.0  # of load before anything is measured
SETTLE_S = 1.0  # between two load tests
BOUNDARY = "offramp-load-test"
Sample = tuple[bytes, str | None]  # a request, and the label it should get


@dataclass(frozen=True)
class LoadResult:
    """What a load test saw; `server_images` is how many images the server itself says it answered meanwhile."""

    seconds: float
    clients: int
    accepted: int
    refused: int
    failed: int
    wrong: int
    limited: int  # answered under overload mode, whose labels may rightly differ
    server_images: int
    images_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @property
    def passed(self) -> bool:
        """Whether every accepted request was answered, once, and correctly."""
        return self.accepted > 0 and not self.failed and not self.wrong and self.server_images == self.accepted

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass
class _Tally:
    """What all clients have seen so far."""

    seconds: list[float] = field(default_factory=list)  # of each accepted request
    refused: int = 0
    failed: int = 0
    wrong: int = 0
    limited: int = 0

    def check(self, answer: dict[str, Any], expected: str | None) -> None:
        """Count an answer that is not the one expected."""
        labels = [found["label"] for found in answer["predictions"]]
        self.limited += answer["limited"]
        if len(labels) != 1 or not (answer["limited"] or expected in (None, labels[0])):
            self.wrong += 1

    def result(self, took: float, clients: int, server_images: int) -> LoadResult:
        """The figures of a test that took so many seconds."""
        p50, p95, p99 = (1e3 * np.percentile(self.seconds or [0.0], (50, 95, 99))).tolist()
        accepted = len(self.seconds)
        counts = (accepted, self.refused, self.failed, self.wrong, self.limited, server_images)
        return LoadResult(took, clients, *counts, accepted / took, p50, p95, p99)


def load_test(
    url: str,
    images: Sequence[bytes],
    seconds: float = 30.0,
    clients: int = 64,
    expected: Sequence[str] | None = None,
) -> LoadResult:
    """Load the server at `url` with encoded images, whose labels are `expected`; it should have no other users."""
    if not images or clients < 1:
        raise ValueError("a load test needs at least one image and one client")
    _refuse_no_time(seconds)
    if expected is not None and len(expected) != len(images):
        raise ValueError(f"there are {len(images)} images but {len(expected)} expected labels")
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname is None:
        raise ValueError(f"a load test needs a URL such as http://127.0.0.1:8000, got {url}")
    wanted: Sequence[str | None] = [None] * len(images) if expected is None else expected
    samples = [(_request(image), label) for image, label in zip(images, wanted, strict=True)]
    return asyncio.run(_load(place.hostname, place.port or 80, samples, seconds, clients))


def _refuse_no_time(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be a number above 0, got {seconds:g}")


def _request(image: bytes) -> bytes:
    """The bytes of a whole request with one image."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="image"\r\n\r\n'
    body = part.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"POST /predict HTTP/1.1\r\nHost: load-test\r\n" + head.encode() + body


class _Connection:
    """A connection that is kept, and made anew when it was lost."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        async with asyncio.timeout(TIMEOUT_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection(self.host, self.port)
            reader, writer = self._streams
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            return int(head.split()[1]), await reader.readexactly(int(length.group(1)) if length else 0)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _load(host: str, port: int, samples: list[Sample], seconds: float, clients: int) -> LoadResult:
    tally, watcher = _Tally(), _Connection(host, port)
    before = await _server_images(watcher)
    await watcher.close()
    began = time.perf_counter()
    turns = [samples[c % len(samples) :] + samples[: c % len(samples)] for c in range(clients)]
    await asyncio.gather(*(_client(_Connection(host, port), turn, began + seconds, tally) for turn in turns))
    took = time.perf_counter() - began
    counted = await _server_images(watcher) - before
    while counted < len(tally.seconds) and time.perf_counter() - began - took < LATE_S:
        await asyncio.sleep(0.2)  # replicas on Ray tell each other only now and then
        counted = await _server_images(watcher) - before
    await watcher.close()
    return tally.result(took, clients, counted)


async def _client(server: _Connection, samples: Sequence[Sample], until: float, tally: _Tally) -> None:
    """One client: one request at a time, round and round, until the time is up."""
    for request, expected in itertools.cycle(samples):
        while time.perf_counter() < until and not await _send(server, request, expected, tally):
            await asyncio.sleep(BACK_OFF_S)
        if time.perf_counter() >= until:
            break
    await server.close()


async def _send(server: _Connection, request: bytes, expected: str | None, tally: _Tally) -> bool:
    """Send an image; False if it should be sent again."""
    began = time.perf_counter()
    try:
        status, body = await server.ask(request)
    except (OSError, EOFError, TimeoutError):
        tally.failed += 1
        await server.close()
        return False
    if status in REFUSALS:
        tally.refused += 1
        return False
    if status != 200:
        tally.failed += 1
        return True
    tally.seconds.append(time.perf_counter() - began)
    tally.check(json.loads(body), expected)
    return True


async def _server_images(server: _Connection) -> int:
    """How many images the server has answered since it was started."""
    _, body = await server.ask(b"GET /metrics HTTP/1.1\r\nHost: load-test\r\n\r\n")
    found = re.search(rb"^offramp_images_total (\S+)$", body, re.MULTILINE)
    if found is None:
        raise ValueError("this is no offramp server: its /metrics counts no images")
    return int(float(found.group(1)))


@dataclass(frozen=True)
class ServeRow:
    """A way of serving under load from so many connections, and the processor time it took."""

    way: str
    load: LoadResult
    server_cpu_ms: float | None  # per request, of all its processes; None where the system does not tell
    client_cpu_ms: float  # per request, of the load test itself
    cores_busy: float | None  # by both, on average
    busiest_thread: float | None  # of the server: how much of a core it took; near 1, more cores do not help

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "load": self.load.to_json()}


def ways_to_serve(workers: Sequence[int], replicas: int | None = None) -> dict[str, tuple[str, ...]]:
    """What is compared, by name: the options of `offramp serve`; on Ray where `replicas` are asked for."""
    ways: dict[str, tuple[str, ...]] = {counted(n, "worker"): ("--workers", str(n)) for n in workers}
    if replicas is not None:
        ways[f"Ray, {counted(replicas, 'replica')}"] = ("--ray", "local", "--replicas", str(replicas))
    return ways


def bench_serve(
    path: str | Path,
    seconds: float = 30.0,
    clients: Sequence[int] = (64,),
    workers: Sequence[int] = (1,),
    on_ray: bool = False,
) -> list[ServeRow]:
    """Load servers of several kinds, one after another, with the bundle's golden images, whose labels are known."""
    _refuse_no_time(seconds)  # before a server is started
    if on_ray:
        with explained():
            import ray.serve  # noqa: F401
    bundle = load_bundle(path, device="cpu")
    images = _encoded(bundle.folder)
    expected = [bundle.classes[label] for label in bundle(images).labels]
    rows = []
    for way, options in ways_to_serve(workers, max(workers) if on_ray else None).items():
        with _started(path, bundle, *options) as (url, pid):
            load_test(url, images, WARM_S, max(clients), expected)
            for count in clients:
                rows.append(_measured(way, pid, partial(load_test, url, images, seconds, count, expected)))
    return rows


def _measured(way: str, pid: int, load: Callable[[], LoadResult]) -> ServeRow:
    """A load test, and what the server's processes and this one took for it."""
    time.sleep(SETTLE_S)
    before, own = cpu_seconds(pid), time.process_time()
    found = load()
    own, after = time.process_time() - own, cpu_seconds(pid)
    if not found.accepted:
        raise ValueError(f"{way}: no request was answered in {found.seconds:.3g} s; give more --seconds")
    each = 1e3 / (found.accepted + found.refused)
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    if not spent:
        return ServeRow(way, found, None, own * each, None, None)
    busy, busiest = (sum(spent) + own) / found.seconds, max(spent) / found.seconds
    return ServeRow(way, found, sum(spent) * each, own * each, busy, busiest)


def serve_table(name: str, rows: Sequence[ServeRow]) -> Table:
    """The ways of serving beside each other; processor time also against that of the first at as many connections."""
    first = {row.load.clients: row.server_cpu_ms for row in reversed(rows)}
    columns = ["way", "connections", "requests", "images/s", "p50 ms", "p95 ms", "p99 ms", "refused", "wrong or failed"]
    columns += ["server CPU ms", "times the first", "client CPU ms", "cores busy", "busiest thread"]
    return f"{name}: each way on {os.cpu_count()} cores with its clients", columns, [_cells(row, first) for row in rows]


def _cells(row: ServeRow, first: dict[int, float | None]) -> list[str]:
    load, base = row.load, first[row.load.clients]
    counts = [row.way, str(load.clients), f"{load.accepted:,}", f"{load.images_per_s:,.0f}"]
    times = [f"{ms:,.1f}" for ms in (load.p50_ms, load.p95_ms, load.p99_ms)]
    faults = [f"{load.refused:,}", str(load.wrong + load.failed)]
    if row.server_cpu_ms is None or not base:
        return [*counts, *times, *faults, "?", "?", f"{row.client_cpu_ms:.2f}", "?", "?"]
    spent = [f"{row.server_cpu_ms:.2f}", f"{row.server_cpu_ms / base:.2f}", f"{row.client_cpu_ms:.2f}"]
    return [*counts, *times, *faults, *spent, f"{row.cores_busy:.2f}", f"{row.busiest_thread:.2f}"]


def cpu_seconds(pid: int) -> dict[int, float]:
    """Processor time that each thread of a process and of its living descendants has used; by thread.

    It is empty where the system does not tell.
    """
    known = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            known[int(folder.name)] = int(_stat(folder)[1])
    used: dict[int, float] = {}
    left = [pid]
    while left:
        one = left.pop()
        left += [child for child, parent in known.items() if parent == one]
        for thread in Path(f"/proc/{one}/task").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                words = _stat(thread)
                used[int(thread.name)] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _stat(folder: Path) -> list[str]:
    """What Linux says of a process or thread, from its state on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _encoded(folder: Path) -> list[bytes]:
    """The golden images as PNG files."""
    found = []
    for image in read_golden(folder)[0]:
        data = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(data, "PNG")
        found.append(data.getvalue())
    return found


@contextmanager
def running(path: str | Path, bundle: Bundle, *options: str) -> Iterator[str]:
    """A server in a process of its own, at any free port."""
    with _started(path, bundle, *options) as (url, _):
        yield url


@contextmanager
def _started(path: str | Path, bundle: Bundle, *options: str) -> Iterator[tuple[str, int]]:
    """The address of a server and its process; overload must not shorten answers that are checked."""
    words = ["serve", str(path), "--port", "0", "--device", "cpu", "--overload-exit", str(len(bundle.costs)), *options]
    with subprocess.Popen([sys.executable, "-m", "offramp", *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise ValueError("the server did not start")
            yield found[0], server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    if server.returncode:
        raise ValueError(f"the server ended with exit code {server.returncode}")
