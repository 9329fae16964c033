"""For inference only: BatchNorm folded into the convolution or linear layer before it."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from offramp.models.exits import ExitNet
from offramp.models.layers import ConvBNReLU


def folded(model: ExitNet) -> ExitNet:
    """A copy in evaluation mode without the BatchNorms that directly follow a convolution or linear layer.

    The same function up to rounding; a BatchNorm anywhere else stays.
    """
    own = copy.deepcopy(model).eval()
    for module in list(own.modules()):
        plain = type(module).forward is nn.Sequential.forward or isinstance(module, ConvBNReLU)
        if plain and isinstance(module, nn.Sequential):
            _fold(module)
    return own


def _fold(layers: nn.Sequential) -> None:
    kept: list[nn.Module] = []
    for layer in layers:
        before = kept[-1] if kept else None
        known = getattr(layer, "running_mean", None) is not None
        if known and isinstance(layer, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            kept[-1] = fuse_conv_bn_eval(before, layer)
        elif known and isinstance(layer, nn.BatchNorm1d) and isinstance(before, nn.Linear):
            kept[-1] = fuse_linear_bn_eval(before, layer)
        else:
            kept.append(layer)
    if len(kept) < len(layers):
        del layers[:]
        layers.extend(kept)
