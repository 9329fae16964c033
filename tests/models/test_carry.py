"""Carried logits: what an exit answers when it adds what the exit before it answered, or reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offramp import ExitNet, create_model, exit_costs


def images(samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_an_exit_answers_with_a_running_sum() -> None:
    torch.manual_seed(0)
    plain = create_model("msdnet-tiny", 5).eval()
    boosted = create_model("msdnet-tiny", 5, carry=0.5).eval()
    boosted.load_state_dict(plain.state_dict())
    own, found = plain(images()), boosted(images())
    wanted = own[0]
    assert torch.equal(found[0], wanted)
    for logits, answer in zip(own[1:], found[1:], strict=True):
        wanted = logits + 0.5 * wanted
        assert torch.equal(answer, wanted)


def test_the_state_carries_the_answer_and_last_equals_the_walk() -> None:
    boosted = create_model("msdnet-tiny", 5, carry=1).eval()
    logits, state = boosted.step(1, (images(),))
    assert torch.equal(state[-1], logits)
    assert torch.equal(boosted.last(images()), boosted(images())[-1])


def test_earlier_heads_are_not_trained_by_later_answers() -> None:
    boosted = create_model("msdnet-tiny", 5, carry=0.5)
    boosted(images())[-1].sum().backward()
    assert all(p.grad is None for p in boosted.heads[0].parameters())
    assert all(p.grad is not None for p in boosted.heads[-1].parameters())


def test_it_can_be_saved_and_costs_as_before(tmp_path) -> None:
    from offramp import load_model

    boosted = create_model("msdnet-tiny", 5, carry=0.5).eval()
    again = load_model(boosted.save(tmp_path / "net")).eval()
    assert again.carry == 0.5
    assert all(map(torch.equal, again(images()), boosted(images())))
    assert exit_costs(boosted) == exit_costs(create_model("msdnet-tiny", 5))


@pytest.mark.parametrize("share", [-1, 1.5, "much", True])
def test_a_share_outside_its_range_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match="carry must be a number above 0"):
        create_model("msdnet-tiny", 5, carry=share)


def test_carry_and_collaboration_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="cannot go together"):
        create_model("msdnet-tiny", 5, carry=0.5, collaboration=True)


class ReadsBefore(nn.Module):
    reads_before = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, feature: Tensor, before: Tensor | None) -> Tensor:
        own = self.linear(feature.mean((2, 3)))
        return own if before is None else own - before


def test_a_head_of_ones_own_may_read_the_exit_before() -> None:
    stages = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)]
    model = ExitNet.from_parts(stages, [ReadsBefore(), ReadsBefore()]).eval()
    first, second = model(images())
    feature = stages[1](stages[0](images())).mean((2, 3))
    assert torch.equal(second, model.heads[1].linear(feature) - first)
    second.sum().backward()
    assert all(p.grad is None for p in model.heads[0].parameters())  # what it reads is not trained by it
