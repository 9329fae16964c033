"""Weightings: how much each sample counts at each exit."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Weighting(Protocol):
    """Gives the weights [B, K] of a half's losses [B, K]."""

    def weights(self, losses_BK: Tensor) -> Tensor: ...


class UniformWeighting:
    """Every sample counts the same at every exit: conventional training."""

    def weights(self, losses_BK: Tensor) -> Tensor:
        return torch.ones_like(losses_BK)
