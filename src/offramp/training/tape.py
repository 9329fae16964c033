"""What the first forward over a train half keeps, so that later passes need not compute it again; and layers for it.

A step goes over the same images at the same params twice: once for the losses, once for their tangents. Plain forward
mode computes every value beside its tangent. Layers that know their own tangent put their values on a tape while it
records, and compute tangents alone while it replays. Look-ahead passes leave no trace: running statistics stay as they
are. Modules that know nothing of tapes work as always.

`use_taped_layers` puts such layers in the place of the plain ones of models/layers.py, in a network that is there
already: params, buffers and names stay. On a GPU they can use kernels of our own. Outside a taped pass, in evaluation
for example, they do what the plain layers do.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from offramp.models.kernels.reference import dual, plain_forward, plain_tangent, values_and_tangent
from offramp.models.layers import ConvBNReLU, DenseUnit, Join, TwoBranch, Unit

log = logging.getLogger("offramp")
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


class TapedConvBNReLU(ConvBNReLU):
    """`beside` gives the input again, before the output: to be read further on in place of the input."""

    heeds_tape = True
    kernels: ModuleType | None = None  # models/kernels/fused.py, if it is to be used

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        x, out = self._both(x)
        return (x, out) if beside else out

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tape = current_tape()
        if tape is None or not (self.training and self[1].training):
            return x, super().forward(x)
        conv, bn = cast(nn.Conv2d, self[0]), cast(nn.BatchNorm2d, self[1])
        if tape.mode == REPLAYING:
            kept = tape.next(self)
            tangent = plain_tangent if kept.taps is None or self.kernels is None else self.kernels.fused_tangent
            return x, dual(kept.out, tangent(kept, values_and_tangent(x)[1], conv, bn))
        running = None
        if tape.mode != NO_TRACE and bn.running_mean is not None and bn.running_var is not None:
            running = bn.running_mean, bn.running_var
            tape.count(cast(Tensor, bn.num_batches_tracked))
        fused = self.kernels is not None and self.kernels.fits(x, conv)
        forward = self.kernels.fused_forward if fused and self.kernels is not None else plain_forward
        x, out, kept = forward(x, conv, bn, running)
        tape.keep(self, kept)
        return x, out


class TapedJoin(Join):
    """The concatenation and its tangent."""

    kernels: ModuleType | None = None

    def forward(self, *maps: Tensor) -> Tensor:
        tape = current_tape()
        if tape is None:
            return super().forward(*maps)
        if tape.mode != REPLAYING:
            both = self._joined(maps)
            tape.keep(self, both.detach())
            return both
        parts = [values_and_tangent(m) for m in maps]
        if all(tangent is None for _, tangent in parts):
            return dual(tape.next(self), None)
        moves = tuple(torch.zeros_like(value) if tangent is None else tangent for value, tangent in parts)
        return dual(tape.next(self), self._joined(moves))

    def _joined(self, maps: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(maps, dim=1) if self.kernels is None else self.kernels.joined(maps)


class TapedUnit(Unit):
    """The bottleneck unit, which can give its input again."""

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        x, narrow = self[0](x, beside=True)
        return (x, self[1](narrow)) if beside else self[1](narrow)


class TapedDenseUnit(DenseUnit):
    """cat[x, U(x)] that reads x where the unit gives it again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*self.unit(x, beside=True))


class TapedTwoBranch(TwoBranch):
    """cat[x, U(finer), U(x)] that reads x where its unit gives it again."""

    def forward(self, x: Tensor, finer: Tensor) -> Tensor:
        x, same = self.same(x, beside=True)
        return self.join(x, self.down(finer), same)


TAPED: dict[type[nn.Module], type[nn.Module]] = {
    ConvBNReLU: TapedConvBNReLU,
    Join: TapedJoin,
    Unit: TapedUnit,
    DenseUnit: TapedDenseUnit,
    TwoBranch: TapedTwoBranch,
}


def use_taped_layers(model: nn.Module, kernels: bool = False) -> None:
    """Let our layers in a network work with a tape and, if asked for, with kernels of our own where there are any."""
    fused = _fused(next(model.parameters()).device) if kernels else None
    for layer in model.modules():
        layer.__class__ = TAPED.get(type(layer), type(layer))
        if isinstance(layer, TapedConvBNReLU):
            layer.kernels = fused if fused is not None and fused.suits(layer[0]) else None
        elif isinstance(layer, TapedJoin):
            layer.kernels = fused


@cache
def _fused(device: torch.device) -> ModuleType | None:
    """Our kernels, if they run on a device: one of them is tried. Triton needs a C compiler there, for example."""
    if find_spec("triton") is None:
        return None
    try:
        from offramp.models.kernels import fused

        fused.joined([torch.zeros(1, 8, 1, 1, device=device)])
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        log.warning("our own kernels cannot run on %s, plain operations do their work: %s", device, reason)
        return None
    return fused
