"""The look-ahead: where the optimiser's next step leads, by its own rule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers.nets import OPTIMIZERS, Net, problem, warm_up
from offramp.training.lookahead import check_optimizer


@pytest.mark.parametrize("name", ["nesterov-decay", "adamw"])
def test_the_look_ahead_is_the_optimisers_own_step(name: str) -> None:
    """The gradient by the weights is right only if the point is: so compare it with a real step."""
    from offramp.training.lookahead import look_ahead

    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS[name](model)
    for steps in (0, 3):
        warm_up(model, optimizer, steps)
        given = problem(model, optimizer)
        params = given.params()
        loss = (given.weights_BK * given.train.losses_BK).sum(1).mean()
        gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True))
        moved = look_ahead(optimizer, params, gradients, "optimizer").params
        twin = copy.deepcopy(model)
        real = OPTIMIZERS[name](twin)
        real.load_state_dict(optimizer.state_dict())
        for key, param in twin.named_parameters():
            param.grad = gradients.get(key)
        real.step()
        for key, param in twin.named_parameters():
            if key in moved:
                torch.testing.assert_close(moved[key].detach(), param.detach(), rtol=1e-12, atol=1e-14)


def test_a_second_moment_of_zero_gives_a_finite_slope() -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    from offramp.training.lookahead import look_ahead

    params = dict(model.named_parameters())
    moved = look_ahead(optimizer, params, {k: torch.zeros_like(p) for k, p in params.items()}, "optimizer")
    assert all(torch.isfinite(slope).all() for group in moved.groups for slope in group.slope)


def test_what_has_no_look_ahead_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="need one of the optimizers SGD, AdamW, got RMSprop"):
        check_optimizer(torch.optim.RMSprop(params))
    with pytest.raises(ValueError, match="got Adam"):
        check_optimizer(torch.optim.Adam(params))
    with pytest.raises(ValueError, match="maximize=True"):
        check_optimizer(torch.optim.SGD(params, lr=1, maximize=True))
    clipped = torch.optim.SGD(params, lr=1)
    clipped.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 1.0) and None)
    with pytest.raises(ValueError, match="clipping by global norm"):
        check_optimizer(clipped)
