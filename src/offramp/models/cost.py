"""What each exit costs, found by walking a network on the meta device.

An `ExitNet` goes in; cumulative params, the paper's mul-adds and plain MACs per exit come out. Every operator
that runs is seen, whoever calls it, so the counts hold for any network, not only for ours. The paper counts
a convolution's weight MACs, a linear layer's weights and bias, a ReLU's elements and a pooling's window
elements; BatchNorm and interpolation are free. Everything that runs up to an exit counts, earlier heads too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from offramp.models.exits import ExitNet, State
from offramp.models.modules import floating_dtype

aten = torch.ops.aten


@dataclass(frozen=True)
class ExitCost:
    """Cumulative cost of reaching exit `exit` (from 1) for one image."""

    exit: int
    params: int
    mul_adds: int
    macs: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def _elements(args: Sequence[Any], out: Any) -> int:
    return int(args[0].numel())


def _window_elements(args: Sequence[Any], out: Any) -> int:
    pooled = out[0] if isinstance(out, (tuple, list)) else out
    kernel = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return int(pooled.numel()) * prod(kernel if len(kernel) == 2 else kernel * 2)


def _bias_elements(args: Sequence[Any], out: Any) -> int:
    return int(out.numel())


# What the paper counts beyond MACs. Global pooling reads each input element once.
_BEYOND_MACS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten.addmm: _bias_elements,
    aten.relu: _elements,
    aten.relu_: _elements,
    aten.avg_pool2d: _window_elements,
    aten.max_pool2d_with_indices: _window_elements,
    aten._adaptive_avg_pool2d: _elements,
    aten.mean: _elements,
}


class Meter(TorchDispatchMode):
    """Adds up what runs under it; `params` holds the ids of the params that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0
        self.beyond = 0
        self.params: dict[int, int] = {}

    @property
    def mul_adds(self) -> int:
        """As the paper counts them."""
        return self.macs + self.beyond

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func._overloadpacket
        if op in flop_registry:
            self.macs += flop_registry[op](*args, **(kwargs or {}), out_val=out) // 2
        if op in _BEYOND_MACS:
            self.beyond += _BEYOND_MACS[op](args, out)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.nn.Parameter):
                self.params[id(leaf)] = leaf.numel()
        return out


_cache: WeakKeyDictionary[ExitNet, dict[Any, tuple[ExitCost, ...]]] = WeakKeyDictionary()


def exit_costs(model: ExitNet, image_size: int | None = None) -> tuple[ExitCost, ...]:
    """Cumulative costs of every exit for one image of `image_size` (the model's own size by default)."""
    channels, height, width = model.input_shape
    shape = (channels, image_size or height, image_size or width)
    key = (shape, getattr(model, "schedule", None))
    known = _cache.setdefault(model, {})
    if key not in known:
        known[key] = _walk(model, shape)
    return known[key]


def lazy_costs(model: ExitNet) -> tuple[ExitCost, ...]:
    """Costs if each exit runs only what its head needs; the same as ever for a network not made of cells."""
    before = model.schedule
    try:
        return exit_costs(model.set_schedule("lazy"))
    except ValueError:
        return exit_costs(model)
    finally:
        model.set_schedule(before)


def _walk(model: ExitNet, shape: tuple[int, int, int]) -> tuple[ExitCost, ...]:
    if min(shape) < 1:
        raise ValueError(f"images of {shape[1]}x{shape[2]} pixels do not exist")
    twin = copy.deepcopy(model).to("meta").eval()
    state: State = (torch.empty(1, *shape, device="meta", dtype=floating_dtype(model)),)
    costs = []
    meter = Meter()
    try:
        with torch.no_grad(), meter:
            for k in range(1, model.num_exits + 1):
                _, state = twin.step(k, state)
                costs.append(ExitCost(k, sum(meter.params.values()), meter.mul_adds, meter.macs))
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"the network cannot take images of {shape[1]}x{shape[2]} pixels: {why}") from error
    return tuple(costs)
