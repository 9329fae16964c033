"""The report from hand-made runs: its sentence, its tables, its groups, its files, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from helpers.saved import COSTS, write_run
from offramp.cli import main
from offramp.measuring.calibrate import calibrate_run, searched_family
from offramp.measuring.policy import outcome
from offramp.reporting import report_tables as tables
from offramp.reporting.figures import training_curves
from offramp.reporting.groups import Group, find_runs, gather, read_run
from offramp.reporting.headline import Comparison, compare, headline, weightings
from offramp.reporting.paper_figures import FIGURES, write_figures
from offramp.reporting.report import write_report
from offramp.runs.recipe import list_recipes


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds each of a baseline and of better learned weights."""
    for seed in (0, 1):
        write_run(tmp_path / f"runs/baseline/seed-{seed}", seed=seed, skill=0.8)
        write_run(tmp_path / f"runs/learned/seed-{seed}", "digits-learned", seed=seed, skill=1.6)
    return tmp_path / "runs"


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_seeds_of_one_configuration_are_one_group(runs: Path) -> None:
    groups = gather([runs])
    assert [(g.label, [r.config.seed for r in g.runs]) for g in groups] == [
        ("baseline", [0, 1]),
        ("learned weights", [0, 1]),
    ]
    assert groups[0].top1().shape == (2, 3)
    grid, each = groups[0].curve() or (None, None)
    assert grid is not None and each.shape == (2, len(grid)) and not np.isnan(each).any()


def test_names_tell_groups_apart(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", "digits-learned")
    other = write_run(tmp_path / "b", "digits-learned")
    config = json.loads((other / "config.json").read_text())
    config["weighting"]["delta"] = 0.3
    (other / "config.json").write_text(json.dumps(config))
    assert [group.label for group in gather([one, other])] == ["a", "b"]
    config["recipe"] = "mine"
    (other / "config.json").write_text(json.dumps(config))
    assert [group.label for group in gather([one, other])] == ["digits-learned", "mine"]


def test_the_sentence_says_what_the_curves_say(runs: Path) -> None:
    before, after = gather([runs])
    found = compare(before, after)
    assert found is not None and found.saving > 0 and found.points > 0 and found.spread is not None
    means = [Group.curve(g) for g in (before, after)]
    for (grid, each), cost in zip(means, (found.cost_before, found.cost), strict=True):
        assert np.interp(cost, grid, each.mean(0)) == pytest.approx(found.top1, abs=2e-3)
    assert re.fullmatch(
        r"At equal compute learned weights are [\d.]+ ± [\d.]+ points better than the baseline on average from \S+ to "
        r"\S+ mul-adds, and need \d+ % less compute to have \d+\.\d % right \(2 seeds\)\.",
        weightings([before, after]),
    )
    assert re.match(
        r"baseline: leaving early has [\d.]+ ± [\d.]+ % of the test images right at \S+ mul-adds per image, \d+ ± \d+ "
        r"% less than the whole network, which has [\d.]+ ± [\d.]+ % at 5.00M",
        headline([before, after]),
    )


@pytest.mark.parametrize(("points", "spread", "cost"), [(0.08, None, 106), (0.3, 0.5, 80), (-0.2, 0.1, 90)])
def test_a_comparison_says_one_thing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, points: float, spread: float | None, cost: float
) -> None:
    """Better and yet dearer, or a difference that the seeds do not bear out: then compute is not spoken of."""
    found = Comparison(points, spread, (1e6, 2e6), 0.9, cost, 100)
    monkeypatch.setattr("offramp.reporting.headline.compare", lambda *given: found)
    text = weightings(gather([runs]))
    assert f"{abs(points):.2f}" in text and "less compute" not in text and "more compute" not in text
    assert ("not beyond their spread" in text) == (spread == 0.5)


def test_a_disappointing_result_is_said_too(tmp_path: Path) -> None:
    write_run(tmp_path / "baseline", skill=1.6)
    write_run(tmp_path / "learned", "digits-learned", skill=0.8)
    text = headline(gather([tmp_path]))
    assert "points worse than the baseline on average from" in text and "more compute" not in text
    assert text.endswith("(one seed each, so it may be chance: --seeds 0,1,2 tells).")


