"""Algorithm 1: in the trainer, and for people with their own network and loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.nets import Theirs, loader, same
from helpers.runs import resumed, same_weights
from helpers.training import learned as weighting_of
from helpers.training import settings as settings_of
from offramp import LearnedWeights
from offramp.models.weights import read_tensors
from offramp.runs.config import RunConfig
from offramp.runs.folder import read_metrics
from offramp.training.objectives import exit_losses
from offramp.training.train import train_run
from offramp.training.weighting import Context, LearnedWeighting

Config = Callable[..., RunConfig]


def test_range_zero_is_the_baseline_in_the_trainer(tmp_path: Path, small_config: Config) -> None:
    runs = [
        train_run(small_config(*settings), tmp_path / str(at), device="cpu")
        for at, settings in enumerate(
            [(), ("weighting.name=learned", "weighting.delta=0"), ("weighting.name=learned",)]
        )
    ]
    weights = [read_tensors(run / "model.safetensors") for run in runs]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])  # 24 updates
    assert not all(torch.equal(weights[0][k], weights[2][k]) for k in weights[0])
    assert "meta_loss" in read_metrics(runs[2])[-1] and "meta_loss" not in read_metrics(runs[0])[-1]


def test_learned_training_resumes_bit_for_bit(tmp_path: Path, small_config: Config) -> None:
    import shutil

    learned = ("weighting.name=learned", "weighting.interval=2")
    run = train_run(small_config(*learned), tmp_path / "run", device="cpu")
    again = tmp_path / "again"
    shutil.copytree(run, again)
    (again / "model.safetensors").unlink()
    shutil.rmtree(again / "last")
    (again / "last.1").rename(again / "last")  # one step back
    train_run(small_config(*learned), again, device="cpu", resume=True)
    for part in ("model", "optimizer", "weighting"):
        a, b = (read_tensors(r / "last" / f"{part}.safetensors") for r in (run, again))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_weight_net_learns_until_it_is_told_to_stop(tmp_path: Path, small_config: Config) -> None:
    def net(run: Path) -> dict[str, torch.Tensor]:
        tensors = read_tensors(run / "last" / "weighting.safetensors")
        return {name: tensor for name, tensor in tensors.items() if name.startswith("net")}

    learned = ("weighting.name=learned", "train.epochs=2")
    half = train_run(small_config(*learned, "weighting.until=0.5"), tmp_path / "half", device="cpu")
    never = train_run(small_config(*learned, "weighting.until=0"), tmp_path / "never", device="cpu")
    assert ["meta_loss" in row for row in read_metrics(half)] == [True, False]
    assert ["meta_loss" in row for row in read_metrics(never)] == [False, False]
    untouched = weighting_of(2, seed=small_config().seed).tensors()
    assert net(half).keys() == net(never).keys() and net(never)
    for name, tensor in net(never).items():
        torch.testing.assert_close(tensor, untouched[name])
    assert any(not torch.equal(tensor, net(never)[name]) for name, tensor in net(half).items())


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_weights_are_one_until_the_weight_net_begins(tmp_path: Path, small_config: Config, order: str) -> None:
    learned = ("weighting.name=learned", "weighting.since=0.5", "weighting.interval=2", f"weighting.order={order}")
    config = small_config(*learned, "train.epochs=2")
    late = train_run(config, tmp_path / "late", device="cpu")
    plain = train_run(small_config("train.epochs=2"), tmp_path / "plain", device="cpu")
    rows = {run: read_metrics(run) for run in (late, plain)}
    assert ["meta_loss" in row for row in rows[late]] == [False, True]
    same = [rows[late][epoch]["train_loss"] == rows[plain][epoch]["train_loss"] for epoch in (0, 1)]
    assert same == [True, False]  # the first epoch is that of uniform weights, bit for bit
    kept = [np.load(late / "samples" / f"epoch-000{epoch}.npz")["weights"] for epoch in (1, 2)]
    assert (kept[0] == 1).all() and np.ptp(kept[1]) > 0
    assert same_weights(late, resumed(config, late, tmp_path / "again"))


def test_one_graph_serves_before_and_after_the_weight_net_begins() -> None:
    """What a captured step reads changes in place: `learns` alone tells graphs apart."""
    losses, confidences = torch.rand(8, 2), torch.rand(8, 2)
    late = LearnedWeighting(settings_of(since=0.5, interval=3), Context(2, total_steps=10))
    always = LearnedWeighting(settings_of(), Context(2, total_steps=10))
    place = late.delta.data_ptr()  # type: ignore[union-attr]
    assert [late.learns(step) for step in range(10)] == [step in (6, 9) for step in range(10)]
    for step in (0, 4, 5, 9):
        late.begin_step(step)
        found = late.weights(losses, confidences)
        wanted = torch.ones(8, 2) if step < 5 else always.weights(losses, confidences)
        assert torch.equal(found, wanted) and late.delta.data_ptr() == place  # type: ignore[union-attr]


def test_a_loop_of_their_own_can_begin_late() -> None:
    torch.manual_seed(0)
    model = Theirs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = LearnedWeights(model, optimizer, num_exits=2, total_steps=4, since=0.5)
    logs = [weights.step(x, y) for x, y in loader(4)]
    assert ["meta_loss" in log for log in logs] == [False, False, True, True]
    assert [log["weight/max"] > 1 for log in logs] == [False, False, True, True]


def test_every_weighting_trains_and_keeps_samples(tmp_path: Path, small_config: Config) -> None:
    learned = train_run(small_config("weighting.name=learned", "train.epochs=1"), tmp_path / "learned", device="cpu")
    frozen = ("weighting.name=frozen", f'weighting.from_run="{learned}"')
    for at, settings in enumerate(
        [
            ("weighting.name=ascending",),
            ("weighting.name=fixed", "weighting.exits=[1.2, 0.8]"),
            ("weighting.name=selection",),
            frozen,
        ]
    ):
        run = train_run(small_config(*settings, "train.epochs=1"), tmp_path / str(at), device="cpu")
        kept = np.load(run / "samples" / "epoch-0001.npz")
        assert {name: kept[name].shape for name in kept} == {
            "losses": (32, 2),
            "confidences": (32, 2),
            "weights": (32, 2),
            "exits": (32,),
        }
    net = read_tensors(learned / "last" / "weighting.safetensors")
    same_net = read_tensors(run / "last" / "weighting.safetensors")
    assert all(torch.equal(net[k], same_net[k]) for k in same_net) and same_net
    np.testing.assert_allclose(kept["weights"].mean(1), 1, atol=1e-6)
    uniform = train_run(small_config("train.epochs=1"), tmp_path / "uniform", device="cpu")
    for words, bad in (
        ("holds no finished weight net", ("weighting.name=frozen", f'weighting.from_run="{uniform}"')),
        ("has 3 weights, the network has 2 exits", ("weighting.name=fixed", "weighting.exits=[1, 1, 1]")),
    ):
        with pytest.raises(ValueError, match=words):
            train_run(small_config(*bad), tmp_path / "bad", device="cpu")
        assert not (tmp_path / "bad").exists()  # the next try may take the same folder


def test_their_own_loop_with_a_scheduler_and_saved_state() -> None:
    def make() -> tuple[Theirs, torch.optim.Optimizer, LearnedWeights]:
        torch.manual_seed(0)
        model = Theirs()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, LearnedWeights(model, optimizer, num_exits=2, total_steps=30)

    model, optimizer, weights = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    saved: dict[str, object] = {}
    logs = []
    for at, (x, y) in enumerate(loader(30)):
        if at == 20:
            saved = copy.deepcopy([m.state_dict() for m in (model, optimizer, scheduler, weights)])  # type: ignore[assignment]
        torch.manual_seed(at)
        logs.append(weights.step(x, y))
        scheduler.step()
    assert logs[-1]["loss"] < 0.6 * logs[0]["loss"]
    assert {"loss", "loss/exit1", "loss/exit2", "meta_loss", "weight/min", "weight/max"} == set(logs[0])
    assert all(type(v) is float for v in logs[0].values())
    again, optimizer2, weights2 = make()
    scheduler2 = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer2, 30)
    for part, state in zip((again, optimizer2, scheduler2, weights2), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    for at, (x, y) in list(enumerate(loader(30)))[20:]:
        torch.manual_seed(at)
        weights2.step(x, y)
        scheduler2.step()
    assert same(model, again)
    assert same(weights.weighting.net, weights2.weighting.net)


def test_mistakes_get_a_sentence(tmp_path: Path, small_config: Config) -> None:
    model = Theirs()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="centring 'exits' is unknown; did you mean 'exit'"):
        LearnedWeights(model, sgd, num_exits=2, centring="exits")
    with pytest.raises(ValueError, match="got Adagrad"):
        LearnedWeights(model, torch.optim.Adagrad(model.parameters()), num_exits=2)
    with pytest.raises(ValueError, match="at least two samples"):
        LearnedWeights(model, sgd, num_exits=2).step(torch.randn(1, 8), torch.tensor([0]))
    with pytest.raises(ValueError, match="the network gives 2 exits, the weight net is for 3"):
        LearnedWeights(model, sgd, num_exits=3).step(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="until must lie between 0 and 1"):
        LearnedWeights(model, sgd, num_exits=2, until=2, total_steps=9)
    with pytest.raises(ValueError, match="needs total_steps"):
        LearnedWeights(model, sgd, num_exits=2, until=0.5)
    with pytest.raises(ValueError, match="since, a share of training, needs total_steps"):
        LearnedWeights(model, sgd, num_exits=2, since=0.5)
    with pytest.raises(ValueError, match=r"since must lie below weighting\.until, got 0\.5 and 0\.5"):
        small_config("weighting.since=0.5", "weighting.until=0.5")
    with pytest.raises(ValueError, match="clipping by global norm"):
        train_run(small_config("weighting.name=learned", "train.clip_norm=1"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"needs weighting\.from_run"):
        small_config("weighting.name=frozen")
    small_config("train.clip_norm=1")


def test_an_odd_batch_is_split_as_evenly_as_it_goes() -> None:
    torch.manual_seed(0)
    model = Theirs()
    weights = LearnedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1), num_exits=2)
    x, y = loader(1, 33)[0]
    before = exit_losses(model(x), y).mean()
    for _ in range(5):
        weights.step(x, y)
    assert exit_losses(model(x), y).mean() < before
