"""What a report is about: evaluated run folders, read once, with everything that is drawn from them.

`gather` reads and measures; runs that differ in nothing but their seed form a group, with mean and spread.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json
from offramp.measuring.calibrate import q_family, searched_family
from offramp.measuring.confidence import Predictions, fit_temperatures
from offramp.measuring.metrics import Curve, ExitMetrics, Overthinking, curve, exit_metrics, overthinking
from offramp.measuring.policy import FAMILIES, Policies, outcome, read_policies
from offramp.reporting.weight_history import History, sample_files, weight_history
from offramp.runs.config import DataConfig, ModelConfig, RunConfig, WeightingConfig, decisive
from offramp.runs.folder import CONFIG, POLICY, holds_run, read_config, read_metrics
from offramp.runs.outputs import EVAL, SUMMARY, EvalSummary, SavedOutputs, read_arrays, read_outputs, read_summary
from offramp.runs.recipe import recipe_of

log = logging.getLogger("offramp")

PLAIN = "max_softmax"  # the confidence measure where nothing else is asked for
BASELINE = "baseline"  # what conventional training is called beside others
ELSEWHERE = "elsewhere"  # stands for the weighting of a network that offramp did not train
COLOURS = ("#2f6fb0", "#d9601a", "#2a8f6d", "#8e4aa8", "#b8860b", "#b03060", "#4f7d1f", "#606c7a")


@dataclass(frozen=True)
class RunData:
    """One evaluated run: its settings, its log, its saved outputs and what they say."""

    folder: Path
    config: RunConfig
    summary: EvalSummary
    log: list[dict[str, Any]]
    test: SavedOutputs
    predictions: Predictions
    policies: Policies | None  # none where training left no calibration split
    chosen: bool = False  # whether these are the policies of its policy.json, one of which ships

    @property
    def costs(self) -> tuple[int, ...]:
        """Mul-adds up to each exit, in the order that its policies count."""
        return self.summary.costs if self.policies is None else self.policies.costs

    @cached_property
    def plain(self) -> Predictions:
        """The predictions with plain max softmax as the confidence, whatever the policies use."""
        return Predictions.of(self.test.logits, self.test.labels)

    @cached_property
    def metrics(self) -> list[ExitMetrics]:
        return exit_metrics(self.test.logits, self.test.labels, self.plain)

    @cached_property
    def overthinking(self) -> Overthinking:
        return overthinking(self.predictions.right)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Accuracy against mul-adds on the test split, by family of policies."""
        return self.curves_by(self.costs)

    def curves_by(self, prices: Sequence[float]) -> dict[str, Curve]:
        """Accuracy against any price per exit."""
        if self.policies is None or len(prices) != len(self.costs):
            return {}
        return {name: curve(self.predictions, self.policies.family(name), prices) for name in ("q", "searched")}

    @cached_property
    def samples(self) -> dict[str, np.ndarray] | None:
        """Those of the last epoch, if the weight net left any."""
        return last_samples(self.folder)

    @cached_property
    def history(self) -> History | None:
        """Mean weights by epoch."""
        return weight_history(self.folder)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration under several seeds."""

    label: str
    colour: str
    runs: tuple[RunData, ...]

    @property
    def first(self) -> RunData:
        return self.runs[0]

    @property
    def costs(self) -> tuple[int, ...]:
        return self.first.costs

    @property
    def paper_top1(self) -> tuple[float, ...] | None:
        return paper_top1(self.first.config)

    def top1(self) -> np.ndarray:
        """Accuracy of every exit on everything, [runs, K]."""
        return np.array([[m.top1 for m in run.metrics] for run in self.runs])

    def curve(self, family: str = "q", prices: Sequence[float] | None = None) -> tuple[np.ndarray, np.ndarray] | None:
        """Budgets that all runs reach, and each run's accuracy at them, [runs, budgets]."""
        every = [run.curves if prices is None else run.curves_by(prices) for run in self.runs]
        found = [curves[family] for curves in every if curves]
        if not found:
            return None
        low, high = max(c.costs[0] for c in found), min(c.costs[-1] for c in found)
        if not low < high:
            return None
        grid = np.geomspace(low, high, 120)
        grid[0], grid[-1] = low, high
        return grid, np.stack([c.at(grid) for c in found])


