"""Data sets by name: `load_dataset("digits")`, `"cifar10"`, `"cifar100"`, `"imagefolder"`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offramp.common.names import unknown
from offramp.data.cifar import load_cifar
from offramp.data.dataset import SPLITS, ArrayDataset, Batch, Dataset, Split
from offramp.data.digits import load_digits
from offramp.data.imagefolder import load_imagefolder

_loaders: dict[str, Callable[..., Dataset]] = {
    "cifar10": partial(load_cifar, "cifar10"),
    "cifar100": partial(load_cifar, "cifar100"),
    "digits": load_digits,
    "imagefolder": load_imagefolder,
}
DATASETS = tuple(_loaders)


def load_dataset(name: str, *, data_dir: str | Path | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load a data set; `options` are those of its loader, such as `calibration` or `imbalance`."""
    if name not in _loaders:
        raise ValueError(unknown("data set", name, DATASETS))
    loader = _loaders[name]
    allowed = [p for p in inspect.signature(loader).parameters if p not in ("seed", "data_dir")]
    for key in options:
        if key not in allowed:
            raise ValueError(unknown(f"option of data set {name!r}", key, allowed))
    if "data_dir" in inspect.signature(loader).parameters:
        options["data_dir"] = data_dir
    return loader(seed=seed, **options)


__all__ = ["DATASETS", "SPLITS", "ArrayDataset", "Batch", "Dataset", "Split", "load_dataset"]
