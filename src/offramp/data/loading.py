"""A data set by its name; importing this registers ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import offramp.data.cifar as cifar
import offramp.data.digits as digits
import offramp.data.imagefolder as imagefolder
from offramp.common.names import unknown
from offramp.data.augment import keeps_photos, new_augmentation, runs_in_workers
from offramp.data.dataset import DATASETS, Dataset


def load_dataset(
    name: str,
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    augmentation: str | None = None,
    augmentation_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Load a data set; `options` are those of its loader, such as `calibration` or `imbalance`.

    `augmentation` names what is done to training batches in place of what the data set does itself, or to its photos
    by the workers that read them.
    """
    loader = DATASETS[name]
    known = inspect.signature(loader).parameters
    allowed = [p for p in known if p not in ("seed", "data_dir")]
    for key in options:
        if key not in allowed:
            raise ValueError(unknown(f"option of data set {name!r}", key, allowed))
    if "data_dir" in known:
        options["data_dir"] = data_dir
    if augmentation_options and augmentation is None:
        raise ValueError("data.augmentation_options need data.augmentation, the name of what they are for")
    replaced = None if augmentation is None else new_augmentation(augmentation, augmentation_options or {})
    data = loader(seed=seed, **options)
    if replaced is not None and (runs_in_workers(replaced) or keeps_photos(replaced)):
        if not isinstance(data, imagefolder.ImageFolderDataset):
            raise ValueError(f"data.augmentation={augmentation} is for photos in folders, not for {name}")
        if keeps_photos(replaced):
            data.device_crop = replaced
        else:
            data.photo_augmentation = replaced
    elif replaced is not None:
        data.augmentation = replaced
    return data


__all__ = ["DATASETS", "cifar", "digits", "imagefolder", "load_dataset"]
