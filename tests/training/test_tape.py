"""The tape: a tangent pass over what the first forward kept is the tangent pass itself, only cheaper."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.training import by, learned, problem_of, with_equilibrium
from offramp import create_model
from offramp.models.exits import ExitNet
from offramp.models.layers import ConvBNReLU
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.objectives import Half, exit_losses
from offramp.training.step import forward, train_step
from offramp.training.tape import Tape, TapedConvBNReLU, no_trace, use_taped_layers
from offramp.training.weighting import LearnedWeighting

TINY = {"blocks": (1, 1), "base_width": 4, "growth": 4, "head_width": 4}
SMALL_RANET = {"blocks": (1, 2), "scales": (1, 2), "factors": (2, 1), "base_width": 8}
NETS: dict[str, Callable[[], ExitNet]] = {
    "msdnet": lambda: create_model("msdnet-tiny", num_classes=4, **TINY),
    "msdnet-strided": lambda: create_model("msdnet-tiny", num_classes=4, blocks=(2, 2), stem="imagenet", image_size=96),
    "ranet": lambda: create_model(
        "ranet-c1", num_classes=4, blocks=(1, 2), scales=(1, 2), factors=(2, 1), base_width=8
    ),
}


def taped(name: str) -> ExitNet:
    """A network in float64 whose layers work with a tape."""
    torch.manual_seed(0)
    model = NETS[name]().double()
    use_taped_layers(model)
    assert any(isinstance(layer, TapedConvBNReLU) for layer in model.modules())
    return model


def halves(seed: int, model: ExitNet, samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, *model.input_shape, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, 4, (samples,), generator=draw)


def problem(model: ExitNet, keeps: bool) -> Problem:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    weights = 0.5 + torch.rand(8, model.num_exits, dtype=torch.float64)
    return problem_of(model, optimizer, Half(*halves(1, model)), weights, Half(*halves(2, model)), keeps=keeps)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("equilibrium", [False, True])
def test_replayed_tangents_are_exact(name: str, equilibrium: bool) -> None:
    model = with_equilibrium(taped(name), equilibrium)
    replayed = ESTIMATORS["forward_mode"](problem(model, keeps=True)).weights_BK
    exact = ESTIMATORS["double_backward"](problem(model, keeps=True)).weights_BK
    whole = problem(model, keeps=True)
    object.__setattr__(whole.train, "tape", None)  # computes every value again beside its tangent
    computed = ESTIMATORS["forward_mode"](whole).weights_BK
    assert exact.abs().max() > 1e-6
    torch.testing.assert_close(replayed, computed, rtol=1e-9, atol=1e-14)
    if not equilibrium:
        torch.testing.assert_close(replayed, exact, rtol=1e-8, atol=1e-13)


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "1.bias", "1.weight 1.bias", "0.weight 1.bias"])
def test_params_that_do_not_move(frozen: str) -> None:
    """A layer of which some params are frozen: the others' moves still count."""
    model = taped("msdnet")
    for layer in model.modules():
        if isinstance(layer, ConvBNReLU):
            for name in frozen.split():
                layer.get_parameter(name).requires_grad_(False)
    replayed, exact = (
        ESTIMATORS[e](problem(model, keeps=True)).weights_BK for e in ("forward_mode", "double_backward")
    )
    torch.testing.assert_close(replayed, exact, rtol=1e-8, atol=1e-13)


def test_a_recorded_forward_is_the_plain_one() -> None:
    model = taped("msdnet")
    torch.manual_seed(0)
    twin, images = NETS["msdnet"]().double(), halves(1, model)[0]
    assert not any(isinstance(layer, TapedConvBNReLU) for layer in twin.modules())
    with Tape().recording():
        recorded = model(images)
    plain = twin(images)
    for a, b in zip(recorded, plain, strict=True):
        assert torch.equal(a, b)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    gradients = [
        torch.autograd.grad(sum(x.sum() for x in out), list(net.parameters()))
        for out, net in ((recorded, model), (plain, twin))
    ]
    assert all(map(torch.equal, *gradients))


def test_a_pass_without_trace_leaves_running_statistics_alone() -> None:
    model = taped("msdnet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with no_trace():
        model(halves(1, model)[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_layer_that_runs_twice_keeps_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.heads = ConvBNReLU(3, 3), nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])

        def forward(self, x: Tensor) -> list[Tensor]:
            once = self.layer(x)
            return [head(y.mean((2, 3))) for head, y in zip(self.heads, (once, self.layer(once)), strict=True)]

    torch.manual_seed(0)
    model = Twice().double()
    use_taped_layers(model)
    draw = torch.Generator().manual_seed(3)
    first, second = (
        (torch.randn(8, 3, 5, 5, generator=draw, dtype=torch.float64), torch.randint(0, 4, (8,), generator=draw))
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = problem_of(model, optimizer, Half(*first), None, Half(*second), keeps=True)
    for _ in range(2):  # and a tape can be gone over again
        ours = ESTIMATORS["forward_mode"](given).weights_BK
        torch.testing.assert_close(ours, ESTIMATORS["double_backward"](given).weights_BK, rtol=1e-8, atol=1e-13)


def delayed_by_hand(
    model: ExitNet, optimizer: torch.optim.Optimizer, weighting: LearnedWeighting, images: Tensor, labels: Tensor
) -> None:
    """The delayed order written out: weights of the old net for the step, double backward for the net."""
    first, second = zip(images.chunk(2), labels.chunk(2), strict=True)
    for train, meta in ((first, second), (second, first)):
        passed = forward(model, by(weighting), Half(*train), keeps=False)
        weights = weighting.weights(passed.losses_BK.detach(), torch.zeros_like(passed.losses_BK))
        problem = Problem(model, optimizer, by(weighting), passed, weights.detach(), Half(*meta))
        found = ESTIMATORS["double_backward"](problem)
        loss = (weights.detach() * passed.losses_BK).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weighting.learn(weights, found.weights_BK)


def test_the_delayed_order_is_what_it_says() -> None:
    models = [taped("msdnet")]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for m in models]
    weightings = [learned(2, learning_rate=0.01, order="delayed", double=True) for _ in models]
    method = by(weightings[0])
    for step in range(3):
        images, labels = halves(10 + step, models[0], 16)
        results = train_step(models[0], optimizers[0], method, images, labels, step)
        delayed_by_hand(models[1], optimizers[1], weightings[1], images, labels)
        assert len(results) == 2 and all(r.meta_loss is not None for r in results)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(weightings[0].tensors().values(), weightings[1].tensors().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_the_delayed_order_is_not_the_exact_one() -> None:
    model = taped("msdnet")
    twin = copy.deepcopy(model)
    images, labels = halves(5, model, 16)
    for net, order in ((model, "exact"), (twin, "delayed")):
        weighting = learned(2, learning_rate=0.1, order=order, double=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        results = train_step(net, optimizer, by(weighting), images, labels, 0)
        assert torch.isfinite(exit_losses(net(images), labels)).all() and len(results) == 2
    different = [not torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    assert any(different)
