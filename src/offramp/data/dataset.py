"""What training and evaluation ask of a data set, and the data sets that live on the device as tensors.

A data set has the splits `train`, `calibration` (may be empty) and `test`. `stream` gives endless training
batches from any step on; `sweep` goes once over a split in order. Both give normalised images on the device.
A loader is registered by name and called as `loader(seed=..., **options)`, with `data_dir=...` too if it takes that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from offramp.common.files import short_digest
from offramp.common.images import Preprocessing
from offramp.common.registry import Registry
from offramp.common.seeds import generator, mix
from offramp.data.augment import Augmentation, normalise

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
        return Preprocessing(self.image_size, self.image_size, self.mean, self.std)

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

    def difficulty(self, split: str) -> np.ndarray | None:
        """How hard each sample of a split was made to be, where that is known."""
        return None

    @abstractmethod
    def index(self, split: str) -> np.ndarray:
        """A number for each sample of a split, by which it can be found again in the source."""

    @abstractmethod
    def thumbnails(self, split: str, rows: np.ndarray) -> np.ndarray:
        """The images at `rows` of a split, uint8 [n, height, width, 3], for people to look at."""

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
    """A data set small enough to live on the device: shuffling, augmentation and normalisation happen there."""

    def __init__(
        self,
        name: str,
        class_names: tuple[str, ...],
        splits: dict[str, Split],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
    ) -> None:
        self.name, self.class_names, self.splits = name, class_names, splits
        self.mean, self.std, self.augmentation = mean, std, augmentation
        self.image_size = int(splits["train"].images.shape[-1])
        self._tensors: dict[tuple[torch.device, str], tuple[Tensor, Tensor]] = {}

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
        images, labels = self._on(device, split)
        index = torch.from_numpy(self.splits[split].index)
        for at in range(0, len(labels), batch_size):
            here = slice(at, at + batch_size)
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
