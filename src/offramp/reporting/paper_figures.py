"""`offramp figures`: the paper's figures, drawn from whatever run folders exist.

Each figure is a list of recipes; runs are found below the given folders and matched by the recipe they were trained
with, if network, data and weighting are still the recipe's. A recipe without a run is left out of its figure and named.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from offramp.reporting.drawing import Panels, save
from offramp.reporting.figures import draw_accuracy
from offramp.reporting.groups import COLOURS, PLAIN, Group, RunData, by_configuration, find_runs, read_run
from offramp.runs.config import WeightingConfig
from offramp.runs.folder import read_config
from offramp.runs.recipe import list_recipes, recipe_of

log = logging.getLogger("offramp")

# name -> panels, each a title and {recipe: label}
FIGURES: dict[str, dict[str, dict[str, str]]] = {
    "ablations": {
        "weighting": {
            "cifar100-msdnet5-baseline": "baseline",
            "cifar100-msdnet5-learned-paper": "learned",
            "ablation-selection": "selection",
            "ablation-ascending": "ascending",
            "ablation-descending": "descending",
            "ablation-frozen": "frozen",
        },
        "meta objective": {
            "cifar100-msdnet5-baseline": "baseline",
            "cifar100-msdnet5-learned-paper": "allocated samples",
            "ablation-whole-objective": "all samples",
        },
        "weight net's input": {
            "cifar100-msdnet5-learned-paper": "loss",
            "ablation-input-confidence": "confidence",
            "ablation-input-both": "both",
        },
        "weight net's size": {
            "cifar100-msdnet5-learned-paper": "1 x 500",
            "ablation-net-d1-w10": "1 x 10",
            "ablation-net-d1-w100": "1 x 100",
            "ablation-net-d1-w1000": "1 x 1000",
            "ablation-net-d2-w500": "2 x 500",
            "ablation-net-d4-w500": "4 x 500",
        },
    },
    "cifar": {
        f"CIFAR-{classes}": {
            f"cifar{classes}-msdnet5-baseline": "5 exits, baseline",
            f"cifar{classes}-msdnet5-{learned}": "5 exits, learned",
            f"cifar{classes}-msdnet7-baseline": "7 exits, baseline",
            f"cifar{classes}-msdnet7-learned": "7 exits, learned",
        }
        for classes, learned in ((10, "learned"), (100, "learned-paper"))
    },
    "imta": {
        "IMTA, 7 exits, CIFAR-100": {
            "cifar100-msdnet7-baseline": "baseline",
            "cifar100-msdnet7-learned": "learned",
            "cifar100-msdnet7-imta": "IMTA",
            "cifar100-msdnet7-learned-imta": "learned + IMTA",
        }
    },
    "ranet": {
        "RANet, CIFAR-100": {
            f"cifar100-ranet-c{size}-{method}": f"C-{size}, {method}"
            for size in (1, 2)
            for method in ("baseline", "learned")
        }
    },
    "long-tail": {
        f"imbalance {factor}": {f"cifar100-lt{factor}-{method}": method for method in ("baseline", "learned")}
        for factor in (200, 100, 50, 20)
    },
    "imagenet": {
        "ImageNet": {
            f"imagenet-msdnet-s{step}-{method}": f"step {step}, {method}"
            for step in (4, 6, 7)
            for method in ("baseline", "learned")
        }
    },
}


@dataclass(frozen=True)
class Drawn:
    """The figures that were written, and the recipes that had no run, by figure."""

    files: list[Path]
    missing: dict[str, list[str]]


def write_figures(paths: Sequence[str | Path], out: str | Path) -> Drawn:
    """Draw every figure that has at least one run."""
    wanted = {recipe for panels in FIGURES.values() for recipes in panels.values() for recipe in recipes}
    runs: dict[str, list[RunData]] = {}
    for folder in find_runs(paths):
        recipe = _followed(folder)
        if recipe in wanted:
            runs.setdefault(recipe, []).append(read_run(folder, PLAIN, False))
    if not runs:
        raise ValueError("none of these runs was trained with a recipe of the paper's figures; see: offramp recipes")
    files, missing = [], {}
    for name, panels in FIGURES.items():
        draws = [partial(_panel, title, groups) for title, r in panels.items() if (groups := _groups(r, runs))]
        if draws:
            missing[name] = sorted({recipe for recipes in panels.values() for recipe in recipes} - set(runs))
            files += save(Panels(name, name, draws), Path(out))
    return Drawn(files, missing)


def _followed(folder: Path) -> str:
    """The recipe that a run was trained with, if nothing of what a figure is about was changed in it."""
    config = read_config(folder)
    recipe = recipe_of(config)
    if recipe is not None and _without_source(recipe.config.weighting) == _without_source(config.weighting):
        return recipe.name
    if config.recipe in list_recipes():
        log.warning("passed over, network, data or weighting are no longer those of %s: %s", config.recipe, folder)
    return ""


def _without_source(weighting: WeightingConfig) -> dict[str, Any]:
    """The settings of a weighting; where a frozen weight net came from is no setting of the method."""
    return {key: value for key, value in asdict(weighting).items() if key != "from_run"}


def _groups(recipes: dict[str, str], runs: dict[str, list[RunData]]) -> list[Group]:
    """One group per recipe that has runs; a recipe keeps its colour whatever else is there."""
    return [
        Group(label, COLOURS[at % len(COLOURS)], _alike(runs[recipe]))
        for at, (recipe, label) in enumerate(recipes.items())
        if recipe in runs
    ]


def _alike(runs: list[RunData]) -> tuple[RunData, ...]:
    """Seeds of one configuration: of several, the one trained longest, then the one with most seeds."""
    groups = sorted(by_configuration(runs), key=lambda group: (group[0].config.train.epochs, len(group)))
    return tuple(groups[-1])


def _panel(title: str, groups: Sequence[Group], axes: Axes) -> None:
    draw_accuracy(groups, "q", axes)
    axes.set_title(title)
