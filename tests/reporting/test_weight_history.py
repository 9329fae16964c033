"""How weights moved: means by hand, spans of epochs, and pictures in the report and on the results page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.saved import write_run
from offramp.common.files import read_json, write_json
from offramp.reporting.kept_runs import keep_run, read_stored
from offramp.reporting.results_page import write_page
from offramp.reporting.weight_history import SPANS, History, weight_history, weights_by_epoch


def keep_samples(run: Path, epochs: int) -> None:
    """Weights that say which epoch, exit and kind of sample they belong to: 100 · exit allocated + 10 · k + epoch."""
    (run / "samples").mkdir(parents=True, exist_ok=True)
    exits = np.array([1, 1, 2, 3, 3, 3], dtype=np.float32)
    for epoch in range(1, epochs + 1):
        weights = 100 * exits[:, None] + 10 * np.arange(3) + epoch
        arrays = {"weights": weights, "exits": exits, "losses": np.ones((6, 3)), "confidences": np.ones((6, 3))}
        np.savez(run / "samples" / f"epoch-{epoch:04d}.npz", **{k: v.astype(np.float32) for k, v in arrays.items()})


def test_means_of_all_of_the_easiest_and_of_the_hardest(tmp_path: Path) -> None:
    assert weight_history(tmp_path) is None
    keep_samples(tmp_path, 4)
    found = weight_history(tmp_path)
    assert found is not None and found.epochs == (1, 2, 3, 4)
    np.testing.assert_allclose(found.first, [[100 + 10 * k + epoch for k in range(3)] for epoch in range(1, 5)])
    np.testing.assert_allclose(found.last, np.array(found.first) + 200)
    np.testing.assert_allclose(found.all, np.array(found.first) + 100 * (2 + 9 + 2 - 6) / 6, atol=1e-4)
    assert History.from_json(found.to_json()) == found


def test_long_runs_are_drawn_in_spans(tmp_path: Path) -> None:
    keep_samples(tmp_path, 2 * SPANS)
    found = weight_history(tmp_path)
    assert found is not None and len(found.epochs) == SPANS
    assert found.epochs[:2] == (1.5, 3.5) and found.first[0][0] == 101.5


def test_where_an_exit_takes_nobody_all_samples_stand_in(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    np.savez(tmp_path / "samples/epoch-0001.npz", weights=np.array([[1.0, 3.0], [2.0, 4.0]]), exits=np.array([2, 2]))
    found = weight_history(tmp_path)
    assert found is not None and found.first == found.all == found.last == ((1.5, 3.5),)
    assert weights_by_epoch(found, "one") is None  # a line needs two epochs


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    keep_samples(tmp_path, 2)
    (tmp_path / "samples/epoch-0002.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"epoch-0002\.npz is damaged"):
        weight_history(tmp_path)


@pytest.mark.parametrize("spoilt", [{"epochs": [1.0]}, {"last": [[1.0], [1.0]]}, {"all": [[1.0, 2.0, 3.0], [1.0]]}])
def test_what_is_no_history_is_a_sentence(tmp_path: Path, spoilt: dict[str, list[float]]) -> None:
    run = write_run(tmp_path / "run", "digits-learned")
    keep_samples(run, 2)
    kept = keep_run(run, tmp_path / "kept")
    weights = read_json(kept / "weights.json")
    write_json(kept / "weights.json", {**weights, "history": {**weights["history"], **spoilt}})
    with pytest.raises(ValueError, match="is not what was kept of a run"):
        read_stored(kept)


def test_what_is_kept_of_a_run_draws_the_same_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "digits-learned")
    keep_samples(run, 3)
    kept = keep_run(run, tmp_path / "results/1-main")
    assert read_stored(kept).history == weight_history(run)
    (tmp_path / "results/1-main/section.toml").write_text('title = "Main"\ntext = "Digits."\nbudgets = [2, 4]\n')
    page = write_page(tmp_path / "results", tmp_path / "page.md").read_text()
    assert "![Mean weights by epoch](page/1-main-weights-1.png)" in page and "seed 0." in page
    assert (tmp_path / "page/1-main-weights-1.png").stat().st_size > 10_000
