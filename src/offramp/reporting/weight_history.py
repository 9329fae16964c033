"""How the weights moved while the network learned: mean weights at every exit, from the samples kept of every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from offramp.reporting.drawing import INK, Panels
from offramp.runs.outputs import read_arrays

SPANS = 25  # points along the schedule: some hundred samples of the rarest kind in each
SHADES = ((0.95, 0.66, 0.20), (0.82, 0.27, 0.42), (0.40, 0.22, 0.70))
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class History:
    """Mean weights at every exit, for spans of epochs: of all samples, and of those allocated to one end."""

    epochs: tuple[float, ...]  # the middle of each span
    all: Rows
    first: Rows  # samples allocated to the first exit: the easiest
    last: Rows  # to the last: the hardest

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> History:
        epochs = tuple(float(epoch) for epoch in value["epochs"])
        rows = {name: tuple(tuple(map(float, row)) for row in value[name]) for name in ("all", "first", "last")}
        if len({np.shape(kind) for kind in rows.values()}) > 1 or len(rows["all"]) != len(epochs):
            raise ValueError("not a mean weight for every span of epochs and every exit")
        return History(epochs, **rows)


def sample_files(run: Path) -> list[Path]:
    """What a run kept of training samples, epoch by epoch."""
    return sorted((run / "samples").glob("epoch-*.npz"))


def weight_history(run: Path) -> History | None:
    """What a run's samples say; nothing where it kept none."""
    files = sample_files(run)
    if not files:
        return None
    spans = [span for span in np.array_split(np.array(files), SPANS) if len(span)]
    return History(tuple(_middle(span) for span in spans), *zip(*map(_means, spans), strict=True))


def _middle(span: np.ndarray) -> float:
    return float(np.mean([int(path.stem.removeprefix("epoch-")) for path in span]))


def _means(span: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Mean weights of all samples, of the first exit's and of the last one's; those of all where an exit has none."""
    kept = [read_arrays(path, "weights", "exits") for path in span]
    weights, exits = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
    chosen = [np.full(len(exits), True), exits == 1, exits == weights.shape[1]]
    rows = [weights[own if own.any() else chosen[0]].mean(0, dtype=np.float64) for own in chosen]
    return tuple(tuple(np.round(row, 4).tolist()) for row in rows)


def weights_by_epoch(history: History | None, name: str) -> Panels | None:
    """Three panels: all samples, the easiest, the hardest; nothing of a single epoch."""
    if history is None or len(history.epochs) < 2:
        return None
    caption = (
        "Mean weight at every exit while the network learned, over some training samples of every epoch: all of "
        "them, those that would leave at the first exit, and those left to the last one."
    )
    titles = {"all": "all samples", "first": "leave at the first exit", "last": "left to the last exit"}
    values = np.array([getattr(history, kind) for kind in titles])
    room = 0.05 * (np.ptp(values) + 0.1)
    limits = (min(values.min(), 1) - room, max(values.max(), 1) + room)
    draws = [partial(_draw, history, kind, title, limits) for kind, title in titles.items()]
    ends = "; ".join(
        f"{title}: {', '.join(f'{weight:.2f}' for weight in getattr(history, kind)[-1])}"
        for kind, title in titles.items()
    )
    words = f"Mean weights from exit to exit at the end of training; {ends}."
    return Panels(name, caption, draws, "third", "Weights while the network learned", words)


def _draw(history: History, kind: str, title: str, limits: tuple[float, float], axes: Axes) -> None:
    rows = np.array(getattr(history, kind))
    for k in range(rows.shape[1]):
        axes.plot(history.epochs, rows[:, k], color=_shade(k, rows.shape[1]), label=f"exit {k + 1}")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(limits)
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean weight")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind == "all":
        axes.legend(loc="best", fontsize=8, ncols=2, handlelength=1.2)


def _shade(k: int, exits: int) -> tuple[float, ...]:
    """From orange over red to violet with depth, readable on light and dark pages alike."""
    at = k / max(1, exits - 1)
    return tuple(float(np.interp(at, (0, 0.5, 1), channel)) for channel in zip(*SHADES, strict=True))
