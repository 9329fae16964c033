"""Networks of timm, of torchvision and of one's own, cut into stages: nothing that they compute changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from helpers.runs import call
from offramp import ExitNet, create_model, exit_costs, load_model, with_exits
from offramp.models.backbones import CutNet, chosen, places
from offramp.models.cut import CannotCut
from offramp.models.fold import folded
from offramp.models.heads import Feature

SIZE = 64
SMALL = {"img_size": SIZE}
FAMILIES = {
    "resnet18": {"drop_rate": 0.1, "drop_path_rate": 0.1},
    "mobilenetv3_small_050": {"drop_rate": 0.1},
    "tf_efficientnet_lite0": {"drop_path_rate": 0.1},
    "convnext_atto": {"drop_path_rate": 0.1},
    "vit_tiny_patch16_224": SMALL | {"drop_rate": 0.1, "drop_path_rate": 0.1},
    "deit_tiny_distilled_patch16_224": SMALL,
    "swin_tiny_patch4_window7_224": SMALL | {"drop_path_rate": 0.1},
}


def images(samples: int = 2, size: int = SIZE) -> Tensor:
    return torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(samples))


def original(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **options)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> nn.Module:
    return original(request.param, **FAMILIES[request.param])


def test_the_cut_network_computes_what_the_original_computes(family: nn.Module) -> None:
    cut = with_exits(family, 3, example=images())
    assert cut.num_exits == 3
    assert {id(p) for p in family.parameters()} <= {id(p) for p in cut.parameters()}
    twin = copy.deepcopy(family)
    for samples in (1, 2, 3, 5):
        family.eval(), cut.eval()
        with torch.no_grad():
            assert torch.equal(family(images(samples)), cut(images(samples))[-1])
    for samples in (3, 1, 5):  # running statistics go on from the batch before
        compare_training(twin.train(), cut.train(), samples)


def compare_training(twin: nn.Module, cut: CutNet, samples: int) -> None:
    """Outputs, gradients and buffers after one pass in training mode, with the same draws."""
    wanted = drawn(lambda: twin(images(samples)))
    found = drawn(lambda: cut.last(images(samples)))
    assert torch.equal(wanted, found)
    twin.zero_grad(), cut.zero_grad()
    wanted.square().sum().backward()
    found.square().sum().backward()
    own, buffers = dict(cut.named_parameters()), dict(cut.named_buffers())
    for name, param in twin.named_parameters():
        assert torch.equal(param.grad, own[cut.own_name(name)].grad), name
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, buffers[cut.own_name(name)]), name


def drawn(run: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(7)
    return run()


def test_walking_stages_equals_the_forward_and_changes_no_state(family: nn.Module) -> None:
    cut = with_exits(family, 4, example=images()).eval()
    with torch.inference_mode():
        wanted, state = cut(images(3)), (images(3),)
        for k, logits in enumerate(wanted, 1):
            before = [t.clone() for t in state]
            found, after = cut.step(k, state)
            assert torch.equal(found, logits)
            assert all(map(torch.equal, before, state))
            state = after
            assert all(len(t) == 3 for t in state)
    assert state == ()


def test_costs_are_spread_evenly() -> None:
    model = original("resnet18")
    whole = exit_costs(with_exits(model, [], example=images()))[0].mul_adds
    known = {place.name: place.mul_adds for place in places(model, (3, SIZE, SIZE))}
    for k, name in enumerate(chosen(model, 4, (3, SIZE, SIZE)), 1):
        wanted = whole * k / 4
        assert abs(known[name] - wanted) == min(abs(cost - wanted) for cost in known.values())


def test_the_cost_of_a_resnet_by_hand() -> None:
    """ResNet-18 at 64 px with a linear head after layer1: convolutions, ReLUs, pooling and linear layers."""
    model = with_exits(original("resnet18"), ["layer1"], example=images(), head="linear")
    stem = 64 * 3 * 49 * 32**2 + 64 * 32**2 + 9 * 64 * 16**2  # convolution, ReLU, max-pooling
    block = 2 * (64 * 64 * 9 * 16**2) + 2 * 64 * 16**2
    first = stem + 2 * block
    head = 64 * 16**2 + 64 * 5 + 5  # mean, linear layer with bias
    costs = exit_costs(model)
    assert costs[0].mul_adds == first + head
    rest = 0
    for planes, side in ((128, 8), (256, 4), (512, 2)):
        inner = planes // 2
        rest += planes * inner * 9 * side**2 + planes * inner * side**2 + 3 * (planes * planes * 9 * side**2)
        rest += 4 * planes * side**2  # ReLUs
    assert costs[1].mul_adds == first + head + rest + 512 * 4 + 512 * 5 + 5


def test_the_cost_of_a_vit_by_hand() -> None:
    """ViT-Tiny at 64 px: 17 tokens of 192, three heads; a linear head after the first block."""
    model = with_exits(original("vit_tiny_patch16_224", **SMALL), ["blocks.0"], example=images(), head="linear")
    tokens, width = 17, 192
    embed = 16 * width * 3 * 16**2
    linear = tokens * (width * 3 * width + width * width + 2 * (width * 4 * width))
    biases = tokens * (3 * width + width + 4 * width + width)
    attention = 2 * tokens * tokens * width
    block = linear + biases + attention
    head = tokens * width + width * 5 + 5
    assert [cost.mul_adds for cost in exit_costs(model)] == [
        embed + block + head,
        embed + 12 * block + head + width * 5 + 5,
    ]


@pytest.mark.parametrize("head", ["linear", "conv", "chained"])
def test_heads_fit_maps_channels_last_maps_and_tokens(head: str, family: nn.Module) -> None:
    model = with_exits(family, 3, example=images(), head=head).train()
    sum(logits.square().sum() for logits in model(images(3))).backward()
    for k, each in enumerate(model.heads[:-1]):
        assert each.linear.out_features == 5
        grads = [p.grad for name, p in each.named_parameters() if not (k == 0 and name.startswith("before"))]
        assert all(g is not None and g.isfinite().all() for g in grads)


def test_a_chained_head_reads_the_exit_before() -> None:
    model = with_exits(original("resnet18"), 3, example=images(), head="chained").eval()
    nn.init.normal_(model.heads[1].before.weight)
    with torch.no_grad():
        first = model(images())
        model.heads[0].linear.bias[0] += 5
        second = model(images())
    assert model.carries
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])  # the network's own classifier reads none
    model.heads[0].forward = None  # so it can be had alone
    assert torch.equal(model.last(images()), first[2])


def test_layouts_are_told_by_shape() -> None:
    assert Feature.of((2, 24, 16, 16)) == Feature("maps", 24, 16)
    assert Feature.of((2, 16, 16, 24)) == Feature("maps_last", 24, 16)
    assert Feature.of((2, 17, 192)) == Feature("tokens", 192)
    assert Feature.of((2, 40)) == Feature("vectors", 40)
    assert Feature.of((2, 3, 4, 5, 6)) is None


def test_channels_of_square_cubes_are_told_by_what_grows_with_the_images() -> None:
    """Maps of 16 x 16 with 16 channels look alike either way."""

    class Cube(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.last, self.conv, self.fc = last, nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 5)
            self.mark = nn.Sequential(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = self.mark(x.permute(0, 2, 3, 1) if self.last else x)
            return self.fc(x.mean((1, 2) if self.last else (2, 3)))

    for last, layout in ((True, "maps_last"), (False, "maps")):
        assert with_exits(Cube(last), ["mark"], example=images()).heads[0].layout == layout
        oblong = torch.randn(2, 3, 128, 64)  # 32 rows of 16 with 16 channels: a square in the wrong place
        assert with_exits(Cube(last), ["mark"], example=oblong).heads[0].layout == layout


class InPlace(nn.Module):
    """Cut after `first`, its second stage would begin by writing into the state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.second(self.act(self.first(x)))
        return self.fc(x.mean((2, 3)) * scale)


