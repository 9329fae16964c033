"""Leaving early changes nothing but the cost: same answers and exits for every batch size, order and neighbour."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.engines import Numbers, numbered, policy, pooled
from offramp import create_model
from offramp.measuring.confidence import MEASURES
from offramp.measuring.confidence import confidences as numpy_confidences
from offramp.measuring.policy import exits_taken
from offramp.models.exits import ExitNet
from offramp.models.fold import folded
from offramp.running.engines import cuda_graphs, torch_engine
from offramp.running.engines.torch_engine import TorchEngine
from offramp.running.packing import MeasuredPacking, measure_packing
from offramp.running.pool import Pool, Ticket
from offramp.running.runtime import Runtime, ceiling

COSTS = (10, 25, 70)


def network(schedule: str = "eager") -> ExitNet:
    """A small MSDNet whose BatchNorms have seen data, so that folding them is not trivial."""
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", num_classes=5, blocks=[1, 1, 1], base_width=4, growth=4, head_width=8)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(32, 3, 32, 32))
        for head in model.heads:
            head.linear.weight.mul_(12)  # type: ignore[union-attr, operator]
    return model.eval().set_schedule(schedule)


MODEL = network()


IMAGES = np.random.default_rng(0).normal(size=(60, 3, 32, 32)).astype(np.float32)


def reference(measure: str = "max_softmax") -> tuple[np.ndarray, np.ndarray]:
    """Confidences and labels of all exits in float64, nothing skipped."""
    with torch.inference_mode():
        logits = torch.stack(network().double()(torch.from_numpy(IMAGES).double())).numpy()
    return numpy_confidences(logits, measure), logits.argmax(-1)


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_in_float64_nothing_depends_on_the_batch(measure: str, schedule: str) -> None:
    sure, labels = reference(measure)
    engine = TorchEngine(network(schedule), measure, dtype=torch.float64)
    draw = np.random.default_rng(1)
    for _ in range(3):
        thresholds = tuple(float(np.quantile(own, draw.random())) + 1e-9 for own in sure[:-1])
        exits = exits_taken(sure, thresholds)
        runtime = Runtime(engine, policy(*thresholds), COSTS)
        for size in (1, 7, 60):
            order = draw.permutation(60)
            for begin in range(0, 60, size):
                rows = order[begin : begin + size]
                found = runtime(IMAGES[rows])
                assert found.exits.tolist() == exits[rows].tolist()
                assert found.labels.tolist() == labels[exits[rows] - 1, rows].tolist()
                assert found.mul_adds.tolist() == [COSTS[e - 1] for e in exits[rows]]
                assert not found.forced.any()


class WithMeans(torch.nn.Module):
    """One number for each image goes along."""

    def forward(self, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (state[0].mean((1, 2, 3)), state[0]) if len(state) == 1 else (state[1].flatten(1) + state[0][:, None],)


def test_a_state_may_hold_one_number_for_each_sample() -> None:
    torch.manual_seed(0)
    flat = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5)) for _ in range(2)]
    model = ExitNet.from_parts([WithMeans(), WithMeans()], flat)
    with torch.inference_mode():
        logits = torch.stack(model.double()(torch.from_numpy(IMAGES).double())).numpy()
    sure = numpy_confidences(logits, "max_softmax")
    own = policy(float(np.median(sure[0])))
    engine = TorchEngine(model, dtype=torch.float64)
    found = Runtime(engine, own, (1, 2))(IMAGES)
    assert found.exits.tolist() == exits_taken(sure, own.thresholds).tolist() and set(found.exits) == {1, 2}
    assert [left.exit for left in pooled(engine, own, IMAGES)] == found.exits.tolist()


def test_in_float32_only_samples_at_a_threshold_may_differ() -> None:
    sure, _ = reference()
    thresholds = tuple(float(np.median(own)) for own in sure[:-1])
    exits = exits_taken(sure, thresholds)
    for model in (network(), folded(network()), network("lazy")):
        found = Runtime(TorchEngine(model), policy(*thresholds), COSTS)(IMAGES)
        near = np.abs(sure[:-1] - np.array(thresholds, np.float32)[:, None])
        safe = [all(near[k, i] > 1e-4 for k in range(min(exits[i], 2))) for i in range(60)]
        assert found.exits[safe].tolist() == exits[safe].tolist() and sum(safe) > 50


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_both_kinds_of_confidence_agree(measure: str) -> None:
    logits = np.random.default_rng(0).normal(size=(200, 10)).astype(np.float32) * 4
    engine = TorchEngine(network(), measure, temperatures=(0.7, 1.0, 2.0))
    for k, temperature in ((1, 0.7), (3, 2.0)):
        found, labels = engine.judge(k, engine.verdict(k, torch.from_numpy(logits)))
        np.testing.assert_allclose(found, numpy_confidences(logits[None], measure, [temperature])[0], atol=2e-6)
        np.testing.assert_array_equal(labels, logits.argmax(-1))


def test_folding_keeps_the_function_and_removes_every_batchnorm() -> None:
    own = folded(MODEL)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in own.modules())
    with torch.inference_mode():
        for one, other in zip(own(torch.from_numpy(IMAGES)), MODEL(torch.from_numpy(IMAGES)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert any(isinstance(m, torch.nn.BatchNorm2d) for m in MODEL.modules())


SURE = np.array([[0.9, 0.1, 0.2, np.nan, 0.3], [0.0, 0.9, 0.1, np.nan, 0.2], [0.0] * 5])


def test_work_is_really_skipped() -> None:
    engine = Numbers(SURE)
    found = Runtime(engine, policy(0.5, 0.5), COSTS)(numbered(5))
    assert engine.ran == [(1, 5), (2, 4), (3, 3)]
    assert found.exits.tolist() == [1, 2, 3, 3, 3]
    assert found.labels.tolist() == [10, 21, 32, 33, 34]
    assert found.shares(3) == (0.2, 0.2, 0.6)


def test_not_a_number_is_never_confident() -> None:
    found = Runtime(Numbers(SURE), policy(-1.0, -1.0), COSTS)(numbered(5))
    assert found.exits.tolist() == [1, 1, 1, 3, 1]


def test_ceilings_force_out_and_say_so() -> None:
    runtime = Runtime(Numbers(SURE), policy(0.5, 0.5), COSTS)
    for limits in ({"max_exit": 2}, {"max_mul_adds": 30.0}):
        found = runtime(numbered(5), **limits)
        assert found.exits.tolist() == [1, 2, 2, 2, 2]
        assert found.forced.tolist() == [False, False, True, True, True]
    assert runtime(numbered(5), max_exit=3).forced.tolist() == [False] * 5
    assert runtime(numbered(5), deadline_ms=0.0).exits.tolist() == [1] * 5
    for beyond in (0, 4):
        with pytest.raises(ValueError, match=f"max_exit must lie between 1 and 3, got {beyond}"):
            runtime(numbered(5), max_exit=beyond)
    with pytest.raises(ValueError, match="below exit 1's cost"):
        runtime(numbered(5), max_mul_adds=9.0)
    assert ceiling(COSTS, None, None) == ceiling(COSTS, 3, 1e9) == 3


def test_a_stage_that_would_end_too_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("offramp.running.runtime.time.perf_counter", lambda: now[0])
    engine = Numbers(np.zeros((3, 2)))
    plain, stage_s = engine.run, [0.010]

    def slow(k: int, state: Any) -> Any:
        now[0] += stage_s[0]
        return plain(k, state)

    engine.run = slow  # type: ignore[method-assign]
    runtime = Runtime(engine, policy(0.5, 0.5), COSTS)
    assert runtime(numbered(2)).exits.tolist() == [3, 3]  # each stage took 10 ms
    found = runtime(numbered(2), deadline_ms=25.0)
    assert found.exits.tolist() == [2, 2] and found.forced.tolist() == [True, True]
    assert now[0] < 0.03 + 0.025
    stage_s[0] = 1.0  # a slow moment
    assert runtime(numbered(2), deadline_ms=35.0).exits.tolist() == [1, 1]
    assert runtime(numbered(2)).exits.tolist() == [3, 3]
    stage_s[0] = 0.010  # it is over, and is forgotten in time
    assert any(runtime(numbered(2), deadline_ms=35.0).exits.tolist() == [3, 3] for _ in range(20))


def test_no_images_give_no_results() -> None:
    assert len(Runtime(Numbers(SURE), policy(0.5, 0.5), COSTS)(numbered(0))) == 0


def test_a_policy_of_another_network_is_refused() -> None:
    with pytest.raises(ValueError, match="the policy has 2 exits, the network 3"):
        Runtime(Numbers(SURE), policy(0.5), COSTS)


def test_packing_only_where_it_pays_and_without_changing_answers() -> None:
    # stage 2 takes as long for one as for four; stage 3 gets cheaper with every sample
    rule = MeasuredPacking((1, 5), ((1.0, 5.0), (3.0, 3.0), (1.0, 9.0)), ((0.5, 0.5), (0.1, 0.1)))
    assert not rule.worth_it(1, 5, 1) and rule.worth_it(2, 5, 3)
    engine = Numbers(SURE)
    found = Runtime(engine, policy(0.5, 0.5), COSTS, rule)(numbered(5))
    assert engine.ran == [(1, 5), (2, 5), (3, 3)]
    assert found.exits.tolist() == [1, 2, 3, 3, 3] and found.labels.tolist() == [10, 21, 32, 33, 34]
    text = rule.explain()
    assert "after exit 1, packing pays never" in text[0] and "once 1 of 5 have left" in text[1]
    assert MeasuredPacking.from_json(rule.to_json()) == rule
    assert rule.worth_it(2, 50, 10)  # beyond what was measured, in proportion


def test_measured_packing_has_every_stage_and_size() -> None:
    rule = measure_packing(TorchEngine(network()), IMAGES[:16])
    assert rule.sizes == (1, 4, 16)
    assert [len(row) for row in rule.stage_ms] == [3] * 3 and [len(row) for row in rule.pack_ms] == [3] * 2
    assert all(ms > 0 for row in (*rule.stage_ms, *rule.pack_ms) for ms in row)


class Rerun:
    """Stands in for a CUDA graph: replaying is running again."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.replay = step


