"""`offramp bench train`: what learned weights cost beside conventional training, and what no step can be faster than.

Rows are timed in turn, again and again, so that a busy machine slows all of them alike; the median counts. The
ratio is a row's loader batch over two baseline updates of half of it, run the same way. On a GPU every row is run
eagerly, as a CUDA graph of plain operations (`graph`), and as one with kernels of our own (`fast`). Memory on a CPU
is measured in a fresh process per row: how far a few steps make it grow.

The lower bound of a step is the mul-adds it must do and the bytes it must move through memory, counted over the
conv-BN-ReLU layers, which are nearly all of MSDNet and RANet. Each sweep reads its inputs once and writes its
output once; what BatchNorm forces (all of a map must be known before any of it can be normalised) is a sweep of its
own.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from offramp.common.console import progress
from offramp.common.device import pick_device, suits_kernels, synchronize, training_dtype
from offramp.common.registry import load_plugin, loaded
from offramp.common.timing import timed_ms
from offramp.models.collaboration import CollaborativeNet, classifier, collaborates
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.layers import ConvBNReLU
from offramp.models.registry import create_model, model_entry
from offramp.runs.config import ImtaConfig, RunConfig, WeightingConfig, with_settings
from offramp.runs.recipe import load_recipe
from offramp.training.cuda_graph import CapturedStep
from offramp.training.ema import Ema
from offramp.training.forks import new_fork
from offramp.training.imta import OneForAll, OnFrozenFeatures
from offramp.training.meta_gradient import ESTIMATORS, refuse_blind_differences
from offramp.training.method import Method
from offramp.training.mixing import Mixing
from offramp.training.objectives import Half, Objective, new_objective
from offramp.training.optimizers import new_optimizer
from offramp.training.parts import HeadsOnFeatures, freeze_norms, part_to_train
from offramp.training.step import HalfResult, exact_update, train_step
from offramp.training.tape import use_taped_layers
from offramp.training.weighting import Context, new_weighting

WHOLE = "baseline, one update of the batch"
BASELINE = "baseline, two updates of half a batch"
DELAYED = "learned, delayed order"
SECOND, SECOND_LEARNED = "IMTA's second phase", "IMTA's second phase, learned"
PLAIN = (WHOLE, BASELINE, SECOND)
ROWS = (WHOLE, BASELINE, *(f"learned, {name}" for name in ESTIMATORS), DELAYED, SECOND, SECOND_LEARNED)
WAYS = ("eager", "graph", "fast")
WARM_UP = 2


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


def what_to_bench(model: str | None, recipe: str | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """The network and the way of training of the steps to be timed; the weighting is each row's own."""
    config = RunConfig() if recipe is None else load_recipe(recipe).config
    if model is not None:
        config = replace(config, model=replace(config.model, name=model))
    config = with_settings(config, settings)
    if config.objective.options.get("source") == "teacher":
        raise ValueError("bench train has no teacher to ask; time the step without one")
    return config


def bench_train(
    model: str | RunConfig,
    batch: int,
    device: str = "auto",
    precision: str = "auto",
    repeats: int = 7,
    only: str = "",
    way: str | None = None,
    silent: bool = False,
) -> list[TrainBench]:
    """Time and weigh one loader batch of every row, or of those with `only` in their name beside the baseline."""
    config = model if isinstance(model, RunConfig) else what_to_bench(model)
    if batch < 4 or batch % 2:
        raise ValueError(f"batch must be even and at least 4, got {batch}")
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    place = pick_device(device)
    known_precision(precision)
    rows, ways = asked_rows(config, only), asked_ways(place, way)
    found: list[TrainBench] = []
    with progress("bench", (repeats + WARM_UP) * len(rows) * len(ways), silent=silent) as bar:
        for ran in ways:
            steps = {row: new_step(row, ran, config, batch, place, precision) for row in rows}
            times: dict[str, list[float]] = {row: [] for row in rows}
            for repeat in range(repeats + WARM_UP):
                for row, step in steps.items():
                    milliseconds = step_ms(step, place)
                    if repeat >= WARM_UP:
                        times[row].append(milliseconds)
                    bar.advance(1, batch)
            steps.clear()
            medians = {row: statistics.median(own) for row, own in times.items()}
            found += [
                TrainBench(
                    row,
                    ran,
                    round(milliseconds, 2),
                    round(1e3 * batch / milliseconds, 1),
                    round(peak_megabytes(row, ran, config, batch, place, precision), 1),
                    round(milliseconds / medians[BASELINE], 3),
                )
                for row, milliseconds in medians.items()
            ]
    return found


