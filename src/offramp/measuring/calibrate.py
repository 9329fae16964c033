"""Policies from saved outputs: the calibration split of an evaluated run goes in, `policy.json` comes out.

A `PolicyRequest` says what is wanted of the policy: a q, a budget, a largest drop in accuracy or a promise about risk.
The test split is never looked at here. Every policy has intervals that allow for its thresholds having been chosen on
the samples they are judged on; where a drop was asked for and its interval is wide, everybody goes to the last exit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from offramp.common.files import read_json
from offramp.common.names import unknown
from offramp.measuring.confidence import Predictions, fit_temperatures
from offramp.measuring.intervals import Interval, paired_interval, reach, right_interval, samples_needed
from offramp.measuring.policy import (
    FAMILIES,
    WIDEST_POINTS,
    Policies,
    Policy,
    Promise,
    Withheld,
    check_budget,
    outcome,
    rights,
    write_policies,
)
from offramp.measuring.risk import check_promise, halves, promised
from offramp.measuring.thresholds import NEVER, Q_GRID, Thresholds, q_at_budget, q_thresholds, search
from offramp.runs.config import same_but_for_held_out
from offramp.runs.folder import POLICY, holds_run, read_config
from offramp.runs.outputs import SavedOutputs, read_outputs, read_summary

SEARCHED = 40  # policies of the searched family, their budgets spread evenly on a logarithmic scale
SPLIT_SEED = 0  # of the halves behind a promise, and of the parts behind an interval
PARTS = 5  # of the samples, each judged by thresholds that the others chose


@dataclass(frozen=True)
class PolicyRequest:
    """What a policy is asked for: one of these; without any, the cheapest within half a point of the whole network."""

    q: float | None = None
    budget_mul_adds: float | None = None
    budget_ms: float | None = None
    max_drop_points: float | None = None
    risk: float | None = None
    probability: float = 0.95
    family: str = "searched"
    anyway: bool = False  # a drop is acted on however wide its interval

    @property
    def drop_allowed(self) -> float:
        """Points against the whole network that may be lost, where neither budget nor promise is asked for."""
        return 0.5 if self.max_drop_points is None else self.max_drop_points

    def __post_init__(self) -> None:
        asked = [f.name for f in fields(self)[:5] if getattr(self, f.name) is not None]
        if len(asked) > 1:
            words = " and ".join(name.removesuffix("_mul_adds").replace("_", " ") for name in asked)
            raise ValueError(f"ask for one thing at a time, not for {words}")
        if self.family not in FAMILIES:
            raise ValueError(unknown("policy family", self.family, FAMILIES))
        if self.max_drop_points is not None and not self.max_drop_points >= 0:
            raise ValueError(f"max_drop_points must be 0 or more, got {self.max_drop_points:g}")
        if self.budget_ms is not None and not self.budget_ms > 0:
            raise ValueError(f"budget_ms must be above 0, got {self.budget_ms:g}")
        check_promise(self.probability if self.risk is None else self.risk, self.probability)

    @property
    def by_drop(self) -> bool:
        """Whether it asks for a largest drop, as it does when nothing else is said."""
        return all(wanted is None for wanted in (self.q, self.budget_mul_adds, self.budget_ms, self.risk))

    @property
    def sees_labels(self) -> bool:
        """Whether labels have a part in the choice of thresholds; in the paper's family within a budget they do not."""
        return self.q is None and (self.by_drop or self.family != "q")


def calibrate(
    run: str | Path,
    request: PolicyRequest | None = None,
    *,
    measure: str = "max_softmax",
    temperature: bool = False,
    times: str | Path | None = None,
    lazy: bool = False,
    folds: int | None = None,
    out: str | Path | None = None,
) -> Policies:
    """Find the policy asked for, and both families around it, and write them to `RUN/policy.json` or `out`.

    `run` is any folder that was evaluated: a run, a saved model, or what `offramp.evaluate` wrote.
    `lazy` counts what each exit costs if it runs only what its own head needs; the network then runs that way. `folds`
    says of how many networks its calibration outputs are, each on what it was not trained on; it makes an estimate.

    `out` may be the `policy.json` of another run, which was trained in the same way but on all images, with nothing
    held out: the thresholds carry over to it, as an estimate too.
    """
    if folds is not None:
        _refuse_promise(request)
    found_on = _carried_from(Path(run), out, request)
    summary = read_summary(run)
    costs = summary.lazy_costs if lazy else summary.costs
    if not costs:
        raise ValueError(f"{run} was evaluated by an older version; run: offramp eval {run}")
    saved = read_outputs(run, "calibration")
    milliseconds = None if times is None else stage_times(read_json(times), len(costs))
    found = find_policies(saved, costs, request or PolicyRequest(), measure, temperature, milliseconds)
    found = replace(found, schedule="lazy" if lazy else "eager", folds=folds, found_on=found_on)
    write_policies(Path(run) / POLICY if out is None else out, found)
    return found


