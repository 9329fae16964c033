"""Allocation and weightings, against slow loops and identities."""

from __future__ import annotations

import math
import typing
from fractions import Fraction

import pytest
import torch

from helpers.training import learned, settings
from offramp.measuring.thresholds import exit_counts
from offramp.runs.config import RunConfig, WeightingConfig, with_settings
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.objectives import allocate, exit_losses, mean_weights, weighted_loss
from offramp.training.weighting import (
    CENTRINGS,
    WEIGHTINGS,
    Context,
    FixedWeighting,
    LearnedWeighting,
    NetWeighting,
    SelectionWeighting,
    UniformWeighting,
    WeightNet,
    new_weighting,
)


def slow_allocate(confidences: list[list[float]], q: float) -> list[int]:
    """One sample after another, as a person would."""
    samples, num_exits = len(confidences), len(confidences[0])
    total = sum(Fraction(repr(q)) ** k for k in range(1, num_exits + 1))
    exits = [num_exits] * samples
    left = set(range(samples))
    for k in range(1, num_exits):
        count = math.floor(samples * Fraction(repr(q)) ** k / total)
        keys = {i: (-math.inf if math.isnan(confidences[i][k - 1]) else confidences[i][k - 1]) for i in left}
        for i in sorted(left, key=lambda i: (-keys[i], i))[:count]:
            exits[i] = k
            left.remove(i)
    return exits


@pytest.mark.parametrize("q", [0.05, 0.5, 0.75, 1.0, 1.95])
@pytest.mark.parametrize(("samples", "num_exits"), [(1, 3), (7, 5), (64, 2), (101, 7), (512, 5)])
def test_allocation_is_that_of_a_slow_loop(samples: int, num_exits: int, q: float) -> None:
    draw = torch.Generator().manual_seed(samples)
    for levels in (1000, 3, 1):  # few levels make many ties
        confidences = torch.randint(levels, (samples, num_exits), generator=draw) / levels
        exits = allocate(confidences, q)
        assert exits.tolist() == slow_allocate(confidences.tolist(), q)
        counts = torch.bincount(exits, minlength=num_exits + 1)[1:]
        assert tuple(counts.tolist()) == exit_counts(samples, num_exits, q)  # disjoint and exhaustive


def test_allocation_with_nan_and_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    confidences = torch.tensor([[nan, 0.1], [-inf, nan], [0.5, 0.2], [nan, nan]])
    assert allocate(confidences, 1.0).tolist() == [1, 2, 1, 2]
    three = torch.tensor([[nan] * 3, [0.2] * 3, [nan] * 3, [nan] * 3, [nan] * 3, [0.1] * 3])
    assert sorted(allocate(three, 1.0).tolist()) == [1, 1, 2, 2, 3, 3]


def test_shares_are_exact() -> None:
    assert exit_counts(10, 5, 1.0) == (2, 2, 2, 2, 2)
    assert exit_counts(7, 7, 1.0) == (1,) * 7
    assert exit_counts(512, 5, 0.75) == (167, 125, 94, 70, 56)
    assert exit_counts(3, 5, 0.75) == (0, 0, 0, 0, 3)
    with pytest.raises(ValueError, match="above 0"):
        exit_counts(3, 2, 0.0)


def test_means_per_exit() -> None:
    exits = torch.tensor([1, 3, 3, 1, 1])
    losses = torch.rand(5, 3)
    expected = losses[[0, 3, 4], 0].mean() + losses[[1, 2], 2].mean()
    torch.testing.assert_close((mean_weights(exits, 3) * losses).sum(), expected)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return 5 * torch.rand(40, 4, generator=draw), torch.rand(40, 4, generator=draw)


def test_fixed_weightings() -> None:
    losses, confidences = batch()
    assert torch.equal(UniformWeighting().weights(losses, confidences), torch.ones(40, 4))
    given = torch.tensor([0.6, 0.8, 1.2, 1.4])
    fixed = FixedWeighting(given).weights(losses, confidences)
    assert fixed.shape == losses.shape and torch.equal(fixed[7], given)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("weighting.name=ascending",), [0.6, 0.6 + 0.8 / 3, 0.6 + 1.6 / 3, 1.4]),
        (("weighting.name=descending",), [1.4, 0.6 + 1.6 / 3, 0.6 + 0.8 / 3, 0.6]),
        (("weighting.name=fixed", "weighting.exits=[1, 0, 0.5, 2]"), [1.0, 0.0, 0.5, 2.0]),
    ],
)
def test_fixed_weights_by_name(changes: tuple[str, ...], expected: list[float]) -> None:
    config = with_settings(RunConfig(), changes)
    assert RunConfig.from_json(config.to_json()) == config
    weights = new_weighting(config.weighting, Context(4)).weights(*batch())
    torch.testing.assert_close(weights[7], torch.tensor(expected))


def test_fixed_weights_that_teach_nothing_are_refused() -> None:
    for exits in ("[]", "[0, 0.0]"):
        with pytest.raises(ValueError, match=r"weighting\.exits must hold a weight above 0"):
            with_settings(RunConfig(), ["weighting.name=fixed", f"weighting.exits={exits}"])


