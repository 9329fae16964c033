"""What can only be seen on a GPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.engines import pooled
from helpers.training import settings
from offramp import ExitNet, cascade, create_model, evaluate_run, with_exits
from offramp.common.device import exact_float32
from offramp.common.signals import Stopped
from offramp.data import load_dataset
from offramp.measuring.confidence import confidences
from offramp.measuring.policy import Policy
from offramp.models.collaboration import CollaborativeNet
from offramp.models.fold import folded
from offramp.models.weights import read_tensors
from offramp.running.engines.onnx_engine import CUDA, OnnxEngine
from offramp.running.engines.protocol import all_logits
from offramp.running.engines.torch_engine import TorchEngine
from offramp.running.export import onnx_stages
from offramp.running.runtime import Runtime
from offramp.runs.config import RunConfig, WeightingConfig, parse
from offramp.runs.folder import read_metrics
from offramp.training.cuda_graph import CapturedStep
from offramp.training.imta import OneForAll, OnFrozenFeatures
from offramp.training.loop import Phase, Setup, new_method
from offramp.training.meta_gradient import ESTIMATORS, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half, exit_losses, new_objective
from offramp.training.optimizers import new_optimizer, set_rate
from offramp.training.step import forward, train_step
from offramp.training.tally import Tally
from offramp.training.tape import Tape, use_taped_layers
from offramp.training.train import new_model, train_run, train_runs, training
from offramp.training.weighting import Context, LearnedWeighting, UniformWeighting, Weighting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


EACH_TERM = ("objective.name=distillation", "objective.options.source=mean", "weighting.terms=each")
POLICY = ("weighting.objective=policy", "weighting.through_exits=true")


@pytest.mark.parametrize(
    ("weighting", "more"),
    [("uniform", ()), ("selection", ()), ("learned", ()), ("learned", EACH_TERM), ("learned", POLICY)],
)
def test_a_step_never_waits_for_the_device(
    small_config: Callable[..., RunConfig], weighting: str, more: tuple[str, ...]
) -> None:
    config = small_config("model.num_classes=10", f"weighting.name={weighting}", *more)
    device = torch.device("cuda")
    data = load_dataset("digits", train=256, calibration=0, test=10)
    model = new_model(config).to(device, memory_format=torch.channels_last)
    use_taped_layers(model)
    optimizer, tally = new_optimizer(model, config.train), Tally(model.num_exits, device)
    method = method_of(config, model, model)
    stream = data.stream(64, 0, device)

    def step(at: int) -> None:
        for half in train_step(model, optimizer, method, *next(stream), at):
            tally.add(half, at)

    step(0)
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for at in range(1, 10):
            step(at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tally.tensors["seen"].item() == 640


def method_of(config: RunConfig, model: ExitNet, module: torch.nn.Module) -> Method:
    """As a run makes it; on top of a frozen network, IMTA's second phase."""
    frozen = isinstance(module, OnFrozenFeatures)
    objective, prepare = (OneForAll(3.0, 0.9), module.prepare) if frozen else (new_objective(config.objective), None)
    data = load_dataset("digits", train=64, calibration=0, test=10)
    phase = Phase(config, Path("nowhere"), data, model, module, objective, False, prepare)
    return new_method(phase, Setup(torch.device("cuda")), STEPS)


STEPS = 3
WAYS = {"graph": (True, False), "kernels": (False, True), "both": (True, True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("weighting.interval=2",),
        ("weighting.until=0.5",),
        ("weighting.since=0.3", "weighting.interval=2"),
        ("weighting.order=delayed",),
        EACH_TERM,
        POLICY,
        ("model.overrides.collaboration=true",),
    ],
)
def test_the_fast_step_is_the_plain_one(
    small_config: Callable[..., RunConfig], way: str, settings: tuple[str, ...]
) -> None:
    """In float32, three loader batches: nearer to the plain run than that is to one whose params began 1e-6 off."""
    config = small_config("weighting.name=learned", "model.num_classes=10", "train.precision=float32", *settings)
    with exact_float32():
        plain = three_steps(config, (False, False))
        nudged = three_steps(config, (False, False), nudge=1e-6)
        fast = three_steps(config, WAYS[way])
    off = [
        [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(x, plain, strict=True)]
        for x in (fast, nudged)
    ]
    assert np.mean(off[0]) < np.mean(off[1]) and np.max(off[0]) < np.max(off[1])


