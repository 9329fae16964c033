"""Networks of a library and cascades in the training loop: pretrained, prepared as they say, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import resumed, same_weights
from offramp import create_model, evaluate_run, load_model, train_run, with_settings
from offramp.runs.config import RunConfig

DIGITS = ("data.train=64", "data.calibration=20", "data.test=20", "train.epochs=2", "train.batch=32")
EVERY_STEP = "train.save_seconds=0"
CUT = ("model.name=timm/test_resnet", "model.overrides={exits=3, options={drop_path_rate=0.1}, head='chained'}")
FINE = (
    "train.optimizer=adamw",
    "train.learning_rate=1e-3",
    "train.depth_decay=0.7",
    "train.head_rate=3.0",
    "train.decay_norms=false",
    "train.ema=0.9",
    "train.cutmix=1.0",
    "objective.name=distillation",
    "objective.options={source='mean', label_smoothing=0.1}",
)


def config(*settings: str) -> RunConfig:
    return with_settings(RunConfig(), [EVERY_STEP, *settings])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "photos" / str(number % 3) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (50, 40, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.mark.parametrize("weighting", ["uniform", "learned"])
def test_fine_tuning_resumes_bit_for_bit(weighting: str, tmp_path: Path) -> None:
    given = config(*DIGITS, *CUT, *FINE, f"weighting.name={weighting}")
    run = train_run(given, tmp_path / "run", device="cpu")
    assert load_model(run).input_shape == (3, 32, 32)  # the digits' size
    assert same_weights(run, resumed(given, run, tmp_path / "again"))


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_a_cascade_learns_with_learned_weights(order: str, tmp_path: Path) -> None:
    given = config(*DIGITS, "model.name=cascade", "weighting.name=learned", f"weighting.order={order}")
    run = train_run(given, tmp_path / "run", device="cpu")
    assert load_model(run).num_exits == 6
    assert same_weights(run, resumed(given, run, tmp_path / "again"))


def test_training_starts_from_a_single_network(tmp_path: Path) -> None:
    """Frozen under new heads, its last exit answers as before, bit for bit."""
    single = train_run(
        config(*DIGITS, "model.name=timm/test_resnet", "model.overrides={exits=1}"), tmp_path / "single", device="cpu"
    )
    heads = config(*DIGITS, *CUT, f"model.pretrained='{single}'", "train.parts=inner_heads", "train.probe=true")
    run = train_run(heads, tmp_path / "heads", device="cpu")
    images = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load_model(run).eval()(images)[-1], load_model(single).eval()(images)[-1])
    (tmp_path / "single").rename(tmp_path / "gone")  # what a resumed run started from may be gone
    assert same_weights(run, resumed(heads, run, tmp_path / "again"))


def test_photos_are_prepared_as_the_network_says(photos: Path, tmp_path: Path) -> None:
    given = config(
        "data.name=imagefolder", f"data.dir='{photos}'", "data.workers=0", "train.epochs=1", "train.batch=8", *CUT
    )
    run = train_run(with_settings(given, ["model.overrides.image_size=24"]), tmp_path / "run", device="cpu")
    prepared = evaluate_run(run, device="cpu").preprocessing
    wanted = create_model("timm/test_resnet", 3, exits=1, image_size=24).preprocessing
    assert prepared == wanted and prepared is not None and prepared.size == 24
    with pytest.raises(ValueError, match="data.image_size is 40, but the network takes images of 24"):
        train_run(
            with_settings(given, ["model.overrides.image_size=24", "data.image_size=40"]), tmp_path / "no", device="cpu"
        )


def test_a_probe_alone_is_a_run(tmp_path: Path) -> None:
    probe = ("train.parts=heads", "train.probe=true", "train.epochs=0")
    run = train_run(config(*DIGITS, *CUT, *probe), tmp_path / "run", device="cpu")
    top1 = [score.top1 for score in evaluate_run(run, device="cpu").exits["test"]]
    assert len(top1) == 3 and max(top1) > 0.15
    with pytest.raises(ValueError, match="train.epochs must be 1 or more; 0 is for heads that are linear probes"):
        config("train.epochs=0")
