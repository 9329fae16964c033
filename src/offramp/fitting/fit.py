"""`offramp fit`: a folder of photos and what is wanted go in, the best network for it comes out, as a bundle.

It looks at the folder, plans by a short measurement, trains the plan's networks, chooses on held-out images, and says
what the choice does on the test split, which is used for nothing else. Every step writes the folder that the next one
reads, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.common.console import say
from offramp.common.device import pick_device
from offramp.common.files import read_json, write_json
from offramp.common.names import unknown
from offramp.common.pretrained import DEFAULT_BACKBONE, is_bundle
from offramp.common.signals import Stopped
from offramp.data import prepared_for
from offramp.data.imagefolder import ImageFolderDataset
from offramp.fitting.choice import Choice, Network, Point, choose, common_rows, families_json, points, unit_of
from offramp.fitting.fitted import Fitted, replace_bundle, right_on_test, same_bundle, tested_outcome
from offramp.fitting.looking import Look, look_at
from offramp.fitting.networks import Candidate, read_data, single_config, train_networks
from offramp.fitting.plan import (
    STEP,
    Limits,
    Plan,
    decide,
    largest_size,
    measure_rates,
    parse_duration,
    sizes_below,
)
from offramp.fitting.recipes import TIMES, fit_recipe
from offramp.fitting.sentences import (
    Tested,
    asked_sentence,
    final_sentence,
    found_sentences,
    needed_words,
    plan_sentences,
)
from offramp.fitting.timing import Serving, by_turns, stage_table
from offramp.measuring.calibrate import PolicyRequest, calibrate_run, stage_times
from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import proportion_interval
from offramp.measuring.policy import Policies
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.libraries import is_library_name, libraries_with
from offramp.models.registry import load_model
from offramp.reporting.report import write_report
from offramp.running.bundle import FORMATS
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_outputs, read_summary
from offramp.runs.recipe import load_recipe
from offramp.training.train import new_model

RECIPE = "photos-exits"  # how photos are fine-tuned
PLAN, RESULT = "plan.json", "fit.json"
LEAST_IMAGES = 8
RESUMED = "the same command with --resume"


def fit(
    source: str,
    out: str | Path,
    request: PolicyRequest | None = None,
    *,
    backbone: str | None = None,
    time: str | None = None,
    quick: bool = False,
    serving: Serving | None = None,
    settings: tuple[str, ...] = (),
    device: str = "auto",
) -> Fitted:
    """From a folder of photos, or a recipe, to a bundle and a report; what an earlier call has done is gone on from."""
    out, request, serving = Path(out), request or PolicyRequest(), serving or Serving()
    _refuse_mistakes(source, out, serving.format)
    with stopped_in_own_words(out):
        if not Path(source).is_dir():
            if backbone or time or quick:
                raise ValueError("--backbone, --time and --quick are for folders of photos, not for recipes")
            return fit_recipe(source, out, request, serving, settings, device)
        config = starting_config(Path(source), backbone, settings)
        limits = Limits(
            None if time is None else parse_duration(time),
            quick,
            _asked_epochs(settings, config),
            request.risk is not None,
            config.data.calibration is not None,
        )
        return _FolderFit(Path(source), out, config, request, limits, serving, pick_device(device)).run(settings)


@contextmanager
def stopped_in_own_words(out: Path) -> Iterator[None]:
    """However it is stopped, what is done is kept, and the same command goes on."""
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.signum, _how_to_go_on(out)) from stopped
    except KeyboardInterrupt as stopped:
        raise Stopped(signal.SIGINT, _how_to_go_on(out)) from stopped
    except OSError as error:
        if RESUMED not in str(error):
            raise
        raise OSError(str(error).replace(RESUMED, "the same command")) from error  # fit has no such option


def _how_to_go_on(out: Path) -> str:
    command = shlex.join(["offramp", *sys.argv[1:]])
    return f"stopped; what is done is kept in {out}, and the same command goes on from there: {command}"


def _refuse_mistakes(source: str, out: Path, format: str | None) -> None:
    """What would only be found out after training is found out before."""
    bundle = out / "bundle"
    if format not in (None, *FORMATS):
        raise ValueError(unknown("bundle format", format, FORMATS))
    if bundle.exists() and not is_bundle(bundle):
        raise ValueError(f"{bundle} is there and is not a bundle; choose another --out")
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{out} lies inside {source}; choose an --out outside the images")


def starting_config(folder: Path, backbone: str | None, settings: Sequence[str]) -> RunConfig:
    """How photos are fine-tuned, with the settings that were given; sizes, epochs and exits come with the plan."""
    recipe = load_recipe(RECIPE).config
    exits = {"exits": recipe.model.overrides["exits"]}
    base = replace(recipe, recipe=None, model=replace(recipe.model, name=backbone or DEFAULT_BACKBONE, overrides=exits))
    base = with_settings(base, ["data.name=imagefolder", f"data.dir={str(folder.resolve())!r}", *settings])
    name = base.model.name
    if backbone is not None and name != backbone:
        raise ValueError(f"--backbone {backbone} and --set model.name={name} name two networks; leave one out")
    if not is_library_name(name):
        known = " or ".join(libraries_with(name)) or f"{DEFAULT_BACKBONE}, for example"
        raise ValueError(
            f"fit starts from a network that was trained before, of timm or torchvision ({known}), not from {name!r}; "
            'to train another one on this folder write a recipe, with data.name = "imagefolder"'
        )
    if base.data.calibration == 0:
        raise ValueError("a choice needs images held out; leave data.calibration alone, or ask for some")
    return base


def _asked_epochs(settings: Sequence[str], config: RunConfig) -> int | None:
    """The epochs of fine-tuning, where somebody set them."""
    return config.train.epochs if any(s.split("=")[0].strip() == "train.epochs" for s in settings) else None


def by_folds(run: Path) -> bool:
    """Whether the held-out images of a run were judged by other networks: it was trained on all of them itself."""
    return read_config(run).data.calibration == 0


class _FolderFit:
    """One call for a folder of photos; each method is a step."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        config: RunConfig,
        request: PolicyRequest,
        limits: Limits,
        serving: Serving,
        device: torch.device,
    ) -> None:
        self.folder, self.out, self.config, self.request = folder, out, config, request
        self.limits, self.serving, self.device = limits, serving, device
        self.timed_with = ""  # the engine and batch, in words

    def run(self, settings: Sequence[str]) -> Fitted:
        data = self._read()
        look = look_at(self.folder, data.listed)
        for line in found_sentences(look):
            say(line)
        for line in look.warnings:
            say(f"warning: {line}")
        plan = self._plan(data, look, settings)
        for line in plan_sentences(plan, asked_sentence(self.request), self.limits.seconds):
            say(line)
        found = train_networks(plan, self.config, self.out, self.device)
        networks, curves, choice = self._choose(found)
        return self._ship(plan, look, data, found, networks, curves, choice)

    def _read(self) -> ImageFolderDataset:
        data = read_data(self.config)
        assert isinstance(data, ImageFolderDataset)
        if data.size("train") < LEAST_IMAGES:
            raise ValueError(
                f"{self.folder} has only {data.size('train')} images to train on; at least {LEAST_IMAGES} are needed"
            )
        self.config = replace(self.config, model=replace(self.config.model, num_classes=data.num_classes))
        return data

    def _plan(self, data: ImageFolderDataset, look: Look, settings: Sequence[str]) -> Plan:
        """The plan of an earlier call with the same wishes, or a new one."""
        key = {
            "data": data.identity,
            "backbone": self.config.model.name,
            "settings": sorted(settings),
            "time": self.limits.seconds,
            "quick": self.limits.quick,
            "promise": self.limits.promise,
            "device": self.device.type,
        }
        path = self.out / PLAN
        if path.is_file():
            known = read_json(path)
            changed = [name for name in key if known["key"].get(name) != key[name]]
            if changed:
                raise ValueError(
                    f"{self.out} was begun with other {changed[0]}; go on with the same command, or choose a new --out"
                )
            return Plan.from_json(known["plan"])
        plan = self._new_plan(data, look)
        write_json(path, {"schema": 1, "key": key, "plan": plan.to_json()})
        return plan

    def _new_plan(self, data: ImageFolderDataset, look: Look) -> Plan:
        backbone = self.config.model.name
        own = self._built(None)
        assert own.preprocessing is not None
        asked = self.config.model.overrides.get("image_size") or self.config.data.image_size
        largest = asked or largest_size(look.side, own.preprocessing.size)
        costs = self._costs(own, largest)
        ladder = self._ladder(costs, largest, asked is not None)
        model = self._built(ladder[0][-1])
        say("measuring how fast this machine is ...")
        ready = prepared_for(model, data)
        assert isinstance(ready, ImageFolderDataset)
        rates = measure_rates(model, ready, self.device)
        return decide(backbone, ladder, look.splits, rates, self.limits)

    def _built(self, size: int | None) -> ExitNet:
        own = single_config(self.config.model.name, self.config, size)
        return new_model(replace(self.config, model=own))

    def _costs(self, own: ExitNet, largest: int) -> dict[int, float]:
        """What the single network costs at each size that it can be built for."""
        found: dict[int, float] = {}
        for size in sorted({*range(STEP, largest + 1, STEP), largest}):
            try:
                found[size] = float(exit_costs(own, size)[-1].mul_adds)
            except ValueError:  # one that is made for a size
                try:
                    found[size] = float(exit_costs(self._built(size))[-1].mul_adds)
                except (ValueError, AssertionError):
                    continue
        if largest not in found:
            raise ValueError(f"{self.config.model.name} cannot take images of {largest} pixels")
        return found

    def _ladder(self, costs: dict[int, float], largest: int, fixed: bool) -> list[tuple[int, ...]]:
        """Sizes to choose from, largest first."""
        budget = self.request.budget_mul_adds
        tops = [largest] if fixed or self.limits.seconds is None else sorted(costs, reverse=True)
        if not self.limits.quick:
            return [sizes_below(top, costs, budget) for top in tops]
        fitting = [top for top in sorted(costs, reverse=True) if budget is None or costs[top] <= budget]
        if not fitting:
            sizes_below(largest, costs, budget)  # which says so
        return [(top,) for top in fitting if top in tops or budget is not None]

    def _choose(self, found: Sequence[Candidate]) -> tuple[list[Network], list[list[Point]], Choice]:
        """What every network does to the images that none of them was trained on, and the best of them."""
        saved = [read_outputs(one.run, "calibration") for one in found]
        networks = []
        for one, own, rows in zip(found, saved, common_rows(saved), strict=True):
            given = Predictions.of(np.asarray(own.logits)[:, rows], own.labels[rows])
            costs = read_summary(one.run).costs
            networks.append(Network(one.family, one.name, given, costs, self._times(one, len(costs)), one.whole))
        unseen = ", each judged by networks that have not seen it" if by_folds(found[0].run) else ""
        say(f"choosing on {networks[0].given.samples:,} held-out images{unseen} ...")
        curves = [points(network, self.request) for network in networks]
        return networks, curves, choose(networks, curves, self.request)

    def _times(self, one: Candidate, exits: int) -> tuple[float, ...] | None:
        """Milliseconds per image up to each exit, timed where they are asked for."""
        if self.request.budget_ms is None:
            return None
        say(f"timing {one.name} ...")
        table = stage_table(load_model(one.run), self.serving)
        write_json(one.run / TIMES, table)
        return stage_times(table, exits)

    def _ship(
        self,
        plan: Plan,
        look: Look,
        data: ImageFolderDataset,
        found: Sequence[Candidate],
        networks: Sequence[Network],
        curves: Sequence[Sequence[Point]],
        choice: Choice,
    ) -> Fitted:
        """Calibrate and export the chosen network, test and time it beside the single one, and write it all down."""
        one, single = found[choice.network], found[0]
        say(f"chosen: {one.family}, {one.name}; exporting and timing ...")
        folds = (plan.folds or plan.tuned_folds) if by_folds(one.run) else None
        policies = self._calibrated(one, networks[choice.network], curves[choice.network][choice.point], folds)
        bundle = replace_bundle(one.run, self.out / "bundle", self.serving.format)
        tested = self._tested(one, single, policies, bundle, data)
        samples = networks[0].given.samples
        needed = None if choice.needed is None else needed_words(choice.needed, samples)
        sentence = final_sentence(tested, one.family, one.name, single.name, bundle, needed)
        runs = {each.name: each.run.relative_to(self.out).as_posix() for each in found}
        result: dict[str, Any] = {
            "schema": 1,
            "folder": look.name,
            "asked": asked_sentence(self.request),
            "unit": unit_of(self.request),
            "held_out": {"samples": samples, "folds": plan.folds or plan.tuned_folds},
            "families": families_json(networks, curves, runs),
            "chosen": {"family": one.family, "name": one.name, "run": runs[one.name], "point": choice.point},
            "drop": {"points": choice.drop, "interval": list(choice.drop_interval)},
            "reference": {
                "name": single.name,
                "run": runs[single.name],
                "mul_adds": tested.reference_mul_adds,
                "ms": tested.reference_ms,
                "top1": tested.reference_top1,
            },
            "test": {
                "top1": tested.top1,
                "interval": list(tested.interval),
                "samples": tested.samples,
                "mul_adds": tested.mul_adds,
                "ms": tested.ms,
                "reference_ms": tested.reference_ms,
                "timed_with": self.timed_with,
            },
            "sentence": sentence,
            "warnings": list(look.warnings),
        }
        write_json(self.out / RESULT, result)
        say(f"times are for {self.timed_with}")
        report = write_report([one.run], self.out / "report.html")
        return Fitted(one.run, bundle, policies, sentence, report, look.warnings)

    def _calibrated(self, one: Candidate, network: Network, point: Point, folds: int | None) -> Policies:
        """The thresholds of the chosen point, from all held-out images, written into its run."""
        if network.given.num_exits == 1:
            return calibrate_run(one.run, PolicyRequest(max_drop_points=0), folds=folds)
        if self.request.risk is not None:
            return calibrate_run(one.run, self.request, folds=folds)
        if self.request.budget_ms is not None:
            asked = PolicyRequest(budget_ms=point.budget)
            return calibrate_run(one.run, asked, times=one.run / TIMES, folds=folds)
        return calibrate_run(one.run, PolicyRequest(budget_mul_adds=point.budget), folds=folds)

    def _tested(
        self, one: Candidate, single: Candidate, policies: Policies, bundle: Path, data: ImageFolderDataset
    ) -> Tested:
        """The test split, looked at for the first time: accuracies from saved logits, times by turns."""
        right = right_on_test(one.run, policies)
        whole = read_summary(single.run).exits["test"][-1]
        other = bundle
        if one.run != single.run:
            calibrate_run(single.run, PolicyRequest(max_drop_points=0))
            other = same_bundle(single.run, self.out / "single", self.serving.format)
        paths = data.splits["test"].paths
        spread = np.random.default_rng(0).permutation(len(paths))
        loaded = [self.serving.load(bundle), self.serving.load(other)]
        ours, theirs = by_turns(loaded[0], loaded[1], [paths[at] for at in spread], self.serving.batch)
        if one.run == single.run:
            ours = theirs = min(ours, theirs)
        engine, batch = loaded[0].engine, self.serving.batch
        self.timed_with = f"{loaded[0].format} on {engine.place}, {batch} image{'s' if batch > 1 else ''} at a time"
        return Tested(
            float(right.mean()),
            proportion_interval(int(right.sum()), len(right)),
            len(right),
            tested_outcome(one.run, policies).cost,
            ours,
            whole.top1,
            float(whole.mul_adds),
            theirs,
        )
