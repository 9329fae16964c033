"""The choice between networks: what each does to held-out images goes in, the best for what was asked comes out.

Saved arrays in, frozen values out. Thresholds that a point is judged by were found on other images than those it is
judged on (five random parts take turns), so that a network with many thresholds has no advantage over one with none.
The choice among them is judged in the same way, as the best of many looks better than it is. The test split is not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from offramp.common.formatting import millions
from offramp.measuring.calibrate import SPLIT_SEED, PolicyRequest
from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import (
    Interval,
    paired_interval,
    reach,
    right_interval,
    samples_needed,
)
from offramp.measuring.policy import WIDEST_POINTS, exits_taken, outcome
from offramp.measuring.risk import candidates, certify, halves, promised
from offramp.measuring.thresholds import search

BUDGETS = 24  # points of a network with exits
PARTS = 5
EACH = 0.985  # with which two intervals hold, so that what they span holds 95 times in 100 (tests: of how many)
STRICTNESS = (1.0, 1.25, 1.5, 2.0, 3.0)  # standard errors by which a loss stays within its limit; the first that holds


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
        interval = list(right_interval(self.right))
        return {"mul_adds": self.mul_adds, "ms": self.ms, "top1": self.top1, "interval": interval}


@dataclass(frozen=True)
class Choice:
    """The chosen network and point, and the points that such a choice loses against the single network (see `judged`).

    `needed` is how many held-out images it would take to trust something cheaper; None if nothing cheaper was doubted.
    `certified`: the loss is that on the images, so many, which certify a promise.
    """

    network: int
    point: int
    drop: float
    drop_interval: Interval
    needed: int | None = None
    certified: int | None = None


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
    """The network at budgets from its first exit's cost to its last's; at the one asked for; last, with a promise."""
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
    judged = [_point(network, budget, exits) for budget, exits in zip(budgets, taken, strict=True)]
    return [*judged, *_kept_promise(network, request)]


def _kept_promise(network: Network, request: PolicyRequest) -> list[Point]:
    """The point that ships if a promise is asked for and this network chosen: with the certified thresholds."""
    if request.risk is None or not network.whole:
        return []
    given, prices = network.given, network.prices(unit_of(request))
    thresholds, _ = promised(given, prices, request.risk, request.probability, SPLIT_SEED)
    exits = exits_taken(given.confidences, thresholds)
    return [_point(network, float(np.mean(np.asarray(prices)[exits - 1])), exits)]


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


def choose(
    networks: Sequence[Network], curves: Sequence[Sequence[Point]], request: PolicyRequest, plain: bool = False
) -> Choice:
    """The best network and point for what was asked, or with `plain` the best of the plain networks.

    `networks[0]` is the single network that all are compared with.
    """
    if request.risk is not None:
        return single_network() if plain else _promising(networks, curves, request)
    unit = unit_of(request)
    tried = _Tried(networks, curves, unit, plain)
    asked = request.budget_mul_adds if request.budget_ms is None else request.budget_ms
    if asked is None:
        return _cheapest(tried, request)
    if not (tried.budgets <= asked).any():
        least = min(network.prices(unit)[0] for network in networks)
        show, more = ("{:.3g} ms".format, "") if unit == "ms" else (millions, "; a new --out may train a smaller one")
        raise ValueError(f"the budget {show(asked)} is below what the cheapest takes, {show(least)} per image{more}")
    return tried.judged(tried.most_accurate(asked))


def single_network() -> Choice:
    """The single network that everything is compared with."""
    return Choice(0, 0, 0.0, (0.0, 0.0))


Rule = Callable[[np.ndarray], int]  # held-out images, by their rows, to the place of the point that is best on them


class _Tried:
    """All points that may be chosen, as arrays [M] and [M, N]; the single network is the first of them."""

    def __init__(
        self, networks: Sequence[Network], curves: Sequence[Sequence[Point]], unit: str, plain: bool = False
    ) -> None:
        kept = [n for n, network in enumerate(networks) if not plain or network.family == "single"]
        every = [(n, p, point) for n in kept for p, point in enumerate(curves[n])]
        self.places = [(n, p) for n, p, _ in every]
        self.budgets = np.array([point.budget for *_, point in every])
        self.prices = np.array([point.price(unit) for *_, point in every])
        self.right = np.stack([point.right for *_, point in every])
        self.lost = self.right[:1].astype(np.int8) - self.right

    def place(self, choice: Choice) -> int:
        return self.places.index((choice.network, choice.point))

    def most_accurate(self, budget: float) -> Rule:
        """Within a budget; of equals the cheapest."""
        within = np.flatnonzero(self.budgets <= budget)

        def rule(rows: np.ndarray) -> int:
            right = self.right[np.ix_(within, rows)].sum(axis=1)
            return int(within[np.lexsort((self.prices[within], -right))[0]])

        return rule

    def cheapest(self, allowed: float, errors: float, known: np.ndarray) -> Rule:
        """Of those that are known well enough, and would be within the limit with so many standard errors more."""
        able = known & (self.prices <= self.prices[0])

        def rule(rows: np.ndarray) -> int:
            close = able & (self.drops(rows, errors) <= allowed + 1e-9)
            close[0] = True
            return int(np.where(close, self.prices, np.inf).argmin())

        return rule

    def drops(self, rows: np.ndarray, errors: float = 0.0) -> np.ndarray:
        """The points that each loses against the single network on some images, and so many standard errors more."""
        lost = self.lost[:, rows]
        return 100 * (lost.mean(axis=1) + errors * lost.std(axis=1) / len(rows) ** 0.5)

    def reaches(self) -> np.ndarray:
        """How far the interval of each one's loss goes beyond the loss that was seen."""
        drops = self.drops(np.arange(self.right.shape[1])).tolist()
        intervals = [(0.0, 0.0), *(paired_interval(self.right[0], own, EACH) for own in self.right[1:])]
        return np.array([reach(drop, interval) for drop, interval in zip(drops, intervals, strict=True)])

    def judged(self, rule: Rule) -> Choice:
        """What a rule chooses from all images, and what is lost by choosing so.

        The best of many looks better than it is. So the estimate is of the rule: on four of five parts of the images it
        chooses a network with its thresholds, the fifth judges that, and all five put together are what is lost. The
        interval, of 95 %, spans that and what the choice from all images was seen to lose.
        """
        chosen, right = rule(np.arange(self.right.shape[1])), np.zeros(self.right.shape[1], bool)
        if chosen == 0:
            return single_network()
        for fit, judge in _parts(len(right)):
            right[judge] = self.right[rule(fit)][judge]
        single, own = self.right[0], self.right[chosen]
        (low, high), (lowest, highest) = (paired_interval(single, each, EACH) for each in (right, own))
        drop = 100 * float(single.mean() - right.mean())
        return Choice(*self.places[chosen], drop, (min(low, lowest), max(high, highest)))


