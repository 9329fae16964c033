"""Weights for each term of the objective: the same steps as for their sum, with more columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.nets import OPTIMIZERS, Net, batch, same, warm_up
from helpers.runs import Config, resumed, same_weights
from helpers.training import learned, problem_of, settings
from offramp import LearnedWeights
from offramp.reporting.weight_history import weight_history
from offramp.runs.config import ObjectiveConfig, WeightingConfig
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.method import Method
from offramp.training.objectives import Half, Objective, new_objective
from offramp.training.step import HalfResult, train_step
from offramp.training.train import train_run
from offramp.training.weighting import (
    CENTRINGS,
    Context,
    FixedWeighting,
    NetWeighting,
    UniformWeighting,
    Weighting,
    WeightNet,
)

SOURCES = ("last", "mean", "teacher")
DISTILLATION = ("objective.name=distillation", "objective.options.source=mean")
EACH = (*DISTILLATION, "weighting.name=learned", "weighting.terms=each")


def distillation(source: str) -> Objective:
    more = {"teacher": "somewhere"} if source == "teacher" else {}
    return new_objective(ObjectiveConfig("distillation", {"source": source, "share": 0.3, **more}))


def said(images: Tensor) -> tuple[Tensor, Tensor]:
    """The images, and what a teacher says of them."""
    return images, 2 * images[:, :4]


def trained(weighting: Weighting, source: str, steps: int = 3, **given: Any) -> tuple[nn.Module, list[HalfResult]]:
    """A network after a few steps of distillation, and what the last step saw."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS["nesterov-decay"](model)
    method = Method(weighting, settings(**given), distillation(source), prepare=said)
    for step in range(steps):
        results = train_step(model, optimizer, method, *batch(step), step)
    return model, results


