"""One page about all kept runs: `results/<section>/` becomes a section with tables, pictures and the commands."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from offramp.common.files import write_bytes
from offramp.common.formatting import to_markdown
from offramp.reporting.claims import pairs
from offramp.reporting.drawing import Panels, save
from offramp.reporting.figures import FEW, draw_accuracy, marks_of_accuracy
from offramp.reporting.groups import COLOURS, Group, RunData
from offramp.reporting.kept_runs import StoredRun, apart, epochs, label, train_command
from offramp.reporting.results_tables import (
    anytime_markdown,
    at_a_glance,
    budgeted_markdown,
    held_out_paired,
    last_epoch,
    paired,
    tuned,
)
from offramp.reporting.sections import Section, read_section
from offramp.reporting.weight_history import weights_by_epoch


def write_page(results: Path, out: Path) -> Path:
    """Write the page and, beside it in a folder of its name, its pictures."""
    folders = sorted(p for p in results.iterdir() if p.is_dir()) if results.is_dir() else []
    if not folders:
        raise ValueError(f"{results} holds no sections")
    sections = [read_section(folder) for folder in folders]
    command_line = f"offramp results page {results.name} --out {Path(out.parent.name) / out.name}"
    intro = (
        f"# Results\n\nWritten by `{command_line}` from what is kept of each run in `{results.name}/`: settings, log, "
        "evaluation summary and budgeted curves. Accuracies are top-1 in %; settings of the weighting are named where "
        "they are not the paper's for CIFAR; ± is one standard deviation over seeds, in differences one standard "
        "error. Thresholds of budgeted numbers come from the calibration split by the paper's rule; where a curve of "
        "such policies ends below a budget, its end counts. Runs share a GPU, so what training costs is not read off "
        "their clocks: *baseline epochs* follow from how many steps train the weight net, and from the measured ratio "
        "of such a step to a conventional one; what a hundred of them bring is the gain over all that were spent.\n"
    )
    parts = [intro, at_a_glance(sections), *(_section(section, out) for section in sections), _all_runs(sections)]
    page = "\n".join(part for part in parts if part)
    write_bytes(out, page.encode())
    _forget(sections, page, out.with_suffix(""))
    return out


def _forget(sections: Sequence[Section], page: str, pictures: Path) -> None:
    """Remove pictures of these sections that an earlier page had and this one does not show."""
    for section in sections:
        for picture in pictures.glob(f"{glob.escape(section.name)}-weights-*"):
            if f"{picture.stem}.png" not in page:
                picture.unlink()


def _section(section: Section, out: Path) -> str:
    parts = [f"## {section.title}\n\n{section.text}\n"]
    if section.split == "calibration" or not section.tested:
        parts.append(tuned(section))
    else:
        parts.append(_picture(section, out))
        parts.append(anytime_markdown(section.tested))
        parts.append(budgeted_markdown(section.tested, section.every_budget))
        parts.append(paired(section))
        if len(pairs(section.groups)) > 1:  # what the choice between settings may look at
            parts.append(tuned(section))
        parts.append(held_out_paired(section))
        parts.append(last_epoch(section.groups))
        parts += [_movement(group, section.name, at, out) for at, group in enumerate(section.own, 1)]
    parts.append("To repeat:\n\n" + "".join(f"    {train_command(group)}\n" for group in section.own))
    return "\n".join(part for part in parts if part)


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


def _with_others(together: int) -> str:
    return "" if together < 2 else f" ({together} at once)"


def _all_runs(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        for group in section.own:
            for run in group:
                seconds = "" if run.seconds is None else f"{run.seconds:,.0f}" + _with_others(run.together)
                top1 = " ".join(f"{100 * score.top1:.2f}" for score in run.metrics)
                facts = [str(run.config.seed), epochs(run.config), run.device, seconds]
                rows.append([section.name, label([run]), *facts, "" if section.split == "calibration" else top1])
    columns = ["section", "run", "seed", "epochs", "device", "seconds", "top-1 of every exit"]
    return "## All runs\n\n" + to_markdown(columns, rows)
