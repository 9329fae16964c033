"""Cut networks, cascades and carried logits: whoever runs their stages gives the network's own answer at the same exit.

In float64 for every sample, whatever the batch and its order. In float32 for those that are not within 1e-4 of a
threshold: evaluation, walk, runtime, pool, torch bundle, ONNX bundle and HTTP application.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import nn

import offramp
from helpers.engines import policy, pooled
from offramp import ExitNet, cascade, create_model
from offramp.common.images import Preprocessing
from offramp.measuring.confidence import confidences
from offramp.measuring.policy import Policy, exits_taken, shares_of
from offramp.models.fold import folded
from offramp.running.engines.protocol import Engine, all_logits
from offramp.running.engines.torch_engine import TorchEngine
from offramp.running.runtime import Runtime
from offramp.runs.outputs import read_outputs
from offramp.serve import ServeConfig, create_app

SIZE, CLASSES, SAMPLES = 32, 4, 48
NEAR = 1e-4
PREPARED = Preprocessing(SIZE, SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
PIXELS = np.random.default_rng(0).integers(0, 256, (SAMPLES, 3, SIZE, SIZE), dtype=np.uint8)
IMAGES = PREPARED.normalise(PIXELS)
LABELS = np.arange(SAMPLES) % CLASSES


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


def one_network_at_two_sizes() -> ExitNet:
    net = create_model("timm/test_resnet", CLASSES, exits=2, image_size=SIZE)
    return cascade([net, net], [24, SIZE])


@dataclass(frozen=True)
class Known:
    """A network, a policy under which many leave everywhere, and what comes of it in float64; `safe` in float32."""

    model: ExitNet
    policy: Policy
    logits: np.ndarray
    exits: np.ndarray
    labels: np.ndarray
    safe: np.ndarray

    def agrees(self, exits: Any, labels: Any, all_of_them: bool = False) -> bool:
        rows = np.arange(SAMPLES) if all_of_them else np.flatnonzero(self.safe)
        same = np.asarray(exits)[rows] == self.exits[rows]
        return bool(same.all() and (np.asarray(labels)[rows] == self.labels[rows]).all())


@pytest.fixture(
    scope="module",
    params=[cut_resnet, cut_vit, boosted, two_sizes, one_network_at_two_sizes],
    ids=lambda build: build.__name__,
)
def known(request: pytest.FixtureRequest) -> Known:
    torch.manual_seed(0)
    model = settled(request.param)
    with torch.inference_mode():
        logits = torch.stack(model.double()(torch.from_numpy(IMAGES).double())).numpy()
    model.float()
    sure = confidences(logits, "max_softmax")
    thresholds = np.array([in_a_gap(own) for own in sure[:-1]])
    exits = exits_taken(sure, tuple(thresholds))
    reached = np.arange(1, len(sure))[:, None] <= exits
    near = (reached & (np.abs(sure[:-1] - thresholds[:, None]) < NEAR)).any(0)
    said = logits[exits - 1, np.arange(SAMPLES)]
    best = np.sort(said)[:, -2:]
    safe = ~near & (best[:, 1] - best[:, 0] > NEAR)
    assert safe.mean() > 0.9 and set(exits) == set(range(1, len(sure) + 1))
    own = replace(policy(*thresholds.tolist()), shares=shares_of(exits, len(sure)))
    return Known(model, own, logits, exits, said.argmax(-1), safe)


def settled(build: Callable[[], ExitNet]) -> ExitNet:
    """With running statistics of its own, and not quite so unsure as fresh networks are."""
    model = build().train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.from_numpy(IMAGES))
        for linear in {part for head in model.heads for part in head.modules() if isinstance(part, nn.Linear)}:
            linear.weight.mul_(4)
    return model.eval()


def in_a_gap(sure: np.ndarray) -> float:
    """About the median: in the middle between two samples."""
    ordered = np.sort(sure)
    return float(ordered[SAMPLES // 2 - 1 : SAMPLES // 2 + 1].mean())


def orders() -> Iterator[tuple[np.ndarray, int]]:
    draw = np.random.default_rng(1)
    return ((draw.permutation(SAMPLES), size) for size in (1, 7, SAMPLES))


def found_by_runtime(engine: Engine, known: Known, order: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    runtime = Runtime(engine, known.policy, range(1, engine.num_exits + 1))
    exits, labels = np.zeros(SAMPLES, np.int64), np.zeros(SAMPLES, np.int64)
    for begin in range(0, SAMPLES, size):
        rows = order[begin : begin + size]
        result = runtime(IMAGES[rows])
        exits[rows], labels[rows] = result.exits, result.labels
    return exits, labels


@pytest.mark.parametrize("folds", [False, True])
def test_in_float64_every_sample_has_its_exit_and_answer(known: Known, folds: bool) -> None:
    model = copy.deepcopy(known.model).double()
    engine = TorchEngine(folded(model) if folds else model, dtype=torch.float64)
    np.testing.assert_allclose(all_logits(engine, IMAGES), known.logits, rtol=1e-9, atol=1e-9)
    for order, size in orders():
        assert known.agrees(*found_by_runtime(engine, known, order, size), all_of_them=True)
    for batch, arriving in ((8, 3), (5, 7), (SAMPLES, 16)):
        left = pooled(engine, known.policy, IMAGES, batch, arriving)
        assert known.agrees([one.exit for one in left], [one.label for one in left], all_of_them=True)


def test_evaluation_bundles_and_server_agree(known: Known, tmp_path: Path) -> None:
    loader = [(torch.from_numpy(IMAGES[at : at + 9]), torch.from_numpy(LABELS[at : at + 9])) for at in range(0, 48, 9)]
    run, names = tmp_path / "run", tuple("abcd")
    offramp.evaluate(known.model, calibration=loader, test=loader, out=run, classes=names, preprocessing=PREPARED)
    saved = np.asarray(read_outputs(run, "test").logits)
    assert known.agrees(*exits_and_labels(saved, known.policy))
    with torch.inference_mode():
        walked = torch.stack(known.model(torch.from_numpy(IMAGES))).numpy()
    assert known.agrees(*exits_and_labels(walked, known.policy))
    offramp.calibrate(run)
    for kind in ("torch", "onnx"):
        bundle = offramp.load_bundle(offramp.export(known.model, run, out=tmp_path / kind, format=kind), device="cpu")
        np.testing.assert_allclose(all_logits(bundle.engine, IMAGES), known.logits, rtol=1e-3, atol=NEAR)
        for order, size in orders():
            assert known.agrees(*found_by_runtime(bundle.engine, known, order, size))
        left = pooled(bundle.engine, known.policy, IMAGES)
        assert known.agrees([one.exit for one in left], [one.label for one in left])
        assert known.agrees(*served(bundle, known.policy))


def exits_and_labels(logits: np.ndarray, own: Policy) -> tuple[np.ndarray, np.ndarray]:
    exits = exits_taken(confidences(logits, "max_softmax"), own.thresholds)
    return exits, logits[exits - 1, np.arange(SAMPLES)].argmax(-1)


def served(bundle: offramp.Bundle, own: Policy) -> tuple[list[int], list[int]]:
    """What the HTTP application answers, to lone images and to many at once."""
    files = [("images", (f"{at}.png", png(pixels))) for at, pixels in enumerate(PIXELS)]
    found = []
    with TestClient(create_app(bundle, ServeConfig(reveal_exit=True, batch=8), own)) as client:
        for some in (files[:1], files[1:4], files[4:]):
            found += client.post("/predict", files=some).raise_for_status().json()["predictions"]
    return [one["exit"] for one in found], [one["class"] for one in found]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()
