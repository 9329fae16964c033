"""A server around a network made by hand, whose stages can be held, slowed and broken."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from PIL import Image

from offramp.common.images import Preprocessing
from offramp.measuring.policy import Policies, Policy
from offramp.running.bundle import Bundle, ModelCard
from offramp.running.engines.protocol import EngineState
from offramp.serve import ServeConfig, create_app
from offramp.serve.metrics import Rows
from offramp.serve.server import listen, server_config

COSTS = (1_000_000, 2_500_000, 5_000_000)
CLASSES = tuple(f"class <{c}>" for c in range(10))
POLICY = Policy("searched", None, (0.5, 0.5), 2_250_000, (0.5, 0.3, 0.2), 0.9)


def picture(label: int, exit_: int, broken: bool = False, kind: str = "PNG", side: int = 8) -> bytes:
    """An image whose colour says which class it is, from which exit on that is sure, and whether it yields NaN."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (20 * label, 60 * exit_, 200 * broken)).save(file, kind, quality=100)
    return file.getvalue()


class FakeEngine:
    """Reads the answer off the colour; before its exit an image is taken for the class above, without confidence."""

    num_exits = len(COSTS)
    ahead = 0
    place = "a network made by hand"

    def use(self, slot: int) -> None:
        pass

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.failing = delay_s, False
        self.open = {k: threading.Event() for k in (1, 2, 3)}
        self.reached = {k: threading.Event() for k in (1, 2, 3)}
        self.batches: list[tuple[int, int]] = []
        for gate in self.open.values():
            gate.set()

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, images: np.ndarray) -> EngineState:
        return (images[:, :, 0, 0] * 255,)

    def run(self, k: int, state: EngineState) -> tuple[Any, EngineState]:
        self.reached[k].set()
        assert self.open[k].wait(20)
        self.batches.append((k, len(state[0])))
        time.sleep(self.delay_s)
        if self.failing:
            raise RuntimeError("the device is on fire")
        return state[0], state

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        label, needs, broken = np.rint(logits / [20, 60, 200]).astype(int).T
        sure = np.where(k >= needs, 0.9, 0.1).astype(np.float32)
        return np.where(broken, np.float32("nan"), sure), (label + (k < needs)) % 10

    def gather(self, k: int, parts: Sequence[tuple[EngineState, np.ndarray]]) -> EngineState:
        return (np.concatenate([state[0][rows] for state, rows in parts]),)

    def logits(self, k: int, state: EngineState) -> tuple[np.ndarray, EngineState]:
        return self.run(k, state)

    def room(self, state: EngineState, samples: int) -> EngineState:
        return tuple(np.empty((samples, *array.shape[1:]), array.dtype) for array in state)

    def put(self, state: EngineState, rows: np.ndarray, room: EngineState, begin: int) -> None:
        for array, slot in zip(state, room, strict=True):
            slot[begin : begin + len(rows)] = array[rows]

    def wait(self) -> None:
        pass


def make_bundle(engine: FakeEngine) -> Bundle:
    ready = Preprocessing(8, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    card = ModelCard({"name": "colours"}, "eager", (3, 8, 8), CLASSES, COSTS, ready)
    return Bundle(Path("x"), "torch", card, Policies("max_softmax", None, COSTS, (POLICY,), 0), engine, "x")


class Running:
    """A server in a thread, a client of it, and what the network saw."""

    def __init__(self, config: ServeConfig, delay_s: float = 0.0) -> None:
        self.engine = FakeEngine(delay_s)
        self.app = create_app(make_bundle(self.engine), config)
        self.service = self.app.state.service
        self.server = uvicorn.Server(server_config(self.app))
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)
        self.others = ThreadPoolExecutor(16)
        until(lambda: self.server.started)

    def send(self, *images: bytes, **fields: Any) -> httpx.Response:
        files = [("images", ("image.png", image)) for image in images]
        return self.http.post("/predict", files=files, data=fields)

    def later(self, *images: bytes, **fields: Any) -> Future[httpx.Response]:
        return self.others.submit(self.send, *images, **fields)

    def count(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def stop(self) -> None:
        for gate in self.engine.open.values():
            gate.set()
        self.others.shutdown()
        self.http.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


Start = Callable[..., Running]


def labels(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return [found["class"] for found in response.json()["predictions"]]


def post(http: httpx.Client, body: bytes, kind: str, query: str = "") -> httpx.Response:
    return http.post(f"/predict{query}", content=body, headers={"content-type": kind} if kind else {})


def request_bytes(image: bytes) -> bytes:
    body = b'--b\r\nContent-Disposition: form-data; name="images"; filename="i"\r\n\r\n' + image + b"\r\n--b--\r\n"
    head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer_of(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with client:
        client.settimeout(20)
        parts = []
        while part := client.recv(65536):
            parts.append(part)
        return b"".join(parts)


def fake_app(delay_s: float, rows: Rows | None = None, **settings: Any) -> FastAPI:
    """An application around the network made by hand, as workers and replicas make theirs."""
    return create_app(make_bundle(FakeEngine(delay_s)), ServeConfig(**settings), rows=rows)
