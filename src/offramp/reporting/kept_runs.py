"""What is kept of a run so that its results can be redrawn: settings, log, evaluation, curves; some kilobytes of text.

Weights, logits and where the data lay stay behind. Also here: what a kept run is called, the command that trains it
again, and what its training cost in epochs of conventional training.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json, write_bytes, write_json
from offramp.measuring.metrics import Curve
from offramp.reporting.groups import PLAIN, RunData, last_samples, method_label, read_run
from offramp.reporting.weight_history import History, weight_history
from offramp.runs.config import RunConfig, WeightingConfig, decisive
from offramp.runs.folder import CONFIG, ENVIRONMENT, METRICS, read_config, read_metrics
from offramp.runs.outputs import EVAL, SUMMARY, EvalSummary, ExitScore, read_summary
from offramp.runs.recipe import list_recipes, load_recipe

CURVES = "curves.json"
FROM_RUN = "weighting.from_run"
OF_THE_WAY = ("train.", "objective.", "model.overrides.")  # settings that tell a way of training by
WEIGHTS = "weights.json"
FACTS = ("python", "packages", "device")  # not where things lay on the machine
OF_WEIGHTS = ("mean", "spread", "counted")
WeightsKept = dict[str, tuple[float, ...]]  # some of OF_WEIGHTS, each for every exit


@dataclass(frozen=True)
class StoredRun:
    """A run as it is kept; a figure can draw it as it would the run itself."""

    folder: Path
    config: RunConfig
    summary: EvalSummary | None  # None: only its log was kept
    log: list[dict[str, Any]]
    curves: dict[str, Curve]
    device: str
    weights: WeightsKept = field(default_factory=dict)  # what the learned ones did in the last epoch
    history: History | None = None  # and before

    @property
    def metrics(self) -> tuple[ExitScore, ...]:
        """Every exit on the whole test split; nothing for a run of which only the log was kept."""
        return () if self.summary is None else self.summary.exits["test"]

    @property
    def costs(self) -> tuple[int, ...]:
        """Mul-adds up to each exit; nothing for a run of which only the log was kept."""
        return () if self.summary is None else self.summary.costs

    @property
    def seconds(self) -> float | None:
        """How long training took, evaluations of the calibration split included."""
        return self.log[-1].get("seconds") if self.log else None

    @property
    def together(self) -> int:
        """How many runs shared the device."""
        return self.log[-1].get("together", 1) if self.log else 1

    @property
    def train_loss(self) -> list[float] | None:
        """Every exit's mean loss on training images, without weights, in the last epoch."""
        return self.log[-1].get("train_loss") if self.log else None

    @property
    def calibration_top1(self) -> list[float] | None:
        """Every exit on the calibration split after the last epoch."""
        return self.log[-1].get("calibration_top1") if self.log else None

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Settings in which the run differs from its recipe; only those that decide anything.

        A recipe that did not come with the package is not known here: then they are told from none at all.
        """
        known = self.config.recipe in list_recipes()
        before = load_recipe(self.config.recipe).config if known and self.config.recipe else RunConfig()
        aside = set() if known else {"model.name", "data.name"}
        return {key: value for key, value in _differences(self.config, before).items() if key not in aside}

    @property
    def way(self) -> dict[str, Any]:
        """How training differs from the recipe at the root of those that its recipe extends: settings of the network's
        exits, of the objective and of updates."""
        if self.config.recipe not in list_recipes():
            return {}
        root = load_recipe(load_recipe(self.config.recipe).root or self.config.recipe).config
        changed = _differences(self.config, root)
        return {key: value for key, value in changed.items() if key.startswith(OF_THE_WAY)}


def _differences(config: RunConfig, before: RunConfig) -> dict[str, Any]:
    own, recipe = (_flat(decisive(c).to_json()) for c in (config, before))
    aside = {"model.num_classes", "recipe"}
    return {key: value for key, value in own.items() if recipe.get(key) != value and key not in aside}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


def refuse_twins(runs: Iterable[Path]) -> None:
    """Raise if two of these would be kept under one name: the second would replace the first."""
    known: dict[str, Path] = {}
    for run in runs:
        name = stored_name(_without_place(read_config(run)))
        if name in known:
            raise ValueError(f"{known[name]} and {run} have the same recipe, settings and seed; keep one of them")
        known[name] = run


def _without_place(config: RunConfig) -> RunConfig:
    return replace(config, data=replace(config.data, dir=None))


def keep_run(run: Path, into: Path, *, log_only: bool = False) -> Path:
    """Keep an evaluated run in a folder of its own below `into`; an earlier one of the same name is replaced.

    `log_only`: keep nothing that says how it did on the test split; enough to choose between settings.
    """
    # first, so that a run that cannot be read leaves nothing behind
    data = None if log_only else read_run(run, PLAIN, False)
    log, config = read_metrics(run), read_config(run)
    if not log or log[-1]["epoch"] < config.train.epochs:
        raise ValueError(f"{run} has not finished training; go on with its command and --resume")
    config = _without_place(config)
    target = into / stored_name(config)
    if (target / CONFIG).is_file() and decisive(read_config(target)) != decisive(config):
        raise ValueError(f"{target} holds a run with other settings; keep this one in another folder")
    if log_only and (target / EVAL).exists():
        raise ValueError(f"{target} holds an evaluation, which does not go with another log; remove it first")
    for name in (ENVIRONMENT, WEIGHTS):  # not every run has them; those of an earlier one must not stay
        (target / name).unlink(missing_ok=True)
    write_json(target / CONFIG, config.to_json())
    write_bytes(target / METRICS, (run / METRICS).read_bytes())
    if (run / ENVIRONMENT).is_file():
        known = read_json(run / ENVIRONMENT)
        write_json(target / ENVIRONMENT, {key: known[key] for key in FACTS if key in known})
    if config.weighting.name == "learned":
        _keep_weights(run, target)
    if data is not None:
        _keep_evaluation(data, target)
    return target


def _keep_weights(run: Path, target: Path) -> None:
    samples, history = last_samples(run), weight_history(run)
    if samples is not None and history is not None:
        write_json(target / WEIGHTS, {"schema": 1, **about_weights(samples), "history": history.to_json()})


def _keep_evaluation(data: RunData, target: Path) -> None:
    write_bytes(target / EVAL / SUMMARY, (data.folder / EVAL / SUMMARY).read_bytes())
    curves = {
        family: {"mul_adds": [round(cost) for cost in own.costs], "top1": [round(top1, 6) for top1 in own.top1]}
        for family, own in data.curves.items()
    }
    write_json(target / CURVES, {"schema": 1, "curves": curves})


def about_weights(samples: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """At every exit, over training samples: the weights' mean, their standard deviation, and how the loss counts.

    The last is the weighted loss as a multiple of the plain one: what the exit gains or loses in the sum to minimise.
    """
    weights, losses = (samples[name].astype(np.float64) for name in ("weights", "losses"))
    plain = losses.sum(0)
    counted = np.divide((weights * losses).sum(0), plain, out=np.ones_like(plain), where=plain > 0)
    found = (weights.mean(0), weights.std(0), counted)
    return {name: np.round(values, 4).tolist() for name, values in zip(OF_WEIGHTS, found, strict=True)}


def stored_name(config: RunConfig) -> str:
    """The recipe, what was changed in it, and the seed."""
    run = StoredRun(Path(), config, None, [], {}, "")
    changed = [f"{short(key)}={_plain(value)}" for key, value in sorted(run.changes.items())]
    return "-".join([config.recipe or config.model.name, *changed, f"seed={config.seed}"])


def short(key: str) -> str:
    """The last word of a setting, where no other setting ends in it."""
    last = key.rsplit(".", 1)[-1]
    alike = [other for other in _flat(RunConfig().to_json()) if other.rsplit(".", 1)[-1] == last]
    return last if len(alike) < 2 else key


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_plain, value))
    return "".join(c if c.isalnum() or c in ".+" else "_" for c in str(value))


def read_stored(folder: Path) -> StoredRun:
    """A run that `keep_run` wrote."""
    known, weights = (_read(folder / name) for name in (ENVIRONMENT, WEIGHTS))
    tested = (folder / EVAL).is_dir()
    kept = read_json(folder / CURVES) if tested else {"curves": {}}
    try:
        curves = {name: Curve(tuple(own["mul_adds"]), tuple(own["top1"])) for name, own in kept["curves"].items()}
        found = {name: weights.get(name) for name in OF_WEIGHTS}
        about = {name: tuple(map(float, values)) for name, values in found.items() if values is not None}
        history = History.from_json(weights["history"]) if "history" in weights else None
        device = str(known.get("device", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is not what was kept of a run") from error
    summary = read_summary(folder) if tested else None
    return StoredRun(folder, read_config(folder), summary, read_metrics(folder), curves, device, about, history)


def _read(path: Path) -> Any:
    """What a file holds; nothing where there is none, since not every run has everything."""
    return read_json(path) if path.is_file() else {}


def stored_runs(folder: Path) -> list[StoredRun]:
    """All runs kept below a folder, by name."""
    found = [read_stored(path.parent) for path in sorted(folder.rglob(CONFIG))]
    if not found:
        raise ValueError(f"{folder} holds no results; keep some: offramp results keep RUN --into {folder}")
    return found


def label(group: Sequence[StoredRun]) -> str:
    """The method, the network, what was changed in the recipe, and where its weighting is not the paper's."""
    first = group[0]
    changes = {key: value for key, value in first.changes.items() if not key.startswith("weighting.")} | first.way
    usual = vars(WeightingConfig()) | {"name": first.config.weighting.name}
    changes |= {key: value for key, value in vars(first.config.weighting).items() if value != usual[key]}
    if FROM_RUN not in first.changes:  # the recipe's own
        changes.pop("from_run", None)
    changed = [f"{short(key)}={word(value)}" for key, value in sorted(changes.items()) if key != "train.epochs"]
    name = f"{method_label(first.config)}, {first.config.model.name}"
    return ", ".join([name, *changed])


