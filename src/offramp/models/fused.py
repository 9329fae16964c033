"""conv-BN-ReLU with its gradient and its tangent, in the plain operations of torch or in kernels of our own.

Both give the same three things: a forward whose result can be differentiated, what a tangent needs of it (`Kept`),
and the tangent. `plain` runs anywhere and in any precision; `fused` on GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offramp.models.tape import values_and_tangent

log = logging.getLogger("offramp")
Running = tuple[Tensor, Tensor] | None


class Kept(NamedTuple):
    """What is kept of a forward: the input, the convolution's output, batch statistics, the output, the filter."""

    x: Tensor
    y: Tensor
    mean_C: Tensor
    inverse_std_C: Tensor
    out: Tensor
    taps: Tensor | None = None


def plain_forward(x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, running: Running) -> tuple[Tensor, Tensor, Kept]:
    """The input once more, the output, and what is kept of both."""
    y = conv(x)
    means, variances = running or (None, None)
    z, mean, inverse_std = torch.ops.aten.native_batch_norm(
        y, bn.weight, bn.bias, means, variances, True, bn.momentum, bn.eps
    )
    out = z.relu_()
    return x, out, Kept(x.detach(), y.detach(), mean, inverse_std, out.detach())


def plain_tangent(kept: Kept, x_moves: Tensor | None, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> Tensor | None:
    """How the output moves when the input moves by `x_moves` and the params by their own tangents."""
    weight, weight_moves = values_and_tangent(conv.weight)
    scale, scale_moves = values_and_tangent(bn.weight)
    shift_moves = values_and_tangent(bn.bias)[1]
    found = None
    y_moves = _sum(_conv(x_moves, weight, conv), _conv(kept.x, weight_moves, conv))
    # A moving bias moves y by the same everywhere, which BatchNorm takes out again.
    if y_moves is not None:
        # The derivative of normalising is a symmetric matrix: tangents go through it as gradients do.
        found = torch.ops.aten.native_batch_norm_backward(
            y_moves, kept.y, scale, None, None, kept.mean_C, kept.inverse_std_C, True, bn.eps, [True, False, False]
        )[0]
    if scale_moves is not None or shift_moves is not None:
        slope = torch.zeros_like(kept.mean_C) if scale_moves is None else scale_moves * kept.inverse_std_C
        level = -slope * kept.mean_C if shift_moves is None else shift_moves - slope * kept.mean_C
        slope, level = (v.to(kept.y.dtype).view(1, -1, 1, 1) for v in (slope, level))
        found = torch.addcmul(level if found is None else found.add_(level), kept.y, slope)
    return None if found is None else torch.ops.aten.threshold_backward(found, kept.out, 0)


def _conv(x: Tensor | None, weight: Tensor | None, conv: nn.Conv2d) -> Tensor | None:
    if x is None or weight is None:
        return None
    return F.conv2d(x, weight, None, conv.stride, conv.padding, groups=conv.groups)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a.add_(b)


def kernels() -> ModuleType:
    """Our kernels; imported late, since Triton is not everywhere."""
    from offramp.models import kernels

    return kernels


@cache
def have_kernels(device: torch.device) -> bool:
    """Whether our kernels run on a device: one of them is tried. Triton needs a C compiler there, for example."""
    if find_spec("triton") is None:
        return False
    try:
        kernels().join([torch.zeros(1, 8, 1, 1, device=device)])
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        log.warning("our own kernels cannot run on %s, plain operations do their work: %s", device, reason)
        return False
    return True


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

    x comes out again: what reads it there sends its gradient this way, where adding it costs one sweep less.
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
        own = kernels()
        height, width = ((side + stride - 1) // stride for side in x.shape[2:])
        y = own.new_map(rows, len(weight), height, width)
        sums = own.convolve(rows, taps, y, stride, sums=own.SQUARES)
        out, mean, inverse_std = own.normalise_relu(y, sums, scale, shift, bn.eps, bn.momentum, running)
        ctx.save_for_backward(rows, taps, y, scale, shift, mean, inverse_std)
        ctx.stride = stride
        ctx.mark_non_differentiable(y, mean, inverse_std)
        ctx.set_materialize_grads(False)
        return x, out, y, mean, inverse_std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor | None, gradient: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        own = kernels()
        if gradient is None:  # nobody read the output
            return beside, *(None,) * 8
        rows, taps, y, *norm = ctx.saved_tensors
        by_y, by_scale, by_shift = own.gradient_before_relu(own.as_rows(gradient), y, norm)
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = own.new_map(rows, *rows.shape[1:])
            plus = None if beside is None else own.as_rows(beside)
            own.convolve(by_y, taps, by_x, ctx.stride, transposed=True, plus=plus)
        by_weight = own.filter_gradient(rows, by_y, taps, ctx.stride)
        return by_x, None, by_weight, None, by_scale, by_shift, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        own = kernels()
        ctx.channels = [m.shape[1] for m in maps]
        return own.join(maps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.split(ctx.channels, dim=1)


def joined(maps: Sequence[Tensor], with_kernels: bool) -> Tensor:
    """Maps of one size side by side, along the channels."""
    elements = sum(m.numel() for m in maps) + 8 * maps[0].numel() // maps[0].shape[1]
    if with_kernels and max(elements, *map(_reach, maps)) < 2**31:
        return _Joined.apply(*maps)
    return torch.cat(list(maps), dim=1)


def fused_forward(x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, running: Running) -> tuple[Tensor, Tensor, Kept]:
    own = kernels()
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    rows = own.as_map(x.detach())
    taps = own.as_filter(conv.weight.detach(), rows)
    params = conv.weight, taps, bn.weight, bn.bias
    x, out, y, mean, inverse_std = _Fused.apply(x, rows, *params, running, conv.stride[0], bn)
    return x, out, Kept(rows, y, mean, inverse_std, out.detach(), taps)


def fused_tangent(kept: Kept, x_moves: Tensor | None, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> Tensor | None:
    """As `plain_tangent`, for params that all move."""
    own = kernels()
    weight_moves = values_and_tangent(conv.weight)[1]
    scale, scale_moves = values_and_tangent(bn.weight)
    shift, shift_moves = values_and_tangent(bn.bias)
    if weight_moves is None or scale_moves is None or shift_moves is None:
        return plain_tangent(kept, x_moves, conv, bn)
    moving = own.as_filter(weight_moves, kept.x)
    y_moves = own.new_map(kept.y, *kept.y.shape[1:])
    along, stride = (kept.y, kept.mean_C, kept.inverse_std_C), conv.stride[0]
    if x_moves is None:
        sums = own.convolve(kept.x, moving, y_moves, stride, sums=own.ALONG, along=along)
    else:
        pair = kept.x, moving
        sums = own.convolve(
            own.as_map(x_moves.to(kept.x.dtype)), kept.taps, y_moves, stride, pair=pair, sums=own.ALONG, along=along
        )
    norm = scale, shift, kept.mean_C, kept.inverse_std_C
    return own.tangent_after_relu(y_moves, sums, kept.y, norm, scale_moves, shift_moves)
