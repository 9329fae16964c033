"""torch's generators, seeded by the place where something is drawn (seeds.py).

Within a step, `draws_from` lets a second pass draw what the first one drew; in a CUDA graph, which cannot turn a
generator back, `GraphGenerators` do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offramp.common.seeds import mix

GeneratorStates = tuple[Tensor, ...] | int  # an int, in a graph: the number of the pass that draws


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator seeded with `mix(*parts)`."""
    return torch.Generator(device=device).manual_seed(mix(*parts))


def generator_states(device: torch.device) -> GeneratorStates:
    """The states of the generators that a module may draw from."""
    if _graph is not None:
        return _graph.begin_pass()
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_generator_states(states: GeneratorStates, device: torch.device) -> None:
    """Put back what `generator_states` gave."""
    assert not isinstance(states, int)
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def draws_from(states: GeneratorStates | None, device: torch.device) -> Iterator[None]:
    """Draw as from `states` (None: go on) inside the block, and afterwards as if it had not been."""
    if _graph is not None:
        with _graph.another_pass(states):
            yield
        return
    before = generator_states(device)
    if states is not None:
        set_generator_states(states, device)
    try:
        yield
    finally:
        set_generator_states(before, device)


class GraphGenerators:
    """The generators that a CUDA graph draws from: one for each pass over a network.

    While it is captured, passes take them in turn. Before it is replayed, `seed` sets them; a pass that must draw what
    an earlier one drew has a generator of its own with the same seed.
    """

    MOST = 16  # those that nothing is drawn from cost nothing

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        at = torch.cuda.current_device() if device.index is None else device.index
        self.default = torch.cuda.default_generators[at]
        self.own = [torch.Generator(device) for _ in range(self.MOST)]
        for each in self.own:
            graph.register_generator_state(each)
        self.passes: list[int] = []  # by generator: the number of the pass whose draws it gives

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Everything inside draws from these generators."""
        global _graph
        _graph = self
        try:
            with self.another_pass():
                yield
        finally:
            _graph = None

    def begin_pass(self, like: GeneratorStates | None = None) -> int:
        """Draw from the next generator: numbers of its own, or those of the pass `like`; gives the pass's number."""
        if len(self.passes) == self.MOST:
            raise RuntimeError("a step passes over the network too often for the generators of a graph")
        self.default.graphsafe_set_state(self.own[len(self.passes)])
        assert like is None or isinstance(like, int)
        self.passes.append(max(self.passes, default=-1) + 1 if like is None else like)
        return self.passes[-1]

    @contextmanager
    def another_pass(self, like: GeneratorStates | None = None) -> Iterator[None]:
        """A pass of its own; afterwards the one before goes on."""
        before = self.default.graphsafe_get_state()
        self.begin_pass(like)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(before)

    def seed(self, step: int) -> None:
        """What the next replay draws follows from the default generator's seed and the step."""
        seed = self.default.initial_seed()
        for each, number in zip(self.own, self.passes, strict=False):
            each.manual_seed(mix(seed, step, number))


_graph: GraphGenerators | None = None
