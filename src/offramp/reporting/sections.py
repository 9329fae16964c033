"""A section of the results page: a folder of kept runs and what its `section.toml` says of them.

That is its title, its text, the split its numbers come from (`test`, or `calibration` for what was tuned), its
`budgets` in millions of mul-adds and those that are `shown` besides, which the claim is not put to; `beside`, patterns
of run folders in other sections to compare with, and under `[ratios]` what a step with learned weights costs beside a
conventional one, for each order (see price.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offramp.common.names import unknown
from offramp.reporting.groups import by_configuration
from offramp.reporting.kept_runs import StoredRun, read_stored, stored_runs
from offramp.runs.folder import CONFIG

SECTION = "section.toml"
KEYS = {"title", "text", "split", "budgets", "shown", "beside", "ratios"}
Groups = list[list[StoredRun]]


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    folder: Path
    title: str
    text: str
    split: str
    budgets: tuple[float, ...]
    shown: tuple[float, ...]
    ratios: dict[str, float]
    groups: Groups

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def every_budget(self) -> list[float]:
        return sorted({*self.budgets, *self.shown})

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


def holds_runs(folder: Path) -> bool:
    """Whether a folder holds kept runs, so that it is a section, or should be one."""
    return folder.is_dir() and any(folder.glob(f"*/{CONFIG}"))


def read_section(folder: Path) -> Section:
    path = folder / SECTION
    if not path.is_file():
        raise ValueError(f'{folder} has no {SECTION}, which says what it is about: title = "..." and text = "..."')
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
        title, text = str(about["title"]), str(about["text"]).strip()
        budgets, shown = (_budgets(about.get(key, []), key) for key in ("budgets", "shown"))
        ratios = {str(order): float(ratio) for order, ratio in about.get("ratios", {}).items()}
        beside = _patterns(about.get("beside", []))
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    for key in sorted(about.keys() - KEYS):
        raise ValueError(f"{path}: {unknown('key', key, sorted(KEYS))}")
    split = about.get("split", "test")
    if split not in ("test", "calibration"):
        raise ValueError(f"{path}: split must be test or calibration, got {split!r}")
    runs = stored_runs(folder) + [run for pattern in beside for run in _matching(folder.parent, pattern)]
    found = cast(Groups, by_configuration(cast(Any, runs)))
    found.sort(key=_place)
    return Section(folder, title, text, split, budgets, shown, ratios, found)


def _budgets(given: Any, key: str) -> tuple[float, ...]:
    if not (isinstance(given, list) and all(isinstance(b, (int, float)) for b in given)):
        raise ValueError(f"{key} must list millions of mul-adds such as 8 or 25, got {given!r}")
    return tuple(1e6 * b for b in given)


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