calibrate_run = calibrate  # its name from before it took folders of other loops too


def _carried_from(run: Path, out: str | Path | None, request: PolicyRequest | None) -> str | None:
    """The name of the run whose thresholds another run is given; None where they stay or go anywhere else."""
    other = run if out is None else Path(out).parent
    if not (holds_run(run) and holds_run(other)) or other.resolve() == run.resolve():
        return None
    if not same_but_for_held_out(read_config(run), read_config(other)):
        raise ValueError(
            f"thresholds of {run} serve {other} only if both were trained in the same way, but for the seed and how "
            "many images were held out; write them elsewhere with --out"
        )
    if read_config(other).data.calibration != 0:
        raise ValueError(
            f"{other} holds images out itself, and finds its own thresholds on them: offramp calibrate {other}; "
            "thresholds carry over to a run with data.calibration=0"
        )
    _refuse_promise(request)
    return run.name


def find_policies(
    saved: SavedOutputs,
    costs: Sequence[int],
    request: PolicyRequest,
    measure: str = "max_softmax",
    temperature: bool = False,
    milliseconds: Sequence[float] | None = None,
) -> Policies:
    """The families found on these outputs and the policy asked for, which is the chosen one."""
    if request.budget_ms is not None and milliseconds is None:
        raise ValueError("a budget in milliseconds needs measured stage times: --times FILE")
    temperatures = _temperatures(saved, request) if temperature else None
    given = Predictions.of(saved.logits, saved.labels, measure, temperatures)
    prices = milliseconds if request.budget_ms is not None and milliseconds is not None else costs
    policies = [*_families(given, costs), _chosen(given, costs, prices, request)]
    if milliseconds is not None:
        policies = [_timed(policy, milliseconds) for policy in policies]
    return Policies(measure, temperatures, tuple(costs), tuple(policies), len(policies) - 1)


def find_cross_fitted(
    folds: Sequence[SavedOutputs],
    costs: Sequence[int],
    request: PolicyRequest | None = None,
    measure: str = "max_softmax",
    temperature: bool = False,
    milliseconds: Sequence[float] | None = None,
) -> Policies:
    """The same on the outputs of several networks together, each on the fold that it was not trained on.

    For data so small that all of it is trained on: the network that will use the policies has seen every fold, so what
    is found is an estimate, and no promise can be made.
    """
    request = request or PolicyRequest()
    if len(folds) < 2:
        raise ValueError(f"cross-fitting takes the outputs of at least two folds, got {len(folds)}")
    _refuse_promise(request)
    if len({fold.logits.shape[::2] for fold in folds}) > 1:
        raise ValueError("the folds' outputs are of different networks: their exits or classes differ")
    index = np.concatenate([fold.index for fold in folds])
    if len(np.unique(index)) < len(index):
        raise ValueError("a sample is in more than one fold; each is answered by the one network that never saw it")
    logits, labels = np.concatenate([fold.logits for fold in folds], 1), np.concatenate([fold.labels for fold in folds])
    together = SavedOutputs(logits, labels, index, None, None, None)
    return replace(find_policies(together, costs, request, measure, temperature, milliseconds), folds=len(folds))


def _refuse_promise(request: PolicyRequest | None) -> None:
    if request is not None and request.risk is not None:
        raise ValueError(
            "a promise about risk needs images that the network itself never saw; the outputs of folds come from other "
            "networks and give an estimate: ask for max_drop_points or a budget, or hold out a calibration split"
        )


def _families(given: Predictions, costs: Sequence[int]) -> list[Policy]:
    """Both families with their intervals; those of the paper's see no labels, so they are judged as they are."""
    searched = searched_family(given, costs)
    apart = _apart(given, lambda rest: search(rest, costs, _budgets(costs)))
    own = [[(held, found[at]) for held, found in apart] for at in range(len(searched))]
    plain = [with_intervals(policy, given) for policy in q_family(given, costs)]
    return plain + [with_intervals(p, given, unseen) for p, unseen in zip(searched, own, strict=True)]


