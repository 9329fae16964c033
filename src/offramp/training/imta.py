"""IMTA (Li et al., ICCV 2019), the paper's companion technique, on hooks that any other may use.

Gradient equilibrium is a `fork` of the network: what happens to a feature that both a head and the next stage read. The
second phase trains collaborating classifiers (models/collaboration.py) on a frozen network: a `prepare` of the method
runs the frozen part and the teacher once for a loader batch, and the objective distils from the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from offramp.models.collaboration import CollaborativeNet, classifier
from offramp.models.exits import State
from offramp.models.registry import load_model
from offramp.runs.config import ImtaConfig, RunConfig
from offramp.training.forks import register_fork
from offramp.training.objectives import Half, distances, distilled, exit_losses


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradients are scaled; tangents too, or the meta-gradient would be silently wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()  # a view would need a view as tangent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return ctx.factor * tangent


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` itself; whatever is derived through it is scaled by `factor`."""
    return cast(Tensor, _ScaledGradient.apply(x, factor))


@register_fork("equilibrium")
@dataclass(frozen=True)
class GradientEquilibrium:
    """A fork: stage k receives (g_head + (K-k) g_next) / (K-k+1)."""

    num_exits: int
    changes_gradients = True  # they are not those of the forward: no difference of forward passes can see them

    def __call__(self, k: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        left = self.num_exits - k
        feature = scale_gradient(feature, 1 / (left + 1))
        return feature, scale_gradient(feature, float(left))


@dataclass(frozen=True)
class OneForAll:
    """One-for-all distillation: every exit but the last also learns from the teacher.

    CE at the last exit; (1 - gamma) CE + gamma T^2 KL(teacher || exit) at the others. The KL is summed over the
    classes, so gamma weighs what it says.
    """

    temperature: float
    gamma: float
    terms = 2

    def __call__(self, outputs: Sequence[Tensor], half: Half) -> Tensor:
        assert half.teacher is not None
        plain_BK = exit_losses(outputs, half.labels)
        return distilled(plain_BK, distances(outputs[:-1], half.teacher, self.temperature), self.gamma)

    @staticmethod
    def of(config: ImtaConfig) -> OneForAll:
        return OneForAll(config.temperature, config.gamma)


class OnFrozenFeatures(nn.Module):
    """What the second phase trains: collaborating classifiers, called with the frozen network's features."""

    def __init__(self, net: CollaborativeNet, teacher: nn.Linear) -> None:
        super().__init__()
        self.net = net
        self.teacher = teacher.requires_grad_(False)

    @torch.no_grad()
    def prepare(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """f_1 ... f_K side by side, one row per image, and the logits of the frozen network's own last head."""
        state: State = (images,)
        found: list[Tensor] = []
        for k in range(1, self.net.num_exits + 1):
            feature, state = self.net.advance(k, state)
            found.append(feature)
        return torch.cat(found, dim=1), self.teacher(found[-1])

    def forward(self, features: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        for k, feature in enumerate(features.split(self.net.widths, dim=1), 1):
            outputs.append(self.net.answer(k, feature, outputs[-1] if outputs else None))
        return outputs


def without_collaboration(config: RunConfig) -> RunConfig:
    """The first phase of a run with collaboration."""
    overrides = {k: v for k, v in config.model.overrides.items() if k != "collaboration"}
    model = replace(config.model, overrides=overrides)
    return replace(config, model=model, imta=replace(config.imta, collaboration=False))


def on_top_of(phase1: Path, model: CollaborativeNet) -> OnFrozenFeatures:
    """Put the first phase's network under the collaborating heads; its own last head becomes the teacher."""
    trained = load_model(phase1)
    teacher = classifier(trained.heads[-1])
    under = {k: v for k, v in trained.state_dict().items() if k in model.base.state_dict()}
    model.base.load_state_dict(under)
    return OnFrozenFeatures(model, teacher)
