"""CIFAR-10 and CIFAR-100 from their original python files, optionally long-tailed, fewer or with wrong labels.

The files are pickles: each is checked against its published md5 before it is opened, and read with an
unpickler that knows nothing but the numpy arrays inside. A calibration split is taken first, the long tail
or the few images to train on from what is left; only their labels are made wrong.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offramp.data.augment import ShiftFlip
from offramp.data.dataset import DATASETS, ArrayDataset, Split
from offramp.data.splits import hold_out, long_tail, with_noise


@dataclass(frozen=True)
class Source:
    """The files of one data set: name -> md5 for training and test, the label key, and the names' file."""

    folder: str
    train: dict[str, str]
    test: dict[str, str]
    meta: tuple[str, str]
    label_key: str
    names_key: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


SOURCES = {
    "cifar10": Source(
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta=("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
        label_key="labels",
        names_key="label_names",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Source(
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta=("meta", "7973b15100ade9c7d40fb424638fde48"),
        label_key="fine_labels",
        names_key="fine_label_names",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays out of plain containers and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file does")


def load_cifar(
    name: str,
    data_dir: str | Path | None,
    seed: int = 0,
    calibration: int = 5_000,
    imbalance: float | None = None,
    train: int | None = None,
    label_noise: float = 0.0,
    download: bool = False,
) -> ArrayDataset:
    """Read `cifar10` or `cifar100` from `data_dir`; `download` fetches it there first if it is missing."""
    if train is not None and imbalance is not None:
        raise ValueError("data.train keeps as many images of every class, data.imbalance does not; leave one out")
    source = SOURCES[name]
    if data_dir is None:
        raise ValueError(f"{name} needs a data directory: give --data-dir the folder that holds {source.folder}/")
    if download:
        _download(name, Path(data_dir))
    folder = Path(data_dir) / source.folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; put the original python files there or add --set data.download=true")
    images, labels = _read_all(folder, source.train, source.label_key)
    kept, held = hold_out(labels, calibration, seed, "calibration")
    if imbalance is not None:
        kept = kept[long_tail(labels[kept], imbalance, seed)]
    if train not in (None, len(kept)):
        kept = kept[hold_out(labels[kept], train, seed, "train")[1]]
    names = tuple(str(n) for n in _read(folder / source.meta[0], source.meta[1])[source.names_key])
    test_images, test_labels = _read_all(folder, source.test, source.label_key)
    splits = {
        "train": Split(images[kept], with_noise(labels[kept], label_noise, len(names), seed), kept),
        "calibration": Split(images[held], labels[held], held),
        "test": Split(test_images, test_labels, np.arange(len(test_labels))),
    }
    return ArrayDataset(name, names, splits, source.mean, source.std, ShiftFlip(pad=4, flip=True), label_noise)


def _read_all(folder: Path, files: dict[str, str], label_key: str) -> tuple[np.ndarray, np.ndarray]:
    parts = [_read(folder / name, md5) for name, md5 in files.items()]
    images = np.concatenate([np.asarray(p["data"], np.uint8) for p in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([np.asarray(p[label_key], np.int64) for p in parts])
    return images, labels


def _read(path: Path, md5: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(f"{path} is not the original file: its md5 is {found}, not {md5}")
    try:
        return dict(_ArraysOnly(io.BytesIO(data), encoding="latin1").load())
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {error}") from error


def _download(name: str, data_dir: Path) -> None:
    if (data_dir / SOURCES[name].folder).is_dir():
        return
    from torchvision import datasets

    try:
        getattr(datasets, name.upper())(data_dir, download=True)
    except RuntimeError as error:
        raise ValueError(f"{name} could not be downloaded: {error}") from error


for _name in SOURCES:
    DATASETS.add(_name, partial(load_cifar, _name))
