"""`offramp predict --ray`: a source of any size through a bundle, by workers that each hold the whole bundle.

The driver lists the source, cuts it into parts and counts; a worker reads a part's images, runs them through
`running.predict`, which pools survivors within the call, and writes the part. Image bytes never pass the driver or
Ray's object store. Started again with the same command, it goes on with the parts that are not there yet.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from offramp import __version__
from offramp.common.console import progress, say
from offramp.common.files import short_digest
from offramp.common.images import MAX_PIXELS, quiet_pillow
from offramp.common.pretrained import MANIFEST as BUNDLE_MANIFEST
from offramp.common.pretrained import bundle_folder
from offramp.common.ray_connection import LOCAL
from offramp.measuring.policy import Policies, Policy
from offramp.running.bundle import Bundle, asked_policy, checked, load_bundle, manifest_digest
from offramp.running.predict import predict
from offramp.running.runtime import ceiling
from offramp.runs.lock import locked
from offramp.scaling.cluster import Task, WorkerShape, now, ray_cluster, spread
from offramp.scaling.parts import (
    MANIFEST,
    PartCount,
    Plan,
    Totals,
    check_whole,
    claim,
    finished_parts,
    part_name,
    read_count,
    to_parquet,
)
from offramp.scaling.places import as_path, is_local, joined, kind_of, write_whole
from offramp.scaling.sources import ImageReader, Source

log = logging.getLogger("offramp")

SMALLEST_PART = 1024  # images of a call: late stages run full batches from here on
PART_IMAGES = 4096
MANY = 64 * 1024  # images from which on parts are that large
MAX_UNREADABLE = 0.01
FAR_MORE = 4  # times the images of a part: row groups of Parquet that hold so many are worth a word


@dataclass(frozen=True)
class PackedBundle:
    """A bundle's files on their way to workers, which need not see the folder they came from."""

    folder: str
    digest: str
    files: dict[str, bytes]
    device: str
    threads: int

    @staticmethod
    def of(path: str | Path, device: str, threads: int) -> PackedBundle:
        """The files of a bundle that was checked."""
        folder = bundle_folder(path)
        manifest, _, _ = checked(folder)
        files = {name: (folder / name).read_bytes() for name in (BUNDLE_MANIFEST, *manifest["files"])}
        return PackedBundle(str(folder.resolve()), manifest_digest(manifest), files, device, threads)

    def load(self) -> Bundle:
        """The bundle, from its folder where this machine has the same, else from files written here."""
        if Path(self.folder, BUNDLE_MANIFEST).is_file():
            manifest = json.loads(Path(self.folder, BUNDLE_MANIFEST).read_bytes())
            if manifest_digest(manifest) == self.digest:
                return self._loaded(Path(self.folder))
        with tempfile.TemporaryDirectory(prefix="offramp-bundle-") as place:
            for name, data in self.files.items():
                Path(place, os.path.basename(name)).write_bytes(data)
            return self._loaded(Path(place))

    def _loaded(self, folder: Path) -> Bundle:
        bundle = load_bundle(folder, device=self.device, threads=self.threads)
        limit_threads(self.threads)
        return bundle


@dataclass(frozen=True)
class Job:
    """All that a worker must know beside its task."""

    bundle: PackedBundle
    plan: Plan
    policy: Policy
    reader: ImageReader
    out: str
    batch: int
    again: frozenset[int] = frozenset()  # parts that are there, and are done once more


class PartWriter:
    """A worker: predicts the images of one part after another and writes each part when it is whole."""

    def __init__(self, job: Job) -> None:
        quiet_pillow()
        if kind_of(joined(job.out, MANIFEST)) != "file":
            raise OSError(f"{socket.gethostname()} does not see {job.out}; every machine must, under this name")
        self.job, self.bundle = job, job.bundle.load()
        self.name = worker_name()

    def __call__(self, part: int, task: bytes) -> bytes:
        job, began, place = self.job, time.perf_counter(), joined(self.job.out, part_name(part))
        if part not in job.again and kind_of(place) == "file":  # of a worker that died before it could say so
            return read_count(job.out, part, job.plan).to_json()
        keys, images = job.reader.read(task)
        found = predict(
            self.bundle,
            keys,
            policy=job.policy,
            batch=job.batch,
            max_exit=job.plan.max_exit,
            max_pixels=job.plan.max_pixels,
            images=images,
            decoders=job.reader.decoders,
            silent=True,
        )
        exits = tuple(sum(row.exit == k for row in found.rows) for k in range(1, len(self.bundle.costs) + 1))
        count = PartCount(part, exits, found.unreadable, 0.0, self.name, now())
        count = replace(count, seconds=time.perf_counter() - began)
        write_whole(place, to_parquet(found.rows, count, job.plan))
        return replace(count, seconds=time.perf_counter() - began, ended=now()).to_json()


def worker_name() -> str:
    """Which process on which machine."""
    return f"{socket.gethostname()}:{os.getpid()}"


