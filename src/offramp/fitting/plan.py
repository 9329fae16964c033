"""What `fit` will do within the time there is: networks, families, frozen features or fine-tuning, epochs, minutes.

A short measurement on this machine (how long an image takes to be read, to pass the network, to be trained on) and what
was asked for go in; a frozen `Plan` comes out, which is said to people before anything is trained and is kept, so that
the same command goes on with it. All but the measurement are plain functions of numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

from offramp.common.device import synchronize
from offramp.common.formatting import millions
from offramp.common.images import UnreadableImage
from offramp.data.device_photos import DeviceCrop
from offramp.data.imagefolder import ImageFolderDataset
from offramp.models.exits import ExitNet

STEP = 32  # sizes are multiples of it, as networks halve their maps five times
SMALLER = {1: (0.6, 0.8), 2: (0.5, 0.85)}  # sides of the smaller images over the largest, by the number of backbones
SMALLEST = 32
EPOCHS = 16  # of fine-tuning, where there is time for them
FEWEST_ON_CPU = 5  # epochs below which frozen features with linear heads are the better use of the time
WANTED_ON_GPU = 10  # epochs below which smaller images are the better use of the time
EXIT_EPOCHS = 0.4  # epochs of a network with exits, which starts from the fine-tuned one, over those of the others
FOLDS = 5
ALL_BY_FOLDS = 2_000  # photos to learn from, up to which everything that is trained is judged by folds
HEADS_BY_FOLDS = 20_000  # up to which linear heads on frozen features are
ENOUGH_HELD_OUT = 1_000  # images; with fewer in a tenth, a fifth is held out
MOST_TIMES = 2.5  # of what the single network takes, for everything that is tried, once
KEPT_SHARE = 1 / 4  # of a GPU's memory may be photos
CAPTURED = 3.0  # how many times as fast as an eager loop training on a GPU is at least (docs/performance.md)
HEAD_S = 0.0005  # to fit a linear head, for an image that it is fitted to
ELSE_SECONDS = 60.0  # to build, calibrate, export, time and report
TIMED_IMAGES = 16


@dataclass(frozen=True)
class Member:
    """A network, the side of the images that it is given, and its mul-adds for one of them."""

    backbone: str
    size: int
    cost: float


@dataclass(frozen=True)
class Pace:
    """Seconds per image to pass, and to train, a network of so many mul-adds."""

    cost: float
    forward_s: float
    train_s: float


@dataclass(frozen=True)
class Rates:
    """What was timed on this machine: reading an image, and each backbone at one size."""

    read_s: float
    cuda: bool
    paces: Mapping[str, Pace]
    photo_bytes: float = 0.0  # of a GPU's memory in which photos may stay

    def forward_s(self, members: Sequence[Member]) -> float:
        """Seconds for an image to pass some networks."""
        return sum(self.paces[m.backbone].forward_s * m.cost / self.paces[m.backbone].cost for m in members)

    def train_s(self, members: Sequence[Member]) -> float:
        """Seconds to train some networks on an image."""
        return sum(self.paces[m.backbone].train_s * m.cost / self.paces[m.backbone].cost for m in members)


@dataclass(frozen=True)
class Plan:
    """What will be trained; the costs of `members` rise, and the last is the one that everything is compared with.

    `frozen`: linear heads on frozen features are tried, judged by `folds` unless that is 0. `epochs` of fine-tuning, 0
    for none, of the `tuned` cheapest members; `tuned_folds` as `folds`, of whole networks. `held_out` is how images to
    choose on are found where nothing is done by folds: a `tenth`, or a `fifth`.
    """

    members: tuple[Member, ...]
    families: tuple[str, ...]
    frozen: bool
    folds: int
    epochs: int
    tuned: int
    tuned_folds: int
    held_out: str
    seconds: float
    images_per_s: float

    @property
    def reference(self) -> Member:
        """The single network that everything is compared with; exits are put on it."""
        return self.members[-1]

    @property
    def by_folds(self) -> bool:
        """Whether all photos to learn from are chosen on too, each judged by networks that have not seen it."""
        return bool(self.tuned_folds if self.epochs else self.folds)

    @property
    def tuning_times(self) -> int:
        """How many times as long fine-tuning takes by folds: each time on all but one of them, and once on all."""
        return max(1, self.tuned_folds)

    @property
    def tunes_exits(self) -> bool:
        return "exits" in self.families and self.tuned == len(self.members)

    def cascades(self, count: int) -> list[tuple[int, ...]]:
        """The stages of every cascade of the `count` cheapest members: two or three, the last of them at the end."""
        if "cascade" not in self.families:
            return []
        before = range(count - 1)
        return [(*small, count - 1) for stages in (1, 2) for small in combinations(before, stages)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        members = tuple(Member(**member) for member in value["members"])
        return Plan(**{**value, "members": members, "families": tuple(value["families"])})


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to: seconds, one network only, epochs that were asked for, a promise."""

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


Costs = Mapping[str, Mapping[int, float]]  # mul-adds of each backbone at each size


