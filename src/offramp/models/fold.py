"""For inference only: BatchNorm folded into the convolution or linear layer before it.

Which of them follow each other is read off the traced forward of a module, or of its parts where it cannot be traced.
"""

from __future__ import annotations

import copy
from collections import Counter

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from offramp.models.exits import ExitNet
from offramp.models.modules import has_modules

FOLDED = (nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm2d, nn.BatchNorm1d)
PLAIN_CONVOLUTIONS = ("Conv2d", "Conv2dSame")  # others change their weights before they use them


def folded(model: ExitNet) -> ExitNet:
    """A copy in evaluation mode without the BatchNorms that directly follow a convolution or linear layer.

    The same function up to rounding; a BatchNorm anywhere else stays.
    """
    own = copy.deepcopy(model).eval()
    _fold(own)
    return own


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, (*FOLDED, *NORMS)) or not has_modules(module)


def _fold(module: nn.Module) -> None:
    try:
        graph = _Tracer().trace(module)
    except Exception:  # whatever its forward does with what is not a tensor
        for child in module.children():
            _fold(child)
        return
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        before = node.all_input_nodes[0] if node.op == "call_module" and node.all_input_nodes else None
        if before is None or before.op != "call_module" or len(before.users) > 1:
            continue
        if calls[node.target] == calls[before.target] == 1:
            _fold_pair(module, str(before.target), str(node.target))


def _fold_pair(root: nn.Module, first: str, second: str) -> None:
    layer, norm = root.get_submodule(first), root.get_submodule(second)
    if not isinstance(norm, NORMS) or norm.running_mean is None:
        return
    if isinstance(norm, nn.BatchNorm2d) and type(layer).__name__ in PLAIN_CONVOLUTIONS:
        _put(root, first, fuse_conv_bn_eval(layer, norm))  # type: ignore[type-var]
    elif isinstance(norm, nn.BatchNorm1d) and type(layer) is nn.Linear:
        _put(root, first, fuse_linear_bn_eval(layer, norm))
    else:
        return
    # a BatchNorm of timm's brings its activation along
    _put(root, second, nn.Sequential(*norm.children()) if has_modules(norm) else nn.Identity())


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)
