"""Milliseconds on this machine, with the engine, batch and threads that will serve: of each stage, and of two bundles.

Stage times decide where a budget in milliseconds is asked for; at the end the bundle and the single network answer the
same photos by turns, so that a busy moment hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from offramp.bench.infer import PlannedExits, Subject, plan_exits, stage_milliseconds
from offramp.common.device import pick_device
from offramp.common.images import MAX_PIXELS, UnreadableImage, read_image
from offramp.common.timing import timed_ms
from offramp.models.exits import ExitNet
from offramp.models.fold import folded
from offramp.running.bundle import Bundle, load_bundle
from offramp.running.engines.protocol import Engine
from offramp.running.export import default_format, onnx_stages
from offramp.running.runtime import ExitResult, Runtime

REPEATS = 15
PHOTOS = 128  # held-out ones that both bundles answer
ROUNDS = 3
ENOUGH_S = 10.0  # of timing two bundles; with slow networks fewer photos are enough


@dataclass(frozen=True)
class Serving:
    """How a bundle will be run: its format (None: as `export` would choose), device, batch and threads."""

    format: str | None = None
    device: str = "auto"
    batch: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be 1 or more, got {value}")

    def load(self, bundle: Path) -> Bundle:
        """A bundle as it will serve."""
        self._set_threads()
        return load_bundle(bundle, device=self.device, threads=self.threads)

    def _set_threads(self) -> None:
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)

    def engine(self, model: ExitNet) -> Engine:
        """The stages of a network as they will run."""
        self._set_threads()
        own = folded(model)
        if (self.format or default_format(model)) == "onnx":
            from offramp.running.engines.onnx_engine import OnnxEngine

            return OnnxEngine(onnx_stages(own), threads=self.threads, device=self.device)
        from offramp.running.engines.torch_engine import TorchEngine

        place = pick_device(self.device)
        return TorchEngine(own, device=place, graphs=place.type == "cuda")


def stage_table(model: ExitNet, serving: Serving) -> dict[str, Any]:
    """`stage_ms[k][batch]`, as `offramp bench infer --json` has it."""
    return _stage_table(serving.engine(model), model.input_shape, serving, serving.format or default_format(model))


def bundle_stage_table(bundle: Bundle, serving: Serving) -> dict[str, Any]:
    """The same of a bundle."""
    return _stage_table(bundle.engine, bundle.card.input_shape, serving, bundle.format)


def _stage_table(engine: Engine, shape: tuple[int, int, int], serving: Serving, format: str) -> dict[str, Any]:
    stage_ms = stage_milliseconds(Subject(engine, lambda images: None, shape), [serving.batch], REPEATS)
    return {"engine": format, "machine": engine.place, "stage_ms": stage_ms}


@dataclass(frozen=True)
class Turns:
    """Milliseconds per image: of our bundle under its policy, of the other one, and of ours up to its last exit."""

    ours: float
    theirs: float
    whole: float


def by_turns(ours: Bundle, theirs: Bundle, paths: Sequence[Path], batch: int, max_pixels: int = MAX_PIXELS) -> Turns:
    """Two bundles on the same photos, in batches, one after the other.

    Where our images leave is planned, in the shares that the policy had on images its networks had not seen: by folds
    what ships has learned from all photos at hand, and is surer of them than of new ones. Of several rounds over a
    batch the middle one counts; then the mean over batches. Photos that cannot be read are passed over.
    """
    photos = islice(_readable(paths, max_pixels), max(batch, PHOTOS // batch * batch))
    ready = [(ours.prepare([photo]), theirs.prepare([photo])) for photo in photos]
    if not ready:
        raise ValueError(f"none of {len(paths):,} held-out images can be read")
    images = [tuple(np.concatenate(side) for side in zip(*part, strict=True)) for part in _batches(ready, batch)]
    shares = ours.policies.policy.shares
    plans = plan_exits(batch * len(images), shares, seed=0).reshape(len(images), batch)
    own, other = _Planned(ours), theirs.runtime()

    def turn(at: int) -> list[float]:
        given, rest = images[at]
        calls = (
            lambda: own(given, plans[at]),
            lambda: other(rest),
            lambda: own(given, np.full(batch, len(shares))),
        )
        return [timed_ms(call) for call in calls]

    for _ in range(3):
        turn(0)
    spent: list[list[float]] = []
    total = 0.0
    for at in range(len(images)):
        times = [turn(at) for _ in range(ROUNDS)]
        spent.append([statistics.median(each) for each in zip(*times, strict=True)])
        total += sum(map(sum, times))
        if total > 1e3 * ENOUGH_S and len(spent) * batch >= PHOTOS // 4:
            break
    return Turns(*(np.mean(spent, axis=0) / batch).tolist())


class _Planned:
    """A bundle whose images leave where they are told to; else it runs as it does in service."""

    def __init__(self, bundle: Bundle) -> None:
        self.engine, usual = PlannedExits(bundle.engine), bundle.runtime()
        policy = replace(usual.policy, thresholds=(0.5,) * len(usual.policy.thresholds))
        self.runtime = Runtime(self.engine, policy, bundle.costs, usual.packing)

    def __call__(self, images: np.ndarray, plan: np.ndarray) -> ExitResult:
        self.engine.plan = plan
        return self.runtime(images)


def _readable(paths: Sequence[Path], max_pixels: int) -> Iterator[Image.Image]:
    for path in paths:
        try:
            photo = read_image(path, max_pixels)
        except UnreadableImage:
            continue
        yield photo


T = TypeVar("T")


def _batches(items: Sequence[T], batch: int) -> list[list[T]]:
    """Full batches; what is left over is not timed, unless there is nothing else."""
    parts = [list(items[at : at + batch]) for at in range(0, len(items), batch)]
    return [part for part in parts if len(part) == batch] or [(parts[0] * batch)[:batch]]
