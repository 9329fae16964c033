"""The plan follows from a measurement and from what was asked: plain numbers in, a plan out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from offramp.fitting.plan import (
    EPOCHS,
    MOST_TIMES,
    Limits,
    Plan,
    Rates,
    decide,
    expected_seconds,
    largest_size,
    parse_duration,
    sizes_below,
    times_single,
)
from offramp.fitting.sentences import plan_sentences

NAME = "timm/tf_efficientnet_lite0"
LAPTOP = Rates(192, read_s=0.002, forward_s=0.02, train_s=0.07, cuda=False)
SERVER = Rates(192, read_s=0.001, forward_s=0.0002, train_s=0.0008, cuda=True)
COSTS = {size: 7650.0 * size**2 for size in range(32, 225, 32)}
LADDER = [sizes_below(top, COSTS) for top in sorted(COSTS, reverse=True) if top <= 192]
PHOTOS = {"train": 2761, "calibration": 307, "test": 713}


def plan(rates: Rates = LAPTOP, images: dict[str, int] = PHOTOS, **limits: object) -> Plan:
    return decide(NAME, LADDER, images, rates, Limits(**limits))  # type: ignore[arg-type]


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "20m", "1.5h", " 2 min ")] == [90, 1200, 5400, 120]
    for text in ("20", "0m", "soon", "-3m"):
        with pytest.raises(ValueError, match="--time must be a time such as 20m"):
            parse_duration(text)


def test_sizes() -> None:
    assert largest_size(side=192, own=224) == 192 and largest_size(side=1000, own=224) == 224
    assert largest_size(side=20, own=224) == 32
    assert sizes_below(160, COSTS) == (96, 128, 160) and sizes_below(192, COSTS) == (96, 128, 192)
    assert sizes_below(32, COSTS) == (32,)
    assert sizes_below(192, COSTS, budget=COSTS[160] + 1) == (96, 160, 192)  # the largest that fits is among them
    assert sizes_below(192, COSTS, budget=COSTS[64] + 1) == (64, 128, 192)
    assert sizes_below(192, COSTS, budget=1e12) == (96, 128, 192)
    with pytest.raises(ValueError, match="below what the network costs at 32 pixels"):
        sizes_below(192, COSTS, budget=1e3)


@pytest.mark.parametrize("largest", range(32, 513, 32))
def test_everything_takes_little_more_than_the_single_network(largest: int) -> None:
    """At most 2.5 times, whatever the size and the budget."""
    costs = {size: float(size**2) for size in range(32, largest + 1, 32)}
    for budget in (None, *costs.values()):
        found = decide(NAME, [sizes_below(largest, costs, budget)], PHOTOS, SERVER, Limits())
        assert times_single(found.sizes, found.families) <= MOST_TIMES
        frozen = decide(NAME, [sizes_below(largest, costs, budget)], PHOTOS, LAPTOP, Limits())
        once = replace(frozen, sizes=frozen.sizes[-1:], families=("single",))
        reading = replace(LAPTOP, read_s=0.0)
        heads = (replace(reading, forward_s=0.0), PHOTOS)
        spent = expected_seconds(frozen, PHOTOS, reading) - expected_seconds(frozen, *heads[::-1])
        alone = expected_seconds(once, PHOTOS, reading) - expected_seconds(once, *heads[::-1])
        assert spent <= MOST_TIMES * alone


def test_a_cpu_begins_with_frozen_features_and_tunes_if_there_is_time() -> None:
    plain = plan()
    assert plain.frozen and plain.epochs == 0 and plain.folds == 5 and plain.sizes == (96, 128, 192)
    assert plain.families == ("single", "cascade", "exits") and plain.cascades == [(96, 192)]
    assert 60 < plain.seconds < 600
    long = plan(seconds=24 * 3600)
    assert long.frozen and long.epochs == EPOCHS and long.sizes == plain.sizes
    some = plan(seconds=5 * 3600)
    assert 5 <= some.epochs < EPOCHS and some.seconds <= 5 * 3600
    assert plan(seconds=20 * 60).epochs == 0  # two epochs would be worse than none
    short = plan(seconds=120)
    assert short.sizes[-1] < 192 and short.seconds <= 120
    assert plan(seconds=1).sizes == (32,)  # nothing fits: the least there is
    assert plan(epochs=3).epochs == 3


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
    assert quick.sizes == (192,) and quick.families == ("single",) and not quick.cascades


def test_large_sets_and_promises_go_without_folds() -> None:
    assert plan(images={k: 50 * n for k, n in PHOTOS.items()}).folds == 0
    assert plan(promise=True).folds == 0 and plan(promise=True).held_out == "fifth"
    assert plan(asked_split=True).folds == 0 and plan(asked_split=True).held_out == "as set"
    assert plan(promise=True).cascades == [(96, 192), (128, 192)]


def test_a_plan_is_kept_and_said() -> None:
    found = plan(seconds=5 * 3600)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    said = "\n".join(plan_sentences(found, "the cheapest", 5 * 3600))
    assert "at 96, 128 and 192 pixels" in said and "frozen features with linear heads" in said
    assert f"{found.epochs} epochs of fine-tuning" in said and "hours, by a short measurement" in said
    assert "nothing smaller is left to try" in "\n".join(plan_sentences(plan(seconds=1), "x", 1))
