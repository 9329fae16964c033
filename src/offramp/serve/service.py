"""What stands between requests and the worker: places in the queue, clients' balances, tickets and their answers.

Everything here runs on the event loop, except decoding and the stages themselves; so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import HTTPException, Request

from offramp.common.images import SMALL_BYTES
from offramp.measuring.policy import Policy
from offramp.running.bundle import Bundle
from offramp.running.pool import Left, Pool, Ticket
from offramp.serve.clients import Bucket, Clients, client_name
from offramp.serve.config import ServeConfig
from offramp.serve.metrics import Metrics, OwnRow, Rows
from offramp.serve.requests import RETRY, Buffer, Form, Limits, body_of, full, outcome_of, parse_body, sizes_of
from offramp.serve.worker import Over, Worker

BODIES = 32  # of the largest size, that fit into memory at a time
DECODERS = min(4, os.cpu_count() or 1)
LARGE_WAITING = 8  # requests with large images that may wait to be decoded
PIXEL_MUL_ADDS = 16  # what a client is charged for decoding a pixel: about what it takes
PATIENCE_S = 0.1  # who has waited so long at a stage goes before any full batch
LONGEST_RETRY_S = 60


class StageFailed(Exception):
    """The network raised an error on the batch that an image was in."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Intake:
    """What a request holds: encoded images, limits, and what came of decoding them, if that was done already."""

    images: list[bytes]
    limits: Limits
    pixels: int
    found: np.ndarray | HTTPException | None


@dataclass(frozen=True)
class Entry:
    """What a ticket's key says: where the answer goes, and whose balance pays."""

    answer: asyncio.Future[Left]
    bucket: Bucket | None
    held: float
    limited: bool


@dataclass(frozen=True)
class RequestResult:
    """How a request's images left; `limits` are the client's own, `limited` says whether any limit held."""

    left: list[Left]
    limits: Limits
    limited: bool


