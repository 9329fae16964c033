"""Connections and the end of a server: limits, idle ones, signals, and clients that go away."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from helpers.server import Start, answer_of, labels, picture, request_bytes, until
from offramp.serve import connections

SERVER = """
import sys
from offramp.serve import ServeConfig, create_app
from offramp.serve.run import run_app
from offramp.common.console import log_to_console
from helpers.server import FakeEngine, make_bundle
log_to_console()
run_app(create_app(make_bundle(FakeEngine(float(sys.argv[1]))), ServeConfig()), port=0)
"""


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, with the stages' delay and the limit of open files; and its port."""
    delay, files = getattr(request, "param", ("0.01", "1024"))
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["bash", "-c", f"ulimit -n {files}; exec {sys.executable} -c '{SERVER}' {delay}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path) as process:
        assert process.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())
        assert found is not None
        yield process, int(found.group(1))
        process.kill()


@pytest.mark.parametrize("served", [("0.01", "100")], indirect=True)
def test_more_connections_than_descriptors(served: tuple[subprocess.Popen[str], int]) -> None:
    process, port = served
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    for _ in range(5):
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=20).json() == {"status": "ok"}
    whole = httpx.post(f"http://127.0.0.1:{port}/predict", files={"images": picture(4, 2)}, trust_env=False, timeout=20)
    assert labels(whole) == [4]
    for client in idle:
        client.close()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert said.count("connections: those that are idle are closed") == 1 and "out of system resource" not in said


def test_too_few_descriptors_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(connections, "_open_descriptors", lambda: 30)
    with pytest.raises(ValueError, match="40 open files leaves no room for connections"):
        connections.connection_limit()


def test_idle_connections_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.3)
    server = start()
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as silent,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow,
    ):
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        assert silent.recv(10) == b"" and slow.recv(10) == b""
    assert not server.server.config.connections.open


def test_a_request_that_takes_its_time_is_not_idle(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    server = start(delay_s=0.3)
    assert labels(server.send(picture(5, 3))) == [5]


def sent_before_a_signal(process: subprocess.Popen[str], port: int, count: int) -> list[bytes]:
    """What comes back to requests that were wholly sent, on new and on kept connections, right before SIGTERM."""
    request = request_bytes(picture(3, 2))
    kept = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count // 2)]
    for client in kept:
        client.sendall(request)
    for client in kept:
        while not (got := client.recv(65536)).endswith(b"}"):
            assert got
    new = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count - len(kept))]
    for client in (*kept, *new):
        client.sendall(request)
    process.send_signal(signal.SIGTERM)
    return [answer_of(client) for client in (*kept, *new)]


@pytest.mark.parametrize("served", [("0.3", "4096")], indirect=True)
@pytest.mark.parametrize("count", [16, 120])
def test_all_that_was_sent_before_a_signal_is_answered(served: tuple[subprocess.Popen[str], int], count: int) -> None:
    answers = sent_before_a_signal(*served, count)
    assert all(answer.startswith(b"HTTP/1.1 200") and b"\r\nconnection: close" in answer for answer in answers)
    assert served[0].wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("served", [("0.01", "4096")] * 20, indirect=True)
def test_no_request_is_lost_over_many_signals(served: tuple[subprocess.Popen[str], int]) -> None:
    answers = sent_before_a_signal(*served, 200)
    assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) == 200


def test_half_a_request_does_not_hold_up_the_end(served: tuple[subprocess.Popen[str], int]) -> None:
    process, port = served
    whole = request_bytes(picture(3, 2))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as half:
        half.sendall(whole[:-20])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0  # a body may otherwise take 20 s to arrive
        assert half.recv(10) == b""


def test_a_client_that_leaves_leaves_no_trace_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(delay_s=0.2)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(request_bytes(picture(3, 3)))
            until(lambda: server.service.taken > 0)
    until(lambda: server.service.taken == 0)
    assert labels(server.send(picture(4, 1))) == [4]
    gc.collect()
    time.sleep(0.1)
    assert server.count("offramp_dropped_images_total") == 3 and caplog.text == ""


def test_failures_of_many_images_are_looked_at(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    server.engine.failing = True
    assert server.send(*(picture(c, 1) for c in range(5))).status_code == 500
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_closing_is_not_repeated() -> None:
    """A connection that was closed to make room is no longer counted, though its end comes later."""
    book = connections.Connections(most=1)

    class Fake:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            book.remove(self)  # type: ignore[arg-type]

    first, second = Fake(), Fake()
    for one in (first, second):
        book.add(one)  # type: ignore[arg-type]
    assert (first.closed, second.closed) == (1, 0) and book.open == {second}
    book.works(second)  # type: ignore[arg-type]
    third = Fake()
    book.add(third)  # type: ignore[arg-type]
    assert third.closed == 1 and second.closed == 0
