"""Images from anywhere become what a network takes, safely and as torchvision would do it."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from offramp.common.images import DecodeBudget, Preprocessing, UnreadableImage, read_image
from offramp.data.augment import normalise

OWN = Preprocessing(24, 28, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


SIZES = [(28, 28), (50, 31), (31, 50), (28, 90), (10, 13), (200, 24), (29, 28), (1, 1), (400, 20)]


@pytest.mark.parametrize("size", SIZES)
def test_cutting_is_torchvisions(size: tuple[int, int]) -> None:
    theirs = v2.Compose([v2.Resize(28), v2.CenterCrop(24)])
    image = noise(*size)
    np.testing.assert_array_equal(OWN.cut(image), np.asarray(theirs(image)).transpose(2, 0, 1))


def test_a_line_of_pixels_does_not_become_gigabytes() -> None:
    line = np.zeros((1, 60_001, 3), np.uint8)
    line[:, 29_990:30_011] = 200
    assert (OWN.cut(Image.fromarray(line)) == 200).all()  # the middle
    assert OWN.cut(Image.fromarray(line.transpose(1, 0, 2))).shape == (3, 24, 24)


def test_an_image_of_the_right_size_is_left_alone() -> None:
    same = Preprocessing(32, 32, (0, 0, 0), (1, 1, 1))
    image = noise(32, 32)
    np.testing.assert_array_equal(same.cut(image), np.asarray(image).transpose(2, 0, 1))


def test_normalising_is_what_training_does() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 5), dtype=np.uint8)
    theirs = normalise(torch.from_numpy(images), OWN.mean, OWN.std).numpy()
    np.testing.assert_allclose(OWN.normalise(images), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "HSV", "LAB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    grey = Image.fromarray(np.full((9, 7), 40000, np.uint16)) if mode == "I;16" else noise(7, 9).convert("L")
    image = grey if mode == "I;16" else noise(7, 9).convert(mode) if mode not in ("I", "F") else grey.convert(mode)
    kind = "TIFF" if mode in ("CMYK", "YCbCr", "I", "F", "LAB", "I;16") else "PNG" if mode != "HSV" else None
    if kind is None:
        image, kind = image.convert("RGB"), "PNG"
    found = read_image(encoded(image, kind))
    assert found.mode == "RGB" and found.size == (7, 9)
    if mode == "I;16":
        assert np.asarray(found)[0, 0].tolist() == [155, 155, 155]


def test_transparency_becomes_white_and_exif_turns() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert np.asarray(read_image(encoded(clear)))[0, 0].tolist() == [255, 255, 255]
    exif = Image.Exif()
    exif[274] = 6  # lies on its side
    assert read_image(encoded(noise(10, 20), "JPEG", exif=exif)).size == (20, 10)


def test_what_must_not_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="not there"):
        read_image(tmp_path / "none.png")
    for broken in (b"", b"text", encoded(noise(50, 50))[:200], encoded(noise(50, 50), "JPEG")[:300]):
        with pytest.raises(UnreadableImage):
            read_image(broken)
    with pytest.raises(UnreadableImage):
        read_image(tmp_path)
    with pytest.raises(UnreadableImage, match="10 x 10 pixels, more than 99"):
        read_image(encoded(noise(10, 10)), max_pixels=99)


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    header = encoded(Image.new("1", (30_000, 30_000)))  # a few kilobytes that would become gigabytes
    with pytest.raises(UnreadableImage, match="30000|exceeds limit"):
        read_image(header)


def test_it_goes_to_json_and_back() -> None:
    assert Preprocessing.from_json(OWN.to_json()) == OWN
    for bad in ({"size": 0}, {"resize": 3}, {"std": [0, 1, 1]}, {"mean": [1]}):
        with pytest.raises(ValueError, match="not valid"):
            Preprocessing.from_json({**OWN.to_json(), **bad})


KINDS = {
    "palette": lambda: encoded(noise(70, 45).quantize(16), transparency=3),
    "16 bits": lambda: encoded(Image.fromarray(np.arange(70 * 45, dtype=np.uint16).reshape(45, 70) * 20)),
    "alpha": lambda: encoded(noise(70, 45).convert("RGBA")),
    "cmyk": lambda: encoded(noise(70, 45).convert("CMYK"), "TIFF"),
    "floats": lambda: encoded(Image.fromarray(np.linspace(-3, 90, 70 * 45, dtype=np.float32).reshape(45, 70)), "TIFF"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_converting_in_bands_is_converting_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = KINDS[kind]()
    whole = np.asarray(read_image(data))
    monkeypatch.setattr("offramp.common.images.BAND_PIXELS", 200)
    assert np.array_equal(np.asarray(read_image(data)), whole)


MEGA = 1_000_000


def test_memory_for_decoding_is_shared() -> None:
    budget, order = DecodeBudget(100 * MEGA), []
    held = threading.Event()

    def second() -> None:
        with budget.room(60 * MEGA):
            order.append("second")

    with budget.room(70 * MEGA):
        thread = threading.Thread(target=second)
        thread.start()
        held.wait(0.2)
        with budget.room(10 * MEGA):  # a small one waits for nobody
            order.append("small")
        order.append("first")
    thread.join(10)
    assert order == ["small", "first", "second"] and budget.held == 0
    with budget.room(1000 * MEGA):  # more than there is, but alone
        pass


def test_what_takes_more_memory_may_have_fewer_pixels() -> None:
    webp, png = encoded(noise(100, 90), "WEBP"), encoded(noise(100, 90))
    assert read_image(png, max_pixels=9000).size == (100, 90)
    with pytest.raises(UnreadableImage, match="100 x 90 pixels, more than 5,400"):
        read_image(webp, max_pixels=9000)


@pytest.mark.slow
def test_no_kind_of_image_takes_more_memory_than_is_reckoned_with(tmp_path: Path) -> None:
    """Each in a process of its own, at the largest size allowed: peak memory against the estimate."""
    side, turned = 4900, Image.Exif()
    turned[274] = 6
    files = {
        "p.png": (Image.new("P", (side, side)), {"transparency": 0}),
        "16.png": (Image.fromarray(np.zeros((side, side), np.uint16)), {}),
        "rgba.png": (Image.new("RGBA", (side, side)), {}),
        "turned.jpg": (Image.new("RGB", (side, side)), {"exif": turned}),
        "cmyk.jpg": (Image.new("CMYK", (side, side)), {"exif": turned}),
        "a.webp": (Image.new("RGBA", (3800, 3800)), {}),
        "i.tif": (Image.fromarray(np.zeros((side, side), np.int32)), {"compression": "tiff_deflate"}),
        "strip.tif": (Image.new("RGBA", (side, side)), {"compression": "tiff_deflate", "tiffinfo": {278: side}}),
    }
    script = (
        "import sys; from offramp.common.images import *; own = Preprocessing(224, 256, (0.5,) * 3, (0.2,) * 3)\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1]) * 1024\n"
        "data = open(sys.argv[1], 'rb').read(); need = decode_bytes(open_image(data)); before = peak()\n"
        "own.read(data); print(peak() - before, need)\n"
    )
    for name, (image, options) in files.items():
        image.save(tmp_path / name, **options)
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], capture_output=True, text=True)
        took, need = map(int, done.stdout.split())
        assert took <= need + 20e6 and need <= 300e6, name


def test_a_damaged_tiff_prints_nothing_of_its_own(tmp_path: Path) -> None:
    whole = encoded(noise(60, 60), "TIFF", compression="tiff_lzw")
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    (tmp_path / "a.tif").write_bytes(damaged)
    script = (
        "import sys; from offramp.common.images import *\n"
        "if sys.argv[2] == 'quiet': quiet_pillow()\n"
        "try: read_image(sys.argv[1])\n"
        "except UnreadableImage as error: print(error)\n"
    )
    loud, quiet = (
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.tif"), how], capture_output=True, text=True)
        for how in ("loud", "quiet")
    )
    assert "LZW" in loud.stderr and quiet.stderr == "" and quiet.stdout == loud.stdout
