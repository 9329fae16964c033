"""Several workers behind one address: answers, counts, deaths, signals, and the same end as one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.runs import call
from helpers.server import answer_of, labels, picture, request_bytes, until
from offramp.serve import ServeConfig
from offramp.serve.metrics import COUNT, QUEUE, SLOTS, Metrics, Window, new_row
from offramp.serve.processes import Crew, Job
from offramp.serve.run import stage_threads
from offramp.serve.server import listen

PARENT = """
import sys
from offramp.serve.processes import Job, run_processes
run_processes(Job("helpers.server:fake_app", {"delay_s": float(sys.argv[2])}), int(sys.argv[1]), port=0)
"""


class Served:
    """A server of several workers in processes of their own."""

    def __init__(self, workers: int, delay_s: float) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", PARENT, str(workers), str(delay_s)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=environment, **pipes)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", self.said)
        assert found is not None, self.process.communicate()
        self.port = int(found.group(1))
        self.url = found.group()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=20)

    def send(self, *images: bytes) -> httpx.Response:
        files = [("images", ("image.png", image)) for image in images]
        return httpx.post(f"{self.url}/predict", files=files, trust_env=False, timeout=20)

    def count(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def workers(self) -> list[int]:
        return children(self.process.pid)

    def stop(self, signum: int = signal.SIGTERM) -> tuple[str, str]:
        self.process.send_signal(signum)
        return self.process.communicate(timeout=60)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def begin(workers: int = 2, delay_s: float = 0.01) -> Served:
        started.append(Served(workers, delay_s))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_workers_answer_at_one_address_and_add_up_what_they_count(served: Callable[..., Served]) -> None:
    server = served(workers=3)
    assert "with 3 workers" in server.said and len(server.workers()) == 3
    with ThreadPoolExecutor(12) as others:  # connections at a time, so that all workers get some
        found = list(others.map(lambda n: labels(server.send(picture(n % 10, 1 + n % 3))), range(120)))
    assert found == [[n % 10] for n in range(120)]
    for _ in range(6):  # whichever worker is asked
        assert server.count("offramp_images_total") == 120
        assert server.count('offramp_requests_total{status="200"}') == 120
        assert server.count('offramp_exit_images_total{exit="2"}') == 40
        assert server.count("offramp_request_seconds_count") == 120
        shares = server.get("/shares").json()
        assert shares["images"] == 120 and shares["shares"] == [0.33, 0.33, 0.33]
    assert server.stop()[0] == "stopped\n" and server.process.returncode == 0


def test_a_worker_that_dies_is_replaced_and_its_counts_stay(served: Callable[..., Served]) -> None:
    server = served(workers=2)
    for n in range(10):
        assert labels(server.send(picture(n, 1))) == [n]
    first, second = server.workers()
    os.kill(first, signal.SIGKILL)
    assert labels(server.send(picture(4, 2))) == [4]  # the other takes what comes
    until(lambda: len(server.workers()) == 2 and first not in server.workers(), 20)
    os.kill(second, signal.SIGKILL)
    until(lambda: len(server.workers()) == 2 and second not in server.workers(), 20)
    assert labels(server.send(picture(5, 3))) == [5]
    assert server.count("offramp_images_total") == 12 and server.count("offramp_queue_images") == 0
    said = server.stop()[0]
    assert said.count("ended with signal SIGKILL; another takes its place\n") == 2 and said.endswith("stopped\n")
    assert server.process.returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_all_that_was_sent_before_a_signal_is_answered(served: Callable[..., Served], signum: int) -> None:
    server = served(workers=2, delay_s=0.1)
    request = request_bytes(picture(3, 2))
    kept = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(40)]
    for client in kept:
        client.sendall(request)
    for client in kept:
        while not (got := client.recv(65536)).endswith(b"}"):
            assert got
    new = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(80)]
    for client in (*kept, *new):
        client.sendall(request)
    server.process.send_signal(signum)
    answers = [answer_of(client) for client in (*kept, *new)]
    assert all(answer.startswith(b"HTTP/1.1 200") and b"\r\nconnection: close" in answer for answer in answers)
    assert server.process.communicate(timeout=30)[0] == "stopped\n" and server.process.returncode == 0


SLOW = """
import os, time
from pathlib import Path
from helpers.server import fake_app

