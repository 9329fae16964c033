"""The small modules that MSDNet and RANet share: conv-BN-ReLU, the bottleneck unit and the head.

Plain modules: training puts others in their place (training/tape.py) that keep values for a tangent pass and use
kernels of our own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvBNReLU(nn.Sequential):
    """Convolution (padding k//2), BatchNorm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1, bias: bool = False) -> None:
        conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=bias)
        super().__init__(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Join(nn.Module):
    """Maps of one size side by side, along the channels."""

    def forward(self, *maps: Tensor) -> Tensor:
        return torch.cat(maps, dim=1)


class Unit(nn.Sequential):
    """U(in -> out, stride, b): a 1x1 bottleneck of min(in, b*out) channels, then a 3x3 with the stride."""

    def __init__(self, channels: int, out: int, factor: int, stride: int = 1) -> None:
        width = min(channels, factor * out)
        super().__init__(ConvBNReLU(channels, width, kernel=1), ConvBNReLU(width, out, stride=stride))


class DenseUnit(nn.Module):
    """cat[x, U(x)]: the input goes on beside what the unit adds."""

    def __init__(self, channels: int, growth: int, factor: int) -> None:
        super().__init__()
        self.unit = Unit(channels, growth, factor)
        self.join = Join()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.unit(x))


class TwoBranch(nn.Module):
    """cat[x, U(finer, stride 2), U(x)]: half of what is added comes from the next finer scale."""

    def __init__(self, channels: int, finer: int, growth: int, factor: int, finer_factor: int) -> None:
        super().__init__()
        self.down = Unit(finer, growth // 2, finer_factor, stride=2)
        self.same = Unit(channels, growth - growth // 2, factor)
        self.join = Join()

    def forward(self, x: Tensor, finer: Tensor) -> Tensor:
        return self.join(x, self.down(finer), self.same(x))


class Head(nn.Module):
    """Two 3x3 stride-2 conv-BN-ReLU, average pool 2, in training dropout, linear.

    `size` is the side of the feature map it reads; after both strides at least 2 pixels must be left.
    """

    def __init__(self, channels: int, width: int, size: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        pooled = head_pixels(size)
        self.reduce = nn.Sequential(
            ConvBNReLU(channels, width, stride=2), ConvBNReLU(width, width, stride=2), nn.AvgPool2d(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width * pooled * pooled, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The pooled feature under the linear classifier."""
        return self.reduce(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.features(x)))


def head_pixels(size: int) -> int:
    """The side of the pooled map that a head makes of a map of side `size`."""
    return halved(halved(size)) // 2


def halved(size: int) -> int:
    """The side that a stride-2 layer with padding k//2 leaves."""
    return (size + 1) // 2
