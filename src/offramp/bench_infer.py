"""How much of the promised speed is real: the whole network, the ideal, and ours, timed in one run.

Exits are planned: samples leave in the shares of a q (or of a bundle's policy), whatever their confidence, so that
a network without training can be timed too; everything else runs as it does in service. Two ideals: the stage
times at the sizes that really ran, and the stage times at a full batch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp.bundle import MANIFEST, Bundle, load_bundle
from offramp.choices import unknown
from offramp.console import progress
from offramp.packing import SIZES, measure_packing
from offramp.policy import Policy
from offramp.pool import Pool, Ticket
from offramp.runtime import Engine, Packing, Runtime, State
from offramp.shares import exit_counts
from offramp.tables import Table

POOLED_BATCHES = 24  # through the pool, of which the first and last are not full


@dataclass(frozen=True)
class InferBench:
    """One row: milliseconds per batch, images per second, and how near to the ideals they come."""

    batch: int
    shares: str
    whole_ms: float
    ideal_ms: float
    ours_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    images_per_s: float
    speed_up: float
    of_ideal: float
    pooled_images_per_s: float
    pooled_speed_up: float
    of_full_ideal: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Planned:
    """An engine whose samples leave where they are told to; the plan travels as the first part of the state."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_exits = engine, engine.num_exits
        self.plan = np.zeros(0, np.int64)
        self._now = self.plan

    def begin(self, images: np.ndarray) -> State:
        return (self.plan, *self.engine.begin(images))

    def run(self, k: int, state: State) -> tuple[Any, State]:
        self._now = state[0]
        logits, after = self.engine.run(k, tuple(state[1:]))
        return logits, (state[0], *after)

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        _, labels = self.engine.judge(k, logits)
        return (self._now == k).astype(np.float32), labels

    def gather(self, k: int, parts: Sequence[tuple[State, np.ndarray]]) -> State:
        plan = np.concatenate([state[0][rows] for state, rows in parts])
        return (plan, *self.engine.gather(k, [(tuple(state[1:]), rows) for state, rows in parts]))

    def logits(self, k: int, state: State) -> tuple[np.ndarray, State]:
        raise NotImplementedError

    def keep(self, state: State) -> State:
        return (state[0], *self.engine.keep(tuple(state[1:])))


def plan_exits(samples: int, shares: Sequence[float], seed: int) -> np.ndarray:
    """An exit per sample in the given shares, as exactly as whole samples allow, in random order."""
    ends = np.round(np.cumsum(shares) * samples).astype(np.int64)
    exits = np.searchsorted(ends, np.arange(samples), side="right") + 1
    return np.random.default_rng(seed).permutation(np.minimum(exits, len(shares)))


@dataclass(frozen=True)
class Subject:
    """What is timed: an engine, the whole network without inner heads, and the images' shape."""

    engine: Engine
    whole: Callable[[np.ndarray], Any]
    shape: tuple[int, int, int]


def subject_of(source: str, kind: str = "torch", device: str = "auto") -> tuple[Subject, Bundle | None]:
    """A bundle, or a network by name with fresh params on the engine asked for."""
    if (Path(source) / MANIFEST).is_file():
        bundle = load_bundle(source, device=device)
        whole = _whole_torch(bundle.engine) if bundle.format == "torch" else _all_stages(bundle.engine)
        return Subject(bundle.engine, whole, bundle.card.input_shape), bundle
    from offramp.device import pick_device
    from offramp.engines.torch_engine import TorchEngine
    from offramp.models.fold import folded
    from offramp.models.registry import create_model

    model = folded(create_model(source).set_schedule("eager"))
    if kind == "torch":
        place = pick_device(device)
        engine: Engine = TorchEngine(model, device=place, graphs=place.type == "cuda")
        return Subject(engine, _whole_torch(engine), model.input_shape), None
    if kind != "onnx":
        raise ValueError(unknown("engine", kind, ("torch", "onnx")))
    return Subject(*_onnx_subject(model), model.input_shape), None


def _whole_torch(engine: Any) -> Callable[[np.ndarray], Any]:
    """The network without inner heads, as fast as the engine can run it."""
    from offramp.engines.torch_engine import whole_network

    return whole_network(engine)


