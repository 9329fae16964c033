"""Inline collaboration (IMTA, Li et al., ICCV 2019): each exit's classifier also reads what the one before it said.

A trained network is frozen; new linear heads on its pooled features f_k are trained:

    h_1 = Lin(f_1);   c_k = ReLU(BN(Lin(h_k)));   h_{k+1} = Lin([f_{k+1}, c_k])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offramp.models.exits import ExitNet, State
from offramp.models.registry import WRAPPERS


def classifier(head: nn.Module) -> nn.Linear:
    """The linear layer of a head of ours."""
    linear = _linear(head)
    if linear is None:
        raise ValueError("collaboration needs heads with `features` and a `linear` layer, as MSDNet's and RANet's")
    return linear


def collaborates(model: ExitNet) -> bool:
    """Whether collaborating classifiers can be put on a network."""
    return all(_linear(head) is not None for head in model.heads)


def _linear(head: nn.Module) -> nn.Linear | None:
    linear = getattr(head, "linear", None)
    return linear if isinstance(linear, nn.Linear) and hasattr(head, "features") else None


class CollaborativeNet(ExitNet):
    """`base` without its linear classifiers, frozen, under collaborating ones; the state carries h_k last."""

    def __init__(self, base: ExitNet) -> None:
        super().__init__(base.num_exits, base.input_shape)
        linears = [classifier(head) for head in base.heads]
        self.widths, classes = [linear.in_features for linear in linears], linears[0].out_features
        for head in base.heads:
            head.linear = nn.Identity()
        self.base = base.requires_grad_(False)
        self.heads = nn.ModuleList(
            nn.Linear(width + (width if k else 0), classes) for k, width in enumerate(self.widths)
        )
        self.passes = nn.ModuleList(
            nn.Sequential(nn.Linear(classes, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
            for width in self.widths[1:]
        )

    @property
    def schedule(self) -> str:  # type: ignore[override]
        return self.base.schedule

    def set_schedule(self, schedule: str) -> CollaborativeNet:
        self.base.set_schedule(schedule)
        return self

    def train(self, mode: bool = True) -> CollaborativeNet:
        """Frozen means frozen: the base's BatchNorm stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        inner, before = (state[:-1], state[-1]) if k > 1 else (state, None)
        feature, onward = self.base_feature(k, inner)
        return self.heard(k, feature, before), onward

    def base_feature(self, k: int, state: State) -> tuple[Tensor, State]:
        """f_k, which the frozen network alone decides."""
        x, onward = self.base.advance(k, state)
        return self.base.heads[k - 1].features(x), onward  # type: ignore[operator]

    def heard(self, k: int, feature: Tensor, before: Tensor | None) -> Tensor:
        """What the k-th classifier sees: f_k and, behind it, what the one before says."""
        return feature if before is None else torch.cat([feature, self.passes[k - 2](before)], dim=1)

    def step(self, k: int, state: State) -> tuple[Tensor, State]:
        feature, onward = self.advance(k, state)
        logits = self.heads[k - 1](feature)
        return logits, (*onward, logits) if k < self.num_exits else ()


WRAPPERS.add("collaboration", CollaborativeNet)
