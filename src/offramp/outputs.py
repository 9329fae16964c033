"""What `offramp eval` saved, as it is read back: the anytime tables, and the logits behind every later question.

A run folder goes in; plain arrays and frozen values come out. Nothing here needs torch or builds a network.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp.files import read_json

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
    """The anytime tables of a run, by split, with the number of samples behind each, and the classes' names."""

    model: str
    samples: dict[str, int]
    exits: dict[str, tuple[ExitScore, ...]]
    classes: tuple[str, ...] = ()

    @property
    def costs(self) -> tuple[int, ...]:
        """Mul-adds up to each exit."""
        return tuple(score.mul_adds for score in next(iter(self.exits.values())))

    def to_json(self) -> dict[str, Any]:
        splits = {
            name: {"samples": self.samples[name], "exits": [asdict(score) for score in scores]}
            for name, scores in self.exits.items()
        }
        return {"schema": 1, "model": self.model, "classes": list(self.classes), "splits": splits}

    @staticmethod
    def from_json(value: dict[str, Any]) -> EvalSummary:
        splits = value["splits"]
        return EvalSummary(
            value["model"],
            {name: split["samples"] for name, split in splits.items()},
            {name: tuple(ExitScore(**score) for score in split["exits"]) for name, split in splits.items()},
            tuple(value.get("classes", ())),
        )


@dataclass(frozen=True)
class Outputs:
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
        raise ValueError(f"{run} has not been evaluated; run: offramp eval {run}")
    try:
        return EvalSummary.from_json(read_json(path))
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{path} is damaged; evaluate the run again") from error


def read_outputs(run: str | Path, split: str) -> Outputs:
    """The saved outputs of a split; an empty split and damaged files are a sentence each."""
    if split not in read_summary(run).samples:
        raise ValueError(f"{run} has no {split} split: it was trained with none (data.{split}=0)")
    folder = Path(run) / EVAL / split
    logits = _array(folder / "logits.npy", mapped=True)
    labels, index = _array(folder / "labels.npy"), _array(folder / "index.npy")
    if logits.ndim != 3 or logits.shape[1] != len(labels) or len(labels) != len(index):
        raise ValueError(f"the files in {folder} do not belong together; evaluate the run again")
    if not len(labels):
        raise ValueError(f"the {split} split of {run} is empty")
    difficulty = folder / "difficulty.npy"
    images, thumb_index = _thumbs(folder / "thumbs.npz")
    known = _array(difficulty) if difficulty.is_file() else None
    return Outputs(logits, labels, index, known, images, thumb_index)


def _array(path: Path, mapped: bool = False) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; evaluate the run again") from error
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}); evaluate the run again") from error


def _thumbs(path: Path) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not path.is_file():
        return None, None
    with np.load(path, allow_pickle=False) as file:
        return file["images"], file["index"]
