"""Results that are kept can be redrawn: the same numbers, the differences seed by seed, an honest verdict."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.runs import call
from helpers.saved import write_run
from offramp.data import load_dataset
from offramp.reporting.claims import Difference, differences, held_out_differences, one_change, shared_seeds, verdict
from offramp.reporting.figures import marks_of_accuracy
from offramp.reporting.groups import Group, paper_top1
from offramp.reporting.kept_runs import (
    StoredRun,
    about_weights,
    apart,
    baseline_epochs,
    keep_run,
    label,
    read_stored,
    stored_name,
    stored_runs,
    train_command,
)
from offramp.reporting.results_page import write_page
from offramp.reporting.results_tables import anytime_markdown
from offramp.runs.config import RunConfig, decisive, same_but_for_weighting, with_settings
from offramp.runs.recipe import load_recipe
from offramp.training.train import fit_to_data

BUDGETS = (2e6, 4e6)
ABOUT = 'title = "Main"\ntext = "Digits."\nbudgets = [2, 4]\n'
OURS = "bound=true, interval=4, objective=whole"  # where the default is not the paper's


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two seeds of baseline and learned weights, the latter better; kept, then the runs are gone."""
    for recipe, skill in (("digits-baseline", 0.8), ("digits-learned", 1.2)):
        for seed in (0, 1):
            write_run(tmp_path / "runs" / recipe / str(seed), recipe, seed, skill)
    assert call(monkeypatch, "results", "keep", tmp_path / "runs", "--into", tmp_path / "results/1-main") == 0
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "results/1-main/section.toml").write_text(ABOUT)
    return tmp_path / "results"