def test_no_stage_writes_into_its_state() -> None:
    model = with_exits(InPlace(), ["first"], example=images())
    logits, state = model.step(1, (images(),))
    kept = state[0].clone()
    model.step(2, state)
    assert torch.equal(state[0], kept) and bool((kept < 0).any())
    sum(out.sum() for out in model(images())).backward()  # the head's own gradient needs what it read


class DropsInPlace(InPlace):
    """Its second stage writes into the state in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Dropout(0.5, inplace=True)


def test_nor_does_it_in_training() -> None:
    model = with_exits(DropsInPlace(), ["first"], example=images(), head="linear").train()
    logits, state = model.step(1, (images(),))
    kept = state[0].clone()
    model.step(2, state)
    assert torch.equal(state[0], kept)
    sum(out.sum() for out in model(images())).backward()


@torch.no_grad()
def test_nor_do_parts_or_heads_of_ones_own() -> None:
    stages = [nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))]
    heads = [nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * side**2, 5)) for side in (30, 28)]
    model = ExitNet.from_parts(stages, heads)
    feature, state = model.advance(1, (images(2, 32),))
    kept = feature.clone()
    model.answer(1, feature, None)
    model.advance(2, state)
    assert bool((kept < 0).any()) and torch.equal(feature, kept) and torch.equal(state[0], kept)


class LooksAtValues(nn.Module):
    """What it writes into cannot be found out on a copy that has no values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() if float(x.detach().sum()) < 1e9 else x


