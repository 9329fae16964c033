"""What `fit` says: before training what it found and plans, at the end one sentence that a person can repeat.

Frozen values go in, plain text comes out. No saving is named without its accuracy, no accuracy without its interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offramp.common.formatting import millions
from offramp.fitting.looking import Look
from offramp.fitting.plan import EXIT_EPOCHS, Plan
from offramp.measuring.calibrate import PolicyRequest

FAMILIES = {
    "single": "the plain network",
    "cascade": "cascades (a small network first, the large one only where that is unsure)",
    "exits": "exits inside the network",
}


def found_sentences(look: Look) -> list[str]:
    """What is in the folder."""
    (few, least), (many, most) = look.smallest, look.largest
    splits = look.splits
    each = f"from {least:,} ({few}) to {most:,} ({many})" if least < most else f"{least:,} each"
    return [
        f"{look.name}: {look.images:,} images of {look.classes} classes, {each}; "
        f"about {look.side} x {look.longer} pixels",
        f"to learn from: {splits['train'] + splits['calibration']:,}; kept for the test at the end: {splits['test']:,}",
    ]


def plan_sentences(plan: Plan, asked: str, time_s: float | None) -> list[str]:
    """What will be done, before it is."""
    sizes = _listed([str(size) for size in plan.sizes])
    way = []
    if plan.frozen:
        way.append("frozen features with linear heads" + (f", chosen on by {plan.folds} folds" if plan.folds else ""))
    if plan.epochs:
        exits = max(1, round(EXIT_EPOCHS * plan.epochs))
        more = f", {exits} more for the exits" if "exits" in plan.families else ""
        folds = f", {plan.tuned_folds} times by folds and once more for what is shipped" if plan.tuned_folds else ""
        way.append(f"{plan.epochs} epoch{'' if plan.epochs == 1 else 's'} of fine-tuning{more}{folds}")
    said = [
        f"network: {plan.backbone} at {sizes} pixels; {', then '.join(way)}",
        f"tried: {_listed([FAMILIES[family] for family in plan.families])}",
        f"asked for: {asked}",
        f"about {minutes(plan.seconds)}, by a short measurement on this machine "
        f"({plan.images_per_s:,.0f} images/s at {plan.sizes[-1]} pixels)",
    ]
    if time_s is not None and plan.seconds > time_s:
        said.append(f"that is more than the {minutes(time_s)} there are, and nothing smaller is left to try")
    return said


def asked_sentence(request: PolicyRequest) -> str:
    """What was asked for, in words."""
    if request.budget_mul_adds is not None:
        return f"the most accurate network for {millions(request.budget_mul_adds)} mul-adds per image"
    if request.budget_ms is not None:
        return f"the most accurate network for {request.budget_ms:g} ms per image on this machine"
    if request.risk is not None:
        return (
            f"the cheapest network that loses at most {100 * request.risk:g} % of the images that the single network "
            f"has right, with probability {request.probability:g}"
        )
    return f"the cheapest network within {request.drop_allowed:g} points of the single network"


@dataclass(frozen=True)
class Tested:
    """Accuracies on the test split, and times on this machine."""

    top1: float
    interval: tuple[float, float]
    samples: int
    mul_adds: float
    ms: float
    reference_top1: float
    reference_mul_adds: float
    reference_ms: float


def kind(family: str, name: str) -> str:
    """What a bundle holds, in words."""
    if family == "single":
        return f"the plain network at {name}, which neither cascades nor exits could beat,"
    return f"a cascade ({name})," if family == "cascade" else f"a network with {name},"


def final_sentence(
    tested: Tested, family: str, name: str, reference: str, bundle: Path, needed: str | None = None
) -> str:
    """The one sentence: what is shipped, how often it is right, how fast it is, where it lies."""
    low, high = (100 * end for end in tested.interval)
    right = (
        f"has {100 * tested.top1:.1f} % of {tested.samples:,} test images right "
        f"(95 % interval {low:.1f} to {high:.1f} %) and takes {tested.ms:.3g} ms per image on this machine"
    )
    if (family, name) == ("single", reference):
        why = needed or "nothing cheaper was good enough for what was asked"
        return f"{bundle}, the single network at {reference} itself ({why}), {right}."
    times = tested.reference_ms / tested.ms
    return (
        f"{bundle}, {kind(family, name)} {right}, {times:.2g} times as fast as the single network at {reference} "
        f"({tested.reference_ms:.3g} ms, {100 * tested.reference_top1:.1f} % right)."
    )


def needed_words(needed: int, samples: int) -> str:
    """Why everybody goes to the whole network, and what would change that."""
    return (
        f"from {samples:,} images, what anything cheaper loses is known no better than to two points either way; some "
        f"{round_up(needed):,} would be needed, or --anyway"
    )


def round_up(count: int) -> int:
    """Two digits are enough for a number that is only about right."""
    digits = 10 ** max(0, len(str(count)) - 2)
    return -(-count // digits) * digits


def minutes(seconds: float) -> str:
    """90 -> 2 minutes, 7200 -> 2.0 hours."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    count = max(1, round(seconds / 60))
    return f"{count} minute{'' if count == 1 else 's'}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
