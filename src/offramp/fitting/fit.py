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
from time import monotonic
from typing import Any

import numpy as np
import torch

from offramp.common.console import say
from offramp.common.device import pick_device
from offramp.common.files import write_json
from offramp.common.names import unknown
from offramp.common.signals import Stopped
from offramp.data import prepared_for
from offramp.data.imagefolder import ImageFolderDataset, not_tested_on
from offramp.fitting.candidates import Candidate, candidates, reference_of
from offramp.fitting.choice import Network, choose, common_rows, families_json, points, unit_of
from offramp.fitting.fitted import Fitted, new_name, refuse_other_folder
from offramp.fitting.kept_plan import digest_of, keep_plan, known_plan
from offramp.fitting.looking import Look, look_at
from offramp.fitting.networks import held_out, read_data, single_config, train_networks
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
from offramp.fitting.saved import is_written
from offramp.fitting.sentences import (
    ONLY_ONE,
    Tested,
    asked_sentence,
    final_sentence,
    found_sentence,
    needed_words,
    nothing_promised,
    over_budget,
    plan_sentences,
    slower_than_planned,
)
from offramp.fitting.shipping import BUNDLE, SINGLE, Compared, Shipped, Shipping
from offramp.fitting.starting import asked_epochs, chosen_backbones, starting_config
from offramp.fitting.timing import Serving, stage_table
from offramp.measuring.calibrate import PolicyRequest, stage_times
from offramp.measuring.confidence import Predictions
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.reporting.report import write_report
from offramp.running.bundle import FORMATS
from offramp.runs.config import RunConfig
from offramp.runs.folder import RESUMED, read_config
from offramp.training.train import new_model

RESULT = "fit.json"
CLEARLY = 1.1  # times a budget in milliseconds, above which it was not kept
LEAST_IMAGES = 8


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
        raise OSError(str(error).replace(RESUMED, "the same command goes on")) from error  # fit has no such option


def _how_to_go_on(out: Path) -> str:
    program, kept = Path(sys.argv[0]), f"stopped; what is done is kept in {out}, and the same"
    if "offramp" not in (program.stem, program.parent.name):  # from Python
        return f"{kept} call goes on from there"
    return f"{kept} command goes on from there: {shlex.join(['offramp', *sys.argv[1:]])}"


def _refuse_mistakes(source: str, out: Path, format: str | None) -> None:
    """What would only be found out after training is found out before."""
    if format not in (None, *FORMATS):
        raise ValueError(unknown("bundle format", format, FORMATS))
    for bundle in (out / BUNDLE, out / SINGLE):
        for path in (bundle, new_name(bundle)):
            refuse_other_folder(path)
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{out} lies inside {source}; choose an --out outside the images")


