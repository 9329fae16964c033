"""Networks that come trained are bundles in the package, found by name; here a small one stands in for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import call
from offramp import create_model, load_bundle, load_model
from offramp.bundle import read_golden
from offramp.export import export_run
from offramp.models.store import read_tensors
from offramp.pretrained import pretrained_names

pytest_plugins = ["bundles"]


@pytest.fixture
def tiny(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's network in bfloat16 under the name tiny-digits."""
    monkeypatch.setattr("offramp.pretrained.FOLDER", tmp_path / "pretrained")
    return export_run(run, tmp_path / "pretrained" / "tiny-digits", half=True)


def test_half_the_size_and_nearly_the_same_answers(run: Path, tiny: Path, torch_bundle: Path) -> None:
    own, whole = (read_tensors(folder / "model.safetensors") for folder in (tiny, torch_bundle))
    assert {t.dtype for t in own.values()} == {torch.bfloat16, torch.int64}
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tiny, torch_bundle)]
    assert sizes[0] < 0.75 * sizes[1]  # a small network's file is mostly names
    model, images = create_model("tiny-digits", pretrained=True).eval(), read_golden(tiny)[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[name].to(tensor.dtype)) and tensor.dtype in (torch.float32, torch.int64)
    bundle = load_bundle("tiny-digits", device="cpu")
    assert bundle.check_golden() < 1e-3
    ready = torch.from_numpy(bundle.card.preprocessing.normalise(images))
    with torch.inference_mode():
        close = [
            torch.allclose(a, b, atol=0.3) for a, b in zip(model(ready), load_model(run).eval()(ready), strict=True)
        ]
    assert all(close)


def test_verbs_know_its_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrained_names() == ["tiny-digits"]
    assert call(monkeypatch, "export", "tiny-digits", "--out", tmp_path / "onnx", "--format", "onnx") == 0
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    first, second = (load_bundle(source, device="cpu")(images) for source in ("tiny-digits", tmp_path / "onnx"))
    np.testing.assert_array_equal(first.exits, second.exits)
    from PIL import Image

    Image.fromarray(images[0]).save(tmp_path / "one.png")
    assert call(monkeypatch, "predict", "tiny-digits", tmp_path / "one.png") == 0
    assert "exit 1" in capsys.readouterr().out
    assert call(monkeypatch, "export", tmp_path / "onnx", "--out", tmp_path / "again") == 2
    assert "of which no other bundle can be made" in capsys.readouterr().err


def test_mistakes_are_sentences(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pretrained network 'tiny' is unknown; did you mean 'tiny-digits'"):
        create_model("tiny", pretrained=True)
    with pytest.raises(ValueError, match="is trained as it is"):
        create_model("tiny-digits", num_classes=3, pretrained=True)
    with pytest.raises(ValueError, match="is not a bundle"):
        load_bundle("tiny")
    monkeypatch.setattr("offramp.pretrained.FOLDER", tmp_path / "nothing")
    with pytest.raises(ValueError, match="no network comes trained with this version"):
        create_model("tiny-digits", pretrained=True)
