"""A run that takes about a second, and the command line in this process."""

from __future__ import annotations

import sys

import pytest

from offramp.cli import main

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
