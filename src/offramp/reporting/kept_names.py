"""What kept runs are called on the page, and the command that trains them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from offramp.reporting.gather import method_label
from offramp.reporting.kept_runs import StoredRun, short, stored_name
from offramp.reporting.sections import Groups
from offramp.runs.config import RunConfig, WeightingConfig
from offramp.runs.recipe import list_recipes

FROM_RUN = "weighting.from_run"


def label(group: Sequence[StoredRun]) -> str:
    """The method, the network, what was changed in the recipe, and where its weighting is not the paper's."""
    first = group[0]
    changes = {key: value for key, value in first.changes.items() if not key.startswith("weighting.")}
    usual = vars(WeightingConfig(first.config.weighting.name))
    changes |= {key: value for key, value in vars(first.config.weighting).items() if value != usual[key]}
    if FROM_RUN not in first.changes:  # the recipe's own
        changes.pop("from_run", None)
    changed = [f"{short(key)}={word(value)}" for key, value in sorted(changes.items()) if key != "train.epochs"]
    name = f"{method_label(first.config)}, {first.config.model.name}"
    return ", ".join([name, *changed])


def apart(groups: Groups) -> list[str]:
    """Labels for a legend: the method, and of the rest what not all of them share."""
    parts = [label(group).split(", ") for group in groups]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join([method, *(part for part in rest if part not in shared)]) for method, *rest in parts]


def word(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, list):
        return f"[{','.join(map(word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def epochs(config: RunConfig) -> str:
    return str(config.train.epochs) if not config.imta.collaboration else f"2 x {config.train.epochs}"


def command(group: Sequence[StoredRun]) -> str:
    """The one command that trains a group again."""
    first = group[0]
    frozen = {} if first.config.weighting.from_run is None else {FROM_RUN: "RUN"}  # it lies where its user put it
    changes = (f"{key}={word(value)}" for key, value in sorted({**first.changes, **frozen}.items()))
    settings = "".join(f" --set {shlex.quote(change)}" for change in changes)
    seeds = ",".join(str(run.config.seed) for run in group)
    data = "" if first.config.data.name == "digits" else " --data-dir DATA"
    recipe = first.config.recipe if first.config.recipe in list_recipes() else f"{first.config.recipe or 'RECIPE'}.toml"
    out = stored_name(first.config).removesuffix(f"-seed={first.config.seed}")
    return f"offramp train {recipe}{data} --out RUNS/{out}{settings} --seeds {seeds}"
