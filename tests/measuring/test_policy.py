"""Policies: who leaves where, what that costs, and the file they are kept in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import (
    Policies,
    Policy,
    Withheld,
    check_budget,
    exits_taken,
    leaves,
    mean_cost,
    outcome,
    read_policies,
    shares_of,
)


def test_a_bundle_picks_the_most_expensive_policy_within_the_budget(run: Path) -> None:
    for request in (PolicyRequest(q=0.75), PolicyRequest(budget_mul_adds=2e6), PolicyRequest(risk=0.1)):
        found = calibrate_run(run, request)
        own = found.within(2.5e6)
        family = "q" if request.q else "searched"
        assert own == max((p for p in found.family(family) if p.mul_adds <= 2.5e6), key=lambda p: p.mul_adds)
    assert found.at_q(0.62).q == 0.6
    with pytest.raises(ValueError, match="below exit 1's cost"):
        found.within(10.0)


def test_damaged_policy_files_are_sentences(run: Path) -> None:
    calibrate_run(run)
    good = json.loads((run / "policy.json").read_text())
    changes = {
        "policy schema 2 is not known": {"schema": 2},
        "measure 'no' is not known": {"measure": "no"},
        "needs 3 temperatures": {"temperatures": [1.0]},
        "chosen policy 999 is not there": {"chosen": 999},
        "needs 3 thresholds": {"costs": [1, 2, 3, 4]},
        "is not a policy file": {"policies": [{}]},
    }
    for words, change in changes.items():
        (run / "policy.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=words):
            read_policies(run / "policy.json")
    (run / "policy.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a policy file"):
        read_policies(run / "policy.json")


def test_nobody_leaves_is_null_in_the_file() -> None:
    policy = Policy("q", 1.0, (math.inf, 0.5), 1.0, (0.5, 0.5, 0.0), 0.9)
    assert policy.to_json()["thresholds"] == [None, 0.5]
    assert Policy.from_json(policy.to_json()) == policy


SURE = np.array([[0.9, 0.4, 0.5, np.nan], [0.1, 0.8, 0.6, 0.2], [0.3, 0.3, 0.3, 0.3]], np.float32)


def test_who_leaves_is_whoever_reaches_the_threshold() -> None:
    assert leaves(SURE[0], 0.5).tolist() == [True, False, True, False]
    third = float(np.float32(0.1) + np.float32(0.2))
    assert leaves(np.array([third], np.float32), third).all()  # a threshold that went through JSON is no other one
    assert not leaves(SURE[0], math.inf).any()


def test_samples_leave_at_the_first_exit_that_is_sure_and_at_the_last_anyway() -> None:
    assert exits_taken(SURE, (0.5, 0.7)).tolist() == [1, 2, 1, 3]
    assert exits_taken(SURE, (math.inf, math.inf)).tolist() == [3, 3, 3, 3]
    assert exits_taken(SURE, (0.0, 0.0)).tolist() == [1, 1, 1, 2]  # what is not a number goes on


def test_an_outcome_is_accuracy_cost_and_shares() -> None:
    right = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]], bool)
    found = outcome(Predictions(SURE, right), (0.5, 0.7), (10, 20, 40))
    assert (found.top1, found.cost, found.shares) == (0.75, 20.0, (0.5, 0.25, 0.25))
    assert mean_cost(np.array([1, 2, 1, 3]), (10, 20, 40)) == 20.0
    assert shares_of(np.array([], np.int64), 2) == (0.0, 0.0)


def test_costs_are_added_without_rounding() -> None:
    costs = (2**53 - 1, 2**53)
    assert mean_cost(np.array([1, 1]), costs) == costs[0]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (5e6, "budget 5.00M is below exit 1's cost, 339.90M"),
        (3e9, "budget 3.000G is above the whole network's cost, 2.684G"),
        (math.nan, "is below exit 1's cost"),
    ],
)
def test_a_budget_beyond_the_network_is_said_as_everywhere_else(budget: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_budget(budget, (339_900_000, 2_684_440_000))


def test_the_nearest_q_is_taken_and_a_budget_below_all_gets_the_cheapest() -> None:
    own = tuple(Policy("q", q, (0.5,), 10.0 * q, (0.5, 0.5), 0.9) for q in (0.5, 1.0))
    found = Policies("max_softmax", None, (4, 12), own, 0)
    assert found.at_q(0.7).q == 0.5 and found.at_q(5).q == 1.0
    assert found.within(4.5) == own[0] and found.within(11) == own[1]
    with pytest.raises(ValueError, match="holds no policies by q"):
        Policies("max_softmax", None, (4, 12), (Policy("searched", None, (0.5,), 5.0, (1.0, 0.0), 0.9),), 0).at_q(1)


def test_intervals_and_what_was_withheld_go_there_and_back(run: Path) -> None:
    withheld = Withheld(2.0, 0.5, (-1.0, 4.0), 300)
    policy = Policy(
        "searched", None, (0.5,), 4.0, (0.0, 1.0), 0.9, None, None, 60, (0.8, 0.95), 0.0, (0.0, 0.0), withheld
    )
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    calibrate_run(run, PolicyRequest(q=0.5))
    good = json.loads((run / "policy.json").read_text())
    for change in (
        {"top1_interval": [0.9, 0.1]},
        {"drop_interval": [1]},
        {"drop_interval": [None, math.nan]},
        {"top1_interval": "ab"},
    ):
        first = {**good["policies"][0], **change}
        (run / "policy.json").write_text(json.dumps({**good, "policies": [first, *good["policies"][1:]]}))
        with pytest.raises(ValueError, match="two numbers, the lower one first|is not a policy file|could not convert"):
            read_policies(run / "policy.json")


def test_files_of_before_and_of_later_versions_load(run: Path) -> None:
    calibrate_run(run, PolicyRequest(q=0.5))
    good = json.loads((run / "policy.json").read_text())
    known = {"family", "q", "thresholds", "mul_adds", "shares", "top1", "milliseconds", "promise"}
    old = {**good, "policies": [{k: v for k, v in p.items() if k in known} for p in good["policies"]]}
    del old["folds"]
    (run / "policy.json").write_text(json.dumps(old))
    found = read_policies(run / "policy.json")
    assert found.folds is None and found.policy.samples is None and found.policy.drop_interval is None
    new = {**good, "policies": [{**p, "something": "new"} for p in good["policies"]]}
    (run / "policy.json").write_text(json.dumps(new))
    assert read_policies(run / "policy.json").policy.samples == 400
