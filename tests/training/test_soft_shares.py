"""The meta objective of a policy: soft shares of exits, their thresholds, and the gradients through both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.nets import OPTIMIZERS, Net, batch, problem, warm_up
from helpers.runs import Config
from helpers.training import by, learned, settings
from offramp.measuring.thresholds import exit_counts
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.method import Method
from offramp.training.objectives import Half, allocate, exit_confidences, exit_losses, soft_shares
from offramp.training.processes import Processes
from offramp.training.step import train_step
from offramp.training.weighting import UniformWeighting


def confidences(samples: int = 40, exits: int = 4) -> Tensor:
    return torch.rand(samples, exits, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("q", [0.3, 0.75, 1.4])
def test_near_zero_they_are_the_allocation(q: float) -> None:
    given = confidences()
    hard = F.one_hot(allocate(given, q) - 1, 4).double()
    torch.testing.assert_close(soft_shares(given, q, 1e-6), hard, rtol=0, atol=1e-9)
    soft = soft_shares(given, q, 0.05)
    torch.testing.assert_close(soft.sum(1), torch.ones(40, dtype=torch.float64))
    assert (soft > 0).all() and (soft - hard).abs().max() > 0.1
    assert (soft.sum(0) - torch.tensor(exit_counts(40, 4, q))).abs().max() < 4  # of 40 samples


def test_where_nobody_leaves_nothing_does() -> None:
    given = confidences(3, 5).requires_grad_()  # too few for a share at any exit but the last
    shares = soft_shares(given, 0.75, 0.05)
    assert torch.equal(shares, F.one_hot(torch.full((3,), 4), 5).double())
    shares.square().sum().backward()
    assert given.grad is not None and not given.grad.any()


def test_equal_confidences_give_finite_gradients() -> None:
    given = torch.ones(12, 3, requires_grad=True)
    (soft_shares(given, 0.75, 0.05) * torch.rand(12, 3)).sum().backward()
    assert given.grad is not None and given.grad.isfinite().all()


def test_nothing_waits_for_the_device() -> None:
    """A tensor without values has nothing to wait for: `item` or a shape that depends on values would raise."""
    with FakeTensorMode():
        given = torch.rand(16, 3, requires_grad=True)
        soft_shares(given, 0.75, 0.05).square().sum().backward()
        assert given.grad is not None and given.grad.shape == (16, 3)


def slow_shares(given: Tensor, thresholds: list[float], temperature: float) -> Tensor:
    """One exit after another, as the formula says."""
    staying, shares = torch.ones(len(given), dtype=given.dtype), []
    for k, threshold in enumerate(thresholds):
        leaving = ((given[:, k] - threshold) / temperature).sigmoid()
        shares.append(staying * leaving)
        staying = staying * (1 - leaving)
    return torch.stack([*shares, staying], 1)


def solved(given: Tensor, totals: Tensor, temperature: float) -> Tensor:
    """Shares under the thresholds by which each exit's share of the batch is the one wanted: by bisection."""
    thresholds: list[float] = []
    for k in range(given.shape[1] - 1):
        low, high = -5.0, 5.0
        for _ in range(100):
            middle = (low + high) / 2
            share = slow_shares(given, [*thresholds, middle], temperature)[:, k].sum()
            low, high = (middle, high) if share > totals[k] else (low, middle)
        thresholds.append((low + high) / 2)
    return slow_shares(given, thresholds, temperature)


