"""Running a network stage by stage, so that skipped work is really skipped.

An engine (PyTorch or ONNX Runtime) runs stages; a policy says who leaves. Confident samples leave, the others are
packed together and go on. Nothing here knows which engine it drives or imports anything of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from offramp.measuring.policy import Policy
from offramp.running.result import ExitResult, ceiling

State = tuple[Any, ...]  # the engine's own arrays; the first dimension is the batch


class Engine(Protocol):
    """K stages that can be run one at a time, and what is done between them."""

    num_exits: int
    ahead: int  # how many more stages may be told to run before the first of them is judged

    def use(self, slot: int) -> None:
        """What is gathered and run next lies in memory of this slot, so that other slots stay as they are.

        Slot 0 is for whoever judges each stage before the next; the `ahead` + 1 slots behind it are for a pool.
        """

    def active(self) -> AbstractContextManager[Any]:
        """What must surround all other calls; entered once for many of them."""

    def begin(self, images: np.ndarray) -> State:
        """The state before stage 1, from normalised images [n, 3, h, w]."""

    def run(self, k: int, state: State) -> tuple[Any, State]:
        """Run stage k; its exit's logits and the state after it. What was returned before may be overwritten."""

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        """Confidences and labels of exit k on the host: the one moment at which a stage waits for the device."""

    def gather(self, k: int, parts: Sequence[tuple[State, np.ndarray]]) -> State:
        """One packed state before stage k, from some rows of each of several states."""

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        """Run stage k for its plain logits on the host, to compare engines."""

    def room(self, state: State, samples: int) -> State:
        """Memory for a state of so many samples like this one's, which `run` leaves alone."""

    def put(self, state: State, rows: np.ndarray, room: State, begin: int) -> None:
        """Copy some rows of a state into a room, from its row `begin` on."""


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


def wait(engine: Engine) -> None:
    """Until a device has done all that it was told to."""
    getattr(engine, "wait", lambda: None)()


def copied(engine: Engine, state: State) -> State:
    """A state in memory of its own."""
    samples = len(state[0])
    room = engine.room(state, samples)
    engine.put(state, np.arange(samples), room, 0)
    return room


class Packing(Protocol):
    """The rule that decides whether leaving samples are cut out of the batch before the next stage."""

    def worth_it(self, k: int, batch: int, staying: int) -> bool:
        """Whether going on after exit k with `staying` instead of `batch` samples saves more than packing costs."""


class AlwaysPack:
    """Pack whenever anybody leaves."""

    def worth_it(self, k: int, batch: int, staying: int) -> bool:
        return True


class Runtime:
    """A network under a policy: `runtime(images) -> ExitResult`."""

    def __init__(self, engine: Engine, policy: Policy, costs: Sequence[int], packing: Packing | None = None) -> None:
        if len(policy.thresholds) != engine.num_exits - 1 or len(costs) != engine.num_exits:
            raise ValueError(f"the policy has {len(policy.thresholds) + 1} exits, the network {engine.num_exits}")
        self.engine, self.policy, self.costs = engine, policy, tuple(costs)
        self.packing = AlwaysPack() if packing is None else packing
        self._seconds: dict[tuple[int, int], float] = {}  # of each stage when it last ran at about this size

    def __call__(
        self,
        images: np.ndarray,
        *,
        max_exit: int | None = None,
        max_mul_adds: float | None = None,
        deadline_ms: float | None = None,
    ) -> ExitResult:
        """Run normalised images [n, 3, h, w]; no sample goes beyond the limits, and those cut short are `forced`.

        Under a deadline a stage is begun only if it would end in time, judging by how long it took last.
        """
        until = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        last = ceiling(self.costs, max_exit, max_mul_adds)
        result = ExitResult.empty(len(images))
        if len(images):
            with self.engine.active():
                self._walk(images, last, until, result)
        return result

    def _walk(self, images: np.ndarray, last: int, until: float | None, result: ExitResult) -> None:
        state = self.engine.begin(images)
        inside = np.arange(len(images))  # which sample each row of the state is
        going = np.ones(len(images), bool)  # whether that row still waits for its answer
        for k in range(1, last + 1):
            began = time.perf_counter()
            logits, state = self.engine.run(k, state)
            confidences, labels = self.engine.judge(k, logits)
            self._seconds[k, len(going).bit_length()] = time.perf_counter() - began
            leaves = going & self._confident(k, confidences)
            if k == last or self._too_late(k + 1, int((going & ~leaves).sum()), until):
                leaves = going.copy()
            self._record(result, k, inside, leaves, labels, confidences)
            going &= ~leaves
            staying = int(going.sum())
            if not staying:
                break
            if staying < len(going) and self.packing.worth_it(k, len(going), staying):
                rows = np.flatnonzero(going)
                state, inside, going = self.engine.gather(k + 1, [(state, rows)]), inside[rows], np.ones(staying, bool)

    def _too_late(self, k: int, rows: int, until: float | None) -> bool:
        """Whether stage k would end after the deadline; what is expected of it shrinks each time it is not begun."""
        if until is None:
            return False
        key = (k, rows.bit_length())
        late = time.perf_counter() + self._seconds.get(key, 0.0) >= until
        if late and key in self._seconds:
            self._seconds[key] /= 2  # one slow moment must not decide for good
        return late

    def _confident(self, k: int, confidences: np.ndarray) -> np.ndarray:
        """Who may leave at exit k; at the last one everybody. Not a number is never confident."""
        if k == self.engine.num_exits:
            return np.ones(len(confidences), bool)
        return confidences >= np.float32(self.policy.thresholds[k - 1])

    def _record(
        self,
        result: ExitResult,
        k: int,
        inside: np.ndarray,
        leaves: np.ndarray,
        labels: np.ndarray,
        confidences: np.ndarray,
    ) -> None:
        who = inside[leaves]
        result.labels[who], result.confidences[who] = labels[leaves], confidences[leaves]
        result.exits[who], result.mul_adds[who] = k, self.costs[k - 1]
        result.forced[who] = ~self._confident(k, confidences)[leaves]