def members_at(top: int, costs: Costs, budget: float | None = None) -> tuple[Member, ...]:
    """The last backbone at the largest size, and the first one at two smaller sizes.

    Where there is a budget, one of them is the most expensive that fits into it.
    """
    (small, own), (large, theirs) = list(costs.items())[0], list(costs.items())[-1]
    last = Member(large, top, theirs[top])
    below = sorted({max(SMALLEST, int(share * top / STEP + 1e-9) * STEP) for share in SMALLER[len(costs)]})
    known = [Member(small, size, cost) for size, cost in own.items() if size <= top and cost < last.cost]
    found = [member for member in known if member.size in below]
    if budget is not None:
        fitting = [member for member in (*known, last) if member.cost <= budget]
        if not fitting:
            refuse_budget(budget, costs)
        wanted = max(fitting, key=lambda member: member.cost)
        if wanted not in (*found, last):
            nearest = min(found, key=lambda member: abs(member.size - wanted.size), default=None)
            found = [*(member for member in found if member is not nearest), wanted]
    return (*sorted(found, key=lambda member: member.cost), last)


def refuse_budget(budget: float, costs: Costs) -> None:
    """A budget that no network keeps to."""
    own = next(iter(costs.values()))
    least = min(own)
    raise ValueError(
        f"the budget {millions(budget)} is below what the network costs at {least} pixels, its smallest size here: "
        f"{millions(own[least])} mul-adds"
    )


def ladder(
    costs: Costs, largest: int, fixed: bool, limits: Limits, budget: float | None = None
) -> list[tuple[Member, ...]]:
    """Networks to choose from, the largest first; with a `fixed` size, or all the time there is, only of that size."""
    first, own = next(iter(costs.items()))
    tops = [largest] if fixed or limits.seconds is None else sorted(own, reverse=True)
    if limits.quick:
        sizes = tops if budget is None else sorted(own, reverse=True)
        fitting = [Member(first, size, own[size]) for size in sizes if budget is None or own[size] <= budget]
        if not fitting:
            refuse_budget(budget or 0.0, costs)
        return [(member,) for member in fitting]
    alone = {first: own}
    choices = [costs] if len(costs) == 1 or limits.seconds is None else [costs, alone]
    sets = [members_at(top, each, budget) for top in tops for each in choices if top in list(each.values())[-1]]
    return sorted(sets, key=lambda members: -members[-1].cost)


