"""Images in ImageNet's layout, `DIR/train/CLASS/...` and `DIR/val/CLASS/...`, read by worker processes.

Without `val/` every class gives a fifth of its images (at least one, drawn by the seed) as test split; without
`train/` the class folders lie in DIR itself. Workers give uint8 images; normalisation happens on the device.
Each sample's augmentation follows from the seed and its place in the stream, whatever the number of workers.
An unreadable image is named, counted and passed over; more than one, and one in a hundred, stops the run.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader

from offramp.common.files import short_digest
from offramp.common.images import (
    MAX_PIXELS,
    SUFFIXES,
    Preprocessing,
    UnreadableImage,
    image_files,
    quiet_pillow,
    read_image,
)
from offramp.common.seeds import generator, mix
from offramp.data.augment import normalise
from offramp.data.dataset import Batch, Dataset, Shuffle, register_dataset
from offramp.data.splits import hold_out, hold_out_share

log = logging.getLogger("offramp")

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
TEST_SHARE = 0.2
CALIBRATION_SHARE = 0.1
ALLOWED_UNREADABLE = 0.01
THUMB = 64
MOST_WORKERS = 4  # unless more are asked for


@dataclass(frozen=True)
class FileSplit:
    """Paths with labels, and their numbers in the folder's sorted list."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    index: np.ndarray

    def take(self, rows: np.ndarray) -> FileSplit:
        return FileSplit(tuple(self.paths[r] for r in rows), self.labels[rows], self.index[rows])


@register_dataset("imagefolder")
def load_imagefolder(
    data_dir: str | Path | None,
    seed: int = 0,
    image_size: int = 224,
    calibration: int | None = None,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> ImageFolderDataset:
    """Read the folder's file names; images are opened as they are needed.

    `calibration` None holds out a tenth of every class, `workers` None takes as many as there are cores, four at most.
    """
    if data_dir is None or not Path(data_dir).is_dir():
        raise ValueError(f"imagefolder needs a data directory with a folder per class, got {data_dir}")
    root = Path(data_dir)
    if (root / "val").is_dir() and not (root / "train").is_dir():
        raise ValueError(f"{root} has val/ but no train/; put the training images under train/CLASS/")
    train_root = root / "train" if (root / "train").is_dir() else root
    names = _class_names(train_root)
    train = _list_files(train_root, names)
    listed = short_digest(path.relative_to(train_root).as_posix() for path in train.paths)
    if (root / "val").is_dir():
        test = _list_files(root / "val", names)
    else:
        kept, held = hold_out_share(train.labels, TEST_SHARE, seed, "test")
        train, test = train.take(kept), train.take(held)
    if calibration is None:
        kept, held = hold_out_share(train.labels, CALIBRATION_SHARE, seed, "calibration")
    else:
        kept, held = hold_out(train.labels, calibration, seed, "calibration")
    splits = {"train": train.take(kept), "calibration": train.take(held), "test": test}
    return ImageFolderDataset(names, splits, image_size, usable_workers(workers), listed, max_pixels)


def usable_workers(asked: int | None) -> int:
    """As many as asked for; else one for every core, four at most."""
    return min(MOST_WORKERS, os.cpu_count() or 1) if asked is None else asked


def _class_names(root: Path) -> tuple[str, ...]:
    names = tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))
    if len(names) < 2:
        raise ValueError(f"{root} needs a folder for each of at least two classes, found {len(names)}")
    return names


def _list_files(root: Path, names: tuple[str, ...]) -> FileSplit:
    strangers = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name not in names and p.name[0] != ".")
    if strangers:
        raise ValueError(f"{root} has the class {strangers[0]!r}, which the training folder does not have")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = image_files(root / name)
        if not found:
            raise ValueError(f"{root / name} holds no images ({', '.join(sorted(SUFFIXES))})")
        paths += found
        labels += [label] * len(found)
    return FileSplit(tuple(paths), np.array(labels, np.int64), np.arange(len(paths)))


def readable(path: Path, max_pixels: int) -> Image.Image | None:
    """The image as RGB, or None if it cannot be read."""
    try:
        return read_image(path, max_pixels)
    except UnreadableImage:
        return None


def _preprocessing(image_size: int) -> Preprocessing:
    return Preprocessing(image_size, round(image_size * 256 / 224), MEAN, STD)


@dataclass(frozen=True)
class Request:
    """One sample asked of a worker: its row, whether to train on it, and the seed of its augmentation there, if any."""

    row: int
    training: bool = False
    seed: int | None = None