def by_folds(run: Path) -> bool:
    """Whether the held-out images of a run were judged by other networks: it was trained on all of them itself."""
    return read_config(run).data.calibration == 0


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

    def run(self, settings: Sequence[str]) -> Fitted:
        data = self._read()
        look = look_at(self.folder, data.listed)
        say(found_sentence(look))
        for line in look.warnings:
            say(f"warning: {line}")
        plan = self._plan(data, look, settings)
        self._say_plan(plan, look)
        began = monotonic()
        found = train_networks(plan, self.config, self.out, self.device)
        late = slower_than_planned(monotonic() - began, plan.seconds)
        if late:
            say(late)
        reference = reference_of(found, self.limits.promise)
        compared = self._compare([reference, *(one for one in found if one is not reference)], data)
        return self._ship(plan, look, compared)

    def _say_plan(self, plan: Plan, look: Look) -> None:
        splits = look.splits
        if not plan.by_folds:
            own = read_data(held_out(plan, self.config))
            splits = {name: own.size(name) for name in splits}
        trained = all(is_written(one.run) for one in candidates(plan, self.out))
        for line in plan_sentences(plan, splits, asked_sentence(self.request), self.limits.seconds, trained):
            say(line)

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
        """The plan of an earlier call, if that serves this one, or a new one."""
        splits, root = data.splits, self.folder.resolve()
        key = {
            "data": data.identity,
            "photos": digest_of([splits["train"], splits["calibration"]], root),
            "backbones": list(self.backbones),
            "settings": sorted(settings),
            "time": self.limits.seconds,
            "quick": self.limits.quick,
            "device": self.device.type,
        }
        tested = digest_of([splits["test"]], root)
        plan = known_plan(self.out, key, tested, self.limits.promise)
        if plan is None:
            plan = self._new_plan(data, look)
            keep_plan(self.out, key, tested, plan)
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
        crops = self.config.data.augmentation == "crop"
        return decide(choices, look.splits, measure_rates(models, ready, self.device, crops), self.limits)

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

    def _compare(self, found: Sequence[Candidate], data: ImageFolderDataset) -> Compared:
        """What every network does to the images that none of them was trained on.

        The first is the single one that all are compared with.
        """
        said = [one.said("calibration") for one in found]
        common, tables = common_rows(said), self._stage_tables(found)
        networks = []
        for one, own, rows in zip(found, said, common, strict=True):
            given = Predictions.of(own.logits[:, rows], own.labels[rows])
            ms = stage_times(one.stage_table(tables[one.run]), len(one.costs)) if tables else None
            whole = one.answers_as == found[0].answers_as
            networks.append(Network(one.family, one.name, given, one.costs, ms, whole))
        unseen = ", each judged by networks that have not seen it" if by_folds(found[0].run) else ""
        say(f"choosing on {networks[0].given.samples:,} held-out images{unseen} ...")
        curves = [points(network, self.request) for network in networks]
        everything = not_tested_on(data.listed)
        places = np.searchsorted(everything.index, said[0].index[common[0]])
        photos = [everything.paths[at] for at in np.random.default_rng(0).permutation(places).tolist()]
        return Compared(found, networks, curves, photos, data.max_pixels, tables)

    def _stage_tables(self, found: Sequence[Candidate]) -> dict[Path, dict[str, Any]]:
        """Milliseconds of the stages of each run, where milliseconds are asked for."""
        tables: dict[Path, dict[str, Any]] = {}
        for one in found if self.request.budget_ms is not None else ():
            if one.run not in tables:
                say(f"timing {'the stages of all networks' if one.stages else one.name} ...")
                tables[one.run] = stage_table(load_model(one.run), self.serving)
        return tables

    def _ship(self, plan: Plan, look: Look, compared: Compared) -> Fitted:
        """Choose, export, test, and write it all down."""
        choice = choose(compared.networks, compared.curves, self.request)
        folds = {one.run: plan.folds or plan.tuned_folds if by_folds(one.run) else None for one in compared.found}
        shipping = Shipping(self.out, self.request, self.serving, self.device, compared, folds)
        shipped, why = shipping.settle(choice)
        samples = compared.networks[0].given.samples
        if self.limits.quick:
            why = ONLY_ONE
        elif why is None and self.request.risk is not None:
            why = nothing_promised(samples)
        elif why is None and choice.needed is not None:
            why = needed_words(choice.needed, samples, plan)
        tested, one, speed = shipping.tested(shipped), shipped.one, shipped.speed
        in_mul_adds = self.request.budget_mul_adds is not None
        single = compared.single.name
        sentence = final_sentence(tested, speed, one.family, one.name, single, shipped.bundle, why, in_mul_adds)
        if self.request.budget_ms is not None and speed.ms > CLEARLY * self.request.budget_ms:
            sentence += f" {over_budget(speed.ms, self.request.budget_ms, self.serving.batch)}"
        result = {
            "schema": 1,
            "folder": look.name,
            "asked": asked_sentence(self.request),
            **self._as_json(compared, shipped, tested),
            "held_out": {"samples": samples, "folds": folds[one.run] or 0},
            "sentence": sentence,
            "warnings": list(look.warnings),
        }
        write_json(self.out / RESULT, result)
        say(f"times are for {shipped.timed_with}")
        report = write_report([one.folder], self.out / "report.html", times=one.folder / TIMES)
        return Fitted(one.folder, shipped.bundle, shipped.policies, sentence, report, look.warnings)

    def _as_json(self, compared: Compared, shipped: Shipped, tested: Tested) -> dict[str, Any]:
        """What was tried, what was chosen, and how it did."""
        one, single, speed, choice = shipped.one, compared.single, shipped.speed, shipped.choice
        runs = {each.name: each.run.relative_to(self.out).as_posix() for each in compared.found}
        runs |= {each.name: each.folder.relative_to(self.out).as_posix() for each in (one, single)}
        return {
            "unit": unit_of(self.request),
            "families": families_json(compared.networks, compared.curves, runs),
            "chosen": {"family": one.family, "name": one.name, "run": runs[one.name], "point": choice.point},
            "drop": {
                "points": choice.drop,
                "interval": list(choice.drop_interval),
                "certified_on": choice.certified,
            },
            "reference": {
                "name": single.name,
                "run": runs[single.name],
                "mul_adds": speed.reference_mul_adds,
                "ms": speed.reference_ms,
                "top1": tested.reference_top1,
            },
            "test": {
                "top1": tested.top1,
                "interval": list(tested.interval),
                "samples": tested.samples,
                "mul_adds": tested.mul_adds,
                "drop": tested.drop,
                "drop_interval": list(tested.drop_interval),
                "ms": speed.ms,
                "reference_ms": speed.reference_ms,
                "timed_with": shipped.timed_with,
            },
        }
