"""`offramp eval BUNDLE --ray`: labelled images through a bundle by workers, and one score from what they found.

Each worker opens the data itself and judges ranges of them; a few bits per image come back. Nothing is saved, as by
`offramp eval BUNDLE` without Ray, so that one that was killed begins anew; a worker that dies loses its range alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.console import progress, say
from offramp.common.images import quiet_pillow
from offramp.common.ray_connection import LOCAL
from offramp.data.listing import ALLOWED_UNREADABLE
from offramp.running.bundle import load_bundle
from offramp.running.labelled import BundleScore, FolderImages, Judged, judge_images, labelled_images, score_of
from offramp.runs.config import DataConfig
from offramp.scaling.cluster import Task, WorkerShape, ray_cluster, spread
from offramp.scaling.offline import SMALLEST_PART, PackedBundle

SPLIT = "test"


@dataclass(frozen=True)
class EvaluationJob:
    """All that a worker must know beside its range."""

    bundle: PackedBundle
    data: DataConfig
    data_dir: str | None


class Judge:
    """A worker: judges one range of the labelled images after another."""

    def __init__(self, job: EvaluationJob) -> None:
        quiet_pillow()
        self.bundle = job.bundle.load()
        self.images = labelled_images(self.bundle, job.data, job.data_dir, SPLIT)

    def __call__(self, number: int, task: bytes) -> bytes:
        start, stop = np.frombuffer(task, np.int64).tolist()
        found = [judge_images(self.bundle, *batch) for batch in self.images.batches(start, stop)]
        unreadable = stop - start - sum(len(part.right) for part in found)
        return packed(found, unreadable)


def packed(parts: list[Judged], unreadable: int) -> bytes:
    """What a range gave, as bytes."""
    file = io.BytesIO()
    arrays = {
        f"{name}{at}": getattr(part, name) for at, part in enumerate(parts) for name in ("every", "right", "exits")
    }
    np.savez_compressed(file, unreadable=unreadable, parts=len(parts), **arrays)
    return file.getvalue()


def unpacked(data: bytes) -> tuple[list[Judged], int]:
    """The other way round."""
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        parts = [
            Judged(*(found[f"{name}{at}"] for name in ("every", "right", "exits"))) for at in range(found["parts"])
        ]
        return parts, int(found["unreadable"])


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
    shape = shape or WorkerShape()
    place = None if data_dir is None else str(Path(data_dir).absolute())
    job = EvaluationJob(PackedBundle.of(bundle, device, shape.threads), data, place)
    here = load_bundle(bundle, device="cpu", threads=1)
    images = labelled_images(here, data, place, SPLIT)
    say(f"{bundle} on {images.about}: {images.size:,} images in ranges of {SMALLEST_PART:,}")
    tasks = list(_ranges(images.size))
    found: list[Judged] = []
    unreadable = 0
    with ray_cluster(address, shape) as workers, progress(f"evaluating {images.about}", images.size) as bar:
        for own in spread(Judge, (job,), tasks, workers, shape):
            parts, missing = unpacked(own.data)
            found += parts
            unreadable += missing
            images_done = missing + sum(len(part.right) for part in parts)
            bar.advance(images_done, images_done)
            _check_unreadable(unreadable, images.size)
    if unreadable and isinstance(images, FolderImages):
        say(f"{unreadable:,} images could not be read and are not counted")
    return score_of(found, here.costs, images.about)


def _ranges(size: int) -> Iterator[Task]:
    for number, start in enumerate(range(0, size, SMALLEST_PART)):
        yield Task(number, np.array([start, min(start + SMALLEST_PART, size)], np.int64).tobytes())


def _check_unreadable(unreadable: int, size: int) -> None:
    if unreadable > max(1, ALLOWED_UNREADABLE * size):
        raise ValueError(f"{unreadable:,} images are unreadable, more than {ALLOWED_UNREADABLE:.0%} of {size:,}")
