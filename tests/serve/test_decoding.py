"""Decoding in the server: what it may take, whom it may hold up, who pays."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from helpers.server import Start, labels, picture, until
from offramp.serve import service as services

BOMB = (9000, 9000)


def bomb(kind: str, size: tuple[int, int]) -> bytes:
    """Few bytes that become many."""
    data = io.BytesIO()
    if kind == "palette":
        Image.new("P", size).save(data, "PNG", transparency=0)
    else:
        Image.fromarray(np.zeros(size[::-1], np.uint16)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize("kind", ["palette", "16 bits"])
def test_more_pixels_than_allowed_are_refused_before_they_are_decoded(kind: str, start: Start) -> None:
    server = start()
    found = server.send(bomb(kind, BOMB))
    assert found.status_code == 415
    assert found.json()["detail"] == "image 1 cannot be read: it has 9000 x 9000 pixels, more than 25,000,000"
    allowed = start(max_pixels=100)
    assert "more than 100" in allowed.send(picture(1, 1, side=11)).json()["detail"]
    assert labels(allowed.send(picture(1, 1, side=10))) == [1]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Decoding of large images waits for a gate; `most` is how many went on at a time."""
    gate, now, most = threading.Event(), [0], [0]
    decode = services.outcome_of

    def outcome_of(bundle: Any, encoded: list[bytes], max_pixels: int) -> Any:
        if max(Image.open(io.BytesIO(data)).width for data in encoded) > 1000:
            now[0] += 1
            most[0] = max(most[0], now[0])
            assert gate.wait(20)
            now[0] -= 1
        return decode(bundle, encoded, max_pixels)

    monkeypatch.setattr(services, "outcome_of", outcome_of)
    return {"gate": gate, "most": most}


def test_large_images_hold_up_nobody_else(start: Start, held: dict[str, Any]) -> None:
    server = start(queue=64)
    large = picture(2, 1, side=2500)
    waiting = [server.later(large) for _ in range(services.LARGE_WAITING)]
    until(lambda: server.service._large_waiting == services.LARGE_WAITING)
    refused = server.send(large)
    assert refused.status_code == 503 and "large images" in refused.json()["detail"] and refused.headers["retry-after"]
    for label in range(10):  # all decoders are free for these
        assert labels(server.send(picture(label, 1))) == [label]
    held["gate"].set()
    assert [labels(one.result(20)) for one in waiting] == [[2]] * services.LARGE_WAITING
    assert held["most"] == [1] and server.service.taken == 0


def test_decoding_is_charged_to_the_client(start: Start) -> None:
    server = start(client_mul_adds_per_s=20e6)  # two seconds' worth may be used at once
    small = server.send(picture(3, 1))
    assert labels(small) == [3]
    spent = 16 * 2000 * 2000
    assert spent > 40e6
    assert server.send(picture(3, 1, side=2000)).status_code == 429
    again = server.send(picture(3, 1))
    assert again.status_code == 429 and int(again.headers["retry-after"]) >= 1


def test_a_broken_image_is_charged_too(start: Start) -> None:
    server = start(client_mul_adds_per_s=20e6)
    whole = picture(3, 1, side=2000)
    assert server.send(whole[: len(whole) // 2]).status_code == 415
    assert server.send(picture(3, 1)).status_code == 429


SERVER = """
from offramp.serve import ServeConfig, create_app
from offramp.serve.run import run_app
from helpers.server import FakeEngine, make_bundle
run_app(create_app(make_bundle(FakeEngine()), ServeConfig()), port=0)
"""


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.slow
def test_memory_stays_within_its_bound_whatever_comes_in() -> None:
    """The largest images of every kind, several at a time, beside ordinary ones: 400 MB more than those need."""
    webp = io.BytesIO()
    Image.new("RGBA", (3800, 3800)).save(webp, "WEBP")
    large = [bomb("palette", (5000, 5000)), bomb("16 bits", (5000, 5000)), webp.getvalue()]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=path) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://\S+", process.stdout.readline())
            assert url is not None

            def send(*images: bytes) -> int:
                files = [("images", ("image", image)) for image in images]
                found = httpx.post(f"{url.group()}/predict", files=files, timeout=120, trust_env=False)
                return found.status_code

            ordinary = picture(3, 1, side=1500)
            with ThreadPoolExecutor(8) as clients:
                assert set(clients.map(send, [ordinary] * 32)) == {200}
                before = peak_bytes(process.pid)
                assert set(clients.map(send, large * 3, [ordinary] * 9, large * 3)) <= {200, 503}
            assert peak_bytes(process.pid) - before <= 400e6
        finally:
            process.kill()
