"""A bundle on labelled images of one's own: how well it does there, and new thresholds for it.

Images come from a folder with a folder per class, which needs no torch, or from a data set by its name. They are
prepared as the bundle says, and classes are matched by their names.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from offramp.common.console import progress
from offramp.common.files import new_folder, read_json
from offramp.common.images import MAX_PIXELS, Preprocessing, UnreadableImage
from offramp.common.names import unknown
from offramp.common.pretrained import MANIFEST
from offramp.data.listing import FileSplit, FolderListing, Unreadable, folder_layout, list_folder
from offramp.data.splits import rows_digest
from offramp.measuring.calibrate import PolicyRequest, find_policies, stage_times
from offramp.measuring.intervals import Interval, paired_interval, right_interval
from offramp.measuring.policy import Outcome, Policies, mean_cost, shares_of, write_policies
from offramp.running.bundle import POLICY, Bundle, load_bundle, read_cut_photos, write_manifest
from offramp.running.engines.protocol import all_logits
from offramp.running.golden_photos import PHOTOS, PolicyResult, read_photos, write_answers
from offramp.runs.config import DataConfig
from offramp.runs.outputs import SavedOutputs

if TYPE_CHECKING:
    from offramp.data import Dataset

TOGETHER = 256  # images
DECODERS = 4


class LabelledImages(Protocol):
    """Images with the bundle's labels, in batches."""

    about: str  # what they are, in words
    size: int

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Normalised float32 [n, 3, h, w] and labels [n], of those from `start`, a multiple of TOGETHER, to `stop`."""


def known_labels(bundle: Bundle, names: Sequence[str], source: str) -> np.ndarray:
    """The bundle's label of each class of some data, by name."""
    own = bundle.classes or tuple(map(str, range(bundle.card.model.get("num_classes") or 0)))
    for name in names:
        if name not in own:
            raise ValueError(
                f"{source} has a class that {bundle.folder.name} does not know: {unknown('class', name, own)}"
            )
    return np.array([own.index(name) for name in names], np.int64)


