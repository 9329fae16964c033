"""One command from a folder of images to a bundle and a report, and again from where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from helpers.runs import call
from offramp import load_bundle
from offramp.common.formatting import millions
from offramp.fitting.fit import configuration, typical_side
from offramp.running.labelled import evaluate_bundle, images_of_folder
from offramp.runs.recipe import load_recipe

SMALL = (
    "model.name=msdnet-tiny",
    "model.overrides={blocks=[1, 1], base_width=4, growth=4}",
    "train.epochs=2",
    "data.workers=0",
)


def test_from_a_folder_to_a_bundle_and_again(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = image_folder(classes=3, train=30, val=8)
    words = [word for setting in SMALL for word in ("--set", setting)]
    out = tmp_path / "fitted"
    assert call(monkeypatch, "fit", images, "--out", out, *words) == 0
    said = capsys.readouterr().out
    assert "calibration images right" in said and "The bundle's policy has " in said
    assert str(out / "report.html") in said and (out / "report.html").is_file()
    weights, log = ((out / "run" / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl"))
    logits = (out / "run/eval/test/logits.npy").stat().st_mtime_ns
    bundle = load_bundle(out / "bundle")
    assert bundle.classes == ("class0", "class1", "class2")
    assert json.loads((out / "run/config.json").read_text())["weighting"]["name"] == "learned"
    budget = (bundle.costs[0] + bundle.costs[1]) / 2
    assert call(monkeypatch, "fit", images, "--out", out, "--budget", f"{budget:.0f}", *words) == 0
    assert (out / "run/model.safetensors").read_bytes() == weights  # neither trained nor evaluated again
    assert (out / "run/metrics.jsonl").read_bytes() == log
    assert (out / "run/eval/test/logits.npy").stat().st_mtime_ns == logits
    fitted = load_bundle(out / "bundle")
    assert fitted.policies.policy.mul_adds <= budget
    score = evaluate_bundle(fitted, images_of_folder(fitted, images, "test"))  # the same images, really leaving
    assert f"has {100 * score.policy.top1:.1f} % of the test images right at {millions(score.policy.cost)} " in (
        capsys.readouterr().out
    )
    assert call(monkeypatch, "predict", out / "bundle", images / "val") == 0
    capsys.readouterr()
    for name in ("x", "y"):  # the batch would follow from how many there are
        for label in range(3):
            shutil.copy(images / f"train/class{label}/train000.png", images / f"train/class{label}/{name}.png")
    assert call(monkeypatch, "fit", images, "--out", out, *words) == 2
    assert "was trained on other data" in capsys.readouterr().err


def test_nothing_of_anybody_elses_is_removed(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = image_folder(classes=2, train=10, val=2)
    (tmp_path / "fitted/bundle").mkdir(parents=True)
    (tmp_path / "fitted/bundle/precious.txt").write_text("mine")
    assert call(monkeypatch, "fit", images, "--out", tmp_path / "fitted") == 2
    assert "is not a bundle" in capsys.readouterr().err and (tmp_path / "fitted/bundle/precious.txt").is_file()
    assert call(monkeypatch, "fit", images, "--out", tmp_path / "new", "--format", "onxn") == 2
    assert "did you mean 'onnx'" in capsys.readouterr().err
    assert call(monkeypatch, "fit", images, "--out", tmp_path / "new", "--budget", "1M") == 2
    said = capsys.readouterr().err
    assert "is below exit 1's cost" in said and "the network is msdnet5, which takes 6.8" in said
    assert call(monkeypatch, "fit", images, "--out", tmp_path / "new", "--set", "data.calibration=0") == 2
    assert "a policy needs a calibration split" in capsys.readouterr().err
    assert call(monkeypatch, "fit", images, "--out", images / "fitted") == 2
    assert "lies inside" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_the_network_suits_the_images(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    small = configuration(str(image_folder(classes=2, train=40, val=2)))
    assert (small.model.name, small.data.image_size, small.data.name) == ("msdnet5", 32, "imagefolder")
    assert small.weighting.name == "learned" and 2 <= small.train.batch <= 20 and small.train.batch % 2 == 0
    assert configuration("digits-learned") == load_recipe("digits-learned").config
    with pytest.raises(ValueError, match="nothing is no folder of images here, and no recipe"):
        configuration("nothing")
    with pytest.raises(ValueError, match="did you mean 'digits-learned'"):
        configuration("digits-learnd")


def test_how_large_images_are_is_told_from_their_heads(tmp_path: Path) -> None:
    """Whatever the limit on pixels is, which has its own setting."""
    Image.new("1", (6000, 5000)).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert typical_side([tmp_path / "large.png", tmp_path / "broken.png"]) == 5000
    with pytest.raises(ValueError, match="none of the images that were tried can be read"):
        typical_side([tmp_path / "broken.png"])
