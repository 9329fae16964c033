"""The choice between networks: what each does to held-out images goes in, the best for what was asked comes out.

Saved arrays in, frozen values out. Thresholds that a point is judged by were found on other images than those it is
judged on (five random parts take turns), so that a network with many thresholds has no advantage over one with none.
The test split is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offramp.common.formatting import millions
from offramp.measuring.calibrate import SPLIT_SEED, PolicyRequest
from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import paired_interval, proportion_interval, samples_needed
from offramp.measuring.policy import WIDEST_POINTS, exits_taken, outcome
from offramp.measuring.risk import certify, halves, safe_to_cheap
from offramp.measuring.thresholds import search

BUDGETS = 24  # points of a network with exits
PARTS = 5
CANDIDATES = 100


@dataclass(frozen=True)
class Network:
    """A network on held-out images: what it said, what each exit costs in mul-adds and, if that was timed, in ms.

    `whole`: its last exit answers as the single network that all are compared with.
    """

    family: str
    name: str
    given: Predictions
    mul_adds: tuple[int, ...]
    ms: tuple[float, ...] | None = None
    whole: bool = False

    def prices(self, unit: str) -> tuple[float, ...]:
        """What each exit costs, in the unit of what was asked."""
        if unit == "mul_adds":
            return tuple(map(float, self.mul_adds))
        assert self.ms is not None, "a choice by milliseconds needs times"
        return self.ms


@dataclass(frozen=True)
class Point:
    """A network at a budget: its mean costs, and which of the held-out images it has right."""

    budget: float
    mul_adds: float
    ms: float | None
    right: np.ndarray

    @property
    def top1(self) -> float:
        return float(self.right.mean())

    def price(self, unit: str) -> float:
        price = self.mul_adds if unit == "mul_adds" else self.ms
        assert price is not None
        return price

    def to_json(self) -> dict[str, Any]:
        low, high = proportion_interval(int(self.right.sum()), len(self.right))
        return {"mul_adds": self.mul_adds, "ms": self.ms, "top1": self.top1, "interval": [low, high]}


@dataclass(frozen=True)
class Choice:
    """The chosen network and point. `needed` is how many held-out images it would take to trust something cheaper.

    `drop` and `drop_interval` are the points lost against the single network, on held-out images.
    """

    network: int
    point: int
    drop: float
    drop_interval: tuple[float, float]
    needed: int | None = None


def unit_of(request: PolicyRequest) -> str:
    """What costs are counted in."""
    return "mul_adds" if request.budget_ms is None else "ms"


class Indexed(Protocol):
    """Something about images, with their numbers."""

    @property
    def index(self) -> np.ndarray: ...


def common_rows(saved: Sequence[Indexed]) -> list[np.ndarray]:
    """The rows of each of some outputs that hold the same images, those that all of them have, in one order."""
    shared = saved[0].index
    for one in saved[1:]:
        shared = np.intersect1d(shared, one.index)
    if not len(shared):
        raise ValueError("the networks were held to different images, so they cannot be compared")
    found = []
    for one in saved:
        order = np.argsort(one.index, kind="stable")
        found.append(order[np.searchsorted(one.index[order], shared)])
    return found


def points(network: Network, request: PolicyRequest) -> list[Point]:
    """The network at budgets from its first exit's cost to its last's, and at the one asked for."""
    given, unit = network.given, unit_of(request)
    prices = network.prices(unit)
    if given.num_exits == 1:
        return [_point(network, prices[0], np.ones(given.samples, np.int64))]
    asked = request.budget_mul_adds if request.budget_ms is None else request.budget_ms
    budgets = sorted({*np.geomspace(prices[0], prices[-1], BUDGETS)[1:-1].tolist(), prices[0], prices[-1]})
    if asked is not None and prices[0] < asked < prices[-1]:
        budgets = sorted({*budgets, asked})
    taken = np.zeros((len(budgets), given.samples), np.int64)
    for fit, judge in _parts(given.samples):
        found = search(given.rows(fit), prices, budgets)
        for at, thresholds in enumerate(found):
            taken[at, judge] = exits_taken(given.confidences[:, judge], thresholds)
    return [_point(network, budget, exits) for budget, exits in zip(budgets, taken, strict=True)]


def _parts(samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to find thresholds on and rows to judge them on, so that each row is judged once."""
    number = np.random.default_rng(SPLIT_SEED).permutation(samples) % max(2, min(PARTS, samples))
    if samples < 2:
        return [(np.arange(samples), np.arange(samples))]
    return [(np.flatnonzero(number != part), np.flatnonzero(number == part)) for part in np.unique(number).tolist()]


def _point(network: Network, budget: float, exits: np.ndarray) -> Point:
    right = network.given.right[exits - 1, np.arange(len(exits))]
    ms = None if network.ms is None else float(np.mean(np.asarray(network.ms)[exits - 1]))
    return Point(budget, float(np.mean(np.asarray(network.mul_adds, np.float64)[exits - 1])), ms, right)


