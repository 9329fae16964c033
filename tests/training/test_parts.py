"""What is trained: heads on a frozen network, the network alone first, and heads that begin as linear probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.runs import Config, resumed, same_weights
from helpers.training import by, learned, problem_of
from offramp import ExitNet, cascade, create_model, load_model, register_model
from offramp.data import load_dataset
from offramp.models.weights import read_tensors
from offramp.runs.folder import read_config, read_metrics
from offramp.training.loop import Phase
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.objectives import Half, cross_entropy
from offramp.training.parts import HeadsOnFeatures, part_to_train
from offramp.training.probe import fit_linear, probe_heads
from offramp.training.step import train_step
from offramp.training.tape import use_taped_layers
from offramp.training.train import train_run

SMALL = {"blocks": (1, 1, 1), "base_width": 4, "growth": 4, "head_width": 4}


def network() -> ExitNet:
    torch.manual_seed(0)
    return create_model("msdnet-tiny", num_classes=4, **SMALL).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(12, 3, 32, 32, generator=draw).double(), torch.randint(0, 4, (12,), generator=draw)


@pytest.mark.parametrize("order", ["exact", "delayed"])
@pytest.mark.parametrize("parts", ["heads", "inner_heads"])
def test_frozen_means_frozen(parts: str, order: str) -> None:
    """With learned weights too: only the heads move, and with inner ones the last exit answers as before."""
    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    said = model.eval()(batch(9)[0])[-1]
    module = part_to_train(model, parts)
    assert isinstance(module, HeadsOnFeatures)
    use_taped_layers(module)
    module.train()
    assert module.training and not model.cells.training and model.heads[0].training
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    method = by(learned(3, order=order, double=True), prepare=module.prepare)
    for step in range(2):
        train_step(module, optimizer, method, *batch(step), step)
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    free = ("heads.0", "heads.1") if parts == "inner_heads" else ("heads",)
    assert moved == {name for name in before if name.startswith(free)}
    assert torch.equal(model.eval()(batch(9)[0])[-1], said) == (parts == "inner_heads")
    torch.testing.assert_close(module.eval()(module.prepare(batch(9)[0])[0]), model(batch(9)[0]))


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_frozen_features_are_computed_once_for_a_step(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And exits that add what the exit before them answered are trained so too."""
    for carry in (0.0, 0.5):
        model = network()
        model.carry = carry
        module = part_to_train(model, "heads").train()
        passed, advance = [], model.advance
        monkeypatch.setattr(model, "advance", lambda k, state, a=advance, p=passed: p.append(k) or a(k, state))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        method = by(learned(3, order=order, double=True), prepare=module.prepare)
        train_step(module, optimizer, method, *batch(1), 0)
        assert passed == [1, 2, 3]
        torch.testing.assert_close(module.eval()(module.prepare(batch(9)[0])[0]), model.eval()(batch(9)[0]))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("parts", ["heads", "inner_heads"])
def test_the_meta_gradient_is_exact_on_a_frozen_network(parts: str, keeps: bool) -> None:
    model = network()
    module = part_to_train(model, parts)
    use_taped_layers(module)
    module.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    weights = torch.linspace(0.5, 1.5, 36).view(12, 3).double()
    assert isinstance(module, HeadsOnFeatures)
    train, meta = (Half(module.prepare(x)[0], y) for x, y in (batch(1), batch(2)))
    halves = train, weights, meta
    exact = ESTIMATORS["double_backward"](problem_of(module, optimizer, *halves)).weights_BK
    given = problem_of(module, optimizer, *halves, keeps=keeps)
    ours, rough = (ESTIMATORS[e](given).weights_BK for e in ("forward_mode", "finite_difference"))
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-12)
    assert exact[:, :2].abs().min() > 0 and bool(exact[:, 2].any()) == (parts == "heads")
    assert (rough - exact).norm() < 0.05 * exact.norm()