def app(begun, slow_from, rows):
    number = len(os.listdir(begun))
    Path(begun, str(os.getpid())).touch()
    time.sleep(60 if number >= slow_from else 0)
    return fake_app(0.0, rows)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("slow_from", "begun"), [(0, 1), (1, 3)])
def test_a_signal_while_workers_start_ends_all_at_once(signum: int, slow_from: int, begun: int, tmp_path: Path) -> None:
    """While the first one starts, which does so alone, and while the others do."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "begun").mkdir()
    words = {"begun": str(tmp_path / "begun"), "slow_from": slow_from}
    code = f"from offramp.serve.processes import Job, run_processes; run_processes(Job('slow:app', {words}), 3, port=0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as parent:
        until(lambda: len(os.listdir(tmp_path / "begun")) == begun, 60)
        parent.send_signal(signum)
        try:
            assert parent.communicate(timeout=10) == ("stopped\n", "") and parent.returncode == 0
        finally:
            parent.kill()
    assert len(os.listdir(tmp_path / "begun")) == begun, "another worker was started"


def test_a_signal_between_a_workers_start_and_its_place_among_the_others_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listen("127.0.0.1", 0) as listening:
        crew, begin = Crew(Job("slow:app", {}), 1, listening), subprocess.Popen

        def begin_and_signal(*given: Any, **more: Any) -> Any:
            process = begin(*given, **more)
            crew.pass_on(signal.SIGTERM, None)
            return process

        monkeypatch.setattr("offramp.serve.processes.subprocess.Popen", begin_and_signal)
        try:
            assert crew.start(0).process.wait(20) == -signal.SIGTERM
        finally:
            crew.close()


def test_workers_end_when_their_parent_is_gone(served: Callable[..., Served]) -> None:
    server = served(workers=2)
    workers = server.workers()
    server.process.kill()
    server.process.wait()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), 20)


def test_what_is_wrong_is_said_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert call(monkeypatch, "serve", "no-such-bundle", "--workers", "3", "--port", "0") == 2
    assert capfd.readouterr().err.count("no-such-bundle") == 1
    assert call(monkeypatch, "serve", "no-such-bundle", "--workers", "0") == 2
    assert "workers must be 1 or more, got 0" in capfd.readouterr().err


def test_a_bundle_is_served_by_workers(onnx_bundle: Any) -> None:
    from offramp.bench.serve import bench_serve

    [found] = bench_serve(onnx_bundle, seconds=1.0, clients=[4], workers=[2])
    assert found.load.passed and found.load.accepted > 10


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for cores, workers, threads in ((1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 3, 2), (2, 4, 1)):
        monkeypatch.setattr("offramp.serve.run.usable_cores", lambda cores=cores: cores)
        assert stage_threads(workers) == threads
    assert call(monkeypatch, "serve", "bundle", "--threads", "0") == 2
    assert "--threads must be 1 or more, got 0" in capsys.readouterr().err


def test_limits_are_divided() -> None:
    config = ServeConfig(queue=300, client_mul_adds_per_s=9e6)
    third = config.divided(3)
    assert (third.queue, third.client_mul_adds_per_s) == (100, 3e6) and config.divided(1) == config
    assert config.divided(8).queue == 64  # a request of max_images fits into each
    assert ServeConfig(queue=10).divided(4).queue == 10


def test_a_row_that_is_taken_over_keeps_its_counters() -> None:
    row = new_row(SLOTS)
    before = Metrics((0.5, 0.5), row)
    before.left(2, forced=True, limited=False)
    before.queue = 3
    after = Metrics((0.5, 0.5), row)
    assert row[COUNT["images"]] == 1 and row[QUEUE] == 0 and after.recent_counts([row, row]) == [0, 0]
    after.left(1, forced=False, limited=True)
    assert after.recent_counts([row, row]) == [2, 0]
    text = after.text([row, row]).decode()
    assert 'offramp_exit_images_total{exit="2"} 2.0' in text and "offramp_images_total 4.0" in text
    with pytest.raises(ValueError, match="at most 128 exits"):
        Metrics([1 / 200] * 200, row)
    assert Window(3).shares() == [0, 0, 0]
