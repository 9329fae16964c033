"""Which samples are held out: by class, by seed, and the same number (give or take one) of every class."""

from __future__ import annotations

import numpy as np

from offramp.seeds import mix


def hold_out(labels: np.ndarray, count: int, seed: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into (kept, held out), `count` held out evenly over the classes, both in order."""
    classes = np.unique(labels)
    if count < 0 or (count and len(labels) == 0):
        raise ValueError(f"{what} of {count} samples cannot be held out of {len(labels)}")
    draw = np.random.default_rng(mix(seed, "hold out", what))
    each, left = divmod(count, max(1, len(classes)))
    one_more = set(draw.permutation(classes)[:left].tolist())
    held = []
    for label in classes.tolist():
        rows = np.flatnonzero(labels == label)
        take = each + (label in one_more)
        if take >= len(rows):
            raise ValueError(
                f"{what} of {count} samples takes {take} of each class, but class {label} has only {len(rows)}; "
                f"ask for fewer"
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
