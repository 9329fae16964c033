"""Images as a network takes them, with Pillow and numpy alone: opened safely, turned upright, cut to size.

`Preprocessing` is what a bundle carries; evaluation of image folders uses it too, so both see the same pixels. An image
may have so many pixels, and all that are decoded at a time take so much memory, whatever their kind.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from offramp.common.files import walk
from offramp.common.names import unknown

MAX_PIXELS = 25_000_000  # of one image, unless told otherwise; more is taken for an attack
LONGEST = 20  # times the shorter side; what is longer is cut to its middle before it is resized
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # some others would start programs
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}
HEIC_SUFFIXES = {".heic", ".heif"}  # read where `offramp[heic]` is installed, and from files alone
BAND_PIXELS = 1 << 20  # converted at a time, so that a large image is not in memory in three forms at once
SMALL_BYTES = 48_000_000  # an image that takes more while it is decoded, some 4 megapixels, is large
DECODE_BYTES = 300_000_000  # that large images being decoded in this process may take together
BYTES_PER_PIXEL = {"WEBP": 20, "HEIF": 20}  # while it is decoded, measured
USUAL_BYTES_PER_PIXEL = 12  # of all other kinds at most; times the pixels allowed is what one image may take
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by EXIF's orientation
# Errors of the machine, its disk or its network, which say nothing about an image.
OF_THE_MACHINE = {
    getattr(errno, name) for name in ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ENOTCONN", "ETIMEDOUT", "ENODEV")
}
Interpolation = Literal["bilinear", "bicubic"]
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def quiet_pillow() -> None:
    """For a process of our own: no warnings of broken metadata or of sizes that are checked here, nor libtiff's own."""
    warnings.filterwarnings("ignore", module=r"PIL\..*")
    for library in Path(Image.__file__).parents[1].glob("pillow.libs/libtiff*"):
        with suppress(OSError, AttributeError):  # the one that Pillow has loaded: it would print to standard error
            own = ctypes.CDLL(str(library))
            own.TIFFSetErrorHandler(None)
            own.TIFFSetWarningHandler(None)


class UnreadableImage(ValueError):
    """Bytes that are no image, or one that must not be opened."""


def is_image_name(name: str) -> bool:
    """Whether a file of this name is an image that can be read here; hidden ones (`._a.jpg` of macOS) are none."""
    suffix = os.path.splitext(name)[1].lower()
    return name[:1] not in ("", ".") and (suffix in SUFFIXES or (suffix in HEIC_SUFFIXES and heic_reader()))


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and below, by their names."""
    return sorted(Path(place, name) for place, names in walk(folder) for name in names if is_image_name(name))


@cache
def heic_reader() -> bool:
    """Whether HEIC can be read; where it can, Pillow knows it from here on."""
    try:
        from pillow_heif import register_heif_opener
    except ModuleNotFoundError:
        return False
    register_heif_opener()
    return True


def heic_missing() -> str:
    """What to do about photos of this kind."""
    return "which pip install 'offramp[heic]' makes readable"


def _formats(source: str | Path | bytes) -> tuple[str, ...]:
    """What an image may be; HEIC only in a file that is called so, as its decoder is large and a server's door open."""
    if isinstance(source, bytes) or Path(source).suffix.lower() not in HEIC_SUFFIXES:
        return FORMATS
    if not heic_reader():
        raise UnreadableImage(f"it is a HEIC photo, {heic_missing()}")
    return (*FORMATS, "HEIF")


class DecodeBudget:
    """Memory for decoding large images, shared by all threads: who needs more than is left waits, unless alone.

    Small ones never wait: there are as many at a time as there are threads that decode.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, need: int) -> Iterator[None]:
        if need <= SMALL_BYTES:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + need <= self.most)
            self.held += need
        try:
            yield
        finally:
            with self._changed:
                self.held -= need
                self._changed.notify_all()


BUDGET = DecodeBudget(DECODE_BYTES)


def open_image(source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image whose head was read and whose size is allowed; nothing is decoded yet."""
    with _explained(source):
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_formats(source))
        most = USUAL_BYTES_PER_PIXEL * max_pixels // _bytes_per_pixel(image)
        if image.width * image.height > most:
            image.close()
            raise UnreadableImage(f"it has {image.width} x {image.height} pixels, more than {most:,}")
        return image


def decode_bytes(image: Image.Image) -> int:
    """The memory that an opened image takes while it is decoded, about."""
    return image.width * image.height * _bytes_per_pixel(image)


def _bytes_per_pixel(image: Image.Image) -> int:
    return BYTES_PER_PIXEL.get(image.format or "", USUAL_BYTES_PER_PIXEL)


