"""The paper's claim, put to numbers: learned weights against the baseline, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp.common.formatting import millions
from offramp.reporting.groups import method_label
from offramp.reporting.kept_runs import StoredRun, baseline_epochs
from offramp.runs.config import WeightingConfig, all_but_weighting, same_but_for_weighting

LOSS_ALLOWED = 0.5  # points that any one exit may lose
ALIKE = 0.03  # two costs that differ by no more than this share count as equal


@dataclass(frozen=True)
class Difference:
    """Another weighting minus baseline at an exit or a budget, in points, for each seed that has both."""

    what: str
    points: tuple[float, ...]
    decides: bool  # whether the claim is about it; else it must only not lose much

    @property
    def mean(self) -> float:
        return float(np.mean(self.points))

    @property
    def error(self) -> float | None:
        """The standard error of the mean; unknown for one seed."""
        return float(np.std(self.points, ddof=1) / np.sqrt(len(self.points))) if len(self.points) > 1 else None

    @property
    def holds(self) -> bool | None:
        """Positive beyond its error where the claim is about it, no great loss elsewhere; unknown for one seed."""
        if not self.decides:
            return self.mean >= -LOSS_ALLOWED
        return None if self.error is None else self.mean > self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def pairs(groups: Sequence[Sequence[StoredRun]]) -> list[tuple[Sequence[StoredRun], Sequence[StoredRun]]]:
    """Conventional training and another weighting, of the same network, data and schedule."""
    return [
        (before, after)
        for before in groups
        for after in groups
        if before[0].config.weighting.name == "uniform"
        and after[0].config.weighting.name != "uniform"
        and same_but_for_weighting(before[0].config, after[0].config)
    ]


def of_equal_cost(
    groups: Sequence[Sequence[StoredRun]], ratios: Mapping[str, float]
) -> list[tuple[Sequence[StoredRun], Sequence[StoredRun]]]:
    """Conventional training for so many epochs more that it costs what another weighting costs; else the same."""

    def rest(group: Sequence[StoredRun]) -> str:
        own = group[0].config
        return all_but_weighting(replace(own, train=replace(own.train, epochs=1)))

    found = []
    for before in groups:
        for after in groups:
            configs = before[0].config, after[0].config
            weightings = [config.weighting.name for config in configs]
            if weightings[0] != "uniform" or weightings[1] == "uniform" or rest(before) != rest(after):
                continue
            spent = [baseline_epochs(config, ratios) for config in configs]
            more = configs[0].train.epochs > configs[1].train.epochs
            if more and spent[0] and spent[1] and abs(spent[0] / spent[1] - 1) <= ALIKE:
                found.append((before, after))
    return found


def against(before: Sequence[StoredRun], after: Sequence[StoredRun]) -> str:
    """What conventional training is called beside another weighting: with its epochs where they are not the same."""
    name, count = method_label(before[0].config), before[0].config.train.epochs
    return name if count == after[0].config.train.epochs else f"{name} of {count} epochs, which cost as much"


def one_change(groups: Sequence[Sequence[StoredRun]]) -> list[tuple[Sequence[StoredRun], Sequence[StoredRun], str]]:
    """Learned weights in two settings that differ in one thing, which the first has as in the paper, and its name."""
    learned = [group for group in groups if group[0].config.weighting.name == "learned"]
    usual = vars(WeightingConfig("learned"))
    found = []
    for before in learned:
        for after in learned:
            first, second = (vars(group[0].config.weighting) for group in (before, after))
            changed = [key for key in first if first[key] != second[key]]
            same = same_but_for_weighting(before[0].config, after[0].config)
            if same and len(changed) == 1 and first[changed[0]] == usual[changed[0]]:
                found.append((before, after, changed[0]))
    return found


def held_out_differences(before: Sequence[StoredRun], after: Sequence[StoredRun]) -> list[Difference]:
    """At every exit, and in the mean over exits, on the calibration split, for each seed that has both."""
    first, second = ({run.config.seed: run.calibration_top1 for run in runs} for runs in (before, after))
    both = [(first[seed], second[seed]) for seed in shared_seeds(before, after)]
    gains = [100 * np.subtract(b, a) for a, b in both if a and b]
    if not gains:
        return []
    names = [*(f"exit {k + 1}" for k in range(len(gains[0]))), "mean"]
    return [
        Difference(what, tuple(map(float, points)), decides=False)
        for what, points in zip(names, np.transpose([[*gain, gain.mean()] for gain in gains]), strict=True)
    ]


def shared_seeds(before: Sequence[StoredRun], after: Sequence[StoredRun]) -> list[int]:
    """The seeds that both have."""
    return sorted({run.config.seed for run in before} & {run.config.seed for run in after})


def differences(
    before: Sequence[StoredRun], after: Sequence[StoredRun], budgets: Sequence[float], family: str = "q"
) -> list[Difference]:
    """At every exit and every budget that both runs of a seed reach; points in the order of `shared_seeds`."""
    first, second = ({run.config.seed: run for run in runs} for runs in (before, after))
    both = [(first[seed], second[seed]) for seed in shared_seeds(before, after)]
    if not both:
        return []
    exits = len(both[0][0].metrics)
    found = [
        Difference(
            f"exit {k + 1}",
            tuple(100 * (b.metrics[k].top1 - a.metrics[k].top1) for a, b in both),
            decides=k in (0, exits - 1),
        )
        for k in range(exits)
    ]
    for budget in budgets:
        if all(family in run.curves for pair in both for run in pair):
            at = [[100 * float(run.curves[family].at([budget])[0]) for run in pair] for pair in both]
            points = tuple(b - a for a, b in at)
            if np.isfinite(points).all():
                found.append(Difference(millions(budget), points, decides=True))
    return found


def verdict(found: Sequence[Difference]) -> str:
    """Whether the claim holds, in a sentence; what speaks against it is named."""
    seeds = len(found[0].points)
    if seeds < 2:
        return "One seed: no verdict."
    failing = [d for d in found if not d.holds]
    if not failing:
        return (
            f"The claim holds over {seeds} seeds: better at the first and the last exit and at every budget by more "
            f"than a standard error, and no exit loses more than {LOSS_ALLOWED:g} points."
        )
    named = ", ".join(f"{d.what} ({d})" for d in failing)
    return f"The claim does not hold over {seeds} seeds; against it: {named}."
