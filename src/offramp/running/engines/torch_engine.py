"""Stages run by PyTorch, on the CPU or a GPU, in float32 without TF32.

On a GPU each stage can be captured as a CUDA graph per batch size of a few: a stage is many small kernels, and at
these sizes launching them takes longer than running them. Such a graph holds all that happens between two decisions:
the rows that go on come from the host, are packed, run, and what their exit says goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.device import device_name, exact_float32
from offramp.models.exits import ExitNet, State
from offramp.running.engines.staging import Staging

AHEAD = 1  # the device runs one stage of a pool while the host decides about another
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


def bucket(count: int) -> int:
    """The captured batch size that `count` samples run in."""
    return next(size for size in BUCKETS if size >= count)


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
        self.measure, self.temperatures = MEASURES[measure], temperatures
        self.staging = Staging(self.device) if self.device.type == "cuda" else None
        self.ahead = AHEAD if graphs else 0
        self.slots = [_Graphs(self) for _ in range(self.ahead + 2)] if graphs else []
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
        sure = self.measure(scaled.softmax(-1))
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
        return tuple(_like(t, samples) for t in self._tensors(state))

    def put(self, state: Any, rows: np.ndarray, room: State, begin: int) -> None:
        index = self._index(rows)
        for tensor, slot in zip(self._tensors(state), room, strict=True):
            torch.index_select(_flat(_in_order(tensor)), 0, index, out=_flat(slot)[begin : begin + len(rows)])

    def _tensors(self, state: Any) -> State:
        """A state's tensors, wherever they lie."""
        return state[0].tensors() if isinstance(state[0], Live) else tuple(state)

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


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A function that reads and writes tensors of its own as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode(), exact_float32():
        for _ in range(3):  # let libraries choose and allocate before anything is recorded
            step()
    torch.cuda.current_stream().wait_stream(side)
    # Other threads (a server's, a loader's) may speak to the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.inference_mode(), exact_float32():
        step()
    return graph


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


@dataclass(frozen=True)
class Live:
    """A state that lies in the graphs' own memory: some rows of what stage `stage` left there.

    `packed`: they are the first rows already, in this order. `done`: when the stage has ended.
    """

    graphs: _Graphs
    stage: int
    rows: np.ndarray
    packed: bool = False
    done: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def tensors(self) -> State:
        return self.graphs.room(self.stage + 1)

    def answer(self) -> Tensor:
        """What the stage said of its samples, [2, n]; the host waits until it has."""
        if self.done is not None:
            self.done.synchronize()
        return self.graphs.answer(len(self))


class _Graphs:
    """Captured stages, made when a size is first needed, and the memory that they share.

    `rooms[k]` holds the state before stage k+1, for as many samples as the largest graph takes.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self.rooms: dict[int, State] = {}
        on_gpu = engine.device.type == "cuda"
        most = BUCKETS[-1]
        self.going = torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu)  # rows that go on, written by the host
        self.index = torch.zeros(most, dtype=torch.int64, device=engine.device)
        self.said = torch.zeros(2 * most, dtype=engine.dtype, pin_memory=on_gpu)  # confidences and labels, read there

    def answer(self, count: int) -> Tensor:
        """What the stage that ran here last said of its `count` samples, [2, count]; it must have ended."""
        return self._said(bucket(count))[:, :count]

    def _said(self, size: int) -> Tensor:
        """Where a graph of some size puts its answer: in one piece, or it could not be copied within the graph."""
        return self.said[: 2 * size].view(2, size)

    def room(self, k: int, like: State | None = None) -> State:
        """Where the state before stage k lies."""
        if k not in self.rooms:
            assert like is not None
            self.rooms[k] = tuple(_like(t, BUCKETS[-1]).zero_() for t in like)
        return self.rooms[k]

    def run(self, k: int, state: Any) -> tuple[Live, tuple[Live]]:
        live = state[0]
        if not isinstance(live, Live):
            for slot, given in zip(self.room(k, state), state, strict=True):
                slot[: len(given)].copy_(given)
            live = Live(self, k - 1, np.arange(len(live)), packed=True)
        size = bucket(len(live))
        if not live.packed:
            self.going[: len(live)] = torch.from_numpy(live.rows)
        key = (k, size, live.packed)
        if key not in self.captured:
            self.captured[key] = self._checked(partial(self._step, *key), size)
        self.captured[key].replay()
        after = Live(self, k, np.arange(len(live)), True, self._mark())
        return after, (after,)

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind all that the device was told so far."""
        if self.engine.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _checked(self, step: Callable[[], None], size: int) -> torch.cuda.CUDAGraph:
        """A stage as a graph that was seen to say what the stage itself says."""
        graph = captured(step)
        said = []
        for run in (step, graph.replay):
            self.said.fill_(math.nan)
            run()
            self.engine.wait()
            said.append(self._said(size).clone())
        if not torch.allclose(said[0], said[1], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise RuntimeError("a captured stage does not say what the stage says; load the network with graphs=False")
        return graph

    def _step(self, k: int, size: int, packed: bool) -> None:
        """Stage k on the first `size` rows of its room, or on those that the host names."""
        state = self.rooms[k]
        if packed:
            state = tuple(t[:size] for t in state)
        else:
            self.index[:size].copy_(self.going[:size], non_blocking=True)
            rows = (torch.index_select(_flat(t), 0, self.index[:size]) for t in state)
            state = tuple(_unflat(own, t) for own, t in zip(rows, state, strict=True))
        logits, after = self.engine.model.step(k, state)
        self._said(size).copy_(self.engine.verdict(k, logits), non_blocking=True)
        if k < self.engine.num_exits:
            for slot, own in zip(self.room(k + 1, after), after, strict=True):
                slot[:size].copy_(own)


def _unflat(rows: Tensor, like: Tensor) -> Tensor:
    """Rows of `_flat` as a tensor again."""
    if like.dim() != 4:
        return rows.view(len(rows), *like.shape[1:])
    _, channels, height, width = like.shape
    return rows.view(len(rows), height, width, channels).permute(0, 3, 1, 2)


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
    known: dict[int, tuple[Tensor, torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def run(images: Tensor) -> Tensor:
        if len(images) not in known:
            slot, out = _like(images, len(images)).zero_(), []
            known[len(images)] = slot, captured(lambda: out.append(forward(slot))), out
        slot, graph, out = known[len(images)]
        slot.copy_(images)
        graph.replay()
        return out[-1]  # the recorded run's

    return run
