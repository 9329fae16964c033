"""`offramp report`: run folders in; the page, its figures as PNG and SVG, its tables as Markdown and CSV out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from offramp.common.files import read_json, write_bytes
from offramp.common.formatting import Table, counted, to_csv, to_markdown
from offramp.reporting import figures
from offramp.reporting import report_tables as tables
from offramp.reporting.drawing import Panels, save
from offramp.reporting.fitted import Fit, drop_sentence, families_chart, families_table, find_fit, tested_table
from offramp.reporting.groups import ELSEWHERE, Group, RunData, gather
from offramp.reporting.headline import leading, weightings
from offramp.reporting.report_page import ReportPage, render
from offramp.reporting.shipped import Shipped, StageTimes, find_shipped, read_times, shown_family
from offramp.reporting.weight_history import weights_by_epoch
from offramp.runs.folder import ENVIRONMENT

NAMES = {
    *("accuracy", "accuracy-ms", "calibration", "families", "overthinking", "training"),
    *("weights", "weights-by-epoch", "weights-selected"),
    *("shipped", "leaving", "confusion", "mistakes", "losing"),
    *("anytime", "budgeted", "budgeted-ms", "difficulty", "trust"),
}  # of all figures and tables there can be


@dataclass(frozen=True)
class Report:
    """What was written, and what it says on top."""

    page: Path
    files: Path
    answer: str


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    budgets: Sequence[float] = (),
    times: str | Path | None = None,
    measure: str | None = None,
    temperature: bool | None = None,
) -> Report:
    """Write `out` (a page that needs nothing else) and, beside it, a folder with its figures and tables.

    Without a measure and a temperature, each run is shown with those of its `policy.json`.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must be an HTML file, for example report.html, got {out}")
    groups = gather(runs, measure, temperature)
    fit = find_fit(run.folder for group in groups for run in group.runs)
    shipped = find_shipped(groups, None if fit is None else fit.chosen_run)
    known = None if times is None else read_times(times, len(groups[0].costs))
    panels = _panels(groups, shipped, known, fit)
    found = _tables(groups, budgets, shipped, known, fit)
    command = _command(runs, out, budgets, times, measure, temperature)
    answer = leading(groups, shipped, known) if fit is None else fit.sentence
    compared = weightings(groups, shown_family(shipped))
    more = [compared] if compared else []
    if fit is not None:
        more += [sentence for sentence in (drop_sentence(fit), *fit.warnings) if sentence]
    page = ReportPage(
        title_of(groups, fit), answer, more, _facts(groups), groups, shipped, known, panels,
        {name: table for name, table in found.items() if name != "confusion"}, _repeat(groups, command),
    )  # fmt: skip
    files = out.with_name(f"{out.stem}-files")
    write_bytes(out, render(page).encode())
    _forget(files, NAMES - {*found, *panels})
    for name, table in found.items():
        _save_table(files, name, table)
    for one in panels.values():
        save(one, files)
    return Report(out, files, " ".join([answer, *([compared] if compared else [])]))


def _command(
    runs: Sequence[str | Path],
    out: Path,
    budgets: Sequence[float],
    times: str | Path | None,
    measure: str | None,
    temperature: bool | None,
) -> str:
    """What writes this report again."""
    words = ["offramp", "report", *map(str, runs), "--out", str(out)]
    words += ["--budgets", ",".join(f"{budget:.15g}" for budget in budgets)] if budgets else []
    words += ["--times", str(times)] if times is not None else []
    words += ["--measure", measure] if measure is not None else []
    told = {True: ["--temperature"], False: ["--no-temperature"], None: []}
    return shlex.join(words + told[temperature])


def _forget(files: Path, names: Iterable[str]) -> None:
    """Remove what an earlier report with other options left beside this one."""
    for name in names:
        for suffix in ("png", "svg", "md", "csv"):
            (files / f"{name}.{suffix}").unlink(missing_ok=True)


def _panels(
    groups: Sequence[Group], shipped: Shipped | None, times: StageTimes | None, fit: Fit | None
) -> dict[str, Panels]:
    learned = next((group for group in groups if _has_learned(group)), None)
    found = [
        None if fit is None else families_chart(fit),
        figures.accuracy_against_cost(groups, shown_family(shipped), shipped),
        None if times is None else figures.accuracy_against_time(groups, times),
        None if learned is None else figures.weight_against_loss(learned),
        None if learned is None else figures.selected_weights(learned),
        None if learned is None else weights_by_epoch(learned.first.history, "weights-by-epoch"),
        figures.reliability_per_exit(groups),
        figures.overthinking_per_exit(groups),
        figures.training_curves(groups),
    ]
    return {panels.name: panels for panels in found if panels is not None}


