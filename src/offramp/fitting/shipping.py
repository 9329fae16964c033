"""From a choice to a bundle that is worth its while on this machine: calibrated, exported, timed, and tested at last.

Everything is decided on held-out photos. The test split gives the accuracy of what ships, and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offramp.common.console import say
from offramp.common.files import write_json
from offramp.common.formatting import counted
from offramp.fitting.candidates import Candidate, write_candidate
from offramp.fitting.choice import Choice, Network, Point, choose, single_network
from offramp.fitting.fitted import replace_bundle, right_on_test, tested_outcome
from offramp.fitting.networks import read_data
from offramp.fitting.recipes import TIMES
from offramp.fitting.sentences import Speed, Tested, brings_nothing
from offramp.fitting.timing import Serving, Turns, bundle_stage_table, by_turns
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.intervals import paired_interval, right_interval
from offramp.measuring.policy import Policies
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_outputs

BUNDLE, SINGLE = "bundle", "single"


@dataclass(frozen=True)
class Compared:
    """All networks on the images that none of them was trained on; the first is the one that all are compared with.

    `photos` are those images, `stage_tables` the times of runs, where they were asked for.
    """

    found: Sequence[Candidate]
    networks: Sequence[Network]
    curves: Sequence[Sequence[Point]]
    photos: Sequence[Path]
    max_pixels: int
    stage_tables: Mapping[Path, dict[str, Any]]

    @property
    def single(self) -> Candidate:
        return self.found[0]


@dataclass(frozen=True)
class Shipped:
    """What may be shipped: a choice as a run and a bundle with its policies, and how fast it is."""

    choice: Choice
    one: Candidate
    policies: Policies
    bundle: Path
    speed: Speed
    timed_with: str


class Shipping:
    """Makes bundles of choices; `folds` is by how many the held-out images were judged, of each run."""

    def __init__(
        self,
        out: Path,
        request: PolicyRequest,
        serving: Serving,
        device: torch.device,
        compared: Compared,
        folds: Mapping[Path, int | None],
    ) -> None:
        self.out, self.request, self.serving, self.device = out, request, serving, device
        self.compared, self.folds = compared, folds

    def settle(self, choice: Choice) -> tuple[Shipped, str | None]:
        """The choice as a bundle. If it brings nothing, the best plain network, else the single one; and why."""
        shipped = self._exported(choice)
        why = self._brings_nothing(shipped)
        if why is None:
            return shipped, None
        plain = choose(self.compared.networks, self.compared.curves, self.request, plain=True)
        for other in (plain, single_network()):
            if (other.network, other.point) != (choice.network, choice.point):
                say(f"{why}; a plain network instead ...")
                shipped = self._exported(other)
                if self._brings_nothing(shipped) is None:
                    break
        return shipped, why

    def _brings_nothing(self, shipped: Shipped) -> str | None:
        if shipped.one is self.compared.single:
            return None
        one, point = shipped.one, self.compared.curves[shipped.choice.network][shipped.choice.point]
        samples, interval = len(point.right), right_interval(point.right)
        return brings_nothing(self.request, one.family, one.name, shipped.speed, samples, point.top1, interval)

    def _exported(self, choice: Choice) -> Shipped:
        """The chosen network as a bundle, calibrated and timed beside the single one."""
        one, single = self.compared.found[choice.network], self.compared.single
        say(f"chosen: {one.family}, {one.name}; exporting and timing ...")
        for each in (one, single):
            trained = read_config(each.run)
            write_candidate(each, trained, read_data(trained), self.device)
        policies = self._calibrated(choice)
        bundle = other = replace_bundle(one.folder, self.out / BUNDLE, self.serving.format)
        if one is single:
            shutil.rmtree(self.out / SINGLE, ignore_errors=True)  # of an earlier call, whose choice was another
        else:
            calibrate_run(single.folder, PolicyRequest(max_drop_points=0), folds=self.folds[single.run])
            other = replace_bundle(single.folder, self.out / SINGLE, self.serving.format)
        ms, reference_ms, timed_with = self._timed(one, bundle, other)
        speed = Speed(policies.policy.mul_adds, ms, single.costs[-1], reference_ms)
        return Shipped(choice, one, policies, bundle, speed, timed_with)

    def _calibrated(self, choice: Choice) -> Policies:
        """The thresholds of the chosen point, from all held-out images, written into its run."""
        one, network = self.compared.found[choice.network], self.compared.networks[choice.network]
        folds, budget = self.folds[one.run], self.compared.curves[choice.network][choice.point].budget
        if network.given.num_exits == 1:
            return calibrate_run(one.folder, PolicyRequest(max_drop_points=0), folds=folds)
        if self.request.risk is not None:
            return calibrate_run(one.folder, self.request, folds=folds)
        if self.request.budget_ms is not None:
            write_json(one.folder / TIMES, one.stage_table(self.compared.stage_tables[one.run]))
            return calibrate_run(one.folder, PolicyRequest(budget_ms=budget), times=one.folder / TIMES, folds=folds)
        return calibrate_run(one.folder, PolicyRequest(budget_mul_adds=budget), folds=folds)

    def _timed(self, one: Candidate, bundle: Path, other: Path) -> tuple[float, float, str]:
        """Milliseconds of two bundles on held-out photos, and with what, in words; kept for the report too."""
        loaded, batch = [self.serving.load(bundle), self.serving.load(other)], self.serving.batch
        found = by_turns(loaded[0], loaded[1], self.compared.photos, batch, self.compared.max_pixels)
        if bundle == other:
            least = min(found.ours, found.theirs)
            found = Turns(least, least, least)
        as_whole = {"leaving_early": found.ours, "whole_network": found.whole}
        write_json(one.folder / TIMES, {**bundle_stage_table(loaded[0], self.serving), "policy_ms": as_whole})
        timed_with = f"{loaded[0].format} on {loaded[0].engine.place}, {counted(batch, 'image')} at a time"
        return found.ours, found.theirs, timed_with

    def tested(self, shipped: Shipped) -> Tested:
        """The test split, looked at for the first time, when everything is decided."""
        right = right_on_test(shipped.one.folder, shipped.policies)
        known = read_outputs(self.compared.single.folder, "test")
        whole = known.logits[-1].argmax(-1) == known.labels
        return Tested(
            float(right.mean()),
            right_interval(right),
            len(right),
            tested_outcome(shipped.one.folder, shipped.policies).cost,
            float(whole.mean()),
            right_interval(whole),
            100 * float(whole.mean() - right.mean()),
            (0.0, 0.0) if shipped.one is self.compared.single else paired_interval(whole, right),
        )