def asked_rows(config: RunConfig, only: str) -> list[str]:
    """The baseline and every step this network can be trained by with `only` in its name."""
    model, network = config.model.name, network_of(config)
    network.fork = new_fork(config, network.num_exits)
    rows = [row for row in ROWS if _goes_with(row, network, config)]
    asked = [row for row in rows if only.lower() in row.lower()]
    if not asked:
        raise ValueError(f"no row of {model} has {only!r} in its name; there are: {'; '.join(rows)}")
    return [row for row in rows if row == BASELINE or row in asked]


def _goes_with(row: str, network: ExitNet, config: RunConfig) -> bool:
    """Whether a network can be trained so: not every estimator sees all gradients, nor can all heads collaborate."""
    if row in (SECOND, SECOND_LEARNED):
        return collaborates(network) and config.train.parts == "all"
    if config.train.clip_norm is not None and row not in PLAIN:
        return False
    try:
        refuse_blind_differences(weighting_of(row).engine, network, new_objective(config.objective))
    except ValueError:
        return False
    return True


def asked_ways(device: torch.device, way: str | None) -> tuple[str, ...]:
    """The ways this device has, or the one asked for."""
    ways = WAYS if device.type == "cuda" else WAYS[:1]
    if way not in (None, *ways):
        raise ValueError(f"there is no way {way!r} on {device.type}; there is {' and '.join(ways)}")
    return ways if way is None else (way,)


def known_precision(precision: str) -> str:
    """A precision as the settings of a run know it."""
    return with_settings(RunConfig(), [f"train.precision={precision}"]).train.precision


