"""A small trained, evaluated and calibrated run and its bundles, made once for all tests that need them."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "run"
    config = with_settings(load_recipe("digits-baseline").config, [*SMALL_RUN, *SETTINGS, "data.calibration=200"])
    train_run(config, folder, device="cpu")
    evaluate_run(folder, device="cpu")
    calibrate_run(folder, PolicyRequest(q=0.9))
    return folder


@pytest.fixture(scope="session")
def torch_bundle(run: Path) -> Path:
    return export_run(run, run.parent / "torch-bundle")


@pytest.fixture(scope="session")
def onnx_bundle(run: Path) -> Path:
    return export_run(run, run.parent / "onnx-bundle", format="onnx")