def test_the_last_exit_alone_runs_no_inner_head() -> None:
    model = network()
    module = part_to_train(model, "last_exit")
    for head in model.heads[:-1]:
        head.forward = None  # type: ignore[assignment]
    (logits,) = module.eval()(batch(1)[0])
    assert logits.shape == (12, 4) and module.num_exits == 1


def test_one_exit_has_no_inner_heads() -> None:
    single = ExitNet.from_parts([nn.Identity()], [nn.Linear(3, 3)])
    for model in (single, cascade([single, single], [32, 32])):
        with pytest.raises(ValueError, match="inner_heads needs a network with more than one exit, and more than one"):
            part_to_train(model, "inner_heads")


def test_in_a_cascade_of_one_network_the_last_head_is_frozen_wherever_it_stands() -> None:
    net = create_model("timm/test_resnet", 4, exits=3, image_size=32)
    model = cascade([net, net], [24, 32])
    module = part_to_train(model, "inner_heads").train()
    assert [head.training for head in module.model.heads] == [True, True, False] * 2
    free = {name for name, param in model.named_parameters() if param.requires_grad}
    assert free == {n for n, _ in model.named_parameters() if n.startswith(("members.0.heads.0", "members.0.heads.1"))}


def test_a_head_at_several_exits_is_probed_once(small_config: Config) -> None:
    net = create_model("timm/test_resnet", 4, exits=2, image_size=32)
    model = cascade([net, net], [24, 32])

    def asked(parts: str, known: frozenset[int] = frozenset()) -> list[int]:
        model.trained_exits = known
        config = small_config(f"train.parts={parts}")
        return Phase(config, Path("run"), None, model, model, cross_entropy, False).heads_to_probe()  # type: ignore

    assert asked("all") == asked("heads") == [3, 4] and asked("all", frozenset([2])) == asked("inner_heads") == [3]


def boosted() -> ExitNet:
    return create_model("msdnet-tiny", 4, carry=0.5, **SMALL)


@pytest.mark.parametrize("parts", ["inner_heads", "last_exit"])
@pytest.mark.parametrize(
    "build",
    [
        boosted,
        lambda: cascade([network().float(), boosted()], [32, 32]),
        lambda: cascade([network().float(), network().float()], [32, 32], carry=1.0),
        lambda: create_model("msdnet-tiny", 4, collaboration=True, **SMALL),
    ],
)
def test_a_last_exit_that_reads_others_cannot_be_had_alone(parts: str, build: Callable[[], ExitNet]) -> None:
    with pytest.raises(ValueError, match="its answer depends on earlier ones .carry"):
        part_to_train(build(), parts)


def test_classifiers_within_the_network_are_no_heads() -> None:
    """DeiT answers with the mean of two."""
    options = {"depth": 2, "embed_dim": 12, "num_heads": 3}
    name = "timm/deit_tiny_distilled_patch16_224"
    model = create_model(name, 4, exits=2, image_size=32, options=options)
    with pytest.raises(ValueError, match="train.parts=heads does not reach the last exit's classifier"):
        part_to_train(model, "heads")
    assert isinstance(part_to_train(model, "inner_heads"), HeadsOnFeatures)


