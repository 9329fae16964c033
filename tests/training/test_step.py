"""One step of training: two updates, and what the weight net learns between them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers.nets import Theirs, loader, same
from helpers.training import by
from helpers.training import learned as weighting_of
from offramp import LearnedWeights
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.method import Method
from offramp.training.objectives import Half, exit_losses
from offramp.training.step import train_step
from offramp.training.weighting import UniformWeighting


def test_range_zero_is_the_baseline_bit_for_bit() -> None:
    models = []
    for method in (Method(UniformWeighting()), by(weighting_of(2, delta=0.0))):
        torch.manual_seed(0)
        model = Theirs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        for step, (x, y) in enumerate(loader(10)):
            torch.manual_seed(step)
            train_step(model, optimizer, method, x, y, step)
        models.append(model)
    assert same(*models)


@pytest.mark.parametrize("engine", ESTIMATORS)
def test_every_engine_trains_the_same_way(engine: str) -> None:
    """In float64 a whole training by each engine ends at the same params (differences: nearly)."""
    results = []
    for name in ("double_backward", engine):
        torch.manual_seed(0)
        model = Theirs().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        weighting = weighting_of(2, learning_rate=0.01, engine=name, double=True)
        for step, (x, y) in enumerate(loader(5)):
            train_step(model, optimizer, by(weighting), x.double(), y, step)
        results.append((model, weighting.net))
    for a, b in zip(*results, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-3 if engine == "finite_difference" else 1e-10)


def test_the_interval_counts_loader_batches() -> None:
    torch.manual_seed(0)
    model = Theirs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = by(weighting_of(2, interval=3))
    learned = [
        [half.meta_loss is not None for half in train_step(model, optimizer, method, x, y, step)]
        for step, (x, y) in enumerate(loader(5))
    ]
    assert learned == [[True, True], [False, False], [False, False], [True, True], [False, False]]


def test_the_weights_learn_what_the_meta_objective_asks_for() -> None:
    """Exit 2 sees pure noise: with a whole-set objective its weight must not rise above exit 1's."""

    class NoisyExit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> list[Tensor]:
            h = self.trunk(x)
            return [self.a(h), self.b(torch.randn_like(h) * 3 + 0 * h)]

    torch.manual_seed(0)
    model = NoisyExit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = by(weighting_of(2, learning_rate=3e-3, objective="whole"))
    for step, (x, y) in enumerate(loader(60, 64)):
        halves = train_step(model, optimizer, method, x, y, step)
    assert halves[-1].weights_BK[:, 0].mean() > halves[-1].weights_BK[:, 1].mean()


def test_autocast_around_the_whole_step_is_autocast_around_each_pass() -> None:
    """Inside one autocast, cached half-precision copies of the params must not survive an update."""
    results = []
    for whole in (True, False):
        torch.manual_seed(0)
        model = Theirs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        weights = LearnedWeights(model, optimizer, num_exits=2)
        if not whole:
            from functools import partial

            weights.method = replace(weights.method, autocast=partial(torch.autocast, "cpu", torch.bfloat16))
        for at, (x, y) in enumerate(loader(4)):
            torch.manual_seed(at)
            with torch.autocast("cpu", torch.bfloat16, enabled=whole):
                weights.step(x, y)
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_a_conventional_step_is_two_plain_updates() -> None:
    """Written out: a half each, cross-entropies of both exits added up, mean over samples."""
    torch.manual_seed(0)
    model = Theirs().double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True) for m in (model, twin)]
    for step, (x, y) in enumerate(loader(3)):
        torch.manual_seed(step)
        results = train_step(model, optimizers[0], Method(UniformWeighting()), x.double(), y, step)
        torch.manual_seed(step)
        for half, (images, labels) in zip(results, zip(x.double().chunk(2), y.chunk(2), strict=True), strict=True):
            losses = exit_losses(twin(images), labels)
            optimizers[1].zero_grad()
            losses.sum(1).mean().backward()
            optimizers[1].step()
            torch.testing.assert_close(half.loss, losses.sum(1).mean().detach())
            torch.testing.assert_close(half.losses_BK, losses.detach())
            assert half.meta_loss is None and torch.equal(half.weights_BK, torch.ones_like(losses))
    assert same(model, twin)


def test_an_objective_gets_the_half_and_what_was_prepared() -> None:
    torch.manual_seed(0)
    model = Theirs()
    x, y = loader(1)[0]
    seen: list[Half] = []

    def objective(logits: list[Tensor], half: Half) -> Tensor:
        seen.append(half)
        return exit_losses(logits, half.labels)

    def prepare(images: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * images, images.sum(1)

    method = Method(UniformWeighting(), objective=objective, prepare=prepare)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), method, x, y, 0)
    assert torch.equal(torch.cat([half.images for half in seen]), 2 * x)
    assert torch.equal(torch.cat([half.labels for half in seen]), y)
    assert torch.equal(torch.cat([half.teacher for half in seen if half.teacher is not None]), x.sum(1))


def test_the_weight_net_sees_plain_cross_entropy_whatever_is_minimised() -> None:
    torch.manual_seed(0)
    model = Theirs()
    weighting = weighting_of(2)
    given: list[Tensor] = []
    plain = weighting.weights

    def weights(losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        given.append(losses_BK)
        return plain(losses_BK, confidences_BK)

    weighting.weights = weights  # type: ignore[method-assign]
    x, y = loader(1)[0]
    method = by(weighting, objective=lambda logits, half: 100 * exit_losses(logits, half.labels))
    results = train_step(model, torch.optim.SGD(model.parameters(), lr=1e-3), method, x, y, 0)
    assert torch.equal(given[0], results[0].losses_BK) and given[0].max() < 50
