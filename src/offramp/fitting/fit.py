"""`offramp fit`: a folder of photos and what is wanted go in, the best network for it comes out, as a bundle.

It looks at the folder, plans by a short measurement, trains the plan's networks, chooses on held-out images, and says
what the choice does on the test split, which is used for nothing else. Every step writes the folder that the next one
reads, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.common.console import say
from offramp.common.device import pick_device
from offramp.common.files import read_json, write_json
from offramp.common.formatting import counted
from offramp.common.names import unknown
from offramp.common.pretrained import is_bundle
from offramp.common.signals import Stopped
from offramp.data import prepared_for
from offramp.data.imagefolder import ImageFolderDataset
from offramp.fitting.candidates import Candidate, reference_of, write_candidate
from offramp.fitting.choice import (
    Choice,
    Network,
    Point,
    choose,
    common_rows,
    families_json,
    points,
    single_network,
    unit_of,
)
from offramp.fitting.fitted import Fitted, replace_bundle, right_on_test, same_bundle, tested_outcome
from offramp.fitting.looking import Look, look_at
from offramp.fitting.networks import read_data, single_config, train_networks
from offramp.fitting.plan import (
    STEP,
    Limits,
    Member,
    Plan,
    decide,
    ladder,
    largest_size,
    measure_rates,
    parse_duration,
)
from offramp.fitting.recipes import TIMES, fit_recipe
from offramp.fitting.sentences import (
    ONLY_ONE,
    Tested,
    asked_sentence,
    final_sentence,
    found_sentences,
    needed_words,
    no_faster,
    over_budget,
    plan_sentences,
)
from offramp.fitting.starting import asked_epochs, chosen_backbones, starting_config
from offramp.fitting.timing import Serving, bundle_stage_table, by_turns, stage_table
from offramp.measuring.calibrate import PolicyRequest, calibrate_run, stage_times
from offramp.measuring.confidence import Predictions
from offramp.measuring.intervals import proportion_interval
from offramp.measuring.policy import Policies
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.reporting.report import write_report
from offramp.running.bundle import FORMATS
from offramp.runs.config import RunConfig
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_summary
from offramp.training.train import new_model

log = logging.getLogger("offramp")

PLAN, RESULT = "plan.json", "fit.json"
WORTH = 1.05  # times as fast as the single network, from which on more than that one network is worth its while
CLEARLY = 1.1  # times a budget in milliseconds, above which it was not kept
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
        backbones = chosen_backbones(backbone, settings)
        config = starting_config(Path(source), backbones, settings)
        limits = Limits(
            None if time is None else parse_duration(time),
            quick,
            asked_epochs(settings, config),
            request.risk is not None,
            config.data.calibration is not None,
        )
        asked = _FolderFit(Path(source), out, backbones, config, request, limits, serving, pick_device(device))
        return asked.run(settings)


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


def by_folds(run: Path) -> bool:
    """Whether the held-out images of a run were judged by other networks: it was trained on all of them itself."""
    return read_config(run).data.calibration == 0


@dataclass(frozen=True)
class _Shipped:
    """What may be shipped: its policies and bundle, and what it does on the test split."""

    one: Candidate
    policies: Policies
    bundle: Path
    tested: Tested
    folds: int | None


class _FolderFit:
    """One call for a folder of photos; each method is a step."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        backbones: Sequence[str],
        config: RunConfig,
        request: PolicyRequest,
        limits: Limits,
        serving: Serving,
        device: torch.device,
    ) -> None:
        self.folder, self.out, self.backbones, self.config, self.request = folder, out, backbones, config, request
        self.limits, self.serving, self.device = limits, serving, device
        self.timed_with = ""  # the engine and batch, in words
        self.stage_tables: dict[Path, dict[str, Any]] = {}  # by run

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
        reference = reference_of(found)
        found = [reference, *(one for one in found if one is not reference)]
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
            "backbones": list(self.backbones),
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
        own = {name: new_model(self._as_single(name, None)) for name in self.backbones}
        made_for = [model.preprocessing.size for model in own.values() if model.preprocessing is not None]
        asked = self.config.model.overrides.get("image_size") or self.config.data.image_size
        largest = asked or largest_size(look.side, made_for[-1])
        costs = {name: self._costs(name, model, largest) for name, model in own.items()}
        choices = ladder(costs, largest, asked is not None, self.limits, self.request.budget_mul_adds)
        say("measuring how fast this machine is ...")
        timed = {member.backbone: member for member in choices[0]}.values()  # of each backbone the largest
        models = {member: new_model(replace(self.config, model=single_config(member, self.config))) for member in timed}
        ready = prepared_for(models[choices[0][-1]], data)
        assert isinstance(ready, ImageFolderDataset)
        return decide(choices, look.splits, measure_rates(models, ready, self.device), self.limits)

    def _as_single(self, backbone: str, size: int | None) -> RunConfig:
        """A backbone as it is, for images of a size; None is its own."""
        model = single_config(Member(backbone, size or 0, 0.0), self.config)
        if size is None:
            del model.overrides["image_size"]
        return replace(self.config, model=model)

    def _costs(self, backbone: str, own: ExitNet, largest: int) -> dict[int, float]:
        """What a backbone costs at each size that it can be built for."""
        found: dict[int, float] = {}
        for size in sorted({*range(STEP, largest + 1, STEP), largest}):
            try:
                found[size] = float(exit_costs(own, size)[-1].mul_adds)
            except ValueError:  # one that is made for a size
                try:
                    found[size] = float(exit_costs(new_model(self._as_single(backbone, size)))[-1].mul_adds)
                except (ValueError, AssertionError):
                    continue
        if largest not in found:
            raise ValueError(f"{backbone} cannot take images of {largest} pixels")
        return found

    def _choose(self, found: Sequence[Candidate]) -> tuple[list[Network], list[list[Point]], Choice]:
        """What every network does to the images that none of them was trained on, and the best of them.

        The first is the single one that all are compared with.
        """
        said = [one.said("calibration") for one in found]
        networks = []
        for one, own, rows in zip(found, said, common_rows(said), strict=True):
            given = Predictions.of(own.logits[:, rows], own.labels[rows])
            whole = one.answers_as == found[0].answers_as
            networks.append(Network(one.family, one.name, given, one.costs, self._times(one), whole))
        unseen = ", each judged by networks that have not seen it" if by_folds(found[0].run) else ""
        say(f"choosing on {networks[0].given.samples:,} held-out images{unseen} ...")
        curves = [points(network, self.request) for network in networks]
        return networks, curves, choose(networks, curves, self.request)

    def _times(self, one: Candidate) -> tuple[float, ...] | None:
        """Milliseconds per image up to each exit, where they are asked for; the stages of a run are timed once."""
        if self.request.budget_ms is None:
            return None
        if one.run not in self.stage_tables:
            say(f"timing {'the stages of all networks' if one.stages else one.name} ...")
            self.stage_tables[one.run] = stage_table(load_model(one.run), self.serving)
        return stage_times(one.stage_table(self.stage_tables[one.run]), len(one.costs))

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
        """Export the chosen network, test and time it beside the single one, and write it all down."""
        samples = networks[0].given.samples
        why = ONLY_ONE if self.limits.quick else None if choice.needed is None else needed_words(choice.needed, samples)
        shipped = self._exported(plan, data, found, networks, curves, choice)
        if self._is_no_faster(shipped):
            why = no_faster(shipped.one.family, shipped.one.name, shipped.tested)
            say(f"{why}; the single network it is")
            choice = single_network(curves)
            shipped = self._exported(plan, data, found, networks, curves, choice)
        one, single, tested = shipped.one, found[0], shipped.tested
        sentence = final_sentence(tested, one.family, one.name, single.name, shipped.bundle, why)
        runs = {each.name: each.run.relative_to(self.out).as_posix() for each in found}
        runs |= {each.name: each.folder.relative_to(self.out).as_posix() for each in (one, single)}
        result: dict[str, Any] = {
            "schema": 1,
            "folder": look.name,
            "asked": asked_sentence(self.request),
            "unit": unit_of(self.request),
            "held_out": {"samples": samples, "folds": shipped.folds or 0},
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
        if self.request.budget_ms is not None and tested.ms > CLEARLY * self.request.budget_ms:
            log.warning(over_budget(tested.ms, self.request.budget_ms))
        report = write_report([one.folder], self.out / "report.html", times=one.folder / TIMES)
        return Fitted(one.folder, shipped.bundle, shipped.policies, sentence, report, look.warnings)

    def _exported(
        self,
        plan: Plan,
        data: ImageFolderDataset,
        found: Sequence[Candidate],
        networks: Sequence[Network],
        curves: Sequence[Sequence[Point]],
        choice: Choice,
    ) -> _Shipped:
        """The chosen network as a bundle, calibrated, tested and timed beside the single one."""
        one, single = found[choice.network], found[0]
        say(f"chosen: {one.family}, {one.name}; exporting and timing ...")
        for each in (one, single):
            trained = read_config(each.run)
            write_candidate(each, trained, read_data(trained), self.device)
        folds = (plan.folds or plan.tuned_folds) if by_folds(one.run) else None
        policies = self._calibrated(one, networks[choice.network], curves[choice.network][choice.point], folds)
        bundle = replace_bundle(one.folder, self.out / "bundle", self.serving.format)
        return _Shipped(one, policies, bundle, self._tested(one, single, policies, bundle, data), folds)

    def _is_no_faster(self, shipped: _Shipped) -> bool:
        """Whether fewer mul-adds bring nothing here, where the cheapest was asked for and not what fits a budget."""
        by_budget = self.request.budget_mul_adds is not None or self.request.budget_ms is not None
        cheaper = shipped.tested.mul_adds < shipped.tested.reference_mul_adds
        return not by_budget and cheaper and shipped.tested.reference_ms < WORTH * shipped.tested.ms

    def _calibrated(self, one: Candidate, network: Network, point: Point, folds: int | None) -> Policies:
        """The thresholds of the chosen point, from all held-out images, written into its run."""
        if network.given.num_exits == 1:
            return calibrate_run(one.folder, PolicyRequest(max_drop_points=0), folds=folds)
        if self.request.risk is not None:
            return calibrate_run(one.folder, self.request, folds=folds)
        if self.request.budget_ms is not None:
            write_json(one.folder / TIMES, one.stage_table(self.stage_tables[one.run]))
            asked = PolicyRequest(budget_ms=point.budget)
            return calibrate_run(one.folder, asked, times=one.folder / TIMES, folds=folds)
        return calibrate_run(one.folder, PolicyRequest(budget_mul_adds=point.budget), folds=folds)

    def _tested(
        self, one: Candidate, single: Candidate, policies: Policies, bundle: Path, data: ImageFolderDataset
    ) -> Tested:
        """The test split, looked at for the first time: accuracies from saved logits, times by turns."""
        right = right_on_test(one.folder, policies)
        whole = read_summary(single.folder).exits["test"][-1]
        other = bundle
        if one is not single:
            calibrate_run(single.folder, PolicyRequest(max_drop_points=0))
            other = same_bundle(single.folder, self.out / "single", self.serving.format)
        paths = data.splits["test"].paths
        spread = np.random.default_rng(0).permutation(len(paths))
        loaded = [self.serving.load(bundle), self.serving.load(other)]
        ours, theirs = by_turns(loaded[0], loaded[1], [paths[at] for at in spread], self.serving.batch)
        if one is single:
            ours = theirs = min(ours, theirs)
        engine, batch = loaded[0].engine, self.serving.batch
        self.timed_with = f"{loaded[0].format} on {engine.place}, {counted(batch, 'image')} at a time"
        as_whole = {"leaving_early": ours, "whole_network": theirs}
        write_json(one.folder / TIMES, {**bundle_stage_table(loaded[0], self.serving), "policy_ms": as_whole})
        return Tested(
            float(right.mean()),
            proportion_interval(int(right.sum()), len(right)),
            len(right),
            tested_outcome(one.folder, policies).cost,
            ours,
            whole.top1,
            float(whole.mul_adds),
            theirs,
        )
