"""What `offramp eval` saved, as it is read back: the anytime tables, and the logits behind every later question.

A run folder goes in; plain arrays and frozen values come out. Nothing here needs torch or builds a network.
"""

from __future__ import annotations

import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json
from offramp.common.images import Preprocessing
from offramp.common.pretrained import is_bundle
from offramp.runs.folder import CONFIG, holds_run

EVAL = "eval"
SUMMARY = "eval.json"


@dataclass(frozen=True)
class ExitScore:
    """One row of the anytime table: what an exit costs and how often it is right."""

    exit: int
    params: int
    mul_adds: int
    macs: int
    top1: float
    top5: float


@dataclass(frozen=True)
class EvalSummary:
    """The anytime tables of a run by split, and what else is known of its network and data."""

    model: str
    samples: dict[str, int]
    exits: dict[str, tuple[ExitScore, ...]]
    classes: tuple[str, ...] = ()
    lazy_costs: tuple[int, ...] = ()
    preprocessing: Preprocessing | None = None
    data: str | None = None  # what it was evaluated on, where no run says so

    @property
    def costs(self) -> tuple[int, ...]:
        """Mul-adds up to each exit."""
        return tuple(score.mul_adds for score in next(iter(self.exits.values())))

    def to_json(self) -> dict[str, Any]:
        splits = {
            name: {"samples": self.samples[name], "exits": [asdict(score) for score in scores]}
            for name, scores in self.exits.items()
        }
        told = {} if self.data is None else {"data": self.data}
        return {
            "schema": 1,
            "model": self.model,
            **told,
            "classes": list(self.classes),
            "lazy_costs": list(self.lazy_costs),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_json(),
            "splits": splits,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> EvalSummary:
        splits = value["splits"]
        return EvalSummary(
            value["model"],
            {name: split["samples"] for name, split in splits.items()},
            {name: tuple(ExitScore(**score) for score in split["exits"]) for name, split in splits.items()},
            tuple(value.get("classes", ())),
            tuple(value.get("lazy_costs", ())),
            None if value.get("preprocessing") is None else Preprocessing.from_json(value["preprocessing"]),
            value.get("data"),
        )


@dataclass(frozen=True)
class SavedOutputs:
    """The saved outputs of one split; logits [K, N, C] stay on the disk until they are looked at."""

    logits: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    difficulty: np.ndarray | None
    thumbs: np.ndarray | None
    thumb_index: np.ndarray | None


def read_summary(run: str | Path) -> EvalSummary:
    """The summary that `offramp eval` wrote."""
    path = Path(run) / EVAL / SUMMARY
    if not path.is_file():
        raise ValueError(_not_evaluated(run))
    try:
        found = EvalSummary.from_json(read_json(path))
        costs = found.costs
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{path} is damaged; evaluate the run again") from error
    if not costs or costs[0] <= 0 or list(costs) != sorted(costs):
        raise ValueError(f"{path} is damaged: its costs do not rise from exit to exit")
    return found


def _not_evaluated(run: str | Path) -> str:
    if is_bundle(run):
        return f"{run} is a bundle, which holds its policies already; this needs a run"
    if not Path(run).is_dir():
        return f"{run} is not there"
    mere_model = (Path(run) / CONFIG).is_file() and not holds_run(run)
    return f"{run} has not been evaluated; run: offramp eval {run}{' --data NAME' if mere_model else ''}"


def read_outputs(run: str | Path, split: str) -> SavedOutputs:
    """The saved outputs of a split; an empty split and damaged files are a sentence each."""
    summary = read_summary(run)
    if split not in summary.samples:
        why = f"it was trained with none (data.{split}=0)" if holds_run(run) else "it was evaluated without one"
        raise ValueError(f"{run} has no {split} split: {why}")
    folder = Path(run) / EVAL / split
    logits = read_array(folder / "logits.npy", mapped=True)
    labels, index = read_array(folder / "labels.npy"), read_array(folder / "index.npy")
    known = read_array(folder / "difficulty.npy") if (folder / "difficulty.npy").is_file() else None
    fits = logits.ndim == 3 and logits.shape[:2] == (len(summary.costs), *labels.shape)
    same = labels.shape == index.shape and (known is None or known.shape == labels.shape)
    if not (fits and same and logits.dtype.kind == "f" and labels.dtype.kind in "iu"):
        raise ValueError(f"the files in {folder} do not belong together; evaluate the run again")
    if not len(labels):
        raise ValueError(f"the {split} split of {run} is empty")
    if labels.min() < 0 or labels.max() >= logits.shape[-1]:
        raise ValueError(f"{folder / 'labels.npy'} has classes that the network does not have; evaluate the run again")
    thumbs = folder / "thumbs.npz"
    images, thumb_index = read_arrays(thumbs, "images", "index") if thumbs.is_file() else (None, None)
    return SavedOutputs(logits, labels, index, known, images, thumb_index)


def read_array(path: Path, mapped: bool = False) -> np.ndarray:
    """One saved array; missing or damaged is a sentence."""
    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; evaluate the run again") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged; evaluate the run again") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{path} is damaged; evaluate the run again")
    return found


def read_arrays(path: Path, *names: str) -> tuple[np.ndarray, ...]:
    """Named arrays out of one archive; damaged is a sentence."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return tuple(file[name] for name in names)
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged; remove it or make it again") from error