@pytest.mark.parametrize("order", ["exact", "delayed"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_meta_gradient_is_that_of_double_backward(source: str, order: str) -> None:
    found = {}
    for engine in ("double_backward", "forward_mode"):
        given = {"terms": "each", "engine": engine, "order": order if engine == "forward_mode" else "exact"}
        weighting, taught = learned(3, double=True, **given), []
        weighting.learn = lambda weights, gradient, taught=taught: taught.append(gradient)  # type: ignore[method-assign]
        trained(weighting, source, steps=1, **given)
        found[engine] = taught[0]  # of the first update: both orders look ahead by the same weights
    exact = found["double_backward"]
    assert exact.shape == (8, 6) and exact.abs().max() > 1e-7
    torch.testing.assert_close(found["forward_mode"], exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("source", SOURCES)
def test_over_both_terms_it_sums_to_that_of_their_sum(source: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = OPTIMIZERS["adamw"](model)
    warm_up(model, optimizer, 5)
    found = {}
    for terms in ("sum", "each"):
        method = Method(UniformWeighting(), settings(terms=terms), distillation(source))
        halves = [Half(x, y, said(x)[1]) for x, y in (batch(1), batch(2))]
        given = problem_of(model, optimizer, halves[0], None, halves[1], method)
        found[terms] = ESTIMATORS["forward_mode"](given).weights_BK
    both = found["each"].view(16, 2, 3)
    torch.testing.assert_close(both.sum(1), found["sum"])
    assert (both[:, 0] - both[:, 1]).abs().max() > 1e-6  # else they would not be worth two weights


@pytest.mark.parametrize("order", ["exact", "delayed"])
@pytest.mark.parametrize("source", SOURCES)
def test_range_zero_is_the_baseline_bit_for_bit(source: str, order: str) -> None:
    models = [
        trained(weighting, source, **given)[0]
        for weighting, given in [
            (UniformWeighting(), {"terms": "sum"}),
            (UniformWeighting(), {"terms": "each"}),
            (learned(3, double=True, terms="each", delta=0.0, order=order), {"terms": "each", "order": order}),
        ]
    ]
    assert same(models[0], models[1]) and same(models[0], models[2])


@pytest.mark.parametrize("centring", CENTRINGS)
def test_equal_weights_in_both_terms_are_weights_of_the_sum(centring: str) -> None:
    given = {"centring": centring, "until": 0.0, "bound": True}
    one, two = (NetWeighting(settings(terms=terms, **given), Context(3, terms=2, seed=4)) for terms in ("sum", "each"))
    two.net.load_state_dict(
        {name: t.repeat(2, *[1] * (t.ndim - 1)) if name[0] == "2" else t for name, t in one.net.state_dict().items()}
    )
    (a, sums), (b, each) = (
        trained(weighting, "mean", terms=terms, **given) for weighting, terms in ((one, "sum"), (two, "each"))
    )
    assert sums[0].weights_BK.shape == (8, 3) and each[0].weights_BK.shape == (8, 6)
    assert sums[0].weights_BK.std() > 0.01
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # weights are of a float32 net


def test_fixed_weights_are_those_of_every_term() -> None:
    fixed = FixedWeighting(torch.tensor([0.5, 1.0, 1.5]))
    (a, _), (b, results) = (trained(fixed, "last", terms=terms) for terms in ("sum", "each"))
    assert torch.equal(results[0].weights_BK[3], torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5]).double())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("centring", CENTRINGS)
def test_they_average_to_one_over_exits_and_terms(centring: str, bound: bool) -> None:
    weighting = NetWeighting(settings(terms="each", centring=centring, bound=bound), Context(3, terms=2))
    for layer in weighting.net:
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 40
    weights = weighting.weights(5 * torch.rand(20, 3), torch.rand(20, 3))
    assert weights.shape == (20, 6) and weights.std() > 0.1
    for over in CENTRINGS[centring]:
        torch.testing.assert_close(weights.mean(over), torch.ones_like(weights.mean(over)))


def test_the_weight_net_has_more_outputs_and_the_same_inputs() -> None:
    for inputs, size in (("loss", 5), ("both", 10)):
        shapes = [tuple(p.shape) for p in WeightNet(5, settings(inputs=inputs), terms=2).parameters()]
        assert shapes == [(500, size), (500,), (10, 500), (10,)]


def test_a_run_keeps_them_and_resumes_bit_for_bit(tmp_path: Path, small_config: Config) -> None:
    config = small_config(*EACH, "weighting.interval=2")
    run = train_run(config, tmp_path / "run", device="cpu")
    assert same_weights(run, resumed(config, run, tmp_path / "again"))
    kept = np.load(run / "samples" / "epoch-0003.npz")
    assert kept["weights"].shape == (32, 2) and kept["term_weights"].shape == (32, 2, 2)
    np.testing.assert_allclose(kept["term_weights"].mean(1), kept["weights"], rtol=1e-6)
    np.testing.assert_allclose(kept["weights"].mean(1), 1, atol=1e-6)
    assert np.ptp(kept["term_weights"][:, 0] - kept["term_weights"][:, 1]) > 0
    history = weight_history(run)
    assert history is not None and np.shape(history.all) == (3, 2)


def test_a_frozen_weight_net_has_the_terms_it_was_trained_with(tmp_path: Path, small_config: Config) -> None:
    run = train_run(small_config(*EACH, "train.epochs=1"), tmp_path / "run", device="cpu")
    plain = train_run(small_config("weighting.name=learned", "train.epochs=1"), tmp_path / "plain", device="cpu")
    frozen = ("train.epochs=1", *DISTILLATION, "weighting.name=frozen")
    for source, own in ((run, "each"), (plain, "each"), (plain, "sum")):
        config = small_config(*frozen, f'weighting.from_run="{source}"', f"weighting.terms={own}")
        assert (train_run(config, tmp_path / f"{source.name}-{own}", device="cpu") / "model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"has weights for each term; set weighting\.terms=each"):
        train_run(small_config(*frozen, f'weighting.from_run="{run}"'), tmp_path / "bad", device="cpu")


def test_one_term_has_no_weights_for_each(tmp_path: Path, small_config: Config) -> None:
    with pytest.raises(ValueError, match="needs an objective of several terms"):
        train_run(small_config("weighting.name=learned", "weighting.terms=each"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="needs an objective of several terms"):
        LearnedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1), num_exits=2, terms="each")
    assert WeightingConfig().terms == "sum"
