"""What ships: a choice that brings nothing on this machine gives way, and times come from photos that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from offramp import load_bundle
from offramp.fitting import timing
from offramp.fitting.candidates import Candidate, reference_of
from offramp.fitting.choice import Choice, Network, Point, single_network
from offramp.fitting.plan import photo_bytes, stay_on_device
from offramp.fitting.saved import Logits
from offramp.fitting.sentences import Speed
from offramp.fitting.shipping import Compared, Shipped, Shipping
from offramp.fitting.timing import Serving, by_turns
from offramp.measuring.calibrate import SPLIT_SEED, PolicyRequest
from offramp.measuring.confidence import Predictions
from offramp.measuring.risk import halves
from offramp.running.runtime import ExitResult

COSTS = {"large": 200, "middle": 120, "small": 100, "both": 110}
MS = {"large": 10.0, "middle": 6.0, "small": 5.0, "both": 9.9}


def made(ms: dict[str, float], request: PolicyRequest) -> Any:
    """Four networks of which `both`, a cascade, is the cheapest that is good enough, and `small` is not good enough."""
    right = np.ones((4, 3000), bool)
    right[2, :300] = False
    given = [Predictions(np.ones((1, 3000), np.float32), own[None]) for own in right]
    family = {"both": "cascade"}
    every = [Network(family.get(n, "single"), n, own, (COSTS[n],)) for n, own in zip(COSTS, given, strict=True)]
    curves = [[Point(COSTS[n], COSTS[n], ms[n], own)] for n, own in zip(COSTS, right, strict=True)]
    found = [Candidate(each.family, each.name, Path(each.name)) for each in every]
    compared = Compared(found, every, curves, [], 1, {})
    made = Shipping(Path("out"), request, Serving(), torch.device("cpu"), compared, {})

    def exported(choice: Choice) -> Shipped:
        one = found[choice.network]
        speed = Speed(COSTS[one.name], ms[one.name], COSTS["large"], ms["large"])
        policies: Any = None
        return Shipped(choice, one, policies, Path("bundle"), speed, "")

    made._exported = exported  # type: ignore[method-assign]
    return made


def test_what_is_no_faster_gives_way_to_the_best_plain_network() -> None:
    """Not to the largest; to that only if no smaller one is faster."""
    cascade = Choice(3, 0, 0.0, (0.0, 0.0))
    shipped, why = made({**MS, "both": 5.5}, PolicyRequest()).settle(cascade)
    assert shipped.one.name == "both" and why is None
    shipped, why = made(MS, PolicyRequest()).settle(cascade)
    assert shipped.one.name == "middle" and why is not None and "the cascade both (100.0 % of 3,000 held-out" in why
    shipped, why = made({**MS, "middle": 9.8}, PolicyRequest()).settle(cascade)
    assert shipped.one.name == "large" and why is not None and "cascade both" in why
    shipped, why = made({**MS, "middle": 9.8}, PolicyRequest()).settle(Choice(1, 0, 0.0, (0.0, 0.0)))
    assert shipped.one.name == "large" and why is not None and "the plain network middle" in why
    shipped, why = made(MS, PolicyRequest()).settle(single_network())
    assert shipped.one.name == "large" and why is None
    shipped, why = made(MS, PolicyRequest(budget_mul_adds=115)).settle(cascade)
    assert shipped.one.name == "both" and why is None


def test_photos_that_cannot_be_read_are_not_timed(onnx_bundle: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path in paths:
        Image.new("RGB", (40, 40)).save(path)
    paths[0].write_bytes(b"no photo")
    Image.new("RGB", (80, 80)).save(paths[1])
    bundle, seen = load_bundle(onnx_bundle), []
    prepare = bundle.prepare
    bundle.prepare = lambda images: seen.append(images[0].size) or prepare(images)  # type: ignore[method-assign]
    found = by_turns(bundle, bundle, paths, 2, max_pixels=3000)
    assert min(found.ours, found.theirs, found.whole) > 0
    assert set(seen) == {(40, 40)}
    by_turns(bundle, bundle, paths, 8)  # more at a time than there are
    assert (80, 80) in seen
    with pytest.raises(ValueError, match="none of 1 held-out images can be read"):
        by_turns(bundle, bundle, paths[:1], 2)


def test_photos_leave_in_the_shares_of_unseen_ones_while_they_are_timed(
    onnx_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ships may have learned from the photos at hand: then it is surer of them than it will be of others."""
    bundle = load_bundle(onnx_bundle)
    for at in range(32):
        Image.new("RGB", (32, 32), (8 * at, 0, 0)).save(tmp_path / f"{at:02d}.png")
    taken: list[np.ndarray] = []
    run = timing._Planned.__call__

    def noted(self: timing._Planned, images: np.ndarray, plan: np.ndarray) -> ExitResult:
        result = run(self, images, plan)
        assert result.exits.tolist() == plan.tolist()
        taken.append(result.exits)
        return result

    monkeypatch.setattr(timing._Planned, "__call__", noted)
    by_turns(bundle, bundle, sorted(tmp_path.glob("*.png")), 32)
    wanted = bundle.policies.policy.shares
    assert np.bincount(taken[0] - 1, minlength=len(wanted)) / 32 == pytest.approx(wanted, abs=1 / 32)
    assert set(taken[1]) == {len(wanted)}


def test_a_promise_is_against_a_network_that_its_certifying_half_did_not_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choosing, certifying = halves(100, SPLIT_SEED)
    right = {"frozen": np.zeros(100, int), "tuned": np.zeros(100, int)}
    right["tuned"][certifying] = 1
    right["frozen"][choosing[:10]] = 1

    def said(one: Candidate, split: str) -> Logits:
        own = right[one.run.name]
        return Logits(np.eye(2)[own][None], np.ones(100, int), np.arange(100))

    monkeypatch.setattr(Candidate, "said", said)
    found = [Candidate("single", name, Path(name), (0,)) for name in right]
    assert reference_of(found).name == "tuned" and reference_of(found, promise=True).name == "frozen"


def test_photos_take_a_part_of_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 8 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    each = 3 * 384**2
    memory = photo_bytes(torch.device("cuda"))
    assert stay_on_device((2 << 30) // each, 192, memory) and not stay_on_device((2 << 30) // each + 1, 192, memory)
    assert not stay_on_device(1, 192, photo_bytes(torch.device("cpu")))
