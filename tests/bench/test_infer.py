"""`bench infer`: exits by plan, and what is timed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.runs import call
from offramp import load_bundle
from offramp.bench.infer import PlannedExits, plan_exits, subject_of
from offramp.measuring.policy import Policy
from offramp.running.engines.protocol import all_logits
from offramp.running.packing import MeasuredPacking
from offramp.running.pool import Pool, Ticket
from offramp.running.runtime import AlwaysPack, Runtime


def test_timing_a_bundle_and_a_model(
    torch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(load_bundle(torch_bundle).runtime().packing, AlwaysPack)
    words = ["--batch", "1,8", "--q", "0.5", "--repeats", "2", "--device", "cpu"]
    assert call(monkeypatch, "bench", "infer", torch_bundle, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["stage_ms"]) == {"1", "2", "3"} and set(found["stage_ms"]["1"]) == {"1", "8"}
    assert len(found["rows"]) == 4 and all(row["ours_ms"] > 0 and row["of_ideal"] > 0 for row in found["rows"])
    assert call(monkeypatch, "bench", "infer", torch_bundle, *words) == 0
    shown = capsys.readouterr().out
    assert "packing pays" in shown
    assert isinstance(load_bundle(torch_bundle).runtime().packing, MeasuredPacking)  # kept for later calls
    assert call(monkeypatch, "bench", "infer", torch_bundle, "--batch", "a") == 2


def test_what_cannot_be_timed_is_said(
    torch_bundle: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (("bench", "infer", run), "is a run or model folder; make a bundle of the run first"),
        (("bench", "infer", torch_bundle, "--engine", "onnx"), "is a bundle for torch"),
        (("bench", "infer", "msdnet-tiny", "--engine", "tensorflow"), "engine 'tensorflow' is unknown"),
        (("bench", "infer", "msdnet-tiny", "--batch", "0"), "batch sizes and repeats must be 1 or more, got 0"),
    ):
        assert call(monkeypatch, *words) == 2
        assert said in capsys.readouterr().err


def test_a_plan_has_the_shares_as_exactly_as_whole_samples_allow() -> None:
    plan = plan_exits(1000, (0.5, 0.3, 0.2), seed=0)
    assert np.bincount(plan)[1:].tolist() == [500, 300, 200]
    assert plan.tolist() != sorted(plan.tolist())
    assert np.bincount(plan_exits(7, (0.5, 0.5), seed=1), minlength=3)[1:].sum() == 7


@pytest.mark.parametrize("pooled", [False, True])
def test_samples_leave_where_the_plan_says_whatever_their_confidence(torch_bundle: Path, pooled: bool) -> None:
    bundle = load_bundle(torch_bundle, device="cpu")
    planned = PlannedExits(bundle.engine)
    images = np.random.default_rng(0).normal(size=(30, *bundle.card.input_shape)).astype(np.float32)
    planned.plan = plan_exits(30, (0.4, 0.3, 0.3), seed=2)
    policy = Policy("planned", None, (0.5, 0.5), 0.0, (0.4, 0.3, 0.3), 0.0)
    if pooled:
        pool, exits = Pool(planned, policy, 8, wait_s=60.0), np.zeros(30, np.int64)
        pool.add(images, [Ticket(row, 3) for row in range(30)])
        while pool.waiting:
            for left in pool.work(flush=True):
                exits[left.ticket.key] = left.exit
    else:
        exits = Runtime(planned, policy, (1, 2, 3))(images).exits
    assert exits.tolist() == planned.plan.tolist()


def test_the_whole_network_is_timed_without_its_inner_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, bundle = subject_of("msdnet-tiny", device="cpu")
    assert bundle is None
    images = np.random.default_rng(0).normal(size=(4, *subject.shape)).astype(np.float32)
    last = all_logits(subject.engine, images)[-1]
    assert subject.whole(images)[1].astype(int).tolist() == last.argmax(-1).tolist()
    ran = []
    for head in subject.engine.model.heads:
        head.register_forward_hook(lambda *_: ran.append(1))
    subject.whole(images)
    assert len(ran) == 1
