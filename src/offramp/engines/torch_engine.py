"""Stages run by PyTorch, on the CPU or a GPU, in float32 without TF32.

On a GPU each stage can be captured as a CUDA graph per batch size of a few: a stage is many small kernels, and at
these sizes launching them takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.device import exact_float32
from offramp.models.exits import ExitNet, State

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # batch sizes that are captured; others run in the next larger


def _max_softmax(chances: Tensor) -> Tensor:
    return chances.amax(-1)


def _margin(chances: Tensor) -> Tensor:
    best = chances.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def _entropy(chances: Tensor) -> Tensor:
    entropy = torch.special.entr(chances).sum(-1)
    return (1 - entropy / float(np.log(chances.shape[-1]))).clamp(0, 1)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_softmax": _max_softmax,
    "margin": _margin,
    "entropy": _entropy,
}


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
        self.device, self.dtype = torch.device(device), dtype
        self.model = model.to(self.device, dtype).to(memory_format=torch.channels_last).eval()
        self.num_exits = model.num_exits
        self.measure, self.temperatures = MEASURES[measure], temperatures
        self.graphs = _Graphs(self) if graphs else None

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.inference_mode(), exact_float32():
            yield

    def begin(self, images: np.ndarray) -> State:
        tensor = torch.from_numpy(np.ascontiguousarray(images)).to(self.device, non_blocking=True)
        return (tensor.to(self.dtype, memory_format=torch.channels_last),)  # turned on the device, which is faster

    def run(self, k: int, state: State) -> tuple[Tensor, State]:
        if self.graphs is not None and len(state[0]) <= BUCKETS[-1]:
            return self.graphs.run(k, state)
        logits, state = self.model.step(k, state)
        return self.verdict(k, logits), state

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        logits, state = self.model.step(k, state)
        return logits.cpu().numpy(), state

    def verdict(self, k: int, logits: Tensor) -> Tensor:
        """Confidences and labels as one tensor [2, n], so that one copy brings both to the host."""
        scaled = logits if self.temperatures is None else logits / self.temperatures[k - 1]
        sure = self.measure(scaled.softmax(-1))
        return torch.stack([sure, logits.argmax(-1).to(sure.dtype)])

    def judge(self, k: int, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        host = logits.cpu().numpy()
        return host[0], host[1].astype(np.int64)

    def gather(self, k: int, parts: Sequence[tuple[State, np.ndarray]]) -> State:
        rows = [self._index(rows) for _, rows in parts]
        count = sum(map(len, rows))
        slots = None if self.graphs is None else self.graphs.inputs(k, count, parts[0][0])
        packed = []
        for at in range(len(parts[0][0])):
            out = _like(parts[0][0][at], count) if slots is None else slots[at][:count]
            begin = 0
            for (state, _), own in zip(parts, rows, strict=True):
                torch.index_select(_flat(_in_order(state[at])), 0, own, out=_flat(out)[begin : begin + len(own)])
                begin += len(own)
            packed.append(out)
        return tuple(packed)

    def keep(self, state: State, rows: np.ndarray) -> tuple[State, np.ndarray]:
        if self.graphs is None and 2 * len(rows) > len(state[0]):
            return state, rows
        index = self._index(rows)  # few must not hold a whole batch; and what a graph gave is overwritten
        return tuple(t.index_select(0, index) for t in state), np.arange(len(rows))

    def wait(self) -> None:
        """Until the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device, non_blocking=True)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor in memory order (NHWC if it is an image) as rows, without copying."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).flatten(1)


def _like(tensor: Tensor, count: int) -> Tensor:
    format_ = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
    shape = (count, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=format_)


def captured(step: Callable[[State], Any], like: State) -> tuple[State, torch.cuda.CUDAGraph, Any]:
    """A function of tensors as a CUDA graph: where its inputs go, the graph, where its outputs will be."""
    inputs = tuple(_like(tensor, len(tensor)).zero_() for tensor in like)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode(), exact_float32():
        for _ in range(3):  # let libraries choose and allocate before anything is recorded
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph), torch.inference_mode(), exact_float32():
        outputs = step(inputs)
    return inputs, graph, outputs


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


class _Graphs:
    """Captured stages, made when a size is first needed."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.captured: dict[tuple[int, int], tuple[State, torch.cuda.CUDAGraph, tuple[Tensor, State]]] = {}

    def inputs(self, k: int, count: int, like: State) -> State | None:
        """Where the state before stage k is to be written, for `count` samples; None if that many are not captured."""
        return None if count > BUCKETS[-1] else self._get(k, count, like)[0]

    def run(self, k: int, state: State) -> tuple[Tensor, State]:
        count = len(state[0])
        inputs, graph, (verdict, after) = self._get(k, count, state)
        for slot, given in zip(inputs, state, strict=True):
            if given.data_ptr() != slot.data_ptr():
                slot[:count].copy_(given)
        graph.replay()
        return verdict[:, :count], tuple(t[:count] for t in after)

    def _get(self, k: int, count: int, like: State) -> tuple[State, torch.cuda.CUDAGraph, tuple[Tensor, State]]:
        size = next(b for b in BUCKETS if b >= count)
        if (k, size) not in self.captured:
            self.captured[k, size] = captured(partial(self._step, k), tuple(_like(t, size) for t in like))
        return self.captured[k, size]

    def _step(self, k: int, state: State) -> tuple[Tensor, State]:
        logits, after = self.engine.model.step(k, state)
        return self.engine.verdict(k, logits), tuple(_in_order(t) for t in after)


def whole_network(engine: TorchEngine) -> Callable[[np.ndarray], np.ndarray]:
    """The network without its inner heads, from images to answers: what one would run if there were no exits."""
    model = engine.model

    def forward(images: Tensor) -> Tensor:
        state: State = (images,)
        for k in range(1, model.num_exits):
            _, state = model.advance(k, state)
        logits, _ = model.step(model.num_exits, state)
        return engine.verdict(model.num_exits, logits)

    replay = _captured_whole(engine, forward) if engine.graphs is not None else forward

    def run(images: np.ndarray) -> np.ndarray:
        with engine.active():
            return replay(engine.begin(images)[0]).cpu().numpy()

    return run


def _captured_whole(engine: TorchEngine, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same as one CUDA graph per batch size, so that the comparison is fair."""
    known: dict[int, tuple[State, torch.cuda.CUDAGraph, Tensor]] = {}

    def run(images: Tensor) -> Tensor:
        if len(images) not in known:
            known[len(images)] = captured(lambda given: forward(*given), (images,))
        (slot,), graph, out = known[len(images)]
        slot.copy_(images)
        graph.replay()
        return out

    return run
