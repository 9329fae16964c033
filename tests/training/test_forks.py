"""Forks: which gradients come back, tangents that agree with them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.runs import Config
from helpers.training import problem_of
from offramp import ExitNet, LearnedWeights, cascade, create_model
from offramp.training.forks import FeatureSurgery, new_fork
from offramp.training.imta import GradientEquilibrium
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.objectives import Half
from offramp.training.tape import use_taped_layers
from offramp.training.train import train_run

SMALL = {"blocks": (1, 1, 1), "base_width": 4, "growth": 4, "head_width": 4}


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3, 3), (2, 3, 4), (2, 3, 3, 4)])
def test_surgery_lets_a_share_of_the_channels_learn_from_later_exits(shape: tuple[int, ...]) -> None:
    feature = torch.randn(shape, requires_grad=True)
    head, onward = FeatureSurgery(2, share=0.25)(1, feature)
    assert torch.equal(head, feature) and torch.equal(onward, feature)
    (later,) = torch.autograd.grad(onward.sum(), feature)
    by_channel = later.movedim(shape.index(4), 0).flatten(1)  # there are four, whatever the layout
    assert by_channel[0].eq(1).all() and not by_channel[1:].any()
    (own,) = torch.autograd.grad(head.sum(), feature)
    assert own.eq(1).all()


def test_in_evaluation_a_fork_does_nothing() -> None:
    net = ExitNet.from_parts([nn.Identity(), nn.Identity()], [nn.Identity(), nn.Identity()])
    net.fork = lambda k, x: (2 * x, 3 * x)
    assert [float(o) for o in net.train()(torch.ones(1))] == [2, 6]
    assert [float(o) for o in net.eval()(torch.ones(1))] == [1, 1]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_meta_gradient_is_exact_under_surgery(share: float, keeps: bool) -> None:
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", num_classes=4, **SMALL).double()
    model.fork = FeatureSurgery(3, share)
    use_taped_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    draw = torch.Generator().manual_seed(0)
    train, meta = (
        Half(torch.randn(12, 3, 32, 32, generator=draw).double(), torch.randint(0, 4, (12,), generator=draw))
        for _ in range(2)
    )
    weights = torch.linspace(0.5, 1.5, 36).view(12, 3).double()
    exact = ESTIMATORS["double_backward"](problem_of(model, optimizer, train, weights, meta)).weights_BK
    given = problem_of(model, optimizer, train, weights, meta, keeps=keeps)
    ours = ESTIMATORS["forward_mode"](given).weights_BK
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-12)
    model.fork = None
    plain = ESTIMATORS["forward_mode"](problem_of(model, optimizer, train, weights, meta)).weights_BK
    assert (plain - exact).norm() > 1e-3 * exact.norm()  # it does change something


def test_forks_by_name(small_config: Config) -> None:
    assert new_fork(small_config(), 3) is None
    assert new_fork(small_config("imta.equilibrium=true"), 3) == GradientEquilibrium(3)
    assert new_fork(small_config("train.fork=equilibrium"), 3) == GradientEquilibrium(3)
    found = new_fork(small_config("train.fork=surgery", "train.fork_options.share=0.25"), 3)
    assert found == FeatureSurgery(3, 0.25)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (("train.fork=surgery", "imta.equilibrium=true"), "cannot go together"),
        (("train.fork=spoon",), "fork 'spoon' is unknown"),
        (("train.fork=surgery", "train.fork_options.part=0.5"), "fork_options do not fit"),
        (("train.fork=surgery", "train.fork_options.share=1.5"), "share must lie between 0 and 1"),
        (
            ("train.fork=surgery", "weighting.name=learned", "weighting.engine=finite_difference"),
            "cannot see what FeatureSurgery does",
        ),
        (
            ("model.overrides={carry=0.5}", "weighting.name=learned", "weighting.engine=finite_difference"),
            "but no gradient goes there; use forward_mode",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(
    tmp_path: Path, small_config: Config, settings: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        train_run(small_config(*settings), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (lambda: create_model("msdnet-tiny", 4, **SMALL), False),
        (lambda: create_model("msdnet-tiny", 4, carry=0.5, **SMALL), True),
        (lambda: create_model("timm/test_resnet", 4, exits=3, image_size=32, head="chained"), True),
        (lambda: cascade([create_model("msdnet-tiny", 4, carry=0.5, **SMALL)], [32]), True),
        (lambda: create_model("msdnet-tiny", 4, collaboration=True, **SMALL), False),  # there gradients do flow
    ],
)
def test_differences_see_carried_logits_move_where_no_gradient_goes(
    build: Callable[[], ExitNet], refused: bool
) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LearnedWeights(model, optimizer, num_exits=model.num_exits)
    found = pytest.raises(ValueError, match="no gradient goes there; use forward_mode") if refused else nullcontext()
    with found:
        LearnedWeights(model, optimizer, num_exits=model.num_exits, engine="finite_difference")


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_a_run_with_surgery(tmp_path: Path, small_config: Config, order: str) -> None:
    settings = ("train.fork=surgery", "weighting.name=learned", f"weighting.order={order}", "train.epochs=1")
    run = train_run(small_config(*settings), tmp_path / "run", device="cpu")
    assert (run / "model.safetensors").is_file()
