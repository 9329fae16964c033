"""What a report opens on: the policy that ships, what it does to every test image, and which classes it serves badly.

It is the chosen one of a run's `policy.json`. Where no run has any, the cheapest searched policy within half a point of
the whole network on the calibration split stands in its place, and is called a suggestion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from offramp.common.files import read_json
from offramp.measuring.calibrate import stage_times
from offramp.measuring.confidence import predicted_classes
from offramp.measuring.intervals import Interval, paired_interval
from offramp.measuring.policy import FAMILIES, Outcome, Policy, exits_taken, mean_cost, outcome
from offramp.reporting.groups import Group, RunData

SLACK_POINTS = 0.5  # what a suggested policy may lose on the calibration split
HARDEST = 12


@dataclass(frozen=True)
class StageTimes:
    """Measured milliseconds per image up to each exit, and how they were measured.

    `policy` are those of the policy that ships and of the whole network, where these were run as a whole: stage times
    leave out what lies between stages, and that later stages see smaller batches.
    """

    milliseconds: tuple[float, ...]
    about: str
    policy: tuple[float, float] | None = None


def read_times(path: str | Path, num_exits: int) -> StageTimes:
    """What `offramp bench infer --json` wrote, at its largest batch."""
    table = read_json(path)
    found = stage_times(table, num_exits)
    batch = max(int(size) for size in table["stage_ms"]["1"])
    machine = f", on {table['machine']}" if table.get("machine") else ""
    about = f"stage times measured in batches of {batch}{machine}"
    whole = table.get("policy_ms")
    if whole is None:
        return StageTimes(found, about)
    try:
        measured = float(whole["leaving_early"]), float(whole["whole_network"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: policy_ms must hold leaving_early and whole_network, in ms per image") from error
    return StageTimes(found, f"{about}; the policy that ships was timed as a whole", measured)


@dataclass(frozen=True)
class Shipped:
    """A policy of a run and what it does on the test split; `chosen` by somebody, or only suggested here."""

    group: Group
    run: RunData
    policy: Policy
    chosen: bool

    @cached_property
    def taken(self) -> np.ndarray:
        """The exit, from 1, that each test image leaves at."""
        return exits_taken(self.run.predictions.confidences, self.policy.thresholds)

    @cached_property
    def right(self) -> np.ndarray:
        """Whether the exit it leaves at is right about it."""
        return self.run.predictions.right[self.taken - 1, np.arange(self.samples)]

    @property
    def whole_right(self) -> np.ndarray:
        """Whether the last exit is."""
        return self.run.predictions.right[-1]

    @property
    def samples(self) -> int:
        return self.run.predictions.samples

    @property
    def top1(self) -> float:
        return float(self.right.mean())

    @property
    def whole_top1(self) -> float:
        return float(self.whole_right.mean())

    @property
    def cost(self) -> float:
        return mean_cost(self.taken, self.run.costs)

    @property
    def saved(self) -> float:
        """The share of the whole network's mul-adds that is not spent."""
        return 1 - self.cost / self.run.costs[-1]

    @property
    def drop(self) -> float:
        """Points that leaving early loses."""
        return 100 * (self.whole_top1 - self.top1)

    @property
    def drop_interval(self) -> Interval:
        return paired_interval(self.whole_right, self.right)

    def milliseconds(self, times: StageTimes | None) -> tuple[float, float] | None:
        """Per image under the policy, and of the whole network; unknown for other networks."""
        if times is None or len(times.milliseconds) != len(self.run.costs):
            return None
        if times.policy is not None and self.chosen:
            return times.policy
        return mean_cost(self.taken, times.milliseconds), times.milliseconds[-1]


def find_shipped(groups: Sequence[Group], prefer: Path | None = None) -> Shipped | None:
    """The policy that ships: of the preferred run's folder, else of the first run that has one; else a suggestion."""
    every = [(group, run) for group in groups for run in group.runs if run.policies is not None]
    known = [pair for pair in every if pair[1].chosen]
    first = [pair for pair in known if prefer is not None and pair[1].folder.resolve() == prefer.resolve()]
    for group, run in (*first, *known):
        assert run.policies is not None
        return Shipped(group, run, run.policies.policy, True)
    return Shipped(*every[0], suggested(every[0][1]), False) if every else None


