"""The floor under a training step: the mul-adds it must do and the bytes it must move through memory.

Counted over the conv-BN-ReLU layers, which are nearly all of MSDNet and RANet. Each sweep reads its inputs once and
writes its output once; what BatchNorm forces (all of a map must be known before any of it can be normalised) is
counted as a sweep of its own. x is a layer's input, y the convolution's output, g a gradient.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.layers import ConvBNReLU


@dataclass(frozen=True)
class Floor:
    """Mul-adds and bytes of a baseline update and of one by the exact order, both on a half."""

    baseline_mul_adds: float
    baseline_bytes: float
    exact_mul_adds: float
    exact_bytes: float


def floor_of(model: ExitNet, half: int, bytes_each: int) -> Floor:
    """The floor of updates on `half` images whose maps take `bytes_each` bytes an element."""
    x, y = _elements(model)
    forward = x + 3 * y  # convolve: x to y; normalise: y to the output
    backward = (y + y) + (y + y + y) + (y + x) + (x + y)  # sums of g and y; g and y to y's; y's to x's; x and y's
    tangent = (2 * x + 2 * y) + 3 * y  # both inputs and y to how y moves; that and y to how the output moves
    macs = half * exit_costs(model)[-1].macs
    scale = half * bytes_each
    return Floor(3 * macs, scale * (forward + backward), 10 * macs, scale * (2 * forward + 3 * backward + tangent))


def _elements(model: ExitNet) -> tuple[float, float]:
    """Elements of all inputs and of all outputs of conv-BN-ReLU layers, per image."""
    found = [0.0, 0.0]

    def count(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor | tuple[Tensor, Tensor]) -> None:
        found[0] += given[0].numel()
        found[1] += (out if isinstance(out, Tensor) else out[1]).numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, ConvBNReLU)]
    training, device = model.training, next(model.parameters()).device
    with torch.no_grad():
        model.eval()(torch.zeros(1, *model.input_shape, device=device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    return found[0], found[1]


def copied_bytes_per_s(device: torch.device, megabytes: int = 256) -> float:
    """What memory gives: bytes read and written by a copy much larger than the caches."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(5):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best
