"""One-for-all distillation (IMTA): every exit but the last also learns from the frozen network's last head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.training.objectives.losses import exit_losses, widened


@dataclass(frozen=True)
class OneForAll:
    """Per-sample losses [B, K] of K logits and, behind them, the teacher's.

    CE at the last exit; (1 - gamma) CE + gamma T^2 KL(teacher || exit) at the others. The KL is summed over the
    classes, so gamma weighs what it says.
    """

    temperature: float = 3.0
    gamma: float = 0.9

    def __call__(self, outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        *logits, teacher = widened(outputs)
        plain_BK = exit_losses(logits, labels)
        target = F.log_softmax(teacher.detach() / self.temperature, dim=1)
        distances = [
            F.kl_div(F.log_softmax(x / self.temperature, dim=1), target, reduction="none", log_target=True).sum(1)
            for x in logits[:-1]
        ]
        gap_BK = self.temperature**2 * torch.stack(distances, dim=1)
        early = (1 - self.gamma) * plain_BK[:, :-1] + self.gamma * gap_BK
        return torch.cat([early, plain_BK[:, -1:]], dim=1)
