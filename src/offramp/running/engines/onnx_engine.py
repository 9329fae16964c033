"""Stages run by ONNX Runtime, one graph each; numpy arrays in and out, no torch.

Graph k takes `state_0`, `state_1`, ... and gives `logits` and `next_0`, `next_1`, ... On a GPU the stages run by ONNX
Runtime's CUDA provider, where that is installed; between stages the state lies on the host.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.cores import usable_cores
from offramp.common.names import check_device_name
from offramp.measuring.confidence import confidences
from offramp.running.engines.onnx_files import refuse_external_data
from offramp.running.engines.protocol import EngineState


class NoSuchDevice(ValueError):
    """A device was asked for that is not here."""


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def providers(device: str) -> list[Any]:
    """What ONNX Runtime shall run on; `auto` is the GPU if it can use one. A device it cannot use is a ValueError."""
    import onnxruntime as ort

    check_device_name(device)
    if device == "cpu" or (device == "auto" and CUDA not in ort.get_available_providers()):
        return [CPU]
    if CUDA not in ort.get_available_providers():
        raise NoSuchDevice(
            f"device {device!r} was asked for, but the onnxruntime here has no {CUDA}; "
            "use --device cpu, or install onnxruntime-gpu in its place"
        )
    number = device.partition(":")[2] or "0"
    return [(CUDA, {"device_id": number, "use_tf32": "0"}), CPU]  # float32 means float32


class OnnxEngine:
    """One session per stage."""

    def __init__(
        self,
        stages: Sequence[str | Path | bytes],
        measure: str = "max_softmax",
        temperatures: Sequence[float] | None = None,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        import onnxruntime as ort

        wanted = providers(device)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or usable_cores()
        # threads wait actively within a stage, but not after it: they would take the cores from the next stage's
        options.add_session_config_entry("session.force_spinning_stop", "1")
        graphs = [stage if isinstance(stage, bytes) else Path(stage).read_bytes() for stage in stages]
        for graph in graphs:
            refuse_external_data(graph)
        self.sessions = [ort.InferenceSession(graph, options, providers=wanted) for graph in graphs]
        on_gpu = all(CUDA in session.get_providers() for session in self.sessions)
        if device not in ("auto", "cpu") and not on_gpu:  # it falls back to the CPU by itself
            raise NoSuchDevice(f"device {device!r} was asked for, but onnxruntime finds no such GPU here")
        self.names = [[i.name for i in session.get_inputs()] for session in self.sessions]
        self.num_exits, self.ahead = len(self.sessions), 0
        number = device.partition(":")[2] or "0"
        host = f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"
        self.place = f"CUDA device {number}" if on_gpu else host
        self.measure, self.temperatures = measure, temperatures

    def use(self, slot: int) -> None:
        pass

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, images: np.ndarray) -> EngineState:
        return (np.ascontiguousarray(images, np.float32),)

    def run(self, k: int, state: EngineState) -> tuple[np.ndarray, EngineState]:
        logits, *after = self.sessions[k - 1].run(None, dict(zip(self.names[k - 1], state, strict=True)))
        return logits, tuple(after)

    def logits(self, k: int, state: EngineState) -> tuple[np.ndarray, EngineState]:
        return self.run(k, state)

    def judge(self, k: int, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = None if self.temperatures is None else self.temperatures[k - 1 : k]
        with np.errstate(invalid="ignore"):
            return confidences(logits[None], self.measure, own, checked=False)[0], logits.argmax(-1)

    def gather(self, k: int, parts: Sequence[tuple[EngineState, np.ndarray]]) -> EngineState:
        room, begin = self.room(parts[0][0], sum(len(rows) for _, rows in parts)), 0
        for state, rows in parts:
            self.put(state, rows, room, begin)
            begin += len(rows)
        return room

    def room(self, state: EngineState, samples: int) -> EngineState:
        return tuple(np.empty((samples, *array.shape[1:]), array.dtype) for array in state)

    def put(self, state: EngineState, rows: np.ndarray, room: EngineState, begin: int) -> None:
        for array, slot in zip(state, room, strict=True):  # `clip` lets numpy write in place; rows are always valid
            np.take(array, rows, axis=0, out=slot[begin : begin + len(rows)], mode="clip")

    def wait(self) -> None:
        pass
