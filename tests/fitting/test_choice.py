"""The choice between networks, on hand-made answers whose best is known."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.fitting.choice import Choice, Network, Point, choose, common_rows, points
from offramp.measuring.calibrate import PolicyRequest
from offramp.measuring.confidence import Predictions
from offramp.runs.outputs import SavedOutputs

N = 4000
SINGLE, SMALL = 200, 100


def answers(seed: int = 0, samples: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Three of four images are easy. The large network has 95 % of all right; the small one the easy ones alone."""
    draw = np.random.default_rng(seed)
    large = draw.random(samples) < 0.95
    easy = draw.random(samples) < 0.75
    return large, np.where(easy, large, draw.random(samples) < 0.3)


def networks(samples: int = N, seed: int = 0, knows: bool = True) -> list[Network]:
    """Single, small single, and a cascade of both, whose first stage is sure where the images are easy (or is not)."""
    large, small = answers(seed, samples)
    draw = np.random.default_rng(seed + 1)
    sure = np.where(small == large, 0.6, 0.1) + 0.3 * draw.random(samples) if knows else draw.random(samples)
    confidence = np.stack([sure, np.ones(samples)]).astype(np.float32)
    both = Predictions(confidence, np.stack([small, large]))
    return [
        Network("single", "large", Predictions(confidence[1:], large[None]), (SINGLE,), whole=True),
        Network("single", "small", Predictions(confidence[:1], small[None]), (SMALL,)),
        Network("cascade", "both", both, (SMALL, SMALL + SINGLE), whole=True),
    ]


def chosen(given: list[Network], request: PolicyRequest) -> tuple[Choice, Network, Point]:
    curves = [points(network, request) for network in given]
    found = choose(given, curves, request)
    return found, given[found.network], curves[found.network][found.point]


def test_the_cheapest_within_half_a_point_is_the_cascade() -> None:
    found, network, point = chosen(networks(), PolicyRequest())
    assert network.name == "both" and point.mul_adds < 180
    assert found.drop <= 0.5 and found.drop_interval[0] <= found.drop <= found.drop_interval[1]
    assert found.needed is None


def test_points_are_judged_by_thresholds_from_other_images() -> None:
    """A first stage whose confidence says nothing gains nothing from having thresholds."""
    draw = np.random.default_rng(0)
    right = draw.random((2, 60)) < 0.5
    confidence = np.stack([draw.permutation(60) / 60, np.ones(60)]).astype(np.float32)
    network = Network("cascade", "noise", Predictions(confidence, right), (1, 2))
    tops = []
    for seed in range(6):
        rows = np.random.default_rng(seed).permutation(60)
        shuffled = Network("cascade", "noise", Predictions(network.given.confidences, right[:, rows]), (1, 2))
        tops += [max(p.top1 for p in points(shuffled, PolicyRequest())) - right.mean()]
    assert np.mean(tops) < 0.12


def test_a_smaller_plain_network_wins_where_it_is_best() -> None:
    given = networks(knows=False)
    _, network, _ = chosen(given, PolicyRequest(budget_mul_adds=SMALL))
    assert (network.family, network.name) == ("single", "small")
    _, network, _ = chosen(given, PolicyRequest(max_drop_points=30))
    assert network.name == "small"


def test_a_budget_takes_the_most_accurate_that_fits() -> None:
    _, network, point = chosen(networks(), PolicyRequest(budget_mul_adds=120))
    assert network.name == "both" and point.budget == 120 and point.mul_adds < 125
    _, network, point = chosen(networks(), PolicyRequest(budget_mul_adds=1e9))
    large = networks()[0].given.right.mean()
    assert point.top1 >= large
    with pytest.raises(ValueError, match="the budget 0.00M is below what the cheapest network takes"):
        chosen(networks(), PolicyRequest(budget_mul_adds=50))


def test_milliseconds_decide_where_they_are_asked_for() -> None:
    """The small network is no faster here, so nothing is gained by asking it first."""
    plain = networks()
    slow = [
        Network(n.family, n.name, n.given, n.mul_adds, ms, n.whole)
        for n, ms in zip(plain, [(10.0,), (9.5,), (9.5, 19.5)], strict=True)
    ]
    _, network, point = chosen(slow, PolicyRequest(budget_ms=10))
    assert network.name == "large" and point.ms == 10
    with pytest.raises(ValueError, match="the budget 3 ms is below"):
        chosen(slow, PolicyRequest(budget_ms=3))


def test_what_few_images_say_is_not_trusted() -> None:
    """With so few the loss is known no better than to two points: the single network itself, and how many it takes."""
    large, small = np.ones((2, 150), bool)
    large[:20], small[10:30] = False, False  # as often right, but not on the same images
    sure = np.ones((1, 150), np.float32)
    few = [
        Network("single", "large", Predictions(sure, large[None]), (SINGLE,), whole=True),
        Network("single", "small", Predictions(sure, small[None]), (SMALL,)),
    ]
    found, network, _ = chosen(few, PolicyRequest())
    assert network.name == "large" and found.drop == 0 and found.needed is not None and 1000 < found.needed < 1500
    found, network, _ = chosen(few, PolicyRequest(anyway=True))
    assert network.name == "small" and found.needed is None and found.drop_interval[1] > 5
    many = [Network(n.family, n.name, n.given.rows(np.arange(1500) % 150), n.mul_adds, whole=n.whole) for n in few]
    assert chosen(many, PolicyRequest())[1].name == "small"


def test_a_promise_is_chosen_on_one_half_only() -> None:
    given = networks()
    found, network, _ = chosen(given, PolicyRequest(risk=0.02))
    assert network.name == "both"
    from offramp.measuring.calibrate import SPLIT_SEED
    from offramp.measuring.risk import halves

    _, certifying = halves(N, SPLIT_SEED)
    spoiled = given[2].given.right.copy()
    spoiled[0, certifying] = False  # what the other half says cannot change the choice
    again = [
        *given[:2],
        Network("cascade", "both", Predictions(given[2].given.confidences, spoiled), (SMALL, 300), whole=True),
    ]
    assert chosen(again, PolicyRequest(risk=0.02))[0].network == found.network
    strange = [*given[:2], Network("cascade", "both", given[2].given, (SMALL, 300), whole=False)]
    assert chosen(strange, PolicyRequest(risk=0.02))[1].name == "large"  # nothing is promised against another network


def test_networks_are_compared_on_the_images_that_all_of_them_left_out() -> None:
    def saved(*index: int) -> SavedOutputs:
        own = np.array(index)
        return SavedOutputs(np.zeros((1, len(own), 2)), own % 2, own, None, None, None)

    rows = common_rows([saved(5, 3, 1, 7), saved(1, 2, 3, 7)])
    assert rows[0].tolist() == [2, 1, 3] and rows[1].tolist() == [0, 2, 3]  # images 1, 3, 7
    with pytest.raises(ValueError, match="held to different images"):
        common_rows([saved(1), saved(2)])
