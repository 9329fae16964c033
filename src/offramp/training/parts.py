"""What is trained of a network: everything, its heads on what is frozen, or the network for its last exit alone.

What is frozen has no gradients and stays in evaluation mode, so that it answers afterwards as it did before. Frozen
features are computed once for a loader batch, without a graph, however often a step comes back to its images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offramp.models.exits import ExitNet, State, reads_before


def part_to_train(model: ExitNet, parts: str) -> nn.Module:
    """What is called in training where `parts` of the network are trained; what else it has is frozen."""
    if parts == "all":
        return model
    if parts == "last_exit":
        return LastExit(model)
    if parts == "inner_heads" and model.num_exits == 1:
        raise ValueError("train.parts=inner_heads needs a network with more than one exit")
    if parts == "inner_heads" and last_reads_others(model):
        raise ValueError(
            "train.parts=inner_heads leaves the last exit as it is, but here its answer depends on earlier ones "
            "(carry, or a head that reads the exit before); use train.parts=heads"
        )
    return HeadsOnFeatures(model, inner=parts == "inner_heads")


def freeze_norms(model: ExitNet) -> None:
    """Let every BatchNorm outside of heads normalise by the statistics it has, and keep them."""
    own = {id(part) for head in model.heads for part in head.modules()}
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and id(part) not in own:
            part.eval()


def last_reads_others(model: ExitNet) -> bool:
    """Whether the last exit's answer depends on what earlier exits say."""
    return bool(model.carry) or reads_before(model.heads[-1])


class HeadsOnFeatures(nn.Module):
    """A frozen network whose heads are trained, all of them or the `inner` ones: all but the last.

    It is called with the frozen features, which `prepare` gives.
    """

    def __init__(self, model: ExitNet, inner: bool) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self._trained = list(model.heads[:-1] if inner else model.heads)  # a list: they are the network's already
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
