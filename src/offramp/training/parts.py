"""What is trained of a network: everything, its heads on what is frozen, or the network for its last exit alone.

What is frozen has no gradients and stays in evaluation mode, so that it answers afterwards as it did before. Frozen
features are computed once for a loader batch, without a graph, however often a step comes back to its images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offramp.models.exits import ExitNet, State


def part_to_train(model: ExitNet, parts: str) -> nn.Module:
    """What is called in training where `parts` of the network are trained; what else it has is frozen."""
    if parts == "all":
        return model
    if parts == "last_exit":
        refuse_dependent_last(model, "train.parts=last_exit trains the network for its last exit alone")
        return LastExit(model)
    if parts == "inner_heads":
        refuse_dependent_last(model, "train.parts=inner_heads leaves the last exit as it is")
        if not inner_heads(model):
            raise ValueError("train.parts=inner_heads needs a network with more than one exit, and more than one head")
        return HeadsOnFeatures(model, inner_heads(model))
    if next(model.heads[-1].parameters(), None) is None:
        raise ValueError(
            "train.parts=heads does not reach the last exit's classifier, which lies within this network; use "
            "train.parts=inner_heads, or train everything"
        )
    return HeadsOnFeatures(model, list(model.heads))


def refuse_dependent_last(model: ExitNet, why: str) -> None:
    """Raise where the last exit's answer depends on what earlier exits say."""
    if model.last_reads_others:
        raise ValueError(
            f"{why}, but here its answer depends on earlier ones (carry, or a head that reads the exit before); leave "
            "one of them out"
        )


def inner_heads(model: ExitNet) -> list[nn.Module]:
    """The heads that share nothing with the last one, as those of one network at several sizes may."""
    last = {id(param) for param in model.heads[-1].parameters()}
    return [head for head in model.heads[:-1] if last.isdisjoint(map(id, head.parameters()))]


def freeze_norms(model: ExitNet) -> None:
    """Let every BatchNorm outside of heads normalise by the statistics it has, and keep them."""
    own = {id(part) for head in model.heads for part in head.modules()}
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and id(part) not in own:
            part.eval()


class HeadsOnFeatures(nn.Module):
    """A frozen network of which these `heads` are trained. It is called with the features that `prepare` gives."""

    def __init__(self, model: ExitNet, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self._trained = tuple(heads)  # no ModuleList: they are the network's already
        for head in self._trained:
            head.requires_grad_(True)

    def train(self, mode: bool = True) -> HeadsOnFeatures:
        super().train(False)
        for head in self._trained:
            head.train(mode)
        self.training = mode
        return self

    @torch.no_grad()
    def prepare(self, images: Tensor) -> tuple[Tensor, None]:
        """What the heads read, side by side, one row for an image."""
        found: list[Tensor] = []
        state: State = (images,)
        for k in range(1, self.model.num_exits + 1):
            feature, state = self.model.advance(k, state)
            found.append(feature)
        self.shapes = [feature.shape[1:] for feature in found]
        return torch.cat([feature.flatten(1) for feature in found], dim=1), None

    def forward(self, features: Tensor) -> list[Tensor]:
        each = features.split([shape.numel() for shape in self.shapes], dim=1)
        seen = [x.unflatten(1, shape) for x, shape in zip(each, self.shapes, strict=True)]
        outputs: list[Tensor] = []
        for k, x in enumerate(seen, 1):
            maps = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
            outputs.append(self.model.answer(k, maps, outputs[-1] if outputs else None))
        return outputs


class LastExit(nn.Module):
    """A network with one exit, its last: inner heads do not run."""

    num_exits = 1

    def __init__(self, model: ExitNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.model.last(images)]
