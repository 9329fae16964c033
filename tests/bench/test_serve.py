"""`bench serve`: a server in a process of its own, asked for by the folder or the name of a bundle."""

from __future__ import annotations

import json

import pytest

from helpers.runs import call


def test_a_network_that_comes_trained_is_loaded_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "msdnet5-cifar100", "--seconds", "1", "--clients", "2", "--json"]
    assert call(monkeypatch, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["accepted"] > 0 and found["wrong"] == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_no_time_is_refused_before_a_server_is_started(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.bench.serve.running", None)  # would fail
    assert call(monkeypatch, "bench", "serve", "msdnet5-cifar100", "--seconds", seconds) == 2
    assert f"seconds must be a number above 0, got {seconds}" in capsys.readouterr().err
