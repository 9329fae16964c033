"""What `fit` says: before training what it found and plans, at the end one sentence that a person can repeat.

Frozen values go in, plain text comes out. No saving is named without its accuracy, no accuracy without its interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offramp.common.formatting import counted, millions
from offramp.fitting.looking import Look
from offramp.fitting.plan import EXIT_EPOCHS, Plan
from offramp.measuring.calibrate import PolicyRequest

ONLY_ONE = "nothing else was tried: --quick"
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
    way = []
    if plan.frozen:
        way.append(
            "frozen features with linear heads"
            + (f", judged by {plan.folds}-fold cross-validation" if plan.folds else "")
        )
    if plan.epochs:
        exits = max(1, round(EXIT_EPOCHS * plan.epochs))
        more = f", {exits} more for the exits" if plan.tunes_exits else ""
        folds = f", {plan.tuned_folds} times for cross-validation and once for what ships" if plan.tuned_folds else ""
        part = (
            ""
            if plan.tuned == len(plan.members)
            else f" of the {plan.tuned} smallest"
            if plan.tuned > 1
            else " of the smallest"
        )
        way.append(f"{counted(plan.epochs, 'epoch')} of fine-tuning{part}{more}{folds}")
    said = [
        f"networks: {_members(plan)}; {', then '.join(way)}",
        f"tried: {_listed([FAMILIES[family] for family in plan.families])}",
        f"asked for: {asked}",
        f"about {minutes(plan.seconds)}, by a short measurement on this machine "
        f"({plan.images_per_s:,.0f} images/s through the largest)",
    ]
    if time_s is not None and plan.seconds > time_s:
        said.append(f"that is more than the {minutes(time_s)} there are, and nothing smaller is left to try")
    return said


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
        return f"the plain network {name}, which neither cascades nor exits could beat,"
    return f"a cascade ({name})," if family == "cascade" else f"a network with {name},"


def final_sentence(
    tested: Tested, family: str, name: str, reference: str, bundle: Path, why_single: str | None = None
) -> str:
    """The one sentence: what is shipped, how often it is right, how fast it is, where it lies.

    `why_single` says why it is the single network, where it is and there is a reason but that nothing was better.
    """
    low, high = (100 * end for end in tested.interval)
    right = (
        f"has {100 * tested.top1:.1f} % of {tested.samples:,} test images right "
        f"(95 % interval {low:.1f} to {high:.1f} %) and takes {tested.ms:.3g} ms per image on this machine"
    )
    if (family, name) == ("single", reference):
        why = why_single or "nothing cheaper was good enough for what was asked"
        return f"{bundle}, the single network {reference} itself ({why}), {right}."
    times = tested.reference_ms / tested.ms
    return (
        f"{bundle}, {kind(family, name)} {right}, {times:.2g} times as fast as the single network {reference} "
        f"({tested.reference_ms:.3g} ms, {100 * tested.reference_top1:.1f} % right)."
    )


def needed_words(needed: int, samples: int) -> str:
    """Why everybody goes to the whole network, and what would change that."""
    return (
        f"{samples:,} images are too few to tell whether a cheaper one is as good; about {round_up(needed):,} are "
        "needed, or --anyway"
    )


def no_faster(family: str, name: str, tested: Tested) -> str:
    """Why what was chosen by its mul-adds is not shipped."""
    what = {"cascade": f"the cascade {name}", "single": f"the plain network {name}"}.get(family, name)
    fewer = 100 * (1 - tested.mul_adds / tested.reference_mul_adds)
    return f"{what} needs {fewer:.0f} % fewer mul-adds and is no faster on this machine"


def over_budget(ms: float, budget_ms: float) -> str:
    """The bundle takes longer than its stages did when they were timed."""
    return (
        f"timed at the end, the bundle takes {ms:.3g} ms per image, more than the {budget_ms:g} ms that were asked "
        "for; times differ where other programs run, so repeat it on an idle machine or ask for less"
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
