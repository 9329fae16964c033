"""What can only be seen on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offramp import evaluate_run
from offramp.build import new_method, new_model, new_optimizer
from offramp.config import RunConfig
from offramp.data import load_dataset
from offramp.objectives.losses import exit_losses
from offramp.runs import read_metrics
from offramp.step import iterate
from offramp.tally import Tally
from offramp.train import train_run
from offramp.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("weighting", ["uniform", "selection", "learned"])
def test_a_step_never_waits_for_the_device(small_config: Callable[..., RunConfig], weighting: str) -> None:
    config = small_config("model.num_classes=10", f"weighting.name={weighting}")
    device = torch.device("cuda")
    data = load_dataset("digits", train=256, calibration=0, test=10)
    model = new_model(config).to(device, memory_format=torch.channels_last)
    optimizer, tally = new_optimizer(model, config.train), Tally(model.num_exits, device)
    method = new_method(config, model.num_exits, exit_losses, device, World())
    stream = data.stream(64, 0, device)

    def step(at: int) -> None:
        for half in iterate(model, optimizer, method, *next(stream), at):
            tally.add(half, at)

    step(0)
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for at in range(1, 10):
            step(at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tally.tensors["seen"].item() == 640


def test_training_on_the_gpu_learns_and_evaluates_as_the_cpu_does(
    tmp_path: Path, small_config: Callable[..., RunConfig]
) -> None:
    run = train_run(small_config("train.epochs=20", "data.train=2000"), tmp_path / "run", device="cuda")
    rows = read_metrics(run)
    assert sum(rows[-1]["train_loss"]) < 0.7 * sum(rows[0]["train_loss"])
    evaluate_run(run, device="cuda")
    gpu = np.load(run / "eval/test/logits.npy").copy()
    evaluate_run(run, device="cpu")
    cpu = np.load(run / "eval/test/logits.npy")
    np.testing.assert_allclose(gpu, cpu, atol=2e-4)
