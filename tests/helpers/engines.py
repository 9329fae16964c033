"""An engine whose stages compute with plain numbers, and policies for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from offramp.measuring.policy import Policy
from offramp.running.engines.protocol import Engine
from offramp.running.pool import Left, Pool, Ticket


def policy(*thresholds: float) -> Policy:
    return Policy("q", None, thresholds, 0.0, (), 0.0)


class Numbers:
    """An engine of plain numbers: image i has `sure[k, i]` at exit k + 1; counts what it runs.

    `ahead`: it may run so many stages before they are judged; each slot holds what was run there last, nothing older.
    """

    def __init__(self, sure: np.ndarray, ahead: int = 0) -> None:
        self.sure, self.num_exits, self.ran = sure.astype(np.float32), len(sure), []
        self.ahead, self.slot = ahead, 0
        self.memory = np.full((ahead + 2, 1000), -1)

    def use(self, slot: int) -> None:
        self.slot = slot

    def active(self) -> Any:
        return nullcontext()

    def begin(self, images: np.ndarray) -> tuple[Any, ...]:
        return (images[:, 0, 0, 0].astype(np.int64),)

    def run(self, k: int, state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        self.ran.append((k, len(state[0])))
        own = self.memory[self.slot, : len(state[0])]
        own[:] = state[0]
        return own, (own,)

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        return self.sure[k - 1, logits], 10 * k + logits

    def gather(self, k: int, parts: Any) -> tuple[Any, ...]:
        return (np.concatenate([state[0][rows] for state, rows in parts]),)

    def logits(self, k: int, state: Any) -> Any:
        raise NotImplementedError

    def room(self, state: tuple[Any, ...], samples: int) -> tuple[Any, ...]:
        return tuple(np.empty((samples, *array.shape[1:]), array.dtype) for array in state)

    def put(self, state: tuple[Any, ...], rows: np.ndarray, room: tuple[Any, ...], begin: int) -> None:
        for array, slot in zip(state, room, strict=True):
            slot[begin : begin + len(rows)] = array[rows]


def numbered(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None, None, None].repeat(3, 1)


def pooled(engine: Engine, policy: Policy, images: np.ndarray, batch: int = 8, arriving: int = 3) -> list[Left]:
    """What a pool says of images that come a few at a time, in their order."""
    pool, found = Pool(engine, policy, batch, wait_s=60.0), list[Left]()
    for begin in range(0, len(images), arriving):
        rows = range(begin, min(begin + arriving, len(images)))
        pool.add(images[begin : rows.stop], [Ticket(row, engine.num_exits) for row in rows])
        while pool.ready():
            found += pool.work()
    while pool.waiting:
        found += pool.work(flush=True)
    return sorted(found, key=lambda left: left.ticket.key)
