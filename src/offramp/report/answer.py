"""The answer in a sentence: what learned weights bring against the baseline, or what leaving early brings at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.console import millions
from offramp.metrics import Curve
from offramp.policy import outcome
from offramp.report.gather import Group

SLACK_POINTS = 0.5  # equal accuracy is compared this far below what both curves reach, away from their flat ends


@dataclass(frozen=True)
class Comparison:
    """Two groups side by side: accuracy at equal compute, compute at equal accuracy."""

    points: float  # mean over all budgets both reach
    spread: float | None  # standard deviation over seeds, where each seed is in both groups
    top1: float
    cost: float
    cost_before: float
    seeds: int

    @property
    def saving(self) -> float:
        """The share of the compute that is no longer needed at equal accuracy."""
        return 1 - self.cost / self.cost_before


def compare(before: Group, after: Group, family: str = "q") -> Comparison | None:
    """Compare two groups over the budgets that all their runs reach; None where there are none."""
    curves = before.curve(family), after.curve(family)
    if curves[0] is None or curves[1] is None:
        return None
    low, high = max(c[0][0] for c in curves if c), min(c[0][-1] for c in curves if c)
    if not low < high:
        return None
    grid = np.geomspace(low, high, 200)
    grid[0], grid[-1] = low, high
    first, second = (np.stack([np.interp(grid, c[0], row) for row in c[1]]) for c in curves if c)
    means = [Curve(tuple(grid), tuple(each.mean(0))) for each in (first, second)]
    top1 = min(max(c.top1) for c in means) - SLACK_POINTS / 100
    costs = [c.cost_of(top1) for c in means]
    assert costs[0] is not None and costs[1] is not None
    paired = [r.config.seed for r in before.runs] == [r.config.seed for r in after.runs] and len(first) > 1
    spread = float((second - first).mean(1).std(ddof=1)) if paired and len(first) == len(second) else None
    points = float((second.mean(0) - first.mean(0)).mean())
    return Comparison(100 * points, spread and 100 * spread, top1, costs[1], costs[0], len(after.runs))


def headline(groups: Sequence[Group]) -> str:
    """One sentence with numbers, whether they please or not."""
    pair = _pair(groups)
    found = None if pair is None else compare(*pair)
    if pair is None or found is None:
        return _alone(groups[0])
    before, after = pair
    return f"{_at_equal_accuracy(found, before, after)}; {_at_equal_compute(found)} ({_seeds(found.seeds)})."


def _pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """Conventional training and learned weights of the same network, with nothing else between them."""
    for before in groups:
        for after in groups:
            one, other = before.first.config, after.first.config
            same = (one.model, one.imta, one.train) == (other.model, other.imta, other.train)
            if same and one.weighting.name == "uniform" and other.weighting.name == "learned":
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
    return f"at equal compute they are {size} points {'better' if found.points >= 0 else 'worse'} on average"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _alone(group: Group) -> str:
    """What leaving early brings to one network: the cheapest searched policy within half a point on calibration."""
    run = group.first
    last = run.metrics[-1]
    whole = f"{100 * last.top1:.1f} % at {millions(group.costs[-1])} mul-adds per image"
    if run.policies is None:
        return f"The whole network reaches {whole}; without a calibration split there are no thresholds to leave by."
    family = run.policies.family("searched")
    least = family[-1].top1 - SLACK_POINTS / 100
    policy = next(p for p in family if p.top1 >= least)
    found = outcome(run.answers, policy.thresholds, group.costs)
    return (
        f"Images that leave early save {100 * (1 - found.cost / group.costs[-1]):.0f} % of the compute: "
        f"{100 * found.top1:.1f} % at {millions(found.cost)} mul-adds per image; the whole network reaches {whole}."
    )
