"""A small trained, evaluated and calibrated run and its bundles, made once for all tests that need them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.runs import SMALL_RUN
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.running.export import export_run
from offramp.runs.config import with_settings
from offramp.runs.recipe import load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import train_run

SMALL_NET = "model.overrides={blocks=[1, 1, 1], base_width=4, growth=4, head_width=8}"
SETTINGS = (SMALL_NET, "data.test=400", "data.train=512", "train.epochs=20")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first of several test processes makes, and the others wait for."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    root = (factory.getbasetemp().parent if parallel else factory.getbasetemp()) / "made-once"
    root.mkdir(exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / name).exists():
            make(root / f"{name}.part")
            (root / f"{name}.part").rename(root / name)
    return root / name


def _train(folder: Path) -> None:
    config = with_settings(load_recipe("digits-baseline").config, [*SMALL_RUN, *SETTINGS, "data.calibration=200"])
    train_run(config, folder, device="cpu")
    evaluate_run(folder, device="cpu")
    calibrate_run(folder, PolicyRequest(q=0.9))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "run", _train)


@pytest.fixture(scope="session")
def torch_bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "torch-bundle", lambda folder: export_run(run, folder))


@pytest.fixture(scope="session")
def onnx_bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "onnx-bundle", lambda folder: export_run(run, folder, format="onnx"))
