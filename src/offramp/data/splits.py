"""Which samples are held out or kept, by class and by seed; and labels that are made wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.common.files import short_digest
from offramp.common.seeds import mix

Names = Sequence[str] | None  # of the classes, for sentences about them


def rows_digest(index: np.ndarray) -> str:
    """A short name for which samples are in a split, in which order."""
    return short_digest(map(str, index.tolist()))


def hold_out(
    labels: np.ndarray, count: int, seed: int, what: str, names: Names = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into (kept, held out), `count` held out evenly over the classes, both in order."""
    classes = np.unique(labels)
    if count < 0 or (count and len(labels) == 0):
        raise ValueError(f"{what} of {count} samples cannot be held out of {len(labels)}")
    draw = np.random.default_rng(mix(seed, "hold out", what))
    each, left = divmod(count, max(1, len(classes)))
    one_more = draw.permutation(classes)[:left].tolist()
    return _hold_out(labels, {label: each + (label in one_more) for label in classes.tolist()}, draw, what, names)


def hold_out_share(
    labels: np.ndarray, share: float, seed: int, what: str, names: Names = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into (kept, held out): `share` of every class, at least one of each."""
    sizes = dict(enumerate(np.bincount(labels).tolist()))
    draw = np.random.default_rng(mix(seed, "hold out", what))
    return _hold_out(labels, {c: max(1, round(share * n)) for c, n in sizes.items() if n}, draw, what, names)


def fold_numbers(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """A number from 1 to `folds` for every sample; each class is spread over them as evenly as it can be."""
    if folds < 2:
        raise ValueError(f"folds must be 2 or more, got {folds}")
    draw = np.random.default_rng(mix(seed, "folds"))
    found, begun = np.zeros(len(labels), np.int64), 0
    for label in np.unique(labels).tolist():
        rows = draw.permutation(np.flatnonzero(labels == label))
        found[rows] = (begun + np.arange(len(rows))) % folds + 1
        begun += len(rows)
    return found


def _hold_out(
    labels: np.ndarray, takes: dict[int, int], draw: np.random.Generator, what: str, names: Names
) -> tuple[np.ndarray, np.ndarray]:
    held = []
    for label, take in takes.items():
        rows = np.flatnonzero(labels == label)
        if take >= len(rows):
            called = label if names is None else repr(names[label])
            raise ValueError(
                f"the {what} split takes {take} samples of class {called}, which has only {len(rows)}; "
                "ask for fewer or add some"
            )
        held.append(draw.permutation(rows)[:take])
    mask = np.zeros(len(labels), bool)
    mask[np.concatenate(held) if held else []] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def long_tail(labels: np.ndarray, imbalance: float, seed: int) -> np.ndarray:
    """The rows of a long-tailed subset: class c of C keeps floor(n_max * (1/imbalance)^(c/(C-1))) samples."""
    if imbalance < 1:
        raise ValueError(f"imbalance must be 1 or more, the largest class over the smallest, got {imbalance}")
    counts = np.bincount(labels)
    draw = np.random.default_rng(mix(seed, "long tail"))
    kept = []
    for c, available in enumerate(counts.tolist()):
        # A rounding error must not turn an exact 5.0 into 4.
        size = int(np.floor(counts.max() * imbalance ** (-c / max(1, len(counts) - 1)) + 1e-9))
        if size < 1:
            raise ValueError(f"imbalance {imbalance:g} leaves class {c} without samples")
        kept.append(draw.permutation(np.flatnonzero(labels == c))[: min(size, available)])
    return np.sort(np.concatenate(kept))


def with_noise(labels: np.ndarray, share: float, num_classes: int, seed: int) -> np.ndarray:
    """Labels of which a share, drawn by the seed, are those of another class, each of them equally likely."""
    if not 0 <= share <= 1:
        raise ValueError(f"label_noise must lie between 0 and 1, got {share}")
    draw = np.random.default_rng(mix(seed, "label noise"))
    rows = draw.permutation(len(labels))[: round(share * len(labels))]
    noisy = labels.copy()
    noisy[rows] = (labels[rows] + draw.integers(1, num_classes, len(rows))) % num_classes
    return noisy
