"""What is minimised: the loss of every sample at every exit, the exit each sample is allocated to, and sums over both.

An objective is called with the K logits of a half and the half itself, and returns losses [B, K]; `objective.name`
names one. Nothing here sees a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.registry import Registry
from offramp.measuring.confidence import measured
from offramp.measuring.thresholds import exit_counts
from offramp.runs.config import ObjectiveConfig


@dataclass(frozen=True)
class Half:
    """One half of a loader batch: what the network is called with, labels, and a teacher's logits if there is one."""

    images: Tensor
    labels: Tensor
    teacher: Tensor | None = None


Objective = Callable[[Sequence[Tensor], Half], Tensor]
OBJECTIVES: Registry[Callable[..., Objective]] = Registry("objective")
register_objective = OBJECTIVES.register  # a class or function that makes an objective from its options


def new_objective(settings: ObjectiveConfig) -> Objective:
    """The objective that the settings name."""
    try:
        return OBJECTIVES[settings.name](**settings.options)
    except TypeError as error:
        raise ValueError(f"objective.options do not fit the objective {settings.name!r}: {error}") from error


def in_full_precision(logits: Sequence[Tensor]) -> list[Tensor]:
    """The logits in float32 or better: losses and confidences are never computed in 16 bits."""
    return [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in logits]


def exit_losses(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of each sample at each exit, [B, K]."""
    return torch.stack([F.cross_entropy(x, labels, reduction="none") for x in in_full_precision(logits)], dim=1)


def cross_entropy(logits: Sequence[Tensor], half: Half) -> Tensor:
    """The usual objective."""
    return exit_losses(logits, half.labels)


@register_objective("cross_entropy")
def _cross_entropy() -> Objective:
    return cross_entropy


@torch.no_grad()
def exit_confidences(logits: Sequence[Tensor]) -> Tensor:
    """The largest softmax probability of each sample at each exit, [B, K]."""
    return torch.stack([measured(x.softmax(1), "max_softmax", torch) for x in in_full_precision(logits)], dim=1)


def weighted_loss(losses_BK: Tensor, weights_BK: Tensor, samples: int | None = None) -> Tensor:
    """The mean over samples of the weighted sum over exits; `samples` of the global batch, if it is larger."""
    # Eq. 4; Eq. 3 where all weights are one
    return (weights_BK * losses_BK).sum(dim=1).sum() / (samples or len(losses_BK))


@torch.no_grad()
def allocate(confidences_NK: Tensor, q: float) -> Tensor:
    """The exit (1..K) that each sample of a batch would leave at.

    Exit k takes its share of samples, the most confident among those not yet taken; the last takes the rest. Among
    equal confidences the earlier row goes first. No Python loop over samples, no wait for the device.
    """
    samples, num_exits = confidences_NK.shape
    exits = torch.full((samples,), num_exits, dtype=torch.int64, device=confidences_NK.device)
    lowest = torch.finfo(confidences_NK.dtype).min
    free = confidences_NK.nan_to_num(nan=lowest, neginf=lowest)  # a copy; minus infinity marks who has left
    for k, count in enumerate(exit_counts(samples, num_exits, q)[:-1], start=1):
        order = torch.sort(free[:, k - 1], descending=True, stable=True).indices
        taken = order[:count]
        exits.index_fill_(0, taken, k)
        free.index_fill_(0, taken, -torch.inf)
    return exits


def mean_weights(exits_N: Tensor, num_exits: int) -> Tensor:
    """[N, K]: 1/N_k where a sample was allocated to exit k, else 0, so that losses sum to means per exit."""
    chosen = F.one_hot(exits_N - 1, num_exits)
    return chosen / chosen.sum(0).clamp(min=1)
