"""`offramp bench finetune`: every way makes its updates, and the numbers belong together."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from helpers.runs import call
from offramp.bench import finetune
from offramp.models.registry import create_model
from offramp.runs.config import WeightingConfig
from offramp.training.cuda_graph import CapturedStep
from offramp.training.method import Method
from offramp.training.weighting import Context, new_weighting


def test_rows_belong_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--image-size",
        32,
        "--exits",
        2,
        "--batch",
        2,
        "--repeats",
        1,
        "--no-compiled",
        "--device",
        "cpu",
        "--json",
    )
    assert call(monkeypatch, "bench", "finetune", "timm/test_resnet", *words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [finetune.EAGER, finetune.OURS, finetune.LEARNED]
    assert rows[0]["times_plain"] == 1.0
    for row in rows:
        assert row["images_per_s"] == pytest.approx(2e3 / row["update_ms"], rel=0.02)
        assert row["times_plain"] == pytest.approx(rows[0]["update_ms"] / row["update_ms"], rel=0.02, abs=0.006)


def test_the_plain_loop_makes_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared must do the same work: params after one step agree."""
    built = []

    def kept(name: str, **overrides: object) -> torch.nn.Module:
        built.append(create_model(name, **overrides))  # type: ignore[arg-type]
        return built[-1]

    monkeypatch.setattr(finetune, "create_model", kept)
    for row in (finetune.EAGER, finetune.OURS):
        finetune._new_step(row, "timm/test_resnet", 32, 2, 4, torch.device("cpu"))()
    theirs, ours = (model.state_dict() for model in built)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("name", "batch", "sentence"),
    [("msdnet5", 4, "is not a network of a library"), ("timm/test_resnet", 1, "batch must be 2 or more")],
)
def test_mistakes_are_sentences(name: str, batch: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        finetune.bench_finetune(name, batch=batch, device="cpu")


def test_a_compiler_that_fails_leaves_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: object) -> object:
        def call(images: torch.Tensor) -> list[torch.Tensor]:
            raise RuntimeError("no C compiler here\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    rows = finetune.bench_finetune("timm/test_resnet", 32, 2, 2, "cpu", repeats=1, silent=True)
    assert [row.name for row in rows] == [finetune.EAGER, finetune.OURS, finetune.LEARNED]
    assert "torch.compile failed, so its row is left out: no C compiler here" in caplog.text


def test_a_step_that_is_not_captured_is_named() -> None:
    model = create_model("timm/test_resnet", exits=2, image_size=32)
    method = Method(new_weighting(WeightingConfig(), Context(2)))
    step = CapturedStep(model, torch.optim.SGD(model.parameters(), 0.1), method)  # on a CPU nothing is captured
    assert finetune._named(finetune.OURS, partial(step)) == "offramp, not captured"
    assert finetune._named(finetune.EAGER, partial(print)) == finetune.EAGER
