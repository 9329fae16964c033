"""The loss of every sample at every exit, and their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def exit_losses(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of each sample at each exit, [B, K], in float32 or better."""
    wide = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in logits]
    return torch.stack([F.cross_entropy(x, labels, reduction="none") for x in wide], dim=1)


def weighted_loss(losses_BK: Tensor, weights_BK: Tensor) -> Tensor:
    """The mean over samples of the weighted sum over exits."""
    return (weights_BK * losses_BK).sum(dim=1).mean()  # Eq. 4; Eq. 3 where all weights are one
