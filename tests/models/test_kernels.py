"""Our kernels against the plain operations, in float32: on a GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from helpers.training import settings
from offramp import create_model
from offramp.common.device import exact_float32
from offramp.models.layers import ConvBNReLU
from offramp.training import tape as tapes
from offramp.training.method import Method
from offramp.training.step import train_step
from offramp.training.tape import Tape, TapedConvBNReLU, no_trace, use_taped_layers
from offramp.training.weighting import Context, LearnedWeighting

pytest.importorskip("triton", reason="Triton is not installed, and without it nobody uses these kernels")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [  # channels in, out, side, kernel, stride
    (6, 6, 8, 3, 1),
    (22, 6, 9, 1, 1),
    (7, 20, 8, 3, 2),
    (40, 70, 5, 3, 2),
    (5, 3, 4, 1, 2),
    (12, 6, 6, 3, 1),
]


@pytest.fixture(autouse=True)
def plain_operations_in_full_precision() -> Iterator[None]:
    with exact_float32():
        yield


def layers(shape: tuple[int, ...]) -> tuple[ConvBNReLU, ConvBNReLU]:
    """The same layer twice, the second one with kernels."""
    torch.manual_seed(0)
    plain = ConvBNReLU(*shape[:2], kernel=shape[3], stride=shape[4]).to(DEVICE, memory_format=torch.channels_last)
    torch.nn.init.uniform_(plain[1].weight, 0.5, 1.5)
    torch.nn.init.normal_(plain[1].bias)
    ours = copy.deepcopy(plain)
    use_taped_layers(plain)
    use_taped_layers(ours, kernels=True)
    assert isinstance(ours, TapedConvBNReLU) and ours.kernels is not None
    return plain, ours


def maps(shape: tuple[int, ...], sliced: bool) -> Tensor:
    """NHWC images; sliced: the first channels of wider ones."""
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(3, shape[0] + 3, shape[2], shape[2], generator=draw).to(DEVICE)
    wide = wide.contiguous(memory_format=torch.channels_last)[:, : shape[0]]
    return wide if sliced else wide.contiguous(memory_format=torch.channels_last)


def close(ours: Tensor, plain: Tensor) -> None:
    assert ours.shape == plain.shape
    assert (ours - plain).norm() <= 2e-6 * plain.norm() + 1e-7


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_gradient_and_tangent(shape: tuple[int, ...], sliced: bool) -> None:
    pair, found = layers(shape), []
    for layer in pair:
        tape, x = Tape(), maps(shape, sliced).requires_grad_()
        with tape.recording():
            out = layer(x)
        towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        gradients = torch.autograd.grad(out, [x, *layer.parameters()], towards)
        found.append([out, *gradients, tangent_of(layer, tape, x), *layer.buffers()])
    for ours, plain in zip(found[1], found[0], strict=True):
        close(ours.double(), plain.double())


def tangent_of(layer: ConvBNReLU, tape: Tape, x: Tensor) -> Tensor:
    """The tangent along random directions of everything."""
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad(), fwAD.dual_level(), tape.replaying():

        def moving(value: Tensor) -> Tensor:
            return fwAD.make_dual(value.detach(), torch.randn(value.shape, generator=draw).to(DEVICE))

        duals = {name: moving(param) for name, param in layer.named_parameters()}
        out = torch.func.functional_call(layer, duals, (moving(x),))
        return fwAD.unpack_dual(out).tangent.clone()


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_16_bits_come_as_near_as_plain_operations(shape: tuple[int, ...]) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # which is all that the interpreter multiplies
    plain, ours = layers(shape)
    found = {}
    for name, layer, half in (("exact", plain, False), ("plain", plain, True), ("ours", ours, True)):
        tape, x = Tape(), maps(shape, False).requires_grad_()
        with tape.recording(), torch.autocast(DEVICE.type, dtype, enabled=half):
            out = layer(x)
        towards = torch.arange(out.shape[-1], device=DEVICE) * torch.ones_like(out)
        gradients = torch.autograd.grad(out, [x, *layer.parameters()], towards)
        with torch.autocast(DEVICE.type, dtype, enabled=half):
            found[name] = [out.detach(), *gradients, tangent_of(layer, tape, x)]
        assert not half or out.dtype == dtype
    for exact, own, theirs in zip(found["exact"], found["ours"], found["plain"], strict=True):
        off = [float((each.double() - exact.double()).norm()) for each in (own, theirs)]
        assert off[0] <= 1.5 * off[1] + 1e-4 * float(exact.norm())


def test_an_input_that_does_not_move() -> None:
    """The first layer's: only the params move."""
    results = []
    for layer in layers(SHAPES[0]):
        tape = Tape()
        with tape.recording():
            layer(maps(SHAPES[0], False))
        with torch.no_grad(), fwAD.dual_level(), tape.replaying():
            duals = {n: fwAD.make_dual(p.detach(), torch.ones_like(p)) for n, p in layer.named_parameters()}
            out = torch.func.functional_call(layer, duals, (maps(SHAPES[0], False),))
            results.append(fwAD.unpack_dual(out).tangent.clone())
    close(results[1], results[0])