def choose(networks: Sequence[Network], curves: Sequence[Sequence[Point]], request: PolicyRequest) -> Choice:
    """The best network and point for what was asked; `networks[0]` is the single one that all are compared with."""
    if request.risk is not None:
        return _promising(networks, curves, request)
    asked = request.budget_mul_adds if request.budget_ms is None else request.budget_ms
    if asked is not None:
        return _most_accurate(networks, curves, asked, unit_of(request))
    return _cheapest(curves, request, unit_of(request))


def _most_accurate(networks: Sequence[Network], curves: Sequence[Sequence[Point]], budget: float, unit: str) -> Choice:
    """The most accurate within a budget; of equals the cheapest."""
    fitting = [
        (point.top1, -point.price(unit), -n, p)
        for n, curve in enumerate(curves)
        for p, point in enumerate(curve)
        if point.budget <= budget * (1 + 1e-12)
    ]
    if not fitting:
        least = min(network.prices(unit)[0] for network in networks)
        show = millions if unit == "mul_adds" else "{:.3g} ms".format
        raise ValueError(f"the budget {show(budget)} is below what the cheapest network takes, {show(least)} per image")
    _, _, n, p = max(fitting)
    return _chosen(curves, -n, p)


def _cheapest(curves: Sequence[Sequence[Point]], request: PolicyRequest, unit: str) -> Choice:
    """The cheapest whose loss against the single network is small enough and, unless overruled, known well enough."""
    allowed = request.drop_allowed
    single = curves[0][-1]
    close = [
        (point.price(unit), n, p)
        for n, curve in enumerate(curves)
        for p, point in enumerate(curve)
        if 100 * (single.top1 - point.top1) <= allowed + 1e-9 and point.price(unit) <= single.price(unit)
    ]
    trusted = [one for one in close if request.anyway or _reach(curves[one[1]][one[2]], single) <= WIDEST_POINTS]
    _, n, p = min(trusted)  # the single network itself is always among them
    doubted = [one for one in close if one not in trusted and one[0] < min(trusted)[0]]
    needed = None
    if doubted and (n, p) == (0, len(curves[0]) - 1):
        needed = min(samples_needed(curves[n][p].right, single.right, WIDEST_POINTS) for _, n, p in doubted)
    return _chosen(curves, n, p, needed)


def _reach(point: Point, single: Point) -> float:
    """How much more than was seen, or than nothing, may be lost against the single network, in points."""
    return _drop_interval(point, single)[1] - max(0.0, 100 * (single.top1 - point.top1))


def _drop_interval(point: Point, single: Point) -> tuple[float, float]:
    """Of the points lost against the single network, which loses none against itself."""
    if point is single:
        return 0.0, 0.0
    return paired_interval(single.right, point.right)


def _promising(networks: Sequence[Network], curves: Sequence[Sequence[Point]], request: PolicyRequest) -> Choice:
    """The network that promises to be the cheapest, judged on the half that its thresholds will come from.

    The other half, which certifies them afterwards, is not looked at; so the promise holds for the one that is chosen.
    Only networks whose last exit is the single network count: what is lost is lost against that one.
    """
    assert request.risk is not None
    unit = unit_of(request)
    best = (curves[0][-1].price(unit), 0)
    for n, network in enumerate(networks):
        if network.whole and network.given.num_exits > 1:
            rows, _ = halves(network.given.samples, SPLIT_SEED)
            half, prices = network.given.rows(rows), network.prices(unit)
            found = search(half, prices, np.linspace(prices[0], prices[-1], CANDIDATES))
            thresholds, _ = certify(safe_to_cheap(half, prices, found), half, request.risk, request.probability)
            best = min(best, (outcome(half, thresholds, prices).cost, n))
    cost, n = best
    nearest = min(range(len(curves[n])), key=lambda p: abs(curves[n][p].price(unit) - cost))
    return _chosen(curves, n, nearest)


def _chosen(curves: Sequence[Sequence[Point]], n: int, p: int, needed: int | None = None) -> Choice:
    single, point = curves[0][-1], curves[n][p]
    return Choice(n, p, 100 * (single.top1 - point.top1), _drop_interval(point, single), needed)


def single_network(curves: Sequence[Sequence[Point]]) -> Choice:
    """The single network that everything is compared with."""
    return _chosen(curves, 0, len(curves[0]) - 1)


def families_json(networks: Sequence[Network], curves: Sequence[Sequence[Point]], runs: Mapping[str, str]) -> Any:
    """What the report draws: every network with its points, cheapest first."""
    return [
        {
            "family": network.family,
            "name": network.name,
            "run": runs[network.name],
            "points": [point.to_json() for point in curve],
        }
        for network, curve in zip(networks, curves, strict=True)
    ]
