"""mixup and cutmix: what is mixed, who sees it mixed, and that the meta-gradient stays exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.nets import Net, batch, warm_up
from helpers.runs import Config, resumed, same_weights
from helpers.training import by, learned, problem_of, settings
from offramp import create_model
from offramp.runs.config import ObjectiveConfig
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.method import Method
from offramp.training.mixing import Mixing, own_shares
from offramp.training.objectives import Half, divergences, exit_losses, new_objective
from offramp.training.processes import Processes
from offramp.training.step import train_step
from offramp.training.train import train_run
from offramp.training.weighting import UniformWeighting

MIXUP, CUTMIX, BOTH = (Mixing(a, b, 4, 0) for a, b in ((0.8, 0.0), (0.0, 1.0), (0.8, 1.0)))


def images(n: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last), torch.arange(n) % 4


def test_mixup_mixes_neighbours() -> None:
    x, y = images()
    recipe = MIXUP.draw(3, (8, 8))[0]
    share = float(recipe[0])
    mixed, labels = MIXUP.mixed(x, y, recipe)
    assert 0 < share < 1 and not recipe[1:].any()
    torch.testing.assert_close(mixed[0], share * x[0] + (1 - share) * x[1])
    torch.testing.assert_close(mixed[5], share * x[5] + (1 - share) * x[4])
    torch.testing.assert_close(labels[1], share * F.one_hot(y[1], 4) + (1 - share) * F.one_hot(y[0], 4))
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    alone, hot = MIXUP.mixed(x[:3], y[:3], recipe)  # the last one of three has no partner
    torch.testing.assert_close(alone[2], x[2])
    torch.testing.assert_close(hot[2], F.one_hot(y[2], 4).float())


def test_cutmix_puts_a_box_of_the_neighbour_in_and_counts_its_pixels() -> None:
    x, y = images()
    seen = set()
    for step in range(20):
        recipe = CUTMIX.draw(step, (8, 8))[1]
        _, top, bottom, left, right = (int(v) for v in recipe)
        assert 0 <= top <= bottom <= 8 and 0 <= left <= right <= 8
        mixed, labels = CUTMIX.mixed(x, y, recipe)
        expected = x[0].clone()
        expected[:, top:bottom, left:right] = x[1][:, top:bottom, left:right]
        torch.testing.assert_close(mixed[0], expected)
        share = 1 - (bottom - top) * (right - left) / 64
        torch.testing.assert_close(labels[0], share * F.one_hot(y[0], 4) + (1 - share) * F.one_hot(y[1], 4))
        seen.add(share)
    assert len(seen) > 5


def test_draws_follow_from_seed_and_step_and_both_kinds_take_turns() -> None:
    assert torch.equal(BOTH.draw(5, (8, 8)), BOTH.draw(5, (8, 8)))
    assert not torch.equal(BOTH.draw(5, (8, 8)), BOTH.draw(6, (8, 8)))
    assert not torch.equal(BOTH.draw(5, (8, 8)), replace(BOTH, seed=1).draw(5, (8, 8)))
    cuts = [bool(own_shares(r, images()[0]).unique().numel() > 1) for s in range(20) for r in BOTH.draw(s, (8, 8))]
    assert 5 < sum(cuts) < 35


def test_several_processes_mix_as_one_does() -> None:
    x, y = images(16)
    recipe = MIXUP.draw(0, (8, 8))
    method = Method(UniformWeighting(), mixing=MIXUP)
    whole = torch.cat([half.images for half in method.halves(x, y, recipe)])
    for rank in range(2):
        places = Processes(rank, 2).own_places(16)
        own = torch.cat([half.images for half in method.halves(x[places], y[places], recipe)])
        assert torch.equal(own, whole[places])


def test_a_mixtures_best_loss_is_zero() -> None:
    labels = torch.tensor([[0.7, 0.3, 0, 0], [1.0, 0, 0, 0]], dtype=torch.float64)
    best = [labels.clamp(min=1e-30).log()]
    assert divergences(best, labels).abs().max() < 1e-12 and exit_losses(best, labels)[0, 0] > 0.6
    assert Half(labels, labels).classes.tolist() == [0, 0]


def test_hits_are_counted_against_the_larger_part() -> None:
    """With as many samples in a half as there are classes, a comparison with mixtures would not even fail."""

    class Says(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [F.one_hot(torch.arange(4) % 4, 4).float() + self.bias]

    x, y = images(8)
    recipe = torch.tensor([[0.9, 0, 0, 0, 0], [0.2, 0, 0, 0, 0]])
    model = Says()
    results = train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Method(UniformWeighting(), mixing=MIXUP), x, y, 0, recipe
    )
    assert [int(r.hits_K) for r in results] == [4, 0]  # mostly themselves; mostly their neighbours


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_the_meta_loss_sees_samples_as_they_are(order: str) -> None:
    """The meta loss of the first update, by hand: unmixed and unsmoothed, at the params after it."""
    torch.manual_seed(0)
    model = create_model("msdnet-tiny", 4, blocks=(1, 1), base_width=4, growth=4, head_width=4).double()
    x, y = torch.randn(8, 3, 32, 32).double(), torch.arange(8) % 4
    weighting = learned(2, delta=0.0, double=True, order=order, objective="whole")
    smoothed = new_objective(ObjectiveConfig("cross_entropy", {"label_smoothing": 0.1}))
    method = by(weighting, mixing=BOTH, objective=smoothed)
    recipe = BOTH.draw(1, (32, 32))
    first, second = method.halves(x, y, recipe)
    assert torch.equal(second.plain.images, x[4:]) and torch.equal(second.plain.labels, y[4:])
    twin = create_model("msdnet-tiny", 4, blocks=(1, 1), base_width=4, growth=4, head_width=4).double()
    twin.load_state_dict(model.state_dict())
    found = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), method, x, y, 0, recipe)[0]
    assert float(found.losses_BK.detach().min()) > 0
    torch.testing.assert_close(found.losses_BK, divergences(twin(first.images), first.labels).detach())
    twin.zero_grad()
    smoothed(twin(first.images), first).sum(1).mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    expected = exit_losses(twin(x[4:]), y[4:]).sum(1).mean()
    torch.testing.assert_close(found.meta_loss, expected.detach())


def test_the_meta_gradient_is_exact_with_mixtures() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm_up(model, optimizer, 5)
    (x, y), meta = batch(1), Half(*batch(2))
    hot = F.one_hot(y, 4).double()
    train = Half(0.6 * x + 0.4 * x.flip(0), 0.6 * hot + 0.4 * hot.flip(0), unmixed=Half(x, y))
    smoothed = new_objective(ObjectiveConfig("cross_entropy", {"label_smoothing": 0.1}))
    weights = torch.linspace(0.5, 1.5, 48).view(16, 3).double()
    given = problem_of(model, optimizer, train, weights, meta, Method(UniformWeighting(), settings(), smoothed))
    exact, ours, rough = (
        ESTIMATORS[e](given).weights_BK for e in ("double_backward", "forward_mode", "finite_difference")
    )
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-12)
    assert (rough - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize(
    "more", [(), ("weighting.name=learned",), ("weighting.name=learned", "weighting.order=delayed")]
)
def test_mixed_runs_resume_bit_for_bit(tmp_path: Path, small_config: Config, more: tuple[str, ...]) -> None:
    config = small_config("train.mixup=0.2", "train.cutmix=1.0", "train.epochs=2", *more)
    run = train_run(config, tmp_path / "run", device="cpu")
    assert not same_weights(run, train_run(small_config("train.epochs=2", *more), tmp_path / "plain", device="cpu"))
    assert same_weights(run, resumed(config, run, tmp_path / "again"))
