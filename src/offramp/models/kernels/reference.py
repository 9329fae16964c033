"""conv-BN-ReLU for training, in the plain operations of torch: its forward, what a tangent needs of it, the tangent.

Runs anywhere and in any precision. `fused.py` gives the same three with kernels of our own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn

Running = tuple[Tensor, Tensor] | None  # BatchNorm's running statistics, if they are to be updated


def values_and_tangent(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both parts of a dual tensor; the tangent of any other one is None."""
    value, tangent = fwAD.unpack_dual(x)
    return value, tangent


def dual(value: Tensor, tangent: Tensor | None) -> Tensor:
    """A value with its tangent, or the value alone where nothing moves."""
    return value.detach() if tangent is None else fwAD.make_dual(value.detach(), tangent)


class Kept(NamedTuple):
    """What is kept of a forward: the input, the convolution's output, batch statistics, the output, the filter."""

    x: Tensor
    y: Tensor
    mean_C: Tensor
    inverse_std_C: Tensor
    out: Tensor
    taps: Tensor | None = None


def plain_forward(x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, running: Running) -> tuple[Tensor, Tensor, Kept]:
    """The input again, the output, and what is kept of both."""
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
