"""Everything that can be put together from the networks that `fit` trained: single networks, cascades, exits.

A pool is a run of all members side by side. A single network is one of its stages and a cascade some of them, so what
they answer and cost follows from what is saved of the pool. What is chosen is written as a run of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.data import Dataset, prepared_for
from offramp.fitting.choice import common_rows
from offramp.fitting.plan import Member, Plan
from offramp.fitting.saved import Logits, is_written, write_logits, write_run
from offramp.measuring.calibrate import SPLIT_SEED
from offramp.measuring.risk import halves
from offramp.models.cascade import Cascade, cascade
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.runs.config import RunConfig
from offramp.runs.outputs import read_outputs, read_summary
from offramp.training.evaluate import logits_of
from offramp.training.probe import batch_size

NETWORKS, FROZEN, TUNED = "networks", "frozen", "tuned"
CARRIES = (0.0, 1.0)  # a cascade's networks answer for themselves, or with the sum of all so far


@dataclass(frozen=True)
class Candidate:
    """A network that may be shipped: the run as it is, or some `stages` of its pool, with summed logits if `carry`.

    `answers_as` tells whose answer its last exit gives: that of a single network with the same words, if of any.
    """

    family: str
    name: str
    run: Path
    stages: tuple[int, ...] | None = None
    carry: float = 0.0
    answers_as: str | None = None

    @property
    def folder(self) -> Path:
        """Where it lies as a run of its own."""
        if self.stages is None:
            return self.run
        stages = "-".join(str(stage + 1) for stage in self.stages)
        return self.run.with_name(f"{self.run.name}-{self.family}-{stages}{'-summed' if self.carry else ''}")

    def said(self, split: str) -> Logits:
        """What it answers to a split: the logits of its stages, from those of the pool."""
        saved = read_outputs(self.run, split)
        logits = np.asarray(saved.logits)
        if self.stages is not None:
            found: list[np.ndarray] = []
            for stage in self.stages:
                found.append(logits[stage] + self.carry * found[-1] if self.carry and found else logits[stage])
            logits = np.stack(found)
        return Logits(logits, np.asarray(saved.labels), np.asarray(saved.index))

    @property
    def costs(self) -> tuple[int, ...]:
        """Mul-adds up to each exit."""
        return tuple(np.cumsum(self._own(np.diff([0, *read_summary(self.run).costs]).tolist())).tolist())

    def stage_table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Of the stage times of its run, by number from 1, those of its own stages."""
        own = self._own([table["stage_ms"][key] for key in sorted(table["stage_ms"], key=int)])
        return {**table, "stage_ms": {str(k): ms for k, ms in enumerate(own, 1)}}

    def _own(self, values: Sequence[Any]) -> list[Any]:
        """Of something that each stage of the run has, what its own stages have."""
        return list(values) if self.stages is None else [values[stage] for stage in self.stages]


def candidates(plan: Plan, out: Path) -> list[Candidate]:
    """Everything that a plan gives, the largest single network of each way of training before the others of its way."""
    ways = [*([(TUNED, plan.tuned)] if plan.epochs else []), *([(FROZEN, len(plan.members))] if plan.frozen else [])]
    return [one for way, count in ways for one in _of_one_way(plan, out / NETWORKS, way, count)]


def _of_one_way(plan: Plan, folder: Path, way: str, count: int) -> list[Candidate]:
    """Of the pool of the `count` cheapest members, trained in one way."""
    note = ", frozen features" if way == FROZEN and plan.epochs else ""
    names = member_names(plan.members)
    pool, last = folder / way, f"{way} {count - 1}"
    found = [Candidate("single", names[at] + note, pool, (at,), 0.0, f"{way} {at}") for at in reversed(range(count))]
    for stages in plan.cascades(count):
        for carry in CARRIES:
            name = ", then ".join(names[at] for at in stages) + (", logits summed" if carry else "") + note
            found.append(Candidate("cascade", name, pool, stages, carry, None if carry else last))
    if plan.tunes_exits if way == TUNED else "exits" in plan.families:
        exits = folder / f"{way}-exits"
        found.append(
            Candidate("exits", f"exits on {names[-1]}{note}", exits, answers_as=last if way == FROZEN else None)
        )
    return found


def reference_of(found: Sequence[Candidate], promise: bool = False) -> Candidate:
    """The single network that everything is compared with: of the largest of each way, the best on held-out images.

    For a promise only the half counts that thresholds come from; the other one certifies.
    """
    largest = list({one.run: one for one in reversed(found) if one.family == "single"}.values())
    said = [one.said("calibration") for one in largest]
    common = common_rows(said)
    seen = halves(len(common[0]), SPLIT_SEED)[0] if promise else slice(None)
    right = [
        (own.logits[-1].argmax(-1) == own.labels)[rows][seen].mean() for own, rows in zip(said, common, strict=True)
    ]
    return largest[int(np.argmax(right))]


def member_names(members: Sequence[Member]) -> list[str]:
    """What people call the members: what tells their backbones apart, and the size of the images."""
    own = [member.backbone.partition("/")[2].partition(".")[0] for member in members]
    shared = os.path.commonprefix(own) if len(set(own)) > 1 else ""
    start = max(shared.rfind(mark) for mark in "_-") + 1
    return [f"{name[start:]} at {member.size} px" for name, member in zip(own, members, strict=True)]


def write_candidate(one: Candidate, config: RunConfig, data: Dataset, device: torch.device) -> None:
    """Write the candidate as a run of its own, evaluated; what is there is left alone.

    `config` says how the run was trained that it comes from, `data` on what.
    """
    if is_written(one.folder):
        return
    assert one.stages is not None
    pool = load_model(one.run)
    own = _taken_out(pool, one).eval()
    splits = {"calibration": one.said("calibration"), "test": one.said("test")}
    data = prepared_for(own, data)
    if own.input_shape != pool.input_shape:  # a smaller single network reads images in its own size
        splits["test"] = _answers(own, data, device)
    write_run(one.folder, config, own.cpu(), data)
    write_logits(one.folder, own, data, splits, {"test": data})


def members_of(pool: ExitNet) -> list[ExitNet]:
    """The networks that stand side by side in a pool; of one member, that is itself."""
    return [pool.network(place) for place in range(len(pool.order))] if isinstance(pool, Cascade) else [pool]


def _taken_out(pool: ExitNet, one: Candidate) -> ExitNet:
    """The network that some stages of a pool are."""
    assert one.stages is not None
    if not isinstance(pool, Cascade):
        return pool
    networks = [members_of(pool)[stage] for stage in one.stages]
    sizes = [pool.image_sizes[stage] for stage in one.stages]
    return networks[0] if len(networks) == 1 else cascade(networks, sizes, carry=one.carry)


def _answers(model: ExitNet, data: Dataset, device: torch.device) -> Logits:
    """What a network says of the test split."""
    model.to(device)
    found, labels, index = [], [], []
    for part, logits in logits_of(model, data.sweep("test", batch_size(data), device)):
        found.append(logits.float().cpu().numpy())
        labels.append(part.labels.cpu().numpy())
        index.append(part.index.cpu().numpy())
    return Logits(np.concatenate(found, axis=1), np.concatenate(labels), np.concatenate(index))