def three_steps(config: RunConfig, way: tuple[bool, bool], nudge: float = 0.0) -> list[torch.Tensor]:
    """All losses, and what has become of params, buffers and weight net."""
    captures, own = way
    device = torch.device("cuda")
    data = load_dataset("digits", train=512, calibration=0, test=10)
    model = new_model(config).to(device, memory_format=torch.channels_last)
    for param in model.parameters():
        param.data *= 1 + nudge * torch.randn_like(param)
    module = what_is_trained(model)
    use_taped_layers(module, own)
    optimizer = new_optimizer(model, config.train)
    method = method_of(config, model, module)
    step = CapturedStep(module, optimizer, method) if captures else partial(train_step, module, optimizer, method)
    stream = data.stream(64, 0, device)
    losses = []
    for at in range(STEPS):
        set_rate(optimizer, 0.01 * (1 - at / 10))
        method.weighting.set_rate(1 - at / 10)
        method.weighting.begin_step(at)
        losses += [half.losses_BK.clone() for half in step(*next(stream), at)]
    assert not isinstance(step, CapturedStep) or step.captures
    return [t.double() for t in (*losses, *model.state_dict().values(), *method.weighting.tensors().values())]


def what_is_trained(model: ExitNet) -> torch.nn.Module:
    """The network itself or, where it collaborates, IMTA's second phase."""
    if not isinstance(model, CollaborativeNet):
        return model
    torch.manual_seed(0)
    teacher = torch.nn.Linear(model.widths[-1], model.heads[-1].out_features, device="cuda")
    return OnFrozenFeatures(model, teacher).train()


def test_16_bit_kernels_stay_close() -> None:
    """bf16 maps: losses as near to float32 as plain bf16 operations come."""
    torch.manual_seed(0)
    model = create_model("msdnet5").cuda().to(memory_format=torch.channels_last)
    images = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (64,), device="cuda")
    found = {}
    for name, own, dtype in (("float32", False, None), ("plain", False, torch.bfloat16), ("own", True, torch.bfloat16)):
        use_taped_layers(model, own)
        with exact_float32(), torch.autocast("cuda", dtype, enabled=dtype is not None), Tape().recording():
            loss = exit_losses(model(images), labels)
            gradients = torch.autograd.grad(loss.sum(1).mean(), list(model.parameters()))
        found[name] = [loss.detach(), *gradients]
    errors = {
        name: [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(own, found["float32"], strict=True)]
        for name, own in found.items()
    }
    assert errors["own"][0] < 2 * errors["plain"][0] + 1e-3
    assert np.mean(errors["own"]) < 1.5 * np.mean(errors["plain"]) + 1e-3


class Draws(torch.nn.Module):
    """Two exits, with dropout before either; or with numbers that are drawn on the CPU."""

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__()
        self.on_cpu, self.drop = on_cpu, torch.nn.Dropout(0.5)
        self.one, self.two = torch.nn.Linear(12, 16), torch.nn.Linear(16, 16)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        noise = float(torch.rand(())) if self.on_cpu else 0.0
        first = self.one(x.flatten(1)).tanh() + noise
        second = self.two(self.drop(first)).tanh()
        return [head(self.drop(h)) for head, h in zip(self.heads, (first, second), strict=True)]


def drawing_vit() -> ExitNet:
    """A small ViT of timm with dropout in its attention and blocks that are left out by chance, cut in two."""
    import timm

    options = {"img_size": 32, "depth": 3, "embed_dim": 48, "num_heads": 3}
    draws = {"attn_drop_rate": 0.3, "drop_path_rate": 0.3}
    module = timm.create_model("vit_tiny_patch16_224", num_classes=4, **options, **draws)
    return with_exits(module, 2, example=torch.zeros(2, 3, 32, 32), head="linear")