def suggested(run: RunData) -> Policy:
    """The cheapest searched policy within half a point of the whole network, on the calibration split."""
    assert run.policies is not None
    family = run.policies.family("searched")
    return next(policy for policy in family if policy.top1 >= family[-1].top1 - SLACK_POINTS / 100)


def suggested_outcome(run: RunData) -> Outcome:
    """What that policy gives on the test split."""
    return outcome(run.predictions, suggested(run).thresholds, run.costs)


def shown_family(shipped: Shipped | None) -> str:
    """Whose lines the report draws: the family of the policy that ships; the paper's where none does."""
    if shipped is None or not shipped.chosen:
        return "q"
    return shipped.policy.family if shipped.policy.family in FAMILIES else FAMILIES[0]


def confusion(shipped: Shipped) -> np.ndarray:
    """How many test images of each class (rows) are taken for each class (columns) under the policy."""
    classes = shipped.run.test.logits.shape[-1]
    said = predicted_classes(shipped.run.test.logits)[shipped.taken - 1, np.arange(shipped.samples)]
    return np.bincount(shipped.run.test.labels * classes + said, minlength=classes**2).reshape(classes, classes)


@dataclass(frozen=True)
class ClassLoss:
    """A class, how often it is right with and without leaving early, and the points between, with their interval."""

    label: int
    images: int
    whole_top1: float
    top1: float
    interval: Interval

    @property
    def points(self) -> float:
        return 100 * (self.whole_top1 - self.top1)


def losing_classes(shipped: Shipped) -> list[ClassLoss]:
    """Classes that are right less often for leaving early; what loses most comes first."""
    labels, found = shipped.run.test.labels, []
    for label in np.unique(labels).tolist():
        own = labels == label
        whole, early = shipped.whole_right[own], shipped.right[own]
        if whole.sum() > early.sum():
            interval = paired_interval(whole, early)
            found.append(ClassLoss(label, int(own.sum()), float(whole.mean()), float(early.mean()), interval))
    return sorted(found, key=lambda one: -one.points)


@dataclass(frozen=True)
class HardImage:
    """A test image that the exits have trouble with: what it is, what each exit said, where it left."""

    image: np.ndarray
    number: int
    label: int
    said: tuple[int, ...]
    confidences: tuple[float, ...]
    left: int


def hardest_images(shipped: Shipped, count: int = HARDEST) -> list[HardImage]:
    """Of the images that were kept, those whose own class gets the least probability in the mean over exits."""
    run = shipped.run
    if run.test.thumbs is None:
        return []
    rows = thumb_rows(run)
    logits = np.asarray(run.test.logits[:, rows], np.float64)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    own = chances[:, np.arange(len(rows)), run.test.labels[rows]].mean(0)
    said, images = predicted_classes(run.test.logits[:, rows]), shown_thumbs(run)
    return [
        HardImage(
            images[at],
            int(run.test.index[rows[at]]),
            int(run.test.labels[rows[at]]),
            tuple(said[:, at].tolist()),
            tuple(run.predictions.confidences[:, rows[at]].tolist()),
            int(shipped.taken[rows[at]]),
        )
        for at in np.argsort(own, kind="stable")[:count].tolist()
    ]


def thumb_rows(run: RunData) -> np.ndarray:
    """The rows of the saved outputs that have an image; images whose sample could not be read have none."""
    assert run.test.thumb_index is not None
    order = np.argsort(run.test.index)
    at = np.searchsorted(run.test.index, run.test.thumb_index, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)]
    return rows[run.test.index[rows] == run.test.thumb_index]


def shown_thumbs(run: RunData) -> np.ndarray:
    """The images that belong to `thumb_rows`."""
    assert run.test.thumbs is not None and run.test.thumb_index is not None
    return run.test.thumbs[np.isin(run.test.thumb_index, run.test.index)]