def test_fixed_weights_are_for_as_many_exits_as_there_are() -> None:
    fixed = WeightingConfig("fixed", exits=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"weighting\.exits has 2 weights, the network has 4 exits"):
        new_weighting(fixed, Context(4))


def test_selection_is_the_mean_over_the_allocated_samples() -> None:
    losses, confidences = batch()
    exits = allocate(confidences, 0.75)
    expected = sum(losses[exits == k, k - 1].mean() for k in range(1, 5))
    loss = weighted_loss(losses, SelectionWeighting(WeightingConfig(q=0.75)).weights(losses, confidences))
    torch.testing.assert_close(loss, torch.as_tensor(expected))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    ("centring", "over"), [("exit", (1,)), ("batch", (0,)), ("all", (0, 1)), ("both", (0,)), ("both", (1,))]
)
def test_learned_weights_average_to_one(centring: str, over: tuple[int, ...], bound: bool) -> None:
    losses, confidences = batch()
    weighting = NetWeighting(settings(centring=centring, bound=bound, delta=0.8), Context(4))
    for layer in weighting.net:
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data *= 40  # far into the tanh, where centring can leave the range
    weights = weighting.weights(losses, confidences)
    torch.testing.assert_close(weights.mean(over), torch.ones_like(weights.mean(over)))
    farthest = (weights - 1).abs().max()
    assert farthest <= 0.8 + 1e-6 if bound else farthest > 0.8


def test_the_bound_is_that_of_a_slow_loop() -> None:
    from offramp.training.weighting import centred

    tanh = torch.tensor([[1.0, -1.0, -1.0, -1.0], [0.5, 0.0, -0.2, 0.1]])
    bounded = centred(tanh, "exit", bound=True)
    torch.testing.assert_close(bounded[0], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    torch.testing.assert_close(bounded[1], tanh[1] - 0.1)
    both = torch.tensor([[0.75, -0.25, -0.25, -0.25], [-0.75, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(centred(4 * both + 1, "both", bound=False), 4 * both)
    torch.testing.assert_close(centred(4 * both + 1, "both", bound=True), both / 0.75)


def test_the_weight_net_is_the_papers() -> None:
    net = WeightNet(5, settings())
    shapes = [tuple(p.shape) for p in net.parameters()]
    assert shapes == [(500, 5), (500,), (5, 500), (5,)]
    assert [type(m).__name__ for m in net] == ["Linear", "ReLU", "Linear", "Tanh"]
    assert sum(isinstance(m, torch.nn.Linear) for m in WeightNet(5, settings(depth=4, width=10))) == 5
    assert next(WeightNet(5, settings(inputs="both")).parameters()).shape == (500, 10)


@pytest.mark.parametrize("inputs", ["loss", "confidence", "both"])
def test_the_input_is_what_was_asked_for(inputs: str) -> None:
    losses, confidences = batch()
    weighting = NetWeighting(settings(inputs=inputs), Context(4))
    before = weighting.weights(losses, confidences)
    other = torch.rand(40, 4)
    assert torch.equal(before, weighting.weights(other, confidences)) == (inputs == "confidence")
    assert torch.equal(before, weighting.weights(losses, other)) == (inputs == "loss")


def test_the_weight_nets_draws_are_its_own() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, two = (NetWeighting(settings(), Context(4, seed=1)) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), two.net.parameters(), strict=True))
    other = NetWeighting(settings(), Context(4, seed=2))
    assert not torch.equal(next(other.net.parameters()), next(one.net.parameters()))


def test_learning_is_one_adam_step_and_can_be_resumed() -> None:
    losses, confidences = batch()
    one = learned(4, learning_rate=0.01)
    gradient = torch.randn(40, 4)

    def learn(weighting: LearnedWeighting) -> None:
        weighting.learn(weighting.weights(losses, confidences), gradient)

    before = (one.weights(losses, confidences) * gradient).sum()
    learn(one)
    assert (one.weights(losses, confidences) * gradient).sum() < before
    two = learned(4, learning_rate=0.01, seed=5)
    two.load_tensors({k: v.clone() for k, v in one.tensors().items()})
    learn(one), learn(two)
    assert all(torch.equal(v, two.tensors()[k]) for k, v in one.tensors().items())
    with pytest.raises(ValueError, match="the weight net does not fit"):
        learned(4, width=3).load_tensors(one.tensors())


def test_losses_are_computed_in_float32_at_least() -> None:
    logits = [torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(3, 5, dtype=torch.float64)]
    labels = torch.tensor([0, 1, 2])
    assert exit_losses(logits[:1], labels).dtype == torch.float32
    assert exit_losses(logits[1:], labels).dtype == torch.float64


def test_every_choice_of_the_settings_is_there() -> None:
    """The lists stand in the configuration; what implements them must not know more or less."""
    hints = typing.get_type_hints(WeightingConfig)
    assert set(typing.get_args(hints["centring"])) == set(CENTRINGS)
    assert set(typing.get_args(hints["engine"])) == set(ESTIMATORS)
    for inputs in typing.get_args(hints["inputs"]):
        assert NetWeighting(settings(inputs=inputs), Context(4)).weights(*batch()).shape == (40, 4)
    assert WeightingConfig().name in WEIGHTINGS
