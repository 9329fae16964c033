"""Requests: a body that is counted while it arrives, the two forms it may have, and its images, decoded.

Bytes go in; normalised images and limits come out. Whatever is malformed is refused with 422 and a sentence, too
much of it with 413, what is no image or has another form with 415. Decoding happens in threads, away from the event
loop.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

from offramp.common.images import UnreadableImage, decode_bytes, open_image
from offramp.running.bundle import Bundle

FULL = "the server is full; try again later"
RETRY_S = 1  # after which a full server is worth another try
RETRY = {"Retry-After": str(RETRY_S)}
READ_S = 20.0  # for a whole body to arrive
MAX_FIELDS = 8  # of a form, beside its files


class Limits(BaseModel):
    """How far a client lets its images go, and by when it wants its answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_exit: int | None = None
    deadline_ms: float | None = None

    def over(self, other: Limits) -> Limits:
        """These limits, and the other's where there are none."""
        return Limits(
            max_exit=other.max_exit if self.max_exit is None else self.max_exit,
            deadline_ms=other.deadline_ms if self.deadline_ms is None else self.deadline_ms,
        )

    def check(self, num_exits: int) -> None:
        """Refuse what no network with so many exits can do."""
        if self.max_exit is not None and not 1 <= self.max_exit <= num_exits:
            raise malformed(f"max_exit must lie between 1 and {num_exits}")
        if self.deadline_ms is not None and not 0 < self.deadline_ms < math.inf:
            raise malformed("deadline_ms must be a number above 0")


class JsonRequest(Limits):
    """The body of a JSON request; images are encoded files (PNG, JPEG, ...) in base64."""

    model_config = ConfigDict(strict=True)
    images: Annotated[list[str], FailFast()]


@dataclass(frozen=True)
class Form:
    """What a request holds."""

    images: list[bytes]
    limits: Limits


def malformed(why: str) -> HTTPException:
    """The refusal of a request that does not say what it wants."""
    return HTTPException(422, why)


def _too_many(most: int) -> HTTPException:
    return HTTPException(413, f"a request may have at most {most} images")


def parse_body(content_type: str, body: bytes, most_images: int) -> Form:
    """Read a request's body."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/json":
        form = _parse_json(body, most_images)
    elif kind == b"multipart/form-data":
        form = _parse_multipart(body, options.get(b"boundary", b""), most_images)
    else:
        raise HTTPException(415, "images are taken as multipart/form-data, or as base64 in application/json")
    if not form.images:
        raise malformed("there is no image in the request")
    return form


def _parse_json(body: bytes, most_images: int) -> Form:
    try:
        asked = JsonRequest.model_validate_json(body)
    except ValidationError as error:
        raise malformed(first_sentence(error.errors(include_url=False, include_input=False))) from error
    if len(asked.images) > most_images:
        raise _too_many(most_images)
    try:
        images = [base64.b64decode(image, validate=True) for image in asked.images]
    except ValueError as error:
        raise malformed(f"images must be base64: {error}") from error
    return Form(images, Limits(max_exit=asked.max_exit, deadline_ms=asked.deadline_ms))


def first_sentence(errors: Any) -> str:
    """The first of a validation's complaints."""
    where = ".".join(map(str, errors[0]["loc"])) or "the body"
    return f"{where[:60]}: {errors[0]['msg']}"


class _Parts:
    """Collects the parts of a multipart body."""

    def __init__(self, most_images: int) -> None:
        self.most_images = most_images
        self.images: list[bytes] = []
        self.fields: dict[str, str] = {}
        self.ended = False

    def on_file(self, file: File) -> None:
        if len(self.images) >= self.most_images:
            raise _too_many(self.most_images)
        file.file_object.seek(0)
        self.images.append(file.file_object.read())

    def on_field(self, field: Field) -> None:
        if len(self.fields) >= MAX_FIELDS:
            raise malformed(f"a form may have at most {MAX_FIELDS} fields beside its files")
        name, value = field.field_name or b"", field.value or b""
        self.fields[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True


def _parse_multipart(body: bytes, boundary: bytes, most_images: int) -> Form:
    parts = _Parts(most_images)
    kept = {"MAX_MEMORY_FILE_SIZE": math.inf}  # the body is in memory already; nothing goes to the disk
    try:
        reader = FormParser("multipart/form-data", parts.on_field, parts.on_file, parts.on_end, boundary, config=kept)
        reader.write(body)
        limits = Limits.model_validate(parts.fields)
    except ValidationError as error:
        raise malformed(first_sentence(error.errors(include_url=False, include_input=False))) from error
    except FormParserError as error:
        raise malformed(f"the form cannot be read: {error}") from error
    if not parts.ended:
        raise malformed("the form cannot be read: it ends too early")
    return Form(parts.images, limits)


class Buffer:
    """The bytes of all bodies in memory together; slow clients hold no more of it than they have sent."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, count: int) -> None:
        if self.held + count > self.most:
            raise full()
        self.held += count


def full() -> HTTPException:
    """The refusal of a request for which there is no room now."""
    return HTTPException(503, FULL, RETRY)


@asynccontextmanager
async def body_of(request: Request, most: int, buffer: Buffer) -> AsyncIterator[bytes]:
    """The body, if it has at most so many bytes; it fills the buffer until the block ends."""
    body = bytearray()
    try:
        async with _in_time():
            await _read(request, body, most, buffer)
        yield bytes(body)
    finally:
        buffer.held -= len(body)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(READ_S):
            yield
    except TimeoutError as error:
        raise HTTPException(408, f"the request did not arrive within {READ_S:.0f} s") from error


async def _read(request: Request, body: bytearray, most: int, buffer: Buffer) -> None:
    """Count what really comes, whatever length is declared."""
    refusal = HTTPException(413, f"a request may have at most {most:,} bytes")
    if int(request.headers.get("content-length", 0)) > most:
        raise refusal
    async for chunk in request.stream():
        if len(body) + len(chunk) > most:
            raise refusal
        buffer.take(len(chunk))
        body += chunk


def sizes_of(encoded: Sequence[bytes], max_pixels: int) -> tuple[int, int]:
    """The pixels of all images, and the memory that the largest takes while it is decoded; only heads are read.

    Nothing stays open: some decoders take their memory as soon as they know the size.
    """
    pixels, most = 0, 0
    for number, data in enumerate(encoded, start=1):
        try:
            with open_image(data, max_pixels) as image:
                pixels, most = pixels + image.width * image.height, max(most, decode_bytes(image))
        except UnreadableImage as error:
            raise HTTPException(415, f"image {number} cannot be read: {error}") from error
    return pixels, most


def outcome_of(bundle: Bundle, encoded: Sequence[bytes], max_pixels: int) -> np.ndarray | HTTPException:
    """Images as the normalised array [n, 3, h, w] that the network takes, or why one of them is refused."""
    own, cut = bundle.card.preprocessing, []
    for number, data in enumerate(encoded, start=1):
        try:
            cut.append(own.read(data, max_pixels))
        except UnreadableImage as error:
            return HTTPException(415, f"image {number} cannot be read: {error}")
        except (MemoryError, ValueError, OSError):
            return HTTPException(415, f"image {number} cannot be prepared")
    return own.normalise(np.stack(cut))
