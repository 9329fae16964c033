"""A training step as a CUDA graph: the same step, captured once, then replayed without Python.

A step of a network with exits is thousands of small kernels; launching them one by one takes longer than running
them. A graph is captured for steps that train the weight net and one for steps that do not. A network that draws, one
with dropout for example, has generators of the graph's own (common/seeds.py): draws follow from the seed and the step.
What no graph can hold (a network that draws on the CPU, several processes, an operation that waits) runs eagerly, and
the reason is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from offramp.common.generators import GraphGenerators, generator_states, set_generator_states
from offramp.training.checkpoint import optimizer_tensors
from offramp.training.method import Method
from offramp.training.optimizers import rates_on_device
from offramp.training.step import HalfResult, train_step

log = logging.getLogger("offramp")
WARM_UP = 2
TrainStep = Callable[..., list[HalfResult]]
Inputs = tuple[Tensor, ...]  # images, labels and, where samples are mixed, how


@dataclass(frozen=True)
class Captured:
    """A graph, the buffers it reads a batch from and those it leaves its results in."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    results: list[HalfResult]
    generators: GraphGenerators

    def replay(self, inputs: Inputs, step: int) -> list[HalfResult]:
        self.generators.seed(step)
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.results


class NotCapturable(Exception):
    """A step does something that a graph would not repeat."""


class CapturedStep:
    """Trains on loader batches by replaying graphs. Results are good until the next step, which overwrites them."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, method: Method, run: TrainStep = train_step
    ) -> None:
        self.module, self.optimizer, self.method, self.run = module, optimizer, method, run
        self.device = next(module.parameters()).device
        self.captures = self.device.type == "cuda" and method.processes.size == 1
        self._captured: dict[tuple[bool, torch.Size], Captured] = {}
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()
            for each in (optimizer, *method.weighting.optimizers()):
                rates_on_device(each, self.device)

    def __call__(self, images: Tensor, labels: Tensor, step: int, recipe: Tensor | None = None) -> list[HalfResult]:
        """Two updates on a loader batch."""
        inputs = (images, labels) if recipe is None else (images, labels, recipe)
        key = (self.method.weighting.learns(step), images.shape)
        if self.captures and key not in self._captured:
            try:
                self._captured[key] = self._capture(inputs, step)
            except (RuntimeError, NotCapturable) as error:
                self.captures = False
                reason = str(error.__context__ or error).splitlines()[0]
                log.warning("the training step cannot be captured as a CUDA graph, it runs eagerly: %s", reason)
        if self.captures:
            return self._captured[key].replay(inputs, step)
        return self._run(inputs, step)

    def _run(self, inputs: Inputs, step: int) -> list[HalfResult]:
        images, labels, *recipe = inputs
        return self.run(self.module, self.optimizer, self.method, images, labels, step, *recipe)

    def _capture(self, inputs: Inputs, step: int) -> Captured:
        """Run a few steps for their side effects on libraries, undo them, and capture one."""
        _say_why_it_takes_a_while()
        inputs = tuple(each.clone(memory_format=torch.preserve_format) for each in inputs)
        draws = generator_states(self.device)
        assert not isinstance(draws, int)  # no graph is being captured yet
        before = {k: t.clone() for k, t in self._tensors().items()}
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._run(inputs, step)
        finally:
            current.wait_stream(stream)
            for name, tensor in self._tensors().items():
                tensor.copy_(before[name]) if name in before else tensor.zero_()  # momenta begin at zero
        drawn_on_cpu = not torch.equal(draws[0], torch.get_rng_state())
        set_generator_states(draws, self.device)
        if drawn_on_cpu:
            raise NotCapturable("the network draws random numbers on the CPU")
        graph = torch.cuda.CUDAGraph()
        generators = GraphGenerators(graph, self.device)
        # Other threads may use the device meanwhile: a loader's, for example.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with capture, generators.capturing():
            results = self._run(inputs, step)
        return Captured(graph, inputs, results, generators)

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name."""
        momenta = optimizer_tensors(self.module, self.optimizer)
        own = {f"optimizer|{name}": tensor for name, tensor in momenta.items()}
        own |= {f"weighting|{name}": tensor for name, tensor in self.method.weighting.tensors().items()}
        if self.method.ema is not None:
            own |= {f"ema|{name}": tensor for name, tensor in self.method.ema.tensors().items()}
        own |= {f"param|{name}": param.detach() for name, param in self.module.named_parameters()}
        return own | {f"buffer|{name}": buffer for name, buffer in self.module.named_buffers()}


@cache
def _say_why_it_takes_a_while() -> None:
    log.info("capturing the training step; where it never ran, its kernels are compiled first, for about a minute")
