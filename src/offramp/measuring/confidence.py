"""How sure an exit is of what it says: a number between 0 and 1 per sample, by one of three measures.

Logits [K, N, C] go in, float32 confidences [K, N] come out; a temperature per exit may soften or sharpen the
softmax first. `fit_temperatures` finds the ones with the best likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp.common.names import unknown

CHUNK = 1 << 20  # logits looked at together; they stay in the cache
COLDEST, HOTTEST = 0.05, 20.0  # temperatures beyond these say that the likelihood has no best one


def _max_softmax(chances: Any, xp: Any) -> Any:
    return xp.amax(chances, -1)


def _margin(chances: Any, xp: Any) -> Any:
    best = chances.topk(2).values if hasattr(chances, "topk") else np.partition(chances, (-2, -1))[..., :-3:-1]
    return best[..., 0] - best[..., 1]


def _entropy(chances: Any, xp: Any) -> Any:
    logs = xp.log(chances + (chances == 0))  # 0 log 0 is 0
    return (1 + (chances * logs).sum(-1) / math.log(chances.shape[-1])).clip(0, 1)


# Functions of softmax probabilities [..., C], for numpy arrays and torch tensors alike; `xp` is the library.
MEASURES: dict[str, Callable[[Any, Any], Any]] = {
    "max_softmax": _max_softmax,
    "margin": _margin,
    "entropy": _entropy,
}


def measured(chances: Any, measure: str, xp: Any) -> Any:
    """The confidence of every row of probabilities [..., C]; `xp` is numpy or torch, whichever they belong to."""
    if measure not in MEASURES:
        raise ValueError(unknown("confidence measure", measure, sorted(MEASURES)))
    return MEASURES[measure](chances, xp)


@dataclass(frozen=True)
class Predictions:
    """What every exit said of every sample: how sure it was [K, N] and whether it was right [K, N]."""

    confidences: np.ndarray
    right: np.ndarray

    @property
    def num_exits(self) -> int:
        return len(self.confidences)

    @property
    def samples(self) -> int:
        return self.confidences.shape[1]

    def rows(self, rows: np.ndarray) -> Predictions:
        """Those of some of the samples."""
        return Predictions(self.confidences[:, rows], self.right[:, rows])

    @staticmethod
    def of(
        logits: np.ndarray,
        labels: np.ndarray,
        measure: str = "max_softmax",
        temperatures: Sequence[float] | None = None,
    ) -> Predictions:
        """Confidence and correctness of every exit on every sample."""
        return Predictions(confidences(logits, measure, temperatures), predicted_classes(logits) == labels)


def confidences(
    logits: np.ndarray,
    measure: str = "max_softmax",
    temperatures: Sequence[float] | None = None,
    checked: bool = True,
) -> np.ndarray:
    """How sure each exit is of each sample, float32 [K, N].

    Logits that are not finite are refused, or, unchecked, give confidences that are not numbers.
    """
    if logits.shape[-1] < 2:
        raise ValueError("confidence needs at least two classes")
    found = np.empty(logits.shape[:2], np.float32)
    for k, rows, part in chunks(logits, checked):
        scaled = part if temperatures is None else part / np.float32(temperatures[k])
        with np.errstate(over="ignore"):  # logits too far apart for float32 become -inf, and their powers zero
            shifted = scaled - scaled.max(-1, keepdims=True)
        powers = np.exp(shifted)
        found[k, rows] = measured(powers / powers.sum(-1, keepdims=True), measure, np)
    return found


def predicted_classes(logits: np.ndarray) -> np.ndarray:
    """The class that each exit answers, [K, N]."""
    found = np.empty(logits.shape[:2], np.int64)
    for k, rows, part in chunks(logits):
        found[k, rows] = part.argmax(-1)
    return found


def fit_temperatures(logits: np.ndarray, labels: np.ndarray) -> tuple[float, ...]:
    """The temperature of each exit that makes its softmax most likely, to be fitted on the calibration split."""
    return tuple(_fit_temperature(exit_logits, labels) for exit_logits in logits)


def _fit_temperature(logits_NC: np.ndarray, labels: np.ndarray) -> float:
    """Newton's method for the inverse temperature, in which the likelihood is convex, kept between two bounds."""
    low, high, inverse = 1 / HOTTEST, 1 / COLDEST, 1.0
    for _ in range(100):
        slope = curvature = 0.0
        for _, rows, part in chunks(logits_NC[None]):
            first, second = _slopes(part.astype(np.float64), labels[rows], inverse)
            slope, curvature = slope + first, curvature + second
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        wanted = inverse - slope / curvature if curvature > 0 else low
        if not low < wanted < high:
            wanted = (low * high) ** 0.5
        if abs(wanted - inverse) <= 1e-9 * inverse:
            break
        inverse = wanted
    return 1 / inverse


def _slopes(logits: np.ndarray, labels: np.ndarray, inverse: float) -> tuple[float, float]:
    """First and second derivative of the summed negative log-likelihood with respect to 1/temperature."""
    below = logits - logits.max(-1, keepdims=True)
    powers = np.exp(below * inverse)
    chances = powers / powers.sum(-1, keepdims=True)
    mean = (chances * below).sum(-1)
    spread = (chances * (below - mean[:, None]) ** 2).sum(-1)
    return float((mean - below[np.arange(len(labels)), labels]).sum()), float(spread.sum())


def chunks(logits: np.ndarray, checked: bool = True) -> Iterator[tuple[int, slice, np.ndarray]]:
    """Exit, rows and logits of pieces that fit in the cache; logits that are not finite are refused."""
    step = max(1, CHUNK // logits.shape[-1])
    for k in range(len(logits)):
        for begin in range(0, logits.shape[1], step):
            rows = slice(begin, begin + step)
            part = np.asarray(logits[k, rows])
            if checked and not np.isfinite(part).all():
                raise ValueError(f"exit {k + 1} has logits that are not finite; the run must be evaluated again")
            yield k, rows, part
