"""Run folders that are written without a training loop: networks put together from what was trained elsewhere.

A network, the configuration that says how it came about, and logits of its held-out and test images go in; a run folder
with `eval/` comes out, which every other verb takes as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common.images import Preprocessing
from offramp.data import Batch, Dataset
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.weights import write_tensors
from offramp.runs.config import ModelConfig, RunConfig
from offramp.runs.folder import WEIGHTS, begin_run
from offramp.runs.manifest import write_manifest
from offramp.runs.outputs import EVAL, SUMMARY, read_summary
from offramp.training.evaluate import write_evaluation

ROWS = 1024


@dataclass(frozen=True)
class Logits:
    """What every exit said of some images, [K, N, C], with their labels and numbers."""

    logits: np.ndarray
    labels: np.ndarray
    index: np.ndarray


class SavedLogits:
    """Logits by split as data to be evaluated: an image is what was said of it."""

    def __init__(self, data: Dataset, splits: Mapping[str, Logits], thumbs: Mapping[str, Dataset]) -> None:
        self.name, self.class_names, self.splits, self.thumbs = data.name, data.class_names, splits, thumbs
        self.preprocessing: Preprocessing | None = data.preprocessing

    def size(self, split: str) -> int:
        return len(self.splits[split].labels) if split in self.splits else 0

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        own = self.splits[split]
        said = torch.from_numpy(np.ascontiguousarray(own.logits.transpose(1, 0, 2)))
        labels, index = torch.from_numpy(own.labels), torch.from_numpy(own.index)
        for at in range(0, len(labels), ROWS):
            here = slice(at, at + ROWS)
            yield Batch(said[here], labels[here], index[here])

    def difficulty(self, split: str) -> np.ndarray | None:
        return None

    def some_thumbnails(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        own = self.thumbs.get(split)
        return None if own is None or not own.size(split) else own.some_thumbnails(split, count)


class _Said(nn.Module):
    def forward(self, said_BKC: Tensor) -> list[Tensor]:
        return list(said_BKC.unbind(1))


def is_written(run: Path) -> bool:
    """Whether a run is finished and evaluated, on held-out images too: those of folds are added last."""
    return (run / EVAL / SUMMARY).is_file() and "calibration" in read_summary(run).samples


def write_run(run: Path, config: RunConfig, model: ExitNet, data: Dataset) -> None:
    """A finished run with this network; the configuration's model becomes what builds it."""
    assert model.spec is not None
    own = ModelConfig(model.spec.name, model.spec.num_classes, False, model.spec.overrides)
    begin_run(run, replace(config, model=own), data, torch.device("cpu"), resume=True)
    write_tensors(run / WEIGHTS, {name: t.cpu().contiguous() for name, t in model.state_dict().items()})
    write_manifest(run, {})


def write_logits(
    run: Path, model: ExitNet, data: Dataset, splits: Mapping[str, Logits], thumbs: Mapping[str, Dataset] | None = None
) -> None:
    """The evaluation of a run from logits that are known already; `thumbs` give images to look at."""
    assert model.spec is not None
    given = SavedLogits(data, splits, {name: data for name in splits} if thumbs is None else thumbs)
    write_evaluation(run, model.spec.name, _Said(), exit_costs(model), given, torch.device("cpu"))
