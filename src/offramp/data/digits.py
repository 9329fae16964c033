"""Handwritten digits on cluttered colour canvases, with a known difficulty per image; needs no download.

scikit-learn's 1,797 scans of 8x8 pixels are split by scan first, so no scan is both trained and tested on.
Each image draws one scan at a random place, size and angle. With its difficulty (0 easy .. 1 hard) the digit
shrinks, turns and loses contrast, and clutter and noise grow. Everything follows from the seed; the test
split is the same for all seeds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.generators import generator
from offramp.data.augment import ShiftFlip
from offramp.data.dataset import ArrayDataset, Split, register_dataset
from offramp.data.splits import hold_out, with_noise

SIZE = 32
CLUTTER = 4  # at most so many pieces of other digits
TEST_SCANS = 400
CHUNK = 4096


@register_dataset("digits")
def load_digits(
    seed: int = 0, train: int = 6_000, calibration: int = 2_000, test: int = 4_000, label_noise: float = 0.0
) -> ArrayDataset:
    """Draw the three splits; the numbers say how many images each holds, and what share is trained on wrong labels."""
    _check_sizes(train=train, test=test)
    scans, labels = _scans()
    rows = split_scans(labels, seed, calibration / (train + calibration))
    splits = {
        "train": _draw_split(scans, labels, rows["train"], train, ("train", seed)),
        "calibration": _draw_split(scans, labels, rows["calibration"], calibration, ("calibration", seed)),
        "test": _draw_split(scans, labels, rows["test"], test, ("test", 0)),
    }
    drawn = splits["train"]
    splits["train"] = replace(drawn, labels=with_noise(drawn.labels, label_noise, 10, seed))
    names = tuple(str(d) for d in range(10))
    return ArrayDataset("digits", names, splits, (0.5,) * 3, (0.25,) * 3, ShiftFlip(pad=2), label_noise)


def split_scans(labels: np.ndarray, seed: int, calibration_share: float) -> dict[str, np.ndarray]:
    """Which scans each split draws from; no scan is in two of them."""
    pool, test = hold_out(labels, TEST_SCANS, 0, "test")
    scans = max(10, round(calibration_share * len(pool))) if calibration_share else 0
    kept, held = hold_out(labels[pool], scans, seed, "calibration")
    return {"train": pool[kept], "calibration": pool[held], "test": test}


def _check_sizes(**sizes: int) -> None:
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field} must be 1 or more images, got {size}")


def _scans() -> tuple[Tensor, np.ndarray]:
    from sklearn.datasets import load_digits as load_scans

    scans = load_scans()
    return torch.from_numpy(scans.images / 16).float()[:, None], scans.target.astype(np.int64)


def _draw_split(scans: Tensor, labels: np.ndarray, rows: np.ndarray, n: int, key: tuple[str, int]) -> Split:
    draw = generator("digits", *key)
    if n == 0 or len(rows) == 0:
        empty = np.zeros(0, np.int64)
        return Split(np.zeros((0, 3, SIZE, SIZE), np.uint8), empty, empty, empty.astype(np.float32))
    own = scans[torch.from_numpy(rows)]
    picked = torch.randint(len(rows), (n,), generator=draw)
    difficulty = torch.rand(n, generator=draw)
    images = [_render(own, picked[at : at + CHUNK], difficulty[at : at + CHUNK], draw) for at in range(0, n, CHUNK)]
    drawn = labels[rows[picked.numpy()]]
    return Split(torch.cat(images).numpy(), drawn, np.arange(n), difficulty.numpy())


def _render(scans: Tensor, picked: Tensor, difficulty: Tensor, draw: torch.Generator) -> Tensor:
    """uint8 images [n, 3, SIZE, SIZE] of the picked scans."""
    n = len(picked)
    hard = difficulty.view(n, 1, 1, 1)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand((n, *shape), generator=draw)

    background, ink = _colours(difficulty, uniform(0, 1, 3), uniform(-1, 1, 3), uniform(0, 1, 1))
    slope = _gradient(uniform(-1, 1, 2))
    canvas = background + 0.25 * hard * slope
    for piece in range(CLUTTER):
        other = scans[torch.randint(len(scans), (n,), generator=draw)]
        place = _place(uniform(5, 11), uniform(-180, 180), uniform(-1, 1, 2))
        present = (uniform(0, CLUTTER) + piece < CLUTTER * difficulty * 1.2).float().view(n, 1, 1, 1)
        mask = _paste(other, place) * present * (0.3 + 0.5 * hard)
        canvas = canvas + mask * (uniform(0, 1, 3).view(n, 3, 1, 1) - canvas)
    size = uniform(25, 28) - difficulty * uniform(4, 13)
    angle = uniform(-1, 1) * (2 + 33 * difficulty)
    shift = uniform(-0.5, 0.5, 2) * (0.2 + 0.8 * difficulty[:, None])
    mask = _paste(scans[picked], _place(size, angle, shift))
    canvas = canvas + mask * (ink - canvas)
    noise = torch.randn(canvas.shape, generator=draw) * (0.02 + 0.14 * hard)
    return ((canvas + noise).clamp(0, 1) * 255).round().to(torch.uint8)


def _colours(difficulty: Tensor, base: Tensor, tint: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """Background and ink: with the difficulty contrast falls, and dark ink on a bright ground grows likelier."""
    contrast = (0.8 - 0.45 * difficulty)[:, None]
    low = base.mean(1, keepdim=True) * (1 - contrast)
    darker, brighter = low + 0.08 * tint, low + contrast - 0.08 * tint
    dark_ink = side < 0.5 * difficulty[:, None]
    background, ink = torch.where(dark_ink, brighter, darker), torch.where(dark_ink, darker, brighter)
    return background[:, :, None, None], ink[:, :, None, None]


def _gradient(direction: Tensor) -> Tensor:
    """A slope over the canvas, between -1 and 1."""
    line = torch.linspace(-1, 1, SIZE)
    return (direction[:, :1, None] * line[None, :, None] + direction[:, 1:, None] * line[None, None, :])[:, None] / 2


def _place(size: Tensor, angle: Tensor, shift: Tensor) -> Tensor:
    """The affine maps [n, 2, 3] from canvas to scan; an upright scan stays inside for shifts in -1/2 .. 1/2."""
    scale = SIZE / size
    turn = torch.deg2rad(angle)
    cos, sin = scale * turn.cos(), scale * turn.sin()
    room = (1 - size / SIZE).clamp(min=0)[:, None] * 2
    x, y = (shift * room).unbind(1)
    return torch.stack([cos, -sin, -cos * x + sin * y, sin, cos, -sin * x - cos * y], 1).view(-1, 2, 3)


def _paste(scans: Tensor, place: Tensor) -> Tensor:
    """The scans as masks on the canvas, 0 where there is no ink."""
    grid = F.affine_grid(place, [len(scans), 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(scans, grid, mode="bicubic", align_corners=False).clamp(0, 1)