def test_one_run_alone_says_what_leaving_early_saves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = headline(gather([run]))
    assert re.match(
        r"Leaving early saves \d+ % of the compute, with [\d.]+ points fewer right \(95 %: [\d.]+ (more )?to [\d.]+ "
        r"fewer\): [\d.]+ % of "
        r"500 test images are right \([\d.]+ to [\d.]+ %\) at \S+ mul-adds per image; the "
        r"whole network has [\d.]+ % at 5.00M",
        text,
    )
    none = write_run(tmp_path / "none", calibration=0)
    assert "without a calibration split" in headline(gather([none]))


def test_tables_hold_means_and_spreads(runs: Path) -> None:
    groups = gather([runs])
    _, columns, rows = tables.anytime(groups)
    assert columns == ["exit", "mul-adds", "baseline", "learned weights", "difference"]
    top1 = 100 * groups[0].top1()
    assert rows[0][:3] == ["1", "1.00M", f"{top1[:, 0].mean():.2f} ± {top1[:, 0].std(ddof=1):.2f}"]
    _, columns, rows = tables.budgeted(groups, [0.5e6, 2e6])
    assert columns == ["method", "thresholds", "at 0.50M", "at 2.00M", "mean, 0.50M to 2.00M"]
    assert len(rows) == 4 and all(row[2] == "–" and "±" in row[3] and row[4] == "–" for row in rows)
    _, _, rows = tables.budgeted(groups, [2e6, 4e6])
    area = [100 * run.curves["q"].area(2e6, 4e6) for run in groups[0].runs]
    assert rows[0][4] == f"{np.mean(area):.2f} ± {np.std(area, ddof=1):.2f}"
    _, _, rows = tables.difficulty(groups) or ("", [], [])
    assert float(rows[0][1].split()[0]) > 0.3
    assert len(tables.trust(groups)[2]) == 6
    assert all(tables.span(groups)[0] <= b <= tables.span(groups)[1] for b in tables.nice_budgets(groups))


def test_the_papers_numbers_stand_beside_ours(tmp_path: Path) -> None:
    costs = (6_859_876, 14_350_228, 27_536_596, 41_710_000, 58_480_628)
    run = write_run(tmp_path / "run", "cifar100-msdnet5-learned", costs=costs)
    (group,) = gather([run])
    assert group.paper_top1 == (62.61, 65.71, 69.14, 72.12, 73.36)
    _, columns, rows = tables.anytime([group])
    assert columns[-1] == "paper, learned weights" and rows[0][-1] == "62.61"
    config = json.loads((run / "config.json").read_text())
    config["model"]["overrides"] = {"growth": 4}
    (run / "config.json").write_text(json.dumps(config))
    assert gather([run])[0].paper_top1 is None


def test_one_epoch_is_a_point_that_shows(runs: Path) -> None:
    run = find_runs([runs])[0]
    log = (run / "metrics.jsonl").read_text().splitlines()
    for epochs, marker in ((len(log), "None"), (1, "o")):
        (run / "metrics.jsonl").write_text("\n".join(log[:epochs]))
        panels = training_curves(gather([run]))
        axes = Figure().add_subplot()
        assert panels is not None
        panels.draws[0](axes)
        assert [line.get_marker() for line in axes.lines] == [marker]
    assert [float(tick) for tick in axes.get_xticks() if 0.5 <= tick <= 1.5] == [1.0]


def test_files_are_whole(runs: Path, tmp_path: Path) -> None:
    found = write_report([runs], tmp_path / "out/report.html", budgets=[2e6])
    assert found.page.stat().st_size > 100_000
    names = {path.name for path in found.files.iterdir()}
    weights = ("weights", "weights-selected", "weights-by-epoch")
    for figure in ("accuracy", *weights, "calibration", "overthinking", "training"):
        assert {f"{figure}.png", f"{figure}.svg"} <= names
        with Image.open(found.files / f"{figure}.png") as image:
            assert image.width > 400
    shipped = ("shipped", "leaving", "confusion", "mistakes", "losing")
    for table in ("anytime", "budgeted", "trust", "overthinking", "difficulty", *shipped):
        assert {f"{table}.md", f"{table}.csv"} <= names
        rows = list(csv.reader((found.files / f"{table}.csv").read_text().splitlines()))
        lines = (found.files / f"{table}.md").read_text().splitlines()
        assert len(rows) >= 2 and len(lines) == len(rows) + 3