def decide(ladder: Sequence[tuple[Member, ...]], images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan:
    """The plan for the largest networks that there is time for; `ladder` has those to choose from, largest first.

    `images` counts those of each split.
    """
    plans = [_with_members(members, images, rates, limits) for members in ladder]
    fitting = [plan for plan in plans if limits.seconds is None or plan.seconds <= limits.seconds]
    if rates.cuda and limits.epochs is None:  # there, fewer epochs come before smaller images
        fitting = [plan for plan in fitting if plan.epochs >= WANTED_ON_GPU] or fitting
    return (fitting or plans[-1:])[0]


def times_single(members: Sequence[Member], families: Sequence[str]) -> float:
    """What training everything takes, over training the single network alone."""
    return sum(m.cost for m in members) / members[-1].cost + (EXIT_EPOCHS if "exits" in families else 0.0)


def _with_members(members: tuple[Member, ...], images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan:
    """The best plan with these networks: everything that there is time for."""
    families: tuple[str, ...] = ("single",) if limits.quick else ("single", "cascade", "exits")
    if times_single(members, families) > MOST_TIMES:
        families = tuple(family for family in families if family != "exits")
    trained = images["train"] + images["calibration"]
    heads, whole = folds_for(trained, limits)
    plain = Plan(
        members,
        families,
        frozen=True,
        folds=heads,
        epochs=0,
        tuned=0,
        tuned_folds=0,
        held_out="as set" if limits.asked_split else held_out_of(trained, limits.quick),
        seconds=0.0,
        images_per_s=1 / (rates.read_s + rates.forward_s(members[-1:])),
    )
    beside = not limits.quick and (not rates.cuda or whole > 0)  # frozen features beside fine-tuning
    tuned = replace(plain, frozen=beside, folds=heads if beside else 0, tuned_folds=whole)
    return _timed(_fine_tuned(tuned, images, rates, limits) or plain, images, rates)


def folds_for(trained: int, limits: Limits) -> tuple[int, int]:
    """By how many folds linear heads, and whole networks, are judged, from so many photos to learn from.

    None where there is no choice to make, where somebody said what is held out, and for a promise, which is about the
    network that ships.
    """
    if limits.quick or limits.asked_split or limits.promise:
        return 0, 0
    return FOLDS if trained <= HEADS_BY_FOLDS else 0, FOLDS if trained <= ALL_BY_FOLDS else 0


def held_out_of(trained: int, quick: bool = False) -> str:
    """Which part of the photos to learn from is held out, where nothing is done by folds."""
    return "tenth" if quick or trained // 10 >= ENOUGH_HELD_OUT else "fifth"


def photos_for(held_out: int, plan: Plan) -> int:
    """How many photos to learn from it takes to have so many held-out ones."""
    if plan.by_folds and held_out <= (ALL_BY_FOLDS if plan.epochs else HEADS_BY_FOLDS):
        return held_out
    return 5 * held_out if held_out_of(5 * held_out) == "fifth" else 10 * held_out


def _fine_tuned(plan: Plan, images: Mapping[str, int], rates: Rates, limits: Limits) -> Plan | None:
    """With as many epochs as there is time for; on a CPU, where that is too few, of the cheapest networks alone.

    None where there is no time. On a CPU there is none unless somebody gives some.
    """
    every = len(plan.members)
    if limits.seconds is None or limits.epochs is not None:
        epochs = limits.epochs if limits.epochs is not None else EPOCHS if rates.cuda else 0
        return replace(plan, epochs=epochs, tuned=every) if epochs else None
    for count in [every] if rates.cuda else range(every, 0, -1):
        found = replace(plan, tuned=count)
        epochs = _epochs_within(limits.seconds, found, images, rates)
        if epochs >= (1 if rates.cuda else FEWEST_ON_CPU):
            return replace(found, epochs=epochs)
    return None


def _epochs_within(seconds: float, plan: Plan, images: Mapping[str, int], rates: Rates) -> int:
    """How many epochs of fine-tuning there is time for."""
    one, two = (_timed(replace(plan, epochs=epochs), images, rates).seconds for epochs in (1, 2))
    return 0 if seconds < one else min(EPOCHS, 1 + int((seconds - one) / (two - one)))


def _timed(plan: Plan, images: Mapping[str, int], rates: Rates) -> Plan:
    return replace(plan, seconds=expected_seconds(plan, images, rates))


def expected_seconds(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """What the plan will take on this machine, about."""
    return ELSE_SECONDS + (_frozen_seconds(plan, images, rates) if plan.frozen else 0.0) + _tuning(plan, images, rates)


def _frozen_seconds(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """All images are read once and pass every network once; then the heads are fitted."""
    everything = sum(images.values())
    passing = everything * (rates.read_s + rates.forward_s(plan.members))
    return passing + HEAD_S * everything * (plan.folds + 1) * (len(plan.members) + 1)


def _tuning(plan: Plan, images: Mapping[str, int], rates: Rates) -> float:
    """Training the networks side by side, whose heads begin as probes, and then the exits; both are evaluated."""
    if not plan.epochs:
        return 0.0
    members = plan.members[: plan.tuned]
    step = rates.train_s(members)
    exits = EXIT_EPOCHS * rates.train_s([plan.reference]) if plan.tunes_exits else 0.0
    trained = images["train"] + images["calibration"]
    each = plan.epochs * (step + exits) / (CAPTURED if rates.cuda else 1)
    each += _readings(plan, trained, rates) * rates.read_s + rates.forward_s(members)
    judged = images["test"] + (trained if plan.tuned_folds else trained / FOLDS)
    runs = 2 if plan.tunes_exits else 1
    return trained * each * plan.tuning_times + runs * judged * (rates.read_s + rates.forward_s(members))


def _readings(plan: Plan, trained: int, rates: Rates) -> float:
    """How often a photo is read: for the probe, and at each epoch, or once for each run where photos stay on a GPU."""
    if stay_on_device(trained, plan.reference.size, rates.photo_bytes):
        return 2.0 + plan.tunes_exits
    return 1.0 + plan.epochs * (1 + EXIT_EPOCHS * plan.tunes_exits)


def stay_on_device(photos: int, size: int, photo_bytes: float) -> bool:
    """Whether all photos can lie on a GPU, as squares larger than the images that are cut from them."""
    return photos * 3 * DeviceCrop().side(size) ** 2 < photo_bytes


def photo_bytes(device: torch.device) -> float:
    """The part of a GPU's memory that may be photos; of all of it, as what is free differs from call to call."""
    return KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0.0


def measure_rates(
    timed: Mapping[Member, ExitNet], data: ImageFolderDataset, device: torch.device, crops: bool = True
) -> Rates:
    """Time some real images on this machine: single networks, one of each backbone. They are not changed.

    `crops`: photos are only cropped, which a GPU can do to photos that stay there.
    """
    images, read_s = _read_some(data)
    paces = {member.backbone: _pace(model, member, images, device) for member, model in timed.items()}
    workers = max(1, min(data.workers, torch.get_num_threads())) if device.type == "cpu" else max(1, data.workers)
    return Rates(read_s / workers, device.type == "cuda", paces, photo_bytes(device) if crops else 0.0)


def _pace(model: ExitNet, member: Member, images: torch.Tensor, device: torch.device) -> Pace:
    sized = F.interpolate(images.to(device), (member.size, member.size), mode="bilinear", antialias=True)
    ready = sized.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(len(ready), dtype=torch.long, device=device)
    own = model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    with torch.inference_mode():
        forward_s = _fastest(lambda: own.last(ready), device) / len(ready)

    def step() -> None:
        loss = F.cross_entropy(own.last(ready), labels)
        torch.autograd.grad(loss, [p for p in own.parameters() if p.requires_grad], allow_unused=True)

    train_s = _fastest(step, device) / len(ready)  # in evaluation mode, so that no statistics move
    return Pace(member.cost, forward_s, train_s)


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
