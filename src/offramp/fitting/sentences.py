"""What `fit` says: before training what it found and plans, at the end one sentence that a person can repeat.

Frozen values go in, plain text comes out. No saving is named without its accuracy, no accuracy without its interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offramp.common.formatting import counted, millions
from offramp.fitting.looking import Look
from offramp.fitting.plan import EXIT_EPOCHS, Plan, photos_for
from offramp.measuring.calibrate import PolicyRequest
from offramp.measuring.intervals import Interval

ONLY_ONE = "nothing else was tried: --quick"
WORTH = 1.05  # times as fast as the single network, from which on more than that one network is worth its while
MUCH_LONGER = 1.3  # times what was planned
FAMILIES = {
    "single": "the plain network",
    "cascade": "cascades (a small network first, the large one only where that is unsure)",
    "exits": "exits inside the network",
}


def found_sentence(look: Look) -> str:
    """What is in the folder."""
    (few, least), (many, most) = look.smallest, look.largest
    each = f"from {least:,} ({few}) to {most:,} ({many}) of each" if least < most else f"{least:,} of each"
    return (
        f"{look.name}: {look.images:,} images of {look.classes} classes, {each} to learn from; "
        f"about {look.side} x {look.longer} pixels"
    )


def plan_sentences(
    plan: Plan, splits: Mapping[str, int], asked: str, time_s: float | None, trained: bool = False
) -> list[str]:
    """What will be done, before it is, or that all networks are `trained` already; `splits` counts the images."""
    way = []
    if plan.frozen:
        folds = f", judged by {plan.folds}-fold cross-validation" if plan.folds else ""
        way.append(f"frozen features with linear heads{folds}")
    if plan.epochs:
        way.append(_tuning(plan))
    said = [
        f"splits: {_splits(plan, splits)}",
        f"networks: {_members(plan)}; {', then '.join(way)}",
        f"tried: {_listed([FAMILIES[family] for family in plan.families])}",
        f"asked for: {asked}",
        "all networks are trained already"
        if trained
        else f"about {minutes(plan.seconds)}, by a short measurement on this machine "
        f"({plan.images_per_s:,.0f} images/s through the largest)",
    ]
    if not trained and time_s is not None and plan.seconds > time_s:
        said.append(f"that is more than the {minutes(time_s)} there are, and nothing smaller is left to try")
    return said


def _splits(plan: Plan, splits: Mapping[str, int]) -> str:
    """What is learned from, chosen on and tested on."""
    if plan.by_folds:
        learned = f"{splits['train'] + splits['calibration']:,} to learn from and, by turns, to choose on"
    else:
        learned = f"{splits['train']:,} to learn from, {splits['calibration']:,} held out to choose on"
    return f"{learned}, {splits['test']:,} kept for the test at the end"


def _tuning(plan: Plan) -> str:
    """Fine-tuning: of what, for how long, how many times."""
    part = f" of the {plan.tuned} smallest" if plan.tuned > 1 else " of the smallest"
    exits = f", {max(1, round(EXIT_EPOCHS * plan.epochs))} more for the exits" if plan.tunes_exits else ""
    folds = (
        f", {plan.tuned_folds} times on a part for cross-validation and once on all for what ships, which takes "
        f"{plan.tuning_times} times as long"
    )
    return (
        f"{counted(plan.epochs, 'epoch')} of fine-tuning{part if plan.tuned < len(plan.members) else ''}{exits}"
        f"{folds if plan.tuned_folds else ''}"
    )


def _members(plan: Plan) -> str:
    """The backbones, each with its sizes."""
    backbones = list(dict.fromkeys(member.backbone for member in plan.members))
    sizes = [[str(m.size) for m in plan.members if m.backbone == backbone] for backbone in backbones]
    return _listed([f"{name} at {_listed(own)} pixels" for name, own in zip(backbones, sizes, strict=True)])


def asked_sentence(request: PolicyRequest) -> str:
    """What was asked for, in words."""
    if request.budget_mul_adds is not None:
        return f"the most accurate network for {millions(request.budget_mul_adds)} mul-adds per image"
    if request.budget_ms is not None:
        return f"the most accurate network for {request.budget_ms:g} ms per image on this machine"
    if request.risk is not None:
        return (
            f"the cheapest network that, with probability {request.probability:g}, loses at most "
            f"{100 * request.risk:g} % of all images: has them wrong where the single network has them right"
        )
    return f"the cheapest network within {request.drop_allowed:g} points of the single network"


@dataclass(frozen=True)
class Speed:
    """What a bundle and the single network cost on held-out photos: mul-adds, and milliseconds on this machine."""

    mul_adds: float
    ms: float
    reference_mul_adds: float
    reference_ms: float


@dataclass(frozen=True)
class Tested:
    """Accuracies on the test split, the points between them, and the mul-adds there; intervals are of 95 %."""

    top1: float
    interval: Interval
    samples: int
    mul_adds: float
    reference_top1: float
    reference_interval: Interval
    drop: float
    drop_interval: Interval


def final_sentence(
    tested: Tested,
    speed: Speed,
    family: str,
    name: str,
    reference: str,
    bundle: Path,
    why: str | None = None,
    in_mul_adds: bool = False,
) -> str:
    """The one sentence: what is shipped, how often it is right, how fast it is, where it lies.

    `why` says why it is nothing cheaper, where there is a reason but that nothing cheaper was good enough.
    `in_mul_adds`: a budget of mul-adds was asked for, so they are said too.
    """
    cost = f"{millions(tested.mul_adds)} mul-adds and " if in_mul_adds else ""
    right = (
        f"has {100 * tested.top1:.1f} % of {tested.samples:,} test images right "
        f"(95 % interval {_percents(tested.interval)}) and takes {cost}{speed.ms:.3g} ms per image on this machine"
    )
    if (family, name) == ("single", reference):
        why = why or "nothing cheaper was good enough for what was asked"
        return f"{bundle}, the single network {reference} itself ({why}), {right}."
    times = speed.reference_ms / speed.ms
    return (
        f"{bundle}, {_kind(family, name, why)} {right}, {times:.2g} times as fast as the single network {reference} "
        f"({speed.reference_ms:.3g} ms, {100 * tested.reference_top1:.1f} % right, "
        f"{_percents(tested.reference_interval)})."
    )


def _percents(interval: Interval) -> str:
    """89.9 to 94.0 %."""
    low, high = (100 * end for end in interval)
    return f"{low:.1f} to {high:.1f} %"


def _kind(family: str, name: str, why: str | None) -> str:
    """What a bundle holds, in words."""
    if family == "single":
        beaten = f" ({why})," if why else ", which neither cascades nor exits could beat,"
        return f"the plain network {name}{beaten}"
    return f"a cascade ({name})," if family == "cascade" else f"a network with {name},"


def brings_nothing(
    request: PolicyRequest, family: str, name: str, speed: Speed, samples: int, top1: float, interval: Interval
) -> str | None:
    """Why what was chosen is not worth its while, if so; None where it keeps to a budget, whatever that brings.

    `top1` and its interval are on the held-out images, `samples`.
    """
    if request.budget_mul_adds is not None or request.budget_ms is not None:
        return None
    cheaper = speed.mul_adds < speed.reference_mul_adds
    if request.risk is not None and not cheaper:
        return nothing_promised(samples)
    if cheaper and speed.reference_ms >= WORTH * speed.ms:
        return None
    what = {"cascade": f"the cascade {name}", "single": f"the plain network {name}"}.get(family, name)
    fewer = 100 * (1 - speed.mul_adds / speed.reference_mul_adds)
    return (
        f"{what} ({100 * top1:.1f} % of {samples:,} held-out images right, {_percents(interval)}) needs {fewer:.0f} % "
        "fewer mul-adds and is no faster on this machine"
    )


def nothing_promised(samples: int) -> str:
    """Why it is the single network, where a promise was asked for."""
    return f"of nothing cheaper could that be promised on {samples:,} held-out images"


def needed_words(needed: int, samples: int, plan: Plan) -> str:
    """Why nothing cheaper ships, and what would change that."""
    photos = photos_for(needed, plan)
    learned = (
        f" (of {round_up(photos):,} photos to learn from)" if photos > needed and plan.held_out != "as set" else ""
    )
    return (
        f"{samples:,} held-out images are too few to tell whether a cheaper one is as good; about {round_up(needed):,}"
        f"{learned} are needed, or --anyway"
    )


def over_budget(ms: float, budget_ms: float, batch: int) -> str:
    """The bundle takes longer than its stages did when they were timed."""
    full = ", as its later stages see fewer than the full batches they were timed with" if batch > 1 else ""
    return (
        f"That is more than the {budget_ms:g} ms that were asked for{full}; times differ where other programs run, so "
        "repeat it on an idle machine or ask for less."
    )


def slower_than_planned(spent_s: float, planned_s: float) -> str | None:
    """Said after training, where it took clearly longer than everything was to take."""
    if spent_s < MUCH_LONGER * planned_s:
        return None
    return (
        f"training took {minutes(spent_s)} where about {minutes(planned_s)} were planned for everything; other "
        "programs may be running, or the machine got slower"
    )


def round_up(count: int) -> int:
    """Two digits are enough for a number that is only about right."""
    digits = 10 ** max(0, len(str(count)) - 2)
    return -(-count // digits) * digits


def minutes(seconds: float) -> str:
    """90 -> 2 minutes, 7200 -> 2.0 hours."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return counted(max(1, round(seconds / 60)), "minute")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
