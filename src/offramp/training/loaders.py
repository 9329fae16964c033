"""Loaders of one's own as data to evaluate on: iterables of (images, labels) batches, each gone over once.

Images are normalised float tensors [B, 3, height, width]. Where it is known how they were normalised, a random handful
of them is kept for people to look at, and for the golden inputs of a bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.images import Preprocessing
from offramp.common.seeds import mix
from offramp.data.dataset import Batch

Loader = Iterable[tuple[Any, Any]]  # such as torch's DataLoader
KEPT = 512  # images of a split to look at, at most


class LoaderData:
    """Named splits, a loader for each."""

    name = "data of one's own"

    def __init__(
        self, loaders: Mapping[str, Loader], class_names: tuple[str, ...], preprocessing: Preprocessing | None
    ) -> None:
        self.loaders, self.class_names, self.preprocessing = loaders, class_names, preprocessing
        self._thumbs: dict[str, dict[int, np.ndarray]] = {}  # by row

    def size(self, split: str) -> int:
        """As many as the loader says; 1 stands for an unknown number, 0 for no loader."""
        if split not in self.loaders:
            return 0
        try:
            return max(1, len(self.loaders[split].dataset))  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return 1

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """The loader's batches, whatever their size."""
        draw, seen = np.random.default_rng(mix("thumbs", split)), 0
        kept = self._thumbs[split] = {}
        for given in self.loaders[split]:
            images, labels = _checked(given, split, self.preprocessing)
            self._keep(kept, images, seen, draw)
            rows = torch.arange(seen, seen + len(labels))
            seen += len(labels)
            yield Batch(images.to(device), labels.to(device), rows)

    def difficulty(self, split: str) -> np.ndarray | None:
        return None

    def some_thumbnails(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        draw = np.random.default_rng(mix("thumbs shown", split))
        rows = np.sort(draw.permutation(np.array(sorted(self._thumbs[split]), np.int64))[:count])
        return (np.stack([self._thumbs[split][row] for row in rows]), rows) if len(rows) else None

    def _keep(self, kept: dict[int, np.ndarray], images: Tensor, seen: int, draw: np.random.Generator) -> None:
        """Every image of all that went by so far is kept with the same probability."""
        if self.preprocessing is None:
            return
        for at, image in enumerate(images):
            if len(kept) == KEPT:
                if draw.random() >= KEPT / (seen + at + 1):
                    continue
                del kept[list(kept)[draw.integers(KEPT)]]
            kept[seen + at] = _shown(image, self.preprocessing)


def _checked(given: Any, split: str, own: Preprocessing | None) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch."""
    try:
        images, labels = given
        images, labels = torch.as_tensor(images), torch.as_tensor(labels)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {split} loader must give (images, labels), got {type(given).__name__}") from error
    if (
        not images.is_floating_point()
        or labels.dtype not in (torch.int64, torch.int32)
        or labels.shape != images.shape[:1]
    ):
        raise ValueError(
            f"the {split} loader must give float images [B, ...] and whole-number labels [B], got {images.dtype} "
            f"{list(images.shape)} and {labels.dtype} {list(labels.shape)}"
        )
    if own is not None and tuple(images.shape[1:]) != (3, own.size, own.size):
        wanted = [3, own.size, own.size]
        raise ValueError(
            f"with preprocessing.size {own.size} images are {wanted}, but the {split} loader gives "
            f"{list(images.shape[1:])}"
        )
    return images, labels.long()


def _shown(image: Tensor, own: Preprocessing) -> np.ndarray:
    """uint8 [height, width, 3] of a normalised image."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (own.mean, own.std))
    levels = (image.detach().float().cpu() * std + mean) * 255
    return levels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
