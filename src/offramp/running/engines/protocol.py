"""What an engine is: something that runs a network's stages one at a time, and what is done between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

EngineState = tuple[Any, ...]  # the engine's own arrays; the first dimension is the batch


class Engine(Protocol):
    """K stages that can be run one at a time, and what is done between them."""

    num_exits: int
    ahead: int  # how many more stages may be told to run before the first of them is judged
    place: str  # the device it runs on, as people call it

    def use(self, slot: int) -> None:
        """What is gathered and run next lies in memory of this slot, so that other slots stay as they are.

        Slot 0 is for whoever judges each stage before the next; the `ahead` + 1 slots behind it are for a pool.
        """

    def active(self) -> AbstractContextManager[Any]:
        """What must surround all other calls; entered once for many of them."""

    def begin(self, images: np.ndarray) -> EngineState:
        """The state before stage 1, from normalised images [n, 3, h, w]."""

    def run(self, k: int, state: EngineState) -> tuple[Any, EngineState]:
        """Run stage k; its exit's logits and the state after it. What was returned before may be overwritten."""

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        """Confidences and labels of exit k on the host: the one moment at which a stage waits for the device."""

    def gather(self, k: int, parts: Sequence[tuple[EngineState, np.ndarray]]) -> EngineState:
        """One packed state before stage k, from some rows of each of several states."""

    def logits(self, k: int, state: EngineState) -> tuple[np.ndarray, EngineState]:
        """Run stage k for its plain logits on the host, to compare engines."""

    def room(self, state: EngineState, samples: int) -> EngineState:
        """Memory for a state of so many samples like this one's, which `run` leaves alone."""

    def put(self, state: EngineState, rows: np.ndarray, room: EngineState, begin: int) -> None:
        """Copy some rows of a state into such memory, from its row `begin` on."""

    def wait(self) -> None:
        """Until the device has done all that it was told to."""


def warm(engine: Engine, images: np.ndarray) -> None:
    """Let an engine choose its algorithms and capture its stages for batches like this one, in every slot."""
    with engine.active():
        for slot in range(engine.ahead + 2 if engine.ahead else 1):
            engine.use(slot)
            state = engine.begin(images)
            for k in range(1, engine.num_exits + 1):
                verdict, state = engine.run(k, state)
                engine.judge(k, verdict)
        engine.use(0)


def copied(engine: Engine, state: EngineState) -> EngineState:
    """A state in memory of its own."""
    samples = len(state[0])
    room = engine.room(state, samples)
    engine.put(state, np.arange(samples), room, 0)
    return room


def all_logits(engine: Engine, images: np.ndarray) -> np.ndarray:
    """The logits of every exit, [K, n, C], with nobody leaving."""
    found = []
    with engine.active():
        state = engine.begin(images)
        for k in range(1, engine.num_exits + 1):
            logits, state = engine.logits(k, state)
            found.append(logits)
    return np.stack(found)
