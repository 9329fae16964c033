"""One page about all kept runs: `results/<section>/` becomes a section with tables, a picture and the commands.

A section's `section.toml` has its title, its text, the split its numbers come from (`test`, or `calibration` for what
was tuned), its budgets in millions of mul-adds, `beside`, patterns of run folders in other sections to compare with,
and under `[ratios]` what a step with learned weights costs beside a conventional one, for each order (see price.py).
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from offramp.config import RunConfig, WeightingConfig
from offramp.console import millions
from offramp.files import write_bytes
from offramp.recipe import list_recipes, load_recipe
from offramp.report.drawing import Panels, save
from offramp.report.figures import FEW, draw_accuracy, marks_of_accuracy
from offramp.report.gather import COLOURS, Group, RunData, by_configuration, method_label, paper_top1
from offramp.report.history import weights_by_epoch
from offramp.results.claim import Difference, all_else, differences, pairs, shared_seeds, verdict
from offramp.results.price import baseline_epochs
from offramp.results.store import OF_WEIGHTS, StoredRun, read_stored, stored_name, stored_runs
from offramp.runs import CONFIG
from offramp.tables import to_markdown, with_spread

SECTION = "section.toml"
Groups = list[list[StoredRun]]


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    folder: Path
    title: str
    text: str
    split: str
    budgets: tuple[float, ...]
    ratios: dict[str, float]
    groups: Groups

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def own(self) -> Groups:
        """Groups without the runs that are only shown beside."""
        found = ([run for run in group if self.owns(run)] for group in self.groups)
        return [group for group in found if group]

    def owns(self, run: StoredRun) -> bool:
        return run.folder.is_relative_to(self.folder)

    @property
    def tested(self) -> Groups:
        """Groups of runs whose evaluation was kept."""
        found = ([run for run in group if run.metrics] for group in self.groups)
        return [group for group in found if group]


def read_section(folder: Path) -> Section:
    path = folder / SECTION
    if not path.is_file():
        raise ValueError(f"{folder} has no {SECTION}, which says what its results are about")
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
        title, text = str(about["title"]), str(about["text"]).strip()
        budgets = tuple(1e6 * float(b) for b in about.get("budgets", ()))
        ratios = {str(order): float(ratio) for order, ratio in about.get("ratios", {}).items()}
        beside = _patterns(about.get("beside", []))
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    split = about.get("split", "test")
    if split not in ("test", "calibration"):
        raise ValueError(f"{path}: split must be test or calibration, got {split!r}")
    runs = stored_runs(folder) + [run for pattern in beside for run in _matching(folder.parent, pattern)]
    found = cast(Groups, by_configuration(cast(Any, runs)))
    found.sort(key=_place)
    return Section(folder, title, text, split, budgets, ratios, found)


def _patterns(given: Any) -> list[str]:
    fit = isinstance(given, list) and all(isinstance(p, str) and p and not Path(p).is_absolute() for p in given)
    if not fit:
        raise ValueError(f"beside must list patterns such as '1-main/*-seed=0', got {given!r}")
    return list(given)


def _place(group: Sequence[StoredRun]) -> tuple[str, bool, int]:
    """By network; conventional training first, then what changes less of its recipe's weighting."""
    first = group[0]
    changed = sum(key.startswith("weighting.") for key in first.changes)
    return first.config.model.name, first.config.weighting.name != "uniform", changed


def _matching(results: Path, pattern: str) -> list[StoredRun]:
    found = [read_stored(path) for path in sorted(results.glob(pattern)) if (path / CONFIG).is_file()]
    if not found:
        raise ValueError(f"{results} holds no run that {pattern!r} matches")
    return found


