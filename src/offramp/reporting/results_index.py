"""The first page of the results: one picture, one table, and a sentence for each of the pages it leads to.

`results/pages.toml` says which: an `intro`; under `[[page]]` a `name`, a `title`, its `answer` and the `sections` that
stand on it (none for a page that is written otherwise); under `[frontier]` the `budgets` in millions of mul-adds with
what is `to_beat` there, and `[[frontier.published]]` and `[[frontier.ours]]`, numbers of others and patterns of kept
runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from offramp.common.formatting import counted, to_markdown, with_spread
from offramp.reporting.drawing import INK, Panels, save
from offramp.reporting.groups import COLOURS
from offramp.reporting.kept_runs import StoredRun
from offramp.reporting.sections import Section

PAGES, FRONTIER, ALL_RUNS = "pages.toml", "frontier", "all-runs"
FAMILY = "searched"  # of policies


@dataclass(frozen=True)
class Pictures:
    """Where pictures go, and what leads there from the page."""

    folder: Path
    prefix: str

    def link(self, name: str) -> str:
        return f"{self.prefix}{name}.png"


@dataclass(frozen=True)
class Page:
    """One question, and the sections that answer it."""

    name: str
    title: str
    answer: str
    sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """What others report: mean mul-adds in millions and top-1 in %."""

    who: str
    how: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Ours:
    """Kept runs of one configuration, by a pattern below the results."""

    who: str
    runs: str


@dataclass(frozen=True)
class Frontier:
    """Everybody's numbers on one data set."""

    title: str
    text: str
    budgets: tuple[float, ...]
    to_beat: tuple[float, ...]
    published: tuple[Published, ...]
    ours: tuple[Ours, ...]


@dataclass(frozen=True)
class Index:
    """The first page."""

    results: Path
    intro: str
    pages: tuple[Page, ...]
    frontier: Frontier | None = field(default=None)

    def first_page(self, sections: Sequence[Section], pictures: Pictures) -> str:
        parts = [f"# Results\n\n{self.intro.strip()}\n"]
        if self.frontier is not None:
            parts.append(_frontier(self.frontier, self.results, sections, pictures))
        prefix = f"{pictures.folder.name}/"
        lines = [f"- [{page.title}]({prefix}{page.name}.md). {page.answer}" for page in self.pages]
        lines.append(
            f"- [All runs]({prefix}{ALL_RUNS}.md), each with its seed, epochs and seconds; how to read the tables."
        )
        parts.append("## The evidence, one page for each question\n\n" + "\n".join(lines) + "\n")
        return "\n".join(parts)


def read_index(results: Path) -> Index | None:
    """What `pages.toml` says, if there is one."""
    path = results / PAGES
    if not path.is_file():
        return None
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        pages = tuple(
            Page(**{**page, "answer": " ".join(page["answer"].split()), "sections": tuple(page.get("sections", ()))})
            for page in given["page"]
        )
        frontier = None if FRONTIER not in given else _read_frontier(given[FRONTIER])
        return Index(results, str(given["intro"]), pages, frontier)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def _read_frontier(given: dict[str, Any]) -> Frontier:
    published = [Published(p["who"], p["how"], tuple(map(tuple, p["points"]))) for p in given["published"]]
    return Frontier(
        given["title"],
        given["text"].strip(),
        tuple(map(float, given["budgets"])),
        tuple(map(float, given["to_beat"])),
        tuple(published),
        tuple(Ours(**own) for own in given["ours"]),
    )


def _frontier(frontier: Frontier, results: Path, sections: Sequence[Section], pictures: Pictures) -> str:
    """The picture and the table of everybody's numbers."""
    known = [run for section in sections for group in section.tested for run in group if section.owns(run)]
    ours = [(own, [run for run in known if run.folder.relative_to(results).match(own.runs)]) for own in frontier.ours]
    for own, runs in ours:
        if not runs:
            raise ValueError(f"{results / PAGES}: no evaluated run matches {own.runs!r}")
        if any(FAMILY not in run.curves for run in runs):
            raise ValueError(
                f"{results / PAGES}: {own.runs!r} matches runs without thresholds; give them some of a run that held "
                "images out: offramp calibrate HELD --out RUN/policy.json"
            )
    save(Panels(FRONTIER, frontier.title, [partial(_draw, frontier, ours)], "wide"), pictures.folder)
    rows = [["to beat", "", *(f"{value:.1f}" for value in frontier.to_beat)]]
    rows += [[one.who, one.how, *_published_cells(one, frontier.budgets)] for one in frontier.published]
    rows += [[own.who, counted(len(runs), "seed"), *_cells(runs, frontier)] for own, runs in ours]
    columns = ["top-1 % at mean mul-adds", "", *(f"{b:g}M" for b in frontier.budgets)]
    table = to_markdown(columns, [row for row in rows if any(row[2:])])  # the picture shows other budgets as well
    return f"## {frontier.title}\n\n{frontier.text}\n\n![{frontier.title}]({pictures.link(FRONTIER)})\n\n{table}"


def _published_cells(one: Published, budgets: Sequence[float]) -> list[str]:
    known = dict(one.points)
    return [f"{known[budget]:.1f}" if budget in known else "" for budget in budgets]


def _cells(runs: Sequence[StoredRun], frontier: Frontier) -> list[str]:
    at = 100 * np.array([run.curves[FAMILY].at([1e6 * b for b in frontier.budgets]) for run in runs])
    most = max(run.costs[-1] for run in runs) / 1e6
    return [
        "" if np.isnan(column).any() or budget > 1.1 * most else with_spread(column, 1)
        for column, budget in zip(at.T, frontier.budgets, strict=True)
    ]


def _draw(frontier: Frontier, ours: Sequence[tuple[Ours, Sequence[StoredRun]]], axes: Axes) -> None:
    for at, one in enumerate(frontier.published):
        costs, top1 = zip(*sorted(one.points), strict=True)
        axes.plot(costs, top1, "s--", color=COLOURS[-1], alpha=0.45 + 0.15 * (at % 3), markersize=5, linewidth=1)
        axes.annotate(
            one.who, (costs[-1], top1[-1]), xytext=(4, -3), textcoords="offset points", fontsize=7.5, color=INK
        )
    for at, (own, runs) in enumerate(ours):
        low, high = max(r.curves[FAMILY].costs[0] for r in runs), min(r.curves[FAMILY].costs[-1] for r in runs)
        grid = np.geomspace(low, high, 80)
        mean = 100 * np.mean([run.curves[FAMILY].at(grid) for run in runs], axis=0)
        axes.plot(grid / 1e6, mean, color=COLOURS[at], label=f"offramp: {own.who}")
    axes.margins(x=0.14)  # room for the names
    axes.set_xlabel("mean mul-adds per image, millions")
    axes.set_ylabel("top-1 on test images, %")
    axes.legend(loc="lower right", fontsize=8)
