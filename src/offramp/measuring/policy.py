"""A policy says when a sample leaves: at the first exit whose confidence reaches its threshold, at the last anyway.

`Policies` is `policy.json`: a family of policies found on the calibration split, one of them chosen, with the
confidence measure they are for. Pure values; both runtimes and the report read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json, write_json
from offramp.common.formatting import millions
from offramp.measuring.confidence import MEASURES, Predictions

SCHEMA = 1
WIDEST_POINTS = 2.0  # that an interval may reach beyond an estimated drop which is acted on


@dataclass(frozen=True)
class Promise:
    """With this probability, at most this share of samples is lost: wrong under the policy, right at the last exit."""

    risk: float
    probability: float
    samples: int
    lost: int


@dataclass(frozen=True)
class Withheld:
    """A policy that was found and not given: the samples were too few to say what it loses, and so many would do."""

    mul_adds: float
    drop_points: float
    drop_interval: tuple[float, float]
    samples_needed: int


@dataclass(frozen=True)
class Policy:
    """Thresholds of every exit but the last (infinity: nobody leaves there), and what they gave on calibration.

    Intervals are of 95 %; the drop is what is lost against the last exit on the same `samples`, in points. Files of
    version 0.1 have neither.
    """

    family: str
    q: float | None
    thresholds: tuple[float, ...]
    mul_adds: float
    shares: tuple[float, ...]
    top1: float
    milliseconds: float | None = None
    promise: Promise | None = None
    samples: int | None = None
    top1_interval: tuple[float, float] | None = None
    drop_points: float | None = None
    drop_interval: tuple[float, float] | None = None
    withheld: Withheld | None = None

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["thresholds"] = [None if math.isinf(t) else t for t in self.thresholds]
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> Policy:
        given = {f.name: value[f.name] for f in fields(Policy) if f.name in value}
        given["thresholds"] = tuple(math.inf if t is None else float(t) for t in value["thresholds"])
        given["shares"] = tuple(float(share) for share in value["shares"])
        if given.get("promise") is not None:
            given["promise"] = Promise(**given["promise"])
        for name in ("top1_interval", "drop_interval"):
            given[name] = _interval(value.get(name), name)
        if given.get("withheld") is not None:
            own = _interval(given["withheld"]["drop_interval"], "drop_interval")
            given["withheld"] = Withheld(**{**given["withheld"], "drop_interval": own})
        return Policy(**given)


def _interval(value: Any, name: str) -> tuple[float, float] | None:
    """Two numbers, the lower one first, or none."""
    if value is None:
        return None
    low, high = (float(end) for end in value) if len(value) == 2 else (math.nan, math.nan)
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"its {name} must be two numbers, the lower one first")
    return low, high


@dataclass(frozen=True)
class Policies:
    """A family of policies for one network, and the chosen one."""

    measure: str
    temperatures: tuple[float, ...] | None
    costs: tuple[int, ...]
    policies: tuple[Policy, ...]
    chosen: int
    schedule: str = "eager"  # what the costs count
    folds: int | None = None  # networks whose outputs were put together, each trained without what it answered
    found_on: str | None = None  # another run, trained in the same way, on whose calibration split they were found

    @property
    def policy(self) -> Policy:
        """The chosen policy."""
        return self.policies[self.chosen]

    def family(self, name: str) -> list[Policy]:
        """The policies that were found in one way, cheapest first."""
        return sorted((p for p in self.policies if p.family == name), key=lambda p: p.mul_adds)

    def within(self, budget_mul_adds: float) -> Policy:
        """The most expensive policy within the budget, of the family of the chosen one where that has any."""
        check_budget(budget_mul_adds, self.costs)
        family = self.policy.family if self.policy.family in FAMILIES else FAMILIES[0]
        fitting = [p for p in self.family(family) if p.mul_adds <= budget_mul_adds]
        if fitting:
            return fitting[-1]
        return min(self.policies, key=lambda p: p.mul_adds)

    def at_q(self, q: float) -> Policy:
        """The policy of the paper's family nearest to q."""
        if not 0 < q < math.inf:
            raise ValueError(f"q must be a number above 0, got {q:g}")
        family = [p for p in self.policies if p.q is not None]
        if not family:
            raise ValueError("this policy file holds no policies by q")
        return min(family, key=lambda p: abs((p.q or 0) - q))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "measure": self.measure,
            "temperatures": None if self.temperatures is None else list(self.temperatures),
            "schedule": self.schedule,
            "costs": list(self.costs),
            "chosen": self.chosen,
            "folds": self.folds,
            "found_on": self.found_on,
            "policies": [policy.to_json() for policy in self.policies],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Policies:
        if value.get("schema") != SCHEMA:
            raise ValueError(f"policy schema {value.get('schema')!r} is not known to this version of offramp")
        temperatures = value["temperatures"]
        found = Policies(
            str(value["measure"]),
            None if temperatures is None else tuple(float(t) for t in temperatures),
            tuple(int(cost) for cost in value["costs"]),
            tuple(Policy.from_json(policy) for policy in value["policies"]),
            int(value["chosen"]),
            str(value.get("schedule", "eager")),
            None if value.get("folds") is None else int(value["folds"]),
            None if value.get("found_on") is None else str(value["found_on"]),
        )
        _check(found)
        return found