def _cheapest(tried: _Tried, request: PolicyRequest) -> Choice:
    """The cheapest whose loss against the single network is small enough and, unless overruled, known well enough.

    Both must hold for the choice as it is judged too; until they do, it is made more strictly.
    """
    allowed, reaches, doubted = request.drop_allowed, tried.reaches(), {}
    for strictness in STRICTNESS:
        known = request.anyway | (strictness * reaches <= WIDEST_POINTS)
        found = tried.judged(tried.cheapest(allowed, strictness, known))
        wide = 0.0 if request.anyway else reach(found.drop, found.drop_interval)
        if found.drop <= allowed and wide <= WIDEST_POINTS:
            break
        if found.drop <= allowed:
            doubted[tried.place(found)] = wide
    else:
        found = single_network()
    if not request.anyway:
        close = tried.drops(np.arange(tried.right.shape[1])) <= allowed
        doubted |= {place: reaches[place] for place in np.flatnonzero(close & (reaches > WIDEST_POINTS)).tolist()}
    return replace(found, needed=_needed(tried, doubted, tried.prices[tried.place(found)]))


def _needed(tried: _Tried, doubted: Mapping[int, float], price: float) -> int | None:
    """How many held-out images it would take to know what one of those loses that are doubted and cost less."""
    cheaper = {place: wide for place, wide in doubted.items() if tried.prices[place] < price}
    if not cheaper:
        return None
    place, wide = min(cheaper.items(), key=lambda one: one[1])
    least = int(tried.right.shape[1] * wide / WIDEST_POINTS) + 1  # no interval narrows faster
    return max(least, samples_needed(tried.right[0], tried.right[place], WIDEST_POINTS, EACH))


def _promising(networks: Sequence[Network], curves: Sequence[Sequence[Point]], request: PolicyRequest) -> Choice:
    """The network that promises to be the cheapest, judged on the half that its thresholds will come from.

    The other half, which certifies them afterwards, is not looked at; so the promise holds for the one that is chosen.
    Only networks whose last exit is the single network count: what is lost is lost against that one.
    """
    assert request.risk is not None
    unit = unit_of(request)
    rows, others = halves(networks[0].given.samples, SPLIT_SEED)
    best = (curves[0][0].price(unit), 0)
    for n, network in enumerate(networks):
        if network.whole and network.given.num_exits > 1:
            half, prices = network.given.rows(rows), network.prices(unit)
            thresholds, _ = certify(candidates(half, prices), half, request.risk, request.probability)
            best = min(best, (outcome(half, thresholds, prices).cost, n))
    cost, n = best
    if n == 0:
        return single_network()
    single, own = curves[0][0].right[others], curves[n][-1].right[others]
    drop = 100 * float(single.mean() - own.mean())
    return Choice(n, len(curves[n]) - 1, drop, paired_interval(single, own), certified=len(others))


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
