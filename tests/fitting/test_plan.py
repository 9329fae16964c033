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
    photos_for,
    times_single,
)
from offramp.fitting.sentences import plan_sentences

SMALL, LARGE = "timm/tf_efficientnet_lite0", "timm/tf_efficientnet_lite2"
ONE = {SMALL: {size: 7650.0 * size**2 for size in range(32, 193, 32)}}
TWO = {**ONE, LARGE: {size: 1.5 * cost for size, cost in ONE[SMALL].items()}}


def rates(read_s: float, forward_s: float, train_s: float, cuda: bool) -> Rates:
    """The larger network at 192 pixels takes so long; the smaller one as much for each mul-add."""
    pace = Pace(TWO[LARGE][192], forward_s, train_s)
    return Rates(read_s, cuda, {SMALL: pace, LARGE: pace}, photo_bytes=3e10 if cuda else 0.0)


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


FEW = {"train": 333, "calibration": 37, "test": 3669}


@pytest.mark.parametrize("own", [LAPTOP, SERVER], ids=["cpu", "gpu"])
def test_up_to_two_thousand_photos_everything_is_judged_by_folds(own: Rates) -> None:
    """On a CPU as on a GPU; without time for that, frozen features by folds alone. Of more a part is held out."""
    long = plan(own, FEW, seconds=24 * 3600)
    assert long.frozen and long.folds == 5 and long.epochs == EPOCHS and long.tuned_folds == 5 and long.by_folds
    asked = plan(own, FEW, epochs=3)
    assert asked.tuned_folds == 5 and asked.folds == 5
    once = expected_seconds(replace(long, tuned_folds=0), FEW, own)
    frozen = expected_seconds(replace(long, epochs=0, tuned=0, tuned_folds=0), FEW, own)
    passing = 2 * (own.read_s + own.forward_s(long.members))  # by the networks side by side, and by the exits
    learned = FEW["train"] + FEW["calibration"]
    trained = once - frozen - passing * (FEW["test"] + learned / 5)
    assert long.tuning_times == 5
    assert long.seconds - frozen == pytest.approx(5 * trained + passing * (FEW["test"] + learned))
    assert expected_seconds(replace(long, folds=0), FEW, own) < long.seconds
    short = plan(own, FEW, seconds=(LAPTOP_SECONDS if own is LAPTOP else 61.2))
    assert short.epochs == 0 and short.frozen and short.folds == 5 and short.by_folds
    for limits in ({"promise": True}, {"asked_split": True}, {"quick": True}):
        one = plan(own, FEW, epochs=3, **limits)
        assert one.tuned_folds == 0 and one.folds == 0 and not one.by_folds, limits
    many = plan(own, {"train": 1801, "calibration": 200, "test": 100}, seconds=24 * 3600)
    assert many.tuned_folds == 0 and many.held_out == "fifth" and not many.by_folds


LAPTOP_SECONDS = 150


def test_how_many_photos_it_takes_to_hold_out_so_many() -> None:
    held = plan(seconds=24 * 3600)  # 3,068 to learn from, fine-tuned
    assert photos_for(1300, held) == 6500 and photos_for(2500, held) == 25_000
    by_folds = plan(images=FEW, seconds=24 * 3600)
    assert photos_for(1300, by_folds) == 1300 and photos_for(2100, by_folds) == 21_000  # a tenth of so many
    assert photos_for(2100, plan(images=FEW)) == 2100  # frozen features


def test_a_gpu_fine_tunes() -> None:
    plain = plan(SERVER)
    assert not plain.frozen and plain.epochs == EPOCHS and plain.tuned_folds == 0 and plain.held_out == "fifth"
    assert plan(SERVER, {k: 50 * n for k, n in PHOTOS.items()}).held_out == "tenth"
    assert plan(SERVER, FEW).tuned_folds == 5 and plan(SERVER, FEW).frozen  # there, less may be more
    assert plan(SERVER, FEW, promise=True).tuned_folds == 0  # a promise is about one network
    tight = plan(SERVER, seconds=90)
    assert 10 <= tight.epochs < EPOCHS and tight.seconds <= 90
    assert plan(SERVER, epochs=0).frozen


def test_photos_are_read_at_every_epoch_unless_they_stay_on_the_gpu() -> None:
    large = {"train": 10_000, "calibration": 1000, "test": 1000}
    stay = plan(SERVER, large)
    assert stay.tunes_exits and stay.epochs == 16
    small_card = replace(SERVER, photo_bytes=4e9)
    more = expected_seconds(stay, large, small_card) - expected_seconds(stay, large, SERVER)
    assert more == pytest.approx(
        11_000 * SERVER.read_s * ((1 + 16 * 1.4) - 3)
    )  # probe and epochs, or probe and two runs


def test_one_network_only() -> None:
    quick = plan(quick=True)
    assert named(quick.members) == [("0", 192)] and quick.families == ("single",) and not quick.cascades(1)
    for own, limits in ((LAPTOP, {}), (LAPTOP, {"seconds": 24 * 3600}), (SERVER, {})):
        one = plan(own, FEW, quick=True, **limits)  # no choice to make: nothing by folds, and trained in one way
        assert one.frozen != bool(one.epochs) and not one.by_folds and one.held_out == "tenth"
    budget = ONE[SMALL][128] + 1
    assert named(ladder(TWO, 192, False, Limits(quick=True), budget)[0]) == [("0", 128)]


def test_large_sets_and_promises_go_without_folds() -> None:
    assert plan(images={k: 50 * n for k, n in PHOTOS.items()}).folds == 0
    assert plan(promise=True).folds == 0 and plan(promise=True).held_out == "fifth"
    assert plan(asked_split=True).folds == 0 and plan(asked_split=True).held_out == "as set"


def test_a_plan_is_kept_and_said() -> None:
    found = plan(seconds=2 * 3600)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    splits = {"train": 2454, "calibration": 614, "test": 713}
    said = "\n".join(plan_sentences(found, splits, "the cheapest", 2 * 3600))
    assert "splits: 2,454 to learn from, 614 held out to choose on, 713 kept for the test at the end" in said
    assert f"{SMALL} at 96 and 160 pixels and {LARGE} at 192 pixels; frozen features with linear heads" in said
    assert f"{found.epochs} epochs of fine-tuning, " in said and "hours, by a short measurement" in said
    assert "epochs of fine-tuning of the 2 smallest" in "\n".join(plan_sentences(plan(seconds=1800), splits, "x", None))
    assert "nothing smaller is left to try" in "\n".join(plan_sentences(plan(seconds=1), splits, "x", 1))
    folds = "\n".join(plan_sentences(plan(SERVER, FEW), FEW, "x", None))
    assert "splits: 370 to learn from and, by turns, to choose on, 3,669 kept" in folds
    assert "5 times on a part for cross-validation and once on all for what ships, which takes 5 times as long" in folds
    again = "\n".join(plan_sentences(found, splits, "x", None, trained=True))
    assert "all networks are trained already" in again and "measurement" not in again
