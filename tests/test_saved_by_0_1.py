"""What offramp 0.1 wrote still loads, resumes and answers."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import offramp
from offramp.bench.serve import running

SAVED = Path(__file__).parent / "fixtures" / "0.1"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


def test_a_finished_run_loads_and_evaluates_as_it_did(copied: Path) -> None:
    run = copied / "finished"
    before = np.load(run / "eval" / "test" / "logits.npy")
    summary = offramp.evaluate_run(run, device="cpu")
    assert [score.top1 for score in summary.exits["test"]] == pytest.approx((before.argmax(-1) == _labels(run)).mean(1))
    np.testing.assert_allclose(np.load(run / "eval" / "test" / "logits.npy"), before, atol=1e-4)


def _labels(run: Path) -> np.ndarray:
    return np.load(run / "eval" / "test" / "labels.npy")


def test_a_finished_run_is_reported(copied: Path) -> None:
    report = offramp.write_report([copied / "finished"], copied / "report.html")
    assert "mul-adds" in report.answer and report.page.stat().st_size > 10_000


def test_an_unfinished_run_goes_on_to_the_same_weights(copied: Path) -> None:
    config = offramp.load_recipe("digits-learned").config
    changes = [
        "model.overrides={blocks=[1, 1], base_width=4, growth=4, head_width=8}",
        *("data.train=128", "data.calibration=30", "data.test=12"),
        *("train.epochs=2", "train.batch=32", "train.save_seconds=600"),
    ]
    offramp.train_run(offramp.with_settings(config, changes), copied / "unfinished", device="cpu", resume=True)
    found, wanted = (offramp.load_model(copied / run).state_dict() for run in ("unfinished", "finished"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("format_", ["torch", "onnx"])
def test_a_bundle_gives_its_golden_outputs(format_: str) -> None:
    bundle = offramp.load_bundle(SAVED / f"bundle-{format_}", device="cpu")
    assert bundle.check_golden() < 1e-3
    images = np.load(bundle.folder / "golden.npz")["images"].transpose(0, 2, 3, 1)
    result = bundle(images)
    assert set(result.exits) <= {1, 2} and len(result) == len(images)


@pytest.mark.parametrize("format_", ["torch", "onnx"])
def test_a_bundle_is_served(format_: str) -> None:
    bundle = offramp.load_bundle(SAVED / f"bundle-{format_}", device="cpu")
    data = io.BytesIO()
    image = np.load(bundle.folder / "golden.npz")["images"][0].transpose(1, 2, 0)
    Image.fromarray(image).save(data, "PNG")
    with running(bundle.folder, bundle) as url:
        answer = httpx.post(f"{url}/predict", files={"images": data.getvalue()}, trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["predictions"][0]["class"] == bundle([image]).labels[0]
