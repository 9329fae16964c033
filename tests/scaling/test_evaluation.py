"""`offramp eval BUNDLE --ray` without a cluster: the score that one process finds."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.runs import call
from offramp import load_bundle, load_dataset
from offramp.running.labelled import evaluate_bundle, labelled_images
from offramp.runs.config import data_config
from offramp.scaling import evaluation
from offramp.scaling.evaluation import evaluate_on_ray


@pytest.fixture
def field(tmp_path: Path) -> Path:
    """Digits in a folder per class, one of which cannot be read."""
    data = load_dataset("digits", train=16, calibration=16, test=600)
    labels = data.splits["test"].labels  # type: ignore[attr-defined]
    for number, (image, label) in enumerate(zip(data.thumbnails("test", np.arange(600)), labels, strict=True)):
        path = tmp_path / "field" / str(label) / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (tmp_path / "field" / "3" / "broken.png").write_bytes(b"no image")
    return tmp_path / "field"


def test_workers_find_what_one_process_finds(
    onnx_bundle: Path, field: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "SMALLEST_PART", 256)
    loaded = load_bundle(onnx_bundle, device="cpu", threads=1)
    for data, place, calls in (
        (data_config("imagefolder", []), field, 3),
        (data_config("digits", ["data.test=600"]), None, 3),
    ):
        in_process.clear()
        found = evaluate_on_ray(onnx_bundle, data, place, device="cpu")
        assert found == evaluate_bundle(loaded, labelled_images(loaded, data, place, "test"))
        assert found.samples == 600 and len(in_process) == calls


def test_a_machine_with_other_data_is_refused(
    onnx_bundle: Path, field: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of images, one in another class, another file: the ranges would mean others."""
    listed, data = evaluation.labelled_images, data_config("imagefolder", [])
    (field / "3" / "broken.png").unlink()
    changes: list[Callable[[], object]] = [
        (field / "3" / "more.png").touch,
        lambda: (field / "3" / "more.png").rename(field / "4" / "more.png"),
        lambda: (field / "4" / "more.png").rename(field / "4" / "other.png"),
    ]
    for change in changes:
        seen: list[object] = []

        def changing(*given: Any, seen: list[object] = seen, change: Callable[[], object] = change) -> Any:
            if seen:  # the worker
                change()
            seen.append(given)
            return listed(*given)

        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "labelled_images", changing)
            with pytest.raises(ValueError, match=f"{socket.gethostname()} has other data"):
                evaluate_on_ray(onnx_bundle, data, field, device="cpu")


def test_a_data_set_of_another_size_is_refused(onnx_bundle: Path) -> None:
    loaded = load_bundle(onnx_bundle, device="cpu", threads=1)
    one, other = (
        labelled_images(loaded, data_config("digits", [f"data.test={size}"]), None, "test") for size in (64, 65)
    )
    assert evaluation.listing_digest(one) != evaluation.listing_digest(other)


def test_too_many_unreadable_images_stop_it(onnx_bundle: Path, field: Path, in_process: list[int]) -> None:
    for at in range(20):
        (field / "3" / f"broken{at}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="images are unreadable, more than the 6 that"):
        evaluate_on_ray(onnx_bundle, data_config("imagefolder", []), field, device="cpu")


def test_the_command_line(
    onnx_bundle: Path,
    field: Path,
    run: Path,
    in_process: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("eval", onnx_bundle, "--data", "imagefolder", "--data-dir", field)
    assert call(monkeypatch, *words) == 0
    plain = capsys.readouterr().out
    assert call(monkeypatch, *words, "--ray", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "601 images in ranges of 1,024" in shown and "1 images could not be read" in shown
    assert re.search(r"601 images now: [\d,]+ images/s for each of 1 workers, after \d", shown)
    assert plain.split("on 600 images")[1] == shown.split("on 600 images")[1]
    assert call(monkeypatch, "eval", run, "--ray") == 2
    assert "--ray is for bundles" in capsys.readouterr().err
