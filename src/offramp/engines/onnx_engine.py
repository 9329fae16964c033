"""Stages run by ONNX Runtime, one graph each; numpy arrays in and out, no torch.

Graph k takes `state_0`, `state_1`, ... and gives `logits` and `next_0`, `next_1`, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offramp.confidence import confidences

State = tuple[Any, ...]


class OnnxEngine:
    """One session per stage."""

    def __init__(
        self,
        stages: Sequence[str | Path | bytes],
        measure: str = "max_softmax",
        temperatures: Sequence[float] | None = None,
        threads: int | None = None,
    ) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        sources = [s if isinstance(s, bytes) else str(s) for s in stages]
        self.sessions = [ort.InferenceSession(s, options, providers=["CPUExecutionProvider"]) for s in sources]
        self.names = [[i.name for i in session.get_inputs()] for session in self.sessions]
        self.num_exits = len(self.sessions)
        self.measure, self.temperatures = measure, temperatures

    def begin(self, images: np.ndarray) -> State:
        return (np.ascontiguousarray(images, np.float32),)

    def run(self, k: int, state: State) -> tuple[np.ndarray, State]:
        logits, *after = self.sessions[k - 1].run(None, dict(zip(self.names[k - 1], state, strict=True)))
        return logits, tuple(after)

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        return self.run(k, state)

    def judge(self, k: int, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = None if self.temperatures is None else self.temperatures[k - 1 : k]
        with np.errstate(invalid="ignore"):
            return confidences(logits[None], self.measure, own, checked=False)[0], logits.argmax(-1)

    def gather(self, k: int, parts: Sequence[tuple[State, np.ndarray]]) -> State:
        packed = []
        for at in range(len(parts[0][0])):
            taken = [np.take(state[at], rows, axis=0) for state, rows in parts]
            packed.append(taken[0] if len(taken) == 1 else np.concatenate(taken))
        return tuple(packed)

    def keep(self, state: State) -> State:
        return state