def limit_threads(threads: int) -> None:
    """A worker uses the cores that it was given, whatever the bundle's engine."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)


def part_images_for(images: int, asked: int | None = None) -> int:
    """How many images a part holds: what was asked for, or fewer where there are few images."""
    if asked is None:
        return PART_IMAGES if images >= MANY else SMALLEST_PART
    if asked < 1:
        raise ValueError(f"--part-images must be 1 or more, got {asked}")
    return asked


@dataclass(frozen=True)
class Asked:
    """What the command line says about a prediction beside its bundle, source and place."""

    budget_mul_adds: float | None = None
    q: float | None = None
    max_exit: int | None = None
    max_mul_adds: float | None = None
    max_pixels: int = MAX_PIXELS
    part_images: int | None = None
    batch: int = 64
    device: str = "auto"
    max_unreadable: float = MAX_UNREADABLE
    retry_unreadable: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_unreadable <= 1:
            raise ValueError(f"--max-unreadable is a share from 0 to 1, got {self.max_unreadable:g}")
        if self.batch < 1:
            raise ValueError(f"batch must be 1 or more, got {self.batch}")


def planned(bundle: PackedBundle, source: Source, asked: Asked) -> tuple[Plan, Policies, Policy]:
    """What the manifest keeps, and the policy that images leave by."""
    _, card, policies = checked(Path(bundle.folder))
    policy = asked_policy(policies, asked.budget_mul_adds, asked.q)
    rule = [policies.measure, repr(policies.temperatures), repr(policy.thresholds)]
    plan = Plan(
        bundle=bundle.digest,
        source=source.digest,
        images=source.size,
        part_images=part_images_for(source.size, asked.part_images),
        policy=short_digest(rule),
        max_exit=ceiling(card.costs, asked.max_exit, asked.max_mul_adds),
        max_pixels=asked.max_pixels,
    )
    return plan, policies, policy


def predict_source(
    bundle: str | Path,
    source: Source,
    out: str,
    asked: Asked | None = None,
    *,
    address: str = LOCAL,
    shape: WorkerShape | None = None,
    silent: bool = False,
) -> Totals:
    """Predict all images of a source into a folder of Parquet parts; those that are there already are kept."""
    asked, shape = asked or Asked(), shape or WorkerShape()
    packed = PackedBundle.of(bundle, asked.device, shape.threads)
    plan, policies, policy = planned(packed, source, asked)
    out = as_path(out)
    out = os.path.abspath(out) if is_local(out) else out.rstrip("/")
    with _alone(out):
        claim(out, plan, {"offramp": __version__, "bundle": str(bundle), "source": source.about})
        totals, todo, again = _finished(out, plan, policies, asked)
        _check_unreadable(totals, asked)
        if not silent:
            say(_beginning(source, plan, totals, out))
        _say_if_groups_are_large(source, plan)
        if todo:
            job = Job(packed, plan, policy, source.reader, out, asked.batch, again)
            tasks = [Task(part, source.task(*plan.bounds(part))) for part in todo]
            _run(job, tasks, totals, asked, address, shape, silent)
        check_whole(out, plan)
    return totals


def _finished(out: str, plan: Plan, policies: Policies, asked: Asked) -> tuple[Totals, list[int], frozenset[int]]:
    """What became of the parts that are there; the numbers of those to be done; those among them that are there."""
    there = finished_parts(out, plan)
    again = frozenset(part for part, count in there.items() if count.unreadable and asked.retry_unreadable)
    totals = Totals(policies.costs, plan.images)
    for part in there.keys() - again:
        totals.add(there[part], new=False)
    return totals, [part for part in range(plan.parts) if part not in there or part in again], again


@contextmanager
def _alone(out: str) -> Iterator[None]:
    """One command at a time writes into a folder; stores have no locks."""
    with ExitStack() as held:
        if is_local(out):
            try:
                held.enter_context(locked(Path(out)))
            except ValueError as error:  # worded for trainings
                raise ValueError(str(error).replace("being trained", "being written")) from error
        yield


def _say_if_groups_are_large(source: Source, plan: Plan) -> None:
    """Parquet is read from the first row of a row group on, by every part anew."""
    if source.together > FAR_MORE * plan.part_images:
        log.warning(
            "%s has row groups of %s rows, and a part has %s: each part reads its group from the first row on; "
            "with smaller groups, or larger parts (--part-images), much less is read",
            source.about,
            f"{source.together:,}",
            f"{plan.part_images:,}",
        )


def _run(
    job: Job, tasks: list[Task], totals: Totals, asked: Asked, address: str, shape: WorkerShape, silent: bool
) -> None:
    began = now()
    with ray_cluster(address, shape) as workers:
        if not silent:
            where = "on this machine" if address == LOCAL else f"at {address}"
            say(f"Ray {where}: {min(workers, len(tasks)):,} workers, {now() - began:.1f} s to start or join")
        with progress("predicting", totals.size, done=totals.images, silent=silent) as bar:
            for found in spread(PartWriter, (job,), tasks, workers, shape):
                count = PartCount.from_json(found.data)
                totals.note(count, began)
                bar.show(f"predicting ({totals.shares_in_words()})")
                bar.advance(count.images, count.images)
                _check_unreadable(totals, asked)
        totals.wall_s = now() - began


def _check_unreadable(totals: Totals, asked: Asked) -> None:
    """Stop as soon as it is certain that more than the allowed share of the whole source cannot be read."""
    allowed = max(1.0, asked.max_unreadable * totals.size) if asked.max_unreadable else 0.0
    if totals.unreadable > allowed:
        raise ValueError(
            f"{totals.unreadable:,} images could not be read, more than {100 * asked.max_unreadable:g} % of "
            f"{totals.size:,}; the column error says why. Go on with a larger --max-unreadable, or, once they can be "
            "read, with --retry-unreadable"
        )


def _beginning(source: Source, plan: Plan, totals: Totals, out: str) -> str:
    text = f"{source.about}: {plan.images:,} images in {plan.parts:,} parts of {plan.part_images:,}, into {out}"
    return f"{text}; {totals.parts:,} parts are finished" if totals.parts else text
