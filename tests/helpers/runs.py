"""A run that takes about a second, and the command line in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offramp.cli import main
from offramp.models.weights import read_tensors
from offramp.runs.config import RunConfig
from offramp.training.train import train_run

Config = Callable[..., RunConfig]

SMALL_NET = "model.overrides={blocks=[1, 1], base_width=4, growth=4, head_width=8}"
SMALL_RUN = (
    SMALL_NET,
    "data.train=256",
    "data.calibration=40",
    "data.test=60",
    "train.epochs=3",
    "train.batch=64",
    "train.save_seconds=0",
)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run the command line in this process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["offramp", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def resumed(config: RunConfig, run: Path, again: Path) -> Path:
    """A finished run, copied without its end and gone on with from the state before the last."""
    shutil.copytree(run, again)
    (again / "model.safetensors").unlink()
    shutil.rmtree(again / "last")
    (again / "last.1").rename(again / "last")
    return train_run(config, again, device="cpu", resume=True)


def same_weights(a: Path, b: Path) -> bool:
    left, right = (read_tensors(run / "model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
