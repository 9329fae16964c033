"""Augmentation of photos by torchvision, in the workers that read them: one photo goes in, a uint8 image comes out.

`data.augmentation` names one of them, `data.augmentation_options` change it. A photo's draws follow from the seed and
its place in the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from offramp.data.augment import AUGMENTATIONS

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class PhotoAugmentation:
    """A random part of a photo (`scale` of its area or more), mirrored with probability `flip`, erased with `erase`.

    What is erased is a random box, filled with the mean colour of the data.
    """

    in_workers: ClassVar[bool] = True
    scale: float = 0.08
    flip: float = 0.5
    erase: float = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"data.augmentation_options.{name} must lie between 0 and 1, got {getattr(self, name)!r}"
                )

    def transform(self, image_size: int, mean: tuple[float, ...]) -> Transform:
        """What a worker does with a photo."""
        from torchvision.transforms import v2

        cut = v2.RandomResizedCrop(image_size, scale=(self.scale, 1.0))
        change = v2.Compose([cut, v2.RandomHorizontalFlip(self.flip), *self.colours()])
        erase = v2.RandomErasing(self.erase, value=[round(255 * m) for m in mean])

        def augmented(photo: Image.Image) -> Tensor:
            image = torch.from_numpy(np.array(change(photo))).permute(2, 0, 1)
            return erase(image) if self.erase else image

        return augmented

    def colours(self) -> list[Any]:
        """Further operations on the cut photo."""
        return []


@AUGMENTATIONS.register("crop")
class Crop(PhotoAugmentation):
    """What an image folder does by itself."""


@AUGMENTATIONS.register("trivial")
@dataclass(frozen=True)
class Trivial(PhotoAugmentation):
    """Then one operation of a random kind and strength: TrivialAugment (Müller and Hutter, ICCV 2021)."""

    def colours(self) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.TrivialAugmentWide()]


@AUGMENTATIONS.register("rand")
@dataclass(frozen=True)
class Rand(PhotoAugmentation):
    """Then `operations` of random kinds, all of one `magnitude` (0 to 30): RandAugment (Cubuk et al., 2020)."""

    operations: int = 2
    magnitude: int = 9

    def colours(self) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.RandAugment(self.operations, self.magnitude)]
