"""What `fit` will do within the time there is: sizes, families, frozen features or fine-tuning, epochs, minutes.

A short measurement on this machine (how long an image takes to be read, to pass the network, to be trained on) and what
was asked for go in; a frozen `Plan` comes out, which is said to people before anything is trained and is kept, so that
the same command goes on with it. All but the measurement are plain functions of numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from offramp.common.device import synchronize
from offramp.common.formatting import millions
from offramp.common.images import UnreadableImage
from offramp.data.imagefolder import ImageFolderDataset
from offramp.models.exits import ExitNet

STEP = 32  # sizes are multiples of it, as networks halve their maps five times
SMALLER = (0.6, 0.8)  # sides of the smaller sizes over the largest
SMALLEST = 32
EPOCHS = 40  # of fine-tuning, where there is time for them
FEWEST_ON_CPU = 5  # epochs below which frozen features with linear heads are the better use of the time
WANTED_ON_GPU = 10  # epochs below which smaller images are the better use of the time
EXIT_EPOCHS = 0.4  # epochs of a network with exits, which starts from the fine-tuned one, over those of the others
FOLDS = 5
CROSS_FITTED = 20_000  # images not tested on, up to which linear heads are fitted by folds
TUNED_BY_FOLDS = 2_000  # up to which whole networks are trained by folds, on a GPU
ENOUGH_HELD_OUT = 1_000  # images; with fewer in a tenth, a fifth is held out
MOST_TIMES = 2.5  # of what the single network takes, for everything that is tried
CAPTURED = 3.0  # how many times as fast as an eager loop training on a GPU is at least (docs/performance.md)
HEAD_S = 0.0005  # to fit a linear head, for an image that it is fitted to
ELSE_SECONDS = 60.0  # to build, calibrate, export, time and report
TIMED_IMAGES = 16


@dataclass(frozen=True)
class Rates:
    """Seconds per image on this machine, at images of `size`: reading one, a forward pass, a training step."""

    size: int
    read_s: float
    forward_s: float
    train_s: float
    cuda: bool

    def scale(self, size: int) -> float:
        """What images of another size take, over those that were timed."""
        return (size / self.size) ** 2


@dataclass(frozen=True)
class Plan:
    """What will be trained; `sizes` rise, and the last is the single network's that everything is compared with.

    `frozen`: linear heads on frozen features are tried, cross-fitted by `folds` unless that is 0. `epochs` of
    fine-tuning, 0 for none; `tuned_folds` as `folds`, of whole networks. `held_out` is how the other images to choose
    on are found: a `tenth`, or a `fifth`.
    """

    backbone: str
    sizes: tuple[int, ...]
    families: tuple[str, ...]
    frozen: bool
    folds: int
    epochs: int
    tuned_folds: int
    held_out: str
    seconds: float
    images_per_s: float

    @property
    def cascades(self) -> list[tuple[int, int]]:
        """The sizes of the stages of every cascade that is tried."""
        if "cascade" not in self.families:
            return []
        small = self.sizes[:1] if self.folds else self.sizes[:-1]  # by folds they pass all images once more
        return [(size, self.sizes[-1]) for size in small if size < self.sizes[-1]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        return Plan(**{**value, "sizes": tuple(value["sizes"]), "families": tuple(value["families"])})


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to: seconds, one network only, epochs that were asked for.

    A promise is about one network, so nothing is done by folds for it.
    """

    seconds: float | None = None
    quick: bool = False
    epochs: int | None = None
    promise: bool = False
    asked_split: bool = False  # somebody said how many images are held out


