"""A network decides how its images are prepared: in training, in evaluation, in its bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import offramp
from offramp.common.images import Preprocessing
from offramp.data import ArrayDataset, prepared_for
from offramp.data.dataset import Dataset
from offramp.models.registry import MODELS, register_model
from offramp.runs.config import RunConfig

CPU = torch.device("cpu")
OWN = Preprocessing(16, 18, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "bicubic")
Writer = Callable[..., Path]


def first(data: Dataset, split: str = "test") -> torch.Tensor:
    return next(data.sweep(split, 4, CPU)).images


def test_a_folder_is_prepared_as_told(image_folder: Writer) -> None:
    data = offramp.load_dataset("imagefolder", data_dir=image_folder(), workers=0)
    other = data.prepared_as(OWN)
    assert (other.image_size, other.mean, other.std, other.preprocessing) == (16, OWN.mean, OWN.std, OWN)
    wanted = OWN.normalise(np.stack([OWN.read(path) for path in data.splits["test"].paths[:4]]))  # type: ignore[attr-defined]
    np.testing.assert_allclose(first(other).numpy(), wanted, atol=1e-6)
    assert next(other.stream(4, 0, CPU))[0].shape == (4, 3, 16, 16)
    assert data.image_size == 224 and data.preprocessing.interpolation == "bilinear"  # the first is as it was
    assert other.identity == data.identity


def test_arrays_take_mean_and_std_and_have_their_size() -> None:
    data = offramp.load_dataset("digits", train=16, calibration=10, test=8)
    assert isinstance(data, ArrayDataset)
    own = Preprocessing(32, 36, OWN.mean, OWN.std, "bicubic")
    other = data.prepared_as(own)
    wanted = own.normalise(data.splits["test"].images[:4])
    np.testing.assert_allclose(first(other).numpy(), wanted, atol=1e-5)
    assert other.preprocessing == Preprocessing(32, 32, OWN.mean, OWN.std, "bicubic")  # nothing was cut off them
    with pytest.raises(ValueError, match="takes images of 16 pixels, those of digits have 32"):
        data.prepared_as(OWN)


def test_a_network_without_wishes_changes_nothing(image_folder: Writer) -> None:
    data = offramp.load_dataset("imagefolder", data_dir=image_folder(), image_size=32, workers=0)
    assert prepared_for(nn.Identity(), data) is data


@pytest.fixture
def own_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))

    def build(num_classes: int, width: int = 4) -> offramp.ExitNet:
        stages = [nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU()), nn.Conv2d(width, width, 3)]
        heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)) for _ in stages]
        model = offramp.ExitNet.from_parts(stages, heads, (3, 16, 16))
        model.preprocessing = OWN  # type: ignore[assignment]
        return model

    register_model("with-wishes", build, num_classes=3)
    yield


def test_training_evaluation_and_bundle_take_it_over(own_network: None, image_folder: Writer, tmp_path: Path) -> None:
    root = image_folder()
    data = {"name": "imagefolder", "dir": str(root), "workers": 0}
    table = {"model": {"name": "with-wishes"}, "data": data, "train": {"epochs": 1, "batch": 8}}
    run = offramp.train_run(RunConfig.from_json(table), tmp_path / "run", device="cpu")
    summary = offramp.evaluate_run(run, device="cpu")
    assert summary.preprocessing == OWN
    offramp.calibrate(run)
    bundle = offramp.load_bundle(offramp.export_run(run, tmp_path / "bundle"), device="cpu")
    assert bundle.card.preprocessing == OWN and bundle.format == "onnx"
    files = sorted((root / "val").rglob("*.png"))
    logits = torch.stack(offramp.load_model(run).eval()(torch.from_numpy(bundle.prepare(files)))).detach().numpy()
    np.testing.assert_allclose(np.load(run / "eval/test/logits.npy"), logits, atol=1e-5)
    with pytest.raises(ValueError, match="data.image_size is 32, but the network takes images of 16 pixels"):
        offramp.train_run(RunConfig.from_json({**table, "data": {**data, "image_size": 32}}), tmp_path / "no")
    assert not (tmp_path / "no").exists()
