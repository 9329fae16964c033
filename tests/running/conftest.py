"""A folder of images as people have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offramp import load_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images in two folders, two files that are none, and one that is no image by name."""
    root = tmp_path_factory.mktemp("images")
    thumbs = load_dataset("digits", train=512, calibration=200, test=400).thumbnails("test", np.arange(30))
    for at, image in enumerate(thumbs):
        path = root / ("a" if at % 2 else "b") / f"{at:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (root / "a" / "broken.jpg").write_bytes(b"not an image")
    (root / "b" / "notes.txt").write_text("not looked at")
    return root
