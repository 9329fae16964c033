"""The headline of a report: what learned weights bring against the baseline, or what leaving early brings at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.common.formatting import millions, with_spread
from offramp.measuring.metrics import Curve
from offramp.measuring.policy import Outcome, outcome
from offramp.reporting.groups import Group, RunData
from offramp.runs.config import same_but_for_weighting

SLACK_POINTS = 0.5  # equal accuracy is compared this far below what both curves reach, away from their flat ends


@dataclass(frozen=True)
class Comparison:
    """Two groups side by side: accuracy at equal compute, compute at equal accuracy."""

    points: float  # mean over all budgets both reach
    spread: float | None  # standard deviation over seeds, where each seed is in both groups
    budgets: tuple[float, float]
    top1: float
    cost: float
    cost_before: float

    @property
    def saving(self) -> float:
        """The share of the compute that is no longer needed at equal accuracy."""
        return 1 - self.cost / self.cost_before


def compare(before: Group, after: Group, family: str = "q") -> Comparison | None:
    """Compare two groups over the budgets that all their runs reach; None where there are none."""
    curves = [group.curve(family) for group in (before, after)]
    known = [curve for curve in curves if curve is not None]
    low, high = max((c[0][0] for c in known), default=0.0), min((c[0][-1] for c in known), default=0.0)
    if len(known) < 2 or not low < high:
        return None
    grid = np.linspace(low, high, 400)
    first, second = (np.stack([np.interp(grid, c[0], row) for row in c[1]]) for c in known)
    means = [Curve(tuple(grid), tuple(each.mean(0))) for each in (first, second)]
    top1 = min(max(c.top1) for c in means) - SLACK_POINTS / 100
    costs = [c.cost_of(top1) for c in means]
    assert costs[0] is not None and costs[1] is not None
    paired = len(first) > 1 and _seeds(before) == _seeds(after)
    spread = 100 * float((second - first).mean(1).std(ddof=1)) if paired else None
    points = 100 * float((second.mean(0) - first.mean(0)).mean())
    return Comparison(points, spread, (low, high), top1, costs[1], costs[0])


def _seeds(group: Group) -> list[int]:
    return [run.config.seed for run in group.runs if run.curves]


def headline(groups: Sequence[Group]) -> str:
    """One sentence with numbers, whether they please or not."""
    pair = _pair(groups)
    found = None if pair is None else compare(*pair)
    if pair is None or found is None:
        return _alone(groups[0], named=len(groups) > 1)
    return f"{_at_equal_accuracy(found, *pair)}; {_at_equal_compute(found)} ({_count(*pair)})."


def _pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """Conventional training and learned weights of the same network on the same data, and nothing else between them."""
    for before in groups:
        for after in groups:
            one, other = before.first.config, after.first.config
            weightings = (one.weighting.name, other.weighting.name)
            if weightings == ("uniform", "learned") and same_but_for_weighting(one, other):
                return before, after
    return None


def _at_equal_accuracy(found: Comparison, before: Group, after: Group) -> str:
    change = round(100 * found.saving)
    amount = f"{abs(change)} % {'less' if change > 0 else 'more'} compute than" if change else "the same compute as"
    return (
        f"At equal accuracy ({100 * found.top1:.1f} %), {after.label} need {amount} the {before.label}: "
        f"{millions(found.cost)} against {millions(found.cost_before)} mul-adds per image"
    )


def _at_equal_compute(found: Comparison) -> str:
    size = f"{abs(found.points):.2f}" + ("" if found.spread is None else f" ± {found.spread:.2f}")
    low, high = map(millions, found.budgets)
    word = "better" if found.points >= 0 else "worse"
    return f"at equal compute they are {size} points {word} on average from {low} to {high}"


def _count(before: Group, after: Group) -> str:
    counts = [len(group.runs) for group in (before, after)]
    if counts[0] != counts[1]:
        return f"{counts[0]} and {counts[1]} seeds"
    return "one seed" if counts[0] == 1 else f"{counts[0]} seeds"


def _alone(group: Group, named: bool) -> str:
    """What leaving early brings to one network: the cheapest searched policy within half a point on calibration."""
    whole = f"{with_spread(100 * group.top1()[:, -1], 1)} % at {millions(group.costs[-1])} mul-adds per image"
    found = [_half_a_point(run) for run in group.runs if run.policies is not None]
    if not found:
        text = f"the whole network reaches {whole}; without a calibration split there are no thresholds to leave by."
    else:
        saved = with_spread([100 * (1 - one.cost / group.costs[-1]) for one in found], 0)
        top1 = with_spread([100 * one.top1 for one in found], 1)
        cost = millions(float(np.mean([one.cost for one in found])))
        text = (
            f"images that leave early save {saved} % of the compute: {top1} % at {cost} mul-adds per image; the whole "
            f"network reaches {whole}."
        )
    return f"{group.label}: {text}" if named else text[0].upper() + text[1:]


def _half_a_point(run: RunData) -> Outcome:
    assert run.policies is not None
    family = run.policies.family("searched")
    least = family[-1].top1 - SLACK_POINTS / 100
    policy = next(p for p in family if p.top1 >= least)
    return outcome(run.predictions, policy.thresholds, run.summary.costs)
