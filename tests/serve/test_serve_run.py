"""Running a server to its end: ports, signals, its schema, and a load test of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from helpers.server import CLASSES, FakeEngine, Start, labels, make_bundle, picture, until
from offramp.bench.serve import load_test
from offramp.serve import ServeConfig, create_app
from offramp.serve.run import run_app
from offramp.serve.server import Server, listen


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with listen("127.0.0.1", 0) as first:
        assert first.proto == socket.IPPROTO_TCP  # or every answer would take 40 ms more
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}"):
            listen("127.0.0.1", port)
    for impossible in (-1, 65536):
        with pytest.raises(ValueError, match="a port is a number from 0 to 65535"):
            listen("127.0.0.1", impossible)


def test_the_schema_is_there_and_nothing_that_loads_from_elsewhere(start: Start) -> None:
    http = start().http
    schema = http.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/predict", "/shares", "/metrics", "/healthz"}
    body = schema["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "application/json"}
    assert http.get("/docs").status_code == http.get("/redoc").status_code == 404
    page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]


def test_a_load_test_counts_and_checks(start: Start) -> None:
    server = start(delay_s=0.002, queue=24, overload_exit=3)
    images = [picture(label, 1 + label % 3) for label in range(10)]
    found = load_test(server.url, images, seconds=1.0, clients=8, expected=CLASSES)
    assert found.passed and found.accepted > 20 and not found.refused
    assert 0 < found.p50_ms <= found.p95_ms <= found.p99_ms
    assert not load_test(server.url, images, seconds=0.2, clients=1, expected=CLASSES[::-1]).passed
    crowded = start(delay_s=0.05, queue=4, overload_exit=3)
    found = load_test(crowded.url, images, seconds=1.0, clients=16, expected=CLASSES)
    assert found.passed and found.refused > 0


DRAINING = """
from offramp.serve import ServeConfig, create_app
from offramp.serve.run import run_app
from helpers.server import FakeEngine, make_bundle
run_app(create_app(make_bundle(FakeEngine(0.4)), ServeConfig()), port=0)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", DRAINING], stdout=subprocess.PIPE, text=True, env=path) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_its_line_stops_it(signum: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert "serving on" in process.stdout.readline()
    process.send_signal(signum)
    assert process.wait(20) == 0 and process.stdout.read() == "stopped\n"


def test_a_signal_before_it_serves_stops_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = Server.run

    def signalled(server: Server, sockets: Any) -> None:
        signal.raise_signal(signal.SIGTERM)  # uvicorn does not listen yet
        begin(server, sockets)

    monkeypatch.setattr(Server, "run", signalled)
    before = signal.getsignal(signal.SIGTERM)
    run_app(create_app(make_bundle(FakeEngine(0.0)), ServeConfig()), port=0)
    assert capsys.readouterr().out == "stopped\n" and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_taking_and_finishes_what_is_inside(signum: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said = process.stdout.readline()
    url = re.search(r"http://\S+", said)
    assert url is not None, said
    with ThreadPoolExecutor(1) as other, httpx.Client(base_url=url.group(), timeout=20, trust_env=False) as http:
        hard = other.submit(http.post, "/predict", files={"images": picture(7, 3)})
        with httpx.Client(base_url=url.group(), trust_env=False) as second:
            until(lambda: "offramp_queue_images 1.0" in second.get("/metrics").text)
        process.send_signal(signum)
        assert labels(hard.result(20)) == [7]
        assert process.wait(20) == 0
        assert process.stdout.read() == "stopped\n"
        with pytest.raises(httpx.ConnectError):
            http.get("/healthz")