@torch.no_grad()
def test_nor_do_those_that_decide_by_values() -> None:
    model = ExitNet.from_parts([nn.Identity(), LooksAtValues()], [nn.Flatten(), nn.Sequential(LooksAtValues())])
    for mode in (True, False):
        feature, state = model.train(mode).advance(1, (images(2, 32),))
        kept = feature.clone()
        model.advance(2, state)
        model.answer(2, feature, None)
        assert bool((kept < 0).any()) and torch.equal(feature, kept) and torch.equal(state[0], kept)


class Rows(nn.Module):
    """Plain rows of layers, as most people write them; it normalises its own images."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]))
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean.view(1, 3, 1, 1)) / torch.tensor([0.5, 0.5, 0.4]).view(1, 3, 1, 1)
        return self.fc(self.three(self.two(self.one(x))).mean((2, 3)))


def test_plain_rows_of_layers_have_places_too() -> None:
    module = Rows()
    model = with_exits(module, 3, example=images())
    assert model.at == ("one", "two")
    module.mean.fill_(0.1)  # what is computed from a buffer follows it
    assert torch.equal(module(images()), model.last(images()))
    assert with_exits(Rows().double(), 3, example=images())(images().double())[0].dtype == torch.float64


class Draws(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if not self.training or random.random() < 0.5 else x.flip(3))


class DrawsSeldom(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(3) if random.random() < 1e-9 else x)


class DrawsArrays(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.random.rand()) if self.training else x)


class DrawsAMask(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(3, 1, 1) if self.training else x)


class HasItsOwnGenerator(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(3, 1, 1, generator=self.draw) if self.training else x)


class Counts(Rows):
    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        return super().forward(x)


DRAWS = "cannot be traced .it draws random numbers, which only modules that it calls may do.; build"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Draws, DRAWS),
        (DrawsSeldom, DRAWS),
        (DrawsArrays, DRAWS),
        (DrawsAMask, DRAWS),
        (HasItsOwnGenerator, "is another one each time it is called in training"),
        (Counts, "cannot be traced .it writes into its buffer mean.; build"),
    ],
)
def test_what_a_trace_would_do_only_once_is_refused(kind: type[Rows], sentence: str) -> None:
    module = kind()
    before, state, drawn_next = module.mean, random.getstate(), torch.get_rng_state()
    with pytest.raises(CannotCut, match=sentence):
        with_exits(module, ["one"], example=images())
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), drawn_next)
    assert module.mean is before and torch.equal(before, Rows().mean)


class WritesUnderAView(Rows):
    """In training: the view and what it looks at lie in the state, and parting them would change the view."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        view, y = x.flatten(2), self.two(x)
        if self.training:
            x.add_(1)
        return self.fc(self.three(y).mean((2, 3)) + view.repeat(1, 2, 1).mean(2))


class Watches(Rows):
    """A module sees the logits, and nobody reads what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.watch(logits)
        return logits


@pytest.mark.parametrize("kind", [WritesUnderAView, Watches])
def test_what_would_be_lost_in_training_alone_is_refused(kind: type[Rows]) -> None:
    module = kind()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(CannotCut, match="answers otherwise in training once it is cut"):
        with_exits(module, ["two"], example=torch.zeros(1, 3, SIZE, SIZE))
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


class DrawsWithin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 or not self.training else x.flip(3)


def test_modules_that_are_called_may_draw_as_they_like() -> None:
    module = Rows()
    module.one.append(DrawsWithin())
    assert with_exits(module, ["one"], example=images()).num_exits == 2


class KeepsAverage(Rows):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
        return super().forward(x)


def test_writing_into_buffers_by_operations_stays() -> None:
    module = KeepsAverage()
    model, twin = with_exits(module, ["one"], example=images()).train(), copy.deepcopy(module).train()
    for _ in range(2):
        assert torch.equal(twin(images()), model.last(images()))
    assert torch.equal(twin.mean, module.mean) and not torch.equal(twin.mean, Rows().mean)


class AnswersShares(Rows):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.training else logits.softmax(1)


def test_a_network_may_end_otherwise_in_training() -> None:
    module = AnswersShares()
    model = with_exits(module, ["one"], example=images())
    for mode in (True, False):
        assert torch.equal(module.train(mode)(images()), model.train(mode).last(images()))


def test_a_network_of_ones_own_keeps_its_classifier() -> None:
    module = InPlace()
    model = with_exits(module, ["first"], example=images())
    assert model.heads[-1] is module.fc
    assert isinstance(module.fc, nn.Linear)  # the original stays whole
    assert torch.equal(module(images()), model.last(images()))


def test_a_network_in_mixed_modes_stays_in_them() -> None:
    """Frozen parts that are in evaluation mode, as people keep BatchNorms, stay there."""
    module = original("resnet18").train()
    module.bn1.eval()
    model = with_exits(module, 3, example=images())
    assert module.training and module.layer1.training and not module.bn1.training
    assert model.training and all(head.training for head in model.heads)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        (["frist"], "module of InPlace 'frist' is unknown; did you mean 'first'"),
        (["second", "first"], "in the order in which their modules run"),
        (9, "places for exits"),
        (0, "exits must be a whole number from 1 up"),
        ("first", "exits must be a whole number from 1 up, or a list of module names, got 'first'"),
        (True, "exits must be a whole number from 1 up"),
    ],
)
def test_exits_that_cannot_be_are_sentences(at: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        with_exits(InPlace(), at, example=images())


class Branches(InPlace):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x if x.mean() > 0 else -x)


class Measures(InPlace):
    """Takes a tracer's proxy for something else than a tensor: the trace is another function."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * 2 if isinstance(x, Tensor) else x)