def read_image(source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image as RGB, turned as its EXIF tag says; anything else is an `UnreadableImage` that says why."""
    image = open_image(source, max_pixels)
    with BUDGET.room(decode_bytes(image)):
        return decoded(image)


def decoded(image: Image.Image) -> Image.Image:
    """An opened image as RGB, upright; its file is closed."""
    with _explained(getattr(image, "filename", "")), image:
        return upright_rgb(image)


@contextmanager
def _explained(source: object) -> Iterator[None]:
    """Whatever is wrong with an image is an `UnreadableImage` that says why; what is wrong with the machine is not."""
    try:
        yield
    except (UnreadableImage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage("it is not there") from error
    except PermissionError as error:
        raise UnreadableImage("it may not be opened (permission denied)") from error
    except UnidentifiedImageError as error:  # which would say where in memory it lies
        raise UnreadableImage("it is no image of a known kind") from error
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            if error.filename is None and isinstance(source, (str, Path)):
                error.filename = str(source)
            raise
        raise UnreadableImage(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Turned as its EXIF tag says, in three colours."""
    turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    rgb = _as_rgb(image)
    return rgb if turn is None else rgb.transpose(turn)


def _as_rgb(image: Image.Image) -> Image.Image:
    """RGB; converted band by band, which gives what converting it at once would give."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    top = _largest(image) if image.mode == "F" else 65535.0
    found, rows = Image.new("RGB", image.size), max(1, BAND_PIXELS // max(image.width, 1))
    for begin in range(0, image.height, rows):
        band = image.crop((0, begin, image.width, min(begin + rows, image.height)))
        found.paste(_on_white(band, top), (0, begin))
    return found


def _largest(image: Image.Image) -> float:
    """The largest value of an image of floats, at least 1."""
    return max(float(image.getextrema()[1]), 1.0)  # type: ignore[arg-type]


def _on_white(image: Image.Image, top: float) -> Image.Image:
    """RGB; what is transparent becomes white, and grey of more than 8 bits keeps its range from 0 to `top`."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image, np.float64)
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
    """Resize the shorter side to `resize`, take the centre of `size` x `size`, normalise each channel.

    With `squash` both sides are resized to `resize`, whatever that does to the image's shape.
    """

    size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bilinear"
    squash: bool = False

    def __post_init__(self) -> None:
        if self.interpolation not in FILTERS:
            raise ValueError(unknown("interpolation", self.interpolation, get_args(Interpolation)))

    def read(self, source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """uint8 [3, size, size] of an encoded image; waits while others take the memory for decoding."""
        image = open_image(source, max_pixels)
        with BUDGET.room(decode_bytes(image)):
            return self.cut(decoded(image))

    def cut(self, image: Image.Image) -> np.ndarray:
        """uint8 [3, size, size] of an image of any size."""
        image = _not_too_long(image)
        width, height = image.size
        short, long = min(width, height), max(width, height)
        if self.squash:
            image = image.resize((self.resize, self.resize), FILTERS[self.interpolation])
        elif short != self.resize:
            longer = max(self.resize, int(self.resize * long / short))
            wanted = (self.resize, longer) if width <= height else (longer, self.resize)
            image = image.resize(wanted, FILTERS[self.interpolation])
        left, top = (round((side - self.size) / 2.0) for side in image.size)
        image = image.crop((left, top, left + self.size, top + self.size))
        return np.ascontiguousarray(np.asarray(image, np.uint8).transpose(2, 0, 1))

    def normalise(self, images: np.ndarray) -> np.ndarray:
        """uint8 [n, 3, h, w] to the float32 that the network takes."""
        scale = np.array([1 / (255 * s) for s in self.std], np.float32)[:, None, None]
        shift = np.array([-m / s for m, s in zip(self.mean, self.std, strict=True)], np.float32)[:, None, None]
        return images.astype(np.float32) * scale + shift

    def to_json(self) -> dict[str, Any]:
        """What goes without saying is not written: so it was in files from before there was a choice."""
        value = asdict(self)
        for name, usual in (("interpolation", "bilinear"), ("squash", False)):
            if value[name] == usual:
                del value[name]
        return value

    @property
    def is_usual(self) -> bool:
        """Whether readers that know no choice prepare images so."""
        return self.interpolation == "bilinear" and not self.squash

    @staticmethod
    def from_json(value: dict[str, Any]) -> Preprocessing:
        made = Preprocessing(
            int(value["size"]),
            int(value["resize"]),
            tuple(map(float, value["mean"])),
            tuple(map(float, value["std"])),
            value.get("interpolation", "bilinear"),
            value.get("squash", False) is True,
        )
        if not (0 < made.size <= made.resize and len(made.mean) == len(made.std) == 3 and all(s > 0 for s in made.std)):
            raise ValueError("its preprocessing is not valid")
        return made
