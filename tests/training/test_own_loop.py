"""From any loop: a network and its loaders become the folder that `offramp eval` writes, and then a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offramp
from helpers.nets import Theirs, loader
from helpers.runs import call
from offramp.data import ArrayDataset
from offramp.runs.outputs import read_outputs, read_summary

PREPARED = offramp.Preprocessing(32, 32, (0.5,) * 3, (0.25,) * 3)
TINY = {"blocks": [1, 1], "base_width": 4, "growth": 4, "head_width": 8}


@pytest.fixture(scope="module")
def digits() -> ArrayDataset:
    data = offramp.load_dataset("digits", train=16, calibration=50, test=40)
    assert isinstance(data, ArrayDataset)
    return data


def split_loader(data: ArrayDataset, split: str) -> DataLoader[tuple[Tensor, ...]]:
    batch = next(data.sweep(split, 1000, torch.device("cpu")))
    return DataLoader(TensorDataset(batch.images, batch.labels), batch_size=16)


def test_loaders_give_what_a_data_set_gives(digits: ArrayDataset, tmp_path: Path) -> None:
    """The same network, evaluated from loaders and from its saved folder: the same logits, tables and costs."""
    model = offramp.create_model("msdnet-tiny", **TINY).train()
    own = offramp.evaluate(
        model,
        calibration=split_loader(digits, "calibration"),
        test=split_loader(digits, "test"),
        out=tmp_path / "mine",
        classes=digits.class_names,
        preprocessing=PREPARED,
    )
    assert model.training and read_summary(tmp_path / "mine") == own
    folder = offramp.create_model("msdnet-tiny", **TINY).save(tmp_path / "saved")
    (folder / "model.safetensors").write_bytes((tmp_path / "mine" / "model.safetensors").read_bytes())
    from offramp.runs.config import data_config

    config = data_config("digits", ["data.train=16", "data.calibration=50", "data.test=40"])
    other = offramp.evaluate_run(folder, data=config, device="cpu")
    assert other.data == "digits" and (other.samples, other.lazy_costs) == (own.samples, own.lazy_costs)
    assert other.exits == own.exits and other.preprocessing == own.preprocessing
    for split in ("calibration", "test"):
        mine, saved = (read_outputs(tmp_path / name, split) for name in ("mine", "saved"))
        np.testing.assert_allclose(mine.logits, saved.logits, atol=1e-5)  # batches of 16 there
        np.testing.assert_array_equal(mine.labels, saved.labels)
        images = digits.splits[split].images.transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(mine.thumbs, images[mine.thumb_index])  # normalised and back


def test_any_iterable_will_do_and_is_gone_over_once(digits: ArrayDataset, tmp_path: Path) -> None:
    batch = next(digits.sweep("test", 1000, torch.device("cpu")))

    def once() -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, 40, 7):
            yield batch.images[at : at + 7], batch.labels[at : at + 7]

    model = offramp.create_model("msdnet-tiny", **TINY)
    summary = offramp.evaluate(model, calibration=once(), out=tmp_path)
    assert summary.samples == {"calibration": 40} and summary.preprocessing is None
    assert read_outputs(tmp_path, "calibration").thumbs is None
    offramp.calibrate(tmp_path)
    with pytest.raises(ValueError, match=r"how images are prepared; give it preprocessing=Preprocessing\("):
        offramp.export(model, tmp_path, out=tmp_path / "bundle")
    with pytest.raises(ValueError, match="preprocessing.size is 24, the network takes 32"):
        offramp.export(
            model, tmp_path, out=tmp_path / "bundle", preprocessing=offramp.Preprocessing(24, 28, *([(1,) * 3] * 2))
        )
    with pytest.raises(ValueError, match="3 classes were given, the network has 10"):
        offramp.export(model, tmp_path, out=tmp_path / "bundle", preprocessing=PREPARED, classes="abc")
    bundle = offramp.export(model, tmp_path, out=tmp_path / "bundle", preprocessing=PREPARED)
    assert offramp.load_bundle(bundle, device="cpu").check_golden() < 1e-3
    offramp.evaluate(model, calibration=[(batch.images, batch.labels)], out=tmp_path)
    assert not (tmp_path / "policy.json").exists()  # it was found on another evaluation
    with pytest.raises(ValueError, match="has no test split: it was evaluated without one"):
        offramp.write_report([tmp_path], tmp_path / "report.html")


def test_a_module_that_is_no_exit_net_needs_its_costs(tmp_path: Path) -> None:
    model = Theirs()
    with pytest.raises(ValueError, match=r"costs of a Theirs|exit of a Theirs costs cannot be found: give costs="):
        offramp.evaluate(model, test=loader(2), out=tmp_path)
    with pytest.raises(ValueError, match="gives the logits of 2 exits, its costs are 3"):
        offramp.evaluate(model, test=loader(2), out=tmp_path, costs=[1, 2, 3])
    assert not list(tmp_path.iterdir())
    summary = offramp.evaluate(model, calibration=loader(4), test=loader(2), out=tmp_path, costs=[1000, 3000])
    assert summary.costs == (1000, 3000) and summary.model == "Theirs"
    assert offramp.calibrate(tmp_path, offramp.PolicyRequest(budget_mul_adds=2000)).policy.mul_adds <= 2000
    assert "trained elsewhere" in offramp.write_report([tmp_path], tmp_path / "r.html").page.read_text()
    with pytest.raises(ValueError, match="ExitNet.from_parts; this is a Theirs"):
        offramp.export(model, tmp_path, out=tmp_path / "bundle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([torch.zeros(2, 3, 32, 32)], r"must give \(images, labels\), got Tensor|must give float images"),
        ([(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))], "must give float images"),
        ([(torch.zeros(2, 3, 32, 32), torch.zeros(2, 10))], "whole-number labels"),
        (
            [(torch.zeros(2, 3, 24, 24), torch.zeros(2, dtype=torch.int64))],
            "preprocessing.size 32 images are .3, 32, 32., but the test",
        ),
        ([], "the test split of data of one's own gave no images"),
    ],
)
def test_what_no_loader_gives_is_a_sentence(given: list[object], words: str, tmp_path: Path) -> None:
    model = offramp.create_model("msdnet-tiny", **TINY)
    with pytest.raises(ValueError, match=words):
        offramp.evaluate(model, test=given, out=tmp_path / "mine", preprocessing=PREPARED)  # type: ignore[arg-type]
    assert not (tmp_path / "mine" / "eval").exists()


def test_a_run_is_not_written_over(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a run; evaluate that with evaluate_run"):
        offramp.evaluate(nn.Identity(), test=[], out=run, costs=[1])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        offramp.evaluate(nn.Identity(), out=tmp_path, costs=[1])


def test_a_saved_model_goes_from_verb_to_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sentence leads to the next verb, and none leads back."""
    monkeypatch.chdir(tmp_path)
    offramp.create_model("msdnet-tiny", **TINY).save("saved")
    from PIL import Image

    Image.new("RGB", (40, 40)).save("one.png")

    def refused(*words: str) -> str:
        assert call(monkeypatch, *words) == 2
        return capsys.readouterr().err

    def done(*words: str) -> str:
        assert call(monkeypatch, *words) == 0
        return capsys.readouterr().out

    assert "run: offramp eval saved --data NAME" in refused("calibrate", "saved")
    assert "run: offramp eval saved --data NAME" in refused("export", "saved", "--out", "bundle")
    assert "offramp eval saved --data NAME, with NAME one of cifar10, cifar100, digits" in refused("eval", "saved")
    assert "make one with: offramp export" in refused("predict", "saved", "one.png")
    small = ("--set", "data.train=32", "--set", "data.calibration=40", "--set", "data.test=40")
    said = done("eval", "saved", "--data", "digits", *small)
    assert said.endswith("next: offramp calibrate saved\n  or: offramp report saved\n")
    assert "offramp calibrate saved" in refused("export", "saved", "--out", "bundle")
    assert "next: offramp export saved --out saved/bundle" in done("calibrate", "saved")
    assert "make one with: offramp export saved --out saved/bundle" in refused("predict", "saved", "one.png")
    said = done("export", "saved", "--out", "saved/bundle")
    assert said.endswith("next: offramp predict saved/bundle saved/bundle/photo-1.png\n")
    assert "photo-1.png" in done(*said.split("next: offramp ", 1)[1].split())
    assert "it has one inside: saved/bundle" in refused("predict", "saved", "one.png")
    rows = json.loads(done("predict", "saved/bundle", "one.png", "--json"))
    assert [row["path"] for row in rows["rows"]] == ["one.png"] and rows["unreadable"] == 0
    assert "report: r.html" in done("report", "saved", "--out", "r.html")
    page = Path("r.html").read_text()
    assert "<h1>digits</h1>" in page and "only evaluated here, in saved" in page and "trained elsewhere: 1 run" in page
    assert "knows 10 classes, but this" in refused(
        "eval", "saved", "--data", "imagefolder", "--data-dir", str(photos())
    )
    assert "nowhere is not there" in refused("eval", "nowhere", "--data", "digits")
    assert "goes with --data" in refused("eval", "saved", "--set", "data.test=3")


def photos() -> Path:
    """Two classes of four photos each, in the current folder."""
    from PIL import Image

    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (40, 40)).save(Path("photos", name, f"{number}.png"))
    return Path("photos")


def test_a_folder_without_its_network_says_how_to_go_on(
    digits: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = [nn.Sequential(nn.AvgPool2d(8), nn.Flatten()), nn.Identity()]
    model = offramp.ExitNet.from_parts(stages, [nn.Linear(48, 10), nn.Linear(48, 10)])
    offramp.evaluate(model, calibration=split_loader(digits, "calibration"), out="mine", preprocessing=PREPARED)
    assert call(monkeypatch, "calibrate", "mine") == 0
    assert "next: in Python: offramp.export(model, 'mine', out='mine/bundle')" in capsys.readouterr().out
    assert call(monkeypatch, "export", "mine", "--out", "b") == 2
    assert "mine holds no network; its object is exported in Python: offramp.export(" in capsys.readouterr().err