@pytest.mark.parametrize(
    "more",
    [
        ("train.parts=inner_heads", "weighting.name=learned"),  # disjoint
        ("train.parts=inner_heads", "train.probe=true", "train.ema=0.9", "objective.name=distillation"),
        ("weighting.name=learned", "train.fork=surgery", "objective.name=distillation", "train.probe=true"),  # mixed
    ],
)
def test_the_network_alone_first_and_then_the_rest(tmp_path: Path, small_config: Config, more: tuple[str, ...]) -> None:
    config = small_config("train.network_epochs=2", "train.epochs=2", *more)
    run = train_run(config, tmp_path / "run", device="cpu")
    first, last = (read_tensors(folder / "model.safetensors") for folder in (run / "phase1", run))
    known = read_config(run / "phase1")
    assert (known.train.parts, known.train.epochs, known.weighting.name) == ("last_exit", 2, "uniform")
    assert [len(row["train_loss"]) for row in read_metrics(run / "phase1")] == [1, 1]
    disjoint = "train.parts=inner_heads" in more
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert all(name.startswith("heads.0") for name in changed) == disjoint
    assert "heads.0.linear.weight" in changed
    if disjoint:
        images = next(iter(load_dataset("digits", test=20).sweep("test", 20, torch.device("cpu")))).images
        assert torch.equal(load_model(run).eval()(images)[-1], load_model(run / "phase1").eval()(images)[-1])
    assert same_weights(run, resumed(config, run, tmp_path / "again"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (("train.parts=heads", "train.fork=surgery"), "with train.parts=heads leave it out"),
        (("train.network_epochs=1", "imta.collaboration=true"), "imta.collaboration has phases of its own"),
        (("train.network_epochs=1", "train.parts=last_exit"), "leave out train.network_epochs"),
        (("objective.name=distillation", "objective.options.labels=false"), "needs train.parts=inner_heads"),
        (("train.parts=inner_heads", "model.overrides={carry=0.5}"), "its answer depends on earlier ones"),
        (("train.network_epochs=1", "model.overrides={carry=0.5}"), "train.network_epochs trains the network for its"),
        (("train.fork=equilibrium", "model.name=cascade", "model.overrides={}"), "a cascade's networks share none"),
        (("train.probe=true", "model.name=strangers", "model.overrides={}"), "train.probe needs heads with `features`"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    tmp_path: Path, small_config: Config, settings: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        train_run(small_config(*settings), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@register_model("strangers")
def strangers(num_classes: int) -> ExitNet:
    """A network whose heads are nobody's."""
    heads = [nn.Sequential(nn.Linear(3072, num_classes)) for _ in range(2)]
    return ExitNet.from_parts([nn.Flatten(), nn.Identity()], heads)


def test_a_probe_is_the_regression() -> None:
    """Where the loss with its ridge is smallest, its gradient is zero; and no other start finds a better place."""
    torch.manual_seed(0)
    centres = torch.randn(3, 5).double() * 2
    labels = torch.arange(300) % 3
    features = 7 + 3 * (centres[labels] + torch.randn(300, 5).double())
    linear = nn.Linear(5, 3).double()
    fit_linear(linear, features, labels)
    std, mean = features.std(0), features.mean(0)
    weight = (linear.weight * std).detach().requires_grad_()
    bias = (linear.bias + linear.weight @ mean).detach().requires_grad_()
    loss = F.cross_entropy((features - mean) / std @ weight.T + bias, labels) + 1e-3 / 2 * weight.square().sum()
    loss.backward()
    assert max(float(weight.grad.abs().max()), float(bias.grad.abs().max())) < 1e-4
    assert (linear(features).argmax(1) == labels).float().mean() > 0.9


def test_probed_heads_know_more_than_fresh_ones() -> None:
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", 10, **{**SMALL, "head_width": 16})
    data = load_dataset("digits", train=300, calibration=10, test=10)
    sweep = next(iter(data.sweep("train", 300, torch.device("cpu"))))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    probe_heads(model, range(1, 3), data, 0, torch.device("cpu"))
    assert model.training and model.heads[0].training
    moved = {name.split(".")[1] for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == {"0", "1"}  # the third head and all cells stay
    again = create_model("msdnet-tiny", 10, **{**SMALL, "head_width": 16})
    again.load_state_dict(before)
    probe_heads(again, range(1, 3), data, 0, torch.device("cpu"))
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    right = [(x.argmax(1) == sweep.labels).float().mean() for x in model.eval()(sweep.images)]
    assert right[0] > 0.3 and right[1] > 0.3 and right[2] < 0.2  # 16 random features, ten classes
