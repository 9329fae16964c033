"""Learned weights on networks of a library are exact: forward mode against double backward, in float64.

With AdamW, dropout and drop path, which both passes must draw alike.
"""

from __future__ import annotations

import pytest
import timm
import torch

from helpers.training import settings
from offramp import with_exits
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half, exit_losses
from offramp.training.step import forward
from offramp.training.weighting import UniformWeighting

SIZE, CLASSES, SAMPLES = 32, 4, 4
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


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_mode_equals_double_backward(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, num_classes=CLASSES, **FAMILIES[name])
    model = with_exits(module, 3, example=torch.zeros(2, 3, SIZE, SIZE), head="chained", dropout=0.2, width=16)
    model.double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for seed in (10, 11):
        seen = half(seed)
        optimizer.zero_grad()
        exit_losses(model(seen.images), seen.labels).sum(1).mean().backward()
        optimizer.step()
    method = Method(UniformWeighting(), settings(q=0.6))
    train = forward(model, method, half(1), keeps=True)
    weights_BK = 0.5 + torch.rand(train.losses_BK.shape, dtype=torch.float64)
    given = Problem(model, optimizer, method, train, weights_BK, half(2))
    torch.manual_seed(5)
    exact = ESTIMATORS["double_backward"](given).weights_BK
    torch.manual_seed(5)
    ours = ESTIMATORS["forward_mode"](given).weights_BK
    assert exact.abs().max() > 1e-9
    assert (ours - exact).norm() < 1e-9 * exact.norm()
