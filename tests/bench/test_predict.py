"""`offramp bench predict`: the steady state by hand-made numbers, and the whole on a real Ray."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.runs import call
from offramp.bench.predict import PredictRow, _cost, _images, steady_rate
from offramp.scaling.parts import PartCount


def test_the_steady_state_begins_with_the_end_of_a_workers_first_part() -> None:
    ended = {"a": (100.0, 110.0, 120.0), "b": (103.0, 108.0), "c": (200.0,)}
    counts = [PartCount(0, (90, 5), 5, 9.0, worker, end) for worker, ends in ended.items() for end in ends]
    assert steady_rate(counts[::-1]) == pytest.approx((200 / 20 + 100 / 5) / 2)  # c has no second part
    assert PredictRow(1, 1, 200.0, 190.0, 12.0).to_json()["ratio"] == pytest.approx(0.95)


def test_an_address_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--ray", "h:1")):
        assert call(monkeypatch, "bench", "predict", *words) == 2
        assert "give --ray without an address" in capsys.readouterr().err


def test_images_of_a_store_are_refused(
    onnx_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways read files of this machine."""
    (tmp_path / "list.txt").write_text("memory://photos/a.png\n")
    words = ("--ray", "--images", tmp_path / "list.txt")
    assert call(monkeypatch, "bench", "predict", onnx_bundle, *words) == 2
    assert "--images names files of this machine; " in capsys.readouterr().err


def test_what_an_image_takes_is_measured(onnx_bundle: Path, tmp_path: Path) -> None:
    source = _images(onnx_bundle, None, 300, tmp_path)
    assert all(value > 0 for value in asdict(_cost(onnx_bundle, source, tmp_path)).values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at its import
@pytest.mark.parametrize("nodes", [1, 2])
def test_plain_processes_and_ray_are_measured(
    onnx_bundle: Path, nodes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--ray", "--workers", "2", "--parts", "1", "--nodes", nodes, "--json")
    assert call(monkeypatch, "bench", "predict", onnx_bundle, *words) == 0
    found = json.loads(capfd.readouterr().out)
    (row,) = found["rows"]
    assert (
        (row["workers"], row["nodes"]) == (2, nodes) and row["plain"] > 0 and row["on_ray"] > 0 and row["start_s"] > 0
    )
    assert all(value > 0 for value in found["image"].values())
