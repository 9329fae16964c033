"""Learning rates: the cosine they follow, and how they are set where a recorded step reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine(step: int, total: int) -> float:
    """The share of the initial rate at `step` of `total`: from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One rate for all groups; a rate that lies on the device is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Rates as tensors, so that a recorded step reads them anew each time."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
