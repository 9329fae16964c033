"""The small modules that MSDNet and RANet share: conv-BN-ReLU, the bottleneck unit and the head.

conv-BN-ReLU and the concatenation know their own tangents, so that a tangent pass over a tape (tape.py) computes
nothing twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from offramp.models.fused import (
    fits,
    fused_forward,
    fused_tangent,
    have_kernels,
    joined,
    plain_forward,
    plain_tangent,
    suits,
)
from offramp.models.tape import NO_TRACE, REPLAYING, current_tape, dual, values_and_tangent


class ConvBNReLU(nn.Sequential):
    """Convolution (padding k//2), BatchNorm, ReLU; in training passes with `kernels` of our own, if asked for.

    `beside` gives the input again, before the output: to be read further on in place of the input.
    """

    heeds_tape = True
    kernels = False

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1, bias: bool = False) -> None:
        conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=bias)
        super().__init__(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        x, out = self._both(x)
        return (x, out) if beside else out

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tape = current_tape()
        if tape is None or not (self.training and self[1].training):
            return x, super().forward(x)
        conv, bn = cast(nn.Conv2d, self[0]), cast(nn.BatchNorm2d, self[1])
        own = self.kernels and fits(x, conv)
        if tape.mode == REPLAYING:
            kept = tape.next(self)
            tangent = plain_tangent if kept.taps is None else fused_tangent
            return x, dual(kept.out, tangent(kept, values_and_tangent(x)[1], conv, bn))
        running = None
        if tape.mode != NO_TRACE and bn.running_mean is not None and bn.running_var is not None:
            running = bn.running_mean, bn.running_var
            tape.count(cast(Tensor, bn.num_batches_tracked))
        x, out, kept = (fused_forward if own else plain_forward)(x, conv, bn, running)
        tape.keep(self, kept)
        return x, out


def use_kernels(model: nn.Module, on: bool) -> None:
    """Let the layers that can train with kernels of our own do so, where there are any; or not."""
    on = on and have_kernels(next(model.parameters()).device)
    for layer in model.modules():
        if isinstance(layer, ConvBNReLU):
            layer.kernels = on and suits(cast(nn.Conv2d, layer[0]))
        elif isinstance(layer, Join):
            layer.kernels = on


class Join(nn.Module):
    """Maps of one size side by side, along the channels."""

    kernels = False

    def forward(self, *maps: Tensor) -> Tensor:
        tape = current_tape()
        if tape is None:
            return torch.cat(maps, dim=1)
        if tape.mode != REPLAYING:
            both = joined(maps, self.kernels)
            tape.keep(self, both.detach())
            return both
        parts = [values_and_tangent(m) for m in maps]
        if all(tangent is None for _, tangent in parts):
            return dual(tape.next(self), None)
        moves = [torch.zeros_like(value) if tangent is None else tangent for value, tangent in parts]
        return dual(tape.next(self), joined(moves, self.kernels))


class Unit(nn.Sequential):
    """U(in -> out, stride, b): a 1x1 bottleneck of min(in, b*out) channels, then a 3x3 with the stride."""

    def __init__(self, channels: int, out: int, factor: int, stride: int = 1) -> None:
        width = min(channels, factor * out)
        super().__init__(ConvBNReLU(channels, width, kernel=1), ConvBNReLU(width, out, stride=stride))

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        x, narrow = self[0](x, beside=True)
        return (x, self[1](narrow)) if beside else self[1](narrow)


class DenseUnit(nn.Module):
    """cat[x, U(x)]: the input goes on beside what the unit adds."""

    def __init__(self, channels: int, growth: int, factor: int) -> None:
        super().__init__()
        self.unit = Unit(channels, growth, factor)
        self.join = Join()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*self.unit(x, beside=True))


class Head(nn.Module):
    """Two 3x3 stride-2 conv-BN-ReLU, average pool 2, linear.

    `size` is the side of the feature map it reads; after both strides at least 2 pixels must be left.
    """

    def __init__(self, channels: int, width: int, size: int, num_classes: int) -> None:
        super().__init__()
        pooled = head_pixels(size)
        self.reduce = nn.Sequential(
            ConvBNReLU(channels, width, stride=2), ConvBNReLU(width, width, stride=2), nn.AvgPool2d(2)
        )
        self.linear = nn.Linear(width * pooled * pooled, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The pooled feature under the linear classifier."""
        return self.reduce(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


def head_pixels(size: int) -> int:
    """The side of the pooled map that a head makes of a map of side `size`."""
    return halved(halved(size)) // 2


def halved(size: int) -> int:
    """The side that a stride-2 layer with padding k//2 leaves."""
    return (size + 1) // 2
