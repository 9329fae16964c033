"""The demo, small: it leads with a saving and its accuracy, measured in the run, and leaves a report that agrees."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offramp.cli.demo import comparison, run_demo, run_photos_demo
from offramp.cli.options import command
from offramp.common.files import read_json
from offramp.data.listing import list_folder
from offramp.reporting.groups import gather
from offramp.reporting.shipped import find_shipped

TINY = ("data.train=96", "data.calibration=60", "data.test=80", "train.epochs=1", "train.batch=32")
PRICE = r"with [\d.]+ points (?:fewer|more) right \(95 %: [\d.]+ (?:fewer |more )?to [\d.]+ (?:fewer|more)\)"
LEAD = rf"Leaving early saves (\d+) % of the compute {PRICE}, and is ([\d.]+) times as fast on this machine\."


def test_digits_lead_with_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_demo(tmp_path, "cpu", TINY)
    said = capsys.readouterr().out
    found = re.search(LEAD, said)
    shipped = find_shipped(gather([folder / "baseline", folder / "learned"]))
    assert found and shipped is not None and shipped.run.folder == folder / "baseline"
    assert int(found[1]) == round(100 * shipped.saved)
    assert said.index(found[0]) < said.index("Baseline and learned weights")  # first this, then those
    assert "One seed each" in said and said.rstrip().endswith(str(folder / "report.html"))
    page = (folder / "report.html").read_text()
    assert "The policy that ships" in page and "stage times measured in batches of 80" in page
    assert (folder / "times.json").is_file() and len(list((folder / "images").iterdir())) == 4
    assert f"more answers: {command('predict', folder / 'bundle', folder / 'images')}\n" in said


def test_a_demo_that_cannot_be_written_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written: .*; once it can, another demo begins anew"):
        run_demo(tmp_path / "file", "cpu", TINY)


def test_weightings_stand_with_their_spread() -> None:
    before = np.array([[True] * 70 + [False] * 30, [True] * 80 + [False] * 20])
    after = np.array([[True] * 80 + [False] * 20, [True] * 80 + [False] * 20])
    title, columns, rows = comparison(before, after, [1_000_000, 2_000_000])
    assert "all 100 test images" in title and columns[-1] == "difference"
    assert rows[0][:4] == ["1", "1.00M", "70.00", "80.00"] and rows[0][4].startswith("+10.00 (+")
    assert rows[1][4].startswith("+0.00 (-")


@pytest.mark.slow
def test_photos_go_through_fit_and_end_with_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    folder = run_photos_demo(tmp_path, "cpu")
    said = capsys.readouterr().out
    asked = re.search(r"^\$ offramp predict (\S+) (\S+)", said, re.MULTILINE)
    assert asked and Path(asked[1]) == folder / "bundle" and Path(asked[2]).is_file()
    sentence = read_json(folder / "fit.json")["sentence"]
    assert sentence in said and "of 40 test images right (95 % interval" in sentence and "toy set" in said
    right = re.search(r"has ([\d.]+) % of 40", sentence)
    assert right and float(right[1]) > 60  # five classes, and features from ImageNet
    page = (folder / "report.html").read_text()
    assert "<h1>clothes</h1>" in page
    plain = read_json(folder / "fit.json")["chosen"]["family"] == "single"  # as fast, on a busy machine
    assert plain or "stage times measured in batches of 1" in page


def test_the_photos_are_few_small_and_of_a_named_source() -> None:
    root = Path(str(resources.files("offramp.data") / "clothes"))
    files = sorted(root.rglob("*.jpg"))
    assert len(files) == 100 and sum(file.stat().st_size for file in files) < 1_500_000
    listed = list_folder(root, calibration=20)
    assert len(listed.class_names) == 5
    assert {name: len(split.paths) for name, split in listed.splits.items()} == {
        "train": 40, "calibration": 20, "test": 40,
    }  # fmt: skip
    assert all(np.bincount(split.labels).tolist() == [len(split.labels) // 5] * 5 for split in listed.splits.values())
    for file in files:
        with Image.open(file) as image:
            assert min(image.size) == 192
    about = root.with_suffix(".md").read_text()
    assert "Alexey Grigorev" in about and "CC0" in about
