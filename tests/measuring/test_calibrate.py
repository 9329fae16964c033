"""From a run's saved outputs to policy.json: each request, what it promises, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.saved import COSTS, write_run
from offramp.cli import main
from offramp.common.files import write_json
from offramp.measuring.calibrate import PolicyRequest, calibrate_run, find_cross_fitted, find_policies, stage_times
from offramp.measuring.confidence import Predictions, confidences, fit_temperatures
from offramp.measuring.intervals import paired_interval, reach
from offramp.measuring.policy import (
    WIDEST_POINTS,
    Policies,
    exits_taken,
    outcome,
    read_policies,
    rights,
    write_policies,
)
from offramp.measuring.risk import halves, lost
from offramp.measuring.sentences import policy_sentence
from offramp.measuring.thresholds import Q_GRID, q_thresholds
from offramp.reporting.groups import read_run
from offramp.runs.outputs import SavedOutputs, read_outputs, read_summary


def on_calibration(run: Path, policies: Policies):
    saved = read_outputs(run, "calibration")
    given = Predictions.of(saved.logits, saved.labels, policies.measure, policies.temperatures)
    return given, outcome(given, policies.policy.thresholds, COSTS)


def test_the_file_holds_both_families_and_goes_there_and_back(run: Path) -> None:
    found = calibrate_run(run)
    assert read_policies(run / "policy.json") == found
    value = json.loads((run / "policy.json").read_text())
    assert value["schema"] == 1 and value["costs"] == list(COSTS) and value["temperatures"] is None
    assert [p.q for p in found.policies[:39]] == list(Q_GRID)
    assert len(found.family("searched")) >= 40
    assert found.family("searched")[0].shares[0] == 1.0  # the cheapest leaves everybody at exit 1
    for policy in found.policies:
        assert len(policy.thresholds) == 2 and sum(policy.shares) == pytest.approx(1)
        assert policy.mul_adds == pytest.approx(np.dot(policy.shares, COSTS))


def test_by_q(run: Path) -> None:
    found = calibrate_run(run, PolicyRequest(q=0.75))
    given, own = on_calibration(run, found)
    assert found.policy.q == 0.75
    assert found.policy.thresholds == q_thresholds(given.confidences, 0.75)
    assert (found.policy.top1, found.policy.mul_adds, found.policy.shares) == (own.top1, own.cost, own.shares)


@pytest.mark.parametrize("family", ["searched", "q"])
def test_by_budget(run: Path, family: str) -> None:
    found = calibrate_run(run, PolicyRequest(budget_mul_adds=2.2e6, family=family))
    _, own = on_calibration(run, found)
    assert 2.0e6 < own.cost <= 2.2e6
    rivals = [p.top1 for p in found.policies if p.family == "q" and p.mul_adds <= 2.2e6]
    if family == "searched":
        assert own.top1 >= max(rivals)


@pytest.mark.parametrize("family", ["searched", "q"])
def test_by_drop(run: Path, family: str) -> None:
    found = calibrate_run(run, PolicyRequest(max_drop_points=1.0, family=family, anyway=True))
    given, own = on_calibration(run, found)
    assert own.top1 >= given.right[-1].mean() - 0.01 - 1e-12
    cheaper = [p for p in found.family(family)[:-1] if p.mul_adds < own.cost * 0.97]
    assert all(p.top1 < given.right[-1].mean() - 0.01 for p in cheaper)
    dearer = calibrate_run(run, PolicyRequest(max_drop_points=0.0, family=family, anyway=True)).policy
    assert dearer.mul_adds >= found.policy.mul_adds
    assert dearer.top1 >= given.right[-1].mean()


@pytest.mark.parametrize("family", ["searched", "q"])
def test_a_drop_is_never_exceeded(tmp_path: Path, family: str) -> None:
    for seed in range(6):
        small = write_run(tmp_path / f"{seed}", seed=seed, calibration=60)
        found = calibrate_run(small, PolicyRequest(max_drop_points=0.0, family=family, anyway=True))
        given, own = on_calibration(small, found)
        assert own.top1 >= given.right[-1].mean()


def test_the_cheapest_budget_is_kept(run: Path) -> None:
    for family in ("searched", "q"):
        found = calibrate_run(run, PolicyRequest(budget_mul_adds=float(COSTS[0]), family=family))
        assert found.policy.mul_adds == COSTS[0] and found.policy.shares == (1.0, 0.0, 0.0)


def test_by_risk(run: Path) -> None:
    found = calibrate_run(run, PolicyRequest(risk=0.08, probability=0.9))
    given, own = on_calibration(run, found)
    promise = found.policy.promise
    assert promise is not None and (promise.risk, promise.probability, promise.samples) == (0.08, 0.9, 200)
    assert promise.lost == lost(given.rows(halves(400, 0)[1]), found.policy.thresholds)
    assert own.cost < COSTS[-1]
    assert read_policies(run / "policy.json").policy.promise == promise


def test_temperatures_of_a_promise_come_from_the_choosing_half_alone(run: Path) -> None:
    saved = read_outputs(run, "calibration")
    rows, _ = halves(400, 0)
    half = fit_temperatures(saved.logits[:, rows], saved.labels[rows])
    assert calibrate_run(run, PolicyRequest(risk=0.1), temperature=True).temperatures == half
    assert calibrate_run(run, PolicyRequest(q=1.0), temperature=True).temperatures == fit_temperatures(
        saved.logits, saved.labels
    )


def test_by_milliseconds(run: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    stages = {str(k): {"1": 2.0, "8": ms} for k, ms in ((1, 8.0), (2, 16.0), (3, 4.0))}
    times.write_text(json.dumps({"stage_ms": stages}))
    assert stage_times({"stage_ms": stages}, 3) == (1.0, 3.0, 3.5)
    assert stage_times({"stage_ms": stages}, 3, batch=1) == (2.0, 4.0, 6.0)
    found = calibrate_run(run, PolicyRequest(budget_ms=2.0), times=times)
    assert found.policy.milliseconds == pytest.approx(np.dot(found.policy.shares, (1.0, 3.0, 3.5)))
    assert 1.7 < found.policy.milliseconds <= 2.0 + 1e-9
    assert all(p.milliseconds is not None for p in found.policies)
    with pytest.raises(ValueError, match="--times"):
        calibrate_run(run, PolicyRequest(budget_ms=2.0))
    with pytest.raises(ValueError, match="budget 0.5 ms is below exit 1's cost, 1 ms"):
        calibrate_run(run, PolicyRequest(budget_ms=0.5), times=times)
    for broken in ({}, {"stage_ms": {"1": {"8": 1}}}, {"stage_ms": {"1": {}, "2": {}, "3": {}}}, [1], {"stage_ms": 3}):
        with pytest.raises(ValueError, match="table of times"):
            stage_times(broken, 3)


@pytest.mark.parametrize("measure", ["max_softmax", "margin", "entropy"])
def test_measures_and_temperatures_reach_the_file(run: Path, measure: str) -> None:
    found = calibrate_run(run, PolicyRequest(q=0.8), measure=measure, temperature=True)
    saved = read_outputs(run, "calibration")
    own = confidences(saved.logits, measure, found.temperatures)
    counts = np.bincount(exits_taken(own, found.policy.thresholds), minlength=4)[1:]
    assert found.policy.shares == tuple(counts / 400)
    assert read_policies(run / "policy.json").measure == measure


def test_the_test_split_is_never_looked_at(run: Path) -> None:
    before = calibrate_run(run, PolicyRequest(budget_mul_adds=2e6))
    shutil.rmtree(run / "eval" / "test")
    assert calibrate_run(run, PolicyRequest(budget_mul_adds=2e6)) == before


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"budget_mul_adds": 0.5e6}, "budget 0.50M is below exit 1's cost, 1.00M"),
        ({"budget_mul_adds": 6e6}, "budget 6.00M is above the whole network's cost, 5.00M"),
        ({"budget_mul_adds": math.nan}, "below exit 1's cost"),
        ({"q": 0.5, "risk": 0.1}, "one thing at a time, not for q and risk"),
        ({"max_drop_points": -1.0}, "0 or more"),
        ({"budget_ms": -1.0}, "above 0"),
        ({"risk": 2.0}, "risk must lie between 0 and 1, got 2; 2 % is 0.02"),
        ({"risk": 0.02, "probability": 95}, "probability must lie between 0 and 1, got 95; 95 % is 0.95"),
        ({"risk": 0.0}, "risk must lie between 0 and 1, got 0$"),
        ({"family": "serched"}, "searched"),
        ({"q": -1.0}, "q must be a number above 0"),
    ],
)
def test_requests_that_cannot_be_met_are_sentences(run: Path, request_: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate_run(run, PolicyRequest(**request_))
    assert not (run / "policy.json").exists()


def test_runs_that_cannot_be_calibrated_are_sentences(run: Path, tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", calibration=0)
    with pytest.raises(ValueError, match=r"has no calibration split.*data\.calibration=0"):
        calibrate_run(none)
    logits = np.load(run / "eval/calibration/logits.npy")
    logits[1, 3, 2] = np.nan
    np.save(run / "eval/calibration/logits.npy", logits)
    with pytest.raises(ValueError, match="exit 2 has logits that are not finite"):
        calibrate_run(run)
    np.save(run / "eval/calibration/logits.npy", logits[:, :5])
    with pytest.raises(ValueError, match="do not belong together"):
        calibrate_run(run)
    (run / "eval/calibration/logits.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match="is damaged"):
        calibrate_run(run)
    (run / "eval/calibration/logits.npy").unlink()
    with pytest.raises(ValueError, match="is missing"):
        calibrate_run(run)
    (run / "eval/calibration/difficulty.npy").unlink()
    for name in ("logits", "labels", "index"):
        shape = (3, 0, 6) if name == "logits" else (0,)
        kind = np.float32 if name == "logits" else np.int64
        np.save(run / f"eval/calibration/{name}.npy", np.zeros(shape, kind))
    with pytest.raises(ValueError, match="is empty"):
        calibrate_run(run)
    (run / "eval/eval.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="is damaged"):
        calibrate_run(run)
    with pytest.raises(ValueError, match="has not been evaluated"):
        calibrate_run(tmp_path)


def test_the_command_line(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["offramp", "calibrate", str(run), *words])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    assert call("--budget", "2.2M") == 0
    out = capsys.readouterr().out
    assert "mul-adds per image" in out and "all the rest" in out and "policy.json" in out
    assert call("--risk", "0.1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["promise"]["risk"] == 0.1
    assert call() == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the last exit for everybody, 5.00M mul-adds per image" in out and "--anyway takes the estimate" in out
    assert call("--anyway") == 0
    assert "% less than all stages: " in " ".join(capsys.readouterr().out.split())
    assert call("--budget", "lots") == 2
    assert "--budget must be a count such as 15M, got 'lots'" in capsys.readouterr().err
    assert call("--budget", "1k") == 2
    assert call("--q", "0.5", "--out", str(run / "other.json")) == 0
    assert read_policies(run / "other.json").policy.q == 0.5


def test_calibrating_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from offramp.measuring.calibrate import calibrate_run\n"
        f"print(calibrate_run({str(run)!r}).policy.mul_adds > 0)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True"


def test_every_policy_has_intervals_that_hold_what_was_seen(run: Path) -> None:
    found = calibrate_run(run, PolicyRequest(budget_mul_adds=2e6))
    given, _ = on_calibration(run, found)
    for policy in found.policies:
        assert policy.samples == 400 and policy.top1_interval is not None and policy.drop_interval is not None
        assert policy.top1_interval[0] <= policy.top1 <= policy.top1_interval[1]
        assert policy.drop_points == pytest.approx(100 * (given.right[-1].mean() - policy.top1))
        assert policy.drop_interval[0] <= policy.drop_points <= policy.drop_interval[1]
        plain = paired_interval(given.right[-1], rights(given, policy.thresholds))
        if policy.family == "q":  # chosen by confidences alone
            assert policy.drop_interval == plain
        elif not all(map(math.isinf, policy.thresholds)):
            assert policy.drop_interval[0] <= plain[0] and plain[1] <= policy.drop_interval[1]
    wider = [p.drop_interval for p in found.family("searched") if p.drop_interval is not None]
    assert len({round(high - low, 6) for low, high in wider}) > 10
    assert read_policies(run / "policy.json") == found


def test_a_drop_that_few_images_cannot_tell_sends_everybody_to_the_last_exit(tmp_path: Path) -> None:
    small = write_run(tmp_path / "small", calibration=60)
    for request in (PolicyRequest(), PolicyRequest(max_drop_points=3.0, family="q")):
        found = calibrate_run(small, request)
        policy, own = found.policy, found.policy.withheld
        assert own is not None and policy.shares == (0.0, 0.0, 1.0) and policy.mul_adds == COSTS[-1]
        assert (policy.drop_points, policy.drop_interval) == (0.0, (0.0, 0.0))
        anyway = calibrate_run(small, replace(request, anyway=True)).policy
        assert anyway.withheld is None and anyway.mul_adds == own.mul_adds < COSTS[-1]
        assert (anyway.drop_points, anyway.drop_interval) == (own.drop_points, own.drop_interval)
        assert reach(own.drop_points, own.drop_interval) > WIDEST_POINTS
        said = policy_sentence(found)
        assert "Nobody leaves early: on 60 images" in said and f"{own.samples_needed:,} labelled images" in said
        assert own.samples_needed > 150 and "--anyway" in said
    for request in (PolicyRequest(q=0.5), PolicyRequest(budget_mul_adds=2e6), PolicyRequest(risk=0.3, probability=0.5)):
        found = calibrate_run(small, request)  # what was asked for by its price is given, with its interval
        assert found.policy.withheld is None and found.policy.mul_adds < COSTS[-1]
        assert "calibration images right (95 %:" in policy_sentence(found).replace(
            "of 60 calibration images right", ""
        ) or "(95 %:" in policy_sentence(found)


def test_enough_images_are_acted_on(tmp_path: Path) -> None:
    found = calibrate_run(write_run(tmp_path / "large", calibration=1500))
    policy = found.policy
    assert policy.withheld is None and policy.mul_adds < 0.9 * COSTS[-1]
    assert policy.drop_points is not None and policy.drop_interval is not None
    assert reach(policy.drop_points, policy.drop_interval) <= WIDEST_POINTS


def folds_of(run: Path, count: int) -> list[SavedOutputs]:
    saved = read_outputs(run, "calibration")
    rows = [np.arange(at, len(saved.labels), count) for at in range(count)]
    return [SavedOutputs(saved.logits[:, r], saved.labels[r], saved.index[r], None, None, None) for r in rows]


def test_folds_are_put_together_and_give_an_estimate_never_a_promise(run: Path, tmp_path: Path) -> None:
    folds = folds_of(run, 4)
    found = find_cross_fitted(folds, COSTS, PolicyRequest(budget_mul_adds=2e6))
    assert found.folds == 4 and found.policy.samples == 400 and found.policy.mul_adds <= 2e6
    assert "An estimate, not a promise, by 4-fold cross-validation" in policy_sentence(found)
    write_policies(tmp_path / "policy.json", found)
    assert read_policies(tmp_path / "policy.json") == found
    together = find_policies(read_outputs(run, "calibration"), COSTS, PolicyRequest(budget_mul_adds=2e6))
    assert together.folds is None and "estimate" not in policy_sentence(together)
    assert together.policy.top1 == pytest.approx(found.policy.top1, abs=0.02)
    with pytest.raises(ValueError, match="a promise about risk needs images that the network itself never saw"):
        find_cross_fitted(folds, COSTS, PolicyRequest(risk=0.1))
    with pytest.raises(ValueError, match="in more than one fold"):
        find_cross_fitted([folds[0], folds[0]], COSTS)
    with pytest.raises(ValueError, match="at least two folds"):
        find_cross_fitted(folds[:1], COSTS)
    other = replace(folds[1], logits=folds[1].logits[:2])
    with pytest.raises(ValueError, match="of different networks"):
        find_cross_fitted([folds[0], other], COSTS)


def test_thresholds_carry_over_to_a_run_on_all_images(run: Path, tmp_path: Path) -> None:
    """The run that they were found with held images out; the other one, trained in the same way, did not."""
    whole = write_run(tmp_path / "whole", seed=3, calibration=0)
    assert read_run(whole).policies is None
    found = calibrate_run(run, PolicyRequest(budget_mul_adds=2e6), out=whole / "policy.json")
    assert found.found_on == run.name and f"found with {run.name}, trained in this way" in policy_sentence(found)
    read = read_run(whole)
    assert read.policies == found and read.chosen and read_policies(whole / "policy.json") == found
    on_test = outcome(read.predictions, found.policy.thresholds, found.costs)
    assert on_test.cost == pytest.approx(2e6, rel=0.1) and read.curves["searched"].costs[0] < on_test.cost
    other = write_run(tmp_path / "other", "digits-learned", calibration=0)
    with pytest.raises(ValueError, match="only if both were trained in the same way"):
        calibrate_run(run, out=other / "policy.json")
    with pytest.raises(ValueError, match="a promise about risk needs images that the network itself never saw"):
        calibrate_run(run, PolicyRequest(risk=0.1), out=whole / "policy.json")
    assert calibrate_run(run, out=tmp_path / "policy.json").found_on is None
    again = write_run(tmp_path / "again", seed=4)
    with pytest.raises(ValueError, match="again holds images out itself, and finds its own thresholds on them"):
        calibrate_run(run, out=again / "policy.json")


def test_thresholds_of_lazy_stages_carry_over_too(run: Path, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", seed=3, calibration=0)
    for each in (run, whole):
        lazy = tuple(cost - 1000 * (len(COSTS) - k) for k, cost in enumerate(COSTS, 1))
        write_json(each / "eval" / "eval.json", replace(read_summary(each), lazy_costs=lazy).to_json())
    found = calibrate_run(run, lazy=True, out=whole / "policy.json")
    assert found.schedule == "lazy" and read_run(whole).policies == found


@pytest.mark.parametrize("samples", [1, 2, 3, 7])
def test_a_handful_of_images_is_no_error(tmp_path: Path, samples: int) -> None:
    tiny = write_run(tmp_path / "tiny", calibration=samples)
    for request in (
        PolicyRequest(),
        PolicyRequest(q=0.5),
        PolicyRequest(budget_mul_adds=2e6),
        PolicyRequest(anyway=True),
    ):
        policy = calibrate_run(tiny, request).policy
        assert policy.samples == samples and policy.top1_interval is not None
        assert (policy.withheld is None) == (
            not request.by_drop or request.anyway or policy.thresholds != (math.inf,) * 2
        )


def test_the_sentence_of_a_promise_and_of_files_of_before(run: Path) -> None:
    promised = calibrate_run(run, PolicyRequest(risk=0.08, probability=0.9))
    assert "With probability 0.9 at most 8 % of images are lost" in policy_sentence(promised)
    before = replace(
        promised.policy, samples=None, top1_interval=None, drop_points=None, drop_interval=None, promise=None
    )
    said = policy_sentence(promised, before)
    assert "the policy file does not say" in said and "95 %" not in said
    better = replace(before, samples=1500, top1_interval=(0.8, 0.9), drop_points=-0.5, drop_interval=(-1.5, 0.4))
    assert "0.50 points more than the last exit (95 %: 1.5 more to 0.4 fewer)" in policy_sentence(promised, better)
    worse = replace(better, drop_points=0.5, drop_interval=(0.1, 0.9))
    assert "of 1,500 calibration images right, 0.50 points fewer than the last exit (95 %: 0.1 to 0.9 fewer)." in (
        policy_sentence(promised, worse)
    )