def write_page(results: Path, out: Path) -> Path:
    """Write the page and, beside it in a folder of its name, its pictures."""
    folders = sorted(p for p in results.iterdir() if p.is_dir()) if results.is_dir() else []
    if not folders:
        raise ValueError(f"{results} holds no sections")
    sections = [read_section(folder) for folder in folders]
    intro = (
        f"# Results\n\nWritten by `offramp results page {results.name} --out {out.parent.name}/{out.name}` from what "
        f"is kept of each run in `{results.name}/`: settings, log, evaluation summary and budgeted curves. Accuracies "
        "are top-1 in %; settings of the weighting are named where they are not the paper's for CIFAR; ± is one "
        "standard deviation over seeds, in differences one standard error. Thresholds of budgeted numbers come from "
        "the calibration split by the paper's rule; where a curve of such policies ends below a budget, its end "
        "counts. Runs share a GPU, so what training costs is not read off their clocks: *baseline epochs* follow from "
        "how many steps train the weight net, and from the measured ratio of such a step to a conventional one; what a "
        "hundred of them bring is the gain over all that were spent.\n"
    )
    parts = [intro, *(_section(section, out) for section in sections), _all_runs(sections)]
    write_bytes(out, "\n".join(parts).encode())
    return out


def _section(section: Section, out: Path) -> str:
    parts = [f"## {section.title}\n\n{section.text}\n"]
    if section.split == "calibration" or not section.tested:
        parts.append(_tuned(section))
    else:
        parts.append(_anytime(section.tested))
        parts.append(_budgeted(section.tested, section.budgets))
        parts.append(_paired(section))
        if len(pairs(section.groups)) > 1:  # what the choice between settings may look at
            parts.append(_tuned(section))
        parts.append(_last_epoch(section.groups))
        parts += [_movement(group, section.name, at, out) for at, group in enumerate(section.own, 1)]
        parts.append(_picture(section, out))
    parts.append("To repeat:\n\n" + "".join(f"    {command(group)}\n" for group in section.own))
    return "\n".join(part for part in parts if part)


def label(group: Sequence[StoredRun]) -> str:
    """The method, the network, what was changed in the recipe, and where its weighting is not the paper's."""
    first = group[0]
    changes = {key: value for key, value in first.changes.items() if not key.startswith("weighting.")}
    usual = vars(WeightingConfig(first.config.weighting.name))
    changes |= {key: value for key, value in vars(first.config.weighting).items() if value != usual[key]}
    changed = [
        f"{key.rsplit('.', 1)[-1]}={_word(value)}" for key, value in sorted(changes.items()) if key != "train.epochs"
    ]
    name = f"{method_label(first.config)}, {first.config.model.name}"
    return ", ".join([name, *changed])


def apart(groups: Groups) -> list[str]:
    """Labels for a legend: the method, and of the rest what not all of them share."""
    parts = [label(group).split(", ") for group in groups]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join([method, *(part for part in rest if part not in shared)]) for method, *rest in parts]


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _anytime(groups: Groups) -> str:
    exits = max(len(group[0].metrics) for group in groups)
    rows: list[list[str]] = []
    for group in groups:
        top1 = np.array([[100 * score.top1 for score in run.metrics] for run in group])
        cells = [with_spread(column) for column in top1.T]
        rows.append([label(group), _epochs(group[0].config), str(len(group)), *_filled(cells, exits)])
        paper = _paper(group)
        row = [f"the paper's {method_label(group[0].config)}", *paper[:1], "", *_filled(paper[1:], exits)]
        if paper and row not in rows:
            rows.append(row)
    return to_markdown(["every exit on all test images", "epochs", "seeds", *_numbers(exits)], rows)


def _epochs(config: RunConfig) -> str:
    return str(config.train.epochs) if not config.imta.collaboration else f"2 x {config.train.epochs}"


def _paper(group: Sequence[StoredRun]) -> list[str]:
    """What the paper reports for the recipe, its epochs first; nothing where it reports nothing."""
    config = group[0].config
    reported = paper_top1(config)
    if config.recipe is None or reported is None:
        return []
    return [_epochs(load_recipe(config.recipe).config), *(f"{value:.2f}" for value in reported)]