def _all_stages(engine: Engine) -> Callable[[np.ndarray], Any]:
    """All stages one after the other: what a bundle of graphs offers as the whole network, inner heads included."""

    def run(images: np.ndarray) -> Any:
        state = engine.begin(images)
        for k in range(1, engine.num_exits + 1):
            logits, state = engine.run(k, state)
        return engine.judge(engine.num_exits, logits)

    return run


def _onnx_subject(model: Any) -> tuple[Engine, Callable[[np.ndarray], Any]]:
    from offramp.engines.onnx_engine import OnnxEngine
    from offramp.export import onnx_stages, onnx_whole

    engine = OnnxEngine(onnx_stages(model))
    whole = OnnxEngine([onnx_whole(model)])
    return engine, lambda images: whole.judge(1, whole.run(1, whole.begin(images))[0])


def infer_report(
    source: str,
    batches: Sequence[int],
    qs: Sequence[float],
    kind: str = "torch",
    device: str = "auto",
    repeats: int = 10,
    silent: bool = False,
) -> dict[str, Any]:
    """Everything that `offramp bench infer` says, ready for JSON."""
    if any(batch < 1 for batch in batches):
        raise ValueError(f"batch sizes must be 1 or more, got {min(batches)}")
    subject, bundle = subject_of(source, kind, device)
    exits = subject.engine.num_exits
    shares = {f"q={q:g}": _shares(q, exits, bundle) for q in qs}
    images = np.random.default_rng(0).normal(size=(SIZES[-1], *subject.shape)).astype(np.float32)
    packing = measure_packing(subject.engine, images)
    rows, stage_ms = bench_infer(subject, batches, shares, packing, repeats, silent)
    return {
        "source": source,
        "engine": kind if bundle is None else bundle.format,
        "machine": machine_name(subject.engine),
        "rows": [row.to_json() for row in rows],
        "stage_ms": stage_ms,
        "packing": packing.explain() if exits > 1 else [],
    }


def _shares(q: float, exits: int, bundle: Bundle | None) -> tuple[float, ...]:
    """q's shares; for a bundle, those of its nearest policy on the calibration split."""
    if bundle is not None:
        return bundle.policies.at_q(q).shares
    samples = 1_000_000
    return tuple(count / samples for count in exit_counts(samples, exits, q))


def machine_name(engine: Any) -> str:
    """Where an engine runs."""
    place = getattr(engine, "device", None)
    if place is not None:
        from offramp.device import device_name

        return device_name(place)
    return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"


def bench_table(found: dict[str, Any]) -> Table:
    """The rows for people."""
    cells = [
        [
            str(row["batch"]),
            row["shares"],
            *(f"{row[key]:.2f}" for key in ("whole_ms", "ideal_ms", "ours_ms", "p50_ms", "p95_ms", "p99_ms")),
            f"{row['images_per_s']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("speed_up", "of_ideal")),
            f"{row['pooled_images_per_s']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("pooled_speed_up", "of_full_ideal")),
        ]
        for row in found["rows"]
    ]
    columns = ["batch", "shares", "whole ms", "ideal ms", "ours ms", "p50", "p95", "p99", "images/s", "speed-up",
               "of ideal", "pooled images/s", "speed-up", "of ideal"]  # fmt: skip
    return f"{found['source']}, {found['engine']}, {found['machine']}", columns, cells


def bench_infer(
    subject: Subject,
    batches: Sequence[int],
    shares: Mapping[str, Sequence[float]],
    packing: Packing | None = None,
    repeats: int = 10,
    silent: bool = False,
) -> tuple[list[InferBench], dict[str, dict[str, float]]]:
    """Rows for every batch size and every set of shares, and `stage_ms[k][batch]`."""
    exits = subject.engine.num_exits
    stage_ms: dict[str, dict[str, float]] = {str(k): {} for k in range(1, exits + 1)}
    rows = []
    with progress("timing", len(batches) * len(shares), silent=silent) as bar:
        for batch in batches:
            clock = _Clock(subject, batch, repeats)
            for k in range(1, exits + 1):
                stage_ms[str(k)][str(batch)] = clock.stage(k, batch)
            for name, own in shares.items():
                bar.show(f"batch {batch}, {name}")
                rows.append(_row(clock, name, own, packing))
                bar.advance(1, batch)
    return rows, stage_ms