def drawing_steps(
    weighting: Weighting,
    settings: WeightingConfig | None,
    seeds: list[int],
    build: Callable[[], torch.nn.Module] = Draws,
) -> tuple[list[torch.Tensor], CapturedStep]:
    """Captured steps of a network that draws on the same images; losses of every half, and what did them."""
    torch.manual_seed(0)
    net, side = build().cuda().train(), 2 if build is Draws else 32
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
    stepper = CapturedStep(net, optimizer, Method(weighting, settings or WeightingConfig()))
    images = torch.randn(32, 3, side, side, device="cuda").repeat(2, 1, 1, 1)
    labels = torch.arange(64, device="cuda") % 4
    losses = []
    for at, seed in enumerate(seeds):
        torch.manual_seed(seed)
        losses += [half.losses_BK.clone() for half in stepper(images, labels, at)]
    assert stepper.captures
    return losses, stepper


def test_a_captured_step_draws_what_follows_from_the_seed() -> None:
    with exact_float32():
        one, _ = drawing_steps(UniformWeighting(), None, [1, 2, 3])
        again, _ = drawing_steps(UniformWeighting(), None, [1, 2, 3])
        other, _ = drawing_steps(UniformWeighting(), None, [1, 5, 3])
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert torch.equal(one[0], other[0]) and not torch.allclose(one[2], other[2], rtol=1e-3)
    assert not torch.allclose(one[0], one[1], rtol=1e-2)  # the same images, drawn for apart


