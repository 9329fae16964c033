"""Learned weights on networks of a library are exact: forward mode against double backward, in float64.

With AdamW, dropout and drop path, which both passes must draw alike; with norms that keep their statistics, cascades,
and exits that learn from each other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch

from helpers.training import settings
from offramp import ExitNet, cascade, with_exits
from offramp.runs.config import ObjectiveConfig
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half, Objective, cross_entropy, exit_losses, new_objective
from offramp.training.parts import freeze_norms
from offramp.training.step import forward
from offramp.training.weighting import UniformWeighting

SIZE, SMALLER, CLASSES, SAMPLES = 32, 24, 4, 4
DRAWS = {"drop_rate": 0.2, "drop_path_rate": 0.2}
FAMILIES = {
    "vit_tiny_patch16_224": DRAWS | {"img_size": SIZE, "attn_drop_rate": 0.2, "depth": 3},
    "convnext_atto": DRAWS | {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)},
    "swin_tiny_patch4_window7_224": DRAWS | {"img_size": SIZE, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "tf_efficientnet_lite0": DRAWS,
    "test_resnet": DRAWS,
}


def half(seed: int) -> Half:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=draw, dtype=torch.float64)
    return Half(images, torch.randint(CLASSES, (SAMPLES,), generator=draw))


def network(name: str, exits: int = 3, head: str = "chained") -> ExitNet:
    module = timm.create_model(name, num_classes=CLASSES, **FAMILIES[name])
    return with_exits(module, exits, example=torch.zeros(2, 3, SIZE, SIZE), head=head, dropout=0.2, width=16)


def resnet() -> ExitNet:
    return network("test_resnet", 2, head="conv")


BUILDS: dict[str, Callable[[], ExitNet]] = {
    "a cascade": lambda: cascade([resnet(), network("tf_efficientnet_lite0", 2)], [SMALLER, SIZE]),
    "summed logits": lambda: cascade([resnet(), network("test_resnet", 1)], [SMALLER, SIZE], carry=0.5),
    "one network at two sizes": lambda: cascade([resnet()] * 2, [SMALLER, SIZE]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_mode_equals_double_backward(name: str) -> None:
    torch.manual_seed(0)
    compare(network(name))


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "test_resnet"])
def test_it_does_with_norms_that_keep_their_statistics(name: str) -> None:
    torch.manual_seed(0)
    compare(network(name, head="conv"), frozen=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("build", BUILDS)
def test_it_does_in_cascades(build: str, frozen: bool) -> None:
    torch.manual_seed(0)
    compare(BUILDS[build](), frozen)


@pytest.mark.parametrize("terms", ["sum", "each"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_resnet", "one network at two sizes"])
def test_it_does_with_distillation_from_the_mean(name: str, terms: str) -> None:
    torch.manual_seed(0)
    objective = new_objective(ObjectiveConfig("distillation", {"source": "mean", "label_smoothing": 0.1}))
    compare(BUILDS[name]() if name in BUILDS else network(name), objective=objective, terms=terms)


def compare(model: ExitNet, frozen: bool = False, objective: Objective = cross_entropy, terms: str = "sum") -> None:
    model.double().train()
    if frozen:
        freeze_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for seed in (10, 11):
        seen = half(seed)
        optimizer.zero_grad()
        exit_losses(model(seen.images), seen.labels).sum(1).mean().backward()
        optimizer.step()
    method = Method(UniformWeighting(), settings(q=0.6, terms=terms), objective)
    train = forward(model, method, half(1), keeps=True)
    weights_BK = 0.5 + torch.rand(train.losses_BK.shape, dtype=torch.float64)
    given = Problem(model, optimizer, method, train, weights_BK, half(2))
    torch.manual_seed(5)
    exact = ESTIMATORS["double_backward"](given).weights_BK
    torch.manual_seed(5)
    ours = ESTIMATORS["forward_mode"](given).weights_BK
    assert exact.abs().max() > 1e-9
    assert (ours - exact).norm() < 1e-9 * exact.norm()