def _numbers(exits: int) -> list[str]:
    return [f"exit {k}" for k in range(1, exits + 1)]


def _filled(cells: Sequence[str], count: int) -> list[str]:
    return [*cells, *[""] * (count - len(cells))]


def _budgeted(groups: Groups, budgets: Sequence[float]) -> str:
    rows = []
    for group in groups:
        for family, words in (("q", ""), ("searched", ", searched thresholds")):
            curves = [run.curves[family] for run in group if family in run.curves]
            if curves:
                at = np.array([100 * curve.at(budgets) for curve in curves])
                cells = ["–" if np.isnan(column).any() else with_spread(column) for column in at.T]
                rows.append([label(group) + words, *cells])
    return to_markdown(["budgeted", *map(millions, budgets)], rows) if rows and budgets else ""


def _paired(section: Section) -> str:
    """What every weighting brings, seed by seed; beneath, whether the claim holds for those that are learned."""
    compared = [
        (before, after, found)
        for before, after in pairs(section.tested)
        if any(map(section.owns, after)) and (found := differences(before, after, section.budgets))
    ]
    if not compared:
        return ""
    columns = list(dict.fromkeys(d.what for *_, found in compared for d in found))
    rows = [row for pair in compared for row in _difference_rows(*pair, columns)]
    learned = [(after, found) for _, after, found in compared if after[0].config.weighting.name == "learned"]
    verdicts = "".join(f"- {label(after)}: {_verdict(after, found, section)}\n" for after, found in learned)
    return "\n".join(part for part in (to_markdown(["paired by seed", *columns], rows), verdicts) if part)


def _difference_rows(
    before: Sequence[StoredRun], after: Sequence[StoredRun], found: Sequence[Difference], columns: Sequence[str]
) -> list[list[str]]:
    """The mean with its standard error, then every seed; of one seed alone, that."""
    seeds, by_what = shared_seeds(before, after), {d.what: d for d in found}
    kept = [by_what.get(what) for what in columns]
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    name = f"{label(after)} minus {method_label(before[0].config)}, {count}"
    rows = [[name, *("–" if d is None else str(d) for d in kept)]]
    if len(seeds) > 1:
        rows += [
            [f"seed {seed}", *("–" if d is None else f"{d.points[at]:+.2f}" for d in kept)]
            for at, seed in enumerate(seeds)
        ]
    return rows


def _verdict(after: Sequence[StoredRun], found: Sequence[Difference], section: Section) -> str:
    last = next(d for d in reversed(found) if d.what.startswith("exit"))
    spent = baseline_epochs(after[0].config, section.ratios)
    if spent is None:
        return verdict(found)
    brings = f"{100 * last.mean / spent:+.2f} points at the last exit for every hundred of them"
    return f"{verdict(found)} A run costs {spent:.0f} baseline epochs: {brings}."


def _tuned(section: Section) -> str:
    """Settings side by side, on the calibration split alone, with what they cost and what that brings."""
    found = [(group, top1) for group in section.groups if len(top1 := _calibration(group))]
    if not found:
        return ""
    exits = max(top1.shape[1] for _, top1 in found)
    plain = {
        all_else(group[0].config): top1.mean() for group, top1 in found if group[0].config.weighting.name == "uniform"
    }
    rows = []
    for group, top1 in found:
        cells = [with_spread(column) for column in top1.T]
        spent = baseline_epochs(group[0].config, section.ratios)
        before = plain.get(all_else(group[0].config))
        gained = None if before is None or group[0].config.weighting.name == "uniform" else top1.mean() - before
        price = "" if spent is None else f"{spent:.0f}"
        brings = "" if gained is None or spent is None else f"{100 * gained / spent:+.2f}"
        rows.append([label(group), str(len(top1)), *_filled(cells, exits), with_spread(top1.mean(1)), price, brings])
    columns = [
        "on the calibration split",
        "seeds",
        *_numbers(exits),
        "mean",
        "baseline epochs",
        "mean gained per hundred",
    ]
    return to_markdown(columns, rows)


