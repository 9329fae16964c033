"""How much of the promised speed is real: the whole network, the ideal, and ours, timed in one run.

Exits are planned: samples leave in the shares of a q (or of a bundle's policy), whatever their confidence, so that
a network without training can be timed too; everything else runs as it does in service. Two ideals: the stage
times at the sizes that really ran, and the stage times at a full batch. Each stage, and each batch of the whole
network, is timed until its answer is there; on a GPU a pool overlaps stages with the host's work and can pass such an
ideal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.console import progress
from offramp.common.formatting import Table
from offramp.common.names import unknown
from offramp.common.pretrained import is_bundle
from offramp.common.timing import median_ms, timed_ms
from offramp.measuring.policy import Policy
from offramp.measuring.thresholds import exit_counts
from offramp.running.bundle import Bundle, load_bundle
from offramp.running.engines.protocol import Engine, EngineState, copied, warm
from offramp.running.packing import SIZES, measure_packing, tuned_packing
from offramp.running.pool import Pool, Ticket
from offramp.running.runtime import Packing, Runtime
from offramp.runs.folder import CONFIG

POOLED_IMAGES = 4096  # about so many through the pool to fill it, and as many again to time it


class PlannedExits:
    """An engine whose samples leave where they are told to; the plan travels as the first part of the state."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_exits = engine, engine.num_exits
        self.plan = np.zeros(0, np.int64)
        self.ahead, self.place = engine.ahead, engine.place

    def use(self, slot: int) -> None:
        self.engine.use(slot)

    def active(self) -> AbstractContextManager[Any]:
        return self.engine.active()

    def begin(self, images: np.ndarray) -> EngineState:
        return (self.plan, *self.engine.begin(images))

    def run(self, k: int, state: EngineState) -> tuple[Any, EngineState]:
        logits, after = self.engine.run(k, tuple(state[1:]))
        return (state[0], logits), (state[0], *after)

    def judge(self, k: int, logits: Any) -> tuple[np.ndarray, np.ndarray]:
        plan, own = logits
        return (plan == k).astype(np.float32), self.engine.judge(k, own)[1]

    def gather(self, k: int, parts: Sequence[tuple[EngineState, np.ndarray]]) -> EngineState:
        plan = np.concatenate([state[0][rows] for state, rows in parts])
        return (plan, *self.engine.gather(k, [(tuple(state[1:]), rows) for state, rows in parts]))

    def logits(self, k: int, state: EngineState) -> tuple[np.ndarray, EngineState]:
        raise NotImplementedError

    def room(self, state: EngineState, samples: int) -> EngineState:
        return (np.empty(samples, np.int64), *self.engine.room(tuple(state[1:]), samples))

    def put(self, state: EngineState, rows: np.ndarray, room: EngineState, begin: int) -> None:
        room[0][begin : begin + len(rows)] = state[0][rows]
        self.engine.put(tuple(state[1:]), rows, tuple(room[1:]), begin)

    def wait(self) -> None:
        self.engine.wait()


def plan_exits(samples: int, shares: Sequence[float], seed: int) -> np.ndarray:
    """An exit per sample in the given shares, as exactly as whole samples allow, in random order."""
    ends = np.round(np.cumsum(shares) * samples).astype(np.int64)
    exits = np.searchsorted(ends, np.arange(samples), side="right") + 1
    return np.random.default_rng(seed).permutation(np.minimum(exits, len(shares)))


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


@dataclass(frozen=True)
class Subject:
    """What is timed: an engine, the whole network without inner heads, and the images' shape."""

    engine: Engine
    whole: Callable[[np.ndarray], Any]
    shape: tuple[int, int, int]


def subject_of(source: str, kind: str | None = None, device: str = "auto") -> tuple[Subject, Bundle | None]:
    """A bundle, or a network by name with fresh params on the engine asked for (torch unless told otherwise)."""
    if (Path(source) / CONFIG).is_file():
        raise ValueError(
            f"{source} is a run or model folder; make a bundle of the run first: offramp export {source} --out BUNDLE"
        )
    if is_bundle(source):
        bundle = load_bundle(source, device=device)
        whole = _whole_torch(bundle.engine) if bundle.format == "torch" else _all_stages(bundle.engine)
        if kind not in (None, bundle.format):
            raise ValueError(f"{source} is a bundle for {bundle.format}, so it cannot be timed with {kind}")
        return Subject(bundle.engine, whole, bundle.card.input_shape), bundle
    from offramp.common.device import pick_device
    from offramp.models.fold import folded
    from offramp.models.registry import create_model
    from offramp.running.engines.torch_engine import TorchEngine

    model = folded(create_model(source).set_schedule("eager"))
    if kind in (None, "torch"):
        place = pick_device(device)
        engine: Engine = TorchEngine(model, device=place, graphs=place.type == "cuda")
        return Subject(engine, _whole_torch(engine), model.input_shape), None
    if kind != "onnx":
        raise ValueError(unknown("engine", kind, ("torch", "onnx")))
    return Subject(*_onnx_subject(model, device), model.input_shape), None