def parse_duration(text: str, name: str = "--time") -> float:
    """90s, 20m, 1.5h -> seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)\s*", text)
    seconds = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise ValueError(f"{name} must be a time such as 20m, 90s or 1.5h, got {text!r}")
    return seconds


def largest_size(side: int, own: int) -> int:
    """The side of the images: what the photos have, but no more than the network was made for."""
    return max(SMALLEST, min(own, side) // STEP * STEP)


def sizes_below(largest: int, costs: Mapping[int, float], budget: float | None = None) -> tuple[int, ...]:
    """Two smaller sizes and the largest; where there is a budget, one of them is the largest that fits into it."""
    below = sorted({max(SMALLEST, int(share * largest / STEP + 1e-9) * STEP) for share in SMALLER})
    below = [size for size in below if size < largest]
    fitting = [size for size in costs if size <= largest and budget is not None and costs[size] <= budget]
    if budget is not None and not fitting:
        least = min(costs)
        raise ValueError(
            f"the budget {millions(budget)} is below what the network costs at {least} pixels, its smallest size here: "
            f"{millions(costs[least])} mul-adds"
        )
    wanted = max(fitting, default=None)
    if wanted is not None and wanted < largest and wanted not in below:
        nearest = min(below, key=lambda size: abs(size - wanted), default=None)
        below = sorted({*below, wanted} - {nearest})
    while len(below) > 1 and _passes(below, largest) > MOST_TIMES:
        below[0] -= STEP
    return (*below, largest)


def _passes(below: Sequence[int], largest: int) -> float:
    """Frozen features of all sizes, and of the smallest once more for a cascade, over those of the largest alone."""
    return 1.0 + sum((size / largest) ** 2 for size in (*below, below[0]))


def decide(
    backbone: str, ladder: Sequence[tuple[int, ...]], images: Mapping[str, int], rates: Rates, limits: Limits
) -> Plan:
    """The plan for the largest sizes that there is time for; `ladder` has the sizes to choose from, largest first.

    `images` counts those of each split.
    """
    plans = [_at_sizes(backbone, sizes, images, rates, limits) for sizes in ladder]
    fitting = [plan for plan in plans if limits.seconds is None or plan.seconds <= limits.seconds]
    if rates.cuda and limits.epochs is None:  # there, fewer epochs come before smaller images
        fitting = [plan for plan in fitting if plan.epochs >= WANTED_ON_GPU] or fitting
    return (fitting or plans[-1:])[0]


def times_single(sizes: Sequence[int], families: Sequence[str]) -> float:
    """What training everything takes, over training the single network alone."""
    return sum((size / sizes[-1]) ** 2 for size in sizes) + (EXIT_EPOCHS if "exits" in families else 0.0)


def _at_sizes(backbone: str, sizes: tuple[int, ...], images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan:
    """The best plan with these sizes: everything that there is time for."""
    families: tuple[str, ...] = ("single",) if limits.quick else ("single", "cascade", "exits")
    if times_single(sizes, families) > MOST_TIMES:
        families = tuple(family for family in families if family != "exits")
    trained = images["train"] + images["calibration"]
    tenth_is_enough = trained // 10 >= ENOUGH_HELD_OUT
    plain = Plan(
        backbone,
        sizes[-1:] if limits.quick else sizes,
        families,
        frozen=True,
        folds=FOLDS if trained <= CROSS_FITTED and not limits.promise and not limits.asked_split else 0,
        epochs=0,
        tuned_folds=0,
        held_out="as set" if limits.asked_split else "tenth" if tenth_is_enough else "fifth",
        seconds=0.0,
        images_per_s=1 / (rates.read_s + rates.forward_s * rates.scale(sizes[-1])),
    )
    if not rates.cuda:
        return _on_cpu(plain, images, rates, limits)
    return _on_gpu(plain, images, rates, limits)


def _on_cpu(plain: Plan, images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan:
    """Frozen features first; fine-tuning if there is time left for some epochs of it."""
    base = _timed(plain, images, rates)
    if limits.epochs is not None:
        return _timed(replace(plain, epochs=limits.epochs), images, rates)
    if limits.seconds is None:
        return base
    epochs = _epochs_within(limits.seconds, plain, images, rates)
    return base if epochs < FEWEST_ON_CPU else _timed(replace(plain, epochs=epochs), images, rates)


def _epochs_within(seconds: float, plan: Plan, images: Mapping[str, int], rates: Rates) -> int:
    """How many epochs of fine-tuning there is time for."""
    one, two = (_timed(replace(plan, epochs=epochs), images, rates).seconds for epochs in (1, 2))
    return 0 if seconds < one else min(EPOCHS, 1 + int((seconds - one) / (two - one)))


def _on_gpu(plain: Plan, images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan:
    """Fine-tuning. Where there are few images, by folds, and frozen features beside it; these alone without time."""
    few = images["train"] + images["calibration"] <= TUNED_BY_FOLDS
    few = few and not limits.promise and not limits.asked_split
    tuned = replace(
        plain, frozen=few, folds=plain.folds if few else 0, epochs=EPOCHS if limits.epochs is None else limits.epochs
    )
    if not tuned.epochs:
        return _timed(plain, images, rates)
    for folds in (FOLDS, 0) if few else (0,):
        plan = _timed(replace(tuned, tuned_folds=folds), images, rates)
        if limits.seconds is None or limits.epochs is not None or plan.seconds <= limits.seconds:
            return plan
    assert limits.seconds is not None
    epochs = _epochs_within(limits.seconds, tuned, images, rates)
    return _timed(replace(tuned, epochs=epochs) if epochs >= 1 else plain, images, rates)


def _timed(plan: Plan, images: Mapping[str, int], rates: Rates) -> Plan:
    return replace(plan, seconds=expected_seconds(plan, images, rates))


def expected_seconds(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """What the plan will take on this machine, about."""
    return ELSE_SECONDS + (_frozen_seconds(plan, images, rates) if plan.frozen else 0.0) + _tuning(plan, images, rates)


def _frozen_seconds(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """All images through the network once at every size; in a cascade, once more as the largest ones, resized."""
    everything, held = sum(images.values()), images["calibration"] + images["test"]
    direct = sum(everything * (rates.read_s + rates.forward_s * rates.scale(size)) for size in plan.sizes)
    again = everything if plan.folds else held
    resized = sum(again * rates.forward_s * rates.scale(small) for small, _ in plan.cascades)
    return direct + resized + HEAD_S * everything * (plan.folds + 1) * (len(plan.sizes) + 1)


def _tuning(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """Training all sizes side by side and then the exits, each evaluated at the end."""
    if not plan.epochs:
        return 0.0
    step = sum(rates.train_s * rates.scale(size) for size in plan.sizes)
    exits = EXIT_EPOCHS * rates.train_s * rates.scale(plan.sizes[-1]) if "exits" in plan.families else 0.0
    each = plan.epochs * ((step + exits) / (CAPTURED if rates.cuda else 1) + (0 if rates.cuda else rates.read_s))
    trained = images["train"] + images["calibration"]
    once = trained * each + images["test"] * sum(rates.read_s + rates.forward_s * rates.scale(s) for s in plan.sizes)
    return once * (1 + plan.tuned_folds * (1 - 1 / FOLDS))


def measure_rates(model: ExitNet, data: ImageFolderDataset, device: torch.device) -> Rates:
    """Time some real images: a single network at its own size, on this machine. The network is not changed."""
    images, read_s = _read_some(data)
    ready = images.to(device).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(len(ready), dtype=torch.long, device=device)
    own = model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    with torch.inference_mode():
        forward_s = _fastest(lambda: own.last(ready), device) / len(ready)

    def step() -> None:
        loss = F.cross_entropy(own.last(ready), labels)
        torch.autograd.grad(loss, [p for p in own.parameters() if p.requires_grad], allow_unused=True)

    train_s = _fastest(step, device) / len(ready)  # in evaluation mode, so that no statistics move
    workers = max(1, min(data.workers, torch.get_num_threads())) if device.type == "cpu" else max(1, data.workers)
    return Rates(data.image_size, read_s / workers, forward_s, train_s, device.type == "cuda")


def _read_some(data: ImageFolderDataset) -> tuple[torch.Tensor, float]:
    """Some training images as the network takes them, and the seconds that one of them took."""
    own, paths = data.preprocessing, data.splits["train"].paths
    found = []
    began = time.perf_counter()
    for path in paths[:: max(1, len(paths) // TIMED_IMAGES)][: 2 * TIMED_IMAGES]:
        try:
            found.append(own.read(path, data.max_pixels))
        except UnreadableImage:
            continue
        if len(found) == TIMED_IMAGES:
            break
    if not found:
        raise ValueError("none of the images that were tried can be read")
    spent = (time.perf_counter() - began) / len(found)
    tensors = [torch.from_numpy(own.normalise(image[None])) for image in found]
    return torch.cat((tensors * TIMED_IMAGES)[:TIMED_IMAGES]), spent


def _fastest(action: Any, device: torch.device) -> float:
    """Seconds of the fastest of two calls, after one that does not count."""
    spent = []
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        spent.append(time.perf_counter() - began)
    return min(spent[1:])
