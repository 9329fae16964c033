"""The benchmark runs and says what it should; no time is asserted."""

from __future__ import annotations

import pytest

from offramp.bench import BASELINE, ROWS, bench_train, where_time_goes


def test_every_row_is_timed_and_weighed() -> None:
    rows = bench_train("msdnet-tiny", 8, "cpu", repeats=1)
    assert [row.name for row in rows] == list(ROWS)
    assert all(row.milliseconds > 0 and row.peak_mb >= 0 for row in rows)
    assert {row.name: row.ratio for row in rows}[BASELINE] == 1 and {row.way for row in rows} == {"eager"}
    assert rows[0].images_per_s == pytest.approx(8000 / rows[0].milliseconds, rel=0.01)


def test_an_odd_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="even and at least 4"):
        bench_train("msdnet-tiny", 7)


def test_where_the_time_goes_is_told() -> None:
    spent = where_time_goes("learned, forward_mode", "eager", "msdnet-tiny", 8, "cpu", steps=1)
    assert any("convolution" in name for name, _, _ in spent[:5])
    assert [ms for _, _, ms in spent] == sorted((ms for _, _, ms in spent), reverse=True)
