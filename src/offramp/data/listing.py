"""The files of an image folder: ImageNet's layout, `DIR/train/CLASS/...` and `DIR/val/CLASS/...`, in three splits.

Without `val/` every class gives a fifth of its images (at least one, drawn by the seed) as test split; without
`train/` the class folders lie in DIR itself. An unreadable image is named, counted and passed over; more than one, and
one in a hundred, stops whoever reads. Needs no torch: boxes that only run bundles list folders too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.files import short_digest
from offramp.common.images import SUFFIXES, UnreadableImage, image_files, read_image
from offramp.data.splits import hold_out, hold_out_share

log = logging.getLogger("offramp")

TEST_SHARE = 0.2
CALIBRATION_SHARE = 0.1
ALLOWED_UNREADABLE = 0.01


@dataclass(frozen=True)
class FileSplit:
    """Paths with labels, and their numbers in the folder's sorted list."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    index: np.ndarray

    def take(self, rows: np.ndarray) -> FileSplit:
        return FileSplit(tuple(self.paths[r] for r in rows), self.labels[rows], self.index[rows])


@dataclass(frozen=True)
class FolderListing:
    """The class folders of a folder, its files in three splits, and a digest of those that training draws from."""

    class_names: tuple[str, ...]
    splits: dict[str, FileSplit]
    identity: str

    @property
    def images(self) -> int:
        """Of the whole folder, whichever split they are in."""
        return sum(len(split.paths) for split in self.splits.values())


def list_folder(data_dir: str | Path | None, seed: int = 0, calibration: int | None = None) -> FolderListing:
    """Three splits of a folder; `calibration` None holds out a tenth of every class."""
    root = existing_folder(data_dir)
    train_root = training_root(root)
    names = class_folders(train_root)
    if len(names) < 2:
        raise ValueError(f"{train_root} needs a folder for each of at least two classes, found {len(names)}")
    train = list_files(train_root, names)
    identity = folder_identity(train_root, names, train)
    if (root / "val").is_dir():
        test = list_files(root / "val", names)
    else:
        kept, held = hold_out_share(train.labels, TEST_SHARE, seed, "test")
        train, test = train.take(kept), train.take(held)
    if calibration is None:
        kept, held = hold_out_share(train.labels, CALIBRATION_SHARE, seed, "calibration")
    else:
        kept, held = hold_out(train.labels, calibration, seed, "calibration")
    return FolderListing(names, {"train": train.take(kept), "calibration": train.take(held), "test": test}, identity)


def existing_folder(data_dir: str | Path | None) -> Path:
    """The folder, if it is one."""
    if data_dir is None or not Path(data_dir).is_dir():
        raise ValueError(f"imagefolder needs a data directory with a folder per class, got {data_dir}")
    return Path(data_dir)


def training_root(root: Path) -> Path:
    """Where the class folders lie that training draws from: `train/`, or the folder itself."""
    if (root / "val").is_dir() and not (root / "train").is_dir():
        raise ValueError(f"{root} has val/ but no train/; put the training images under train/CLASS/")
    return root / "train" if (root / "train").is_dir() else root


def folder_identity(root: Path, names: tuple[str, ...], files: FileSplit) -> str:
    """A digest of the classes and of all files that training draws from: with one more, others are held out."""
    listed = short_digest(path.relative_to(root).as_posix() for path in files.paths)
    return short_digest([*names, listed])


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, hidden ones left out."""
    return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))


def list_files(root: Path, names: tuple[str, ...]) -> FileSplit:
    """The images below `root/NAME`, labelled by the name's place."""
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
