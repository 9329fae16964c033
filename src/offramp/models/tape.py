"""What the first forward over a train half keeps, so that later passes need not compute it again.

A step goes over the same images at the same params twice: once for the losses, once for their tangents. Plain
forward mode computes every value beside its tangent. Layers that know their own tangent put their values on a tape
while it records, and compute tangents alone while it replays. Look-ahead passes leave no trace: running statistics
stay as they are. Modules that know nothing of tapes work as always.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

RECORDING, REPLAYING, NO_TRACE = "recording", "replaying", "no trace"


class Tape:
    """Values of one forward, by layer; a layer that runs twice keeps two entries, in order."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps, self.mode = keeps, RECORDING
        self._kept: dict[int, list[Any]] = defaultdict(list)
        self._counters: list[Tensor] = []

    def keep(self, layer: nn.Module, values: Any) -> None:
        if self.keeps and self.mode == RECORDING:
            self._kept[id(layer)].append(values)

    def next(self, layer: nn.Module) -> Any:
        """What the layer kept; entries come round in the order they were recorded."""
        kept = self._kept[id(layer)]
        kept.append(kept.pop(0))
        return kept[-1]

    def clear(self) -> None:
        """Forget what was kept."""
        self._kept.clear()

    def count(self, batches: Tensor) -> None:
        """Note that a running statistic has seen one batch more."""
        self._counters.append(batches)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Layers keep their values; all counters move on together at the end."""
        with self._current(RECORDING):
            yield
        if self._counters:
            torch._foreach_add_(self._counters, 1)
            self._counters.clear()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Layers compute tangents from what they kept."""
        with self._current(REPLAYING):
            yield

    @contextmanager
    def _current(self, mode: str) -> Iterator[None]:
        global _tape
        before, self.mode = _tape, mode
        _tape = self
        try:
            yield
        finally:
            _tape = before


_tape: Tape | None = None


def current_tape() -> Tape | None:
    """The tape of the pass under way, if there is one."""
    return _tape


@contextmanager
def no_trace() -> Iterator[None]:
    """A pass that leaves running statistics as they are."""
    with Tape()._current(NO_TRACE):
        yield


def touched_buffers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The buffers that a pass may change even so: all but those of layers that heed the tape."""
    if getattr(module, "heeds_tape", False):
        return
    for name, buffer in module.named_buffers(prefix, recurse=False):
        yield name, buffer
    for name, child in module.named_children():
        yield from touched_buffers(child, f"{prefix}.{name}" if prefix else name)


def values_and_tangent(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both parts of a dual tensor; the tangent of any other one is None."""
    value, tangent = fwAD.unpack_dual(x)
    return value, tangent


def dual(value: Tensor, tangent: Tensor | None) -> Tensor:
    """A value with its tangent, or the value alone where nothing moves."""
    return value.detach() if tangent is None else fwAD.make_dual(value.detach(), tangent)
