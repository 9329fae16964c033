"""The benchmark runs and says what it should; no time is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from helpers.runs import call
from offramp import ExitNet, create_model, register_model
from offramp.bench import train as benches
from offramp.bench.train import (
    BASELINE,
    ROWS,
    SECOND,
    SECOND_LEARNED,
    WHOLE,
    asked_rows,
    bench_train,
    copied_bytes_per_s,
    lower_bound,
    new_step,
    what_is_trained,
    what_to_bench,
    where_time_goes,
)
from offramp.models.cost import exit_costs
from offramp.models.layers import ConvBNReLU
from offramp.training.objectives import Distillation


def test_every_row_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "peak_megabytes", lambda *_: 0.0)
    rows = bench_train("msdnet-tiny", 8, "cpu", repeats=1)
    assert [row.name for row in rows] == list(ROWS)
    assert {row.name: row.ratio for row in rows}[BASELINE] == 1 and all(row.milliseconds > 0 for row in rows)


@pytest.mark.slow  # memory is measured in a fresh process for every row
def test_every_row_is_timed_and_weighed() -> None:
    rows = bench_train("msdnet-tiny", 8, "cpu", repeats=1)
    assert [row.name for row in rows] == list(ROWS)
    assert all(row.milliseconds > 0 and row.peak_mb >= 0 for row in rows)
    assert {row.name: row.ratio for row in rows}[BASELINE] == 1 and {row.way for row in rows} == {"eager"}
    assert rows[0].images_per_s == pytest.approx(8000 / rows[0].milliseconds, rel=0.01)


def test_a_network_without_heads_of_ours_has_no_second_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(num_classes: int) -> ExitNet:
        heads = [nn.Sequential(nn.Flatten(), nn.Linear(32, num_classes)) for _ in range(2)]
        return ExitNet.from_parts([nn.Conv2d(3, 2, 8, stride=8), nn.Conv2d(2, 2, 1)], heads)

    register_model("bench-test-net", build, num_classes=4)
    monkeypatch.setattr(benches, "peak_megabytes", lambda *_: 0.0)
    rows = bench_train("bench-test-net", 8, "cpu", repeats=1)
    assert [row.name for row in rows] == [row for row in ROWS if row not in (SECOND, SECOND_LEARNED)]


def test_rows_and_ways_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "peak_megabytes", lambda *_: 0.0)
    rows = bench_train("msdnet-tiny", 8, "cpu", repeats=1, only="imta", way="eager")
    assert [row.name for row in rows] == [BASELINE, SECOND, SECOND_LEARNED]
    with pytest.raises(ValueError, match=f"no row of msdnet-tiny has 'magic' in its name; there are: .*{SECOND}"):
        bench_train("msdnet-tiny", 8, "cpu", only="magic")
    with pytest.raises(ValueError, match="there is no way 'fast' on cpu; there is eager"):
        bench_train("msdnet-tiny", 8, "cpu", way="fast")


def test_an_odd_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="even and at least 4"):
        bench_train("msdnet-tiny", 7)


def test_where_the_time_goes_is_told() -> None:
    spent = where_time_goes("learned, forward_mode", "eager", what_to_bench("msdnet-tiny"), 8, "cpu", steps=1)
    assert any("convolution" in name for name, _, _ in spent[:5])
    assert [ms for _, _, ms in spent] == sorted((ms for _, _, ms in spent), reverse=True)


def test_where_the_time_of_another_step_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "train", "--model", "msdnet-tiny", "--batch", "8", "--device", "cpu", "--where", "--json")
    for only, step in (
        ((), "learned, forward_mode"),
        (("--only", "two updates"), BASELINE),
        (("--only", "imta"), SECOND_LEARNED),
    ):
        assert call(monkeypatch, *words, *only) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["way"]) == (step, "eager") and found["spent"][0][2] > 0
    assert call(monkeypatch, *words, "--way", "graph") == 2
    assert "there is no way 'graph' on cpu" in capsys.readouterr().err


def test_the_lower_bound_counts_passes_and_bytes() -> None:
    model = create_model("msdnet-tiny")
    bound = lower_bound(model, images=4, bytes_each=2)
    assert bound.exact_mul_adds / bound.baseline_mul_adds == pytest.approx(10 / 3)
    assert bound.baseline_mul_adds == 3 * 4 * exit_costs(model)[-1].macs
    alone = ExitNet.from_parts([ConvBNReLU(3, 8, stride=2)], [nn.Sequential(nn.Flatten(), nn.Linear(8 * 16 * 16, 2))])
    x, y = 3 * 32 * 32, 8 * 16 * 16
    found = lower_bound(alone, images=1, bytes_each=1)
    assert found.baseline_bytes == (x + 3 * y) + 2 * x + 7 * y
    assert found.exact_bytes == 2 * (x + 3 * y) + 3 * (2 * x + 7 * y) + 2 * x + 5 * y
    assert copied_bytes_per_s(torch.device("cpu"), 8) > 0


def test_a_recipes_own_way_of_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("model.name=msdnet-tiny", "model.num_classes=10", "train.cutmix=1.0")
    config = what_to_bench(None, "cifar100-msdnet5", settings)
    model, _, objective = what_is_trained(BASELINE, config)
    assert (model.carry, model.fork is not None) == (0.5, True) and isinstance(objective, Distillation)
    step = new_step(BASELINE, "eager", config, 8, torch.device("cpu"), "auto")
    method = step.args[2]  # type: ignore[attr-defined]
    assert method.mixing is not None and step.args[1].defaults["nesterov"]  # type: ignore[attr-defined]
    monkeypatch.setattr(benches, "peak_megabytes", lambda *_: 0.0)
    rows = bench_train(config, 8, "cpu", repeats=1, only="one update")
    assert [row.name for row in rows] == [WHOLE, BASELINE]
    new_step("learned, forward_mode", "eager", config, 8, torch.device("cpu"), "auto")()
    blind = {SECOND, SECOND_LEARNED, "learned, finite_difference"}  # carried logits, and a target that would move
    assert asked_rows(config, "") == [row for row in ROWS if row not in blind]
    with pytest.raises(ValueError, match="bench train has no teacher to ask"):
        what_to_bench("msdnet5", None, ("objective.name=distillation", "objective.options.source=teacher"))


def test_what_is_trained_of_a_network_is_timed() -> None:
    """The parts, the average of the params, kept statistics and clipped gradients, as a run has them."""
    settings = ("train.parts=inner_heads", "train.ema=0.9", "train.clip_norm=1", "train.freeze_norms=true")
    config = what_to_bench("msdnet-tiny", None, settings)
    assert asked_rows(config, "") == [WHOLE, BASELINE]
    step = new_step(BASELINE, "eager", config, 8, torch.device("cpu"), "auto")
    module, _, method = step.args[:3]  # type: ignore[attr-defined]
    assert method.clip_norm == 1 and method.ema.decay == 0.9
    trained = {name for name, param in module.model.named_parameters() if param.requires_grad}
    assert trained and all(name.startswith(("heads.0.", "heads.1.", "heads.2.")) for name in trained)
    before = module.model.heads[0].linear.weight.detach().clone()
    step()
    assert not torch.equal(before, module.model.heads[0].linear.weight)
    last = what_to_bench("msdnet-tiny", None, ("train.parts=last_exit",))
    new_step("learned, forward_mode", "eager", last, 8, torch.device("cpu"), "auto")()