def _chosen(given: Predictions, costs: Sequence[int], prices: Sequence[float], request: PolicyRequest) -> Policy:
    """The policy asked for; or the last exit for everybody, where a drop was asked for that nobody can tell."""
    found = _asked_for(given, prices, request)
    policy = judged(given, costs, found.family, found.thresholds, found.q, found.promise)
    unseen: list[Unseen] = []
    if request.risk is not None:
        unseen = [(given.rows(halves(given.samples, SPLIT_SEED)[1]), found.thresholds)]
    elif request.sees_labels:
        unseen = _apart(given, lambda rest: _asked_for(rest, prices, request).thresholds)
    policy = with_intervals(policy, given, unseen)
    assert policy.drop_points is not None and policy.drop_interval is not None
    wide = reach(policy.drop_points, policy.drop_interval)
    if not request.by_drop or request.anyway or wide <= WIDEST_POINTS:
        return policy
    enough = _enough(given, found.thresholds, unseen, wide)
    withheld = Withheld(policy.mul_adds, policy.drop_points, policy.drop_interval, enough)
    last = with_intervals(judged(given, costs, found.family, (NEVER,) * (given.num_exits - 1)), given)
    return replace(last, withheld=withheld)


T = TypeVar("T")
Unseen = tuple[Predictions, Thresholds]  # samples, and thresholds that they had no part in


def _apart(given: Predictions, choose: Callable[[Predictions], T]) -> list[tuple[Predictions, T]]:
    """Each part of the samples, with what the others choose."""
    order = np.random.default_rng(SPLIT_SEED).permutation(given.samples)
    parts = [np.sort(order[at::PARTS]) for at in range(min(PARTS, given.samples))] if given.samples > 1 else []
    return [(given.rows(part), choose(given.rows(np.setdiff1d(order, part)))) for part in parts]


def with_intervals(policy: Policy, given: Predictions, unseen: Sequence[Unseen] = ()) -> Policy:
    """The policy with intervals wide enough for the samples as they are, and for those that had no part in its choice.

    The first alone would be too good, as thresholds are chosen to look good here; the second alone would be too narrow,
    as it speaks of thresholds like these, not of these (docs/measuring.md).
    """
    samples, points = given.samples, 100 * float(given.right[-1].mean() - policy.top1)
    views = [(given.right[-1], rights(given, policy.thresholds))]
    if unseen:
        views.append(_pooled(unseen))
    top1 = _hull([right_interval(own) for _, own in views])
    drop = _hull([paired_interval(last, own) for last, own in views])
    if all(t == NEVER for t in policy.thresholds):
        points, drop = 0.0, (0.0, 0.0)
    return replace(policy, samples=samples, top1_interval=top1, drop_points=points, drop_interval=drop)


def _pooled(unseen: Sequence[Unseen]) -> tuple[np.ndarray, np.ndarray]:
    """What the last exit and what the thresholds get right, of all samples that had no part in the choice."""
    last = np.concatenate([held.right[-1] for held, _ in unseen])
    return last, np.concatenate([rights(held, thresholds) for held, thresholds in unseen])


