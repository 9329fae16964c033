"""That the digits are good for what they are for: easy images need only the first exit, hard ones all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offramp.runs.recipe import load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import train_run


@pytest.mark.slow
def test_easy_digits_can_leave_early_and_hard_ones_gain_from_depth(tmp_path: Path) -> None:
    run = train_run(load_recipe("digits-baseline").config, tmp_path / "run")
    evaluate_run(run)
    folder = run / "eval" / "test"
    logits, labels = np.load(folder / "logits.npy"), np.load(folder / "labels.npy")
    right = logits.argmax(2) == labels
    order = np.argsort(np.load(folder / "difficulty.npy"))
    fifth = len(order) // 5
    easiest, hardest = order[:fifth], order[-fifth:]
    assert right[0, easiest].mean() >= 0.97
    assert right[-1, hardest].mean() - right[0, hardest].mean() >= 0.10
