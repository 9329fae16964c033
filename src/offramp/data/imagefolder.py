"""A folder of images (listing.py) as a data set, read by worker processes.

Workers give uint8 images; normalisation happens on the device. Each sample's augmentation follows from the seed and
its place in the stream, whatever the number of workers.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader

from offramp.common.generators import generator
from offramp.common.images import MAX_PIXELS, Preprocessing, UnreadableImage, quiet_pillow, read_image
from offramp.common.seeds import mix
from offramp.data.augment import normalise
from offramp.data.dataset import Batch, Dataset, Shuffle, register_dataset
from offramp.data.device_photos import DeviceCrop
from offramp.data.listing import FileSplit, FolderListing, Unreadable, first_twins, list_folder
from offramp.data.photos import PhotoAugmentation, Transform
from offramp.data.splits import fold_numbers

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
THUMB = 64
READ = 256  # photos at a time, where all of them are read
MOST_WORKERS = 4  # unless more are asked for


@register_dataset("imagefolder")
def load_imagefolder(
    data_dir: str | Path | None,
    seed: int = 0,
    image_size: int = 224,
    calibration: int | None = None,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    folds: int | None = None,
    fold: int = 1,
) -> ImageFolderDataset:
    """Read the folder's file names; images are opened as they are needed.

    `calibration` None holds out a tenth of every class, `workers` None takes as many as there are cores, four at most.
    With `folds`, what is not tested on is parted into so many, and the one with the number `fold` is held out instead.
    """
    listed = list_folder(data_dir, seed, calibration)
    if folds is not None:
        listed = with_fold(listed, folds, fold, seed)
    own = Preprocessing(image_size, round(image_size * 256 / 224), MEAN, STD)
    return ImageFolderDataset(listed, own, usable_workers(workers), max_pixels)


def with_fold(listed: FolderListing, folds: int, fold: int, seed: int) -> FolderListing:
    """The same files with one of several folds held out in place of the calibration split."""
    if not 1 <= fold <= folds:
        raise ValueError(f"data.options.fold must lie between 1 and {folds}, got {fold}")
    everything = not_tested_on(listed)
    held = folds_of(everything, folds, seed) == fold
    if not held.any():
        raise ValueError(f"{len(held)} images cannot be parted into {folds} folds; add some")
    parts = {"train": everything.take(np.flatnonzero(~held)), "calibration": everything.take(np.flatnonzero(held))}
    return replace(listed, splits={**listed.splits, **parts})


def folds_of(files: FileSplit, folds: int, seed: int) -> np.ndarray:
    """The fold of each file, from 1; copies of a photo share one, or networks would judge what they have seen."""
    return fold_numbers(files.labels, folds, seed)[first_twins(files.paths)]


def not_tested_on(listed: FolderListing) -> FileSplit:
    """All that training draws from, the calibration split included, in the folder's order."""
    train, held = listed.splits["train"], listed.splits["calibration"]
    both = FileSplit(
        (*train.paths, *held.paths),
        np.concatenate([train.labels, held.labels]),
        np.concatenate([train.index, held.index]),
    )
    return both.take(np.argsort(both.index, kind="stable"))


def usable_workers(asked: int | None) -> int:
    """As many as asked for; else one for every core, four at most."""
    return min(MOST_WORKERS, os.cpu_count() or 1) if asked is None else asked


def readable(path: Path, max_pixels: int) -> Image.Image | None:
    """The image as RGB, or None if it cannot be read."""
    try:
        return read_image(path, max_pixels)
    except UnreadableImage:
        return None


@dataclass(frozen=True)
class Request:
    """One sample asked of a worker: its row, whether to train on it, and the seed of its augmentation there, if any.

    With a `side` the photo is squeezed whole to a square of it.
    """

    row: int
    training: bool = False
    seed: int | None = None
    side: int | None = None


class _Reader(torch.utils.data.Dataset[tuple[Tensor, int, int, float]]):
    """Runs in the workers: request -> (uint8 image, row used, row that was unreadable or -1, width / height)."""

    def __init__(
        self, split: FileSplit, preprocessing: Preprocessing, max_pixels: int, augmentation: PhotoAugmentation
    ) -> None:
        self.split, self.preprocessing, self.max_pixels = split, preprocessing, max_pixels
        self.image_size, self.augmentation = preprocessing.size, augmentation

    def __getitem__(self, request: Request) -> tuple[Tensor, int, int, float]:
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
        return self._transform(image, request), row, unreadable, image.width / image.height

    def _transform(self, image: Image.Image, request: Request) -> Tensor:
        if request.side is not None:
            square = image.resize((request.side, request.side), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(square)).permute(2, 0, 1)
        if request.seed is None:  # as a box without torch prepares it
            return torch.from_numpy(self.preprocessing.cut(image))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            return self._augmented(image)

    @cached_property
    def _augmented(self) -> Transform:
        """Made where it is used: a worker is sent what is asked for, not what does it."""
        return self.augmentation.transform(self.image_size, self.preprocessing.mean)


def _begin_worker(worker: int) -> None:
    """Ctrl-C and a launcher's SIGTERM reach every process of a group; only the parent should answer."""
    quiet_pillow()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they leave when the parent does


