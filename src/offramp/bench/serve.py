"""`offramp bench serve`: a server on loopback, loaded until it has no time to spare, every answer checked.

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
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from offramp.running.bundle import Bundle, load_bundle, read_golden

REFUSALS = (429, 503)
BACK_OFF_S = 0.1  # far below Retry-After: the server is to stay saturated
TIMEOUT_S = 60.0
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
    if expected is not None and len(expected) != len(images):
        raise ValueError(f"there are {len(images)} images but {len(expected)} expected labels")
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname is None:
        raise ValueError(f"a load test needs a URL such as http://127.0.0.1:8000, got {url}")
    wanted: Sequence[str | None] = [None] * len(images) if expected is None else expected
    samples = [(_request(image), label) for image, label in zip(images, wanted, strict=True)]
    return asyncio.run(_load(place.hostname, place.port or 80, samples, seconds, clients))


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


def bench_serve(path: str | Path, seconds: float = 30.0, clients: int = 64, workers: int = 1) -> LoadResult:
    """Load a server with the bundle's golden images, whose labels are known."""
    bundle = load_bundle(path, device="cpu")
    images = _encoded(bundle.folder)
    expected = [bundle.classes[label] for label in bundle(images).labels]
    with running(path, bundle, "--workers", str(workers)) as url:
        return load_test(url, images, seconds, clients, expected)


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
    """A server in a process of its own, at any free port; overload must not shorten answers that are checked."""
    words = ["serve", str(path), "--port", "0", "--device", "cpu", "--overload-exit", str(len(bundle.costs)), *options]
    with subprocess.Popen([sys.executable, "-m", "offramp", *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise ValueError("the server did not start")
            yield found[0]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    if server.returncode:
        raise ValueError(f"the server ended with exit code {server.returncode}")
