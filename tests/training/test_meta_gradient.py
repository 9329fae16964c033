"""The meta-gradient, in float64, against double backward and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.nets import OPTIMIZERS, Net, batch, problem, two_groups, warm_up
from helpers.training import settings
from offramp import create_model
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half
from offramp.training.step import forward
from offramp.training.weighting import UniformWeighting

EXITS = 3


@pytest.mark.parametrize("objective", ["allocated", "whole"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_forward_mode_equals_double_backward(name: str, steps: int, objective: str) -> None:
    if name == "adamw" and steps == 0:
        steps = 5  # without a warmed-up second moment its step is nearly the sign of the gradient
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS[name](model)
    warm_up(model, optimizer, steps)
    given = problem(model, optimizer, objective=objective, q=0.6)
    exact = ESTIMATORS["double_backward"](given)
    ours = ESTIMATORS["forward_mode"](given)
    assert exact.weights_BK.abs().max() > 1e-7
    scale = exact.weights_BK.abs().max()
    assert (ours.weights_BK - exact.weights_BK).abs().max() < 1e-10 * max(1, scale)
    assert (ours.weights_BK - exact.weights_BK).norm() < 1e-9 * exact.weights_BK.norm()
    torch.testing.assert_close(ours.loss, exact.loss, rtol=1e-12, atol=0)
    rough = ESTIMATORS["finite_difference"](given)
    assert (rough.weights_BK - exact.weights_BK).norm() < 1e-5 * exact.weights_BK.norm()


def test_against_brute_force_over_the_weights() -> None:
    """No autograd at all on the outer level: nudge a weight, redo the look-ahead, look at the meta loss."""
    from offramp.training.lookahead import look_ahead

    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS["momentum-decay"](model)
    warm_up(model, optimizer, 2)
    given = problem(model, optimizer)
    params = given.params()

    def loss_at(weights: Tensor) -> Tensor:
        loss = (weights * given.train.losses_BK).sum(1).mean()
        found = torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True)
        moved = look_ahead(optimizer, params, dict(zip(params, found, strict=True)), "optimizer")
        return given.meta_loss_at(moved.params).detach()

    ours = ESTIMATORS["forward_mode"](given).weights_BK
    for i, k in ((0, 0), (5, 1), (11, 2)):
        nudge = torch.zeros_like(ours)
        nudge[i, k] = 1e-4
        slope = (loss_at(given.weights_BK + nudge) - loss_at(given.weights_BK - nudge)) / 2e-4
        torch.testing.assert_close(ours[i, k], slope, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("engine", ESTIMATORS)
def test_a_look_ahead_leaves_everything_untouched(engine: str) -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.3).double()
    optimizer = OPTIMIZERS["momentum-decay"](model)
    warm_up(model, optimizer, 2)
    given = problem(model, optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = {p: s["momentum_buffer"].clone() for p, s in optimizer.state.items()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    ESTIMATORS[engine](given)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], b) for p, b in buffers.items())
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters() if p.grad is not None)
    given.train.losses_BK.sum().backward()  # the first forward's graph is still there


def test_dropout_draws_the_same_mask_in_every_pass_over_the_train_half() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.4).double()
    optimizer = OPTIMIZERS["momentum"](model)
    given = problem(model, optimizer)
    torch.manual_seed(123)
    exact = ESTIMATORS["double_backward"](given).weights_BK
    torch.manual_seed(123)
    ours = ESTIMATORS["forward_mode"](given).weights_BK
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(given.train_losses_at(dict(model.named_parameters())), given.train.losses_BK)


def test_one_of_our_networks() -> None:
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", num_classes=4, blocks=(1, 1), base_width=4, growth=4, head_width=4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    warm_up(model, optimizer, 1, (3, 32, 32))
    given = problem(model, optimizer, (3, 32, 32))
    exact, ours = (ESTIMATORS[e](given).weights_BK for e in ("double_backward", "forward_mode"))
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_plain_look_ahead_is_the_papers_formula() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS["momentum-decay"](model)
    warm_up(model, optimizer, 2)
    given = problem(model, optimizer, look_ahead="plain")
    plain = torch.optim.SGD(two_groups(model), lr=0.1)
    same = replace(given, optimizer=plain, method=replace(given.method, settings=settings()))
    for engine in ("forward_mode", "double_backward"):
        torch.testing.assert_close(ESTIMATORS[engine](given).weights_BK, ESTIMATORS[engine](same).weights_BK)


@pytest.mark.parametrize("engine", ESTIMATORS)
def test_dead_params_and_a_rate_of_zero_give_finite_gradients(engine: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    nn.init.zeros_(model.heads[2].weight)  # what is below it gets no gradient: its second moment is zero
    for optimizer in (torch.optim.AdamW(two_groups(model), lr=0.01), torch.optim.SGD(model.parameters(), lr=0.0)):
        found = ESTIMATORS[engine](problem(model, optimizer)).weights_BK
        assert found.isfinite().all()
    assert found.abs().max() == 0


def test_16_bits_do_not_drown_the_difference() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, meta = (Half(x.float(), y) for x, y in (batch(1), batch(2)))
    passed = forward(model, Method(UniformWeighting()), train, keeps=False)
    method = Method(UniformWeighting(), settings(), autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    given = Problem(model, optimizer, method, passed, torch.ones(16, EXITS), meta)
    exact, rough = (ESTIMATORS[e](given).weights_BK for e in ("forward_mode", "finite_difference"))
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_frozen_norms_have_tangents_in_16_bits() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.BatchNorm2d(4).eval()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
            self.a, self.b = nn.LazyLinear(4), nn.LazyLinear(4)

        def forward(self, x: Tensor) -> list[Tensor]:
            seen = self.body(x)
            return [self.a(seen), self.b(seen)]

    def gradient(autocast: Callable[[], AbstractContextManager[object]]) -> Tensor:
        method = Method(UniformWeighting(), settings(), autocast=autocast)
        passed = forward(model, method, train, keeps=False)
        return ESTIMATORS["forward_mode"](Problem(model, optimizer, method, passed, torch.ones(16, 2), meta)).weights_BK

    torch.manual_seed(0)
    model = Frozen()
    train, meta = (Half(torch.randn(16, 3, 8, 8), torch.randint(4, (16,))) for _ in range(2))
    model(train.images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact, rough = gradient(nullcontext), gradient(partial(torch.autocast, "cpu", torch.bfloat16))
    assert (rough - exact).norm() < 0.05 * exact.norm()
    assert not model.body[1]._forward_hooks


def test_attention_has_tangents() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> list[Tensor]:
            seen, _ = self.attention(x, x, x, need_weights=False)
            return [self.a(x.mean(1)), self.b(seen.mean(1))]

    torch.manual_seed(0)
    model = Attends().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = ESTIMATORS["forward_mode"](problem(model, optimizer, (5, 8))).weights_BK
    with sdpa_kernel(SDPBackend.MATH):  # double backward needs the plain form from the first forward on
        exact = ESTIMATORS["double_backward"](problem(model, optimizer, (5, 8))).weights_BK
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
