"""An exponential moving average of a network's params, kept on the device beside them.

It moves after every update: average = d x average + (1 - d) x params, with d = min(decay, (1 + t) / (10 + t)) at update
t, so that the first, random params are soon forgotten. Running statistics are averaged too. What does not train is left
out: it stays as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The average of what trains in `model`; `in_place` puts it there for an evaluation."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._sources = dict(moving_tensors(model))
        self.averages = {name: tensor.detach().clone() for name, tensor in self._sources.items()}
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self) -> None:
        """Take one step towards the params as they are now."""
        self.updates += 1
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        averages = list(self.averages.values())
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, torch._foreach_mul(list(self._sources.values()), 1 - decay))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages in the network; afterwards its own params again, at the same place in memory."""
        own = {name: tensor.detach().clone() for name, tensor in self._sources.items()}
        self._fill(self.averages)
        try:
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._sources.items():
            tensor.copy_(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """What must be saved to go on later."""
        return {"updates": self.updates, **{f"average.{name}": tensor for name, tensor in self.averages.items()}}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


def moving_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The params that train, and the floating-point buffers of modules in training mode."""
    yield from ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    for prefix, module in model.named_modules():
        if module.training:
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if buffer.is_floating_point():
                    yield name, buffer