@pytest.mark.parametrize("gone", [1, 10, 1000])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_what_graphs_share_is_handed_on_rightly(size: int, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured stages pack for themselves, from memory they share; pooled, not packed or too many, answers stay."""
    for module in (torch_engine, cuda_graphs):
        monkeypatch.setattr(module, "captured", Rerun)
        monkeypatch.setattr(module, "BUCKETS", (1, 4, 8, 40))
    sure, _ = reference()
    rule = policy(*np.median(sure[:-1], axis=1).tolist())
    plain = Runtime(TorchEngine(network(), dtype=torch.float64), rule, COSTS)(IMAGES)
    engine = TorchEngine(network(), dtype=torch.float64, graphs=True)
    assert engine.graphs is not None and engine.graphs._said(4).is_contiguous()  # or no graph could write it

    class Rule:
        def worth_it(self, k: int, batch: int, staying: int) -> bool:
            return batch - staying >= gone

    runtime = Runtime(engine, rule, COSTS, Rule())
    found = [runtime(IMAGES[at : at + size]) for at in range(0, len(IMAGES), size)]
    for field in ("labels", "exits"):
        np.testing.assert_array_equal(np.concatenate([getattr(f, field) for f in found]), getattr(plain, field))
    pool, exits = Pool(engine, rule, min(size, 40), wait_s=60.0), np.zeros(len(IMAGES), np.int64)
    for at in range(0, len(IMAGES), 20):
        pool.add(IMAGES[at : at + 20], [Ticket(row, 3) for row in range(at, min(at + 20, len(IMAGES)))])
        while pool.ready():
            for one in pool.work():
                exits[one.ticket.key] = one.exit
        np.testing.assert_array_equal(runtime(IMAGES[:9]).exits, plain.exits[:9])  # beside what is under way
    while pool.waiting:
        for one in pool.work(flush=True):
            exits[one.ticket.key] = one.exit
    np.testing.assert_array_equal(exits, plain.exits)


def test_infinite_thresholds_let_nobody_leave() -> None:
    found = Runtime(Numbers(np.ones((3, 3))), policy(math.inf, math.inf), COSTS)(numbered(3))
    assert found.exits.tolist() == [3, 3, 3] and not found.forced.any()
