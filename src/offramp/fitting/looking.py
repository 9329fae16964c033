"""What is in a folder of photos, seen before anything is trained: images, classes, splits, sizes, duplicates.

A listed folder goes in; a frozen `Look` comes out, with warnings that say what would help. Of most files only the head
is read; content is compared only where two files of different splits have the same length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.images import UnreadableImage, open_image
from offramp.data.listing import FileSplit, FolderListing, content_of, length_of
from offramp.measuring.intervals import proportion_interval

LOOKED_AT = 100  # images, to tell how large they are
ANY_SIZE = 1 << 40  # pixels
FEW_OF_A_CLASS = 20  # images to train on
WIDE_POINTS = 5.0  # an accuracy that can be off by more than this is worth a warning
LIKELY_TOP1 = 0.85  # what is assumed of it before anything is trained


@dataclass(frozen=True)
class Look:
    """What a person should know of a folder before training."""

    name: str
    images: int
    classes: int
    smallest: tuple[str, int]  # the class with the fewest images to learn from
    largest: tuple[str, int]
    splits: dict[str, int]
    side: int  # the median of the shorter sides
    longer: int  # and of the longer ones
    duplicates: tuple[tuple[str, str], ...]  # files of the test split, and their twins that are trained on
    warnings: tuple[str, ...]


def look_at(folder: str | Path, listed: FolderListing) -> Look:
    """Count, measure and compare the files of a folder."""
    counts = class_counts(listed)
    smallest, largest = min(counts.items(), key=lambda c: c[1]), max(counts.items(), key=lambda c: c[1])
    splits = {name: len(split.paths) for name, split in listed.splits.items()}
    short, long = typical_sides(list(listed.splits["train"].paths))
    twins = duplicates(listed.splits)
    warnings = (*_too_few(splits, counts), *_twins(twins))
    name = Path(folder).resolve().name
    return Look(name, listed.images, len(counts), smallest, largest, splits, short, long, twins, warnings)


def class_counts(listed: FolderListing) -> dict[str, int]:
    """How many images of each class there are to learn from; those that are held out to choose on are among them."""
    labels = np.concatenate([listed.splits[name].labels for name in ("train", "calibration")])
    counts = np.bincount(labels, minlength=len(listed.class_names))
    return dict(zip(listed.class_names, counts.tolist(), strict=True))


def typical_sides(paths: list[Path]) -> tuple[int, int]:
    """The medians of the shorter and of the longer sides of some of the images."""
    sides = []
    for path in paths[:: max(1, len(paths) // LOOKED_AT)]:
        try:
            with open_image(path, max_pixels=ANY_SIZE) as image:  # only its head is read
                sides.append(sorted(image.size))
        except UnreadableImage:
            continue
    if not sides:
        raise ValueError("none of the images that were tried can be read")
    short, long = np.median(sides, axis=0).astype(int).tolist()
    return short, long


def duplicates(splits: Mapping[str, FileSplit]) -> tuple[tuple[str, str], ...]:
    """Files of the test split whose content is also trained or chosen on, each with one such file."""
    mine = _by_length(splits["test"])
    theirs = _by_length(splits["train"], splits["calibration"])
    found = []
    for length in mine.keys() & theirs.keys():
        known = {content_of(path): path for path in theirs[length]}
        found += [(str(path), str(known[own])) for path in mine[length] if (own := content_of(path)) in known]
    return tuple(sorted(found))


def _by_length(*splits: FileSplit) -> dict[int | Path, list[Path]]:
    found: dict[int | Path, list[Path]] = defaultdict(list)
    for split in splits:
        for path in split.paths:
            found[length_of(path)].append(path)
    return found


def _too_few(splits: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Warnings about classes and splits that are too small to learn or to tell anything from."""
    found = []
    few = [name for name, count in counts.items() if count < FEW_OF_A_CLASS]
    if few:
        named = ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")
        found.append(
            f"{len(few)} of {len(counts)} classes have fewer than {FEW_OF_A_CLASS} images to train on ({named}); more "
            "photos of these classes help more than anything else"
        )
    reach = half_width(splits["test"])
    if reach > WIDE_POINTS:
        wanted = 100 * int(np.ceil(splits["test"] * (reach / WIDE_POINTS) ** 2 / 100))
        found.append(
            f"{splits['test']:,} test images: an accuracy from so few can be {reach:.0f} points off either way; with "
            f"about {wanted:,} it would be {WIDE_POINTS:.0f}"
        )
    return found


def half_width(samples: int, share: float = LIKELY_TOP1) -> float:
    """How many points an accuracy from so many images can be off either way (95 %)."""
    low, high = proportion_interval(round(share * samples), samples)
    return 50 * (high - low)


def _twins(found: tuple[tuple[str, str], ...]) -> list[str]:
    if not found:
        return []
    first, twin = found[0]
    are = "image of the test split is" if len(found) == 1 else "images of the test split are"
    return [
        f"{len(found):,} {are} trained on too, for example {first}, which is {twin}; the accuracy at the end would be "
        "too good: keep one of each pair"
    ]
