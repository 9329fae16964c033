"""mixup (Zhang et al., ICLR 2018) and cutmix (Yun et al., ICCV 2019): images mixed with their neighbours, labels too.

What is mixed how is drawn outside a step, from the seed and its number, as a few numbers for each half; the step itself
then draws nothing. A batch is shuffled already, so a sample's partner is its neighbour: pairs lie within a half and
within a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.seeds import mix
from offramp.runs.config import TrainConfig


@dataclass(frozen=True)
class Mixing:
    """By mixup, cutmix or, drawn for each half, one of both; the numbers are the alphas of their Beta, 0 is off."""

    mixup: float
    cutmix: float
    num_classes: int
    seed: int

    @staticmethod
    def of(config: TrainConfig, num_classes: int, seed: int) -> Mixing | None:
        """As configured, if anything is to be mixed."""
        some = config.mixup > 0 or config.cutmix > 0
        return Mixing(config.mixup, config.cutmix, num_classes, seed) if some else None

    def draw(self, step: int, size: tuple[int, int]) -> Tensor:
        """For both halves of a step: the images' own share outside a box, and the box (top, bottom, left, right)."""
        draw = np.random.default_rng(mix(self.seed, "mixing", step))
        return torch.tensor([self._draw_half(draw, size) for _ in range(2)], dtype=torch.float32)

    def _draw_half(self, draw: np.random.Generator, size: tuple[int, int]) -> tuple[float, ...]:
        cuts = bool(self.cutmix) and (not self.mixup or draw.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        share = draw.beta(alpha, alpha)
        if not cuts:
            return (share, 0.0, 0.0, 0.0, 0.0)
        edges: list[float] = []
        for side in size:
            middle, length = draw.integers(side), int(side * sqrt(1 - share))
            edges += [float(np.clip(middle + half, 0, side)) for half in (-(length // 2), length - length // 2)]
        return (1.0, *edges)

    def mixed(self, images: Tensor, labels: Tensor, recipe: Tensor) -> tuple[Tensor, Tensor]:
        """Images of a half mixed as drawn, and their labels [B, C], in the share of pixels that are still their own."""
        places = torch.arange(len(images), device=images.device)
        partners = (places ^ 1).clamp(max=len(images) - 1)  # the last one of an odd number stays alone
        own = own_shares(recipe, images)
        both = torch.lerp(images[partners], images, own).contiguous(memory_format=torch.channels_last)
        hot = F.one_hot(labels, self.num_classes).to(images.dtype)
        return both, torch.lerp(hot[partners], hot, own.mean())


def own_shares(recipe: Tensor, images: Tensor) -> Tensor:
    """How much of every pixel stays an image's own, [H, W]."""
    share, top, bottom, left, right = recipe.to(images.dtype)
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    box = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return torch.where(box, torch.zeros_like(share), share)
