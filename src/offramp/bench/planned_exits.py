"""Exits by plan, for timing: samples leave where they are told to, whatever their confidence; all else runs as ever."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from offramp.running.runtime import Engine, State


class Planned:
    """An engine whose samples leave where they are told to; the plan travels as the first part of the state."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_exits = engine, engine.num_exits
        self.plan = np.zeros(0, np.int64)
        self.ahead = engine.ahead

    def use(self, slot: int) -> None:
        self.engine.use(slot)

    def active(self) -> AbstractContextManager[Any]:
        return self.engine.active()

    def begin(self, images: np.ndarray) -> State:
        return (self.plan, *self.engine.begin(images))

    def run(self, k: int, state: State) -> tuple[Any, State]:
        logits, after = self.engine.run(k, tuple(state[1:]))
        return (state[0], logits), (state[0], *after)

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        plan, own = logits
        return (plan == k).astype(np.float32), self.engine.judge(k, own)[1]

    def gather(self, k: int, parts: Sequence[tuple[State, np.ndarray]]) -> State:
        plan = np.concatenate([state[0][rows] for state, rows in parts])
        return (plan, *self.engine.gather(k, [(tuple(state[1:]), rows) for state, rows in parts]))

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        raise NotImplementedError

    def room(self, state: State, samples: int) -> State:
        return (np.empty(samples, np.int64), *self.engine.room(tuple(state[1:]), samples))

    def put(self, state: State, rows: np.ndarray, room: State, begin: int) -> None:
        room[0][begin : begin + len(rows)] = state[0][rows]
        self.engine.put(tuple(state[1:]), rows, tuple(room[1:]), begin)


def plan_exits(samples: int, shares: Sequence[float], seed: int) -> np.ndarray:
    """An exit per sample in the given shares, as exactly as whole samples allow, in random order."""
    ends = np.round(np.cumsum(shares) * samples).astype(np.int64)
    exits = np.searchsorted(ends, np.arange(samples), side="right") + 1
    return np.random.default_rng(seed).permutation(np.minimum(exits, len(shares)))