def _last_epoch(groups: Groups) -> str:
    """How training images fared in the end: their loss without weights, and what learned weights did."""
    words = {"mean": "mean weight", "spread": "spread of the weights", "counted": "weighted loss / plain loss"}
    rows = []
    for group in groups:
        found: dict[str, list[Sequence[float]]]
        found = {"training loss": [run.train_loss for run in group if run.train_loss]}
        found |= {words[name]: [run.weights[name] for run in group if name in run.weights] for name in OF_WEIGHTS}
        for what, values in found.items():
            cells = [with_spread(column, 3 if what == "training loss" else 2) for column in np.array(values).T]
            rows += [[label(group), what, str(len(values)), *cells]] if values else []
    width = max(map(len, rows), default=0)
    columns = ["in the last epoch", "", "seeds", *_numbers(width - 3)]
    if not rows:
        return ""
    note = "The training loss is that of the whole epoch, without weights; weights are of some of its samples."
    return to_markdown(columns, [_filled(row, width) for row in rows]) + f"\n{note}\n"


def _calibration(group: Sequence[StoredRun]) -> np.ndarray:
    """Top-1 in % of every exit on the calibration split, a row per seed."""
    return 100 * np.array([run.calibration_top1 for run in group if run.calibration_top1], dtype=np.float64)


def _picture(section: Section, out: Path) -> str:
    drawn = [
        Group(name, COLOURS[at % len(COLOURS)], cast(tuple[RunData, ...], tuple(group)))
        for at, (name, group) in enumerate(zip(apart(section.tested), section.tested, strict=True))
    ]
    panels = Panels(
        section.name, section.title, [partial(draw_accuracy, drawn, "q")], "wide" if len(drawn) <= FEW else "tall"
    )
    save(panels, out.with_suffix(""))
    about = marks_of_accuracy(drawn, "q")
    return f"![Accuracy against mean mul-adds per image]({out.stem}/{section.name}.png)\n\n{about}\n"


def _movement(group: Sequence[StoredRun], section: str, at: int, out: Path) -> str:
    """How weights moved, of the first run that tells."""
    run = next((run for run in group if run.history), group[0])
    panels = weights_by_epoch(run.history, f"{section}-weights-{at}")
    if panels is None:
        return ""
    save(panels, out.with_suffix(""))
    about = f"{panels.caption} Here: {label([run])}, seed {run.config.seed}."
    return f"![Mean weights by epoch]({out.stem}/{panels.name}.png)\n\n{about}\n"


def command(group: Sequence[StoredRun]) -> str:
    """The one command that trains a group again."""
    first = group[0]
    changes = (f"{key}={_word(value)}" for key, value in sorted(first.changes.items()))
    settings = "".join(f" --set {shlex.quote(change)}" for change in changes)
    seeds = ",".join(str(run.config.seed) for run in group)
    data = "" if first.config.data.name == "digits" else " --data-dir DATA"
    recipe = first.config.recipe if first.config.recipe in list_recipes() else f"{first.config.recipe or 'RECIPE'}.toml"
    out = stored_name(first.config).removesuffix(f"-seed={first.config.seed}")
    return f"offramp train {recipe}{data} --out RUNS/{out}{settings} --seeds {seeds}"


def _with_others(together: int) -> str:
    return "" if together < 2 else f" ({together} at once)"


def _all_runs(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        for group in section.own:
            for run in group:
                seconds = "" if run.seconds is None else f"{run.seconds:,.0f}" + _with_others(run.together)
                top1 = " ".join(f"{100 * score.top1:.2f}" for score in run.metrics)
                facts = [str(run.config.seed), _epochs(run.config), run.device, seconds]
                rows.append([section.name, label([run]), *facts, "" if section.split == "calibration" else top1])
    columns = ["section", "run", "seed", "epochs", "device", "seconds", "top-1 of every exit"]
    return "## All runs\n\n" + to_markdown(columns, rows)
