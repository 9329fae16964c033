"""From a request to what the network takes: a body that is counted while it arrives, then decoded images.

Decoding happens in threads, away from the event loop; what is no image is refused with 415 and a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from fastapi import HTTPException, Request

from offramp.common.images import UnreadableImage
from offramp.running.bundle import Bundle

FULL = "the server is full; try again later"
RETRY_S = 1  # after which a full server is worth another try
READ_S = 20.0  # for a whole body to arrive


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
    return HTTPException(503, FULL, {"Retry-After": str(RETRY_S)})


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


def decode(bundle: Bundle, images: Sequence[bytes]) -> np.ndarray:
    """Encoded images as the normalised array [n, 3, h, w] that the network takes."""
    return np.concatenate([_decode(bundle, image, number) for number, image in enumerate(images, start=1)])


def _decode(bundle: Bundle, image: bytes, number: int) -> np.ndarray:
    try:
        return bundle.prepare([image], first=number)
    except UnreadableImage as error:
        raise HTTPException(415, str(error)) from error
    except (MemoryError, ValueError, OSError) as error:
        raise HTTPException(415, f"image {number} cannot be prepared") from error
