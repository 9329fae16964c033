"""Ten updates of each kind of training, in float64, against curves that a change must reproduce."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.training import by, learned, with_equilibrium
from offramp.models.collaboration import classifier
from offramp.models.exits import ExitNet
from offramp.models.registry import create_model
from offramp.training.imta import OneForAll, OnFrozenFeatures
from offramp.training.method import Method
from offramp.training.step import train_step
from offramp.training.tape import use_taped_layers
from offramp.training.weighting import UniformWeighting

GOLDEN = json.loads((Path(__file__).parent / "golden_curves.json").read_text())


def network(**more: Any) -> ExitNet:
    torch.manual_seed(0)
    return create_model("msdnet-tiny", 10, blocks=(1, 1, 1), base_width=4, growth=4, head_width=8, **more).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(5):
        images = torch.randn(16, 3, 32, 32, generator=draw, dtype=torch.float64)
        yield images, torch.randint(10, (16,), generator=draw)


def assert_golden(name: str, model: ExitNet, module: nn.Module, method: Method) -> None:
    module.train()
    use_taped_layers(module)
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(moving, lr=0.1, momentum=0.9, weight_decay=1e-4)
    found = [
        half
        for step, (images, labels) in enumerate(batches())
        for half in train_step(module, optimizer, method, images, labels, step)
    ]
    assert len(found) == len(GOLDEN[name]["updates"])
    for half, wanted in zip(found, GOLDEN[name]["updates"], strict=True):
        assert half.loss.item() == pytest.approx(wanted["loss"], rel=1e-9)
        assert half.losses_BK.mean(0).tolist() == pytest.approx(wanted["exits"], rel=1e-9)
        assert (half.meta_loss is None) == (wanted["meta"] is None)
        if half.meta_loss is not None:
            assert half.meta_loss.item() == pytest.approx(wanted["meta"], rel=1e-9)
    size = torch.stack([p.detach().norm() for p in model.parameters()]).norm().item()
    assert size == pytest.approx(GOLDEN[name]["params"], rel=1e-9)


def test_conventional() -> None:
    model = network()
    assert_golden("conventional", model, model, Method(UniformWeighting()))


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_learned(order: str) -> None:
    model = network()
    assert_golden(order, model, model, by(learned(3, learning_rate=1e-2, order=order, double=True)))


def test_imta_phase_1() -> None:
    model = with_equilibrium(network())
    assert_golden("imta phase 1", model, model, by(learned(3, learning_rate=1e-2, double=True)))


def test_imta_phase_2() -> None:
    base, model = network(), network(collaboration=True)
    known = model.base.state_dict()
    model.base.load_state_dict({name: t for name, t in base.state_dict().items() if name in known})
    module = OnFrozenFeatures(model, classifier(base.heads[-1]))
    weighting = learned(3, learning_rate=1e-2, double=True)
    assert_golden("imta phase 2", model, module, by(weighting, objective=OneForAll(3.0, 0.9), prepare=module.prepare))
