"""A bundle in the field: tried on labelled images of one's own, and given new thresholds by them."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.runs import call
from offramp import PolicyRequest, load_bundle, load_dataset
from offramp.common.files import sha256
from offramp.data.listing import FileSplit, folder_layout, list_folder, with_copies_together
from offramp.data.splits import rows_digest
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import outcome
from offramp.running.engines.protocol import all_logits
from offramp.running.labelled import calibrate_bundle, evaluate_bundle, images_of_dataset, images_of_folder

SAVED = Path(__file__).parents[1] / "fixtures" / "0.1"


@pytest.fixture(params=["torch", "onnx"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_bundle")


@pytest.fixture
def field(tmp_path: Path) -> Path:
    """Digits that nobody has seen, a folder for each class but the last two, as PNG files of another size."""
    data = load_dataset("digits", train=16, calibration=16, test=240)
    labels = data.splits["test"].labels  # type: ignore[attr-defined]
    for number, (image, label) in enumerate(zip(data.thumbnails("test", np.arange(240)), labels, strict=True)):
        if label < 8:
            path = tmp_path / "field" / str(label) / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((48, 40)).save(path)
    return tmp_path / "field"


def paths_and_labels(field: Path) -> tuple[list[Path], np.ndarray]:
    paths = sorted(field.rglob("*.png"))
    return paths, np.array([int(path.parent.name) for path in paths])


def test_a_folder_is_prepared_as_the_bundle_says_and_used_whole(bundle: Path, field: Path) -> None:
    loaded = load_bundle(bundle, device="cpu")
    images = images_of_folder(loaded, field, "test")
    paths, labels = paths_and_labels(field)
    assert images.size == len(paths) > 150 and images.about == f"all of {field}"
    score, answers = evaluate_bundle(loaded, images), loaded(paths)
    assert score.policy.top1 == (answers.labels == labels).mean() > 0.4
    assert score.policy.cost == pytest.approx(answers.mul_adds.mean())
    logits = all_logits(loaded.engine, loaded.prepare(paths))
    np.testing.assert_allclose(score.exits, (logits.argmax(-1) == labels).mean(1))


def test_new_thresholds_make_a_whole_new_bundle(bundle: Path, field: Path, tmp_path: Path) -> None:
    loaded, out = load_bundle(bundle, device="cpu"), tmp_path / "new"
    request = PolicyRequest(budget_mul_adds=1.5 * loaded.costs[0])
    found = calibrate_bundle(loaded, images_of_folder(loaded, field, "calibration"), out, request, temperature=True)
    new = load_bundle(out, device="cpu")
    assert new.policies == found != loaded.policies and found.temperatures is not None
    paths, labels = paths_and_labels(field)
    given = Predictions.of(all_logits(loaded.engine, loaded.prepare(paths)), labels, "max_softmax", found.temperatures)
    wanted = outcome(given, found.policy.thresholds, loaded.costs)
    assert (found.policy.top1, found.policy.mul_adds) == pytest.approx((wanted.top1, wanted.cost))
    assert found.policy.mul_adds <= 1.5 * loaded.costs[0]
    before, after = (json.loads((folder / "bundle.json").read_text())["files"] for folder in (bundle, out))
    assert {name for name in before if before[name] != after[name]} <= {"policy.json", "photos.json"}
    assert before["policy.json"] != after["policy.json"] and before.keys() == after.keys()
    assert after == {name: sha256(out / name) for name in after}
    new.check_golden()
    answers = new([out / photo["file"] for photo in json.loads((out / "photos.json").read_text())["photos"]])
    assert answers.exits.tolist() == [p["exit"] for p in json.loads((out / "photos.json").read_text())["photos"]]


def test_a_bundle_that_fails_its_check_is_never_written(
    onnx_bundle: Path, field: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, out = load_bundle(onnx_bundle), tmp_path / "new"

    def failing(*args: object) -> None:
        raise ValueError("not the golden outputs")

    monkeypatch.setattr("offramp.running.bundle.compare_golden", failing)
    with pytest.raises(ValueError, match="not the golden outputs"):
        calibrate_bundle(loaded, images_of_folder(loaded, field, "calibration"), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["field"]
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ValueError, match="is there already"):
        calibrate_bundle(loaded, images_of_folder(loaded, field, "calibration"), out)


@pytest.mark.parametrize("format_", ["torch", "onnx"])
def test_a_bundle_of_version_0_1_gets_new_thresholds_too(format_: str, tmp_path: Path) -> None:
    loaded = load_bundle(SAVED / f"bundle-{format_}", device="cpu")
    data = load_dataset("digits", train=64, calibration=64, test=16)
    found = calibrate_bundle(loaded, images_of_dataset(loaded, data, "calibration"), tmp_path / "new")
    assert load_bundle(tmp_path / "new", device="cpu").policies == found


def test_train_and_val_are_taken_as_a_run_takes_them(onnx_bundle: Path, field: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    for split in ("train", "val"):
        for name in ("0", "1"):
            (both / split / name).mkdir(parents=True)
            for path in sorted((field / name).iterdir())[:: 1 if split == "train" else 3]:
                (both / split / name / path.name).write_bytes(path.read_bytes())
    loaded = load_bundle(onnx_bundle)
    test, calibration = (images_of_folder(loaded, both, split) for split in ("test", "calibration"))
    assert test.size == len(list((both / "val").rglob("*.png")))
    assert 0 < calibration.size < len(list((both / "train").rglob("*.png"))) / 5
    assert "the calibration split" in calibration.about


def test_mistakes_are_sentences(onnx_bundle: Path, field: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_bundle(onnx_bundle)
    with pytest.raises(ValueError, match="nowhere is not there; imagefolder needs"):
        images_of_folder(loaded, field / "nowhere", "test")
    with pytest.raises(ValueError, match="needs a folder of images for each class"):
        images_of_folder(loaded, field / "0", "test")
    (field / "0" / "000.png").write_bytes(b"no image")
    with caplog.at_level(logging.WARNING, "offramp"):
        score = evaluate_bundle(loaded, images_of_folder(loaded, field, "test"))
    assert score.samples == len(paths_and_labels(field)[0]) - 1 and "it is no image of a known kind" in caplog.text
    (field / "eight").mkdir()
    with pytest.raises(ValueError, match="does not know: class 'eight' is unknown"):
        images_of_folder(loaded, field, "test")


def test_on_the_command_line(
    bundle: Path, field: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, new = ("--data", "imagefolder", "--data-dir", field), tmp_path / "new"
    assert call(monkeypatch, "calibrate", bundle, *images, "--out", new, "--q", "0.6") == 0
    following = shlex.split(capsys.readouterr().out.rsplit("next: ", 1)[1])
    assert following == ["offramp", "predict", str(new), str(field)]
    assert call(monkeypatch, *following[1:]) == 0
    assert load_bundle(new, device="cpu").policies.policy.q == 0.6
    assert call(monkeypatch, "eval", new, *images) == 0
    assert f"all of {field}" in " ".join(capsys.readouterr().out.split())
    for words, said in (
        (["calibrate", bundle], "--data imagefolder --data-dir D --out NEW"),
        (["calibrate", bundle, *images, "--out", new], "is there already"),
        (["calibrate", bundle, *images, "--out", tmp_path / "x", "--lazy"], "--lazy is for runs"),
        (["eval", bundle, *images, "--set", "data.image_size=64"], "takes 32 pixels"),
        (["calibrate", tmp_path / "typo", "--q", "1"], "typo is not there"),
        (["calibrate", tmp_path, *images], "is no bundle"),
    ):
        assert call(monkeypatch, *words) == 2
        assert said in capsys.readouterr().err.replace("\n", "")


def test_a_box_without_torch_does_it_too(onnx_bundle: Path, field: Path, tmp_path: Path) -> None:
    def run(*words: object) -> str:
        code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'offramp'; from offramp.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    images, new = ("--data", "imagefolder", "--data-dir", field), tmp_path / "new"
    run("calibrate", onnx_bundle, *images, "--out", new, "--q", "0.6")
    assert "under its policy" in " ".join(run("eval", new, *images).split())
    loaded = load_bundle(onnx_bundle)
    here = calibrate_bundle(
        loaded, images_of_folder(loaded, field, "calibration"), tmp_path / "here", PolicyRequest(q=0.6)
    )
    assert load_bundle(new).policies == here


def test_the_folder_of_training_is_not_used_whole(bundle: Path, field: Path) -> None:
    """What a network was trained on chooses no thresholds and tests nothing."""
    loaded = load_bundle(bundle, device="cpu")
    every = images_of_folder(loaded, field, "test")
    loaded.card = replace(loaded.card, data=list_folder(field).identity, held_out=None)  # of an older version
    test, calibration = (images_of_folder(loaded, field, split) for split in ("test", "calibration"))
    assert test.size + calibration.size < every.size / 2 and "which training held out" in test.about
    assert not set(test.files.paths) & set(calibration.files.paths)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_split_is_taken_only_if_training_held_it_out(onnx_bundle: Path, field: Path, copies: int) -> None:
    """A copy of a photo makes other splits, a network trained on everything has none to be calibrated on."""
    first = min(field.rglob("*.png"))
    for _ in range(copies):
        shutil.copy(first, first.with_name("copy.png"))
    loaded, every = load_bundle(onnx_bundle), list_folder(field, calibration=0)

    def trained(calibration: int | None) -> dict[str, FileSplit]:
        listed = list_folder(field, calibration=calibration)
        held = rows_digest(listed.splits["calibration"].index)
        loaded.card = replace(loaded.card, data=listed.identity, held_out=held)
        return listed.splits

    for calibration in (None, 40):
        own = trained(calibration)
        for split in ("calibration", "test"):
            taken = images_of_folder(loaded, field, split, calibration)
            assert taken.files.paths == own[split].paths and not set(taken.files.paths) & set(own["train"].paths)
    with pytest.raises(ValueError, match=r"held out other images of .*field than these \d+; say how many with --set"):
        images_of_folder(loaded, field, "calibration")
    trained(0)
    with pytest.raises(ValueError, match=r"was trained on all images of .*field that it is not tested on; give other"):
        images_of_folder(loaded, field, "calibration")
    assert images_of_folder(loaded, field, "test").files.paths == every.splits["test"].paths
    layout = folder_layout(field)
    plain = layout.identity(layout.train())
    other = plain if copies else with_copies_together(plain)
    loaded.card = replace(loaded.card, data=other, held_out=None)
    for split in ("calibration", "test"):
        with pytest.raises(ValueError, match="by a version that divided it otherwise"):
            images_of_folder(loaded, field, split)