FAMILIES = ("searched", "q")


def _check(found: Policies) -> None:
    exits = len(found.costs)
    if found.measure not in MEASURES:
        raise ValueError(f"its confidence measure {found.measure!r} is not known")
    if found.temperatures is not None and (
        len(found.temperatures) != exits or not all(0 < t < math.inf for t in found.temperatures)
    ):
        raise ValueError(f"it needs {exits} temperatures above 0")
    if not 0 <= found.chosen < len(found.policies):
        raise ValueError(f"its chosen policy {found.chosen} is not there")
    for policy in found.policies:
        if len(policy.thresholds) != exits - 1 or any(math.isnan(t) for t in policy.thresholds):
            raise ValueError(f"each policy needs {exits - 1} thresholds")


def read_policies(path: str | Path) -> Policies:
    """Read `policy.json`; what does not belong there is a sentence."""
    value = read_json(path)
    try:
        return Policies.from_json(value)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a policy file") from error


def write_policies(path: str | Path, policies: Policies) -> None:
    """Write `policy.json`, atomically."""
    write_json(path, policies.to_json())


def check_budget(budget: float, costs: Sequence[float], unit: str = "mul-adds") -> None:
    """A budget must lie between the cost of the first exit and that of the last."""
    show = millions if unit == "mul-adds" else "{:.4g} ms".format
    if not budget >= costs[0]:
        raise ValueError(f"budget {show(budget)} is below exit 1's cost, {show(costs[0])}")
    if budget > costs[-1]:
        raise ValueError(f"budget {show(budget)} is above the whole network's cost, {show(costs[-1])}")


def leaves(confidences: np.ndarray, threshold: float) -> np.ndarray:
    """Who leaves at an exit: whose confidence reaches the threshold; what is not a number never does."""
    return confidences >= np.float32(threshold)


def exits_taken(confidences: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """The exit, 1..K, at which each sample leaves."""
    taken = np.full(confidences.shape[1], len(confidences))
    for k in reversed(range(len(thresholds))):
        taken[leaves(confidences[k], thresholds[k])] = k + 1
    return taken


def shares_of(exits: np.ndarray, num_exits: int) -> tuple[float, ...]:
    """The share of samples that left at each exit."""
    counts = np.bincount(exits, minlength=num_exits + 1)[1:]
    return tuple((counts / max(len(exits), 1)).tolist())


def mean_cost(exits: np.ndarray, costs: Sequence[float]) -> float:
    """The mean over samples of what their exits cost; whole numbers are added without rounding."""
    counts = np.bincount(exits, minlength=len(costs) + 1)[1:]
    return float(counts @ np.asarray(costs, np.float64)) / len(exits)


@dataclass(frozen=True)
class Outcome:
    """What a policy does to a set of samples: accuracy, mean cost, share of each exit."""

    top1: float
    cost: float
    shares: tuple[float, ...]


def rights(given: Predictions, thresholds: Sequence[float]) -> np.ndarray:
    """Which samples a policy gets right."""
    return given.right[exits_taken(given.confidences, thresholds) - 1, np.arange(given.samples)]


def outcome(given: Predictions, thresholds: Sequence[float], costs: Sequence[float]) -> Outcome:
    """Apply a policy to samples that every exit has seen."""
    taken = exits_taken(given.confidences, thresholds)
    right = given.right[taken - 1, np.arange(given.samples)]
    return Outcome(float(right.mean()), mean_cost(taken, costs), shares_of(taken, given.num_exits))