def test_a_captured_step_of_a_vit_draws_what_follows_from_the_seed() -> None:
    """Attention dropout and drop path; fused attention adds its gradients in any order, so nearly equal is equal."""
    with exact_float32():
        one, again, other = (
            drawing_steps(UniformWeighting(), None, seeds, drawing_vit)[0]
            for seeds in ([1, 2, 3], [1, 2, 3], [1, 5, 3])
        )
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one, again, strict=True))
    assert torch.allclose(one[0], other[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(one[2], other[2], rtol=1e-2) and not torch.allclose(one[0], one[1], rtol=1e-2)


@pytest.mark.parametrize(
    ("engine", "build", "most"),
    [("forward_mode", Draws, 1e-2), ("finite_difference", Draws, 0.5), ("forward_mode", drawing_vit, 5e-2)],
)
def test_captured_passes_over_the_train_half_draw_alike(
    engine: str, build: Callable[[], torch.nn.Module], most: float
) -> None:
    """The weight net learns from the meta-gradient of one mask: the captured engines agree on it."""
    moments = []
    for name in ("double_backward", engine):
        given = {"name": "learned", "engine": name, "learning_rate": 1e-6, "weight_decay": 0.0}
        settings = parse(WeightingConfig, given)
        weighting = LearnedWeighting(settings, Context(2, device=torch.device("cuda")))
        with exact_float32():
            drawing_steps(weighting, settings, [1, 2, 3], build)
        moments.append(torch.cat([t.flatten() for n, t in weighting.tensors().items() if n.endswith(".exp_avg")]))
    assert moments[0].norm() > 0
    assert (moments[0] - moments[1]).norm() < most * moments[0].norm()


@pytest.mark.parametrize(
    "more",
    [
        ("train.fork=surgery", "weighting.name=learned"),
        ("train.fork=surgery", "weighting.name=learned", "weighting.order=delayed"),
        ("train.fork=equilibrium", "train.network_epochs=2"),
        ("train.parts=inner_heads", "train.network_epochs=2", "train.probe=true", "weighting.name=learned"),
    ],
)
def test_runs_that_draw_and_average_are_captured_and_resume(
    tmp_path: Path, small_config: Callable[..., RunConfig], more: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(
        "train.fast=true",
        "train.epochs=4",
        "train.optimizer=adamw",
        "train.learning_rate=0.003",
        "train.ema=0.9",
        "train.depth_decay=0.7",
        "train.decay_norms=false",
        "train.warm_up_steps=3",
        "train.mixup=0.2",
        "train.cutmix=1.0",
        "objective.name=distillation",
        "objective.options={source='mean', label_smoothing=0.1}",
        "model.overrides.head_dropout=0.3",
        *more,
    )
    whole = train_run(config, tmp_path / "whole", device="cuda")
    with pytest.raises(Stopped):
        for _ in training(config, tmp_path / "stopped", Setup(torch.device("cuda"), caught=[15]), False):
            pass
    resumed = train_run(config, tmp_path / "stopped", device="cuda", resume=True)
    left, right = (flat(read_tensors(run / "model.safetensors")) for run in (whole, resumed))
    assert (left - right).norm() < 0.05 * left.norm()  # AdamW makes much of small differences
    losses = [read_metrics(run)[-1]["train_loss"] for run in (whole, resumed)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert "eagerly" not in caplog.text


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


def test_a_network_that_draws_on_the_cpu_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net = Draws(on_cpu=True).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    stepper = CapturedStep(net, optimizer, Method(UniformWeighting()))
    images, labels = torch.randn(8, 3, 2, 2, device="cuda"), torch.randint(4, (8,), device="cuda")
    before = net.one.weight.detach().clone()
    for at in range(STEPS):
        assert len(stepper(images, labels, at)) == 2
    assert not stepper.captures and not torch.equal(before, net.one.weight)
    assert caplog.text.count("draws random numbers on the CPU") == 1


def test_fast_runs_resume_and_share_the_gpu(tmp_path: Path, small_config: Callable[..., RunConfig]) -> None:
    """A run that stopped goes on; runs side by side on streams give what they give alone."""
    fast = ("train.fast=true", "weighting.name=learned", "train.epochs=4")
    configs = [small_config(*fast, f"seed={seed}") for seed in (0, 1)]
    alone = [train_run(c, tmp_path / f"alone-{at}", device="cuda") for at, c in enumerate(configs)]
    together = train_runs([(c, tmp_path / f"together-{at}") for at, c in enumerate(configs)], device="cuda")
    for a, b in zip(alone, together, strict=True):
        left, right = (read_tensors(run / "model.safetensors") for run in (a, b))
        assert all(torch.allclose(left[k].float(), right[k].float(), rtol=1e-3, atol=1e-4) for k in left)
    with pytest.raises(Stopped):
        setup = training(configs[0], tmp_path / "stopped", Setup(torch.device("cuda"), caught=[15]), False)
        for _ in setup:
            pass
    resumed = train_run(configs[0], tmp_path / "stopped", device="cuda", resume=True)
    left, right = (read_tensors(run / "model.safetensors") for run in (alone[0], resumed))
    assert all(torch.allclose(left[k].float(), right[k].float(), rtol=1e-2, atol=1e-3) for k in left)


def test_training_on_the_gpu_learns_and_evaluates_as_the_cpu_does(
    tmp_path: Path, small_config: Callable[..., RunConfig]
) -> None:
    run = train_run(small_config("train.epochs=20", "data.train=2000"), tmp_path / "run", device="cuda")
    rows = read_metrics(run)
    assert sum(rows[-1]["train_loss"]) < 0.7 * sum(rows[0]["train_loss"])
    evaluate_run(run, device="cuda")
    gpu = np.load(run / "eval/test/logits.npy").copy()
    evaluate_run(run, device="cpu")
    cpu = np.load(run / "eval/test/logits.npy")
    np.testing.assert_allclose(gpu, cpu, atol=2e-4)


def cut_resnet() -> ExitNet:
    return create_model("timm/test_resnet", 10, exits=3, image_size=32, head="chained")


def two_sizes() -> ExitNet:
    nets = [create_model("timm/test_resnet", 10, exits=n, image_size=size) for n, size in ((1, 24), (2, 32))]
    return cascade(nets, [24, 32], carry=1.0)


NETWORKS: dict[str, Callable[[], ExitNet]] = {
    "msdnet5": lambda: create_model("msdnet5", num_classes=10),
    "boosted": lambda: create_model("msdnet-tiny", 10, carry=0.5),
    "cut": cut_resnet,
    "cascade": two_sizes,
}
IMAGES = np.random.default_rng(0).normal(size=(300, 3, 32, 32)).astype(np.float32)


def settled(name: str) -> ExitNet:
    """A network whose BatchNorms have the statistics of these images, and whose heads are not too unsure; folded."""
    torch.manual_seed(0)
    model = NETWORKS[name]().train()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    with torch.no_grad():
        model(torch.from_numpy(IMAGES[:64]))
        for head in model.heads:
            getattr(head, "linear", head).weight.mul_(4)
    return folded(model.eval())


@pytest.mark.parametrize("name", NETWORKS)
def test_captured_stages_answer_as_plain_ones_do(name: str) -> None:
    """CUDA graphs per stage and batch size give what the CPU gives, whatever the batch, alone and pooled."""
    model = settled(name)
    plain = TorchEngine(copy.deepcopy(model))
    sure = confidences(all_logits(plain, IMAGES[:100]), "max_softmax")
    policy = Policy("q", None, tuple(float(np.median(own)) for own in sure[:-1]), 0.0, (), 0.0)
    near = np.min([np.abs(own - t) for own, t in zip(sure, policy.thresholds, strict=False)], axis=0) < 1e-4
    assert near.mean() < 0.5
    costs = range(1, plain.num_exits + 1)
    expected = Runtime(plain, policy, costs)(IMAGES[:100])
    engine = TorchEngine(model, device="cuda", graphs=True)
    for size in (1, 7, 100):
        runtime = Runtime(engine, policy, costs)
        found = [runtime(IMAGES[at : at + size]).exits for at in range(0, 100, size)]
        assert (np.concatenate(found)[:100] == expected.exits)[~near].all()
    assert len(Runtime(engine, policy, costs)(IMAGES)) == 300  # more than any captured size
    exits = np.array([left.exit for left in pooled(engine, policy, IMAGES[:100], batch=16, arriving=16)])
    assert (exits == expected.exits)[~near].all()


@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_runtime_answers_on_the_gpu_as_on_the_cpu(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if CUDA not in ort.get_available_providers():
        pytest.skip("the onnxruntime here has no CUDA provider; onnxruntime-gpu has")
    stages = onnx_stages(settled(name))
    cpu, gpu = (OnnxEngine(stages, device=device) for device in ("cpu", "cuda"))
    assert gpu.place == "CUDA device 0"
    np.testing.assert_allclose(all_logits(gpu, IMAGES[:64]), all_logits(cpu, IMAGES[:64]), rtol=1e-3, atol=1e-3)


def test_images_on_their_way_may_be_written_to() -> None:
    """The rooms of pinned memory take turns, and none is filled while a copy still reads it."""
    from offramp.running.engines.cuda_graphs import ROOMS, Staging

    staging, busy = Staging(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    for elements in (1 << 20, 1 << 19, 10, 3 << 20):
        images, sent = torch.zeros(elements), []
        for turn in range(2 * ROOMS):
            busy = busy @ busy / 64  # copies wait behind this on the device
            images.fill_(turn)
            sent.append(staging.send(images))
        assert [float(copy.min()) for copy in sent] == [float(copy.max()) for copy in sent] == list(range(2 * ROOMS))
    assert staging.rooms.shape == (ROOMS, 1 << 24)


def test_learned_weights_are_exact_under_attention_dropout() -> None:
    """A ViT whose fused attention drops out: the tangent pass must drop the same places, or it would be far off."""
    import timm

    torch.manual_seed(0)
    size = 64
    module = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=size, depth=3, attn_drop_rate=0.5, drop_path_rate=0.2
    )
    model = with_exits(module, 3, example=torch.zeros(2, 3, size, size), head="linear").cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    halves = [
        Half(torch.randn(8, 3, size, size, generator=draw).cuda(), torch.randint(5, (8,), generator=draw).cuda())
        for _ in range(2)
    ]
    method = Method(UniformWeighting(), settings(q=0.6))
    with exact_float32():
        train = forward(model, method, halves[0], keeps=True)
        weights_BK = 0.5 + torch.rand_like(train.losses_BK)
        given = Problem(model, optimizer, method, train, weights_BK, halves[1])
        found = []
        for engine in ("double_backward", "forward_mode"):
            torch.manual_seed(5)
            found.append(ESTIMATORS[engine](given).weights_BK)
    exact, ours = found
    assert (ours - exact).norm() < 1e-2 * exact.norm()
