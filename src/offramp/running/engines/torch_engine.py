"""Stages run by PyTorch, on the CPU or a GPU, in float32 without TF32; on a GPU as CUDA graphs (cuda_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.device import device_name, exact_float32, synchronize
from offramp.measuring.confidence import measured
from offramp.models.exits import ExitNet, State
from offramp.running.engines.cuda_graphs import BUCKETS, Live, StageGraphs, Staging, captured, flat, like

AHEAD = 1  # the device runs one stage of a pool while the host decides about another


class TorchEngine:
    """An `ExitNet` in evaluation mode as an engine."""

    def __init__(
        self,
        model: ExitNet,
        measure: str = "max_softmax",
        temperatures: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        graphs: bool = False,
    ) -> None:
        place, any_gpu = torch.device(device), torch.device("cuda")
        self.device = torch.device("cuda", torch.cuda.current_device()) if place == any_gpu else place
        self.dtype = dtype
        self.place = device_name(self.device)
        self.model = model.to(self.device, dtype).to(memory_format=torch.channels_last).eval()
        self.num_exits = model.num_exits
        self.measure, self.temperatures = measure, temperatures
        self.staging = Staging(self.device) if self.device.type == "cuda" else None
        self.ahead = AHEAD if graphs else 0
        self.slots = (
            [StageGraphs(self.model, self.verdict, self.device, dtype) for _ in range(self.ahead + 2)] if graphs else []
        )
        self.graphs = self.slots[0] if graphs else None

    def use(self, slot: int) -> None:
        if self.slots:
            self.graphs = self.slots[slot]

    @contextmanager
    def active(self) -> Iterator[None]:
        on = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.inference_mode(), exact_float32(), on:  # events and graphs go to the current device
            yield

    def begin(self, images: np.ndarray) -> State:
        tensor = torch.from_numpy(np.ascontiguousarray(images))
        if self.staging is not None:
            tensor = self.staging.send(tensor)
        return (tensor.to(self.dtype, memory_format=torch.channels_last),)  # turned on the device, which is faster

    def run(self, k: int, state: Any) -> tuple[Any, Any]:
        if self.graphs is not None and len(state[0]) <= BUCKETS[-1]:
            own = state[0].graphs if isinstance(state[0], Live) else self.graphs
            return own.run(k, state)
        logits, state = self.model.step(k, state)
        return self.verdict(k, logits), state

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        logits, state = self.model.step(k, state)
        return logits.cpu().numpy(), state

    def verdict(self, k: int, logits: Tensor) -> Tensor:
        """Confidences and labels as one tensor [2, n], so that one copy brings both to the host."""
        scaled = logits if self.temperatures is None else logits / self.temperatures[k - 1]
        sure = measured(scaled.softmax(-1), self.measure, torch)
        return torch.stack([sure, logits.argmax(-1).to(sure.dtype)])

    def judge(self, k: int, verdict: Any) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(verdict, Live):
            verdict = verdict.answer()
        host = verdict.cpu().numpy()
        return host[0].copy(), host[1].astype(np.int64)

    def gather(self, k: int, parts: Sequence[tuple[Any, np.ndarray]]) -> Any:
        (first, rows), count = parts[0], sum(len(own) for _, own in parts)
        if isinstance(first[0], Live):  # the stage's own graph will pack them
            return (Live(first[0].graphs, k - 1, rows),)
        graphs = self.graphs if count <= BUCKETS[-1] else None
        room = self.room(first, count) if graphs is None else graphs.room(k, first)
        begin = 0
        for state, own in parts:
            self.put(state, own, room, begin)
            begin += len(own)
        return room if graphs is None else (Live(graphs, k - 1, np.arange(count), packed=True),)

    def room(self, state: Any, samples: int) -> State:
        return tuple(like(t, samples) for t in self._tensors(state))

    def put(self, state: Any, rows: np.ndarray, room: State, begin: int) -> None:
        index = self._index(rows)
        for tensor, slot in zip(self._tensors(state), room, strict=True):
            torch.index_select(flat(_in_order(tensor)), 0, index, out=flat(slot)[begin : begin + len(rows)])

    def _tensors(self, state: Any) -> State:
        """A state's tensors, wherever they lie."""
        return state[0].tensors() if isinstance(state[0], Live) else tuple(state)

    def wait(self) -> None:
        synchronize(self.device)

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device, non_blocking=True)


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def whole_network(engine: TorchEngine) -> Callable[[np.ndarray], np.ndarray]:
    """The network to its last exit, from images to answers: what one would run if there were no exits."""
    model = engine.model

    def forward(images: Tensor) -> Tensor:
        return engine.verdict(model.num_exits, model.last(images))

    replay = _captured_whole(engine, forward) if engine.graphs is not None else forward

    def run(images: np.ndarray) -> np.ndarray:
        with engine.active():
            return replay(engine.begin(images)[0]).cpu().numpy()

    return run


def _captured_whole(engine: TorchEngine, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same as one CUDA graph per batch size, so that the comparison is fair."""
    known: dict[int, tuple[Tensor, torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def run(images: Tensor) -> Tensor:
        if len(images) not in known:
            slot, out = like(images, len(images)).zero_(), []
            known[len(images)] = slot, captured(lambda: out.append(forward(slot))), out
        slot, graph, out = known[len(images)]
        slot.copy_(images)
        graph.replay()
        return out[-1]  # the recorded run's

    return run
