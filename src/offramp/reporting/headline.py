"""The headline of a report: what leaving early saves at what accuracy, then what learned weights bring.

A saving never stands without its accuracy, and a comparison says one thing: where accuracy at equal compute and compute
at equal accuracy disagree, only the first is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.common.formatting import millions, with_spread
from offramp.measuring.intervals import Interval, right_interval
from offramp.measuring.metrics import Curve
from offramp.measuring.sentences import fewer_right
from offramp.reporting.groups import Group
from offramp.reporting.shipped import Shipped, StageTimes, find_shipped, shown_family, suggested_outcome
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

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than its spread over seeds; of one seed nobody knows, so it is not."""
        return self.spread is not None and abs(self.points) > self.spread


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


def headline(groups: Sequence[Group], shipped: Shipped | None = None, times: StageTimes | None = None) -> str:
    """Everything that is said on top, whether it pleases or not."""
    shipped = shipped or find_shipped(groups)
    return " ".join(
        part for part in (leading(groups, shipped, times), weightings(groups, shown_family(shipped))) if part
    )


def leading(groups: Sequence[Group], shipped: Shipped | None, times: StageTimes | None = None) -> str:
    """What leaving early saves, at what accuracy."""
    if shipped is not None and (shipped.chosen or len(shipped.group.runs) == 1):
        return _of_policy(shipped, times, named=len(groups) > 1)
    return _alone(groups[0], named=len(groups) > 1)


def percent_range(interval: Interval, digits: int = 1) -> str:
    """(0.905, 0.923) -> 90.5 to 92.3 %."""
    return f"{100 * interval[0]:.{digits}f} to {100 * interval[1]:.{digits}f} %"


def _of_policy(shipped: Shipped, times: StageTimes | None, named: bool) -> str:
    """One policy of one run: the saving and what it costs in one breath, then the numbers behind it."""
    about = [*([shipped.group.label] if named else []), *(["the policy that ships"] if shipped.chosen else [])]
    who = f"Leaving early ({', '.join(about)})" if about else "Leaving early"
    found = shipped.milliseconds(times)
    ours, theirs = ("", "") if found is None else (f" or {ms:.3g} ms" for ms in found)
    return (
        f"{who} {_in_short(shipped, found)}: {100 * shipped.top1:.1f} % of {shipped.samples:,} test images are right "
        f"({percent_range(right_interval(shipped.right))}) at {millions(shipped.cost)} mul-adds{ours} per image; the "
        f"whole network has {100 * shipped.whole_top1:.1f} % at {millions(shipped.run.costs[-1])}{theirs}. "
        "In brackets: 95 % intervals."
    )


def _in_short(shipped: Shipped, found: tuple[float, float] | None) -> str:
    """The saving and its price."""
    if shipped.saved < 0.005:
        return "saves nothing, since nearly every image goes to the last exit"
    speed = "" if found is None else f" and is {found[1] / found[0]:.2f} times as fast"
    return f"saves {100 * shipped.saved:.0f} % of the compute{speed}, {price_in_points(shipped)}"


def price_in_points(shipped: Shipped) -> str:
    """What leaving early costs in accuracy, or gains, with its 95 % interval."""
    return f"with {fewer_right(shipped.drop, shipped.drop_interval)}"


def weightings(groups: Sequence[Group], family: str = "q") -> str:
    """What learned weights bring against the baseline, where both are there and nothing else differs."""
    pair = _pair(groups)
    found = None if pair is None else compare(*pair, family)
    if pair is None or found is None:
        return ""
    before, after = pair
    low, high = map(millions, found.budgets)
    size = f"{abs(found.points):.2f}" + ("" if found.spread is None else f" ± {found.spread:.2f}")
    word = "better" if found.points >= 0 else "worse"
    text = (
        f"At equal compute {after.label} are {size} points {word} than the {before.label} on average from {low} to "
        f"{high} mul-adds"
    )
    change = round(100 * found.saving)
    if change * found.points > 0 and found.clear:
        amount = f"{abs(change)} % {'less' if change > 0 else 'more'} compute"
        text += f", and need {amount} to have {100 * found.top1:.1f} % right"
    unclear = "" if found.clear or found.spread is None else ": not beyond their spread"
    return f"{text} ({_count(before, after)}{unclear})."


def _pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """Conventional training and learned weights of the same network on the same data, and nothing else between them."""
    for before in groups:
        for after in groups:
            one, other = before.first.config, after.first.config
            weightings = (one.weighting.name, other.weighting.name)
            if weightings == ("uniform", "learned") and same_but_for_weighting(one, other):
                return before, after
    return None


def _count(before: Group, after: Group) -> str:
    counts = [len(group.runs) for group in (before, after)]
    if counts[0] != counts[1]:
        return f"{counts[0]} and {counts[1]} seeds"
    return "one seed each, so it may be chance: --seeds 0,1,2 tells" if counts[0] == 1 else f"{counts[0]} seeds"


def _alone(group: Group, named: bool) -> str:
    """What leaving early brings to seeds of one network: the cheapest searched policy within half a point."""
    whole = f"{with_spread(100 * group.top1()[:, -1], 1)} % at {millions(group.costs[-1])} mul-adds per image"
    found = [suggested_outcome(run) for run in group.runs if run.policies is not None]
    if not found:
        text = f"the whole network reaches {whole}; without a calibration split there are no thresholds to leave by."
    else:
        saved = with_spread([100 * (1 - one.cost / group.costs[-1]) for one in found], 0)
        top1 = with_spread([100 * one.top1 for one in found], 1)
        cost = millions(float(np.mean([one.cost for one in found])))
        text = (
            f"leaving early has {top1} % of the test images right at {cost} mul-adds per image, {saved} % less than "
            f"the whole network, which has {whole}."
        )
    return f"{group.label}: {text}" if named else text[0].upper() + text[1:]
