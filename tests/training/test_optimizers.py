"""Groups of params, rates that rise and fall, and the average of the params."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.nets import Net, batch
from helpers.runs import Config, resumed, same_weights
from helpers.training import by, learned, problem_of
from offramp import ExitNet, cascade, create_model
from offramp.models.weights import read_tensors
from offramp.runs.folder import read_metrics
from offramp.training.ema import Ema
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.objectives import Half
from offramp.training.optimizers import new_optimizer, rate_factors, rate_share, set_rate
from offramp.training.param_stages import param_stages
from offramp.training.step import train_step
from offramp.training.train import train_run

SMALL = {"blocks": (1, 1, 1), "base_width": 4, "growth": 4, "head_width": 4}
GROUPED = ("train.depth_decay=0.5", "train.head_rate=3", "train.decay_norms=false")


def test_a_params_stage_is_the_first_exit_that_reads_it() -> None:
    shared = nn.Linear(3, 3)
    stages = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), shared, nn.Sequential(shared, nn.Linear(3, 3))]
    net = ExitNet.from_parts(stages, [nn.Linear(3, 2) for _ in range(3)], input_shape=(1, 1, 3))
    net.heads = nn.ModuleList(nn.Sequential(nn.Flatten(), head) for head in net.heads)
    net.stages[0] = nn.Sequential(nn.Flatten(), *net.stages[0])
    net.register_parameter("unread", nn.Parameter(torch.zeros(1)))
    found = param_stages(net)
    assert found.keys() == dict(net.named_parameters()).keys()
    by_name = {"stages.0.": 1, "stages.1.": 2, "stages.2.1": 3, "heads.0": 1, "heads.1": 2, "heads.2": 3, "unread": 3}
    for name, stage in found.items():
        assert stage == next(k for prefix, k in by_name.items() if name.startswith(prefix)), name
    ours = param_stages(create_model("msdnet-tiny", **SMALL))
    assert param_stages(net.double()) == found
    assert {k for n, k in ours.items() if n.startswith("cells.layer02")} == {2}


def test_groups_have_their_rates_and_decays(small_config: Config) -> None:
    model = create_model("msdnet-tiny", **SMALL)
    config = small_config(*GROUPED, "train.learning_rate=0.8", "train.weight_decay=0.01").train
    optimizer = new_optimizer(model, config)
    set_rate(optimizer, 0.4)
    stages, names = param_stages(model), {p: n for n, p in model.named_parameters()}
    seen = set()
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[param]
            seen.add(name)
            head = 3 if name.startswith("heads.") else 1
            assert group["lr"] == pytest.approx(0.4 * 0.5 ** (3 - stages[name]) * head)
            assert group["weight_decay"] == (0.01 if param.ndim > 1 else 0)
    assert seen == set(names.values())
    plain = new_optimizer(model, small_config().train)
    assert len(plain.param_groups) == 1


def test_depth_is_counted_within_each_network_of_a_cascade(small_config: Config) -> None:
    small, large = (create_model("msdnet-tiny", 4, **SMALL) for _ in range(2))
    own = rate_factors(small, small_config("train.depth_decay=0.5").train)
    both = cascade([small, large], [32, 32])
    assert both.ends == (small.num_exits, 2 * small.num_exits) and small.ends == (small.num_exits,)
    found = rate_factors(both, small_config("train.depth_decay=0.5").train)
    for place in range(2):
        assert {name: found[f"members.{place}.{name}"] for name in own} == own


def test_adamw_needs_a_rate_of_its_own(small_config: Config) -> None:
    with pytest.raises(ValueError, match="train.optimizer=adamw needs train.learning_rate"):
        new_optimizer(create_model("msdnet-tiny", 4, **SMALL), small_config("train.optimizer=adamw").train)


TINY = {"depth": 1, "embed_dim": 12, "num_heads": 3}
SWIN = {"depths": (1, 1, 1, 1), "embed_dim": 12, "num_heads": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "options", "spared"),
    [
        ("timm/deit_tiny_distilled_patch16_224", TINY, ("cls_token", "dist_token", "pos_embed")),
        ("timm/swin_tiny_patch4_window7_224", SWIN, ("relative_position_bias_table",)),
    ],
)
def test_what_timm_spares_weight_decay_is_spared(
    small_config: Config, name: str, options: dict[str, object], spared: tuple[str, ...]
) -> None:
    single = create_model(name, 4, exits=1, image_size=32, options=options)
    for model in (single, cascade([single, single], [32, 32])):
        names = {p: n for n, p in model.named_parameters()}
        optimizer = new_optimizer(model, small_config("train.decay_norms=false", "train.weight_decay=0.01").train)
        kept = {names[p] for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
        assert kept == {n for p, n in names.items() if p.ndim < 2 or n.endswith(spared)}
        assert any(n.endswith(spared) and p.ndim > 1 for p, n in names.items())


@pytest.mark.parametrize("exits", [1, 2])
def test_classifiers_that_are_no_heads_have_the_heads_rate(small_config: Config, exits: int) -> None:
    """DeiT answers with the mean of two."""
    options = TINY | {"depth": 2}
    model = create_model("timm/deit_tiny_distilled_patch16_224", 4, exits=exits, image_size=32, options=options)
    factors = rate_factors(model, small_config("train.head_rate=3").train)
    fast = {name for name, factor in factors.items() if factor == 3}
    assert fast == {n for n in factors if n.startswith(("heads.", "backbone.head.", "backbone.head_dist."))}
    assert len([n for n in fast if n.startswith("backbone")]) == 4


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_the_meta_gradient_is_exact_with_groups_and_dropout(small_config: Config, rule: str) -> None:
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", 4, head_dropout=0.3, **SMALL).double()
    config = small_config(*GROUPED, f"train.optimizer={rule}", "train.learning_rate=0.01", "train.weight_decay=0.05")
    optimizer = new_optimizer(model, config.train)
    draw = torch.Generator().manual_seed(0)
    halves = [
        Half(torch.randn(8, 3, 32, 32, generator=draw).double(), torch.randint(0, 4, (8,), generator=draw))
        for _ in range(2)
    ]
    images, labels = torch.cat([h.images for h in halves]), torch.cat([h.labels for h in halves])
    for step in range(3):  # second moments that are not fresh
        train_step(model, optimizer, by(learned(3, double=True)), images, labels, step)
    weights = torch.linspace(0.5, 1.5, 24).view(8, 3).double()
    given = problem_of(model, optimizer, halves[0], weights, halves[1])
    found = []
    for engine in ("double_backward", "forward_mode"):
        torch.manual_seed(5)
        found.append(ESTIMATORS[engine](given).weights_BK)
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-12)


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    shares = [rate_share(step, 12, 4) for step in range(12)]
    assert shares[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1]) and shares[8] == pytest.approx(0.5)
    assert [rate_share(step, 4) for step in range(4)] == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_a_warm_up_takes_half_of_training_at_most() -> None:
    assert [rate_share(step, 12, 50) for step in range(12)] == [rate_share(step, 12, 6) for step in range(12)]
    assert rate_share(0, 1, 50) == 1.0


def test_the_average_is_the_formula_and_the_look_ahead_leaves_it_alone() -> None:
    torch.manual_seed(0)
    model = Net().double()
    ema = Ema(model, decay=0.3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expected = {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}
    updates = []
    plain = ema.update

    def noted() -> None:
        updates.append({n: t.clone() for n, t in model.state_dict().items()})
        plain()

    ema.update = noted  # type: ignore[method-assign]
    (a, b), (c, d) = batch(1), batch(2)
    for step in range(3):
        train_step(model, optimizer, by(learned(3, double=True), ema=ema), torch.cat([a, c]), torch.cat([b, d]), step)
    assert len(updates) == 6  # one for each real update, none for a look-ahead
    for t, seen in enumerate(updates, start=1):
        decay = min(0.3, (1 + t) / (10 + t))
        expected = {n: decay * e + (1 - decay) * seen[n] for n, e in expected.items()}
    for name, average in ema.averages.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-9)
    assert "blocks.0.0.bias" not in ema.averages and "blocks.0.1.running_mean" in ema.averages
    own = copy.deepcopy(model.state_dict())
    with ema.in_place():
        assert torch.equal(model.state_dict()["heads.0.weight"], ema.averages["heads.0.weight"])
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("weighting", ["uniform", "learned"])
def test_a_run_with_all_of_it_resumes_bit_for_bit(tmp_path: Path, small_config: Config, weighting: str) -> None:
    settings = (
        *GROUPED,
        "train.ema=0.9",
        "train.warm_up_steps=5",
        "train.optimizer=adamw",
        "train.learning_rate=0.003",
        "model.overrides.head_dropout=0.2",
        f"weighting.name={weighting}",
    )
    config = small_config(*settings)
    run = train_run(config, tmp_path / "run", device="cpu")
    last, kept = read_tensors(run / "last" / "ema.safetensors"), read_tensors(run / "model.safetensors")
    raw = read_tensors(run / "last" / "model.safetensors")
    assert torch.equal(last["average.heads.0.linear.weight"], kept["heads.0.linear.weight"])
    assert not torch.equal(raw["heads.0.linear.weight"], kept["heads.0.linear.weight"])
    rates = [row["learning_rate"] for row in read_metrics(run)]
    assert rates[0] == pytest.approx(0.003 * 4 / 5) and rates[1] > rates[2]
    assert same_weights(run, resumed(config, run, tmp_path / "again"))
