"""Every registered network against every promise of the contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offramp import ExitNet, create_model, exit_costs, list_models
from offramp.models.cascade import Cascade
from offramp.models.cells import CellNet
from offramp.models.exits import State

NAMES = list_models()


def images(model: ExitNet, n: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(n, *model.input_shape, generator=draw)


def walk(model: ExitNet, x: torch.Tensor) -> tuple[list[torch.Tensor], list[State]]:
    state: State = (x,)
    logits, states = [], []
    for k in range(1, model.num_exits + 1):
        out, state = model.step(k, state)
        logits.append(out)
        states.append(state)
    return logits, states


def test_the_registry_has_the_papers_networks() -> None:
    papers = {"msdnet5", "msdnet7", "msdnet-imagenet-s4", "msdnet-imagenet-s6", "msdnet-imagenet-s7"}
    assert papers | {"ranet-c1", "ranet-c2", "msdnet-tiny"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_walking_equals_the_full_forward_in_both_schedules(name: str) -> None:
    model = create_model(name).eval()
    x = images(model)
    full = model(x)
    for schedule in ("eager", "lazy") if isinstance(model, CellNet | Cascade) else ("eager",):
        logits, states = walk(model.set_schedule(schedule), x)
        assert all(torch.equal(a, b) for a, b in zip(full, logits, strict=True))
        assert all(len(tensor) == len(x) for state in states for tensor in state)
        assert states[-1] == ()
        assert all(len({id(t) for t in state}) == len(state) for state in states)


@pytest.mark.parametrize("name", NAMES)
def test_every_param_gets_a_gradient(name: str) -> None:
    model = create_model(name)
    x = images(model)
    sum(out.logsumexp(1).sum() + out[:, 0].sum() for out in model(x)).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without


@torch.inference_mode()
def test_samples_can_be_dropped_between_stages() -> None:
    model = create_model("ranet-c1", num_classes=10).double().eval()
    x = images(model, 5).double()
    full = model(x)
    keep = torch.tensor([3, 1])
    state: State = (x,)
    for k in range(1, 4):
        _, state = model.step(k, state)
    state = tuple(t[keep] for t in state)
    for k in range(4, model.num_exits + 1):
        logits, state = model.step(k, state)
        torch.testing.assert_close(logits, full[k - 1][keep], rtol=1e-12, atol=1e-12)


MUL_ADDS = {
    "msdnet5": [6859876, 14350024, 27536684, 41714576, 58480628],
    "msdnet7": [6859876, 14350024, 27291436, 48448912, 76432628, 108850520, 137280956],
    "ranet-c1": [8372324, 21788360, 32878892, 41570192, 53283828, 58990680],
}
GIGA_MUL_ADDS = {
    "msdnet-imagenet-s4": [".33990", ".68546", "1.00816", "1.25447", "1.36053"],
    "msdnet-imagenet-s6": [".33990", ".92419", "1.51743", "1.99160", "2.19442"],
    "msdnet-imagenet-s7": [".33990", "1.05827", "1.81188", "2.42216", "2.68444"],
}
MEGA_PARAMS = {
    "msdnet5": [".2997", ".6497", "1.0183", "1.4924", "2.0789"],
    "msdnet7": [".2997", ".6497", "1.1114", "1.7272", "2.3850", "3.0522", "3.9667"],
    "ranet-c1": [".3587", ".8999", "1.3050", "1.8007", "2.1882", "2.6173"],
    "msdnet-imagenet-s4": ["4.2385", "8.7722", "13.0733", "16.7484", "23.9584"],
    "msdnet-imagenet-s6": ["4.2385", "10.7760", "17.8429", "24.5814", "38.6789"],
    "msdnet-imagenet-s7": ["4.2385", "11.8892", "20.5772", "29.1584", "47.5448"],
}


@pytest.mark.parametrize("name", MEGA_PARAMS)
def test_costs_equal_the_papers_to_the_last_digit(name: str) -> None:
    with torch.device("meta"):
        costs = exit_costs(create_model(name))
    assert [f"{c.params / 1e6:.4f}".lstrip("0") for c in costs] == MEGA_PARAMS[name]
    if name in MUL_ADDS:
        assert [c.mul_adds for c in costs] == MUL_ADDS[name]
    else:
        assert [f"{c.mul_adds / 1e9:.5f}".lstrip("0") for c in costs] == GIGA_MUL_ADDS[name]
    assert all(c.macs < c.mul_adds for c in costs)


@pytest.mark.parametrize("name", ["msdnet5", "msdnet7", "msdnet-tiny", "ranet-c1"])
def test_the_lazy_schedule_never_costs_more(name: str) -> None:
    model = create_model(name)
    assert isinstance(model, CellNet | Cascade)
    eager = exit_costs(model)
    lazy = exit_costs(model.set_schedule("lazy"))
    assert all(a.mul_adds >= b.mul_adds for a, b in zip(eager, lazy, strict=True))
    assert eager[-1] == lazy[-1]
    if name.startswith("msdnet"):
        assert lazy[0].mul_adds < eager[0].mul_adds


def test_all_params_are_counted_at_the_last_exit() -> None:
    for name in ("msdnet-tiny", "ranet-c2"):
        model = create_model(name)
        assert exit_costs(model)[-1].params == sum(p.numel() for p in model.parameters())


def test_costs_are_cached_and_leave_the_model_alone() -> None:
    model = create_model("msdnet-tiny").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = exit_costs(model)
    assert exit_costs(model) is first
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_network_of_ones_own_counts_by_hand() -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(self.conv(x))

    heads = [nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)) for _ in range(2)]
    second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 1, bias=False), nn.Upsample(scale_factor=2))
    model = ExitNet.from_parts([Trunk(), second], heads, input_shape=(3, 16, 16))
    one, two = exit_costs(model)
    conv, relu, pool, linear = 16 * 16 * 4 * 27, 16 * 16 * 4, 4 * 4 * 4 * 16, 64 * 5
    assert one.macs == conv + linear
    assert one.mul_adds == conv + relu + pool + linear + 5
    assert one.params == 4 * 27 + 4 + 64 * 5 + 5
    max_pool, one_by_one = 8 * 8 * 4 * 4, 8 * 8 * 16
    assert two.macs == one.macs + one_by_one + linear
    assert two.mul_adds == one.mul_adds + max_pool + one_by_one + pool + linear + 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"blocks": (1, 1, 2)}, "never be used"),
        ({"growht": 3}, "did you mean 'growth'"),
        ({"image_size": 16}, "too small"),
        ({"scales": 4}, "between 1 and 3"),
        ({"growth": 0}, "growth must be"),
        ({"schedule": "late"}, "eager, lazy"),
        ({"stem": "cfar"}, "cifar, strided, imagenet"),
    ],
)
def test_bad_overrides_are_refused_with_a_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create_model("msdnet5", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": [2, 2, 2], "growth": 4, "factors": [1, 2, 2], "image_size": 48},
        {"blocks": (1, 1), "scales": 2},
        {"blocks": (1, 2), "scales": 1},
        {"growth": 5, "base_width": 7, "blocks": (2, 4)},
    ],
)
def test_overrides_build_other_sizes(settings: dict[str, object]) -> None:
    model = create_model("msdnet5", num_classes=7, **settings)
    outs = model(images(model))
    assert [tuple(o.shape) for o in outs] == [(2, 7)] * len(settings["blocks"])  # type: ignore[arg-type]
    assert exit_costs(model)[-1].params == sum(p.numel() for p in model.parameters())


def test_ranet_refuses_what_it_cannot_build() -> None:
    with pytest.raises(ValueError, match="must grow"):
        create_model("ranet-c1", blocks=(2, 2, 6))
    with pytest.raises(ValueError, match="scales must start at 1"):
        create_model("ranet-c1", scales=(1, 3, 3))


def test_from_parts_wants_a_head_per_stage() -> None:
    with pytest.raises(ValueError, match="one head per stage"):
        ExitNet.from_parts([nn.Identity()], [])


def test_costs_do_not_depend_on_the_precision() -> None:
    for build in (lambda: create_model("msdnet-tiny"), lambda: from_parts_with_biases()):
        assert exit_costs(build().double()) == exit_costs(build())


def from_parts_with_biases() -> ExitNet:
    return ExitNet.from_parts([nn.Conv2d(3, 4, 3)], [nn.Sequential(nn.Flatten(), nn.Linear(3600, 5))])
