"""Evaluation: saved logits are the network's own, and memory does not grow with the data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.runs import call
from offramp import create_model, evaluate_run, exit_costs, load_bundle, load_dataset, load_model
from offramp.data import ArrayDataset
from offramp.data.splits import rows_digest
from offramp.measuring.calibrate import calibrate_run
from offramp.models.weights import read_tensors, write_tensors
from offramp.running import labelled
from offramp.running.export import export_run
from offramp.runs.config import DataConfig, RunConfig
from offramp.runs.outputs import EvalSummary, read_summary
from offramp.training.evaluate import count_hits
from offramp.training.train import train_run

Config = Callable[..., RunConfig]


@pytest.fixture
def run(tmp_path: Path, small_config: Config) -> Path:
    return train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")


def test_saved_logits_are_the_networks_own(run: Path) -> None:
    summary = evaluate_run(run, device="cpu")
    model = load_model(run).eval()
    data = load_dataset("digits", train=256, calibration=40, test=60)
    assert isinstance(data, ArrayDataset)
    for split, n in (("calibration", 40), ("test", 60)):
        folder = run / "eval" / split
        batch = next(data.sweep(split, 1000, torch.device("cpu")))
        with torch.inference_mode():
            expected = torch.stack(model(batch.images)).numpy()
        logits = np.load(folder / "logits.npy", mmap_mode="r")
        assert logits.dtype == np.float32 and logits.shape == (2, n, 10)
        np.testing.assert_array_equal(logits, expected)
        labels = np.load(folder / "labels.npy")
        np.testing.assert_array_equal(labels, data.splits[split].labels)
        np.testing.assert_array_equal(np.load(folder / "difficulty.npy"), data.difficulty(split))
        thumbs = np.load(folder / "thumbs.npz")
        place = {i: at for at, i in enumerate(np.load(folder / "index.npy").tolist())}
        rows = [place[i] for i in thumbs["index"].tolist()]
        np.testing.assert_array_equal(thumbs["images"], data.splits[split].images[rows].transpose(0, 2, 3, 1))
        for score, cost, exit_logits in zip(summary.exits[split], exit_costs(model), logits, strict=True):
            assert score.top1 == (exit_logits.argmax(1) == labels).mean()
            order = np.argsort(-exit_logits, 1)[:, :5]
            assert score.top5 == (order == labels[:, None]).any(1).mean()
            assert (score.exit, score.params, score.mul_adds) == (cost.exit, cost.params, cost.mul_adds)
    assert not list((run / "eval").rglob("*.part"))


def test_the_summary_goes_to_json_and_back(run: Path) -> None:
    summary = evaluate_run(run, device="cpu")
    assert read_summary(run) == summary
    assert EvalSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_hits_with_fewer_than_five_classes() -> None:
    logits = torch.tensor([[[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]])
    assert count_hits(logits, torch.tensor([0, 0])).tolist() == [[1], [2]]


def test_without_a_calibration_split_only_the_test_split_is_evaluated(
    tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_run(small_config("train.epochs=1", "data.calibration=0"), tmp_path / "run", device="cpu")
    assert list(evaluate_run(run, device="cpu").exits) == ["test"]
    capsys.readouterr()
    assert call(monkeypatch, "eval", run, "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "next: offramp report" in said and "calibrate" not in said  # there is nothing to choose policies on


def test_an_unfinished_run_says_so(run: Path) -> None:
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has not finished training"):
        evaluate_run(run)


def test_logits_that_are_not_finite_are_refused_and_nothing_is_left(run: Path) -> None:
    from offramp.models.weights import read_tensors, write_tensors

    tensors = read_tensors(run / "model.safetensors")
    tensors["heads.1.linear.bias"][0] = float("nan")
    write_tensors(run / "model.safetensors", tensors)
    (run / "manifest.json").unlink()
    with pytest.raises(ValueError, match="not finite on the calibration split"):
        evaluate_run(run, device="cpu")
    assert not (run / "eval").exists() and not (run / "eval.part").exists()


def test_an_evaluation_that_fails_leaves_the_one_before_it_whole(tmp_path: Path, small_config: Config) -> None:
    run = train_run(small_config(), tmp_path / "run", device="cpu")
    evaluate_run(run, device="cpu")
    before = {p.relative_to(run): p.read_bytes() for p in (run / "eval").rglob("*") if p.is_file()}
    tensors = read_tensors(run / "model.safetensors")
    tensors["heads.1.linear.bias"][0] = float("nan")
    write_tensors(run / "model.safetensors", tensors)
    (run / "manifest.json").unlink()
    with pytest.raises(ValueError, match="not finite"):
        evaluate_run(run, device="cpu")
    assert {p.relative_to(run): p.read_bytes() for p in (run / "eval").rglob("*") if p.is_file()} == before


def test_a_run_is_not_tested_on_a_folder_that_changed(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=2, train=20, val=1, nested=False)
    run = train_run(_on_folder(root), tmp_path / "run", device="cpu")
    summary = evaluate_run(run, device="cpu")
    moved = root.rename(tmp_path / "moved")
    assert evaluate_run(run, data_dir=moved, device="cpu") == summary  # only the folder lies elsewhere
    (moved / "class0").rename(moved / "class9")
    with pytest.raises(ValueError, match="was trained on other data"):
        evaluate_run(run, data_dir=moved, device="cpu")
    (moved / "class9").rename(moved / "class0")
    (moved / "class0/train003.png").unlink()
    with pytest.raises(ValueError, match="other images are held out now"):
        evaluate_run(run, data_dir=moved, device="cpu")
    with pytest.raises(ValueError, match="was trained on other data"):
        train_run(_on_folder(moved), run, device="cpu", resume=True)


def test_a_bundle_is_tested_on_the_split_of_its_run(
    tmp_path: Path, image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = image_folder(classes=2, train=20, val=1, nested=False)
    run = train_run(replace(_on_folder(root), seed=3), tmp_path / "run", device="cpu")
    own = evaluate_run(run, device="cpu")
    calibrate_run(run)
    bundle = export_run(export_run(run, tmp_path / "first"), tmp_path / "second")
    used = []

    def seen(loaded: object, images: labelled.FolderImages) -> labelled.BundleScore:
        used.append(images)
        return evaluated(loaded, images)  # type: ignore[arg-type]

    evaluated = labelled.evaluate_bundle
    monkeypatch.setattr(labelled, "evaluate_bundle", seen)
    words = ("--data", "imagefolder", "--data-dir", root, "--set", "data.image_size=32", "--set", "data.workers=0")
    assert call(monkeypatch, "eval", bundle, *words) == 0
    np.testing.assert_array_equal(used[0].files.index, np.load(run / "eval/test/index.npy"))
    assert own.samples["test"] == used[0].size
    assert call(monkeypatch, "calibrate", bundle, *words, "--out", tmp_path / "new") == 0
    known = load_bundle(bundle, device="cpu").card
    assert known.held_out == rows_digest(np.load(run / "eval/calibration/index.npy")) and known.data is not None
    (root / "class0" / "train003.png").unlink()  # now it is another folder, of which nothing is known to be held out
    assert call(monkeypatch, "eval", bundle, *words) == 0
    assert used[1].size == 41 and used[1].about == f"all of {root}"


@pytest.mark.parametrize("text", ["[]", "{}", "{"])
def test_what_a_run_knows_of_its_data_may_be_damaged(tmp_path: Path, small_config: Config, text: str) -> None:
    run = train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")
    (run / "data.json").write_text(text)
    with pytest.raises(ValueError, match=r"data\.json"):
        evaluate_run(run, device="cpu")
    (run / "data.json").unlink()  # as a run of an older version has it
    assert evaluate_run(run, device="cpu").samples["test"]


def test_images_of_their_own_to_test_on_may_change(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=2, train=12, val=3)
    run = train_run(_on_folder(root), tmp_path / "run", device="cpu")
    (root / "val/class0/val001.png").unlink()
    assert evaluate_run(run, device="cpu").samples["test"] == 5


def _on_folder(root: Path) -> RunConfig:
    net = {"name": "msdnet-tiny", "overrides": {"blocks": [1, 1], "base_width": 4, "growth": 4}}
    data = {"name": "imagefolder", "dir": str(root), "image_size": 32, "workers": 0}
    return RunConfig.from_json({"model": net, "data": data, "train": {"epochs": 1, "batch": 8}})


def test_an_image_folder_with_unreadable_images_is_evaluated(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=2, train=10, val=60)
    (root / "val/class1/val002.png").write_bytes(b"broken")
    net = {"name": "msdnet-tiny", "overrides": {"blocks": [1, 1], "base_width": 4, "growth": 4}}
    data = {"name": "imagefolder", "dir": str(root), "image_size": 32, "workers": 0, "calibration": 0}
    config = RunConfig.from_json({"model": net, "data": data, "train": {"epochs": 1, "batch": 8}})
    run = train_run(config, tmp_path / "run", device="cpu")
    summary = evaluate_run(run, device="cpu")
    assert summary.samples == {"test": 119}
    assert np.load(run / "eval/test/logits.npy").shape == (2, 119, 2)
    assert 62 not in np.load(run / "eval/test/index.npy")


MEMORY_SCRIPT = """
import sys
import numpy as np, torch
from torch import nn
from pathlib import Path
from offramp import ExitNet
from offramp.data.dataset import Batch
from offramp.training.evaluate import save_logits

