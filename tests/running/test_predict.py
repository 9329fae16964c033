"""`offramp predict` and `offramp export` as people use them."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path

import pytest

from helpers.runs import call
from offramp import load_bundle
from offramp.running.predict import expand, predict


def test_hidden_files_and_folders_are_no_images(tmp_path: Path) -> None:
    for name in ("b.PNG", "._b.PNG", "a.jpg", "notes.txt"):
        (tmp_path / name).write_bytes(b"only names count here")
    (tmp_path / "folder.png").mkdir()
    assert expand([str(tmp_path)]) == [str(tmp_path / "a.jpg"), str(tmp_path / "b.PNG")]


def test_paths_are_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(expand([str(folder)])) == 31
    assert expand([str(folder / "a" / "0*.png")]) == sorted(map(str, (folder / "a").glob("0*.png")))
    assert len(expand([str(folder / "**" / "*.png")])) == 30
    assert len(expand([str(folder / "*")])) == 31  # a glob of folders is what is in them
    monkeypatch.setattr(sys, "stdin", io.StringIO("one.png\n\n two.png \n"))
    assert expand(["-", "three.png"]) == ["one.png", "two.png", "three.png"]
    for words, said in (([str(folder / "*.xyz")], "nothing matches"), ([], "no images were given")):
        with pytest.raises(ValueError, match=said):
            expand(words)


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_rows_come_in_order_and_equal_a_plain_call(torch_bundle: Path, folder: Path, batch: int) -> None:
    bundle = load_bundle(torch_bundle)
    paths = expand([str(folder)])
    found = predict(bundle, paths, batch=batch)
    assert [row.path for row in found.rows] == paths and found.unreadable == 1
    good = [row for row in found.rows if row.error is None]
    wanted = bundle([row.path for row in good])
    assert [row.exit for row in good] == wanted.exits.tolist()
    assert [row.label for row in good] == [bundle.classes[c] for c in wanted.labels]
    assert [row.mul_adds for row in good] == wanted.mul_adds.tolist()
    assert found.shares == pytest.approx(wanted.shares(3))
    assert found.saved == pytest.approx(1 - wanted.mul_adds.mean() / bundle.costs[-1])


def test_unreadable_images_are_named_and_the_rest_is_done(
    onnx_bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.csv"
    missing = str(tmp_path / "missing.png")
    assert call(monkeypatch, "predict", onnx_bundle, folder, missing, "--out", out) == 1
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 32 and sum(bool(row["error"]) for row in rows) == 2
    assert rows[-1]["path"] == missing and rows[-1]["error"] == "it is not there"
    assert all(row["label"] and row["exit"] for row in rows if not row["error"])
    shown = capsys.readouterr().out
    assert "30 images" in shown and "2 could not be read" in shown and "of the compute saved" in shown


def test_names_are_taken_as_they_are(
    torch_bundle: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Markup in a name is no markup, a long one is not cut, and one that is no text loses no results."""
    source = next((folder / "a").glob("*.png")).read_bytes()
    names = ["x[/b].png", "pic[red].png", "long" * 40 + ".png", os.fsdecode(b"\xff.png")]
    for name in names[:3]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(source)
    assert call(monkeypatch, "predict", torch_bundle, *(tmp_path / name for name in names[:3])) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names[:3])
    (tmp_path / names[3]).write_bytes(source)
    out = tmp_path / "results.csv"
    assert call(monkeypatch, "predict", torch_bundle, tmp_path / names[3], "--out", out) == 0
    assert b"\xff.png" in out.read_bytes()


def test_results_as_json_lines_and_as_a_table(
    torch_bundle: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "results.jsonl"
    assert call(monkeypatch, "predict", torch_bundle, folder / "b", "--out", out, "--max-exit", "1") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 15 and {row["exit"] for row in rows} == {1} and any(row["forced"] for row in rows)
    assert call(monkeypatch, "predict", torch_bundle, folder / "b", "--q", "0.5") == 0
    assert "confidence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "results.xlsx"], "must end in .csv or .jsonl"),
        (["--budget", "1"], "below exit 1's cost"),
        (["--budget", "x"], "must be a count"),
        (["--max-exit", "0"], "max_exit must lie between 1 and 3, got 0"),
        (["--max-exit", "9"], "max_exit must lie between 1 and 3, got 9"),
        (["--max-mul-adds", "5"], "below exit 1's cost"),
        (["--batch", "0"], "batch must be 1 or more"),
    ],
)
def test_mistakes_are_sentences(
    torch_bundle: Path,
    folder: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "predict", torch_bundle, folder, *words) == 2
    assert said in capsys.readouterr().err


def test_exporting_on_the_command_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "export", run, "--out", tmp_path / "b") == 0
    assert "equal to its golden outputs" in capsys.readouterr().out
    assert call(monkeypatch, "export", run, "--out", tmp_path / "b") == 2
    assert "is there already" in capsys.readouterr().err
    assert call(monkeypatch, "predict", tmp_path, "x.png") == 2
    assert "is not a bundle" in capsys.readouterr().err


def test_a_q_that_cannot_be_asked_for_is_said(
    torch_bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "predict", torch_bundle, folder, "--q", "-5") == 2
    assert "q must be a number above 0, got -5" in capsys.readouterr().err