def _has_learned(group: Group) -> bool:
    return group.first.samples is not None and group.first.config.weighting.name in ("learned", "frozen")


def _tables(
    groups: Sequence[Group],
    budgets: Sequence[float],
    shipped: Shipped | None,
    times: StageTimes | None,
    fit: Fit | None,
) -> dict[str, Table]:
    found: dict[str, Table | None] = {
        "families": None if fit is None else families_table(fit),
        "anytime": tables.anytime(groups, times),
        "trust": tables.trust(groups),
        "overthinking": tables.overthinking_table(groups),
        "difficulty": tables.difficulty(groups),
    }
    if shipped is not None:
        found["shipped"] = (fit and tested_table(fit)) or tables.shipped_table(shipped, times)
        found["leaving"] = tables.leaving_table(shipped, times)
        found["confusion"] = tables.confusion_table(shipped)
        found["mistakes"] = tables.mistakes_table(shipped)
        found["losing"] = tables.losing_table(shipped)
        found["budgeted"] = tables.budgeted(groups, budgets or tables.nice_budgets(groups))
    if shipped is not None and times is not None:
        prices = times.milliseconds
        found["budgeted-ms"] = tables.budgeted(groups, tables.nice_budgets(groups, prices), prices)
    return {name: table for name, table in found.items() if table is not None}


def _save_table(folder: Path, name: str, table: Table) -> None:
    title, columns, rows = table
    write_bytes(folder / f"{name}.md", f"{title}\n\n{to_markdown(columns, rows)}".encode())
    write_bytes(folder / f"{name}.csv", to_csv(columns, rows).encode())


def title_of(groups: Sequence[Group], fit: Fit | None) -> str:
    """The folder that the photos lie in; else the data's name."""
    data = groups[0].first.config.data
    if fit is not None:
        return fit.folder
    return Path(data.dir).name if data.name == "imagefolder" and data.dir and Path(data.dir).name else data.name


def _facts(groups: Sequence[Group]) -> str:
    told = [group for group in groups if len(group.runs) > 1 or group.label != group.first.summary.model]
    counts = [f"{group.label}: {counted(len(group.runs), 'run')}" for group in told]
    samples = groups[0].first.summary.samples
    calibration = f"thresholds from {samples['calibration']:,} calibration images" if "calibration" in samples else ""
    models = " and ".join(dict.fromkeys(group.first.summary.model for group in groups))
    return " · ".join(part for part in (models, *counts, f"{samples['test']:,} test images", calibration) if part)


def _repeat(groups: Sequence[Group], command: str) -> str:
    return f'<div class="card">{"".join(map(_repeat_group, groups))}<pre>{escape(command)}</pre></div>'


def _environment(run: RunData) -> dict[str, Any]:
    path = run.folder / ENVIRONMENT
    known = read_json(path) if path.is_file() else {}
    return known if isinstance(known, dict) else {}


def _repeat_group(group: Group) -> str:
    """The commands of every seed, and the settings and versions of the first."""
    dot = f'<span class="dot" style="background:{group.colour}"></span>'
    if group.first.config.weighting.name == ELSEWHERE:
        return f"<p>{dot}{escape(group.label)}: only evaluated here, in {escape(str(group.first.folder))}</p>"
    commands = []
    for one in group.runs:
        words = _environment(one).get("command")
        commands += [f"offramp {shlex.join(map(str, words))}"] if words else []
        commands.append(f"offramp eval {shlex.quote(str(one.folder))}")
    run = group.first
    seeds = ", ".join(str(r.config.seed) for r in group.runs)
    text = "\n".join(commands)
    rest = {key: value for key, value in _environment(run).items() if key != "command"}
    config = json.dumps(run.config.to_json(), indent=2)
    versions = json.dumps(rest, indent=2)
    return (
        f"<details><summary>{dot}{escape(group.label)}: recipe {escape(str(run.config.recipe))}, seeds {seeds}"
        "</summary>"
        f"<pre>{escape(text)}</pre><pre>{escape(config)}</pre><pre>{escape(versions)}</pre></details>"
    )