def last_samples(run: Path) -> dict[str, np.ndarray] | None:
    """Losses, weights and exits of training samples in the last epoch that kept them."""
    files = sample_files(run)
    if not files:
        return None
    names = ("losses", "weights", "exits")
    return dict(zip(names, read_arrays(files[-1], *names), strict=True))


def find_runs(paths: Sequence[str | Path], *, evaluated: bool = True) -> list[Path]:
    """Run folders: those given, and (evaluated) ones anywhere below a given folder that is not a run itself."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder")
        alone = (path / CONFIG).is_file() or (evaluated and (path / EVAL / SUMMARY).is_file())
        inside = [path] if alone else _runs_below(path, evaluated)
        if not inside:
            wanted = "evaluated run; train and evaluate one first" if evaluated else "run; train one first"
            raise ValueError(f"{path} holds no {wanted}")
        found.update({run.resolve(): run for run in inside})
    return list(found.values())


def _runs_below(folder: Path, evaluated: bool) -> list[Path]:
    """Whole runs; where evaluated ones are wanted, the others are named and passed over."""
    runs = [path.parent for path in sorted(folder.rglob(CONFIG)) if _is_whole(path.parent)]
    if not evaluated:
        return runs
    waiting = [run for run in runs if not (run / EVAL / SUMMARY).is_file()]
    for run in waiting:
        log.warning("passed over, it has not been evaluated: %s", run)
    return [run for run in runs if run not in waiting]


def _is_whole(folder: Path) -> bool:
    """Whether this is a run, and neither a mere model nor the first phase of the run around it."""
    return "train" in read_json(folder / CONFIG) and not (folder.parent / CONFIG).is_file()


def read_run(folder: Path, measure: str | None = None, temperature: bool | None = None) -> RunData:
    """Read one run and its policies, searched for where `offramp calibrate` left none that suit.

    Without a measure and a temperature those of its `policy.json` are taken; where there is none, plain max softmax.
    """
    summary = read_summary(folder)
    config = read_config(folder) if holds_run(folder) else trained_elsewhere(folder, summary)
    test = read_outputs(folder, "test")
    policies, known = None, None
    if "calibration" in summary.samples:
        saved = read_outputs(folder, "calibration")
        known = saved_policies(folder, saved, summary, measure, temperature)
        policies = known or searched_policies(saved, summary.costs, measure or PLAIN, bool(temperature))
    elif (folder / POLICY).is_file():
        policies = known = carried_policies(folder, summary, measure, temperature)
    told = (measure or PLAIN, None) if policies is None else (policies.measure, policies.temperatures)
    on_test = Predictions.of(test.logits, test.labels, *told)
    return RunData(folder, config, summary, read_metrics(folder), test, on_test, policies, known is not None)


def trained_elsewhere(folder: Path, summary: EvalSummary) -> RunConfig:
    """What stands for the settings of a network that was only evaluated here: its name, its data, its folder."""
    model, data = ModelConfig(summary.model), DataConfig(summary.data or "data of one's own")
    return RunConfig(model, data, weighting=WeightingConfig(ELSEWHERE), recipe=str(folder))


def saved_policies(
    folder: Path, saved: SavedOutputs, summary: EvalSummary, measure: str | None, temperature: bool | None
) -> Policies | None:
    """What `offramp calibrate` found, if it is what is asked for and was found on this very evaluation."""
    path = folder / POLICY
    if not path.is_file():
        return None
    known = read_policies(path)
    if not (_suits(known, summary, measure, temperature) and all(known.family(name) for name in FAMILIES)):
        return None
    if known.folds is not None:  # of other networks
        return known
    given = Predictions.of(saved.logits, saved.labels, known.measure, known.temperatures)
    for policy in known.policies:
        found = outcome(given, policy.thresholds, known.costs)
        if not np.allclose((found.top1, found.cost), (policy.top1, policy.mul_adds), rtol=1e-6):
            log.warning("%s was found on another evaluation; its policies are searched for again", path)
            return None
    return known


def carried_policies(
    folder: Path, summary: EvalSummary, measure: str | None, temperature: bool | None
) -> Policies | None:
    """What `offramp calibrate OTHER --out RUN/policy.json` gave a run that was trained on all images."""
    known = read_policies(folder / POLICY)
    return known if known.found_on is not None and _suits(known, summary, measure, temperature) else None


def _suits(known: Policies, summary: EvalSummary, measure: str | None, temperature: bool | None) -> bool:
    """Whether policies are of the kind that is asked for, and count costs as this network has them."""
    asked = measure in (None, known.measure) and temperature in (None, known.temperatures is not None)
    return asked and (known.costs == summary.costs or (measure is None and known.costs == summary.lazy_costs))


def searched_policies(saved: SavedOutputs, costs: tuple[int, ...], measure: str, temperature: bool) -> Policies:
    """Both families of policies, found on the calibration split."""
    temperatures = fit_temperatures(saved.logits, saved.labels) if temperature else None
    given = Predictions.of(saved.logits, saved.labels, measure, temperatures)
    found = (*q_family(given, costs), *searched_family(given, costs))
    return Policies(measure, temperatures, costs, found, 0)


def gather(paths: Sequence[str | Path], measure: str | None = None, temperature: bool | None = None) -> list[Group]:
    """Read the runs and put seeds of one configuration together."""
    runs = [read_run(folder, measure, temperature) for folder in find_runs(paths)]
    data = {(run.config.data.name, len(run.test.labels), run.test.logits.shape[-1]) for run in runs}
    if len(data) > 1:
        names = " and ".join(sorted({name for name, _, _ in data}))
        raise ValueError(f"these runs were tested on different data ({names}); make one report for each")
    found = by_configuration(runs)
    found.sort(key=lambda group: group[0].config.weighting.name != "uniform")  # conventional training first
    labels = _labels([group[0] for group in found])
    return [
        Group(label, COLOURS[at % len(COLOURS)], tuple(group))
        for at, (label, group) in enumerate(zip(labels, found, strict=True))
    ]


def by_configuration(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Runs that differ in nothing but their seed, by rising seed; of two with the same seed, the first."""
    found: dict[str, dict[int, RunData]] = {}
    for run in runs:
        seeds = found.setdefault(_without_seed(run.config), {})
        if run.config.seed in seeds:
            log.warning("passed over, it repeats the seed of %s: %s", seeds[run.config.seed].folder, run.folder)
        seeds.setdefault(run.config.seed, run)
    return [[seeds[seed] for seed in sorted(seeds)] for seeds in found.values()]


