"""What training and evaluation ask of a data set, and the data sets that live on the device as tensors.

A data set has the splits `train`, `calibration` (may be empty) and `test`. `stream` gives endless training
batches from any step on; `sweep` goes once over a split in order. Both give normalised images on the device.
A loader is registered by name and called as `loader(seed=..., **options)`, with `data_dir=...` too if it takes that.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.files import short_digest
from offramp.common.generators import generator
from offramp.common.images import Interpolation, Preprocessing
from offramp.common.registry import Registry
from offramp.common.seeds import mix
from offramp.data.augment import Augmentation, normalise
from offramp.data.splits import rows_digest

SPLITS = ("train", "calibration", "test")


@dataclass(frozen=True)
class Batch:
    """Images of a sweep: normalised, with labels and the numbers of `Dataset.index`."""

    images: Tensor
    labels: Tensor
    index: Tensor


class Dataset(ABC):
    """Images of `image_size` x `image_size` pixels in named splits."""

    name: str
    class_names: tuple[str, ...]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bilinear"
    augmentation: Augmentation | None  # of training batches on the device; None: whoever reads the images does it

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def identity(self) -> str:
        """A digest of what decides classes and splits: a run goes with the data it began with, and no others."""
        return short_digest([self.name, *self.class_names, *(str(self.size(split)) for split in SPLITS)])

    @property
    def preprocessing(self) -> Preprocessing:
        """How an image from elsewhere becomes one of these."""
        return Preprocessing(self.image_size, self.image_size, self.mean, self.std, self.interpolation)

    def prepared_as(self, preprocessing: Preprocessing) -> Dataset:
        """The same samples, prepared as a network or a bundle wants them; what cannot be done is a ValueError."""
        if preprocessing != self.preprocessing:
            raise ValueError(f"{self.name} prepares its images in its own way, not as the network asks")
        return self

    @abstractmethod
    def size(self, split: str) -> int:
        """How many samples a split holds."""

    @abstractmethod
    def stream(
        self, batch_size: int, seed: int, device: torch.device, start: int = 0, places: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented training batches `start`, `start + 1`, ... of an endless reshuffled stream.

        `places` picks some places of every batch, for one of several processes.
        """

    @abstractmethod
    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """The samples of a split, in order, without augmentation; the last batch may be smaller."""

    def sweep_rows(self, split: str, rows: range, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Some rows of a split, one after another, for one of several processes.

        Here the whole split is gone over; a data set that can read some rows alone does so.
        """
        at = 0
        for batch in self.sweep(split, batch_size, device):
            here = slice(max(rows.start - at, 0), max(rows.stop - at, 0))
            if len(batch.labels[here]):
                yield Batch(batch.images[here], batch.labels[here], batch.index[here])
            at += len(batch.labels)

    def difficulty(self, split: str) -> np.ndarray | None:
        """How hard each sample of a split was made to be, where that is known."""
        return None

    @abstractmethod
    def index(self, split: str) -> np.ndarray:
        """A number for each sample of a split, by which it can be found again in the source."""

    @property
    def held_out(self) -> str:
        """A digest of which samples training holds out."""
        return rows_digest(self.index("calibration"))

    @abstractmethod
    def thumbnails(self, split: str, rows: np.ndarray) -> np.ndarray:
        """The images at `rows` of a split, uint8 [n, height, width, 3], for people to look at."""

    def some_thumbnails(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """A random handful of images to look at, and their numbers of `index`."""
        draw = np.random.default_rng(mix("thumbs", split))
        rows = np.sort(draw.permutation(self.size(split))[:count])
        return self.thumbnails(split, rows), self.index(split)[rows]

    def steps_per_epoch(self, batch_size: int) -> int:
        """An epoch is floor(N / B) full batches; the rest comes first in the next shuffle's place."""
        steps = self.size("train") // batch_size
        if steps < 1:
            raise ValueError(
                f"batch {batch_size} is larger than the training split of {self.name}, "
                f"which has {self.size('train')} images"
            )
        return steps


DATASETS: Registry[Callable[..., Dataset]] = Registry("data set")
register_dataset = DATASETS.register  # a loader, called as `loader(seed=..., **options)`


def preprocessing_of(network: Any) -> Preprocessing | None:
    """How a network wants its images prepared, if it says so: a module of that name is something else."""
    own = getattr(network, "preprocessing", None)
    return own if isinstance(own, Preprocessing) else None


def prepared_for(network: Any, data: Dataset, image_size: int | None = None) -> Dataset:
    """Data as a network wants its images prepared, where it says so (`network.preprocessing`); else as they are.

    `image_size` is what the data were asked for, if anything.
    """
    own = preprocessing_of(network)
    if own is None:
        return data
    if image_size not in (None, own.size):
        raise ValueError(
            f"data.image_size is {image_size}, but the network takes images of {own.size} pixels; leave it out, or set "
            f"model.overrides.image_size={image_size}"
        )
    return data.prepared_as(own)


class Shuffle:
    """An endless stream of row numbers: one permutation of 0..n-1 after another."""

    def __init__(self, n: int, seed: int, device: torch.device) -> None:
        self.n, self.seed, self.device = n, seed, device
        self._permutations: dict[int, Tensor] = {}

    def rows(self, start: int, length: int) -> Tensor:
        """The stream's entries start .. start + length - 1."""
        first, last = start // self.n, (start + length - 1) // self.n
        self._permutations = {j: self._permutation(j) for j in range(first, last + 1)}
        joined = torch.cat(list(self._permutations.values()))
        return joined[start - first * self.n :][:length]

    def _permutation(self, j: int) -> Tensor:
        if j in self._permutations:
            return self._permutations[j]
        draw = generator(self.seed, "order", j, device=self.device)
        return torch.randperm(self.n, generator=draw, device=self.device)


@dataclass(frozen=True)
class Split:
    """Samples in memory: uint8 images [n, 3, size, size], labels, numbers in the source, known difficulty."""

    images: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    difficulty: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert len(self.images) == len(self.labels) == len(self.index)


class ArrayDataset(Dataset):
    """A data set small enough to live on the device: shuffling, augmentation and normalisation happen there.

    `label_noise` is the share of training labels that were made wrong, if any.
    """

    def __init__(
        self,
        name: str,
        class_names: tuple[str, ...],
        splits: dict[str, Split],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
        label_noise: float = 0.0,
    ) -> None:
        self.name, self.class_names, self.splits = name, class_names, splits
        self.mean, self.std, self.augmentation, self.label_noise = mean, std, augmentation, label_noise
        self.image_size = int(splits["train"].images.shape[-1])
        self._tensors: dict[tuple[torch.device, str], tuple[Tensor, Tensor]] = {}

    @property
    def identity(self) -> str:
        own = super().identity
        return short_digest([own, f"label noise {self.label_noise!r}"]) if self.label_noise else own

    def prepared_as(self, preprocessing: Preprocessing) -> ArrayDataset:
        """The same arrays under another mean and std; they have their size, and nothing is cut off them."""
        if preprocessing.size != self.image_size:
            raise ValueError(
                f"the network takes images of {preprocessing.size} pixels, those of {self.name} have {self.image_size}"
            )
        other = copy.copy(self)
        other.mean, other.std, other.interpolation = (
            preprocessing.mean,
            preprocessing.std,
            preprocessing.interpolation,
        )
        return other

    def size(self, split: str) -> int:
        return len(self.splits[split].labels)

    def stream(
        self, batch_size: int, seed: int, device: torch.device, start: int = 0, places: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._on(device, "train")
        mine = slice(None) if places is None else places.to(device)
        shuffle = Shuffle(len(labels), seed, device)
        draw = torch.Generator(device=device)
        for step in count(start):
            rows = shuffle.rows(step * batch_size, batch_size)
            draw.manual_seed(mix(seed, "augment", step))
            batch = images[rows] if self.augmentation is None else self.augmentation(images[rows], draw)
            batch = batch[mine]
            yield normalise(batch, self.mean, self.std), labels[rows][mine]

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        return self.sweep_rows(split, range(self.size(split)), batch_size, device)

    def sweep_rows(self, split: str, rows: range, batch_size: int, device: torch.device) -> Iterator[Batch]:
        images, labels = self._on(device, split)
        index = torch.from_numpy(self.splits[split].index)
        for at in range(rows.start, rows.stop, batch_size):
            here = slice(at, min(at + batch_size, rows.stop))
            yield Batch(normalise(images[here], self.mean, self.std), labels[here], index[here])

    def difficulty(self, split: str) -> np.ndarray | None:
        return self.splits[split].difficulty

    def index(self, split: str) -> np.ndarray:
        return self.splits[split].index

    def thumbnails(self, split: str, rows: np.ndarray) -> np.ndarray:
        return self.splits[split].images[rows].transpose(0, 2, 3, 1)

    def _on(self, device: torch.device, split: str) -> tuple[Tensor, Tensor]:
        if (device, split) not in self._tensors:
            part = self.splits[split]
            both = torch.from_numpy(part.images), torch.from_numpy(part.labels)
            self._tensors[device, split] = (both[0].to(device), both[1].to(device))
        return self._tensors[device, split]
