"""Pages about all kept runs: `results/<section>/` becomes a section with tables, pictures and the commands.

Without a `pages.toml` (results_index.py) everything stands on one page.
"""

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
from offramp.reporting.results_index import ALL_RUNS, Index, Pictures, read_index
from offramp.reporting.results_tables import (
    anytime_markdown,
    at_a_glance,
    budgeted_markdown,
    held_out_paired,
    last_epoch,
    paired,
    tuned,
)
from offramp.reporting.sections import SECTION, Section, holds_runs, read_section
from offramp.reporting.weight_history import weights_by_epoch

ABOUT = """\
Written by `{command}` from what is kept of each run in `{results}/`: settings, log, evaluation summary and budgeted
curves.

- Accuracies are top-1 in %. ± is one standard deviation over seeds, in differences one standard error.
- Settings of the weighting are named where they are not the paper's for CIFAR.
- Thresholds of budgeted numbers come from the calibration split by the paper's rule; those of runs on all images, from
  a run of the same recipe that held some out. Where a curve of such policies ends below a budget, its end counts.
- Runs share a GPU, so what training costs is not read off their clocks. *Baseline epochs* follow from how many steps
  train the weight net, and from the measured ratio of such a step to a conventional one; they are epochs of the same
  network with the same updates. What a hundred of them bring is the gain over all that were spent.
"""
HOW_TO_READ = "How to read the tables"


def write_page(results: Path, out: Path) -> Path:
    """Write the page and, beside it in a folder of its name, its pictures; with a `pages.toml`, its other pages too."""
    folders = (
        sorted(p for p in results.iterdir() if (p / SECTION).is_file() or holds_runs(p)) if results.is_dir() else []
    )
    if not folders:
        raise ValueError(f"{results} holds no sections")
    sections = [read_section(folder) for folder in folders]
    command = f"offramp results page {results.name} --out {Path(out.parent.name) / out.name}"
    about, pictures = ABOUT.format(command=command, results=results.name), out.with_suffix("")
    index = read_index(results)
    if index is None:
        parts = [f"# Results\n\n{about}", at_a_glance(sections)]
        parts += [_section(section, Pictures(pictures, f"{out.stem}/")) for section in sections]
        pages = {out: "\n".join(part for part in (*parts, _all_runs(sections)) if part)}
    else:
        pages = _several(index, sections, about, out)
    for path, text in pages.items():
        write_bytes(path, text.encode())
    _forget(sections, "".join(pages.values()), pictures)
    return out


def _several(index: Index, sections: Sequence[Section], about: str, out: Path) -> dict[Path, str]:
    """A short page that leads to others, one for each question."""
    folder, here = out.with_suffix(""), Pictures(out.with_suffix(""), "")
    pages = {out: index.first_page(sections, Pictures(folder, f"{out.stem}/"))}
    how = f"[{HOW_TO_READ}]({ALL_RUNS}.md#{HOW_TO_READ.lower().replace(' ', '-')})."
    for page in index.pages:
        own = [section for section in sections if section.name in page.sections]
        if own:
            parts = [f"# {page.title}\n\n{page.answer}\n\n{how}\n", at_a_glance(own)]
            parts += [_section(section, here) for section in own]
            pages[folder / f"{page.name}.md"] = "\n".join(part for part in parts if part)
    table = _all_runs(sections).partition("\n\n")[2]
    pages[folder / f"{ALL_RUNS}.md"] = f"# All runs\n\n{table}\n## {HOW_TO_READ}\n\n{about}"
    return pages


def _forget(sections: Sequence[Section], page: str, pictures: Path) -> None:
    """Remove pictures of these sections that an earlier page had and this one does not show."""
    for section in sections:
        for picture in pictures.glob(f"{glob.escape(section.name)}-weights-*"):
            if f"{picture.stem}.png" not in page:
                picture.unlink()


def _section(section: Section, pictures: Pictures) -> str:
    parts = [f"## {section.title}\n\n{section.text}\n"]
    if section.split == "calibration" or not section.tested:
        parts.append(tuned(section))
    else:
        parts.append(_picture(section, pictures))
        parts.append(anytime_markdown(section.tested))
        parts.append(budgeted_markdown(section.tested, section.every_budget))
        parts.append(paired(section))
        if len(pairs(section.groups)) > 1:  # what the choice between settings may look at
            parts.append(tuned(section))
        parts.append(held_out_paired(section))
        parts.append(last_epoch(section.groups))
        parts += [_movement(group, section.name, at, pictures) for at, group in enumerate(section.own, 1)]
    parts.append("To repeat:\n\n" + "".join(f"    {train_command(group)}\n" for group in section.own))
    return "\n".join(part for part in parts if part)


def _picture(section: Section, pictures: Pictures) -> str:
    drawn = [
        Group(name, COLOURS[at % len(COLOURS)], cast(tuple[RunData, ...], tuple(group)))
        for at, (name, group) in enumerate(zip(apart(section.tested), section.tested, strict=True))
    ]
    panels = Panels(
        section.name, section.title, [partial(draw_accuracy, drawn, "q")], "wide" if len(drawn) <= FEW else "tall"
    )
    save(panels, pictures.folder)
    about = marks_of_accuracy(drawn, "q")
    return f"![Accuracy against mean mul-adds per image]({pictures.link(section.name)})\n\n{about}\n"


def _movement(group: Sequence[StoredRun], section: str, at: int, pictures: Pictures) -> str:
    """How weights moved, of the first run that tells."""
    run = next((run for run in group if run.history), group[0])
    panels = weights_by_epoch(run.history, f"{section}-weights-{at}")
    if panels is None:
        return ""
    save(panels, pictures.folder)
    about = f"{panels.caption} Here: {label([run])}, seed {run.config.seed}."
    return f"![Mean weights by epoch]({pictures.link(panels.name)})\n\n{about}\n"


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
