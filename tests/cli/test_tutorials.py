"""The tutorials of the docs, each from its first line of Python to its last command."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.runs import SMALL_RUN, call
from offramp.common import registry
from offramp.training.weighting import WEIGHTINGS

DOCS = Path(__file__).parents[2] / "docs"
CLOTHES = Path(__file__).parents[2] / "src/offramp/data/clothes"
# Trainings are the same ones, made small.
SMALL = ["train.epochs=1", "train.batch=8", "data.workers=0", "model.overrides.image_size=32"]


def draw_photos(folder: Path, classes: int, each: int) -> None:
    """Photos of nothing, which the pages do not have."""
    draw = np.random.default_rng(0)
    for number in range(classes * each):
        path = folder / str(number % classes) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(path)


def run_page(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: Sequence[str] = SMALL
) -> dict[str, object]:
    """Run a page from top to bottom in the current folder; what its Python knew at the end."""
    steps = re.findall(
        r"```python\n(.*?)```|^    (offramp [^\n]*)$", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(steps) >= 9
    known: dict[str, object] = {"__name__": "__main__"}
    for code, command in steps:
        if code:
            exec(compile(code, name, "exec"), known)
        else:
            words = shlex.split(command)[1:]
            words += [word for setting in small if words[0] == "train" for word in ("--set", setting)]
            assert call(monkeypatch, *words) == 0, command
        assert capsys.readouterr().out
    return known


def test_a_loop_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_photos(tmp_path / "field", classes=3, each=8)
    known = run_page("your-own-loop.md", monkeypatch, capsys)
    assert (tmp_path / "mine/report.html").is_file() and (tmp_path / "saved/field-bundle/bundle.json").is_file()
    summary = known["summary"].exits["test"]  # type: ignore[attr-defined]
    assert summary[0].top1 > 0.3 and summary[-1].top1 > 0.5  # it learned something


@pytest.mark.slow
def test_a_network_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_photos(tmp_path / "photos", classes=3, each=20)
    known = run_page("backbones.md", monkeypatch, capsys)
    assert (tmp_path / "runs/photos/bundle/stage-4.onnx").is_file()
    assert (tmp_path / "runs/mine/bundle/stage-3.onnx").is_file()
    summary = known["summary"].exits["test"]  # type: ignore[attr-defined]
    assert summary[-1].top1 > 0.5  # it learned something


@pytest.mark.slow
def test_a_folder_of_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the page but the server's, on the embedded photos, and its Python."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CLOTHES, "photos")
    shutil.copytree(CLOTHES / "val" / "hat", "new-photos")
    page = (DOCS / "fit.md").read_text()
    commands = re.findall(r"^ {4,6}(offramp [^\n#]*)", page, re.MULTILINE)
    done = []
    for command in (line.strip() for line in commands):
        words = ["30s" if word == "20m" else word for word in shlex.split(command)[1:]]
        if words[0] == "serve":
            continue
        assert call(monkeypatch, *words) == 0, command
        done.append(words[0])
        said = capsys.readouterr().out
        assert words[0] != "fit" or "test images right (95 % interval" in said
    assert done.count("fit") >= 3 and "predict" in done
    assert len(Path("results.csv").read_text().splitlines()) == 9
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "fit.md", "exec"), {"__name__": "__main__"})
    assert "fitted/bundle" in capsys.readouterr().out


def test_comparing_ways_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "loaded", [])
    monkeypatch.setattr(WEIGHTINGS, "_entries", dict(WEIGHTINGS._entries))
    monkeypatch.delitem(sys.modules, "my_weighting", raising=False)
    run_page("research.md", monkeypatch, capsys, [*SMALL_RUN, "train.epochs=1"])
    for run in ("baseline/seed-1", "learned/seed-1", "late/seed-0"):
        assert (tmp_path / "runs" / run / "eval/eval.json").is_file()
    assert "late-only weights" in (tmp_path / "runs/report-files/anytime.md").read_text()
