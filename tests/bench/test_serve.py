"""`bench serve`: a server in a process of its own, asked for by the folder or the name of a bundle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.runs import call
from offramp.bench.serve import LoadResult, ServeRow, bench_serve, cpu_seconds, serve_table, ways_to_serve


@pytest.mark.slow
def test_a_network_that_comes_trained_is_loaded_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "msdnet5-cifar100", "--seconds", "1", "--clients", "1,2", "--workers", "1,2", "--json"]
    assert call(monkeypatch, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and [(row["way"], row["load"]["clients"]) for row in found["rows"]] == [
        ("1 worker", 1),
        ("1 worker", 2),
        ("2 workers", 1),
        ("2 workers", 2),
    ]
    for row in found["rows"]:
        assert row["load"]["accepted"] > 0 and row["load"]["wrong"] == 0
        assert row["server_cpu_ms"] > 0 and row["client_cpu_ms"] > 0 and row["cores_busy"] >= row["busiest_thread"] > 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_no_time_is_refused_before_a_server_is_started(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.bench.serve.running", None)  # would fail
    assert call(monkeypatch, "bench", "serve", "msdnet5-cifar100", "--seconds", seconds) == 2
    assert f"seconds must be a number above 0, got {seconds}" in capsys.readouterr().err


def test_a_time_in_which_nothing_is_answered_measures_nothing(
    onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.bench.serve.WARM_S", 0.1)
    assert call(monkeypatch, "bench", "serve", onnx_bundle, "--seconds", "1e-9") == 2
    told = capsys.readouterr()
    assert "1 worker: no request was answered in" in told.err and "give more --seconds" in told.err and not told.out


def test_processor_time_of_a_family_is_added_up() -> None:
    code = "import time, subprocess, sys\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    child = code + "print('done', flush=True)\ntime.sleep(60)"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        used = cpu_seconds(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert sum(used.values()) >= 0.3 and 0.25 <= max(used.values()) < sum(used.values()) + 1e-9
    assert cpu_seconds(process.pid) == {}


def test_the_table_compares_with_the_first_way() -> None:
    load = LoadResult(10.0, 16, 100, 0, 0, 0, 0, 100, 10.0, 1.0, 2.0, 3.0)
    rows = [ServeRow(way, load, ms, 0.5, 1.5, 0.9) for way, ms in (("one", 2.0), ("two", 2.2), ("elsewhere", None))]
    _, columns, cells = serve_table("b", rows)
    assert [row[columns.index("times the first")] for row in cells] == ["1.00", "1.10", "?"]
    assert all(len(row) == len(columns) for row in cells)


def test_ways_of_serving_are_what_was_asked_for() -> None:
    assert list(ways_to_serve([1])) == ["1 worker"]
    asked = ways_to_serve([1, 4], replicas=4)
    assert list(asked) == ["1 worker", "4 workers", "Ray, 4 replicas"]
    assert asked["Ray, 4 replicas"] == ("--ray", "local", "--replicas", "4")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at its import
def test_ray_is_compared_too(onnx_bundle: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (offramp[ray])")
    rows = bench_serve(onnx_bundle, seconds=2.0, clients=[4], workers=[1], on_ray=True)
    assert [row.way for row in rows] == ["1 worker", "Ray, 1 replica"] and all(row.load.passed for row in rows)
