"""Inline collaboration (IMTA, Li et al., ICCV 2019): each exit's classifier also reads what the one before it said.

A trained network is frozen; new linear heads on its pooled features f_k are trained:

    h_1 = Lin(f_1);   c_k = ReLU(BN(Lin(h_k)));   h_{k+1} = Lin([f_{k+1}, c_k])

Here gradients do flow from a classifier to the one before it.
"""

from __future__ import annotations

from typing import Any

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
    """Whether collaborating classifiers can be put on a network: each passes on what it said in its own way."""
    return not model.carries and all(_linear(head) is not None for head in model.heads)


def _linear(head: nn.Module) -> nn.Linear | None:
    linear = getattr(head, "linear", None)
    return linear if isinstance(linear, nn.Linear) and hasattr(head, "features") else None


class CollaborativeNet(ExitNet):
    """`base` without its linear classifiers, frozen, under collaborating ones; the state carries h_k."""

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

    @property
    def carries(self) -> bool:
        return True

    @property
    def changes_gradients(self) -> bool:
        return False

    @property
    def last_reads_others(self) -> bool:
        return True

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        """f_k, which the frozen network alone decides."""
        x, onward = self.base.advance(k, state)
        return self.base.heads[k - 1].features(x), onward  # type: ignore[operator]

    def answer(self, k: int, feature: Tensor, before: Tensor | None) -> Tensor:
        """h_k, from f_k and what the classifier before it says."""
        seen = feature if before is None else torch.cat([feature, self.passes[k - 2](before)], dim=1)
        return self.heads[k - 1](seen)


@WRAPPERS.register("collaboration")
def _collaborating(model: ExitNet, wanted: Any) -> ExitNet:
    if wanted is not True:
        raise ValueError(f"collaboration must be true or false, got {wanted!r}")
    refuse_both(model)
    return CollaborativeNet(model)


@WRAPPERS.register("carry")
def _carrying(model: ExitNet, share: Any) -> ExitNet:
    """Boosted logits: each exit's answer is its own logits plus `share` times the answer before it."""
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"carry must be a number above 0 and up to 1, got {share!r}")
    refuse_both(model)
    model.carry = float(share)
    return model


def refuse_both(model: ExitNet) -> None:
    """Two ways of passing answers on would not know of each other."""
    if model.carries:
        raise ValueError("carry and collaboration cannot go together: both pass on what the exit before answered")
