"""What the server refuses, limits and keeps to itself; whatever is sent, it still answers afterwards."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.server import COSTS, FakeEngine, Start, labels, make_bundle, picture, post, until
from offramp.serve import ServeConfig, create_app
from offramp.serve.clients import Bucket, Clients, client_name
from offramp.serve.config import exit_within
from offramp.serve.metrics import Window, distance


def sentence(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    [(name, text)] = response.json().items()
    assert name == "detail" and "\n" not in text and 10 < len(text) < 200
    return str(text)


def test_too_large_is_413(start: Start) -> None:
    server = start(max_bytes=2000, max_images=3)
    assert "2,000 bytes" in sentence(server.send(b"x" * 3000), 413)
    chunks: Iterator[bytes] = iter([b"x" * 500] * 10)  # no length is declared
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert "2,000 bytes" in sentence(server.http.post("/predict", content=chunks, headers=kind), 413)
    assert "3 images" in sentence(server.send(*[picture(1, 1)] * 4), 413)
    assert "3 images" in sentence(server.http.post("/predict", json={"images": [""] * 4}), 413)
    assert len(labels(server.send(*[picture(1, 1)] * 3))) == 3
    assert server.service.taken == 0


def test_no_image_is_415(start: Start) -> None:
    server = start()
    image = picture(1, 1)
    assert sentence(server.send(image, b"no image"), 415) == "image 2 cannot be read: it is no image of a known kind"
    sentence(server.send(image[:-30]), 415)
    sentence(server.send(b""), 415)
    sentence(post(server.http, image, "image/png"), 415)
    sentence(post(server.http, image, ""), 415)
    sentence(server.http.post("/predict", json={"images": [base64.b64encode(b"text").decode()]}), 415)
    assert server.service.taken == 0


MALFORMED: list[Any] = [
    {"images": []},
    {},
    {"images": "abc"},
    {"images": [3]},
    {"images": [None]},
    {"images": ["***"]},
    {"images": ["ä"]},
    {"images": ["abcde"]},
    {"images": [""], "max_exit": "2"},
    {"images": [""], "max_exit": 0},
    {"images": [""], "max_exit": 4},
    {"images": [""], "max_exit": True},
    {"images": [""], "max_exit": 10**400},
    {"images": [""], "deadline_ms": 0},
    {"images": [""], "deadline_ms": -1},
    {"images": [""], "deadline_ms": "soon"},
    {"images": [""], "surprise": 1},
    [],
    "images",
    None,
]


def test_malformed_is_422(start: Start) -> None:
    server = start()
    for value in MALFORMED:
        sentence(post(server.http, json.dumps(value).encode(), "application/json"), 422)
    for body in (b"", b"{", b"\xff\xfe", b'{"images": [""], "deadline_ms": NaN}', b"[" * 100_000, b'{"a":' * 50_000):
        sentence(post(server.http, body, "application/json"), 422)
    image = picture(1, 1)
    for fields in ({"max_exit": "x"}, {"max_exit": "9"}, {"deadline_ms": "nan"}, {"deadline_ms": "-3"}, {"other": "1"}):
        sentence(server.send(image, **fields), 422)
    for query in ("?max_exit=x", "?max_exit=0", "?deadline_ms=inf"):
        files = {"images": image}
        sentence(server.http.post(f"/predict{query}", files=files), 422)
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=y"):
        for body in (b"", b"--x--\r\n", b"--x\r\n\r\n", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1'):
            sentence(post(server.http, body, kind), 422)
    assert labels(server.send(image)) == [1] and server.service.taken == 0


def test_a_full_queue_is_503_and_comes_back(start: Start) -> None:
    server = start(queue=2, overload_exit=3)
    server.engine.open[1].clear()
    inside = [server.later(picture(1, 1)), server.later(picture(2, 3))]
    until(lambda: server.service.taken == 2)
    refused = server.send(picture(3, 1))
    assert "full" in sentence(refused, 503) and refused.headers["retry-after"] == "1"
    server.engine.open[1].set()
    assert [labels(one.result(5)) for one in inside] == [[1], [2]]
    until(lambda: server.service.taken == 0)
    assert labels(server.send(picture(3, 1), picture(4, 1))) == [3, 4]
    assert "2 images" in sentence(server.send(*[picture(3, 1)] * 3), 413)  # never more than an empty queue holds


def test_bodies_in_memory_are_bounded(start: Start) -> None:
    server = start(max_bytes=3000)
    server.service._buffer.most = 1000
    sentence(server.send(b"x" * 2000), 503)
    assert labels(server.send(picture(1, 1))) == [1] and server.service._buffer.held == 0


def test_half_a_queue_full_lowers_the_last_exit(start: Start) -> None:
    server = start(queue=4, reveal_exit=True)
    server.engine.open[1].clear()
    before = [server.later(picture(1, 3)), server.later(picture(1, 3))]
    until(lambda: server.service.taken == 2 and not server.service.worker.coming)
    under = [server.later(picture(1, 3)), server.later(picture(1, 3))]
    until(lambda: server.service.taken == 4 and not server.service.worker.coming)
    server.engine.open[1].set()
    for one in before:
        assert one.result(5).json()["predictions"][0]["exit"] == 3 and not one.result().json()["limited"]
    for one in under:
        [found] = one.result(5).json()["predictions"]
        assert found["exit"] == 1 and found["forced"] and one.result().json()["limited"]
    assert server.count("offramp_overload_images_total") == 2


def test_a_client_cannot_use_more_than_its_share(start: Start) -> None:
    server = start(client_mul_adds_per_s=500_000)
    assert labels(server.send(picture(1, 3))) == [1]  # it is below zero now, by four million
    refused = server.send(picture(1, 1))
    sentence(refused, 429)
    assert 7 <= int(refused.headers["retry-after"]) <= 9  # 8 s and a little, less what has passed, rounded up
    spoofed = server.http.post("/predict", files={"images": picture(1, 1)}, headers={"x-forwarded-for": "1.2.3.4"})
    sentence(spoofed, 429)
    proxied = start(client_mul_adds_per_s=500_000, trust_forwarded=True)
    for address, status in (("1.1.1.1", 200), ("1.1.1.1", 429), ("1.1.1.1, 2.2.2.2", 200), ("3.3.3.3, 1.1.1.1", 429)):
        headers = {"x-forwarded-for": address}
        assert proxied.http.post("/predict", files={"i": picture(1, 3)}, headers=headers).status_code == status


def test_a_bucket_fills_holds_and_pays_back() -> None:
    now = [0.0]
    bucket = Bucket(10.0, lambda: now[0])
    assert bucket.wait_s() == 0
    bucket.hold(50)
    assert bucket.wait_s() > 0  # nothing is used yet, but it may be
    bucket.charge(held=50, used=30)
    assert bucket.wait_s() == 1.0
    now[0] = 0.9
    assert bucket.wait_s() > 0
    now[0] = 1.1
    assert bucket.wait_s() == 0
    now[0] = 1000.0
    assert bucket.wait_s() == 0 and bucket.balance == 20


def test_clients_are_told_apart_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.serve.clients.MAX_CLIENTS", 3)
    clients = Clients(1.0)
    first = clients.bucket("a")
    assert clients.bucket("b") is not first and clients.bucket("a") is first
    for name in "cde":
        clients.bucket(name)
    assert len(clients) == 3 and clients.bucket("a") is not first
    assert Clients(None).bucket("a") is None
    assert client_name("2001:db8::1") == client_name("2001:db8::ffff") == "2001:db8::/64"
    assert client_name("::ffff:1.2.3.4") == "1.2.3.4"
    assert client_name("9.9.9.9", ["1.1.1.1, 2.2.2.2", "3.3.3.3"]) == "3.3.3.3"
    assert client_name(None, ["junk" * 100]) == ("junk" * 16)


def test_limits_of_a_request_force_answers_out(start: Start) -> None:
    server = start(reveal_exit=True)
    [found] = server.send(picture(4, 3), max_exit=2).json()["predictions"]
    assert (found["class"], found["exit"], found["forced"], found["mul_adds"]) == (5, 2, True, COSTS[1])
    response = server.http.post("/predict?max_exit=1", files={"images": picture(4, 3)})
    assert response.json()["predictions"][0]["exit"] == 1 and response.json()["limited"]
    [found] = server.send(picture(4, 1), max_exit=2).json()["predictions"]
    assert found["exit"] == 1 and not found["forced"]


def test_a_deadline_begins_no_stage_that_would_end_too_late(start: Start) -> None:
    server = start(reveal_exit=True, delay_s=0.2)
    [found] = server.send(picture(4, 3), deadline_ms=300).json()["predictions"]
    assert (found["exit"], found["forced"]) == (1, True) and server.engine.batches == [(1, 1)]
    [found] = server.send(picture(4, 3), deadline_ms=1).json()["predictions"]
    assert found["exit"] == 1  # an answer there is, however late
    assert server.send(picture(4, 3), deadline_ms=60_000).json()["predictions"][0]["exit"] == 3
    until(lambda: server.service.taken == 0)
    assert start(reveal_exit=True, deadline_ms=1, delay_s=0.02).send(picture(4, 3)).json()["limited"]


def test_answers_do_not_tell_the_exit(start: Start) -> None:
    """Nothing of an answer but label and confidence depends on the image; with a limit not even the latter."""
    server = start()
    said = [server.send(picture(4, exit_)) for exit_ in (1, 2, 3)]
    assert len({response.text for response in said}) == 1
    assert {frozenset(response.headers) for response in said} == {frozenset({"date", "content-length", "content-type"})}
    assert said[0].json() == {
        "predictions": [{"label": "class <4>", "class": 4, "confidence": pytest.approx(0.9)}],
        "limited": False,
    }
    for limit in ({"max_exit": 2}, {"deadline_ms": 60_000}):
        limited = [server.send(picture(4, exit_), **limit).json() for exit_ in (1, 2)]
        assert limited[0] == limited[1] == {"predictions": [{"label": "class <4>", "class": 4}], "limited": True}
    assert server.send(picture(4, 2), max_exit=3).json() == said[0].json()
    assert server.http.get("/shares").json()["shares"] is None  # too few images to hide one


def test_a_confidence_that_is_no_number_is_null(start: Start) -> None:
    [found] = start(reveal_exit=True).send(picture(4, 1, broken=True)).json()["predictions"]
    assert (found["exit"], found["class"], found["confidence"]) == (3, 4, None)


def test_settings_are_checked() -> None:
    bad = [{"batch": 0}, {"queue": 0}, {"max_bytes": 0}, {"wait_ms": -1}, {"deadline_ms": 0}]
    for settings in [*bad, {"client_mul_adds_per_s": float("nan")}]:
        with pytest.raises(ValueError, match=next(iter(settings))):
            ServeConfig(**settings)  # type: ignore[arg-type]
    for exit_ in (0, 4):
        with pytest.raises(ValueError, match="overload_exit must lie between 1 and 3"):
            create_app(make_bundle(FakeEngine()), ServeConfig(overload_exit=exit_))
    assert [exit_within(COSTS, mul_adds) for mul_adds in (1, 1e6, 2.6e6, 9e9)] == [1, 1, 2, 3]


def test_a_window_looks_back_so_far() -> None:
    window = Window(2, size=3)
    for exit_ in (1, 1, 2, 2, 2):
        window.add(exit_)
    assert window.shares() == [0, 1] and len(window) == 3
    assert distance((0.5, 0.5), (0.5, 0.5)) == 0 and distance((1.0, 0.0), (0.0, 1.0)) == 1