class Service:
    """One bundle, its worker, and all that requests share."""

    def __init__(
        self, bundle: Bundle, config: ServeConfig, policy: Policy | None = None, rows: Rows | None = None
    ) -> None:
        policy = policy or bundle.policy()
        self.bundle, self.config, self.costs = bundle, config, bundle.costs
        self.overload_exit = config.overload_ceiling(self.costs, policy.mul_adds)
        self.rows = rows or OwnRow()
        self.metrics = Metrics(policy.shares, self.rows.own)
        self.clients = Clients(config.client_mul_adds_per_s)
        pool = Pool(bundle.engine, policy, config.batch, config.wait_ms / 1e3, PATIENCE_S, guesses=True)
        self.worker = Worker(pool, self._tell)
        self._buffer = Buffer(BODIES * config.max_bytes)
        self._decoders = ThreadPoolExecutor(DECODERS, "offramp-decode")
        self._large = ThreadPoolExecutor(1, "offramp-decode-large", initializer=_behind_others)
        self._large_waiting = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the worker; at the end finish what is inside."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.worker.stop)
            self._decoders.shutdown()
            self._large.shutdown()

    @property
    def taken(self) -> int:
        """Places in the queue."""
        return self.metrics.queue

    @taken.setter
    def taken(self, places: int) -> None:
        self.metrics.queue = places

    @property
    def full(self) -> bool:
        return self.taken >= self.config.queue

    @property
    def overloaded(self) -> bool:
        return 2 * self.taken > self.config.queue

    async def predict(self, request: Request, limits: Limits) -> RequestResult:
        """Everything between a request and its answers; refusals are HTTP exceptions."""
        arrived = time.perf_counter()
        if not self.worker.alive:
            raise HTTPException(503, "the server can no longer answer; it must be started again")
        bucket = self._client(request)
        images, limits = await self._enter(request, limits, bucket)
        tickets = self._tickets(len(images), limits, bucket, arrived)
        self.worker.submit(images, tickets)
        left = await _first(request, tickets)
        return RequestResult(left, limits, any(ticket.key.limited for ticket in tickets))

    async def _enter(self, request: Request, limits: Limits, bucket: Bucket | None) -> tuple[np.ndarray, Limits]:
        """The images of a request, ready for the network, each with a place in the queue; and its limits."""
        async with body_of(request, self.config.max_bytes, self._buffer) as body:
            self._take(1)  # also while it waits to be decoded
            self.worker.coming += 1
            try:
                kind = request.headers.get("content-type", "")
                intake = await self._loop.run_in_executor(self._decoders, self._read, kind, body, limits)
                images = await self._decoded(intake, bucket)
                self._check_balance(bucket)
                self._take(len(images) - 1)
                return images, intake.limits
            except BaseException:
                self.taken -= 1
                raise
            finally:
                self.worker.coming -= 1

    def _client(self, request: Request) -> Bucket | None:
        peer = request.client.host if request.client else None
        forwarded = request.headers.getlist("x-forwarded-for") if self.config.trust_forwarded else []
        bucket = self.clients.bucket(client_name(peer, forwarded))
        self._check_balance(bucket)
        return bucket

    def _check_balance(self, bucket: Bucket | None) -> None:
        wait_s = 0.0 if bucket is None else bucket.wait_s()
        if wait_s:
            retry = {"Retry-After": str(min(math.ceil(wait_s), LONGEST_RETRY_S))}
            raise HTTPException(429, "this client has used up its compute for now; try again later", retry)

    def _take(self, places: int) -> None:
        if self.taken + places > self.config.queue:
            raise full()
        self.taken += places

    def _read(self, kind: str, body: bytes, limits: Limits) -> Intake:
        """What a request holds; its images are decoded at once, unless some are large."""
        form: Form = parse_body(kind, body, self.config.most_images)
        limits = form.limits.over(limits)
        limits.check(len(self.costs))
        pixels, most = sizes_of(form.images, self.config.max_pixels)
        found = self._outcome(form.images) if most <= SMALL_BYTES else None
        return Intake(form.images, limits, pixels, found)

    def _outcome(self, encoded: list[bytes]) -> np.ndarray | HTTPException:
        return outcome_of(self.bundle, encoded, self.config.max_pixels)

    async def _decoded(self, intake: Intake, bucket: Bucket | None) -> np.ndarray:
        """A request's images, charged to its client; large ones one after another, behind everybody else's."""
        if bucket is not None:
            bucket.charge(0.0, PIXEL_MUL_ADDS * intake.pixels)
        found = intake.found
        if found is None:
            if self._large_waiting >= LARGE_WAITING:
                raise HTTPException(503, "the server is busy with large images; try again later", RETRY)
            self._large_waiting += 1
            try:
                found = await self._loop.run_in_executor(self._large, self._outcome, intake.images)
            finally:
                self._large_waiting -= 1
        if isinstance(found, HTTPException):
            raise found
        return found

    def _tickets(self, count: int, limits: Limits, bucket: Bucket | None, arrived: float) -> list[Ticket]:
        last = limits.max_exit or len(self.costs)
        if self.overloaded:
            last = min(last, self.overload_exit)
            self.metrics.count("overload_images", count)
        within_ms = limits.deadline_ms or self.config.deadline_ms
        deadline = None if within_ms is None else arrived + within_ms / 1e3
        limited = last < len(self.costs) or deadline is not None
        held = float(self.costs[last - 1])
        if bucket is not None:
            bucket.hold(count * held)
        entries = [Entry(self._loop.create_future(), bucket, held, limited) for _ in range(count)]
        return [Ticket(entry, last, deadline) for entry in entries]

    def _tell(self, ended: list[Over]) -> None:
        with contextlib.suppress(RuntimeError):  # a server that was stopped by force has no loop any more
            self._loop.call_soon_threadsafe(self._over, ended)

    def _over(self, ended: list[Over]) -> None:
        for one in ended:
            entry: Entry = one.ticket.key
            passed = len(one.ticket.guesses) if one.left is None else one.left.exit
            used = self.costs[passed - 1] if passed else 0
            self.taken -= 1
            self.metrics.count("mul_adds", used)
            if entry.bucket is not None:
                entry.bucket.charge(entry.held, used)
            self._answer(one, entry)

    def _answer(self, one: Over, entry: Entry) -> None:
        if one.left is not None:
            self.metrics.left(one.left.exit, one.left.forced, entry.limited)
            if not entry.answer.done():
                entry.answer.set_result(one.left)
        elif one.ticket.cancelled:
            self.metrics.count("dropped_images")
        else:
            self.metrics.count("failed_images")
            if not entry.answer.done():
                entry.answer.set_exception(StageFailed())


def _behind_others() -> None:
    """Let this thread have the processor when nobody else wants it; only where threads have a priority."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


async def _first(request: Request, tickets: list[Ticket]) -> list[Left]:
    """The answers, unless the client goes away first; then its images are not worth another stage."""
    answers: list[asyncio.Future[Left]] = [ticket.key.answer for ticket in tickets]
    gone = asyncio.ensure_future(_gone(request))
    over = asyncio.ensure_future(asyncio.wait(answers))
    try:
        either: set[asyncio.Future[Any]] = {over, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            raise ClientGone
        errors = [error for answer in answers if (error := answer.exception()) is not None]  # all of them are looked at
        if errors:
            raise errors[0]
        return [answer.result() for answer in answers]
    finally:
        gone.cancel()
        over.cancel()
        for ticket in tickets:
            ticket.cancelled = not ticket.key.answer.done() or ticket.cancelled
            ticket.key.answer.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