def _without_seed(config: RunConfig) -> str:
    return json.dumps(decisive(config).to_json(), sort_keys=True)


def _labels(runs: Sequence[RunData]) -> list[str]:
    """Names as short as tells the groups apart: the method, with the model, the recipe or the folder."""
    if len(runs) == 1 and method_label(runs[0].config) == BASELINE:  # there is nothing that it is the baseline of
        return [runs[0].config.model.name]
    ways = [
        [method_label(run.config) for run in runs],
        [f"{method_label(run.config)}, {run.config.model.name}" for run in runs],
        [run.config.recipe or run.folder.name for run in runs],
    ]
    for labels in ways:
        if len(set(labels)) == len(labels):
            return labels
    above = os.path.commonpath([run.folder.parent for run in runs])
    return [os.path.relpath(run.folder, above) for run in runs]


def paper_top1(config: RunConfig) -> tuple[float, ...] | None:
    """What the paper reports for a run's recipe, in %, if network, data and method are still the recipe's."""
    recipe = recipe_of(config)
    return None if recipe is None else recipe.paper_top1


def method_label(config: RunConfig) -> str:
    """How people call the way a run was trained."""
    name = config.weighting.name
    if name == ELSEWHERE:
        return "trained elsewhere"
    weights = BASELINE if name == "uniform" else f"{name} weights"
    if not config.imta.collaboration:
        return weights
    return "IMTA" if name == "uniform" else f"{weights} + IMTA"
