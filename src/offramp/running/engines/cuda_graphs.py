"""A network's stages as CUDA graphs, and images on their way to a GPU.

A stage is many small kernels; at the batch sizes of inference, launching them takes longer than running them. So
each stage is captured per batch size of a few. A graph holds all that happens between two decisions: the rows that
go on come from the host, are packed, run, and what their exit says goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.device import exact_float32, synchronize
from offramp.models.exits import ExitNet, State

Verdict = Callable[[int, Tensor], Tensor]  # exit and its logits -> confidences and labels, [2, n]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # batch sizes that are captured; others run in the next larger
ROOMS = 4  # of pinned memory: more copies than a pool has under way
SMALL_BYTES = 1 << 16  # so much is taken over at once, wherever it lies
LARGE_BYTES = 1 << 26  # beyond this, waiting costs little beside the copy, and pinned memory is scarce


def bucket(count: int) -> int:
    """The captured batch size that `count` samples run in."""
    return next(size for size in BUCKETS if size >= count)


def flat(tensor: Tensor) -> Tensor:
    """A tensor in memory order (NHWC if it is an image) as rows, without copying; numbers become rows of one."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).unsqueeze(-1).flatten(1)


def like(tensor: Tensor, count: int) -> Tensor:
    """Memory for `count` rows such as a tensor's."""
    format_ = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
    shape = (count, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=format_)


def unflat(rows: Tensor, example: Tensor) -> Tensor:
    """Rows of `flat` as a tensor again."""
    if example.dim() != 4:
        return rows.view(len(rows), *example.shape[1:])
    _, channels, height, width = example.shape
    return rows.view(len(rows), height, width, channels).permute(0, 3, 1, 2)


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A function that reads and writes tensors of its own as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode(), exact_float32():
        for _ in range(3):  # let libraries choose and allocate before anything is captured
            step()
    torch.cuda.current_stream().wait_stream(side)
    # Other threads (a server's, a loader's) may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.inference_mode(), exact_float32():
        step()
    return graph


@dataclass(frozen=True)
class Live:
    """A state that lies in the graphs' own memory: some rows of what stage `stage` left there.

    `packed`: they are the first rows already, in this order. `done`: when the stage has ended.
    """

    graphs: StageGraphs
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


class StageGraphs:
    """Captured stages, made when a size is first needed, and the memory that they share.

    `rooms[k]` holds the state before stage k+1, for as many samples as the largest graph takes.
    """

    def __init__(self, model: ExitNet, verdict: Verdict, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.verdict, self.device = model, verdict, device
        self.captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self.rooms: dict[int, State] = {}
        on_gpu = device.type == "cuda"
        most = BUCKETS[-1]
        self.going = torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu)  # rows that go on, written by the host
        self.index = torch.zeros(most, dtype=torch.int64, device=device)
        self.said = torch.zeros(2 * most, dtype=dtype, pin_memory=on_gpu)  # confidences and labels, read there

    def answer(self, count: int) -> Tensor:
        """What the stage that ran here last said of its `count` samples, [2, count]; it must have ended."""
        return self._said(bucket(count))[:, :count]

    def _said(self, size: int) -> Tensor:
        """Where a graph of some size puts its answer: in one piece, or it could not be copied within the graph."""
        return self.said[: 2 * size].view(2, size)

    def room(self, k: int, example: State | None = None) -> State:
        """Where the state before stage k lies."""
        if k not in self.rooms:
            assert example is not None
            self.rooms[k] = tuple(like(t, BUCKETS[-1]).zero_() for t in example)
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
        if self.device.type != "cuda":
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
            synchronize(self.device)
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
            rows = (torch.index_select(flat(t), 0, self.index[:size]) for t in state)
            state = tuple(unflat(own, t) for own, t in zip(rows, state, strict=True))
        logits, after = self.model.step(k, state)
        self._said(size).copy_(self.verdict(k, logits), non_blocking=True)
        if k < self.model.num_exits:
            for slot, own in zip(self.room(k + 1, after), after, strict=True):
                slot[:size].copy_(own)


class Staging:
    """Sends tensors of the host to a GPU through pinned memory; the host waits only if `ROOMS` of them are under way.

    A copy from ordinary memory waits for all that the device was told before it; one from pinned memory does not.
    But to pin memory takes milliseconds, so it is done once for a few buffers, which take turns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device, 0
        self.rooms = torch.empty(ROOMS, 0, dtype=torch.uint8)
        self.sent = [torch.cuda.Event() for _ in range(ROOMS)]

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the device, in order with what it is told later; `tensor` may be written to at once."""
        size = tensor.nbytes
        if not SMALL_BYTES < size <= LARGE_BYTES:
            return tensor.to(self.device, non_blocking=True)
        if size > self.rooms.shape[1]:  # a power of two, so that sizes that vary soon fit
            self.rooms = torch.empty(ROOMS, 1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        self.turn = (self.turn + 1) % ROOMS
        self.sent[self.turn].synchronize()
        room = self.rooms[self.turn, :size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        copy = room.to(self.device, non_blocking=True)
        self.sent[self.turn].record()
        return copy
