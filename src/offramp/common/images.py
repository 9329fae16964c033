"""Images as a network takes them, with Pillow and numpy alone: opened safely, turned upright, cut to size.

`Preprocessing` is what a bundle carries; evaluation of image folders uses it too, so both see the same pixels.
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 100_000_000  # of one image; more is taken for an attack
LONGEST = 20  # times the shorter side; what is longer is cut to its middle before it is resized
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # some others would start programs
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}


def ignore_pillow_warnings() -> None:
    """For a process of our own: Pillow warns of broken metadata, and of sizes that are checked here."""
    warnings.filterwarnings("ignore", module=r"PIL\..*")


class UnreadableImage(ValueError):
    """Bytes that are no image, or one that must not be opened."""


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and below, by their names; hidden ones (`._a.jpg`, which macOS leaves) are none."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names if name[0] != ".")
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES)


def read_image(source: str | Path | bytes) -> Image.Image:
    """The image as RGB, turned as its EXIF tag says; anything else is an `UnreadableImage` that says why."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImage(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            return upright_rgb(image)
    except UnreadableImage:
        raise
    except FileNotFoundError as error:
        raise UnreadableImage("it is not there") from error
    except UnidentifiedImageError as error:  # which would say where in memory it lies
        raise UnreadableImage("it is no image of a known kind") from error
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        raise UnreadableImage(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Turned as its EXIF tag says, in three colours."""
    return _on_white(ImageOps.exif_transpose(image))


def _on_white(image: Image.Image) -> Image.Image:
    """RGB; what is transparent becomes white, and 16-bit grey keeps its range."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image, np.float64)
        top = 65535.0 if image.mode != "F" else max(float(values.max()), 1.0)
        return Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        own = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB")
    return image.convert("RGB")


def _not_too_long(image: Image.Image) -> Image.Image:
    """The middle of a very long image: resized whole, a line of pixels would become gigabytes."""
    most = LONGEST * min(image.size)
    left, top = (max(0, (side - most) // 2) for side in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side to `resize`, take the centre of `size` x `size`, normalise each channel."""

    size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def cut(self, image: Image.Image) -> np.ndarray:
        """uint8 [3, size, size] of an image of any size."""
        image = _not_too_long(image)
        width, height = image.size
        short, long = min(width, height), max(width, height)
        if short != self.resize:
            longer = max(self.resize, int(self.resize * long / short))
            wanted = (self.resize, longer) if width <= height else (longer, self.resize)
            image = image.resize(wanted, Image.Resampling.BILINEAR)
        left, top = (round((side - self.size) / 2.0) for side in image.size)
        image = image.crop((left, top, left + self.size, top + self.size))
        return np.ascontiguousarray(np.asarray(image, np.uint8).transpose(2, 0, 1))

    def normalise(self, images: np.ndarray) -> np.ndarray:
        """uint8 [n, 3, h, w] to the float32 that the network takes."""
        scale = np.array([1 / (255 * s) for s in self.std], np.float32)[:, None, None]
        shift = np.array([-m / s for m, s in zip(self.mean, self.std, strict=True)], np.float32)[:, None, None]
        return images.astype(np.float32) * scale + shift

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Preprocessing:
        made = Preprocessing(
            int(value["size"]), int(value["resize"]), tuple(map(float, value["mean"])), tuple(map(float, value["std"]))
        )
        if not (0 < made.size <= made.resize and len(made.mean) == len(made.std) == 3 and all(s > 0 for s in made.std)):
            raise ValueError("its preprocessing is not valid")
        return made