def test_the_page_carries_what_python_computes(runs: Path, tmp_path: Path) -> None:
    page = write_report([runs], tmp_path / "report.html").page.read_text()
    data = data_of(page)
    groups = gather([runs])
    every = [run for group in groups for run in group.runs]
    assert [r["label"] for r in data["runs"]][:2] == ["baseline, seed 0", "baseline, seed 1"]
    for shown, run in zip(data["runs"], every, strict=True):
        assert run.policies is not None
        for family in ("searched", "q"):
            for value, policy in zip(shown["families"][family], run.policies.family(family), strict=True):
                own = outcome(run.predictions, policy.thresholds, COSTS)
                assert (value["top1"], value["mul_adds"], tuple(value["shares"])) == (own.top1, own.cost, own.shares)
                assert value["budget"] == policy.mul_adds and len(value["leaves"]) == 40
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"|http-equiv', "", page.split("<script>")[0])


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["recipe"] = "</script><b>"
    config["model"]["name"] = "<i>net</i>"
    (run / "config.json").write_text(json.dumps(config))
    summary = json.loads((run / "eval/eval.json").read_text())
    summary["model"] = "<i>net</i>"
    (run / "eval/eval.json").write_text(json.dumps(summary))
    page = write_report([run], tmp_path / "report.html").page.read_text()
    assert "<i>net" not in page and "</script><b>" not in page and "<class" not in page
    assert data_of(page)["classes"][0] == "<class 0>"


def test_runs_without_calibration_or_images_still_have_a_page(tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", calibration=0)
    (none / "eval/test/thumbs.npz").unlink()
    (none / "metrics.jsonl").unlink()
    (none / "environment.json").unlink()
    page = write_report([none], tmp_path / "report.html").page.read_text()
    assert data_of(page)["runs"] == [] and 'id="budget"' not in page and "How to repeat it" in page


def test_milliseconds_have_their_figure(runs: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"stage_ms": {str(k): {"8": 4.0 * k} for k in (1, 2, 3)}}))
    found = write_report([runs], tmp_path / "report.html", times=times)
    assert (found.files / "accuracy-ms.png").is_file() and (found.files / "budgeted-ms.csv").is_file()
    assert "milliseconds per image" in found.page.read_text()


