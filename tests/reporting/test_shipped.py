"""What the report opens on: the policy that ships, mistakes, hard images, classes that lose, and what `fit` tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.saved import COSTS, write_run
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.intervals import paired_interval, proportion_interval, right_interval
from offramp.reporting import report_tables as tables
from offramp.reporting.fitted import families_chart, find_fit, read_fit
from offramp.reporting.groups import gather
from offramp.reporting.headline import headline
from offramp.reporting.page_parts import matrix
from offramp.reporting.report import title_of, write_report
from offramp.reporting.shipped import (
    confusion,
    find_shipped,
    hardest_images,
    losing_classes,
    read_times,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A calibrated run."""
    run = write_run(tmp_path / "runs/mine", skill=1.2)
    calibrate_run(run, PolicyRequest(budget_mul_adds=2e6))
    return run


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"machine": "this box", "stage_ms": {str(k): {"8": 4.0 * k} for k in (1, 2, 3)}}))
    return path


def test_intervals_cover_what_they_should() -> None:
    low, high = proportion_interval(90, 100)
    assert 0.82 < low < 0.9 < high < 0.96
    assert proportion_interval(0, 10)[0] == pytest.approx(0) and proportion_interval(10, 10)[1] == pytest.approx(1)
    draw = np.random.default_rng(0)
    hits = draw.binomial(60, 0.8, 2000)
    inside = [low <= 0.8 <= high for low, high in (proportion_interval(int(h), 60) for h in hits)]
    assert 0.92 < np.mean(inside) < 0.98
    a, b = np.array([True] * 90 + [False] * 10), np.array([True] * 80 + [False] * 20)
    low, high = paired_interval(a, b)
    assert 0 < low < 10 < high < 20
    assert paired_interval(b, a) == pytest.approx((-high, -low))