class _Reader(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Runs in the workers: request -> (uint8 image, row used, row that was unreadable or -1)."""

    def __init__(self, split: FileSplit, image_size: int, max_pixels: int) -> None:
        from torchvision.transforms import v2

        self.split, self.image_size, self.max_pixels = split, image_size, max_pixels
        self.augment = v2.Compose([v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()])
        self.preprocessing = _preprocessing(image_size)

    def __getitem__(self, request: Request) -> tuple[Tensor, int, int]:
        image = readable(self.split.paths[request.row], self.max_pixels)
        unreadable = -1 if image else request.row
        row = request.row
        while image is None and request.training:  # in training the next readable one stands in
            row = (row + 1) % len(self.split.paths)
            if row == request.row:
                break
            image = readable(self.split.paths[row], self.max_pixels)
        if image is None:
            image = Image.new("RGB", (self.image_size, self.image_size))
        return self._transform(image, request.seed), row, unreadable

    def _transform(self, image: Image.Image, seed: int | None) -> Tensor:
        if seed is None:  # as a box without torch prepares it
            return torch.from_numpy(self.preprocessing.cut(image))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            image = self.augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _begin_worker(worker: int) -> None:
    """Ctrl-C and a launcher's SIGTERM reach every process of a group; only the parent should answer."""
    quiet_pillow()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they leave when the parent does


class Unreadable:
    """Counts the unreadable images of a folder, each once, and stops the run when there are too many."""

    def __init__(self, images: int, max_pixels: int) -> None:
        self.images, self.max_pixels = images, max_pixels  # of the whole folder, whichever split they are in
        self.paths: dict[Path, str] = {}  # and why

    def note(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self.paths:
                self.paths[path] = self._why(path)
                log.warning("unreadable image passed over (%d so far): %s: %s", len(self.paths), path, self.paths[path])
        if len(self.paths) > max(1, ALLOWED_UNREADABLE * self.images):
            last, why = list(self.paths.items())[-1]
            raise ValueError(
                f"{len(self.paths)} images are unreadable, more than {ALLOWED_UNREADABLE:.0%} of {self.images:,}; the "
                f"last one is {last}: {why}. Repair or remove them before training, or allow larger ones with "
                "data.max_pixels"
            )

    def _why(self, path: Path) -> str:
        """A worker found it unreadable; here it is tried once more, for the reason."""
        try:
            read_image(path, self.max_pixels)
        except UnreadableImage as error:
            return str(error)
        return "it could not be read a moment ago"


class ImageFolderDataset(Dataset):
    """An image folder in three splits."""

    def __init__(
        self,
        class_names: tuple[str, ...],
        splits: dict[str, FileSplit],
        image_size: int,
        workers: int,
        listed: str,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.name, self.class_names, self.splits, self.listed = "imagefolder", class_names, splits, listed
        self.image_size, self.workers, self.mean, self.std = image_size, workers, MEAN, STD
        self.max_pixels = max_pixels
        self.augmentation = None  # the workers crop and mirror
        self.unreadable = Unreadable(sum(map(self.size, splits)), max_pixels)

    @property
    def identity(self) -> str:
        """Of the training folder's files too: with one more or one less, others are held out."""
        return short_digest([*self.class_names, self.listed])

    @property
    def preprocessing(self) -> Preprocessing:
        return _preprocessing(self.image_size)

    def size(self, split: str) -> int:
        return len(self.splits[split].paths)

    def stream(
        self, batch_size: int, seed: int, device: torch.device, start: int = 0, places: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        mine = range(batch_size) if places is None else places.tolist()
        shuffle = Shuffle(self.size("train"), seed, torch.device("cpu"))

        in_workers = self.augmentation is None

        def requests() -> Iterator[list[Request]]:
            for step in count(start):
                rows = shuffle.rows(step * batch_size, batch_size).tolist()
                draws = [mix(seed, "augment", step, at) if in_workers else None for at in mine]
                yield [Request(rows[at], True, draw) for at, draw in zip(mine, draws, strict=True)]

        for step, (images, labels, _) in enumerate(self._load("train", requests(), device), start):
            if self.augmentation is not None:
                images = self.augmentation(images, generator(seed, "augment", step, mine[0], device=device))
            yield normalise(images, self.mean, self.std), labels

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        everything = range(self.size(split))
        requests = [
            [Request(row) for row in everything[at : at + batch_size]] for at in range(0, len(everything), batch_size)
        ]
        index = torch.from_numpy(self.splits[split].index)
        for images, labels, rows in self._load(split, requests, device):
            yield Batch(normalise(images, self.mean, self.std), labels, index[rows])

    def index(self, split: str) -> np.ndarray:
        return self.splits[split].index

    def thumbnails(self, split: str, rows: np.ndarray) -> np.ndarray:
        thumbs = np.zeros((len(rows), THUMB, THUMB, 3), np.uint8)
        for at, row in enumerate(rows):
            image = readable(self.splits[split].paths[row], self.max_pixels)
            if image is not None:
                thumbs[at] = np.array(ImageOps.fit(image, (THUMB, THUMB)))
        return thumbs

    def _load(self, split: str, requests: Any, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """uint8 images, labels and rows; unreadable images are left out of a sweep."""
        part = self.splits[split]
        cuda = device.type == "cuda"
        loader = DataLoader(
            _Reader(part, self.image_size, self.max_pixels),
            batch_sampler=requests,
            num_workers=self.workers,
            pin_memory=cuda,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else it draws from the global one
        )
        labels = torch.from_numpy(part.labels)
        for images, rows, bad in loader:
            self.unreadable.note(part.paths[row] for row in bad[bad >= 0].tolist())
            readable = rows != bad
            if not bool(readable.all()):
                images, rows = images[readable], rows[readable]
            if len(rows):
                yield images.to(device, non_blocking=True), labels[rows].to(device, non_blocking=True), rows