class ImageFolderDataset(Dataset):
    """An image folder in three splits."""

    def __init__(
        self, listed: FolderListing, preprocessing: Preprocessing, workers: int, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.name, self.class_names, self.splits, self.listed = "imagefolder", listed.class_names, listed.splits, listed
        self.workers, self.max_pixels = workers, max_pixels
        self.augmentation = None  # the workers do it
        self.photo_augmentation = PhotoAugmentation()
        self.device_crop: DeviceCrop | None = None  # instead: photos are read once and lie on the device
        self._kept: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
        self.unreadable = Unreadable(listed.images, max_pixels)
        self._take(preprocessing)

    def _take(self, own: Preprocessing) -> None:
        self._preprocessing, self.image_size, self.mean, self.std = own, own.size, own.mean, own.std

    @property
    def identity(self) -> str:
        """Of the training folder's files too: with one more or one less, others are held out."""
        return self.listed.identity

    @property
    def preprocessing(self) -> Preprocessing:
        return self._preprocessing

    def prepared_as(self, preprocessing: Preprocessing) -> ImageFolderDataset:
        """The same files, cut, resized, interpolated and normalised as told."""
        other = copy.copy(self)
        other._take(preprocessing)
        other._kept = {}
        return other

    def size(self, split: str) -> int:
        return len(self.splits[split].paths)

    def stream(
        self, batch_size: int, seed: int, device: torch.device, start: int = 0, places: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.device_crop is not None:
            yield from self._crops(self.device_crop, batch_size, seed, device, start, places)
            return
        mine = range(batch_size) if places is None else places.tolist()
        shuffle = Shuffle(self.size("train"), seed, torch.device("cpu"))

        in_workers = self.augmentation is None

        def requests() -> Iterator[list[Request]]:
            for step in count(start):
                rows = shuffle.rows(step * batch_size, batch_size).tolist()
                draws = [mix(seed, "augment", step, at) if in_workers else None for at in mine]
                yield [Request(rows[at], True, draw) for at, draw in zip(mine, draws, strict=True)]

        for step, (images, labels, *_) in enumerate(self._load("train", requests(), device), start):
            if self.augmentation is not None:
                images = self.augmentation(images, generator(seed, "augment", step, mine[0], device=device))
            yield normalise(images, self.mean, self.std), labels

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        return self.sweep_rows(split, range(self.size(split)), batch_size, device)

    def sweep_rows(self, split: str, rows: range, batch_size: int, device: torch.device) -> Iterator[Batch]:
        requests = [[Request(row) for row in rows[at : at + batch_size]] for at in range(0, len(rows), batch_size)]
        index = torch.from_numpy(self.splits[split].index)
        loaded = self._load(split, requests, device)
        if self.device_crop is not None and split == "calibration":  # seen again after every epoch
            loaded = iter(self._keep((split, rows, batch_size, device), loaded))
        for images, labels, here, _ in loaded:
            yield Batch(normalise(images, self.mean, self.std), labels, index[here])

    def index(self, split: str) -> np.ndarray:
        return self.splits[split].index

    def thumbnails(self, split: str, rows: np.ndarray) -> np.ndarray:
        thumbs = np.zeros((len(rows), THUMB, THUMB, 3), np.uint8)
        for at, row in enumerate(rows):
            image = readable(self.splits[split].paths[row], self.max_pixels)
            if image is not None:
                thumbs[at] = np.array(ImageOps.fit(image, (THUMB, THUMB)))
        return thumbs

    def _crops(
        self,
        crop: DeviceCrop,
        batch_size: int,
        seed: int,
        device: torch.device,
        start: int,
        places: Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches of photos that lie on the device."""
        ((squares, labels, widths),) = self._keep(("train", crop, device), self._squares(crop, device))
        mine = slice(None) if places is None else places.to(device)
        shuffle, draw = Shuffle(len(labels), seed, device), torch.Generator(device=device)
        for step in count(start):
            chosen = shuffle.rows(step * batch_size, batch_size)
            draw.manual_seed(mix(seed, "augment", step))
            images = crop(squares[chosen], widths[chosen], self.image_size, draw)
            yield normalise(images[mine], self.mean, self.std), labels[chosen][mine]

    def _squares(self, crop: DeviceCrop, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """All training photos with their labels and widths: one set of tensors, filled part by part.

        Parts that were put together in the end would take twice the memory.
        """
        side, rows = crop.side(self.image_size), range(self.size("train"))
        requests = [[Request(row, True, side=side) for row in rows[at : at + READ]] for at in range(0, len(rows), READ)]
        squares = torch.empty((len(rows), 3, side, side), dtype=torch.uint8, device=device)
        labels = torch.empty(len(rows), dtype=torch.long, device=device)
        widths, filled = torch.empty(len(rows), device=device), 0
        for images, own, _, wide in self._load("train", requests, device):
            here = slice(filled, filled := filled + len(own))
            squares[here], labels[here], widths[here] = images, own, wide
        yield squares[:filled], labels[:filled], widths[:filled]

    def _keep(self, key: tuple[Any, ...], loaded: Iterator[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """What was loaded under this key, read the first time only."""
        if key not in self._kept:
            self._kept[key] = list(loaded)
        return self._kept[key]

    def _load(self, split: str, requests: Any, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """uint8 images, labels, rows, and how many times as wide as high; unreadable ones are left out of a sweep."""
        part = self.splits[split]
        cuda = device.type == "cuda"
        loader = DataLoader(
            _Reader(part, self._preprocessing, self.max_pixels, self.photo_augmentation),
            batch_sampler=requests,
            num_workers=self.workers,
            pin_memory=cuda,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else it draws from the global one
        )
        labels = torch.from_numpy(part.labels)
        for images, rows, bad, widths in loader:
            self.unreadable.note(part.paths[row] for row in bad[bad >= 0].tolist())
            readable = rows != bad
            if not bool(readable.all()):
                images, rows, widths = images[readable], rows[readable], widths[readable]
            if len(rows):
                here = (part.to(device, non_blocking=True) for part in (images, labels[rows], widths.float()))
                seen, known, wide = here
                yield seen, known, rows, wide
