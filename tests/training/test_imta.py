"""IMTA: gradient equilibrium, collaboration, distillation, and the method in both phases."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.training import by, learned, problem_of, with_equilibrium
from offramp import ExitNet, create_model, evaluate_run, exit_costs, load_model
from offramp.models.collaboration import CollaborativeNet, collaborates
from offramp.models.exits import State
from offramp.models.weights import read_tensors
from offramp.runs.config import RunConfig
from offramp.runs.folder import read_metrics
from offramp.training.imta import OneForAll, OnFrozenFeatures, scale_gradient
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.objectives import Half
from offramp.training.step import train_step
from offramp.training.train import train_run

SMALL = {"blocks": (1, 1), "base_width": 4, "growth": 4, "head_width": 4}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(12, 3, 32, 32, generator=draw).double(), torch.randint(0, 4, (12,), generator=draw)


def test_equilibrium_balances_what_a_stage_receives() -> None:
    """Three stages that pass a number on: the gradients are those of the formula, by hand."""
    stages = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    heads = [nn.Identity() for _ in range(3)]
    for stage in stages:
        nn.init.ones_(stage.weight)
    net = with_equilibrium(ExitNet.from_parts(stages, heads))
    outs = net(torch.ones(1, 1))
    (outs[0] * 3 + outs[1] * 5 + outs[2] * 7).sum().backward()
    third = 7.0  # K=3, k=3: one head, nothing after it
    second = (5 + 1 * third) / 2
    first = (3 + 2 * second) / 3
    assert [s.weight.grad.item() for s in stages] == pytest.approx([first, second, third])
    net.eval()
    plain = net(torch.ones(1, 1))
    assert [o.item() for o in plain] == [1, 1, 1]


@pytest.mark.parametrize("equilibrium", [False, True])
def test_the_meta_gradient_is_exact_under_equilibrium(equilibrium: bool) -> None:
    torch.manual_seed(0)
    model = with_equilibrium(create_model("msdnet-tiny", num_classes=4, **SMALL).double(), equilibrium)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = torch.linspace(0.5, 1.5, 24).view(12, 2).double()
    problem = problem_of(model, optimizer, Half(*batch(1)), weights, Half(*batch(2)))
    exact, ours = (ESTIMATORS[e](problem).weights_BK for e in ("double_backward", "forward_mode"))
    assert (ours - exact).abs().max() < 1e-10
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-12)
    rough = ESTIMATORS["finite_difference"](problem).weights_BK
    error = float((rough - exact).norm() / exact.norm())
    assert error > 0.1 if equilibrium else error < 0.05  # differences of forwards cannot see scaled gradients


def test_finite_differences_under_equilibrium_are_refused(
    tmp_path: Path, small_config: Callable[..., RunConfig]
) -> None:
    config = small_config("imta.equilibrium=true", "weighting.name=learned", "weighting.engine=finite_difference")
    with pytest.raises(ValueError, match="finite_difference cannot see what GradientEquilibrium does"):
        train_run(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_scale_reaches_gradients_and_tangents() -> None:
    import torch.autograd.forward_ad as fwAD

    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(scale_gradient(x, 0.25).sum(), x)
    assert g.tolist() == [0.25] * 3
    with fwAD.dual_level():
        out = scale_gradient(fwAD.make_dual(torch.ones(3), torch.ones(3)), 0.25)
        assert fwAD.unpack_dual(out).tangent.tolist() == [0.25] * 3
        assert fwAD.unpack_dual(out).primal.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["msdnet-tiny", "ranet-c1"])
def test_collaboration_is_the_formula(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, num_classes=7, collaboration=True).double().eval()
    assert isinstance(model, CollaborativeNet)
    x = torch.randn(3, *model.input_shape).double()
    logits = model(x)
    state, before = (x,), None
    for k in range(1, model.num_exits + 1):
        feature, state = model.base.advance(k, state)
        f = model.base.heads[k - 1].features(feature)
        if before is not None:
            linear, norm, _ = model.passes[k - 2]
            f = torch.cat([f, norm(linear(before)).clamp(min=0)], dim=1)
        before = model.heads[k - 1](f)
        torch.testing.assert_close(logits[k - 1], before)


def test_the_collaborating_heads_cost_is_counted() -> None:
    plain, collaborative = create_model("msdnet5"), create_model("msdnet5", collaboration=True)
    for k, (a, b) in enumerate(zip(exit_costs(plain), exit_costs(collaborative), strict=True), start=1):
        links = k - 1  # each link: classes -> 128, its bias, its ReLU; and 128 more inputs for the head after it
        assert b.macs - a.macs == links * (100 * 128 + 128 * 100)
        assert b.mul_adds - a.mul_adds == links * (100 * 128 + 128 * 100 + 128 + 128)
        assert b.params - a.params == links * (100 * 128 + 128 + 2 * 128 + 128 * 100)


def test_frozen_means_frozen() -> None:
    model = create_model("msdnet-tiny", collaboration=True, **SMALL)
    assert isinstance(model, CollaborativeNet)
    before = {k: v.clone() for k, v in model.base.state_dict().items()}
    model.train()
    sum(o.sum() for o in model(torch.randn(4, 3, 32, 32))).backward()
    assert all(torch.equal(v, before[k]) for k, v in model.base.state_dict().items())
    assert all(p.grad is None for p in model.base.parameters())
    assert all(p.grad is not None for p in [*model.heads.parameters(), *model.passes.parameters()])


def test_collaboration_needs_heads_of_our_kind() -> None:
    assert collaborates(create_model("msdnet-tiny")) and not collaborates(
        create_model("msdnet-tiny", collaboration=True)
    )
    with pytest.raises(ValueError, match="collaboration needs heads"):
        CollaborativeNet(ExitNet.from_parts([nn.Identity()], [nn.Linear(3, 3)]))


def test_distillation_is_the_formula() -> None:
    torch.manual_seed(0)
    outputs = [torch.randn(5, 3).double() for _ in range(4)]
    labels = torch.tensor([0, 1, 2, 0, 1])
    losses = OneForAll(temperature=3.0, gamma=0.9)(outputs[:3], Half(torch.zeros(5), labels, outputs[3]))
    teacher = (outputs[3] / 3).softmax(1)
    for k in range(3):
        ce = -outputs[k].log_softmax(1)[range(5), labels]
        kl = (teacher * (teacher.log() - (outputs[k] / 3).log_softmax(1))).sum(1)
        expected = ce if k == 2 else 0.1 * ce + 0.9 * 9 * kl
        torch.testing.assert_close(losses[:, k] + losses[:, 3 + k], expected)


def test_the_teacher_is_the_frozen_networks_own_last_head() -> None:
    torch.manual_seed(0)
    base = create_model("msdnet-tiny", num_classes=4, **SMALL).eval()
    x = torch.randn(3, 3, 32, 32)
    expected = base(x)[-1]
    teacher = base.heads[-1].linear
    net = CollaborativeNet(base)
    module = OnFrozenFeatures(net, teacher)
    for mode in (True, False):
        features, said = module.train(mode).prepare(x)
        torch.testing.assert_close(said, expected)
        torch.testing.assert_close(module(features), net(x))


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_a_step_passes_the_frozen_network_once(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base = create_model("msdnet-tiny", num_classes=4, **SMALL)
    teacher = base.heads[-1].linear
    net = CollaborativeNet(base)
    module = OnFrozenFeatures(net, teacher).train()
    passed, advance = [], base.advance

    def counted(k: int, state: State) -> tuple[torch.Tensor, State]:
        passed.append((k, len(state[0])))
        return advance(k, state)

    monkeypatch.setattr(base, "advance", counted)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    method = by(learned(2, order=order), objective=OneForAll(3.0, 0.9), prepare=module.prepare)
    x, y = batch(1)
    train_step(module, optimizer, method, x.float(), y, 0)
    assert passed == [(1, len(x)), (2, len(x))]


def test_the_meta_objective_sees_the_exits_and_not_the_teacher() -> None:
    """Exits share the meta half among themselves: the same meta loss on the network and on its frozen features."""
    torch.manual_seed(0)
    base = create_model("msdnet-tiny", num_classes=4, **SMALL).double()
    teacher = base.heads[-1].linear
    net = CollaborativeNet(base).double().train()
    module = OnFrozenFeatures(net, teacher)
    (train_x, train_y), (meta_x, meta_y) = batch(1), batch(2)
    (train_f, _), (meta_f, _) = module.prepare(train_x), module.prepare(meta_x)
    cases = {net: (train_x, meta_x), module: (train_f, meta_f)}
    losses = []
    for called, (train, meta) in cases.items():
        optimizer = torch.optim.SGD([p for p in called.parameters() if p.requires_grad], lr=0.1)
        problem = problem_of(called, optimizer, Half(train, train_y), None, Half(meta, meta_y))
        losses.append(problem.meta_loss_at(problem.params()).detach())
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("weighting", ["uniform", "learned"])
def test_both_phases_train_resume_and_evaluate(
    tmp_path: Path, small_config: Callable[..., RunConfig], weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("offramp.training.loop.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    config = small_config(
        f"weighting.name={weighting}", "imta.equilibrium=true", "imta.collaboration=true", "train.epochs=2"
    )
    run = train_run(config, tmp_path / "run", device="cpu")
    phase1 = read_tensors(run / "phase1" / "model.safetensors")
    final = read_tensors(run / "model.safetensors")
    shared = [k for k in phase1 if f"base.{k}" in final]
    assert len(shared) > 10 and all(torch.equal(phase1[k], final[f"base.{k}"]) for k in shared)
    assert isinstance(load_model(run), CollaborativeNet)
    assert read_metrics(run)[0]["seconds"] > read_metrics(run / "phase1")[-1]["seconds"]  # it counts both
    summary = evaluate_run(run, device="cpu")
    plain = exit_costs(create_model("msdnet-tiny", 10, **{**SMALL, "head_width": 8}))
    assert summary.exits["test"][-1].mul_adds > plain[-1].mul_adds
    again = tmp_path / "again"
    shutil.copytree(run, again)
    (again / "model.safetensors").unlink()
    shutil.rmtree(again / "last")
    (again / "last.1").rename(again / "last")
    train_run(config, again, device="cpu", resume=True)
    resumed = read_tensors(again / "model.safetensors")
    assert all(torch.equal(final[k], resumed[k]) for k in final)
