"""Cascades: whole networks as stages, each with its own size of the image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp import ExitNet, cascade, create_model, exit_costs, load_model
from offramp.common.images import Preprocessing
from offramp.running.engines.onnx_engine import OnnxEngine
from offramp.running.export import onnx_graph

SIZES = [24, 32]


def images(samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def single(size: int, classes: int = 5) -> ExitNet:
    return create_model("timm/resnet18", classes, exits=1, image_size=size).eval()


def smaller(x: Tensor) -> Tensor:
    return F.interpolate(x, size=(24, 24), mode="bilinear", antialias=True)


@torch.no_grad()
def test_each_network_answers_for_its_own_size() -> None:
    small, large = single(24), single(32)
    model = cascade([small, large], SIZES).eval()
    first, second = model(images())
    assert torch.equal(first, small(smaller(images()))[0])
    assert torch.equal(second, large(images())[0])
    costs = [exit_costs(net)[0].mul_adds for net in (small, large)]
    assert [cost.mul_adds for cost in exit_costs(model)] == [costs[0], sum(costs)]


@torch.no_grad()
def test_summed_logits() -> None:
    small, large = single(24), single(32)
    plain, summed = cascade([small, large], SIZES).eval(), cascade([small, large], SIZES, carry=1).eval()
    own, found = plain(images()), summed(images())
    assert torch.equal(found[1], own[1] + own[0])
    assert torch.equal(summed.last(images()), found[1])


@torch.no_grad()
def test_exits_of_a_member_become_exits_of_the_cascade(tmp_path: Path) -> None:
    small, large = single(24), create_model("timm/resnet18", 5, exits=3, image_size=32, head="chained").eval()
    model = cascade([small, large], SIZES).eval()
    assert model.num_exits == 4
    wanted = [small(smaller(images()))[0], *large(images())]
    assert all(map(torch.equal, model(images()), wanted))
    again = load_model(model.save(tmp_path / "cascade")).eval()
    assert all(map(torch.equal, again(images()), wanted))


@torch.no_grad()
def test_one_network_at_several_sizes_shares_its_params(tmp_path: Path) -> None:
    net = single(32)
    model = cascade([net, net], SIZES).eval()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net.parameters())
    again = load_model(model.save(tmp_path / "cascade")).eval()
    assert len(again.state_dict()) == len(net.state_dict())
    assert all(map(torch.equal, again(images()), [net(smaller(images()))[0], net(images())[0]]))


@torch.no_grad()
def test_a_member_gets_the_mean_and_deviation_it_was_trained_with() -> None:
    small, large = single(24), single(32)
    large.preprocessing = Preprocessing(32, 32, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
    small.preprocessing = Preprocessing(24, 24, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    model = cascade([small, large], SIZES).eval()
    pixels = torch.rand(2, 3, 32, 32)

    def normal(x: Tensor, own: Preprocessing) -> Tensor:
        return (x - torch.tensor(own.mean).view(3, 1, 1)) / torch.tensor(own.std).view(3, 1, 1)

    found = model(normal(pixels, large.preprocessing))[0]
    wanted = small(smaller(normal(pixels, small.preprocessing)))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_last_answer_needs_the_last_network_alone() -> None:
    small, large = single(24), create_model("timm/resnet18", 5, exits=2, image_size=32, head="chained")
    model = cascade([small, large], SIZES).train()
    before = {name: t.clone() for name, t in small.state_dict().items()}
    model.last(images())
    assert all(torch.equal(t, before[name]) for name, t in small.state_dict().items())  # running statistics too
    assert torch.equal(model.eval().last(images()), model(images())[-1])
    assert torch.equal(large.last(images()), large(images())[-1])


def test_a_trained_network_that_does_not_tell_its_normalisation_stays_among_its_like(tmp_path: Path) -> None:
    """Images would reach it normalised as the other ones'."""
    ours, theirs = (
        net.save(tmp_path / net.spec.name.replace("/", "-")) for net in (create_model("msdnet-tiny", 5), single(24))
    )
    trained, theirs = load_model(ours), load_model(theirs)
    with pytest.raises(ValueError, match="network 2 of the cascade does not say how its images are normalised"):
        cascade([theirs, trained], SIZES)
    cascade([trained, trained], SIZES)
    fresh = cascade([single(24), create_model("msdnet-tiny", 5)], SIZES)  # both learn from what they get
    assert load_model(fresh.save(tmp_path / "fresh")).num_exits == 4


class Resized(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        return (F.interpolate(state[0], size=(self.size, self.size), mode="bilinear", antialias=True),)


@pytest.mark.parametrize(("large", "small"), [(160, 96), (192, 128), (224, 96), (32, 24)])
def test_onnx_runtime_resizes_as_torch_does(large: int, small: int) -> None:
    pixels = torch.randn(2, 3, large, large, generator=torch.Generator().manual_seed(0))
    engine = OnnxEngine([onnx_graph(Resized(small), (pixels,), ["logits"])])
    found, _ = engine.run(1, engine.begin(pixels.numpy()))
    assert abs(found - Resized(small)(pixels)[0].numpy()).max() < 1e-4


def test_it_is_trained_together() -> None:
    model = create_model("cascade", 5)
    sum(out.square().sum() for out in model(images())).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [([24], "an image size for each network"), ([24, 0], "must be whole numbers from 1 up")],
)
def test_sizes_that_do_not_fit_are_sentences(sizes: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        cascade([single(24), single(32)], sizes)


def test_networks_that_do_not_go_together_are_sentences() -> None:
    with pytest.raises(ValueError, match="must have the same classes, these have .5, 7."):
        cascade([single(24), create_model("msdnet-tiny", 7)], SIZES)
    vit = create_model("timm/vit_tiny_patch16_224", 5, exits=1, image_size=64, options={"depth": 1})
    with pytest.raises(
        ValueError, match="network 1 of the cascade is built for images of 64 pixels and cannot take 48"
    ):
        cascade([vit, single(64)], [48, 64])


def test_members_from_a_configuration() -> None:
    members = [{"name": "timm/resnet18", "overrides": {"exits": 1}}, {"name": "msdnet-tiny"}]
    model = create_model("cascade", 5, members=members, image_sizes=SIZES)
    assert model.num_exits == 4
    with pytest.raises(ValueError, match="an image size for each of its members"):
        create_model("cascade", 5, members=members, image_sizes=[32])
    with pytest.raises(ValueError, match="a member of the cascade does not describe a model"):
        create_model("cascade", 5, members=[{"nam": "x"}], image_sizes=[32])
