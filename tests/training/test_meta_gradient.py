"""The meta-gradient, in float64, against double backward and finite differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.training import settings
from offramp import create_model
from offramp.training.lookahead import check_optimizer
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half, exit_losses
from offramp.training.step import forward
from offramp.training.weighting import UniformWeighting

EXITS = 3


class Net(nn.Module):
    """Not one of ours: BatchNorm, dropout if asked for, a frozen and an unused param."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = (6, 7, 8, 9)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh(), nn.Dropout(dropout))
            for a, b in zip(sizes, sizes[1:], strict=False)
        )
        self.heads = nn.ModuleList(nn.Linear(b, 4) for b in sizes[1:])
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            out.append(head(x))
        return out


def batch(seed: int, shape: tuple[int, ...] = (6,)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, *shape, generator=draw, dtype=torch.float64), torch.randint(0, 4, (16,), generator=draw)


def problem(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (6,), **more: object
) -> Problem:
    method = Method(UniformWeighting(), settings(**more))
    train = forward(model, method, Half(*batch(1, shape)), keeps=False)
    draw = torch.Generator().manual_seed(9)
    weights = 0.5 + torch.rand(train.losses_BK.shape, generator=draw, dtype=torch.float64)
    return Problem(model, optimizer, method, train, weights, Half(*batch(2, shape)))


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, shape: tuple[int, ...] = (6,)) -> None:
    for seed in range(steps):
        x, y = batch(100 + seed, shape)
        optimizer.zero_grad()
        exit_losses(model(x), y).sum(1).mean().backward()
        optimizer.step()


def two_groups(model: Net) -> list[dict[str, object]]:
    heads = list(model.heads.parameters())
    return [{"params": list(model.blocks.parameters()) + [model.unused]}, {"params": heads, "lr": 0.03}]


Make = Callable[[Net], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "plain": lambda m: torch.optim.SGD(two_groups(m), lr=0.1),
    "decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, weight_decay=0.01),
    "momentum": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9),
    "momentum-decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "nesterov-decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, weight_decay=0.05),
}


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


def test_a_second_moment_of_zero_gives_a_finite_slope() -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    from offramp.training.lookahead import look_ahead

    params = dict(model.named_parameters())
    moved = look_ahead(optimizer, params, {k: torch.zeros_like(p) for k, p in params.items()}, "optimizer")
    assert all(torch.isfinite(slope).all() for group in moved.groups for slope in group.slope)


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
    from functools import partial

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, meta = (Half(x.float(), y) for x, y in (batch(1), batch(2)))
    passed = forward(model, Method(UniformWeighting()), train, keeps=False)
    method = Method(UniformWeighting(), settings(), autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    given = Problem(model, optimizer, method, passed, torch.ones(16, EXITS), meta)
    exact, rough = (ESTIMATORS[e](given).weights_BK for e in ("forward_mode", "finite_difference"))
    assert (rough - exact).norm() < 0.1 * exact.norm()


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
