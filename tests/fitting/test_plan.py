"""The plan follows from a measurement and from what was asked: plain numbers in, a plan out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from offramp.fitting.plan import (
    EPOCHS,
    MOST_TIMES,
    Limits,
    Member,
    Pace,
    Plan,
    Rates,
    decide,
    expected_seconds,
    ladder,
    largest_size,
    members_at,
    parse_duration,
    times_single,
)
from offramp.fitting.sentences import plan_sentences

SMALL, LARGE = "timm/tf_efficientnet_lite0", "timm/tf_efficientnet_lite2"
ONE = {SMALL: {size: 7650.0 * size**2 for size in range(32, 193, 32)}}
TWO = {**ONE, LARGE: {size: 1.5 * cost for size, cost in ONE[SMALL].items()}}


def rates(read_s: float, forward_s: float, train_s: float, cuda: bool) -> Rates:
    """The larger network at 192 pixels takes so long; the smaller one as much for each mul-add."""
    pace = Pace(TWO[LARGE][192], forward_s, train_s)
    return Rates(read_s, cuda, {SMALL: pace, LARGE: pace})


LAPTOP = rates(0.002, forward_s=0.03, train_s=0.1, cuda=False)
SERVER = rates(0.001, forward_s=0.0003, train_s=0.0012, cuda=True)
PHOTOS = {"train": 2761, "calibration": 307, "test": 713}


def plan(own: Rates = LAPTOP, images: dict[str, int] = PHOTOS, costs: object = None, **limits: object) -> Plan:
    asked = Limits(**limits)  # type: ignore[arg-type]
    return decide(ladder(costs or TWO, 192, False, asked), images, own, asked)  # type: ignore[arg-type]


def named(members: tuple[Member, ...]) -> list[tuple[str, int]]:
    """The backbones by their last character, and the sizes."""
    return [(member.backbone[-1], member.size) for member in members]


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "20m", "1.5h", " 2 min ")] == [90, 1200, 5400, 120]
    for text in ("20", "0m", "soon", "-3m"):
        with pytest.raises(ValueError, match="--time must be a time such as 20m"):
            parse_duration(text)


def test_members() -> None:
    assert largest_size(side=192, own=224) == 192 and largest_size(side=1000, own=224) == 224
    assert largest_size(side=20, own=224) == 32
    assert named(members_at(192, TWO)) == [("0", 96), ("0", 160), ("2", 192)]
    assert named(members_at(192, ONE)) == [("0", 96), ("0", 128), ("0", 192)]
    assert named(members_at(32, ONE)) == [("0", 32)] and named(members_at(32, TWO)) == [("0", 32), ("2", 32)]
    with pytest.raises(ValueError, match="below what the network costs at 32 pixels"):
        members_at(192, TWO, budget=1e3)


@pytest.mark.parametrize("costs", [ONE, TWO])
def test_the_most_expensive_network_within_a_budget_is_among_them(costs: dict[str, dict[int, float]]) -> None:
    every = sorted(cost for size, cost in costs[SMALL].items() if size <= 192)
    for budget in (cost + 1 for cost in (*every, list(costs.values())[-1][192])):
        found = members_at(192, costs, budget)
        known = [cost for cost in (*every, found[-1].cost) if cost <= budget]
        assert max(m.cost for m in found if m.cost <= budget) == max(known) and len(found) == 3
        assert [m.cost for m in found] == sorted(m.cost for m in found)


@pytest.mark.parametrize("largest", range(32, 513, 32))
@pytest.mark.parametrize("both", [False, True])
def test_everything_takes_little_more_than_the_single_network(largest: int, both: bool) -> None:
    """At most 2.5 times, whatever the size and the budget."""
    costs = {SMALL: {size: float(size**2) for size in range(32, largest + 1, 32)}}
    if both:
        costs[LARGE] = {size: 1.5 * cost for size, cost in costs[SMALL].items()}
    for budget in (None, *costs[SMALL].values()):
        members = members_at(largest, costs, budget)
        found = decide([members], PHOTOS, SERVER, Limits())
        assert times_single(found.members, found.families) <= MOST_TIMES
        frozen = decide([members], PHOTOS, LAPTOP, Limits())
        once = replace(frozen, members=frozen.members[-1:], families=("single",))
        reading, heads = rates(0.0, 0.03, 0.1, False), rates(0.0, 0.0, 0.1, False)
        spent = expected_seconds(frozen, PHOTOS, reading) - expected_seconds(frozen, PHOTOS, heads)
        alone = expected_seconds(once, PHOTOS, reading) - expected_seconds(once, PHOTOS, heads)
        assert spent <= MOST_TIMES * alone


def test_a_cpu_begins_with_frozen_features_and_tunes_if_there_is_time() -> None:
    plain = plan()
    assert plain.frozen and plain.epochs == 0 and plain.folds == 5
    assert named(plain.members) == [("0", 96), ("0", 160), ("2", 192)]
    assert plain.families == ("single", "cascade", "exits") and plain.cascades(3) == [(0, 2), (1, 2), (0, 1, 2)]
    assert 60 < plain.seconds < 600
    long = plan(seconds=24 * 3600)
    assert long.frozen and long.epochs == EPOCHS and long.tuned == 3 and long.members == plain.members
    some = plan(seconds=2 * 3600)
    assert 5 <= some.epochs < EPOCHS and some.seconds <= 2 * 3600 and some.tuned == 3
    part = plan(seconds=30 * 60)  # not all of them can be tuned
    assert part.epochs >= 5 and part.tuned == 2 and part.members == plain.members and not part.tunes_exits
    assert plan(seconds=8 * 60).epochs == 0  # fewer epochs would be worse than none
    short = plan(seconds=120)
    assert short.members[-1].cost < plain.members[-1].cost and short.seconds <= 120
    assert named(plan(seconds=1).members) == [("0", 32)]  # nothing fits: the least there is
    assert plan(epochs=3).epochs == 3 and plan(epochs=0).tuned == 0


def test_a_gpu_fine_tunes() -> None:
    plain = plan(SERVER)
    assert not plain.frozen and plain.epochs == EPOCHS and plain.tuned_folds == 0 and plain.held_out == "fifth"
    assert plan(SERVER, {k: 50 * n for k, n in PHOTOS.items()}).held_out == "tenth"
    few = {"train": 333, "calibration": 37, "test": 3669}
    assert plan(SERVER, few).tuned_folds == 5 and plan(SERVER, few).frozen  # there, less may be more
    assert plan(SERVER, few, promise=True).tuned_folds == 0  # a promise is about one network
    tight = plan(SERVER, seconds=90)
    assert 10 <= tight.epochs < EPOCHS and tight.seconds <= 90
    assert plan(SERVER, epochs=0).frozen


def test_one_network_only() -> None:
    quick = plan(quick=True)
    assert named(quick.members) == [("0", 192)] and quick.families == ("single",) and not quick.cascades(1)
    budget = ONE[SMALL][128] + 1
    assert named(ladder(TWO, 192, False, Limits(quick=True), budget)[0]) == [("0", 128)]


def test_large_sets_and_promises_go_without_folds() -> None:
    assert plan(images={k: 50 * n for k, n in PHOTOS.items()}).folds == 0
    assert plan(promise=True).folds == 0 and plan(promise=True).held_out == "fifth"
    assert plan(asked_split=True).folds == 0 and plan(asked_split=True).held_out == "as set"


def test_a_plan_is_kept_and_said() -> None:
    found = plan(seconds=2 * 3600)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    said = "\n".join(plan_sentences(found, "the cheapest", 2 * 3600))
    assert f"{SMALL} at 96 and 160 pixels and {LARGE} at 192 pixels; frozen features with linear heads" in said
    assert f"{found.epochs} epochs of fine-tuning, " in said and "hours, by a short measurement" in said
    assert "epochs of fine-tuning of the 2 smallest" in "\n".join(plan_sentences(plan(seconds=1800), "x", None))
    assert "nothing smaller is left to try" in "\n".join(plan_sentences(plan(seconds=1), "x", 1))
