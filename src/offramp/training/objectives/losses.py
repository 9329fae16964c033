"""The loss of every sample at every exit, their weighted sum, and the meta objective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

META_OBJECTIVES = ("allocated", "whole")


def widened(logits: Sequence[Tensor]) -> list[Tensor]:
    """The logits in float32 or better: losses and confidences are never computed in half precision."""
    return [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in logits]


def exit_losses(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of each sample at each exit, [B, K]."""
    return torch.stack([F.cross_entropy(x, labels, reduction="none") for x in widened(logits)], dim=1)


@torch.no_grad()
def exit_confidences(logits: Sequence[Tensor]) -> Tensor:
    """The largest softmax probability of each sample at each exit, [B, K]."""
    return torch.stack([x.softmax(1).amax(1) for x in widened(logits)], dim=1)


def weighted_loss(losses_BK: Tensor, weights_BK: Tensor, samples: int | None = None) -> Tensor:
    """The mean over samples of the weighted sum over exits; `samples` of the global batch, if it is larger."""
    # Eq. 4; Eq. 3 where all weights are one
    return (weights_BK * losses_BK).sum(dim=1).sum() / (samples or len(losses_BK))


def mean_weights(exits_N: Tensor, num_exits: int) -> Tensor:
    """[N, K]: 1/N_k where a sample was allocated to exit k, else 0, so that losses sum to means per exit."""
    chosen = F.one_hot(exits_N - 1, num_exits)
    return chosen / chosen.sum(0).clamp(min=1)
