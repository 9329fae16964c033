"""From a request to what the network takes: a body that is counted while it arrives, then decoded images.

Decoding happens in threads, away from the event loop; what is no image is refused with 415 and a sentence.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence

import numpy as np
from fastapi import HTTPException, Request
from PIL import Image

from offramp.bundle import Bundle
from offramp.images import MAX_PIXELS, UnreadableImage

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow's rarer decoders are not shown to strangers
READ_S = 20.0  # for a whole body to arrive


async def read_body(request: Request, most: int) -> bytes:
    """The body, if it has at most so many bytes, whatever it declares."""
    refusal = HTTPException(413, f"a request may have at most {most:,} bytes")
    if int(request.headers.get("content-length", 0)) > most:
        raise refusal
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise refusal
    except TimeoutError as error:
        raise HTTPException(408, f"the request did not arrive within {READ_S:.0f} s") from error
    return bytes(body)


def decode(bundle: Bundle, images: Sequence[bytes]) -> np.ndarray:
    """Encoded images as the normalised array [n, 3, h, w] that the network takes."""
    return np.concatenate([_decode(bundle, image, number) for number, image in enumerate(images, start=1)])


def _decode(bundle: Bundle, image: bytes, number: int) -> np.ndarray:
    try:
        _check_header(image, bundle.card.preprocessing.resize)
        return bundle.prepare([image])
    except UnreadableImage as error:
        raise HTTPException(415, f"image {number} cannot be read: {error}") from error
    except (MemoryError, ValueError, OSError) as error:
        raise HTTPException(415, f"image {number} cannot be prepared") from error


def _check_header(image: bytes, resize: int) -> None:
    """Refuse unusual formats, and shapes so narrow that resizing their short side would make them huge."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            short, long = sorted(opened.size)
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        raise UnreadableImage(f"it is none of {', '.join(FORMATS)}, or it is damaged") from error
    if resize * resize * long > MAX_PIXELS * max(short, 1):
        raise UnreadableImage(f"its shape, {short} to {long}, is too narrow")
