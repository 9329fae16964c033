"""What is in a folder, before anything is trained."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from offramp.data.listing import list_folder
from offramp.fitting.looking import half_width, look_at, typical_sides
from offramp.fitting.sentences import found_sentence


def test_images_classes_splits_and_sizes_are_counted(image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=3, train=30, val=5)
    for at in range(4):
        (root / f"train/class2/train{at:03d}.png").unlink()
    look = look_at(root, list_folder(root))
    assert (look.name, look.images, look.classes) == ("images", 101, 3)
    assert look.smallest == ("class2", 26) and look.largest == ("class0", 30)
    assert look.splits == {"train": 77, "calibration": 9, "test": 15}
    assert (look.side, look.longer) == (50, 54)  # 40 to 69 high, 50 wide
    assert not look.duplicates
    assert (
        "101 images of 3 classes, from 26 (class2) to 30 (class0) of each to learn from; about 50 x 54"
        in found_sentence(look)
    )


def test_the_same_photo_in_two_splits_is_named(image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=2, train=30, val=5)
    twin = root / "val/class1/other-name.png"
    shutil.copy(root / "train/class1/train007.png", twin)
    look = look_at(root, list_folder(root))
    assert [first for first, _ in look.duplicates] == [str(twin)]
    assert look.duplicates[0][1].endswith("train/class1/train007.png")
    assert any("1 image of the test split is trained on too" in text and str(twin) in text for text in look.warnings)


def test_too_few_images_are_said_with_what_would_help(image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=4, train=9, val=3)
    few, test = look_at(root, list_folder(root)).warnings
    assert few.startswith("4 of 4 classes have fewer than 20 images to train on (class0, class1, class2 and 1 more)")
    assert test.startswith("12 test images") and re.search(r"with about \d+00 it would be 5", test)
    assert half_width(12) > 15 and half_width(10_000) < 1


def test_how_large_images_are_is_told_from_their_heads(tmp_path: Path) -> None:
    """Whatever the limit on pixels is, which has its own setting."""
    Image.new("1", (6000, 5000)).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert typical_sides([tmp_path / "large.png", tmp_path / "broken.png"]) == (5000, 6000)
    with pytest.raises(ValueError, match="none of the images that were tried can be read"):
        typical_sides([tmp_path / "broken.png"])
