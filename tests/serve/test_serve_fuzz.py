"""Damaged images, requests and HTTP: nothing that is sent may hurt the server."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image

from helpers.server import Start, labels, picture, post, until


def huge_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def fuzzed() -> Iterator[bytes]:
    """Random bytes, damaged and cut images, sizes that are lies."""
    draw = np.random.default_rng(0)
    noise = Image.fromarray(draw.integers(0, 255, (40, 50, 3), dtype=np.uint8))
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"):
        file = io.BytesIO()
        noise.save(file, kind)
        whole = file.getvalue()
        for cut in draw.integers(1, len(whole), 3):
            yield whole[:cut]
        for _ in range(5):
            damaged = bytearray(whole)
            for at in draw.integers(0, len(whole), 10):
                damaged[at] = draw.integers(0, 256)
            yield bytes(damaged)
    for size in (0, 1, 10, 1000):
        yield draw.bytes(size)
    for width, height in ((50_000, 50_000), (1, 2**31 - 1), (2**31 - 1, 1), (1, 90_000_000), (0, 0)):
        yield huge_png(width, height)
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"


def test_fuzzed_images_never_hurt(start: Start) -> None:
    server = start()
    seen = set()
    for image in fuzzed():
        seen.add(server.send(image).status_code)
        seen.add(server.http.post("/predict", json={"images": [base64.b64encode(image).decode()]}).status_code)
    assert seen <= {200, 415} and 415 in seen
    assert labels(server.send(picture(6, 3))) == [6] and server.service.taken == 0


def test_fuzzed_requests_never_hurt(start: Start) -> None:
    server = start(max_bytes=200_000)
    draw = np.random.default_rng(1)
    files = {"images": ("a.png", picture(1, 1)), "more": ("b.png", picture(2, 2))}
    request = server.http.build_request("POST", "/predict", files=files, data={"max_exit": "2"})
    whole, kind = request.read(), request.headers["content-type"]
    body = json.dumps({"images": [base64.b64encode(picture(1, 1)).decode()], "max_exit": 2}).encode()
    for original, own in ((whole, kind), (body, "application/json")):
        for _ in range(60):
            damaged = bytearray(original[: int(draw.integers(1, len(original) + 1))])
            for at in draw.integers(0, len(damaged), 3):
                damaged[at] = draw.integers(0, 256)
            response = post(server.http, bytes(damaged), own)
            assert response.status_code in (200, 413, 415, 422), response.text
    for own in (kind.replace("form-data", "mixed"), "application/json; charset=x", "a" * 1000, ";;;=", "text/html"):
        assert post(server.http, whole, own).status_code in (415, 422)
    assert labels(server.send(picture(6, 3))) == [6] and server.service.taken == 0


def test_broken_http_never_hurts(start: Start) -> None:
    server = start(max_bytes=1000)
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sent = [
        (b"\x16\x03\x01 not http at all\r\n\r\n", b"400"),
        (head + b"Content-Length: 99999999999999\r\n\r\n", b"413"),
        (head + b"Content-Length: -5\r\n\r\n", b"400"),
        (head + b"Content-Length: 900\r\n\r\n{", b""),  # and then goes away
        (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    ]
    for request, status in sent:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
            raw.sendall(request)
            if status:
                assert status in raw.recv(4096).split(b"\r\n")[0]
    until(lambda: server.service.taken == 0)
    assert labels(server.send(picture(6, 1))) == [6]


def test_slow_clients_do_not_hold_up_others(start: Start) -> None:
    server = start(queue=4)
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    with ExitStack() as open_:
        for _ in range(50):
            slow = open_.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            slow.sendall(head)
        until(lambda: server.service._buffer.held == 50)
        assert labels(server.send(*[picture(6, 1)] * 4)) == [6] * 4
    until(lambda: server.service._buffer.held == 0)


def test_a_body_that_never_comes_is_408(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.serve.requests.READ_S", 0.1)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b"408" in raw.recv(4096).split(b"\r\n")[0]
