"""Cut networks, cascades and carried logits as bundles: torch, ONNX, pool and server answer as the network does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import offramp
from offramp import ExitNet, cascade, create_model
from offramp.common.images import Preprocessing
from offramp.measuring.policy import Policy, exits_taken
from offramp.running.engines.protocol import all_logits
from offramp.running.pool import Pool, Ticket

SIZE, CLASSES = 32, 4
PREPARED = Preprocessing(SIZE, SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def cut_resnet() -> ExitNet:
    return create_model("timm/test_resnet", CLASSES, exits=3, image_size=SIZE, head="chained")


def cut_vit() -> ExitNet:
    options = {"depth": 3, "embed_dim": 48, "num_heads": 3}
    return create_model("timm/vit_tiny_patch16_224", CLASSES, exits=2, image_size=SIZE, options=options)


def boosted() -> ExitNet:
    return create_model("msdnet-tiny", CLASSES, carry=0.5)


def two_sizes() -> ExitNet:
    small, large = (create_model("timm/test_resnet", CLASSES, exits=n, image_size=s) for n, s in ((1, 24), (2, SIZE)))
    return cascade([small, large], [24, SIZE], carry=1.0)


def batches(seed: int, count: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(32, 3, SIZE, SIZE, generator=draw), torch.randint(CLASSES, (32,), generator=draw)


@pytest.mark.parametrize("build", [cut_resnet, cut_vit, boosted, two_sizes], ids=lambda build: build.__name__)
def test_a_bundle_answers_as_the_network_does(build: Callable[[], ExitNet], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    for _ in range(3):  # running statistics that are not those of a fresh network
        model.train()(next(batches(7))[0])
    model.eval()
    run, names = tmp_path / "run", tuple("abcd")
    offramp.evaluate(model, calibration=batches(1), test=batches(2), out=run, classes=names, preprocessing=PREPARED)
    offramp.calibrate(run)
    images = next(batches(3))[0]
    with torch.inference_mode():
        wanted = torch.stack(model(images)).numpy()
    for kind in ("torch", "onnx"):
        bundle = offramp.load_bundle(offramp.export(model, run, out=tmp_path / kind, format=kind), device="cpu")
        np.testing.assert_allclose(all_logits(bundle.engine, images.numpy()), wanted, rtol=1e-3, atol=1e-4)
        policy = spread(bundle, wanted)
        expected = exits_taken(sure(wanted), policy.thresholds)
        result = bundle.runtime(policy)(images.numpy())
        assert (result.exits == expected).mean() > 0.95  # but for ties within rounding
        agree = result.exits == expected
        assert (result.labels == wanted[expected - 1, np.arange(32)].argmax(-1))[agree].all()
        assert len(set(result.exits)) > 1
        assert (np.array(pooled(bundle, policy, images.numpy())) == result.labels).mean() > 0.95


def spread(bundle: offramp.Bundle, logits: np.ndarray) -> Policy:
    """A policy under which about half of those that are left leave at each exit."""
    return replace(bundle.policy(), thresholds=tuple(float(np.median(row)) for row in sure(logits)[:-1]))


def sure(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).amax(-1).numpy()


def pooled(bundle: offramp.Bundle, policy: Policy, images: np.ndarray) -> list[int]:
    pool, found = Pool(bundle.engine, policy, 8, 0.0), {}
    with bundle.engine.active():
        for at in range(0, len(images), 4):
            pool.add(images[at : at + 4], [Ticket(key, bundle.engine.num_exits) for key in range(at, at + 4)])
        while pool.waiting:
            found |= {left.ticket.key: left.label for left in pool.work(flush=True)}
    return [found[key] for key in range(len(images))]