def test_what_is_kept_is_small_and_tells_no_secrets(results: Path, tmp_path: Path) -> None:
    runs = stored_runs(results)
    assert len(runs) == 4 and {run.config.seed for run in runs} == {0, 1}
    files = [p for p in results.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 200_000
    assert not any(str(tmp_path) in p.read_text() for p in files)
    assert {p.suffix for p in files} == {".json", ".jsonl", ".toml"}
    again = read_stored(runs[0].folder)
    assert again.curves["q"].costs[0] < again.curves["q"].costs[-1] and len(again.metrics) == 3
    assert "data.calibration" in again.changes


def test_differences_are_by_seed_and_by_hand(results: Path) -> None:
    runs = {(run.config.weighting.name, run.config.seed): run for run in stored_runs(results)}
    before, after = ([runs[name, seed] for seed in (0, 1)] for name in ("uniform", "learned"))
    found = {d.what: d for d in differences(before, after, BUDGETS)}
    assert list(found) == ["exit 1", "exit 2", "exit 3", "2.00M", "4.00M"]
    by_hand = [100 * (b.metrics[2].top1 - a.metrics[2].top1) for a, b in zip(before, after, strict=True)]
    assert found["exit 3"].points == pytest.approx(by_hand)
    assert found["exit 3"].mean == pytest.approx(np.mean(by_hand))
    assert found["exit 3"].error == pytest.approx(abs(by_hand[0] - by_hand[1]) / 2)
    assert found["exit 1"].decides and not found["exit 2"].decides
    assert differences(before, after[1:], BUDGETS)[0].points == pytest.approx([found["exit 1"].points[1]])
    assert differences(before[:1], after[1:], BUDGETS) == []


def test_differences_on_held_out_images_are_by_seed_and_by_hand(results: Path, tmp_path: Path) -> None:
    """Of conventional training, and of settings that differ in one thing; seeds without the split do not count."""
    for run, gain in zip(sorted(results.glob("1-main/digits-learned*")), (0.01, 0.03), strict=True):
        other = run.with_name(run.name.replace("-seed", "-interval=4-seed"))
        shutil.copytree(run, other)
        table = json.loads((other / "config.json").read_text())
        table["weighting"]["interval"] = 4
        (other / "config.json").write_text(json.dumps(table))
        rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
        rows[-1]["calibration_top1"] = [top1 + gain * k for k, top1 in enumerate(rows[-1]["calibration_top1"])]
        (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    every = stored_runs(results)
    before, after = ([r for r in every if r.config.weighting.interval == at] for at in (1, 4))
    before = [r for r in before if r.config.weighting.name == "learned"]
    found = held_out_differences(before, after)
    assert [d.what for d in found] == ["exit 1", "exit 2", "exit 3", "mean"]
    assert [d.points for d in found] == [pytest.approx([k * 1.0, k * 3.0]) for k in (0, 1, 2, 1)]
    assert [(a[0], b[0], key) for a, b, key in one_change([before, after])] == [(before[0], after[0], "interval")]
    assert held_out_differences(before[:1], after[1:]) == []
    text = write_page(results, tmp_path / "page.md").read_text()
    assert "interval=4 minus interval=1 | 2 | +0.00 ± 0.00 | +2.00 ± 1.00 | +4.00 ± 2.00 | +2.00 ± 1.00 |" in text
    assert text.count("calibration=400 minus baseline | 2 |") == 1  # the setting that was not changed
    for log in results.glob("1-main/digits-learned*interval=4*/metrics.jsonl"):
        log.write_text(re.sub(r'"calibration_top1": \[[^]]*\]', '"calibration_top1": null', log.read_text()))
    assert "minus interval=1" not in write_page(results, tmp_path / "page.md").read_text()


def test_a_budget_that_is_only_shown_does_not_decide(results: Path, tmp_path: Path) -> None:
    one, other = (next(results.glob(f"1-main/{recipe}*seed=1/curves.json")) for recipe in ("*baseline", "*learned"))
    swapped = one.read_text(), other.read_text()
    one.write_text(swapped[1])
    other.write_text(swapped[0])  # under budgets one seed gains and the other loses

    def page(budgets: str) -> tuple[list[str], bool]:
        (results / "1-main/section.toml").write_text(ABOUT.replace("budgets = [2, 4]", budgets))
        text = write_page(results, tmp_path / "page.md").read_text()
        return re.findall("^- learned.*", text, re.M), "| 2.00M |" in text

    plain, shown, decides = map(page, ("", "shown = [2]", "budgets = [2]"))
    assert (plain[1], shown[1], decides[1]) == (False, True, True)
    assert shown[0] == plain[0] != decides[0] and "2.00M (" in decides[0][0]


@pytest.mark.parametrize(
    ("first", "middle", "said"),
    [
        ((1.0, 1.2), (-0.4, 0.1), "The claim holds over 2 seeds"),
        ((1.0, -0.9), (0.0, 0.0), "does not hold over 2 seeds; against it: exit 1 (+0.05 ± 0.95)"),
        ((1.0, 1.2), (-0.7, -0.4), "against it: exit 2 (-0.55 ± 0.15)"),
        ((1.0,), (0.0,), "One seed: no verdict."),
    ],
)
def test_the_verdict_follows_the_numbers(first: tuple[float, ...], middle: tuple[float, ...], said: str) -> None:
    assert said in verdict([Difference("exit 1", first, True), Difference("exit 2", middle, False)])


def test_the_page_is_written_from_what_is_kept(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "docs/results.md"
    assert call(monkeypatch, "results", "page", results, "--out", out) == 0
    text = out.read_text()
    runs = stored_runs(results)
    for run in runs:
        assert " ".join(f"{100 * s.top1:.2f}" for s in run.metrics) in text
    assert "learned weights, msdnet-tiny" in text and "Digits." in text
    assert "against it: exit 1 (+0.00 ± 0.00)." in text  # these runs differ only behind the first exit
    before, after = ([r for r in runs if r.config.weighting.name == name] for name in ("uniform", "learned"))
    found = differences(before, after, BUDGETS)
    for at, seed in enumerate(shared_seeds(before, after)):
        assert f"| seed {seed} | " + " | ".join(f"{d.points[at]:+.2f}" for d in found) in text
    assert "minus baseline, 2 seeds | " + " | ".join(map(str, found)) in text
    assert f"msdnet-tiny, calibration=400 minus baseline | 5 | 2 | {found[0]} | {found[2]} |" in text  # at a glance
    assert "Lines: " in text and "Bands: " in text and "Rings: " in text
    assert "Crosses: " not in text  # the paper says nothing about digits
    assert (
        "offramp train digits-learned --out RUNS/digits-learned-calibration=400 --set data.calibration=400 --seeds"
        in text
    )
    assert (tmp_path / "docs/results/1-main.png").stat().st_size > 5000 and "results/1-main.png" in text
    write_page(results, out)
    assert out.read_text() == text  # nothing but what is kept decides
    monkeypatch.chdir(tmp_path)
    assert f"`offramp results page {results.name} --out page.md`" in write_page(results, Path("page.md")).read_text()


def test_other_weights_are_compared_too_but_the_claim_is_not_about_them(results: Path, tmp_path: Path) -> None:
    shutil.rmtree(next(results.glob("1-main/digits-learned*seed=1")))
    config = next(results.glob("1-main/digits-learned*/config.json"))
    table = json.loads(config.read_text())
    table["weighting"] |= {"name": "fixed", "exits": [1.2, 1.0, 0.8]}
    config.write_text(json.dumps(table))
    text = write_page(results, tmp_path / "page.md").read_text()
    assert "| fixed weights, msdnet-tiny, calibration=400, exits=[1.2,1.0,0.8] minus baseline, seed 0 | " in text
    assert "The claim" not in text and "no verdict" not in text


def test_runs_without_a_calibration_split_make_no_table_of_it(results: Path, tmp_path: Path) -> None:
    for log in results.rglob("metrics.jsonl"):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        log.write_text("".join(json.dumps({**row, "calibration_top1": None}) + "\n" for row in rows))
    other = next(results.glob("1-main/digits-learned*seed=0"))
    table = json.loads((other / "config.json").read_text())
    table["weighting"]["interval"] = 4  # two settings, so a choice between them
    (other / "config.json").write_text(json.dumps(table))
    assert "on the calibration split" not in write_page(results, tmp_path / "page.md").read_text()


def test_a_section_can_show_runs_of_another_beside_its_own(results: Path, tmp_path: Path) -> None:
    (results / "2-other").mkdir()
    for run in results.glob("1-main/digits-learned*"):
        run.rename(results / "2-other" / run.name)
    about = results / "2-other/section.toml"
    about.write_text(ABOUT.replace("Main", "Other") + 'beside = ["1-main/digits-baseline*"]\n')
    _, _, first, second, every = re.split(
        "^## (?:At a glance|Main|Other|All runs)", write_page(results, tmp_path / "page.md").read_text(), flags=re.M
    )
    assert "minus baseline" in second and "minus baseline" not in first
    assert "offramp train digits-baseline" in first and "offramp train digits-baseline" not in second
    assert len([line for line in every.splitlines() if line.startswith("| 1-main | baseline")]) == 2
    assert not [line for line in every.splitlines() if line.startswith("| 2-other | baseline")]
    for given, words in (
        ('["1-main/nothing*"]', r"holds no run that '1-main/nothing\*' matches"),
        ('"1-main/*"', "cannot be used: beside must list patterns"),
        ('["/1-main/*"]', "beside must list patterns"),
        ('[""]', "beside must list patterns"),
        ("[1]", "beside must list patterns"),
    ):
        about.write_text(f"{ABOUT}beside = {given}\n")
        with pytest.raises(ValueError, match=words):
            write_page(results, tmp_path / "page.md")


def test_a_seed_shown_beside_others_stays_where_it_is_kept(results: Path, tmp_path: Path) -> None:
    """Seed 0 of both in one section, seed 1 in the other: differences have both, the list of runs has each once."""
    (results / "2-other").mkdir()
    for run in results.glob("1-main/*seed=1"):
        run.rename(results / "2-other" / run.name)
    (results / "2-other/section.toml").write_text(ABOUT.replace("Main", "Other") + 'beside = ["1-main/*seed=0"]\n')
    page = write_page(results, tmp_path / "page.md").read_text()
    first, second, every = re.split("^## (?:Other|All runs)", page, flags=re.M)
    assert "| seed 1 |" not in first and "| seed 0 |" in second and "| seed 1 |" in second
    assert "--seeds 0\n" in first and "--seeds 1\n" in second
    assert len(re.findall(r"^\| [12]-\w+ \|", every, flags=re.M)) == 4


def test_what_was_tuned_shows_no_test_numbers(results: Path, tmp_path: Path) -> None:
    (results / "1-main/section.toml").write_text(ABOUT + 'split = "calibration"\n')
    text = write_page(results, tmp_path / "page.md").read_text()
    assert "on the calibration split" in text and "75.00" in text
    assert not any(f"{100 * s.top1:.2f}" in text for run in stored_runs(results) for s in run.metrics[:1])


def test_two_settings_are_compared_on_the_calibration_split_and_by_their_weights(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_page(results, tmp_path / "page.md").read_text()
    assert "on the calibration split |" not in one  # there is nothing to choose
    run = write_run(tmp_path / "runs/other", "digits-learned", 0, 1.1)
    config = json.loads((run / "config.json").read_text())
    config["weighting"]["interval"] = 4
    (run / "config.json").write_text(json.dumps(config))
    assert call(monkeypatch, "results", "keep", run, "--into", results / "1-main") == 0
    text = write_page(results, tmp_path / "page.md").read_text()
    assert "on the calibration split |" in text and "learned weights, msdnet-tiny, calibration=400, interval=4" in text
    with np.load(run / "samples/epoch-0003.npz") as samples:
        weights, losses = samples["weights"], samples["losses"]
    expected = {
        "mean": weights.mean(0),
        "spread": weights.std(0),
        "counted": [np.average(w, weights=loss) for w, loss in zip(weights.T, losses.T, strict=True)],
    }
    kept = next(r for r in stored_runs(results) if r.changes.get("weighting.interval") == 4).weights
    words = ("mean weight", "spread of the weights", "weighted loss / plain loss")
    for (name, values), what in zip(expected.items(), words, strict=True):
        assert kept[name] == pytest.approx(values, abs=1e-4)
        assert f"interval=4 | {what} | 1 | " + " | ".join(f"{value:.2f}" for value in values) in text
    uniform = [r for r in stored_runs(results) if r.config.weighting.name == "uniform"]
    assert [r.weights for r in uniform] == [{}, {}]
    assert (
        uniform[0].train_loss is not None and f"| training loss | 2 | {uniform[0].train_loss[0]:.3f} ± 0.000 |" in text
    )


def test_samples_without_any_loss_count_as_they_are() -> None:
    nothing = {"weights": np.full((4, 2), 1.5, np.float32), "losses": np.zeros((4, 2), np.float32)}
    assert about_weights(nothing) == {"mean": [1.5, 1.5], "spread": [0, 0], "counted": [1, 1]}


def test_of_two_runs_that_are_one_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, "digits-baseline", 0)
    assert call(monkeypatch, "results", "keep", tmp_path / "runs", "--into", tmp_path / "results") == 2
    assert "have the same recipe, settings and seed; keep one of them" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "results").exists()


def test_a_log_is_enough_to_choose_between_settings(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs/other", "digits-learned", 0, 1.1)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"weighting": config["weighting"] | {"interval": 4}}))
    shutil.rmtree(run / "eval")
    keep = ("results", "keep", run, "--into", results / "1-main")
    assert call(monkeypatch, *keep) == 2  # nobody keeps an untested run by mistake
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert call(monkeypatch, "results", "keep", tmp_path / "empty", "--into", results / "1-main", "--log-only") == 2
    assert "empty holds no run; train one first" in " ".join(capsys.readouterr().err.split())
    assert call(monkeypatch, *keep, "--log-only") == 0
    stored = next(run for run in stored_runs(results) if run.summary is None)
    assert stored.metrics == () and stored.curves == {} and len(stored.weights["spread"]) == 3
    parts = write_page(results, tmp_path / "page.md").read_text().split("on the calibration split |")
    assert "interval=4" not in parts[0] and "interval=4 | 1 | 75.00" in parts[1]
    (stored.folder / "eval").mkdir()
    capsys.readouterr()
    assert call(monkeypatch, *keep, "--log-only") == 2 and "remove it first" in capsys.readouterr().err
    only = tmp_path / "only/1-choice"
    assert (
        call(monkeypatch, "results", "keep", tmp_path / "runs", "--into", only, "--log-only") == 0
    )  # a folder of them
    (only / "section.toml").write_text(ABOUT)
    assert "on the calibration split |" in write_page(only.parent, tmp_path / "page.md").read_text()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().rpartition('{"epoch"')[0])
    assert call(monkeypatch, *keep, "--log-only") == 2 and "has not finished training" in capsys.readouterr().err


def test_pictures_of_an_earlier_page_go(results: Path, tmp_path: Path) -> None:
    page = write_page(results, tmp_path / "page.md")
    shown = {path.name for path in (tmp_path / "page").iterdir()}
    for name in ("1-main-weights-9.png", "1-main-weights-9.svg", "1-mine.png"):
        (tmp_path / "page" / name).touch()
    text = page.read_text()
    assert write_page(results, page).read_text() == text
    assert {path.name for path in (tmp_path / "page").iterdir()} == shown | {"1-mine.png"}


def test_a_legend_says_what_sets_runs_apart() -> None:
    recipes = ("cifar100-msdnet5-baseline", "cifar100-msdnet5-learned-paper", "cifar100-msdnet5-learned")
    long = [with_settings(load_recipe(recipe).config, ["data.calibration=0"]) for recipe in recipes]
    groups = [[StoredRun(Path(), config, None, [], {}, "")] for config in long]
    assert apart(groups) == ["baseline", "learned weights", f"learned weights, {OURS}"]
    assert apart(groups[1:]) == ["learned weights", f"learned weights, {OURS}"]
    assert apart(groups[:1]) == ["baseline, msdnet5, calibration=0"]
    drawn = Group("baseline", "black", tuple(groups[0]))  # type: ignore[arg-type]
    assert marks_of_accuracy([drawn], "q") == (
        "Rings: each exit used for all images. Crosses: the exits in the paper, after its full training."
    )


def test_a_setting_is_named_where_it_is_not_the_papers() -> None:
    ours, paper = (load_recipe(f"cifar100-msdnet5-learned{which}").config for which in ("", "-paper"))
    assert [label([StoredRun(Path(), config, None, [], {}, "")]) for config in (ours, paper)] == [
        f"learned weights, msdnet5, {OURS}",
        "learned weights, msdnet5",
    ]


def test_a_way_of_training_is_named_whichever_recipe_it_comes_from() -> None:
    """The default recipe, and the plain one with the same settings, are one thing; the plain one is another."""
    strong = load_recipe("cifar100-msdnet5").config
    settings = ["model.overrides.carry=0.5", "objective.name=distillation", "objective.options.source=mean"]
    settings += ["train.batch=512", "train.weight_decay=5e-4", "train.nesterov=true", "train.fork=equilibrium"]
    same = with_settings(load_recipe("cifar100-msdnet5-baseline").config, settings)
    labels = [label([StoredRun(Path(), config, None, [], {}, "")]) for config in (strong, same)]
    assert labels[0] == labels[1] and "carry=0.5, objective.name=distillation" in labels[0]
    larger = label([StoredRun(Path(), load_recipe("cifar100-msdnet7").config, None, [], {}, "")])
    assert larger == labels[0].replace("msdnet5", "msdnet7")
    command = train_command([StoredRun(Path(), strong, None, [], {}, "")])
    assert command.startswith("offramp train cifar100-msdnet5 --data-dir DATA") and "--set" not in command


def test_what_training_fills_in_is_no_change_of_the_recipe() -> None:
    both = ("imta.equilibrium", "imta.collaboration")
    config = with_settings(load_recipe("digits-baseline").config, [f"{name}=true" for name in both])
    begun = fit_to_data(config, load_dataset("digits"))
    assert begun.model.overrides == {"collaboration": True}
    assert set(StoredRun(Path(), begun, None, [], {}, "").changes) == set(both)


def test_the_papers_numbers_stand_beside_imta_too() -> None:
    recipe = load_recipe("cifar100-msdnet7-imta")
    begun = with_settings(recipe.config, ["model.num_classes=100", "model.overrides={collaboration=true}"])
    for config, known in ((begun, True), (with_settings(begun, ["model.overrides.growth=4"]), False)):
        run = StoredRun(Path(), config, None, [], {}, "")
        group = Group("IMTA", "black", (run,))  # type: ignore[arg-type]
        assert group.paper_top1 == (recipe.paper_top1 if known else None)


def test_the_papers_numbers_are_not_those_of_another_weighting() -> None:
    recipe = load_recipe("cifar100-msdnet5-baseline")
    fixed = with_settings(recipe.config, ["weighting.name=fixed", "weighting.exits=[1.2, 1.1, 1, 0.9, 0.8]"])
    assert paper_top1(recipe.config) == recipe.paper_top1 and paper_top1(fixed) is None
    for other in ("data.imbalance=100", "data.label_noise=0.2", "data.train=5000"):
        assert paper_top1(with_settings(recipe.config, [other])) is None
    runs = [StoredRun(Path(), config, None, [], {}, "") for config in (recipe.config, fixed)]
    assert [line.split(" | ")[0] for line in anytime_markdown([[run] for run in runs]).splitlines()[2:]] == [
        "| baseline, msdnet5",
        "| the paper's baseline",
        "| fixed weights, msdnet5, exits=[1.2,1.1,1.0,0.9,0.8]",
    ]


def test_a_list_of_weights_can_be_typed_again() -> None:
    settings = ["weighting.name=fixed", "weighting.exits=[1.2, 0.8]"]
    run = StoredRun(Path(), with_settings(load_recipe("digits-baseline").config, settings), None, [], {}, "")
    assert label([run]) == "fixed weights, msdnet-tiny, exits=[1.2,0.8]"
    assert stored_name(run.config) == "digits-baseline-exits=1.2+0.8-weighting.name=fixed-seed=0"
    typed = shlex.split(train_command([run]))
    assert "weighting.exits=[1.2,0.8]" in typed and with_settings(RunConfig(), settings) == with_settings(
        RunConfig(), [word for word in typed if word.startswith("weighting.")]
    )


def test_a_frozen_run_is_repeated_from_wherever_the_other_one_lies() -> None:
    recipe = load_recipe("ablation-frozen").config
    for setting, named in (("seed=0", ""), ("weighting.from_run=mine", ", from_run=mine")):
        run = StoredRun(Path(), with_settings(recipe, [setting]), None, [], {}, "")
        assert label([run]) == f"frozen weights, msdnet5{named}"
        assert (
            train_command([run]).count("--set weighting.from_run=RUN ") == train_command([run]).count("from_run=R") == 1
        )


def test_runs_with_other_settings_do_not_replace_each_other(tmp_path: Path) -> None:
    names = set()
    for recipe in ("digits-baseline", "own"):
        for setting in ("seed=0", "train.weight_decay=0.5", "weighting.weight_decay=0.5", "train.learning_rate=0.3"):
            run = tmp_path / "runs" / f"{recipe}-{setting}"
            write_run(run, "digits-baseline", 0, 0.8)
            config = with_settings(RunConfig.from_json(json.loads((run / "config.json").read_text())), [setting])
            (run / "config.json").write_text(json.dumps(replace(config, recipe=recipe).to_json()))
            names.add(keep_run(run, tmp_path / "results").name)
    assert len(names) == 8
    kept = next(run for run in stored_runs(tmp_path / "results") if re.match("own-.*=0.3", run.folder.name))
    assert "offramp train own.toml " in train_command([kept]) and "--set train.learning_rate=0.3" in train_command(
        [kept]
    )


def test_a_kept_run_is_not_replaced_by_another(results: Path, tmp_path: Path) -> None:
    kept = next(results.glob("1-main/digits-learned*seed=0"))
    table = json.loads((kept / "config.json").read_text())
    table["train"]["epochs"] += 1
    (kept / "config.json").write_text(json.dumps(table))
    write_run(tmp_path / "again", "digits-learned", 0, 0.8)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        keep_run(tmp_path / "again", results / "1-main")


def test_how_often_things_are_saved_decides_nothing() -> None:
    first = load_recipe("digits-baseline").config
    often = with_settings(first, ["train.eval_every=7", "train.save_seconds=1", "seed=3", "data.dir=elsewhere"])
    assert decisive(often) == decisive(first) and same_but_for_weighting(often, load_recipe("digits-learned").config)
    assert decisive(with_settings(first, ["train.epochs=3"])) != decisive(first)


def test_cost_is_in_baseline_epochs(results: Path, tmp_path: Path) -> None:
    learned = with_settings(load_recipe("digits-learned").config, ["train.epochs=30"])
    ratios = {"exact": 3.0, "delayed": 2.5}
    assert (
        baseline_epochs(load_recipe("digits-baseline").config, {}) == load_recipe("digits-baseline").config.train.epochs
    )
    assert baseline_epochs(learned, {}) is None and baseline_epochs(learned, ratios) == 90
    assert baseline_epochs(with_settings(learned, ["weighting.interval=4"]), ratios) == 45
    assert baseline_epochs(with_settings(learned, ["weighting.order=delayed"]), ratios) == 75
    assert baseline_epochs(with_settings(learned, ["weighting.interval=4", "weighting.until=0.5"]), ratios) == 37.5
    assert baseline_epochs(with_settings(learned, ["weighting.since=0.5", "weighting.until=0.75"]), ratios) == 45
    imta = with_settings(learned, ["imta.collaboration=true", "weighting.interval=4"])
    assert baseline_epochs(imta, ratios) is None and baseline_epochs(imta, {**ratios, "second": 0.5}) is None
    second = {**ratios, "second": 0.5, "second_exact": 1.5}
    assert baseline_epochs(imta, second) == 45 + 30 * 0.75
    assert baseline_epochs(with_settings(imta, ["weighting.name=uniform"]), second) == 45
    spent = stored_runs(results)[-1].config.train.epochs * 3
    for split, words in (("test", f"A run costs {spent} baseline epochs"), ("calibration", f"| {spent} |")):
        about = f'{ABOUT}split = "{split}"\n[ratios]\nexact = 3.0\n'
        (results / "1-main/section.toml").write_text(about)
        assert words in write_page(results, tmp_path / "page.md").read_text()


def test_a_teacher_costs_too() -> None:
    taught = with_settings(load_recipe("digits-baseline").config, ["objective.options.source=teacher"])
    epochs = taught.train.epochs
    assert baseline_epochs(taught, {}) is None and baseline_epochs(taught, {"teacher": 1.5}) == 1.5 * epochs


def test_conventional_training_of_equal_cost_stands_beside(results: Path, tmp_path: Path) -> None:
    """Twice the epochs, where a learned epoch takes two: its gain is told apart from that of mere training."""
    for run in sorted(results.glob("1-main/digits-baseline*")):
        other = run.with_name(run.name.replace("-seed", "-epochs=10-seed"))
        shutil.copytree(run, other)
        table = json.loads((other / "config.json").read_text())
        table["train"]["epochs"] *= 2
        (other / "config.json").write_text(json.dumps(table))
    epochs = 2 * load_recipe("digits-baseline").config.train.epochs
    name = f"minus baseline of {epochs} epochs, which cost as much"
    for ratio, there in ((2.0, True), (2.5, False)):
        (results / "1-main/section.toml").write_text(f"{ABOUT}[ratios]\nexact = {ratio}\n")
        page = write_page(results, tmp_path / "page.md").read_text()
        assert (name in page) == there and "learned weights, msdnet-tiny" in page
    assert page.count("minus baseline, 2 seeds") == 1


def test_mistakes_are_sentences(results: Path, tmp_path: Path) -> None:
    kept = next(results.glob("1-main/digits-learned*"))
    shutil.copytree(kept, results / "2-other" / kept.name)
    for words, text in (("has no section.toml", None), ("cannot be used", "title = 1"), ("holds no results", ABOUT)):
        if text:
            (results / "2-other/section.toml").write_text(text)
            shutil.rmtree(results / "2-other" / kept.name, ignore_errors=True)
        with pytest.raises(ValueError, match=words):
            write_page(results, tmp_path / "page.md")
    for words, text in (
        ("split must be test or calibration", ABOUT + "split = 'train'\n"),
        ("key 'besides' is unknown; did you mean 'beside'", ABOUT + "besides = []\n"),
        ("budgets must list millions of mul-adds", ABOUT.replace("[2, 4]", "'2'")),
        ("shown must list millions of mul-adds", ABOUT + "shown = 3\n"),
    ):
        (results / "2-other/section.toml").write_text(text)
        with pytest.raises(ValueError, match=words):
            write_page(results, tmp_path / "page.md")
    with pytest.raises(ValueError, match="holds no sections"):
        write_page(tmp_path / "nowhere", tmp_path / "page.md")
    for name, text in (
        ("weights.json", {"spread": 1}),
        ("weights.json", []),
        ("environment.json", []),
        ("curves.json", {"curves": {"q": 1}}),
    ):
        broken = next(results.rglob(name))
        before = broken.read_text()
        broken.write_text(json.dumps(text))
        with pytest.raises(ValueError, match="is not what was kept"):
            read_stored(broken.parent)
        broken.write_text(before)


PAGES = """
intro = "What was measured."

[[page]]
name = "main"
title = "The main question"
answer = "It depends."
sections = ["1-main"]

[[page]]
name = "elsewhere"
title = "Written otherwise"
answer = "By a script."

[frontier]
title = "Everybody"
text = "On digits."
budgets = [2, 4, 900]
to_beat = [50.0, 60.0, 70.0]

[[frontier.published]]
who = "Somebody"
how = "a paper"
points = [[2, 50.0], [3, 55.0]]

[[frontier.ours]]
who = "learned"
runs = "1-main/digits-learned*"
"""


def test_several_pages_have_a_short_one_before_them(results: Path, tmp_path: Path) -> None:
    (results / "pages.toml").write_text(PAGES)
    (results / "notes").mkdir()  # holds no runs, so it is no section
    out = tmp_path / "docs/results.md"
    first = write_page(results, out).read_text()
    assert "What was measured." in first and "[The main question](results/main.md). It depends." in first
    assert "(results/elsewhere.md)" in first and not (tmp_path / "docs/results/elsewhere.md").exists()
    runs = [run for run in stored_runs(results) if run.config.weighting.name == "learned"]
    at = [100 * run.curves["searched"].at([4e6])[0] for run in runs]
    row = next(line for line in first.splitlines() if line.startswith("| learned | 2 seeds"))
    assert f"{np.mean(at):.1f} ±" in row and row.endswith("|  |")  # no number far beyond the network
    assert "| Somebody | a paper | 50.0 |  |  |" in first and (tmp_path / "docs/results/frontier.png").is_file()
    page = (tmp_path / "docs/results/main.md").read_text()
    assert page.startswith("# The main question") and "](1-main.png)" in page and "Digits." in page
    every = (tmp_path / "docs/results/all-runs.md").read_text()
    assert all(" ".join(f"{100 * s.top1:.2f}" for s in run.metrics) in every for run in runs)
    for change, sentence in (
        (('runs = "1-main/digits-learned*"', 'runs = "2-none/*"'), "no evaluated run matches"),
        (('intro = "What was measured."', ""), "cannot be used: 'intro'"),
        (("1-main/digits-learned*", "1-main/digits-*"), r"calibrate HELD --out RUN/policy\.json"),
    ):
        if "HELD" in sentence:
            write_run(tmp_path / "whole", "digits-learned", calibration=0)
            keep_run(tmp_path / "whole", results / "1-main")
        (results / "pages.toml").write_text(PAGES.replace(*change))
        with pytest.raises(ValueError, match=sentence):
            write_page(results, out)
