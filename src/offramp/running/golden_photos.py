"""Golden photos: drawn files that meet every rule of preparing an image, with what each must become.

A bundle carries them beside its golden tensors, so that a client in any language can see whether it decodes, resizes
and cuts as this package does (docs/bundle-format.md). `photos.json` names the files and the answers; the arrays they
are cut into are `photos` in `golden.npz`.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from offramp.common.files import read_json, write_bytes, write_json
from offramp.common.images import LONGEST, Preprocessing, read_image
from offramp.measuring.confidence import confidences
from offramp.measuring.policy import Policies, exits_taken

PHOTOS = "photos.json"
DECODERS_DIFFER = 3  # levels of 255 by which decoders of JPEG may disagree; PNG leaves them no choice
UNDECIDED = 1e-4  # a confidence this near to a threshold may fall to either side in float32
COLOURS = ((214, 60, 40), (250, 230, 120), (30, 70, 160), (20, 200, 130))
WIDE, LOW = 420, 280  # pixels of the largest one
TURNED = 6  # EXIF: its right side is to be up


@dataclass(frozen=True)
class GoldenPhoto:
    """One file: the rule it is there for, and the answer of the chosen policy to it (exits from 1)."""

    file: str
    rule: str
    tolerance: int
    label: int
    exit: int
    confidence: float


@dataclass(frozen=True)
class PolicyResult:
    """What the chosen policy makes of samples that every exit has seen, and who is too near a threshold to tell."""

    labels: np.ndarray
    exits: np.ndarray
    confidences: np.ndarray
    undecided: np.ndarray

    @staticmethod
    def of(logits: np.ndarray, policies: Policies) -> PolicyResult:
        """From logits [K, n, C]."""
        sure = confidences(logits, policies.measure, policies.temperatures, checked=False)
        thresholds = policies.policy.thresholds
        exits, each = exits_taken(sure, thresholds), np.arange(logits.shape[1])
        met = np.arange(1, len(sure))[:, None] <= exits
        near = np.abs(sure[:-1] - np.array(thresholds, np.float32)[:, None]) <= UNDECIDED
        undecided = np.logical_or.reduce(near & met, axis=0)
        return PolicyResult(logits.argmax(-1)[exits - 1, each], exits, sure[exits - 1, each], undecided)


def drawn_photos(own: Preprocessing) -> Iterator[tuple[str, str, bytes]]:
    """Name, rule and bytes of each photo: drawn, the same ones every time, no image of any data."""
    drawn = (
        ("a landscape: antialiasing, the longer side cut off, a crop at half a pixel", "png", _landscape(own)),
        ("lies on its side: EXIF orientation 6", "jpg", _turned()),
        ("half transparent, upright: alpha on white, a crop at half a pixel", "png", _transparent(own)),
        ("grey of 16 bits", "png", _deep_grey()),
        (f"longer than {LONGEST}:1: only its middle", "png", _encoded(Image.fromarray(_drawing(11, 451)))),
        ("a palette with transparent entries", "png", _palette()),
    )
    for number, (rule, kind, data) in enumerate(drawn, 1):
        yield f"photo-{number}.{kind}", rule, data


def _drawing(width: int, height: int) -> np.ndarray:
    """Stripes as fine as pixels and a disc off the centre, uint8 [h, w, 3]: no turn or shift of it looks the same."""
    return np.array(COLOURS, np.uint8)[_regions(width, height)]


def _regions(width: int, height: int) -> np.ndarray:
    """The colour of each pixel, 0 to 3."""
    down, right = np.mgrid[:height, :width]
    stripes = (right + 2 * down) // 3 % 2
    disc = (3 * right - width) ** 2 + (3 * down - 2 * height) ** 2 < min(width, height) ** 2
    return stripes + 2 * disc


def _telling(own: Preprocessing, long: int, short: int, rest: int) -> int:
    """A longer side at which rounding in another way shows: it is cut off by half a pixel or more, and the crop begins
    at half a pixel, where rounding goes down (`rest` 1) or up (`rest` 3)."""
    for side in range(long, 2 * long):
        whole, part = divmod(own.resize * side, short)
        if 2 * part >= short and (whole - own.size) % 4 == rest:
            return side
    return long


def _landscape(own: Preprocessing) -> bytes:
    return _encoded(Image.fromarray(_drawing(_telling(own, WIDE, LOW, 1), LOW)))


def _turned() -> bytes:
    exif = Image.Exif()
    exif[274] = TURNED
    coarse = _drawing(24, 16).repeat(4, 0).repeat(4, 1)  # what is fine takes room in a JPEG
    return _encoded(Image.fromarray(coarse), "JPEG", exif=exif, quality=90, subsampling=0)


def _transparent(own: Preprocessing) -> bytes:
    """Each row has its alpha, from 0 to 255."""
    width = 75
    height = _telling(own, 100, width, 3)
    alpha = np.broadcast_to((np.arange(height) * 255 // (height - 1))[:, None, None], (height, width, 1))
    return _encoded(Image.fromarray(np.concatenate([_drawing(width, height), alpha.astype(np.uint8)], 2)))


def _deep_grey() -> bytes:
    """From black to white over all of it, in steps of less than a level."""
    values = np.linspace(0, 65535, 72 * 50).astype(np.uint16).reshape(50, 72)
    return _encoded(Image.fromarray(np.where(_regions(72, 50) < 2, values, 65535 - values).astype(np.uint16)))


def _palette() -> bytes:
    image = Image.fromarray(_regions(60, 90).astype(np.uint8))
    image.putpalette([level for colour in COLOURS for level in colour])
    return _encoded(image, transparency=bytes((255, 0, 100, 200)))


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def cut_photos(files: Sequence[bytes], own: Preprocessing) -> np.ndarray:
    """What encoded photos are cut into, uint8 [n, 3, size, size]."""
    return np.stack([own.cut(read_image(data)) for data in files])


def write_photos(folder: Path, photos: Sequence[tuple[str, str, bytes]], answers: PolicyResult) -> None:
    """The files, and `photos.json` with the answers to them."""
    for name, _, data in photos:
        write_bytes(folder / name, data)
    unanswered = [GoldenPhoto(name, rule, _tolerance(name), 0, 0, 0.0) for name, rule, _ in photos]
    write_answers(folder / PHOTOS, unanswered, answers)


def write_answers(path: Path, photos: Sequence[GoldenPhoto], answers: PolicyResult) -> None:
    """`photos.json` with these answers, whatever they were before."""
    rows = zip(photos, answers.labels, answers.exits, answers.confidences, strict=True)
    known = [
        replace(photo, label=int(label), exit=int(exit_), confidence=float(sure)) for photo, label, exit_, sure in rows
    ]
    write_json(path, {"photos": [asdict(photo) for photo in known]})


def _tolerance(name: str) -> int:
    return DECODERS_DIFFER if name.endswith(".jpg") else 0


def read_photos(folder: Path, files: Collection[str]) -> list[GoldenPhoto]:
    """The golden photos of a bundle; one of version 0.1 has none. `files` are those its manifest vouches for."""
    if PHOTOS not in files:
        return []
    try:
        found = [GoldenPhoto(**photo) for photo in read_json(folder / PHOTOS)["photos"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / PHOTOS} is damaged") from error
    for photo in found:
        if photo.file not in files:
            raise ValueError(f"{folder} is damaged: its manifest does not name {photo.file}")
    return found


def check_cuts(photos: Sequence[GoldenPhoto], found: np.ndarray, expected: np.ndarray, source: Any) -> None:
    """Every photo is cut into the array it was cut into when the bundle was written."""
    for photo, one, wanted in zip(photos, found.astype(int), expected.astype(int), strict=True):
        if np.abs(one - wanted).max() > photo.tolerance:
            raise ValueError(f"{source} does not give its golden outputs: {photo.file} is cut into another array")


def check_answers(photos: Sequence[GoldenPhoto], found: PolicyResult, source: Any) -> None:
    """Every photo gets its label at its exit, but for those that a rounding may send elsewhere."""
    for photo, label, exit_, undecided in zip(photos, found.labels, found.exits, found.undecided, strict=True):
        if not undecided and (label, exit_) != (photo.label, photo.exit):
            raise ValueError(
                f"{source} does not give its golden outputs: {photo.file} is class {label} at exit {exit_}, "
                f"not {photo.label} at {photo.exit}"
            )