@pytest.mark.parametrize("channels", [(16, 6), (22, 3, 5), (8, 8), (3,), (40, 6, 6)])
def test_joined_maps_and_what_lies_between(channels: tuple[int, ...]) -> None:
    """Whatever the widths: the same channels as a concatenation, zeros up to the next multiple of eight."""
    from offramp.models.kernels import maps as kernels

    maps = [
        torch.randn(2, c + 5, 4, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)[:, :c]
        for c in channels
    ]
    wide = torch.randn(2, 8 * sum(channels), 4, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    maps[0] = wide[:, : channels[0]]  # rows that begin at multiples of eight, with neighbours that are not zero
    joined = kernels.join(maps)
    assert torch.equal(joined, torch.cat(maps, dim=1))
    room = kernels.row_stride(joined)
    rows = joined.as_strided((2 * 4 * 3, room), (room, 1))
    assert room % 8 == 0 and (rows[:, sum(channels) :] == 0).all()


def test_sums_repeat_and_no_trace_is_left() -> None:
    _, ours = layers(SHAPES[2])
    before = [b.clone() for b in ours.buffers()]
    with no_trace():
        first, second = ours(maps(SHAPES[2], True)), ours(maps(SHAPES[2], True))
    assert torch.equal(first, second) and all(map(torch.equal, before, ours.buffers()))


@pytest.mark.slow  # where there is no GPU, kernels are interpreted
def test_a_whole_step_agrees() -> None:
    """Two updates with learned weights, plain and with kernels: the same params, statistics and weight net."""
    torch.manual_seed(0)
    small = {"blocks": (1, 1), "base_width": 4, "growth": 4, "head_width": 4, "image_size": 20}
    models = [create_model("msdnet-tiny", num_classes=3, **small).to(DEVICE, memory_format=torch.channels_last)]
    models.append(copy.deepcopy(models[0]))
    for model, kernels in zip(models, (False, True), strict=True):
        use_taped_layers(model, kernels)
    draw = torch.Generator().manual_seed(5)
    images = torch.randn(8, 3, 20, 20, generator=draw).to(DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(3, (8,), generator=draw).to(DEVICE)
    states = []
    for model in models:
        weighting = LearnedWeighting(settings(), Context(2, device=DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        results = train_step(model, optimizer, Method(weighting, settings()), images, labels, 0)
        states.append([*model.state_dict().values(), *weighting.net.state_dict().values(), results[1].losses_BK])
    for ours, plain in zip(states[1], states[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-3, atol=2e-4)


def test_what_is_not_a_number_stays_so() -> None:
    """Or a run that has gone wrong would look like one that is merely bad."""
    _, ours = layers(SHAPES[0])
    x = maps(SHAPES[0], False)
    x[0, 0, 0, 0] = float("nan")
    with no_trace():
        assert ours(x).isnan().any()


def test_no_second_derivative_is_made_up() -> None:
    _, ours = layers(SHAPES[0])
    with no_trace():
        out = ours(maps(SHAPES[0], False).requires_grad_())
    (gradient,) = torch.autograd.grad(out.square().sum(), ours[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_our_kernels_do_not_know_stays_plain() -> None:
    model = create_model("msdnet-tiny", num_classes=4, blocks=(2, 2), stem="imagenet", image_size=96).to(DEVICE)
    from offramp.models.kernels.fused import suits

    use_taped_layers(model, kernels=True)
    convs = [m for m in model.modules() if isinstance(m, TapedConvBNReLU)]
    known = [m.kernels is not None for m in convs]
    assert known == [m[0].kernel_size != (7, 7) for m in convs] == [suits(m[0]) for m in convs]
    assert known.count(False) == 1
    use_taped_layers(model, kernels=False)
    assert all(m.kernels is None for m in convs)


def test_kernels_that_cannot_run_are_said_so_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton without a C compiler, for example: training goes on with plain operations."""

    def broken(maps: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("offramp.models.kernels.fused.joined", broken)
    tapes._fused.cache_clear()
    layer = ConvBNReLU(3, 4)
    use_taped_layers(layer, kernels=True)
    tapes._fused.cache_clear()
    assert isinstance(layer, TapedConvBNReLU) and layer.kernels is None and "no C compiler" in caplog.text


def test_places_are_counted_over_a_slices_neighbours() -> None:
    from offramp.models.kernels.fused import fits

    wide = torch.empty(4096, 544, 32, 32, device="meta").contiguous(memory_format=torch.channels_last)
    layer = ConvBNReLU(24, 8)
    assert fits(torch.empty(4096, 24, 32, 32, device="meta"), layer[0]) and not fits(wide[:, :24], layer[0])
