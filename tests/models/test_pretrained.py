"""Networks that come trained are bundles in the package, found by name; mostly a small one stands in for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.runs import call
from offramp import create_model, exit_costs, load_model
from offramp.cli.networks import describe
from offramp.common.pretrained import pretrained_names
from offramp.data import load_dataset
from offramp.measuring.calibrate import calibrate_run
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import outcome, read_policies
from offramp.models.registry import read_tensors
from offramp.running.bundle import all_logits, load_bundle, read_golden
from offramp.running.export import drawn_images, export_run
from offramp.running.labelled import evaluate_bundle, images_of_dataset
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_outputs, read_summary


@pytest.fixture
def tiny(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's network in bfloat16 under the name tiny-digits."""
    monkeypatch.setattr("offramp.common.pretrained.FOLDER", tmp_path / "pretrained")
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
    assert call(monkeypatch, "models") == 0
    assert "tiny-digits comes trained" in capsys.readouterr().out
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


def test_what_comes_trained_is_listed() -> None:
    assert pretrained_names() == ["msdnet5-cifar100", "msdnet7-cifar100"]


@pytest.mark.parametrize("name", pretrained_names())
def test_what_comes_trained_gives_its_golden_logits(name: str) -> None:
    """Its golden inputs are drawn, no image of CIFAR; each exit's guesses about them are the very ones."""
    bundle = load_bundle(name, device="cpu")
    images, expected = read_golden(bundle.folder)
    assert np.abs(images - drawn_images((3, 32, 32)).astype(int)).max() <= 1  # sines may round otherwise elsewhere
    assert bundle.check_golden() < 1e-3
    ready = bundle.card.preprocessing.normalise(images)
    np.testing.assert_array_equal(all_logits(bundle.engine, ready).argmax(-1), expected.argmax(-1))
    assert len(np.unique(expected.argmax(-1))) > 4  # not one answer to everything
    model = create_model(name, pretrained=True)
    assert [cost.mul_adds for cost in exit_costs(model)] == list(bundle.costs)
    assert len(bundle.classes) == 100 and bundle.classes[0] == "apple"


def test_a_bundle_is_tried_on_data(
    run: Path,
    torch_bundle: Path,
    onnx_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every exit scores as the run's evaluation says; the policy as saved logits say it would."""
    data = load_dataset("digits", **read_config(run).data.given())
    saved, policy = read_outputs(run, "test"), load_bundle(torch_bundle).policies.policy
    for folder in (torch_bundle, onnx_bundle):
        loaded = load_bundle(folder, device="cpu")
        score = evaluate_bundle(loaded, images_of_dataset(loaded, data, "test"))
        np.testing.assert_allclose(score.exits, [s.top1 for s in read_summary(run).exits["test"]])
        expected = outcome(
            Predictions.of(saved.logits, saved.labels), policy.thresholds, read_policies(run / "policy.json").costs
        )
        np.testing.assert_allclose([score.policy.top1, score.policy.cost], [expected.top1, expected.cost])
        np.testing.assert_allclose(score.policy.shares, expected.shares)
    assert call(monkeypatch, "eval", torch_bundle) == 2
    assert "say which data set to try it on" in capsys.readouterr().err
    assert call(monkeypatch, "eval", run, "--data", "digits") == 2
    assert "evaluated on its own data; --data is for bundles" in capsys.readouterr().err
    assert call(monkeypatch, "eval", torch_bundle, "--data", "digits", "--set", "data.test=40") == 0
    assert "on 40 images, the test split of digits" in " ".join(capsys.readouterr().out.split())
    assert call(monkeypatch, "eval", torch_bundle, "--data", "digits", "--set", "train.epochs=1") == 2
    assert "only settings of the data count here" in capsys.readouterr().err
    assert call(monkeypatch, "eval", torch_bundle, "--data", "digit") == 2
    assert "cifar100" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="digits has a class that msdnet5-cifar100 does not know: class '0' is unknown"
    ):
        images_of_dataset(load_bundle("msdnet5-cifar100", device="cpu"), data, "test")
    data.mean = (0.1, 0.2, 0.3)  # the bundle's own counts
    assert evaluate_bundle(loaded, images_of_dataset(loaded, data, "test")) == score
    data.image_size = 64
    with pytest.raises(ValueError, match="takes images of 32 pixels, those of digits have 64"):
        images_of_dataset(loaded, data, "test")


def test_a_bundle_without_images_of_the_data(run: Path, tmp_path: Path) -> None:
    bundle = export_run(run, tmp_path / "bundle", images=False)
    np.testing.assert_array_equal(read_golden(bundle)[0], drawn_images((3, 32, 32)))


def test_mistakes_are_sentences(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pretrained network 'tiny' is unknown; did you mean 'tiny-digits'"):
        create_model("tiny", pretrained=True)
    with pytest.raises(ValueError, match=r"is trained as it is, for 10 classes.*create_model\('msdnet-tiny', ...\)"):
        create_model("tiny-digits", num_classes=3, pretrained=True)
    assert create_model("tiny-digits", num_classes=10, pretrained=True).spec.num_classes == 10
    with pytest.raises(ValueError, match=r"comes trained; in Python: create_model\('tiny-digits', pretrained=True\)"):
        create_model("tiny-digits")
    with pytest.raises(ValueError, match="tiny is not there; did you mean 'tiny-digits'"):
        load_bundle("tiny")
    with pytest.raises(ValueError, match="is not a bundle"):
        load_bundle(tmp_path)
    with pytest.raises(ValueError, match="tiny is not there; did you mean 'tiny-digits'"):
        export_run("tiny", tmp_path / "out")
    with pytest.raises(ValueError, match="is a bundle, which holds its policies already"):
        calibrate_run("tiny-digits")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-digits").mkdir()  # an empty folder of that name is no bundle
    assert load_bundle("tiny-digits", device="cpu").folder == tiny
    assert [e["mul_adds"] for e in describe("tiny-digits")["exits"]] == list(load_bundle(tiny).costs)
    (tiny / "model.json").write_text("{}")
    with pytest.raises(ValueError, match=r"damaged: model.json is not the file"):
        describe("tiny-digits")
    monkeypatch.setattr("offramp.common.pretrained.FOLDER", tmp_path / "nothing")
    with pytest.raises(ValueError, match="no network comes trained with this version"):
        create_model("tiny-digits", pretrained=True)
