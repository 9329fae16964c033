"""`offramp bench serve`: a server on loopback, loaded until it has no time to spare, every answer checked."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from offramp.bench.load import LoadResult, load_test
from offramp.running.bundle import Bundle, load_bundle, read_golden


def bench_serve(path: str | Path, seconds: float = 30.0, clients: int = 64) -> LoadResult:
    """Load a server with the bundle's golden images, whose labels are known."""
    bundle = load_bundle(path, device="cpu")
    images = _encoded(Path(path))
    expected = [bundle.classes[label] for label in bundle(images).labels]
    with running(path, bundle) as url:
        return load_test(url, images, seconds, clients, expected)


def _encoded(path: Path) -> list[bytes]:
    found = []
    for image in read_golden(path)[0]:
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