def test_the_chosen_policy_ships(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/before", seed=3)
    shipped = find_shipped(gather([tmp_path / "runs"]))
    assert shipped is not None and shipped.chosen and shipped.run.folder == run
    assert shipped.policy.mul_adds <= 2e6 and shipped.policy == shipped.run.policies.policy
    low, high = right_interval(shipped.right)
    assert low < shipped.top1 < high
    (name, *cells), (whole, *theirs) = tables.shipped_table(shipped, None)[2]
    assert name == "the policy that ships" and whole == "everybody goes to the last exit"
    assert cells[0] == f"{100 * shipped.right.mean():.2f}" and theirs[2:] == ["5.00M", "100"]
    text = headline(gather([run]))
    assert text.startswith(
        f"Leaving early (the policy that ships) saves {100 * shipped.saved:.0f} % of the compute, with "
    )
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in text


def test_its_own_measure_and_order_are_taken_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    calibrate_run(run, measure="margin", temperature=True)
    shown = gather([run])[0].first
    assert shown.chosen and shown.policies.measure == "margin" and shown.policies.temperatures is not None
    assert not gather([run], "max_softmax", False)[0].first.chosen
    summary = json.loads((run / "eval/eval.json").read_text())
    summary["lazy_costs"] = [cost // 2 for cost in COSTS]
    (run / "eval/eval.json").write_text(json.dumps(summary))
    calibrate_run(run, lazy=True)
    assert gather([run])[0].costs == tuple(summary["lazy_costs"])
    assert gather([run], "max_softmax", False)[0].costs == COSTS


def test_without_a_choice_a_policy_is_suggested(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    shipped = find_shipped(gather([tmp_path / "run"]))
    assert shipped is not None and not shipped.chosen
    page = write_report([tmp_path / "run"], tmp_path / "report.html").page.read_text()
    assert "No policy was chosen yet" in page and "<h2>What ships" not in page and "diamond" not in page


def test_where_nothing_is_saved_that_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    calibrate_run(run, PolicyRequest(max_drop_points=0, family="q"))
    value = json.loads((run / "policy.json").read_text())
    right = np.load(run / "eval/calibration/logits.npy")[-1].argmax(-1) == np.load(run / "eval/calibration/labels.npy")
    everybody = {"thresholds": [None, None], "mul_adds": COSTS[-1], "shares": [0, 0, 1], "top1": float(right.mean())}
    value["policies"][value["chosen"]] |= everybody
    (run / "policy.json").write_text(json.dumps(value))
    assert "saves nothing, since nearly every image goes to the last exit" in headline(gather([run]))


def test_milliseconds_stand_beside_mul_adds(run: Path, times: Path, tmp_path: Path) -> None:
    found = write_report([run], tmp_path / "report.html", times=times)
    shipped = find_shipped(gather([run]))
    ours, whole = shipped.milliseconds(read_times(times, 3))
    assert whole == pytest.approx((4 + 8 + 12) / 8) and ours < whole
    assert f"is {whole / ours:.2f} times as fast" in found.answer and f"or {ours:.3g} ms" in found.answer
    for name in ("shipped", "leaving", "anytime"):
        assert "ms" in (found.files / f"{name}.csv").read_text().splitlines()[0].split(",")
    assert "batches of 8, on this box" in found.page.read_text()
    table = json.loads(times.read_text())
    times.write_text(json.dumps(table | {"policy_ms": {"leaving_early": 2.0, "whole_network": 5.0}}))
    assert shipped.milliseconds(read_times(times, 3)) == (2.0, 5.0)  # timed as a whole
    assert "is 2.50 times as fast" in headline(gather([run]), times=read_times(times, 3))
    times.write_text(json.dumps(table | {"policy_ms": 3}))
    with pytest.raises(ValueError, match="policy_ms must hold"):
        read_times(times, 3)


def test_mistakes_are_counted(run: Path) -> None:
    shipped = find_shipped(gather([run]))
    counts = confusion(shipped)
    assert counts.sum() == shipped.samples and np.diag(counts).sum() == shipped.right.sum()
    title, columns, rows = tables.confusion_table(shipped)
    assert len(rows) == 6 and columns[1] == "<class 0>" and rows[2][3] == str(counts[2, 2])
    pairs = tables.mistakes_table(shipped)[2]
    assert int(pairs[0][2]) == (counts - np.diag(np.diag(counts))).max()
    assert [int(row[2]) for row in pairs] == sorted((int(row[2]) for row in pairs), reverse=True)


def test_classes_that_lose_are_found(run: Path) -> None:
    shipped = find_shipped(gather([run]))
    labels = shipped.run.test.labels
    losses = {c: 100 * (shipped.whole_right[labels == c].mean() - shipped.right[labels == c].mean()) for c in range(6)}
    found = losing_classes(shipped)
    assert {one.label for one in found} == {c for c, points in losses.items() if points > 0}
    assert [one.points for one in found] == pytest.approx(sorted((p for p in losses.values() if p > 0), reverse=True))
    assert all(one.interval[0] < one.points < one.interval[1] for one in found)


def test_the_hardest_images_say_what_each_exit_said(run: Path, tmp_path: Path) -> None:
    shipped = find_shipped(gather([run]))
    found = hardest_images(shipped)
    assert len(found) == 12 and all(len(one.said) == 3 and 1 <= one.left <= 3 for one in found)
    chances = np.exp(shipped.run.test.logits) / np.exp(shipped.run.test.logits).sum(-1, keepdims=True)
    own = chances[:, np.arange(40), shipped.run.test.labels[:40]].mean(0)
    assert found[0].number == own.argmin() and found[0].label == shipped.run.test.labels[own.argmin()]
    page = write_report([run], tmp_path / "report.html").page.read_text()
    assert page.count('alt="Test image ') == 12 and page.count(", leaves here)") == 12


def test_the_title_is_the_datas_or_the_folders(run: Path, tmp_path: Path) -> None:
    assert title_of(gather([run]), None) == "digits"
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"name": "imagefolder", "dir": "/somewhere/My <photos>"}
    (run / "config.json").write_text(json.dumps(config))
    assert "<h1>My &lt;photos&gt;</h1>" in write_report([run], tmp_path / "report.html").page.read_text()


def test_many_classes_show_those_that_are_mistaken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.reporting.page_parts.MOST_CLASSES", 5)
    monkeypatch.setattr("offramp.reporting.page_parts.SHOWN_CLASSES", 3)
    drawn = matrix(find_shipped(gather([run])))
    assert "the 3 of 6 classes with the most mistakes" in drawn and drawn.count("<tr>") == 4


def a_fit(**changes: Any) -> dict[str, Any]:
    def point(mul_adds: float, ms: float | None, top1: float) -> dict[str, Any]:
        return {"mul_adds": mul_adds, "ms": ms, "top1": top1, "interval": [top1 - 0.02, top1 + 0.02]}

    families = [
        {"family": "single", "name": "at 96 px", "run": "runs/single", "points": [point(7e7, 1.9, 0.733)]},
        {"family": "cascade", "name": "two", "run": "c", "points": [point(9e7, 2.3, 0.80), point(1.5e8, 3.4, 0.86)]},
        {"family": "exits", "name": "four", "run": "runs/mine", "points": [point(1e8, 2, 0.7), point(2e8, 4, 0.85)]},
    ]
    chosen = {"family": "exits", "name": "four", "run": "runs/mine", "point": 1}
    return {
        "schema": 1, "folder": "My photos", "asked": "half a point", "unit": "ms", "families": families,
        "chosen": chosen, "reference": None, "test": {}, "sentence": "It is <good>.", "warnings": ["Few zebras."],
    } | changes  # fmt: skip


def test_what_fit_tried_comes_first(run: Path, tmp_path: Path) -> None:
    (tmp_path / "fit.json").write_text(json.dumps(a_fit()))
    found = write_report([run], tmp_path / "report.html")
    page = found.page.read_text()
    assert found.answer == "It is <good>." and "<h1>My photos</h1>" in page and "Few zebras." in page
    assert page.index('id="figure-families"') < page.index('id="figure-accuracy"')
    assert "against milliseconds per image" in page and "Chosen: four, 85.0 % (83.0 to 87.0 %) at 200.00M" in page
    rows = (found.files / "families.csv").read_text().splitlines()
    assert len(rows) == 6 and [row.endswith("chosen") for row in rows[1:]] == [False] * 4 + [True]
    value = a_fit()
    value["families"][0]["points"][0]["ms"] = None  # unknown for one: then none
    (tmp_path / "fit.json").write_text(json.dumps(value))
    assert "against mul-adds per image" in families_chart(read_fit(tmp_path / "fit.json")).caption


def test_what_ships_stands_beside_the_single_network(run: Path, tmp_path: Path) -> None:
    single = {"name": "at 96 px", "run": "s", "mul_adds": 4e8, "ms": 6.0, "top1": 0.9}
    tested = {"top1": 0.89, "interval": [0.8, 0.95], "samples": 100, "mul_adds": 2e8, "ms": 4.0}
    tested |= {"drop": 1.0, "drop_interval": [-3.5, 5.25]}
    chosen = {"held_out": {"samples": 400, "folds": 5}, "drop": {"points": 0.25, "interval": [-0.1, 0.6]}}
    (tmp_path / "fit.json").write_text(json.dumps(a_fit(reference=single, test=tested, **chosen)))
    report = write_report([run], tmp_path / "report.html")
    assert (
        "An estimate by 5-fold cross-validation, from the 400 held-out images that it was chosen on: it has 0.25 "
        "points fewer right (95 %: 0.10 more to 0.60 fewer) than the single network; the interval allows for the "
        "choice." in report.page.read_text()
    )
    chosen["drop"]["certified_on"] = 200
    (tmp_path / "fit.json").write_text(json.dumps(a_fit(reference=single, test=tested, **chosen)))
    report = write_report([run], tmp_path / "report.html")
    assert "On the 200 held-out images that certify the promise, it has 0.25 points" in report.page.read_text()
    rows = (report.files / "shipped.csv").read_text().splitlines()
    assert ",-1.00 (-5.25 to +3.50),200.00M" in rows[1] and ",–,400.00M" in rows[2]
    assert rows[1].startswith("four,89.0,") and rows[1].endswith("200.00M,50,4,1.50")
    assert rows[2].startswith("at 96 px,90.0,") and rows[2].endswith("400.00M,100,6,1.00")
    (tmp_path / "fit.json").write_text(json.dumps(a_fit()))  # by an earlier version: the policy beside its own network
    rows = (write_report([run], tmp_path / "report.html").files / "shipped.csv").read_text().splitlines()
    assert rows[2].startswith("everybody goes to the last exit,")


def test_of_each_kind_the_best_at_every_cost_is_drawn(tmp_path: Path) -> None:
    value = a_fit()
    worse = {"mul_adds": 1.2e8, "ms": 3.0, "top1": 0.79, "interval": [0.77, 0.81]}
    value["families"].append({"family": "cascade", "name": "other", "run": "o", "points": [worse]})
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(value))
    chart = families_chart(read_fit(path))
    axes = Figure().subplots()
    chart.draws[0](axes)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["cascade"] == [[2.3, 80.0], [3.4, 86.0]] and lines["chosen"] == [[4.0, 85.0]]
    assert [text.get_text() for text in axes.texts] == ["at 96 px"]
    low, high = axes.get_ylim()
    assert 0 < low < 71.3 and high > 88  # the intervals are on it
    assert "4 networks were tried. one network: 73.3 % (71.3 to 75.3 %) at 70.00M. cascade: 80.0 %" in chart.words


def test_the_fit_is_looked_for_around_the_run(run: Path, tmp_path: Path) -> None:
    """It is about the run that it chose; another one beside that has a report of its own."""
    assert find_fit([run]) is None
    (tmp_path / "fit.json").write_text(json.dumps(a_fit()))
    found = find_fit([run])
    assert found is not None and found.point.top1 == 0.85
    other = write_run(tmp_path / "runs/other")
    calibrate_run(other)
    assert find_fit([other]) is None and find_fit([other, run]) is not None
    report = write_report([other], tmp_path / "other.html")
    assert "It is <good>." not in report.answer and "My photos" not in report.page.read_text()


@pytest.mark.parametrize("changes", [{"schema": 9}, {"families": 3}, {"chosen": {}}, {"chosen": None}])
def test_a_fit_that_makes_no_sense_is_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(a_fit(**changes)))
    with pytest.raises(ValueError, match="is not what|is not known"):
        read_fit(path)
    value = a_fit()
    value["chosen"]["name"] = "nobody"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="fit.json"):
        read_fit(path)
