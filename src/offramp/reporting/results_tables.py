"""The tables of a section: every exit, budgets, differences by seed, what was tuned, the last epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.common.formatting import millions, to_markdown, with_spread
from offramp.reporting.claims import (
    Difference,
    against,
    differences,
    held_out_differences,
    of_equal_cost,
    one_change,
    pairs,
    shared_seeds,
    verdict,
)
from offramp.reporting.groups import method_label, paper_top1
from offramp.reporting.kept_runs import OF_WEIGHTS, StoredRun, baseline_epochs, epochs, label, word
from offramp.reporting.sections import Groups, Section
from offramp.runs.config import all_but_weighting
from offramp.runs.recipe import load_recipe


def anytime_markdown(groups: Groups) -> str:
    exits = max(len(group[0].metrics) for group in groups)
    rows: list[list[str]] = []
    for group in groups:
        top1 = np.array([[100 * score.top1 for score in run.metrics] for run in group])
        cells = [with_spread(column) for column in top1.T]
        rows.append([label(group), epochs(group[0].config), str(len(group)), *_filled(cells, exits)])
        paper = _paper(group)
        row = [f"the paper's {method_label(group[0].config)}", *paper[:1], "", *_filled(paper[1:], exits)]
        if paper and row not in rows:
            rows.append(row)
    return to_markdown(["every exit on all test images", "epochs", "seeds", *_numbers(exits)], rows)


def _paper(group: Sequence[StoredRun]) -> list[str]:
    """What the paper reports for the recipe, its epochs first; nothing where it reports nothing."""
    config = group[0].config
    reported = paper_top1(config)
    if config.recipe is None or reported is None:
        return []
    return [epochs(load_recipe(config.recipe).config), *(f"{value:.2f}" for value in reported)]


def _numbers(exits: int) -> list[str]:
    return [f"exit {k}" for k in range(1, exits + 1)]


def _filled(cells: Sequence[str], count: int) -> list[str]:
    return [*cells, *[""] * (count - len(cells))]


def budgeted_markdown(groups: Groups, budgets: Sequence[float]) -> str:
    rows = []
    for group in groups:
        for family, words in (("q", ""), ("searched", ", searched thresholds")):
            curves = [run.curves[family] for run in group if family in run.curves]
            if curves:
                at = np.array([100 * curve.at(budgets) for curve in curves])
                cells = ["–" if np.isnan(column).any() else with_spread(column) for column in at.T]
                rows.append([label(group) + words, *cells])
    return to_markdown(["budgeted", *map(millions, budgets)], rows) if rows and budgets else ""


def at_a_glance(sections: Sequence[Section]) -> str:
    """What every weighting brings at both ends of the network, and what it costs, in one table."""
    rows = []
    for section in sections:
        for before, after, found in _compared(section) if section.split == "test" else []:
            exits = [d for d in found if d.what.startswith("exit")]
            spent = baseline_epochs(after[0].config, section.ratios)
            difference = f"{label(after)} minus {against(before, after)}"
            facts = [epochs(after[0].config), str(len(exits[0].points)), str(exits[0]), str(exits[-1])]
            rows.append([section.name, difference, *facts, "" if spent is None else f"{spent:.0f}"])
    columns = ["section", "difference", "epochs", "seeds", "first exit", "last exit", "baseline epochs"]
    return f"## At a glance\n\n{to_markdown(columns, rows)}" if rows else ""


def _compared(section: Section) -> list[tuple[Sequence[StoredRun], Sequence[StoredRun], list[Difference]]]:
    """Conventional training, another weighting that is the section's own, and what that brings."""
    return [
        (before, after, found)
        for before, after in [*pairs(section.tested), *of_equal_cost(section.tested, section.ratios)]
        if any(map(section.owns, after)) and (found := differences(before, after, section.every_budget))
    ]


def paired(section: Section) -> str:
    """What every weighting brings, seed by seed; beneath, whether the claim holds for those that are learned."""
    compared = _compared(section)
    if not compared:
        return ""
    columns = list(dict.fromkeys(d.what for *_, found in compared for d in found))
    rows = [row for pair in compared for row in _difference_rows(*pair, columns)]
    learned = [pair for pair in compared if pair[1][0].config.weighting.name == "learned"]
    verdicts = "".join(_verdict_line(*pair, section) for pair in learned)
    return "\n".join(part for part in (to_markdown(["paired by seed", *columns], rows), verdicts) if part)


def held_out_paired(section: Section) -> str:
    """What weightings bring on the calibration split, and what one change of the learned ones brings, if seeds tell."""
    compared = [
        (before, after, against(before, after))
        for before, after in [*pairs(section.groups), *of_equal_cost(section.groups, section.ratios)]
        if any(map(section.owns, after))
    ]
    compared += [
        (before, after, f"{key}={word(vars(before[0].config.weighting)[key])}")
        for before, after, key in one_change(section.groups)
        if any(map(section.owns, [*before, *after])) and len(shared_seeds(before, after)) > 1
    ]
    rows = []
    for before, after, name in compared:
        if found := held_out_differences(before, after):
            rows.append([f"{label(after)} minus {name}", str(len(found[0].points)), *map(str, found)])
    width = max(map(len, rows), default=0)
    columns = ["paired by seed, calibration split", "seeds", *_numbers(width - 3), "mean"]
    return to_markdown(columns, rows) if rows else ""


def _difference_rows(
    before: Sequence[StoredRun], after: Sequence[StoredRun], found: Sequence[Difference], columns: Sequence[str]
) -> list[list[str]]:
    """The mean with its standard error, then every seed; of one seed alone, that."""
    seeds, by_what = shared_seeds(before, after), {d.what: d for d in found}
    kept = [by_what.get(what) for what in columns]
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    name = f"{label(after)} minus {against(before, after)}, {count}"
    rows = [[name, *("–" if d is None else str(d) for d in kept)]]
    if len(seeds) > 1:
        rows += [
            [f"seed {seed}", *("–" if d is None else f"{d.points[at]:+.2f}" for d in kept)]
            for at, seed in enumerate(seeds)
        ]
    return rows


def _verdict_line(
    before: Sequence[StoredRun], after: Sequence[StoredRun], found: Sequence[Difference], section: Section
) -> str:
    name = label(after)
    if before[0].config.train.epochs != after[0].config.train.epochs:
        name += f" against the {against(before, after)}"
    return f"- {name}: {_verdict(after, found, section)}\n"


def _verdict(after: Sequence[StoredRun], found: Sequence[Difference], section: Section) -> str:
    found = [d for d in found if d.what not in map(millions, section.shown)]
    last = next(d for d in reversed(found) if d.what.startswith("exit"))
    spent = baseline_epochs(after[0].config, section.ratios)
    if spent is None:
        return verdict(found)
    brings = f"{100 * last.mean / spent:+.2f} points at the last exit for every hundred of them"
    return f"{verdict(found)} A run costs {spent:.0f} baseline epochs: {brings}."


def tuned(section: Section) -> str:
    """Settings side by side, on the calibration split alone, with what they cost and what that brings."""
    found = [(group, top1) for group in section.groups if len(top1 := _calibration(group))]
    if not found:
        return ""
    exits = max(top1.shape[1] for _, top1 in found)
    plain = {
        all_but_weighting(group[0].config): top1.mean()
        for group, top1 in found
        if group[0].config.weighting.name == "uniform"
    }
    rows = []
    for group, top1 in found:
        cells = [with_spread(column) for column in top1.T]
        spent = baseline_epochs(group[0].config, section.ratios)
        before = plain.get(all_but_weighting(group[0].config))
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


def last_epoch(groups: Groups) -> str:
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