def new_step(
    row: str, way: str, config: RunConfig, batch: int, device: torch.device, precision: str
) -> Callable[[], object]:
    """One loader batch of random images, trained on as the row says."""
    torch.manual_seed(0)
    model, module, objective = what_is_trained(row, config)
    module.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if config.train.freeze_norms:
        freeze_norms(model)
    dtype = training_dtype(precision, device)
    kernels = way == "fast" and "double_backward" not in row and suits_kernels(dtype, device)
    use_taped_layers(module, kernels)
    assert model.spec is not None
    images = torch.randn(batch, *model.input_shape, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(model.spec.num_classes, (batch,), device=device)
    optimizer = new_optimizer(model, replace(config.train, learning_rate=config.train.learning_rate or 0.1))
    settings = weighting_of(row)
    exits = int(getattr(module, "num_exits", model.num_exits))
    method = Method(
        new_weighting(settings, Context(exits, device=device)),
        settings,
        objective,
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        clip_norm=config.train.clip_norm,
        prepare=module.prepare if isinstance(module, (OnFrozenFeatures, HeadsOnFeatures)) else None,
        ema=None if config.train.ema is None else Ema(model, config.train.ema),
        mixing=Mixing.of(config.train, model.spec.num_classes, config.seed),
    )
    run = one_update if row == WHOLE else train_step
    mixed = () if method.mixing is None else (method.mixing.draw(0, model.input_shape[-2:]).to(device),)
    if way == "eager":
        return partial(run, module, optimizer, method, images, labels, 0, *mixed)
    return partial(CapturedStep(module, optimizer, method, run), images, labels, 0, *mixed)


def weighting_of(row: str) -> WeightingConfig:
    """The weighting that a row trains with."""
    if row in PLAIN:
        return WeightingConfig()
    estimator = row.removeprefix("learned, ")
    engine = estimator if estimator in ESTIMATORS else "forward_mode"
    order = "delayed" if row == DELAYED else "exact"
    return with_settings(
        RunConfig(), ["weighting.name=learned", f"weighting.engine={engine}", f"weighting.order={order}"]
    ).weighting


def network_of(config: RunConfig, **more: Any) -> ExitNet:
    """The network with fresh params."""
    classes: dict[str, Any] = {} if config.model.num_classes is None else {"num_classes": config.model.num_classes}
    return create_model(config.model.name, **classes, **config.model.overrides, **more)


def what_is_trained(row: str, config: RunConfig) -> tuple[ExitNet, nn.Module, Objective]:
    """The network, what is called, and its objective."""
    model = network_of(config)
    if row not in (SECOND, SECOND_LEARNED):
        model.fork = new_fork(config, model.num_exits)
        return model, part_to_train(model, config.train.parts), new_objective(config.objective)
    above = network_of(config, collaboration=True)
    assert isinstance(above, CollaborativeNet)
    return above, OnFrozenFeatures(above, classifier(model.heads[-1])), OneForAll.of(ImtaConfig())


@dataclass(frozen=True)
class LowerBound:
    """Mul-adds and bytes of a baseline update and of one by the exact order, both on half a loader batch."""

    baseline_mul_adds: float
    baseline_bytes: float
    exact_mul_adds: float
    exact_bytes: float


def lower_bound(model: ExitNet, images: int, bytes_each: int) -> LowerBound:
    """The lower bound of updates on so many images whose maps take `bytes_each` bytes an element.

    x is a layer's input, y the convolution's output, g a gradient.
    """
    x, y = _elements(model)
    forward = x + 3 * y  # convolve: x to y; normalise: y to the output
    backward = (y + y) + (y + y + y) + (y + x) + (x + y)  # sums of g and y; g and y to y's; y's to x's; x and y's
    tangent = (2 * x + 2 * y) + 3 * y  # both inputs and y to how y moves; that and y to how the output moves
    macs = images * exit_costs(model)[-1].macs
    scale = images * bytes_each
    return LowerBound(3 * macs, scale * (forward + backward), 10 * macs, scale * (2 * forward + 3 * backward + tangent))


def _elements(model: ExitNet) -> tuple[float, float]:
    """Elements of all inputs and of all outputs of conv-BN-ReLU layers, per image."""
    found = [0.0, 0.0]

    def count(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        found[0] += given[0].numel()
        found[1] += out.numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, ConvBNReLU)]
    training, device = model.training, next(model.parameters()).device
    with torch.no_grad():
        model.eval()(torch.zeros(1, *model.input_shape, device=device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    return found[0], found[1]


def copied_bytes_per_s(device: torch.device, megabytes: int = 256) -> float:
    """What memory gives: bytes read and written by a copy much larger than the caches."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(step_ms(lambda: target.copy_(source), device) for _ in range(5))
    return 2e3 * source.numel() / best


def lower_bound_line(config: RunConfig, batch: int, device: str = "auto", precision: str = "auto") -> str:
    """What no step on a loader batch can be faster than, as a sentence."""
    place = pick_device(device)
    dtype, speed = training_dtype(precision, place), copied_bytes_per_s(place)
    bound = lower_bound(network_of(config), batch // 2, dtype.itemsize)
    parts = [
        f"{name} {2 * mul_adds / 1e12:.2f} T mul-adds and {2 * moved / 1e9:.1f} GB ({2e3 * moved / speed:.1f} ms)"
        for name, mul_adds, moved in (
            ("two baseline updates", bound.baseline_mul_adds, bound.baseline_bytes),
            ("a learned step", bound.exact_mul_adds, bound.exact_bytes),
        )
    ]
    return f"the lower bound, at {speed / 1e9:,.0f} GB/s: {'; '.join(parts)}"


def where_time_goes(
    row: str, way: str, config: RunConfig, batch: int, device: str = "auto", precision: str = "auto", steps: int = 3
) -> list[tuple[str, float, float]]:
    """Operations of a step by the time they take: name, calls, milliseconds; on a GPU its kernels."""
    place = pick_device(device)
    step = new_step(row, way, config, batch, place, precision)
    for _ in range(WARM_UP):
        step()
    on_gpu = place.type == "cuda"
    kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=kinds, acc_events=True) as seen:
        for _ in range(steps):
            step_ms(step, place)
    spent = [
        (e.key, e.count / steps, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3 / steps)
        for e in seen.key_averages()
    ]
    return sorted(spent, key=lambda each: -each[2])


def one_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    images: Tensor,
    labels: Tensor,
    step: int,
    recipe: Tensor | None = None,
) -> list[HalfResult]:
    """The whole loader batch as one train half."""
    if recipe is not None:
        assert method.mixing is not None
        images, labels = method.mixing.mixed(images, labels, recipe[0])
    whole = Half(images, labels)
    return [exact_update(model, optimizer, method, whole, whole, learn=False)]


def step_ms(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one step, the device's work included."""
    synchronize(device)

    def whole() -> None:
        step()
        synchronize(device)

    return timed_ms(whole)


def peak_megabytes(row: str, way: str, config: RunConfig, batch: int, device: torch.device, precision: str) -> float:
    """What a few steps need beyond what was there before them; a graph keeps all of it."""
    if device.type == "cuda":
        step = new_step(row, way, config, batch, device, precision)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        step(), step()
        return (torch.cuda.max_memory_reserved() - before) / 2**20
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        homes = [
            *loaded,
            model_entry(config.model.name).builder.__module__,
        ]  # where a model of somebody's own is registered
        return pool.submit(_grown_megabytes, homes, row, way, config, batch, precision).result()


def _grown_megabytes(homes: list[str], row: str, way: str, config: RunConfig, batch: int, precision: str) -> float:
    for home in homes:
        load_plugin(home)
    step = new_step(row, way, config, batch, torch.device("cpu"), precision)
    before = _peak_kilobytes()
    step(), step()
    return (_peak_kilobytes() - before) / 2**10


def _peak_kilobytes() -> int:
    """This process's largest size so far; getrusage would count the parent's as well where /proc exists."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