class Huge:
    image_size = 224
    def size(self, split): return 50_000
    def index(self, split): return np.arange(50_000)
    def difficulty(self, split): return None
    def some_thumbnails(self, split, count): return np.zeros((count, 64, 64, 3), np.uint8), np.arange(count)
    def sweep(self, split, batch, device):
        images = torch.randn(batch, 3, 224, 224)
        for at in range(0, 50_000, batch):
            n = min(batch, 50_000 - at)
            yield Batch(images[:n], torch.zeros(n, dtype=torch.int64), torch.arange(at, at + n))

stages = [nn.Sequential(nn.AvgPool2d(32), nn.Flatten()), *[nn.Identity() for _ in range(4)]]
net = ExitNet.from_parts(stages, [nn.Linear(147, 1000) for _ in range(5)], (3, 224, 224))
samples, hits = save_logits(net, Huge(), "test", Path(sys.argv[1]), torch.device("cpu"), 5)
logits = np.load(Path(sys.argv[1]) / "logits.npy", mmap_mode="r")
from offramp.bench.train import _peak_kilobytes
print(logits.shape, _peak_kilobytes() // 1024)
"""


@pytest.mark.slow
def test_an_imagenet_sized_evaluation_fits_in_two_gigabytes(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    shape, megabytes = out.rsplit(" ", 1)
    assert shape == "(5, 50000, 1000)"
    assert int(megabytes) < 2000


def test_of_a_saved_model_one_split_alone_is_evaluated_too(tmp_path: Path) -> None:
    model = create_model("msdnet-tiny", num_classes=10)
    model.save(tmp_path / "model")
    data = DataConfig("digits", train=20, calibration=20, test=30)
    summary = evaluate_run(tmp_path / "model", data=data, device="cpu", splits=("test",))
    assert summary.samples == {"test": 30}
