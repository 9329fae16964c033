"""Data sets by name: `load_dataset("digits")`, `"cifar10"`, `"cifar100"`, `"imagefolder"`, or one of your own.

Names are imported on first use: listing a folder's files (listing.py) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.data.dataset import (
        DATASETS,
        SPLITS,
        ArrayDataset,
        Batch,
        Dataset,
        Split,
        prepared_for,
        preprocessing_of,
    )
    from offramp.data.loading import load_dataset

_REGISTERED = ("DATASETS", "load_dataset")  # from where ours are registered


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'offramp.data' has no attribute {name!r}")
    return getattr(import_module(f"offramp.data.{'loading' if name in _REGISTERED else 'dataset'}"), name)


__all__ = [
    "DATASETS",
    "SPLITS",
    "ArrayDataset",
    "Batch",
    "Dataset",
    "Split",
    "load_dataset",
    "prepared_for",
    "preprocessing_of",
]
