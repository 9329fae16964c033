"""Every family of timm, one small member each: cut and equal to the original, or refused with a sentence.

Run by hand: `pytest -m exhaustive tests/models/test_all_of_timm.py`, some 20 minutes.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

from offramp import with_exits
from offramp.models.cut import CannotCut

WANTED = 82  # families; what the facts about timm 1.0.30 promise
pytestmark = pytest.mark.exhaustive


def smallest(family: str) -> str | None:
    """The member with the fewest params x pixels; None where none can be built."""
    sizes = {}
    for name in timm.list_models(module=family, exclude_filters="test_*"):
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            try:
                model = timm.create_model(name)
            except Exception:  # some need packages of their own
                continue
        sizes[name] = sum(p.numel() for p in model.parameters()) * model.pretrained_cfg["input_size"][-1] ** 2
    return min(sizes, key=sizes.__getitem__) if sizes else None


def images(samples: int, shape: tuple[int, int, int]) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples))


def equal(name: str) -> bool:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10).eval()
    shape = model.pretrained_cfg["input_size"]
    cut, twin = with_exits(model, 3, example=images(2, shape)).eval(), copy.deepcopy(model)
    for samples in (1, 3):
        with torch.no_grad():
            if not torch.equal(model(images(samples, shape)), cut(images(samples, shape))[-1]):
                return False
    answers = []
    for net, run in ((twin, twin), (cut, cut.last)):
        net.train()
        torch.manual_seed(1)
        answers.append(run(images(2, shape)))
        answers[-1].square().sum().backward()
    own, buffers = dict(cut.named_parameters()), dict(cut.named_buffers())
    gradients = [(p.grad, own[cut.own_name(n)].grad) for n, p in twin.named_parameters()]
    kept = [(buffer, buffers[cut.own_name(n)]) for n, buffer in twin.named_buffers()]
    same = all(a is b is None or torch.equal(a, b) for a, b in [*gradients, *kept])
    return same and torch.equal(*answers)


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
def test_families_are_cut_or_refused() -> None:
    good, refused, bad, absent = [], {}, [], []
    for family in timm.list_modules():
        name = smallest(family)
        if name is None:
            absent.append(family)
            continue
        try:
            (good if equal(name) else bad).append(name)
        except CannotCut as error:
            refused[name] = str(error)
        print(f"{name}: {refused.get(name, 'unequal' if name in bad else 'equal')}", flush=True)
    print(f"{len(good)} equal, {len(refused)} refused, unequal: {bad}, without a member that can be built: {absent}")
    assert not bad
    assert len(good) >= WANTED
    advice = ("ask for fewer, or name modules", "ExitNet.from_parts", "another module", "wrap it in a module")
    assert all(any(words in sentence for words in advice) for sentence in refused.values())