def apart(groups: Sequence[Sequence[StoredRun]]) -> list[str]:
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
    if config.train.network_epochs:
        return f"{config.train.network_epochs} + {config.train.epochs}"
    return str(config.train.epochs) if not config.imta.collaboration else f"2 x {config.train.epochs}"


def train_command(group: Sequence[StoredRun]) -> str:
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


def baseline_epochs(config: RunConfig, ratios: Mapping[str, float]) -> float | None:
    """How many epochs of conventional training a run took as long as.

    `ratios`: a step that trains the weight net beside a conventional one, by order; `second` and `second_ORDER` are a
    step of IMTA's second phase without and with the weight net (`offramp bench train`); `teacher` is a step beside a
    teacher, whose own training comes on top. Epochs are of the same network with the same updates.
    """
    weighting = config.weighting
    if config.objective.options.get("source") == "teacher" and "teacher" not in ratios:
        return None
    steps = [(1.0, ratios.get(weighting.order))]
    if config.imta.collaboration:
        steps.append((ratios.get("second", nan), ratios.get(f"second_{weighting.order}")))
    if weighting.name != "learned":
        per_epoch = sum(plain for plain, _ in steps)
    else:
        taught = weighting.until - weighting.since
        share = taught / weighting.interval  # of the steps, those that train the weight net
        per_epoch = sum(plain + share * ((nan if learned is None else learned) - plain) for plain, learned in steps)
    if config.objective.options.get("source") == "teacher":
        per_epoch += ratios["teacher"] - 1
    alone = config.train.network_epochs or 0  # the network by itself: at most an epoch of conventional training each
    return None if isnan(per_epoch) else alone + config.train.epochs * per_epoch