def test_thresholds_move_so_that_the_shares_stay() -> None:
    """The gradient, against thresholds that are found anew for every nudge."""
    given, prices = confidences(12, 3).requires_grad_(), confidences(12, 3).flip(0)
    shares = soft_shares(given, 0.75, 0.1)
    (gradient,) = torch.autograd.grad((shares * prices).sum(), given, retain_graph=True)
    totals = shares.detach().sum(0)
    torch.testing.assert_close(solved(given.detach(), totals, 0.1), shares.detach())
    for i, k in ((0, 0), (3, 1), (7, 0), (11, 1)):
        nudge = torch.zeros_like(given)
        nudge[i, k] = 1e-5
        ahead, behind = (solved(given.detach() + sign * nudge, totals, 0.1) for sign in (1, -1))
        slope = ((ahead - behind) * prices).sum() / 2e-5
        torch.testing.assert_close(gradient[i, k], slope, rtol=1e-5, atol=1e-7)
    for k in range(3):  # nobody's confidence changes how many leave
        (held,) = torch.autograd.grad(shares[:, k].sum(), given, retain_graph=True)
        assert held.abs().max() < 1e-12


@pytest.mark.parametrize("through_exits", [False, True])
@pytest.mark.parametrize("name", ["nesterov-decay", "adamw"])
def test_the_meta_gradient_is_that_of_double_backward(name: str, through_exits: bool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS[name](model)
    warm_up(model, optimizer, 5)
    given = problem(model, optimizer, objective="policy", temperature=0.1, through_exits=through_exits)
    exact = ESTIMATORS["double_backward"](given)
    ours = ESTIMATORS["forward_mode"](given)
    assert exact.weights_BK.abs().max() > 1e-7
    torch.testing.assert_close(ours.weights_BK, exact.weights_BK, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.loss, exact.loss, rtol=1e-12, atol=0)


def test_the_delayed_order_has_the_same_meta_gradient() -> None:
    found = []
    for more in ({"engine": "double_backward"}, {"order": "delayed"}):
        torch.manual_seed(0)
        model, taught = Net().double(), []
        given: dict[str, Any] = {"objective": "policy", "through_exits": True, **more}
        weighting = learned(3, double=True, **given)
        weighting.learn = lambda weights, gradient, taught=taught: taught.append(gradient)  # type: ignore[method-assign]
        train_step(model, OPTIMIZERS["momentum"](model), by(weighting), *batch(1), 0)
        found.append(taught[0])  # of the first update: both orders look ahead by the same weights
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_the_meta_loss_is_the_mean_over_samples_where_they_leave() -> None:
    torch.manual_seed(0)
    model = Net().double().eval()
    optimizer = OPTIMIZERS["plain"](model)
    meta = Half(*batch(2))
    outputs = [x.detach() for x in model(meta.images)]
    losses, exits = exit_losses(outputs, meta.labels), allocate(exit_confidences(outputs), 0.6)
    served = losses.gather(1, exits[:, None] - 1).mean()
    near_zero = problem(model, optimizer, objective="policy", q=0.6, temperature=1e-6).meta_loss(outputs)
    torch.testing.assert_close(near_zero, served)
    allocated = problem(model, optimizer, objective="allocated", q=0.6).meta_loss(outputs)
    counts = torch.bincount(exits, minlength=4)[1:]
    means = [losses[exits == k, k - 1].mean() for k in (1, 2, 3)]
    torch.testing.assert_close(allocated, torch.stack(means).sum())
    torch.testing.assert_close(served, (torch.stack(means) * counts).sum() / 16)  # the same, otherwise normalised


def test_through_exits_is_another_gradient_of_the_same_loss() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS["plain"](model)
    plain, through = (
        ESTIMATORS["forward_mode"](problem(model, optimizer, objective="policy", through_exits=on))
        for on in (False, True)
    )
    assert torch.equal(plain.loss, through.loss)
    assert (plain.weights_BK - through.weights_BK).norm() > 1e-3 * plain.weights_BK.norm()


def test_mistakes_get_a_sentence(small_config: Config) -> None:
    for changes, words in (
        (("weighting.through_exits=true",), r"needs weighting\.objective=policy"),
        (("weighting.objective=policy", "weighting.temperature=0"), r"temperature must be 1e-06 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            small_config(*changes)
    with pytest.raises(ValueError, match="one process only"):
        Method(UniformWeighting(), settings(objective="policy", through_exits=True), processes=Processes(0, 2))