def _hull(intervals: Sequence[Interval]) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _enough(given: Predictions, thresholds: Thresholds, unseen: Sequence[Unseen], wide: float) -> int:
    """Some number of samples at which the interval would reach no further than allowed, to two digits."""
    last, own = _pooled(unseen) if unseen else (given.right[-1], rights(given, thresholds))
    least = int(given.samples * wide / WIDEST_POINTS) + 1  # no interval narrows faster
    needed = max(samples_needed(last, own, WIDEST_POINTS), least)
    digit = 10 ** max(len(str(needed)) - 2, 0)
    return -(-needed // digit) * digit


def q_family(given: Predictions, costs: Sequence[int]) -> list[Policy]:
    """The paper's family: q from .05 to 1.95."""
    return [judged(given, costs, "q", q_thresholds(given.confidences, q), q) for q in Q_GRID]


def searched_family(given: Predictions, costs: Sequence[int]) -> list[Policy]:
    """The best thresholds found at budgets from the first exit's cost to the last's."""
    return [judged(given, costs, "searched", t) for t in search(given, costs, _budgets(costs))]


def judged(
    given: Predictions,
    costs: Sequence[int],
    family: str,
    thresholds: Thresholds,
    q: float | None = None,
    promise: Promise | None = None,
) -> Policy:
    """A policy with what it does to these samples."""
    found = outcome(given, thresholds, costs)
    return Policy(family, q, thresholds, found.cost, found.shares, found.top1, promise=promise)


@dataclass(frozen=True)
class _Found:
    family: str
    thresholds: Thresholds
    q: float | None = None
    promise: Promise | None = None


def _asked_for(given: Predictions, costs: Sequence[float], request: PolicyRequest) -> _Found:
    if request.q is not None:
        return _Found("q", q_thresholds(given.confidences, request.q), request.q)
    if request.risk is not None:
        thresholds, promise = promised(given, costs, request.risk, request.probability, SPLIT_SEED)
        return _Found("promised", thresholds, promise=promise)
    budget = request.budget_mul_adds if request.budget_ms is None else request.budget_ms
    if budget is not None:
        check_budget(budget, costs, "mul-adds" if request.budget_ms is None else "ms")
        return _at_budget(given, costs, request.family, budget)
    drop = request.drop_allowed
    return _within_drop(given, costs, request.family, drop)


def _at_budget(given: Predictions, costs: Sequence[float], family: str, budget: float) -> _Found:
    """The best policy of a family within a budget; of the paper's, the most expensive within it."""
    if family == "searched":
        return _Found(family, search(given, costs, [budget])[0])
    q, thresholds = q_at_budget(given.confidences, costs, budget)
    return _Found(family, thresholds, q)


def _within_drop(given: Predictions, costs: Sequence[float], family: str, drop_points: float) -> _Found:
    """The cheapest policy of a family that loses at most so many points against the last exit."""
    least = given.right[-1].mean() - drop_points / 100
    budgets = _budgets(costs)
    for _ in range(2):  # a coarse look, then a close one between the last that fails and the first that holds
        found = [_at_budget(given, costs, family, b) for b in budgets] if family == "q" else _all(given, costs, budgets)
        found[-1] = found[-1] if budgets[-1] < costs[-1] else _Found(family, (NEVER,) * (given.num_exits - 1))
        first = [outcome(given, f.thresholds, costs).top1 >= least - 1e-12 for f in found].index(True)
        kept = found[first]
        budgets = np.linspace(budgets[max(first - 1, 0)], budgets[first], 20)
    return kept


def _all(given: Predictions, costs: Sequence[float], budgets: np.ndarray) -> list[_Found]:
    return [_Found("searched", thresholds) for thresholds in search(given, costs, budgets.tolist())]


def _budgets(costs: Sequence[float]) -> np.ndarray:
    spread = np.geomspace(costs[0], costs[-1], SEARCHED).clip(costs[0], costs[-1])
    spread[0], spread[-1] = costs[0], costs[-1]  # exactly, so that both ends are reached
    return spread


def _temperatures(saved: SavedOutputs, request: PolicyRequest) -> tuple[float, ...]:
    """Fitted on everything; where a promise is asked for, only on the half that candidates come from."""
    if request.risk is None:
        return fit_temperatures(saved.logits, saved.labels)
    rows, _ = halves(len(saved.labels), SPLIT_SEED)
    return fit_temperatures(saved.logits[:, rows], saved.labels[rows])


def stage_times(table: Any, num_exits: int, batch: int | None = None) -> tuple[float, ...]:
    """Milliseconds per image up to each exit, from a table `stage_ms[k][batch]`; the largest batch unless told."""
    try:
        stages: Mapping[str, Mapping[str, float]] = table["stage_ms"]
        sizes = sorted(set.intersection(*({int(size) for size in stage} for stage in stages.values())))
        size = sizes[-1] if batch is None else batch
        each = [float(stages[str(k)][str(size)]) / size for k in range(1, num_exits + 1)]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the table of times must hold stage_ms with the milliseconds of stages 1 to {num_exits} by batch size"
        ) from error
    if len(stages) != num_exits or not all(0 < t < float("inf") for t in each):
        raise ValueError(f"the table of times must hold {num_exits} stages with times above 0")
    return tuple(np.cumsum(each).tolist())


def _timed(policy: Policy, milliseconds: Sequence[float]) -> Policy:
    return replace(policy, milliseconds=float(np.dot(policy.shares, milliseconds)))