class FolderImages:
    """Files of an image folder, decoded by threads; what cannot be read is named and passed over."""

    def __init__(
        self, files: FileSplit, about: str, labels: np.ndarray, own: Preprocessing, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.files, self.about, self.size = files, about, len(files.paths)
        self.labels, self.own, self.max_pixels = labels[files.labels], own, max_pixels
        self.unreadable = Unreadable(self.size, max_pixels)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        end = self.size if stop is None else stop
        with ThreadPoolExecutor(DECODERS) as threads:
            for at in range(start, end, TOGETHER):
                paths = self.files.paths[at : min(at + TOGETHER, end)]
                found = list(threads.map(self._read, paths))
                self.unreadable.note(path for path, image in zip(paths, found, strict=True) if image is None)
                kept = [row for row, image in enumerate(found) if image is not None]
                if kept:
                    images = np.stack([image for image in found if image is not None])
                    yield self.own.normalise(images), self.labels[at + np.array(kept)]

    def _read(self, path: Path) -> np.ndarray | None:
        try:
            return self.own.read(path, self.max_pixels)
        except UnreadableImage:
            return None


class DatasetImages:
    """A split of a data set."""

    def __init__(self, data: Dataset, split: str, labels: np.ndarray) -> None:
        self.data, self.split, self.labels = data, split, labels
        self.about, self.size = f"the {split} split of {data.name}", data.size(split)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        import torch

        assert start % TOGETHER == 0
        end = self.size if stop is None else stop
        whole = self.data.sweep(self.split, TOGETHER, torch.device("cpu"))
        for part in islice(whole, start // TOGETHER, -(-end // TOGETHER)):
            yield part.images.numpy(), self.labels[part.labels.numpy()]


def images_of_folder(
    bundle: Bundle,
    data_dir: str | Path | None,
    split: str,
    calibration: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> FolderImages:
    """The images of a folder for a bundle: all of them, where it holds class folders only.

    In the folder that its network was trained on, and in one with train/ and val/, only the split that training holds
    out; `calibration` is how many it held out, a tenth unless told. Raises where that is not known to be so.
    """
    layout = folder_layout(data_dir, bundle.classes)
    root, names = Path(str(data_dir)), layout.class_names
    if not names:
        raise ValueError(f"{root} needs a folder of images for each class")
    labels = known_labels(bundle, names, str(root))
    files, about = layout.train(), f"all of {root}"
    own = layout.is_of(files, bundle.card.data)
    if layout.split_already or own:
        listed = list_folder(root, bundle.card.seed, calibration)
        if own and not (split == "test" and layout.split_already):
            _refuse_seen(bundle, root, split, listed)
        files = listed.splits[split]
        about = f"the {split} split of {root}" + ("" if layout.split_already else ", which training held out")
    else:
        layout.say_ignored()
    return FolderImages(files, about, labels, bundle.card.preprocessing, max_pixels)


def _refuse_seen(bundle: Bundle, root: Path, split: str, listed: FolderListing) -> None:
    """Raise where training in this folder held out other images than are listed as held out."""
    name, others = bundle.folder.name, "give other labelled images"
    if listed.identity != bundle.card.data:
        raise ValueError(
            f"{name} was trained on {root} by a version that divided it otherwise, so nothing tells which images it "
            f"has not seen; {others}"
        )
    held, known = listed.splits["calibration"].index, bundle.card.held_out
    if split == "test" or known in (None, rows_digest(held)):
        return
    if known == rows_digest(held[:0]):
        raise ValueError(f"{name} was trained on all images of {root} that it is not tested on; {others}")
    raise ValueError(
        f"training of {name} held out other images of {root} than these {len(held):,}; say how many with --set "
        f"data.calibration=N, or {others}"
    )


def images_of_dataset(bundle: Bundle, data: Dataset, split: str) -> DatasetImages:
    """A split of a data set, prepared as the bundle says."""
    ready = data.prepared_as(bundle.card.preprocessing)
    if ready.preprocessing != bundle.card.preprocessing:
        raise ValueError(f"{bundle.folder.name} cuts off the edges of images, those of {data.name} are cut already")
    if not data.size(split):
        raise ValueError(f"{data.name} has no {split} split here (data.{split}=0)")
    return DatasetImages(ready, split, known_labels(bundle, data.class_names, data.name))


def labelled_images(
    bundle: Bundle, config: DataConfig, data_dir: str | Path | None, split: str
) -> FolderImages | DatasetImages:
    """The images that a bundle is tried on (`test`) or calibrated on (`calibration`)."""
    place, own = data_dir or config.dir, bundle.card.preprocessing
    if config.name == "imagefolder":
        if config.image_size not in (None, own.size):
            raise ValueError(
                f"data.image_size is {config.image_size}, but {bundle.folder.name} takes {own.size} pixels"
            )
        return images_of_folder(bundle, place, split, config.calibration, config.max_pixels or MAX_PIXELS)
    from offramp.data import load_dataset

    data = load_dataset(config.name, data_dir=place, seed=bundle.card.seed, **config.given())
    return images_of_dataset(bundle, data, split)


@dataclass(frozen=True)
class BundleScore:
    """How a bundle does on labelled images: top-1 of every exit on everything, and what the policy made of it."""

    samples: int
    exits: tuple[float, ...]
    policy: Outcome
    top1_interval: Interval  # of 95 %
    drop_points: float  # against the last exit, on the same images
    drop_interval: Interval
    about: str = "test images"


@dataclass(frozen=True)
class Judged:
    """What was right about some labelled images: at every exit [K, n], under the policy [n]; where each left [n]."""

    every: np.ndarray
    right: np.ndarray
    exits: np.ndarray


def judge_images(bundle: Bundle, ready: np.ndarray, labels: np.ndarray) -> Judged:
    """Run normalised images through a bundle, with images really leaving, and through every exit."""
    result = bundle.runtime()(ready)
    every = all_logits(bundle.engine, ready).argmax(-1) == labels
    return Judged(every, result.labels == labels, result.exits)


def evaluate_bundle(bundle: Bundle, images: LabelledImages) -> BundleScore:
    """Run labelled images through a bundle, with images really leaving."""
    found = []
    with progress(f"evaluating {images.about}", images.size) as bar:
        for ready, labels in images.batches():
            found.append(judge_images(bundle, ready, labels))
            bar.advance(len(labels), len(labels))
    return score_of(found, bundle.costs, images.about)


def score_of(parts: Sequence[Judged], costs: Sequence[int], about: str) -> BundleScore:
    """How a bundle does, from what was right about all images."""
    if not sum(len(part.right) for part in parts):
        raise ValueError(f"{about}: no image could be read")
    every = np.concatenate([part.every for part in parts], 1)
    right, exits = (np.concatenate([getattr(part, name) for part in parts]) for name in ("right", "exits"))
    policy = Outcome(float(right.mean()), mean_cost(exits, costs), shares_of(exits, len(costs)))
    return BundleScore(
        len(right),
        tuple(every.mean(1).tolist()),
        policy,
        right_interval(right),
        100 * float(every[-1].mean() - right.mean()),
        (0.0, 0.0) if (exits == len(costs)).all() else paired_interval(every[-1], right),
        about,
    )


def calibrate_bundle(
    bundle: Bundle,
    images: LabelledImages,
    out: str | Path,
    request: PolicyRequest | None = None,
    *,
    measure: str = "max_softmax",
    temperature: bool = False,
    times: str | Path | None = None,
    silent: bool = False,
) -> Policies:
    """Find new thresholds for a bundle on labelled images and write them as a new bundle with the same network.

    Its other files are the same; the golden photos get the answers of the new policy.
    """
    milliseconds = None if times is None else stage_times(read_json(times), len(bundle.costs))
    with new_folder(Path(out)) as part:
        saved = _outputs(bundle, images, silent)
        found = find_policies(saved, bundle.costs, request or PolicyRequest(), measure, temperature, milliseconds)
        found = replace(found, schedule=bundle.policies.schedule)
        _write_copy(bundle, found, part)
        load_bundle(part, device="cpu").check_golden()
    return found


def _outputs(bundle: Bundle, images: LabelledImages, silent: bool) -> SavedOutputs:
    """The logits of every exit, as `offramp eval` would save them of a run."""
    logits, labels = [], []
    with progress(f"evaluating {images.about}", images.size, silent=silent) as bar:
        for ready, own in images.batches():
            logits.append(all_logits(bundle.engine, ready))
            labels.append(own)
            bar.advance(len(own), len(own))
    if not labels:
        raise ValueError(f"{images.about}: no image could be read")
    every = np.concatenate(labels)
    return SavedOutputs(np.concatenate(logits, 1), every, np.arange(len(every)), None, None, None)


def _write_copy(bundle: Bundle, policies: Policies, part: Path) -> None:
    """The bundle's files, with another policy and what the golden photos get under it."""
    for name in bundle.files:
        shutil.copyfile(bundle.folder / name, part / name)
    write_policies(part / POLICY, policies)
    photos = read_photos(bundle.folder, bundle.files)
    if photos:
        cut = bundle.card.preprocessing.normalise(read_cut_photos(bundle.folder))
        write_answers(part / PHOTOS, photos, PolicyResult.of(all_logits(bundle.engine, cut), policies))
    (part / MANIFEST).unlink(missing_ok=True)
    write_manifest(part, bundle.format, bundle.card.preprocessing)