def test_a_report_of_less_leaves_nothing_of_one_of_more(runs: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"stage_ms": {str(k): {"8": 4.0 * k} for k in (1, 2, 3)}}))
    files = write_report([runs], tmp_path / "report.html", times=times).files
    more = names_in(files)
    (files / "notes.md").write_text("mine")
    bare = write_run(tmp_path / "bare", calibration=0)
    for name in ("eval/test/difficulty.npy", "eval/test/thumbs.npz", "metrics.jsonl"):
        (bare / name).unlink()
    less = names_in(write_report([bare], tmp_path / "fresh.html").files)
    write_report([bare], tmp_path / "report.html")
    assert less < more and "shipped.md" in more - less and names_in(files) == less | {"notes.md"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_page_gives_the_command_that_writes_it_again(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = str(tmp_path / "one report.html"), ["--budgets", "1500000,2000000", "--measure", "margin"]
    write_report([runs], out, budgets=[1.5e6, 2e6], measure="margin", temperature=True)
    said = shlex.join(["offramp", "report", str(runs), "--out", out, *options, "--temperature"])
    page = Path(out).read_text()
    assert escape(said) in page
    monkeypatch.setattr(sys, "argv", shlex.split(said))
    with pytest.raises(SystemExit, match="0"):
        main()
    assert Path(out).read_text() == page


def test_what_cannot_be_reported_is_a_sentence(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an HTML file"):
        write_report([runs], tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="holds no evaluated run"):
        (tmp_path / "empty").mkdir()
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="is not a folder"):
        find_runs([tmp_path / "nothing"])
    other = write_run(tmp_path / "other", "cifar100-msdnet5-baseline")
    with pytest.raises(ValueError, match="different data"):
        write_report([runs, other], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_only_like_is_compared_with_like(tmp_path: Path) -> None:
    """Other data, other lengths, other networks: no sentence about learned weights."""
    write_run(tmp_path / "runs/a")
    other = write_run(tmp_path / "runs/b", "digits-learned")
    assert "learned weights are" in headline(gather([tmp_path / "runs"]))
    config = json.loads((other / "config.json").read_text())
    for path, value in ((("data", "train"), 99), (("train", "epochs"), 99)):
        changed = json.loads(json.dumps(config))
        changed[path[0]][path[1]] = value
        (other / "config.json").write_text(json.dumps(changed))
        text = headline(gather([tmp_path / "runs"]))
        assert text.startswith("Leaving early (baseline) saves") and "learned weights" not in text


def test_a_run_counts_once(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(runs / "baseline/seed-0", runs / "baseline/copy")
    groups = gather([runs, runs / ".." / "runs", runs / "baseline/seed-0"])
    assert [len(group.runs) for group in groups] == [2, 2]
    assert "repeats the seed" in caplog.text
    shutil.rmtree(runs / "learned/seed-1")
    assert headline(gather([runs])).endswith("(2 and 1 seeds).")


def test_runs_that_are_not_evaluated_are_named(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(runs / "learned/seed-1/eval")
    assert [len(group.runs) for group in gather([runs])] == [2, 1]
    assert "it has not been evaluated" in caplog.text and "learned/seed-1" in caplog.text


def test_fixed_weights_are_not_called_learned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "digits-learned")
    config = json.loads((run / "config.json").read_text())
    config["weighting"]["name"] = "ascending"
    (run / "config.json").write_text(json.dumps(config))
    assert "What the weight net learned" not in write_report([run], tmp_path / "report.html").page.read_text()


def test_networks_of_different_depth_share_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/three")
    deeper = write_run(tmp_path / "runs/four", costs=(1_000_000, 2_000_000, 3_000_000, 9_000_000))
    config = json.loads((deeper / "config.json").read_text())
    config["model"]["overrides"] = {"blocks": [1, 1, 1, 1]}
    (deeper / "config.json").write_text(json.dumps(config))
    found = write_report([tmp_path / "runs"], tmp_path / "report.html")
    assert "paper top-1" in (found.files / "anytime.csv").read_text()


@pytest.mark.parametrize(("exits", "samples"), [(1, 50), (3, 1), (3, 2)])
def test_the_smallest_runs_have_a_page(tmp_path: Path, exits: int, samples: int) -> None:
    run = write_run(tmp_path / "run", calibration=samples, test=samples, costs=COSTS[:exits])
    page = write_report([run], tmp_path / "report.html").page.read_text()
    shown = data_of(page)["runs"][0]
    assert len(shown["costs"]) == exits and f"{samples} test images" in page
    assert all(len(policy["shares"]) == exits for family in shown["families"].values() for policy in family)


def test_damaged_files_are_sentences(tmp_path: Path) -> None:
    def broken(name: str, change) -> None:
        run = write_run(tmp_path / name)
        change(run)
        with pytest.raises(ValueError, match="damaged|belong together|does not have"):
            write_report([run], tmp_path / "report.html")

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-50])

    broken("thumbs", lambda run: cut(run / "eval/test/thumbs.npz"))
    broken("labels", lambda run: np.save(run / "eval/test/labels.npy", np.full(500, 99)))
    broken("shape", lambda run: np.save(run / "eval/test/labels.npy", np.zeros((500, 2), np.int64)))
    broken("kind", lambda run: np.save(run / "eval/test/logits.npy", np.full((3, 500, 6), "x")))
    broken("exits", lambda run: np.save(run / "eval/test/logits.npy", np.zeros((2, 500, 6), np.float32)))
    broken("hard", lambda run: np.save(run / "eval/test/difficulty.npy", np.zeros(3)))
    broken("log", lambda run: (run / "metrics.jsonl").write_text("{"))
    broken("rows", lambda run: (run / "metrics.jsonl").write_text("[1]"))
    broken("splits", lambda run: (run / "eval/eval.json").write_text('{"model": "m", "splits": {}}'))
    learned = write_run(tmp_path / "learned", "digits-learned")
    cut(learned / "samples/epoch-0003.npz")
    with pytest.raises(ValueError, match="damaged"):
        write_report([learned], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_figures_keep_seeds_of_one_configuration_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = (7, 14, 28, 42, 58)
    for seed in (0, 1):
        write_run(tmp_path / f"runs/{seed}", "cifar100-msdnet5-baseline", seed=seed, costs=costs)
    other = write_run(tmp_path / "runs/other", "cifar100-msdnet5-baseline", seed=2, costs=costs[:3])
    change(other, "model", "overrides", value={"blocks": [1, 1, 1]})
    drawn: list[list[int]] = []

    def seen(groups: list[Group], family: str, axes: object) -> None:
        drawn.extend([run.config.seed for run in group.runs] for group in groups)

    monkeypatch.setattr("offramp.reporting.paper_figures.draw_accuracy", seen)
    write_figures([tmp_path / "runs"], tmp_path / "figures")
    assert drawn and all(seeds == [0, 1] for seeds in drawn)


def test_first_phases_are_not_runs_of_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/imta")
    write_run(run / "phase1")
    assert find_runs([tmp_path / "runs"]) == [run]


def test_the_papers_figures_from_what_is_there(tmp_path: Path) -> None:
    costs = (7, 14, 28, 42, 58)
    write_run(tmp_path / "runs/a", "cifar100-msdnet5-baseline", costs=costs)
    write_run(tmp_path / "runs/b", "cifar100-lt100-learned", costs=costs)
    write_run(tmp_path / "runs/c", "digits-baseline")
    found = write_figures([tmp_path / "runs"], tmp_path / "figures")
    assert {path.stem for path in found.files} == {"ablations", "cifar", "long-tail"}
    assert all(path.is_file() for path in found.files)
    assert "cifar100-lt100-baseline" in found.missing["long-tail"]
    with pytest.raises(ValueError, match="none of these runs"):
        write_figures([tmp_path / "runs/c"], tmp_path / "figures")


def test_figures_name_recipes_that_exist() -> None:
    named = {recipe for panels in FIGURES.values() for recipes in panels.values() for recipe in recipes}
    assert named <= set(list_recipes())


def test_reporting_needs_no_torch(runs: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from offramp.reporting.report import write_report\n"
        f"print(write_report([{str(runs)!r}], {str(tmp_path / 'r.html')!r}).answer[:8])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "baseline"


def test_the_command_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, expected in (
        (["report", str(runs), "--out", str(tmp_path / "r.html"), "--budgets", "2M,3M"], "At equal compute"),
        (["figures", str(runs), "--out", str(tmp_path / "f")], None),
        (["report", str(tmp_path / "nothing")], None),
    ):
        monkeypatch.setattr(sys, "argv", ["offramp", *words])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        assert left.value.code == (0 if expected else 2)
        assert (expected or "offramp: ") in (shown.out if expected else shown.err)


def change(run: Path, *path: str, value: object) -> None:
    """Change one setting of a run's config.json."""
    config = json.loads((run / "config.json").read_text())
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("path", "value"), [(("train", "save_seconds"), 600.0), (("train", "eval_every"), 3), (("data", "workers"), 2)]
)
def test_what_decides_nothing_does_not_part_a_pair(runs: Path, path: tuple[str, ...], value: object) -> None:
    before = headline(gather([runs]))
    for seed in (0, 1):
        change(runs / f"learned/seed-{seed}", *path, value=value)
    assert "learned weights are" in before and headline(gather([runs])) == before


def test_runs_trained_differently_are_no_pair(runs: Path) -> None:
    for seed in (0, 1):
        change(runs / f"learned/seed-{seed}", "train", "epochs", value=77)
    assert "learned weights are" not in headline(gather([runs]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "overrides"), {"blocks": [1, 1, 1]}),
        (("weighting", "delta"), 0.3),
        (("data", "imbalance"), 10.0),
    ],
)
def test_figures_pass_over_what_is_no_longer_its_recipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: tuple[str, ...], value: object
) -> None:
    costs = tuple(1_000_000 * k for k in range(1, 6))
    run = write_run(tmp_path / "runs/a", "cifar100-msdnet5-learned-paper", costs=costs)
    assert write_figures([tmp_path / "runs"], tmp_path / "figures").files
    change(run, *path, value=value)
    with pytest.raises(ValueError, match="none of these runs was trained with a recipe"):
        write_figures([tmp_path / "runs"], tmp_path / "figures")
    assert "no longer those of cifar100-msdnet5-learned-paper" in caplog.text


def test_the_report_reads_the_policies_that_were_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs / "baseline/seed-0"
    searched = read_run(run).policies
    found = calibrate_run(run)
    searches: list[str] = []

    def seen(*given: object) -> list[object]:
        searches.append("searched")
        return searched_family(*given)

    monkeypatch.setattr("offramp.reporting.groups.searched_family", seen)
    known = read_run(run).policies
    assert not searches and searched is not None and known is not None
    families = [p for p in known.policies if p != known.policy]  # which have intervals, as the report's own do not need
    assert [(p.thresholds, p.top1) for p in families] == [(p.thresholds, p.top1) for p in searched.policies]
    assert known.policy == found.policy
    read_run(run, measure="margin")
    read_run(run, temperature=True)
    assert len(searches) == 2 and not caplog.text  # other policies than those are asked for
    write_run(run, seed=5)  # evaluated again, with other logits
    read_run(run)
    assert len(searches) == 3 and "was found on another evaluation" in caplog.text