def _whole_torch(engine: Any) -> Callable[[np.ndarray], Any]:
    """The network without inner heads, as fast as the engine can run it."""
    from offramp.running.engines.torch_engine import whole_network

    return whole_network(engine)


def _all_stages(engine: Engine) -> Callable[[np.ndarray], Any]:
    """All stages one after the other: what a bundle of graphs offers as the whole network, inner heads included."""

    def run(images: np.ndarray) -> Any:
        with engine.active():
            state = engine.begin(images)
            for k in range(1, engine.num_exits + 1):
                logits, state = engine.run(k, state)
            return engine.judge(engine.num_exits, logits)

    return run


def _onnx_subject(model: Any, device: str) -> tuple[Engine, Callable[[np.ndarray], Any]]:
    from offramp.running.engines.onnx_engine import OnnxEngine, providers
    from offramp.running.export import onnx_stages, onnx_whole

    providers(device)  # a device that is not there is said before minutes of export
    engine = OnnxEngine(onnx_stages(model), device=device)
    whole = OnnxEngine([onnx_whole(model)], device=device)
    return engine, lambda images: whole.judge(1, whole.run(1, whole.begin(images))[0])


def infer_report(
    source: str,
    batches: Sequence[int],
    qs: Sequence[float],
    kind: str | None = None,
    device: str = "auto",
    repeats: int = 10,
    silent: bool = False,
) -> dict[str, Any]:
    """Everything that `offramp bench infer` says, ready for JSON."""
    if min(*batches, repeats) < 1:
        raise ValueError(f"batch sizes and repeats must be 1 or more, got {min(*batches, repeats)}")
    subject, bundle = subject_of(source, kind, device)
    exits = subject.engine.num_exits
    shares = dict(_shares(q, exits, bundle) for q in qs)
    if bundle is not None:
        shares["its policy"] = bundle.policies.policy.shares
    images = np.random.default_rng(0).normal(size=(SIZES[-1], *subject.shape)).astype(np.float32)
    packing = (
        tuned_packing(bundle.digest, subject.engine, images) if bundle else measure_packing(subject.engine, images)
    )
    rows, stage_ms = bench_infer(subject, batches, shares, packing, repeats, silent)
    return {
        "source": source,
        "engine": (kind or "torch") if bundle is None else bundle.format,
        "machine": subject.engine.place,
        "rows": [row.to_json() for row in rows],
        "stage_ms": stage_ms,
        "packing": packing.explain() if exits > 1 else [],
    }


def _shares(q: float, exits: int, bundle: Bundle | None) -> tuple[str, tuple[float, ...]]:
    """q and its shares; for a bundle, those of its nearest policy on the calibration split."""
    samples = 1_000_000
    counts = exit_counts(samples, exits, q)
    if bundle is None:
        return f"q={q:g}", tuple(count / samples for count in counts)
    policy = bundle.policies.at_q(q)
    return f"q={policy.q:g}", policy.shares


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


def stage_milliseconds(subject: Subject, batches: Sequence[int], repeats: int = 10) -> dict[str, dict[str, float]]:
    """`stage_ms[k][batch]` alone."""
    each = {batch: _stage_ms(_Clock(subject, batch, repeats)) for batch in batches}
    stages = map(str, range(1, subject.engine.num_exits + 1))
    return {k: {str(batch): found[k] for batch, found in each.items()} for k in stages}


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
            for k, ms in _stage_ms(clock).items():
                stage_ms[k][str(batch)] = ms
            for name, own in shares.items():
                bar.show(f"batch {batch}, {name}")
                rows.append(_row(clock, name, own, packing))
                bar.advance(1, batch)
    return rows, stage_ms


class _Clock:
    """Times stages and the whole network at one batch size."""

    def __init__(self, subject: Subject, batch: int, repeats: int) -> None:
        self.engine, self.batch, self.repeats, self.whole = subject.engine, batch, repeats, subject.whole
        draw = np.random.default_rng(0)
        self.images = draw.normal(size=(batch, *subject.shape)).astype(np.float32)
        self._states: dict[tuple[int, int], EngineState] = {}

    def stage(self, k: int, size: int) -> Callable[[], Any]:
        """Stage k on `size` samples, from the state before it to the answer on the host."""
        engine, images = self.engine, self.images[:size]
        if k == 1:  # its state is the images, which must first get to the device
            return lambda: engine.judge(1, engine.run(1, engine.begin(images))[0])
        state = self._before(k, size)
        return lambda: engine.judge(k, engine.run(k, state)[0])

    def _before(self, k: int, size: int) -> EngineState:
        """The state before stage k, packed as it would be, in memory of its own."""
        if (k, size) not in self._states:
            if size < self.batch:
                state = self.engine.gather(k, [(self._before(k, self.batch), np.arange(size))])
            elif k == 1:
                state = self.engine.begin(self.images)
            else:
                state = self.engine.run(k - 1, self._before(k - 1, size))[1]
            self._states[k, size] = copied(self.engine, state)
        return self._states[k, size]


