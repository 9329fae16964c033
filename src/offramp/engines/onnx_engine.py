"""Stages run by ONNX Runtime, one graph each; numpy arrays in and out, no torch.

Graph k takes `state_0`, `state_1`, ... and gives `logits` and `next_0`, `next_1`, ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from offramp.confidence import confidences

State = tuple[Any, ...]


@cache
def _share_threads(threads: int | None) -> bool:
    """Give all sessions of this process one set of threads.

    Each session would bring its own, which spin for a while after a stage and take the cores from the next.
    The number can be set once per process, before the first session.
    """
    import onnxruntime as ort

    try:
        ort.set_global_thread_pool_sizes(threads or os.cpu_count() or 1, 1)
    except Exception:  # an older version, or somebody else has begun to use it
        return False
    return True


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
        options.use_per_session_threads = not _share_threads(threads)
        if options.use_per_session_threads and threads is not None:
            options.intra_op_num_threads = threads
        sources = [s if isinstance(s, bytes) else str(s) for s in stages]
        self.sessions = [ort.InferenceSession(s, options, providers=["CPUExecutionProvider"]) for s in sources]
        self.names = [[i.name for i in session.get_inputs()] for session in self.sessions]
        self.num_exits = len(self.sessions)
        self.measure, self.temperatures = measure, temperatures

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

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
        count = sum(len(rows) for _, rows in parts)
        packed = []
        for at, first in enumerate(parts[0][0]):
            out = np.empty((count, *first.shape[1:]), first.dtype)
            begin = 0
            for state, rows in parts:  # `clip` lets numpy write in place; rows are always valid
                np.take(state[at], rows, axis=0, out=out[begin : begin + len(rows)], mode="clip")
                begin += len(rows)
            packed.append(out)
        return tuple(packed)

    def keep(self, state: State, rows: np.ndarray) -> tuple[State, np.ndarray]:
        return state, rows
