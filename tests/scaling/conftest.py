"""Folders of digits, workers in this process instead of on Ray, and S3 on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.digit_files import write_digits
from offramp.scaling import evaluation, offline
from offramp.scaling.cluster import Found, Task


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 images, two of which cannot be read."""
    root = write_digits(tmp_path_factory.mktemp("scaling") / "digits", 248)
    (root / "000" / "broken.png").write_bytes(b"no image")
    (root / "001" / "empty.jpg").write_bytes(b"")
    return root


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workers are called here, one task after another; the numbers of the tasks that were done."""
    done: list[int] = []

    @contextmanager
    def cluster(address: str, shape: Any) -> Iterator[int]:
        yield 2

    def spread(
        make: Callable[..., Any], made_with: Any, tasks: list[Task], workers: int, shape: Any
    ) -> Iterator[Found]:
        worker = make(*made_with)
        for task in reversed(tasks):  # Ray promises no order
            done.append(task.number)
            yield Found(task.number, worker(task.number, task.data))

    for room in (offline, evaluation):
        monkeypatch.setattr(room, "ray_cluster", cluster)
        monkeypatch.setattr(room, "spread", spread)
    return done


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of an S3 on loopback with the bucket `photos`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, server)
        urllib.request.urlopen(urllib.request.Request(f"{address}/photos", method="PUT"), timeout=10).close()
        yield address
    finally:
        server.kill()
        server.wait(10)


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, "moto_server ended"
            time.sleep(0.1)
    raise AssertionError("moto_server does not answer")


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That S3, as the environment of a user names it; an empty folder in its bucket."""
    from offramp.scaling import places

    settings = {
        "ENDPOINT_URL": s3_address,
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    places._s3.cache_clear()
    return f"s3://photos/{os.urandom(4).hex()}"