def _stage_ms(clock: _Clock) -> dict[str, float]:
    """The median milliseconds of every stage at the clock's batch."""
    with clock.engine.active():
        stages = range(1, clock.engine.num_exits + 1)
        return {str(k): median_ms(clock.stage(k, clock.batch), clock.repeats) for k in stages}


def _row(clock: _Clock, name: str, shares: Sequence[float], packing: Packing | None) -> InferBench:
    """Ours, the ideal and the whole network by turns, so that a busy moment hits all of them."""
    batch, exits = clock.batch, len(shares)
    planned = PlannedExits(clock.engine)
    policy = Policy("planned", None, (0.5,) * (exits - 1), 0.0, tuple(shares), 0.0)
    runtime = Runtime(planned, policy, (1,) * exits, packing)
    calls = max(clock.repeats, 64 // batch)

    def turn(plan: np.ndarray) -> tuple[float, float, float]:
        planned.plan = plan
        with clock.engine.active():
            stages = [clock.stage(k, size) for k, size in enumerate(_sizes(plan, exits), 1) if size]
            ideal = sum(timed_ms(stage) for stage in stages)
        return ideal, timed_ms(lambda: runtime(clock.images)), timed_ms(lambda: clock.whole(clock.images))

    plans = _plans(batch, calls, shares)
    new = {_sizes(plan, exits): plan for plan in plans}  # for sizes never seen an engine may prepare itself first
    for plan in [*new.values(), plans[0]]:
        turn(plan)
    ideals, own, wholes = zip(*map(turn, plans), strict=True)
    middle = np.median if batch >= 32 else np.mean  # small batches differ in what they have to do
    ideal, ours, whole = (float(middle(times)) for times in (ideals, own, wholes))
    pooled, full = _pooled_ms(clock, planned, policy, shares)
    p50, p95, p99 = (float(np.percentile(own, p)) for p in (50, 95, 99))
    return InferBench(
        batch, name, whole, ideal, ours, p50, p95, p99, 1e3 * batch / ours, whole / ours, ideal / ours,
        1e3 / pooled, whole / batch / pooled, full / pooled,
    )  # fmt: skip


def _sizes(plan: np.ndarray, exits: int) -> tuple[int, ...]:
    """How many samples each stage runs."""
    return tuple(int((plan >= k).sum()) for k in range(1, exits + 1))


def _plans(batch: int, calls: int, shares: Sequence[float]) -> np.ndarray:
    """Who leaves where in each call; large batches all have the shares they would have in the mean."""
    if batch < 32:
        return plan_exits(batch * calls, shares, 0).reshape(calls, batch)
    return np.stack([plan_exits(batch, shares, seed) for seed in range(calls)])


def _pooled_ms(clock: _Clock, planned: PlannedExits, policy: Policy, shares: Sequence[float]) -> tuple[float, float]:
    """Milliseconds per image of a stream whose survivors are pooled, once the pool is filled, and of its ideal."""
    exits, batch = len(shares), clock.batch
    warm(clock.engine, clock.images)
    pool = Pool(planned, policy, batch, wait_s=60.0)
    rounds = min(128, max(32, POOLED_IMAGES // batch))  # late stages get their full batch only now and then
    plans = [plan for seed in (1, 2) for plan in plan_exits(batch * rounds, shares, seed).reshape(rounds, batch)]
    left, spent, stages = 0, 0.0, []
    for at, plan in enumerate(plans):
        began = time.perf_counter()
        planned.plan = plan
        pool.add(clock.images, [Ticket(None, exits) for _ in range(batch)])
        count = 0
        while pool.ready():
            count += len(pool.work())
        look = at % max(1, rounds // 8) == 0
        if look or at == len(plans) - 1:
            clock.engine.wait()
        if at < rounds:
            continue
        left, spent = left + count, spent + time.perf_counter() - began  # the pool is in its steady state
        if look:  # by turns, so that a busy moment hits both
            with clock.engine.active():
                stages.append([timed_ms(clock.stage(k, batch)) for k in range(1, exits + 1)])
    reaching = np.cumsum(np.asarray(shares)[::-1])[::-1]
    return 1e3 * spent / max(left, 1), float(np.median(stages, axis=0) @ reaching) / batch
