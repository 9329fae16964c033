"""Images from anywhere become what a network takes, safely and as torchvision would do it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from offramp.common.images import Preprocessing, UnreadableImage, read_image
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


def test_what_must_not_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableImage, match="not there"):
        read_image(tmp_path / "none.png")
    for broken in (b"", b"text", encoded(noise(50, 50))[:200], encoded(noise(50, 50), "JPEG")[:300]):
        with pytest.raises(UnreadableImage):
            read_image(broken)
    with pytest.raises(UnreadableImage):
        read_image(tmp_path)
    monkeypatch.setattr("offramp.common.images.MAX_PIXELS", 99)
    with pytest.raises(UnreadableImage, match="10 x 10 pixels, more than 99"):
        read_image(encoded(noise(10, 10)))


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    header = encoded(Image.new("1", (30_000, 30_000)))  # a few kilobytes that would become gigabytes
    with pytest.raises(UnreadableImage, match="30000|exceeds limit"):
        read_image(header)


def test_it_goes_to_json_and_back() -> None:
    assert Preprocessing.from_json(OWN.to_json()) == OWN
    for bad in ({"size": 0}, {"resize": 3}, {"std": [0, 1, 1]}, {"mean": [1]}):
        with pytest.raises(ValueError, match="not valid"):
            Preprocessing.from_json({**OWN.to_json(), **bad})