@pytest.mark.parametrize(("kind", "sentence"), [(Branches, "cannot be traced"), (Measures, "answers otherwise")])
def test_a_forward_that_cannot_be_cut_is_refused(kind: type[nn.Module], sentence: str) -> None:
    for example in (images(), images(1), torch.zeros(1, 3, SIZE, SIZE)):  # of which much would do the same
        with pytest.raises(CannotCut, match=sentence):
            with_exits(kind(), ["first"], example=example)


@pytest.mark.parametrize("name", ["regnet_y_400mf", "vit_b_16", "googlenet", "mobilenet_v3_small", "mnasnet0_5"])
@pytest.mark.filterwarnings("ignore")
def test_places_of_torchvisions_families_are_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "info", f"torchvision/{name}") == 0
    assert "exits here: " in capsys.readouterr().out


def test_by_name_from_either_library_and_from_its_folder(tmp_path) -> None:
    for name in ("timm/resnet18.a1_in1k", "torchvision/resnet18", "torchvision/mnasnet0_5"):
        model = create_model(name, num_classes=5, exits=3, image_size=SIZE).eval()
        again = load_model(model.save(tmp_path / name)).eval()
        assert again.at == model.at
        with torch.no_grad():
            assert all(map(torch.equal, model(images()), again(images())))


def test_preprocessing_comes_with_the_network() -> None:
    prepared = create_model("timm/tf_efficientnet_lite0", 5, exits=1).preprocessing
    assert prepared is not None
    assert (prepared.size, prepared.resize, prepared.interpolation) == (224, 256, "bicubic")
    assert prepared.mean == prepared.std == (0.5, 0.5, 0.5)
    smaller = create_model("timm/tf_efficientnet_lite0", 5, exits=1, image_size=112).preprocessing
    assert smaller is not None and (smaller.size, smaller.resize) == (112, 128)
    vision = create_model("torchvision/resnet18", 5, exits=1).preprocessing
    assert vision is not None and (vision.size, vision.resize, vision.interpolation) == (224, 256, "bilinear")


@pytest.mark.parametrize(
    "name",
    ["tf_efficientnet_lite0", "resnet18.a1_in1k", "convnext_tiny.fb_in22k_ft_in1k_384", "vit_tiny_patch16_224"],
)
def test_images_are_prepared_as_timm_prepares_them(name: str) -> None:
    from timm.data import create_transform
    from timm.data.config import resolve_data_config

    with torch.device("meta"):
        model = create_model(f"timm/{name}", 5, exits=1)
    own = model.preprocessing
    assert own is not None
    config = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    pixels = np.random.default_rng(0).integers(0, 256, (300, 411, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((411, 300))
    wanted = create_transform(**config, is_training=False)(image).numpy()
    np.testing.assert_allclose(own.normalise(own.cut(image)[None])[0], wanted, atol=1e-5)


def test_every_batch_norm_of_a_resnet_is_folded() -> None:
    model = with_exits(original("resnet18"), 3, example=images()).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2)
    own = folded(model)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in own.modules())
    with torch.no_grad():
        for wanted, found in zip(model(images()), own(images()), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_unknown_networks_are_sentences() -> None:
    with pytest.raises(ValueError, match="did you mean 'timm/resnet18' or 'torchvision/resnet18'"):
        create_model("resnet18")
    with pytest.raises(
        ValueError, match="'EfficientNetB0' is unknown; did you mean 'timm/efficientnet_b0' or 'torchvision/effi"
    ):
        create_model("EfficientNetB0")
    with pytest.raises(ValueError, match="timm model 'resnet5' is unknown; did you mean 'resnet50'"):
        create_model("timm/resnet5")
    with pytest.raises(ValueError, match="override of model 'timm/resnet18' 'exist' is unknown; did you mean 'exits'"):
        create_model("timm/resnet18", exist=3)
    with pytest.raises(ValueError, match="image_size must be a whole number of pixels, got 'abc'"):
        create_model("timm/resnet18", image_size="abc")
