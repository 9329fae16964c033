"""conv-BN-ReLU for training with kernels of our own, for GPUs: what `reference.py` gives, in fewer memory sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offramp.models.kernels.convolution import ALONG, SQUARES, as_filter, convolve
from offramp.models.kernels.filters import filter_gradient
from offramp.models.kernels.maps import as_map, as_rows, join, new_map
from offramp.models.kernels.norm import gradient_before_relu, normalise_relu, tangent_after_relu
from offramp.models.kernels.reference import Kept, Running, plain_tangent, values_and_tangent


def suits(conv: nn.Conv2d) -> bool:
    """Whether our kernels know such a convolution: 1x1 or 3x3 with the usual padding, no bias, no groups."""
    size = conv.kernel_size[0]
    same = (size, size), (size // 2, size // 2), (1, 1), (conv.stride[0],) * 2
    asked = conv.kernel_size, conv.padding, conv.dilation, conv.stride
    return asked == same and size in (1, 3) and conv.groups == 1 and conv.bias is None


def fits(x: Tensor, conv: nn.Conv2d) -> bool:
    """Whether our kernels can count the elements of such maps: their places are 32-bit numbers."""
    pixels = x.numel() // x.shape[1]
    return max(pixels * (max(conv.in_channels, conv.out_channels) + 8), _reach(x)) < 2**31


def _reach(x: Tensor) -> int:
    """How far apart the first and the last element of a map lie in memory; a slice reaches over its neighbours."""
    return 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


class _Fused(torch.autograd.Function):
    """`rows` and `taps` are x and the weight as maps of the kernels', outside of any graph.

    Returns its input too, so that the gradient of whatever else reads it is added here, in one sweep less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        weight: Tensor,
        taps: Tensor,
        scale: Tensor,
        shift: Tensor,
        running: Running,
        stride: int,
        bn: nn.BatchNorm2d,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        height, width = ((side + stride - 1) // stride for side in x.shape[2:])
        y = new_map(rows, len(weight), height, width)
        sums = convolve(rows, taps, y, stride, sums=SQUARES)
        assert sums is not None and bn.momentum is not None
        out, mean, inverse_std = normalise_relu(y, sums, scale, shift, bn.eps, bn.momentum, running)
        ctx.save_for_backward(rows, taps, y, scale, shift, mean, inverse_std)
        ctx.stride = stride
        ctx.mark_non_differentiable(y, mean, inverse_std)
        ctx.set_materialize_grads(False)
        return x, out, y, mean, inverse_std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor | None, gradient: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if gradient is None:  # nobody read the output
            return beside, *(None,) * 8
        rows, taps, y, *norm = ctx.saved_tensors
        by_y, by_scale, by_shift = gradient_before_relu(as_rows(gradient), y, norm)
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = new_map(rows, *rows.shape[1:])
            plus = None if beside is None else as_rows(beside)
            convolve(by_y, taps, by_x, ctx.stride, transposed=True, plus=plus)
        by_weight = filter_gradient(rows, by_y, taps, ctx.stride)
        return by_x, None, by_weight, None, by_scale, by_shift, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        ctx.channels = [m.shape[1] for m in maps]
        return join(maps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.split(ctx.channels, dim=1)


def joined(maps: Sequence[Tensor]) -> Tensor:
    """Maps of one size side by side, along the channels."""
    elements = sum(m.numel() for m in maps) + 8 * maps[0].numel() // maps[0].shape[1]
    if max(elements, *map(_reach, maps)) < 2**31:
        return _Joined.apply(*maps)
    return torch.cat(list(maps), dim=1)


def fused_forward(x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, running: Running) -> tuple[Tensor, Tensor, Kept]:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    rows = as_map(x.detach())
    taps = as_filter(conv.weight.detach(), rows)
    params = conv.weight, taps, bn.weight, bn.bias
    x, out, y, mean, inverse_std = _Fused.apply(x, rows, *params, running, conv.stride[0], bn)
    return x, out, Kept(rows, y, mean, inverse_std, out.detach(), taps)


def fused_tangent(kept: Kept, x_moves: Tensor | None, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> Tensor | None:
    """As `plain_tangent`, for params that all move."""
    weight_moves = values_and_tangent(conv.weight)[1]
    scale, scale_moves = values_and_tangent(bn.weight)
    shift, shift_moves = values_and_tangent(bn.bias)
    if weight_moves is None or scale_moves is None or shift_moves is None:
        return plain_tangent(kept, x_moves, conv, bn)
    moving = as_filter(weight_moves, kept.x)
    y_moves = new_map(kept.y, *kept.y.shape[1:])
    assert kept.taps is not None
    along, stride = (kept.y, kept.mean_C, kept.inverse_std_C), conv.stride[0]
    if x_moves is None:
        sums = convolve(kept.x, moving, y_moves, stride, sums=ALONG, along=along)
    else:
        pair = kept.x, moving
        sums = convolve(
            as_map(x_moves.to(kept.x.dtype)), kept.taps, y_moves, stride, pair=pair, sums=ALONG, along=along
        )
    assert sums is not None
    norm = scale, shift, kept.mean_C, kept.inverse_std_C
    return tangent_after_relu(y_moves, sums, kept.y, norm, scale_moves, shift_moves)
