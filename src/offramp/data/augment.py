"""Batched augmentation and normalisation of uint8 images, on whatever device they are on.

An augmentation is called as `augmentation(images, draw)` with uint8 images [n, c, h, w] and a `torch.Generator`, and
returns as many images of the same size. `data.augmentation` names one; without, each data set has its own.
`data.augmentation_options` are further arguments of it. Those of photos.py run in workers, on one photo each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.registry import Registry

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
AUGMENTATIONS: Registry[Callable[..., Any]] = Registry("augmentation")
register_augmentation = AUGMENTATIONS.register  # a function called as `augmentation(images, draw, **options)`


def runs_in_workers(augmentation: object) -> bool:
    """Whether it is for single photos, in the workers that read them, and not for batches on the device."""
    return bool(getattr(augmentation, "in_workers", False))


def keeps_photos(augmentation: object) -> bool:
    """Whether it is for photos that are read once and lie on the device."""
    return bool(getattr(augmentation, "keeps_photos", False))


def new_augmentation(name: str, options: Mapping[str, Any]) -> Any:
    """The augmentation of this name, with its options."""
    entry = AUGMENTATIONS[name]
    try:
        if runs_in_workers(entry) or keeps_photos(entry):
            return entry(**options)
        inspect.signature(entry).bind(None, None, **options)
    except TypeError as error:
        raise ValueError(f"data.augmentation_options do not fit the augmentation {name!r}: {error}") from error
    return partial(entry, **options) if options else entry


@dataclass(frozen=True)
class ShiftFlip:
    """Pad with zeros by `pad`, crop back to the old size at a random place, mirror half of the images."""

    pad: int = 0
    flip: bool = False

    def __call__(self, images: Tensor, draw: torch.Generator) -> Tensor:
        if not self.pad and not self.flip:
            return images
        n, channels, height, width = images.shape
        device, places = images.device, 2 * self.pad + 1
        top = torch.randint(places, (n, 1), generator=draw, device=device)
        left = torch.randint(places, (n, 1), generator=draw, device=device)
        rows = top + torch.arange(height, device=device)
        columns = left + torch.arange(width, device=device)
        if self.flip:
            mirrored = torch.rand((n, 1), generator=draw, device=device) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        # One gather per image instead of a Python loop over crops.
        places_flat = rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]
        padded = F.pad(images, [self.pad] * 4).flatten(2)
        picked = padded.gather(2, places_flat.view(n, 1, -1).expand(-1, channels, -1))
        return picked.view(n, channels, height, width)


AUGMENTATIONS.add("none", ShiftFlip())
AUGMENTATIONS.add("shift-2", ShiftFlip(pad=2))
AUGMENTATIONS.add("shift-4-flip", ShiftFlip(pad=4, flip=True))


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [n, c, h, w] to float32 with the given mean and standard deviation per channel, NHWC in memory."""
    scale, shift = _constants(mean, std, images.device)
    return torch.addcmul(shift, images.to(torch.float32, memory_format=torch.channels_last), scale)


@lru_cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift per channel, made once: a copy to the device at every step would wait for it."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)