class _Clock:
    """Times stages and the whole network at one batch size; a size is timed once."""

    def __init__(self, subject: Subject, batch: int, repeats: int) -> None:
        self.engine, self.batch, self.repeats, self.subject = subject.engine, batch, repeats, subject
        draw = np.random.default_rng(0)
        self.images = draw.normal(size=(batch, *subject.shape)).astype(np.float32)
        self._states: dict[int, State] = {}
        self._known: dict[tuple[int, int], float] = {}
        self.whole = median_ms(lambda: subject.whole(self.images), repeats)

    def stage(self, k: int, size: int) -> float:
        """Milliseconds of stage k on `size` samples, the answer on the host included."""
        if (k, size) not in self._known:
            state = self._before(k)
            own = state if size == self.batch else self.engine.keep(self.engine.gather(k, [(state, np.arange(size))]))
            self._known[k, size] = median_ms(lambda: self.engine.judge(k, self.engine.run(k, own)[0]), self.repeats)
        return self._known[k, size]

    def _before(self, k: int) -> State:
        if k == 1:
            return self.engine.begin(self.images)
        if k not in self._states:
            self._states[k] = self.engine.keep(self.engine.run(k - 1, self._before(k - 1))[1])
        return self._states[k]


def median_ms(action: Callable[[], Any], repeats: int) -> float:
    """The median of several timings after two that do not count."""
    action()
    action()
    return float(np.median([timed_ms(action) for _ in range(repeats)]))


def timed_ms(action: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


def _row(clock: _Clock, name: str, shares: Sequence[float], packing: Packing | None) -> InferBench:
    batch, exits = clock.batch, len(shares)
    planned = Planned(clock.engine)
    never = Policy("planned", None, (0.5,) * (exits - 1), 0.0, tuple(shares), 0.0)
    runtime = Runtime(planned, never, (1,) * exits, packing)
    calls = max(clock.repeats, 64 // batch)
    plans = plan_exits(batch * calls, shares, 0).reshape(calls, batch)
    if batch >= 32:  # large batches all have the same shares, as they would in the mean
        plans = np.stack([np.random.default_rng(c).permutation(plan_exits(batch, shares, 0)) for c in range(calls)])
    times, ideal = [], 0.0
    for plan in (*plans[:2], *plans):
        planned.plan = plan
        times.append(timed_ms(lambda: runtime(clock.images)))
    for plan in plans:
        sizes = [int((plan >= k).sum()) for k in range(1, exits + 1)]
        ideal += sum(clock.stage(k, size) for k, size in enumerate(sizes, 1) if size) / calls
    own = times[2:]
    ours = float(np.median(own)) if batch >= 32 else float(np.mean(own))
    pooled = _pooled_ms(clock, planned, never, shares)
    full = sum(clock.stage(k, batch) * float(sum(shares[k - 1 :])) for k in range(1, exits + 1)) / batch
    p50, p95, p99 = (float(np.percentile(own, p)) for p in (50, 95, 99))
    return InferBench(
        batch, name, clock.whole, ideal, ours, p50, p95, p99, 1e3 * batch / ours, clock.whole / ours, ideal / ours,
        1e3 / pooled, clock.whole / batch / pooled, full / pooled,
    )  # fmt: skip


def _pooled_ms(clock: _Clock, planned: Planned, policy: Policy, shares: Sequence[float]) -> float:
    """Milliseconds per image of a stream whose survivors are pooled, from when the pool is filled on."""
    exits, batch = len(shares), clock.batch
    pool = Pool(planned, policy, batch, wait_s=60.0)
    plans = plan_exits(batch * POOLED_BATCHES * 2, shares, 1).reshape(2 * POOLED_BATCHES, batch)
    left, began = 0, 0.0
    for at, plan in enumerate(plans):
        if at == POOLED_BATCHES:  # the pool is in its steady state
            left, began = 0, time.perf_counter()
        planned.plan = plan
        pool.add(clock.images, [Ticket(None, exits) for _ in range(batch)])
        while pool.ready():
            left += len(pool.work())
    return 1e3 * (time.perf_counter() - began) / max(left, 1)
