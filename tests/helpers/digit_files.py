"""Many files of few digits: hard links, which take no time to make."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from offramp import load_dataset


def write_digits(root: Path, count: int) -> Path:
    """PNG files of digits in folders of a hundred, at most 400."""
    thumbs = load_dataset("digits", train=512, calibration=200, test=400).thumbnails("test", np.arange(count))
    for at, image in enumerate(thumbs):
        path = root / f"{at // 100:03d}" / f"{at:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return root


def linked_digits(root: Path, count: int) -> Path:
    """So many names in one folder for the files of 400 digits, which lie beside it."""
    originals = sorted(write_digits(root.with_name(f"{root.name}-originals"), 400).rglob("*.png"))
    root.mkdir()
    for at in range(count):
        os.link(originals[at % 400], root / f"{at:07d}.png")
    return root
