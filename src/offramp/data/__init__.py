"""Data sets by name: `load_dataset("digits")`, `"cifar10"`, `"cifar100"`, `"imagefolder"`, or one of your own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from offramp.common.names import unknown
from offramp.data import cifar, digits, imagefolder
from offramp.data.augment import AUGMENTATIONS
from offramp.data.dataset import DATASETS, SPLITS, ArrayDataset, Batch, Dataset, Split


def load_dataset(
    name: str, *, data_dir: str | Path | None = None, seed: int = 0, augmentation: str | None = None, **options: Any
) -> Dataset:
    """Load a data set; `options` are those of its loader, such as `calibration` or `imbalance`.

    `augmentation` names what is done to training batches in place of what the data set does itself.
    """
    loader = DATASETS[name]
    known = inspect.signature(loader).parameters
    allowed = [p for p in known if p not in ("seed", "data_dir")]
    for key in options:
        if key not in allowed:
            raise ValueError(unknown(f"option of data set {name!r}", key, allowed))
    if "data_dir" in known:
        options["data_dir"] = data_dir
    replaced = None if augmentation is None else AUGMENTATIONS[augmentation]
    data = loader(seed=seed, **options)
    if replaced is not None:
        data.augmentation = replaced
    return data


__all__ = [
    "DATASETS",
    "SPLITS",
    "ArrayDataset",
    "Batch",
    "Dataset",
    "Split",
    "cifar",
    "digits",
    "imagefolder",
    "load_dataset",
]
