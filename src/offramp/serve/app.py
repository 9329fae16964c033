"""The HTTP application around a bundle: `/predict`, `/shares`, `/metrics`, `/healthz`, `/openapi.json` and the page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offramp import __version__
from offramp.measuring.policy import Policy
from offramp.running.bundle import Bundle
from offramp.serve.config import ServeConfig
from offramp.serve.metrics import ENOUGH, Rows, shares_of
from offramp.serve.page import Page, build_page
from offramp.serve.requests import FULL, RETRY, Limits, first_sentence
from offramp.serve.responses import REQUEST_BODY, Answer, response
from offramp.serve.service import ClientGone, Service, StageFailed

GONE = 499  # for the metrics only: nobody is there to read it


def create_app(
    bundle: Bundle, config: ServeConfig | None = None, policy: Policy | None = None, rows: Rows | None = None
) -> FastAPI:
    """An application that answers with `bundle`, under its chosen policy unless another is given.

    `rows` hold the counts of all processes that serve together; without, this one serves alone.
    """
    config = config or ServeConfig()
    service = Service(bundle, config, policy, rows)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    # the documentation pages of FastAPI load scripts from elsewhere; /openapi.json stays
    app = FastAPI(title="offramp", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Door, service=service)
    _add_errors(app)
    _add_predict(app, service)
    _add_views(app, service)
    _add_page(app, build_page(bundle, service))
    return app


def _add_predict(app: FastAPI, service: Service) -> None:
    statuses: dict[int | str, dict[str, Any]] = {
        200: {"model": Answer},
        413: {"description": "Too many bytes or images."},
        415: {"description": "Not an image."},
        422: {"description": "Malformed."},
        429: {"description": "This client has used up its compute for now; see Retry-After."},
        503: {"description": "The server is full; see Retry-After."},
    }

    @app.post("/predict", responses=statuses, openapi_extra={"requestBody": REQUEST_BODY})
    async def predict(request: Request, max_exit: int | None = None, deadline_ms: float | None = None) -> Response:
        """Classify images: files of a form, or base64 in JSON."""
        limits = Limits(max_exit=max_exit, deadline_ms=deadline_ms)
        try:
            given = await service.predict(request, limits)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=GONE)
        return JSONResponse(response(service.bundle, given, service.config.reveal_exit))


def _add_views(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Whether the server can answer."""
        alive = service.worker.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(await service.rows.all()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/shares")
    async def shares() -> dict[str, Any]:
        """The share of the last images that left at each exit, beside the policy's on calibration."""
        counts = service.metrics.recent_counts(await service.rows.all())
        return live_shares(counts, service.metrics.expected, service.config.reveal_exit)


def live_shares(counts: Sequence[int], expected: Sequence[float], reveal: bool) -> dict[str, Any]:
    """Exact if exits are revealed; else whole percents of enough images, so that no single one shows."""
    images = sum(counts)
    shown: list[float] | None = shares_of(counts)
    if not reveal:
        shown = [round(share, 2) for share in shown or []] if images >= ENOUGH else None
    return {"images": images, "shares": shown, "calibration": expected}


def _add_page(app: FastAPI, page: Page) -> None:
    headers = {
        "Content-Security-Policy": page.security,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page.html, headers=headers)


def _add_errors(app: FastAPI) -> None:
    def sentence(status: int, text: str) -> JSONResponse:
        return JSONResponse({"detail": text}, status)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return sentence(422, first_sentence(error.errors()))

    @app.exception_handler(StageFailed)
    async def failed(request: Request, error: StageFailed) -> JSONResponse:
        return sentence(500, "the network failed on this request; the server goes on")

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return sentence(500, "something went wrong with this request; the server goes on")


class Door:
    """Counts the requests to `/predict` with their status and time; those that find the server full go no further."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/predict":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refuse = self.service.full and scope["method"] == "POST"  # here it costs half of what it does further in
        full = JSONResponse({"detail": FULL}, 503, RETRY)
        try:
            await (full if refuse else self.app)(scope, receive, watch)
        finally:
            self.service.metrics.answered(status, time.perf_counter() - began)
