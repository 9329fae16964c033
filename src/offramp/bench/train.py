"""Benchmarks. `bench_train`: what learned weights cost beside conventional training, in one run.

Rows are timed in turn, again and again, so that a busy machine slows all of them alike; the median counts. The
ratio is a row's loader batch over two baseline updates of half of it, run the same way. On a GPU every row is run
eagerly, as a CUDA graph of plain operations (`graph`), and as one with kernels of our own (`fast`). Memory on a CPU
is measured in a fresh process per row: how far a few steps make it grow.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from offramp.bench.lower_bounds import copied_bytes_per_s, floor_of
from offramp.common.console import progress
from offramp.common.device import pick_device, suits_kernels, training_dtype
from offramp.models.collaboration import CollaborativeNet, WithTeacher, classifier, collaborates
from offramp.models.exits import ExitNet
from offramp.models.layers import use_kernels
from offramp.models.registry import create_model, model_entry
from offramp.runs.config import ImtaConfig
from offramp.training.cuda_graph import Stepper
from offramp.training.meta_gradient import ENGINES, Criterion
from offramp.training.objectives.imta import OneForAll
from offramp.training.objectives.losses import exit_losses
from offramp.training.step import HalfResult, Method, iterate, update
from offramp.training.weighting import LearnedWeighting, UniformWeighting

WHOLE = "baseline, one update of the batch"
BASELINE = "baseline, two updates of half a batch"
DELAYED = "learned, delayed order"
SECOND, SECOND_LEARNED = "IMTA's second phase", "IMTA's second phase, learned"
PLAIN = (WHOLE, BASELINE, SECOND)
ROWS = (WHOLE, BASELINE, *(f"learned, {engine}" for engine in ENGINES), DELAYED, SECOND, SECOND_LEARNED)
WAYS = ("eager", "graph", "fast")
WARM_UP = 2
IMTA = ImtaConfig()


@dataclass(frozen=True)
class TrainBench:
    """One row: a loader batch, the way it ran, its time, throughput, peak memory, and the ratio to the baseline."""

    name: str
    way: str
    milliseconds: float
    images_per_s: float
    peak_mb: float
    ratio: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_train(
    model: str,
    batch: int,
    device: str = "auto",
    precision: str = "auto",
    repeats: int = 7,
    only: str = "",
    way: str | None = None,
    silent: bool = False,
) -> list[TrainBench]:
    """Time and weigh one loader batch of every row, or of those with `only` in their name beside the baseline."""
    if batch < 4 or batch % 2:
        raise ValueError(f"batch must be even and at least 4, got {batch}")
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    place = pick_device(device)
    rows, ways = asked_rows(model, only), asked_ways(place, way)
    found: list[TrainBench] = []
    with progress("bench", (repeats + WARM_UP) * len(rows) * len(ways), silent=silent) as bar:
        for ran in ways:
            steps = {row: new_step(row, ran, model, batch, place, precision) for row in rows}
            times: dict[str, list[float]] = {row: [] for row in rows}
            for repeat in range(repeats + WARM_UP):
                for row, step in steps.items():
                    seconds = timed(step, place)
                    if repeat >= WARM_UP:
                        times[row].append(seconds)
                    bar.advance(1, batch)
            steps.clear()
            medians = {row: statistics.median(seconds) for row, seconds in times.items()}
            found += [
                TrainBench(
                    row,
                    ran,
                    round(1000 * seconds, 2),
                    round(batch / seconds, 1),
                    round(peak_megabytes(row, ran, model, batch, place, precision), 1),
                    round(seconds / medians[BASELINE], 3),
                )
                for row, seconds in medians.items()
            ]
    return found


def asked_rows(model: str, only: str) -> list[str]:
    """The baseline and every step this network has with `only` in its name."""
    rows = [row for row in ROWS if row not in (SECOND, SECOND_LEARNED) or collaborates(create_model(model))]
    asked = [row for row in rows if only.lower() in row.lower()]
    if not asked:
        raise ValueError(f"no row of {model} has {only!r} in its name; there are: {'; '.join(rows)}")
    return [row for row in rows if row == BASELINE or row in asked]


def asked_ways(device: torch.device, way: str | None) -> tuple[str, ...]:
    """The ways this device has, or the one asked for."""
    ways = WAYS if device.type == "cuda" else WAYS[:1]
    if way not in (None, *ways):
        raise ValueError(f"there is no way {way!r} on {device.type}; there is {' and '.join(ways)}")
    return ways if way is None else (way,)


def new_step(row: str, way: str, name: str, batch: int, device: torch.device, precision: str) -> Callable[[], object]:
    """One loader batch of random images, trained on as the row says."""
    torch.manual_seed(0)
    model, module, criterion = what_is_trained(row, name)
    module.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    dtype = training_dtype(precision, device)
    use_kernels(module, way == "fast" and "double_backward" not in row and suits_kernels(dtype, device))
    assert model.spec is not None
    images = torch.randn(batch, *model.input_shape, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(model.spec.num_classes, (batch,), device=device)
    on_gpu = device.type == "cuda"
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(moving, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=on_gpu)
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    weighting = UniformWeighting() if row in PLAIN else LearnedWeighting(model.num_exits, device=device)
    engine = ENGINES.get(row.removeprefix("learned, "), ENGINES["forward_mode"])
    order = "delayed" if row == DELAYED else "exact"
    method = Method(weighting, engine, order=order, criterion=criterion, autocast=autocast)
    run = one_update if row == WHOLE else iterate
    return partial(Stepper(module, optimizer, method, run, capture=way != "eager"), images, labels, 0)


def what_is_trained(row: str, name: str) -> tuple[ExitNet, nn.Module, Criterion]:
    """The network, what is called, and its loss."""
    model = create_model(name)
    if row not in (SECOND, SECOND_LEARNED):
        return model, model, exit_losses
    above = create_model(name, collaboration=True)
    assert isinstance(above, CollaborativeNet)
    return above, WithTeacher(above, classifier(model.heads[-1])), OneForAll(IMTA.temperature, IMTA.gamma)


def floor_line(model: str, batch: int, device: str = "auto", precision: str = "auto") -> str:
    """What no step on a loader batch can be faster than, as a sentence."""
    place = pick_device(device)
    dtype, speed = training_dtype(precision, place), copied_bytes_per_s(place)
    floor = floor_of(create_model(model), batch // 2, dtype.itemsize)
    parts = [
        f"{name} {2 * mul_adds / 1e12:.2f} T mul-adds and {2 * moved / 1e9:.1f} GB ({2e3 * moved / speed:.1f} ms)"
        for name, mul_adds, moved in (
            ("two baseline updates", floor.baseline_mul_adds, floor.baseline_bytes),
            ("a learned step", floor.exact_mul_adds, floor.exact_bytes),
        )
    ]
    return f"the floor, at {speed / 1e9:,.0f} GB/s: {'; '.join(parts)}"


def where_time_goes(
    row: str, way: str, model: str, batch: int, device: str = "auto", precision: str = "auto", steps: int = 3
) -> list[tuple[str, float, float]]:
    """Operations of a step by the time they take: name, calls, milliseconds; on a GPU its kernels."""
    place = pick_device(device)
    step = new_step(row, way, model, batch, place, precision)
    for _ in range(WARM_UP):
        step()
    on_gpu = place.type == "cuda"
    kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=kinds, acc_events=True) as seen:
        for _ in range(steps):
            timed(step, place)
    spent = [
        (e.key, e.count / steps, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3 / steps)
        for e in seen.key_averages()
    ]
    return sorted(spent, key=lambda each: -each[2])


def one_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, images: Tensor, labels: Tensor, step: int
) -> list[HalfResult]:
    """The whole loader batch as one train half."""
    return [update(model, optimizer, method, (images, labels), (images, labels), learn=False)]


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one step, the device's work included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


def peak_megabytes(row: str, way: str, name: str, batch: int, device: torch.device, precision: str) -> float:
    """What a few steps need beyond what was there before them; a graph keeps all of it."""
    if device.type == "cuda":
        step = new_step(row, way, name, batch, device, precision)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        step(), step()
        return (torch.cuda.max_memory_reserved() - before) / 2**20
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        home = model_entry(name).builder.__module__
        return pool.submit(_grown_megabytes, home, row, way, name, batch, precision).result()


def _grown_megabytes(home: str, row: str, way: str, name: str, batch: int, precision: str) -> float:
    import_module(home)  # where a model of somebody's own is registered
    step = new_step(row, way, name, batch, torch.device("cpu"), precision)
    before = _peak_kilobytes()
    step(), step()
    return (_peak_kilobytes() - before) / 2**10


def _peak_kilobytes() -> int:
    """This process's largest size so far; getrusage would count the parent's as well where /proc exists."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
