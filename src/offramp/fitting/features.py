"""Frozen features: every image passes each network once, and what its heads read is kept as arrays.

A data set and networks go in; `FOLDER/VIEW/SPLIT.npz` comes out, one file for each split of each view. A view is a
network with the way it sees the images that are read: in a cascade, resized to its own size. Linear heads are fitted
to these arrays (training/probe.py), by folds if asked for, so that each image can be answered by heads that have not
seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common.console import Bar
from offramp.common.device import exact_float32
from offramp.common.files import writing
from offramp.data import Dataset
from offramp.models.exits import ExitNet, State
from offramp.runs.outputs import read_arrays
from offramp.training.probe import batch_size, fit_linear, seen_by_linear


@dataclass(frozen=True)
class View:
    """A network, what its arrays are called, and what it makes of the images that are read."""

    name: str
    model: ExitNet
    sees: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Features:
    """What each head of a view reads of some images, [N, C] each, with their labels and numbers."""

    heads: tuple[np.ndarray, ...]
    labels: np.ndarray
    index: np.ndarray

    def rows(self, rows: np.ndarray) -> Features:
        return Features(tuple(head[rows] for head in self.heads), self.labels[rows], self.index[rows])


def together(parts: Sequence[Features]) -> Features:
    """All of them, in the order of their numbers: those of train and calibration split are of one list."""
    heads = tuple(np.concatenate(each) for each in zip(*(part.heads for part in parts), strict=True))
    labels, index = (np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "index"))
    return Features(heads, labels, index).rows(np.argsort(index, kind="stable"))


def extract(data: Dataset, views: Sequence[View], split: str, folder: Path, device: torch.device, bar: Bar) -> None:
    """Write the features of a split for all views, in one reading of its images; what is there is left alone."""
    waiting = [view for view in views if not features_file(folder, view, split).is_file()]
    if not waiting or not data.size(split):
        bar.extend(0, 0)
        return
    found: dict[str, list[list[Tensor]]] = {view.name: [[] for _ in view.model.heads] for view in waiting}
    labels, index = [], []
    for view in waiting:
        view.model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    for part in data.sweep(split, batch_size(data), device):
        with torch.inference_mode(), exact_float32():
            for view in waiting:
                for kept, feature in zip(found[view.name], _walk(view, part.images), strict=True):
                    kept.append(feature.float().cpu())
        labels.append(part.labels.cpu().numpy())
        index.append(part.index.cpu().numpy())
        bar.advance(len(part.labels), len(part.labels))
    for view in waiting:
        heads = {f"head{k}": torch.cat(parts).numpy() for k, parts in enumerate(found[view.name], 1)}
        with writing(features_file(folder, view, split)) as file:
            arrays: dict[str, Any] = {**heads, "labels": np.concatenate(labels), "index": np.concatenate(index)}
            np.savez(file, **arrays)


def _walk(view: View, images: Tensor) -> list[Tensor]:
    """What every head's linear layer reads."""
    state: State = (view.sees(images).contiguous(memory_format=torch.channels_last),)
    found = []
    for k, head in enumerate(view.model.heads, 1):
        feature, state = view.model.advance(k, state)
        found.append(seen_by_linear(head, feature))
    return found


def features_file(folder: Path, view: View, split: str) -> Path:
    return folder / view.name / f"{split}.npz"


def read_features(folder: Path, view: View, split: str) -> Features:
    """What `extract` wrote."""
    names = [f"head{k}" for k in range(1, len(view.model.heads) + 1)]
    *heads, labels, index = read_arrays(features_file(folder, view, split), *names, "labels", "index")
    return Features(tuple(heads), labels, index)


@dataclass(frozen=True)
class LinearHead:
    """A head that is shipped, and those that have not seen one fold each: `blind[f]` for the rows of fold f.

    Without folds, the one that is shipped has not seen what was held out.
    """

    shipped: nn.Linear
    blind: Mapping[int, nn.Linear]


def fitted(features: np.ndarray, labels: np.ndarray, folds: np.ndarray | None, num_classes: int) -> LinearHead:
    """Fit a head to features [N, C]; `folds` has each row's number, None where there are none."""
    blind = {}
    for fold in [] if folds is None else np.unique(folds).tolist():
        blind[fold] = _fit(features[folds != fold], labels[folds != fold], num_classes)
    return LinearHead(_fit(features, labels, num_classes), blind)


def _fit(features: np.ndarray, labels: np.ndarray, num_classes: int) -> nn.Linear:
    linear = nn.Linear(features.shape[1], num_classes)
    fit_linear(linear, torch.from_numpy(features), torch.from_numpy(labels))
    return linear


def answers(head: LinearHead, features: np.ndarray, folds: np.ndarray | None = None) -> np.ndarray:
    """The logits [N, C] of the shipped head; with the rows' folds, of the head that has not seen each row."""
    with torch.no_grad(), exact_float32():
        seen = torch.from_numpy(features)
        if folds is None:
            return head.shipped(seen).numpy()
        found = np.empty((len(features), head.shipped.out_features), np.float32)
        for fold, linear in head.blind.items():
            found[folds == fold] = linear(seen[torch.from_numpy(folds == fold)]).numpy()
        return found
