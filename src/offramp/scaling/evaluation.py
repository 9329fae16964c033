"""`offramp eval BUNDLE --ray`: labelled images through a bundle by workers, and one score from what they found.

Each worker opens the data itself and judges ranges of them; a few bits per image come back. Nothing is saved, as by
`offramp eval BUNDLE` without Ray, so that one that was killed begins anew; a worker that dies loses its range alone.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.console import progress, say
from offramp.common.files import short_digest
from offramp.common.images import quiet_pillow
from offramp.common.ray_connection import LOCAL
from offramp.data.listing import most_unreadable
from offramp.running.bundle import load_bundle
from offramp.running.labelled import (
    BundleScore,
    DatasetImages,
    FolderImages,
    Judged,
    judge_images,
    labelled_images,
    score_of,
)
from offramp.runs.config import DataConfig
from offramp.scaling.cluster import Task, WorkerShape, now, ray_cluster, spread
from offramp.scaling.offline import SMALLEST_PART, PackedBundle, worker_name
from offramp.scaling.parts import PartCount, Totals

SPLIT = "test"


@dataclass(frozen=True)
class EvaluationJob:
    """All that a worker must know beside its range."""

    bundle: PackedBundle
    data: DataConfig
    data_dir: str | None
    digest: str  # of what the driver listed


class Judge:
    """A worker: judges one range of the labelled images after another."""

    def __init__(self, job: EvaluationJob) -> None:
        quiet_pillow()
        self.bundle, self.name = job.bundle.load(), worker_name()
        self.images = labelled_images(self.bundle, job.data, job.data_dir, SPLIT)
        if listing_digest(self.images) != job.digest:
            raise ValueError(f"{socket.gethostname()} has other data: every machine needs the same images and labels")

    def __call__(self, number: int, task: bytes) -> bytes:
        began = time.perf_counter()
        start, stop = np.frombuffer(task, np.int64).tolist()
        found = [judge_images(self.bundle, *batch) for batch in self.images.batches(start, stop)]
        left_at = np.concatenate([np.zeros(0, np.int64), *(part.exits for part in found)])
        exits = np.bincount(left_at, minlength=len(self.bundle.costs) + 1)[1:].tolist()
        unreadable = stop - start - len(left_at)
        return packed(found, PartCount(number, tuple(exits), unreadable, time.perf_counter() - began, self.name, now()))


def listing_digest(images: FolderImages | DatasetImages) -> str:
    """A short name for which images with which labels there are, in which order."""
    if isinstance(images, FolderImages):
        rows = zip(map(str, images.files.paths), images.labels.tolist(), strict=True)
        return short_digest(f"{label} {path}" for path, label in rows)
    return short_digest([images.about, str(images.size), *map(str, images.data.index(images.split).tolist())])


def packed(parts: list[Judged], count: PartCount) -> bytes:
    """What a range gave, as bytes."""
    file = io.BytesIO()
    arrays = {
        f"{name}{at}": getattr(part, name) for at, part in enumerate(parts) for name in ("every", "right", "exits")
    }
    np.savez_compressed(file, count=np.frombuffer(count.to_json(), np.uint8), parts=len(parts), **arrays)
    return file.getvalue()


def unpacked(data: bytes) -> tuple[list[Judged], PartCount]:
    """The other way round."""
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        parts = [
            Judged(*(found[f"{name}{at}"] for name in ("every", "right", "exits"))) for at in range(found["parts"])
        ]
        return parts, PartCount.from_json(found["count"].tobytes())


def evaluate_on_ray(
    bundle: str | Path,
    data: DataConfig,
    data_dir: str | Path | None,
    *,
    device: str = "auto",
    address: str = LOCAL,
    shape: WorkerShape | None = None,
) -> BundleScore:
    """How a bundle does on labelled images, judged by workers; equal to what one process finds."""
    shape, place = shape or WorkerShape(), data_dir or data.dir
    place = None if place is None else str(Path(place).absolute())
    here = load_bundle(bundle, device="cpu", threads=1)
    images = labelled_images(here, data, place, SPLIT)
    job = EvaluationJob(PackedBundle.of(bundle, device, shape.threads), data, place, listing_digest(images))
    say(f"{bundle} on {images.about}: {images.size:,} images in ranges of {SMALLEST_PART:,}")
    tasks, began = list(_ranges(images.size)), now()
    found: list[Judged] = []
    totals = Totals(here.costs, images.size)
    with ray_cluster(address, shape) as workers, progress(f"evaluating {images.about}", images.size) as bar:
        for own in spread(Judge, (job,), tasks, workers, shape):
            parts, count = unpacked(own.data)
            found += parts
            totals.note(count, began)
            bar.show(f"evaluating {images.about} ({totals.shares_in_words()})")
            bar.advance(count.images, count.images)
            _check_unreadable(totals.unreadable, images.size)
    if totals.unreadable and isinstance(images, FolderImages):
        say(f"{totals.unreadable:,} images could not be read and are not counted")
    say(totals.speed())
    return score_of(found, here.costs, images.about)


def _ranges(size: int) -> Iterator[Task]:
    for number, start in enumerate(range(0, size, SMALLEST_PART)):
        yield Task(number, np.array([start, min(start + SMALLEST_PART, size)], np.int64).tobytes())


def _check_unreadable(unreadable: int, size: int) -> None:
    most = most_unreadable(size)
    if unreadable > most:
        raise ValueError(
            f"{unreadable:,} of {size:,} images are unreadable, more than the {most:,} that are passed over"
        )
