"""A run that takes about a second, and the command line in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offramp.cli import main
from offramp.common.signals import Stopped
from offramp.models.weights import read_tensors
from offramp.runs.config import RunConfig
from offramp.runs.folder import PHASE1
from offramp.training.loop import Setup
from offramp.training.train import train_run, training

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


def stopped_halfway(config: RunConfig, run: Path) -> Path:
    """Train until the first phase that is not half done has come so far, and stop it there as a signal would."""
    caught: list[int] = []
    half: int | None = None
    with pytest.raises(Stopped):
        for event in training(config, run, Setup(torch.device("cpu"), caught=caught), resume=True):
            if event.total:
                half, step = event.total // 2, event.done
                half = half if step < half else None
            else:
                step += 1
            if step == half:
                caught.append(signal.SIGTERM)
    return run


def resumed(config: RunConfig, run: Path, again: Path) -> Path:
    """A finished run once more, stopped in the middle of each of its phases and gone on with each time."""
    for _ in range(1 + (run / PHASE1).is_dir()):
        stopped_halfway(config, again)
    return train_run(config, again, device="cpu", resume=True)


def same_weights(a: Path, b: Path) -> bool:
    left, right = (read_tensors(run / "model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
