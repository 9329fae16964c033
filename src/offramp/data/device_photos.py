"""Random resized crops of photos that lie on the device: one kernel for a batch instead of a worker for each photo.

Photos are kept whole, squeezed to squares; how wide each one was decides which box of the square is a box of the photo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.data.augment import AUGMENTATIONS

LARGER = 2.0  # a kept square over the images that are cut from it: a quarter of its area still fills one
TRIES = 10  # boxes drawn for each photo; the first that fits is taken, as torchvision does


@AUGMENTATIONS.register("device-crop")
@dataclass(frozen=True)
class DeviceCrop:
    """A random part of each photo (`scale` of its area or more, sides 3:4 to 4:3), mirrored with probability `flip`."""

    keeps_photos: ClassVar[bool] = True
    scale: float = 0.08
    flip: float = 0.5

    def __post_init__(self) -> None:
        for name in ("scale", "flip"):
            if not 0 <= getattr(self, name) <= 1:
                value = getattr(self, name)
                raise ValueError(f"data.augmentation_options.{name} must lie between 0 and 1, got {value!r}")

    def side(self, image_size: int) -> int:
        """Of the squares that are kept."""
        return round(LARGER * image_size)

    def __call__(self, photos: Tensor, widths: Tensor, size: int, draw: torch.Generator) -> Tensor:
        """Photos [n, 3, s, s], `widths` times as wide as high, to float [n, 3, size, size] of 0 to 255."""
        boxes = self.boxes(widths, draw)
        mirrored = 1 - 2 * (torch.rand(len(photos), generator=draw, device=photos.device) < self.flip).float()
        left, top, width, height = boxes.unbind(1)
        none = torch.zeros_like(left)
        across = torch.stack([width * mirrored, none, 2 * left + width - 1], dim=1)
        down = torch.stack([none, height, 2 * top + height - 1], dim=1)
        grid = F.affine_grid(torch.stack([across, down], dim=1), [len(photos), 3, size, size], align_corners=False)
        return F.grid_sample(photos.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)

    def boxes(self, widths: Tensor, draw: torch.Generator) -> Tensor:
        """Left, top, width and height of a box in each photo, as shares of its sides, [n, 4]."""
        n, device = len(widths), widths.device
        area, shape, left, top = torch.rand(4, n, TRIES, generator=draw, device=device)
        area = self.scale + (1 - self.scale) * area
        shape = ((2 * shape - 1) * torch.log(torch.tensor(4 / 3, device=device))).exp()
        width = (area * shape / widths[:, None]).sqrt()
        height = (area * widths[:, None] / shape).sqrt()
        first = ((width <= 1) & (height <= 1)).float().argmax(1, keepdim=True)  # 0 if none fits
        width, height = (side.gather(1, first).clamp(max=1) for side in (width, height))
        left, top = left.gather(1, first) * (1 - width), top.gather(1, first) * (1 - height)
        return torch.cat([left, top, width, height], dim=1)
