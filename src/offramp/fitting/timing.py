"""Milliseconds on this machine, with the engine, batch and threads that will serve: of each stage, and of two bundles.

Stage times decide where a budget in milliseconds is asked for; at the end the bundle and the single network answer the
same photos by turns, so that a busy moment hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp.bench.infer import Subject, stage_milliseconds
from offramp.common.device import pick_device
from offramp.common.timing import timed_ms
from offramp.models.exits import ExitNet
from offramp.models.fold import folded
from offramp.running.bundle import Bundle, load_bundle
from offramp.running.engines.protocol import Engine
from offramp.running.export import default_format, onnx_stages
from offramp.running.runtime import Runtime

REPEATS = 15
PHOTOS = 128  # that both bundles answer
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


def by_turns(ours: Bundle, theirs: Bundle, paths: Sequence[Path], batch: int) -> tuple[float, float]:
    """Milliseconds per image of two bundles on the same photos, in batches, one after the other.

    Of several rounds over a batch the middle one counts; then the mean over batches, as some have more to do.
    """
    chosen = paths[: max(batch, PHOTOS // batch * batch)]
    images = [(ours.prepare(part), theirs.prepare(part)) for part in _batches(chosen, batch)]
    runs = ours.runtime(), theirs.runtime()
    for run, ready in zip(runs, images[0], strict=True):
        for _ in range(3):
            run(ready)
    spent: list[tuple[float, float]] = []
    total = 0.0
    for pair in images:
        times = [[_timed(run, ready) for run, ready in zip(runs, pair, strict=True)] for _ in range(ROUNDS)]
        spent.append((statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)))
        total += sum(map(sum, times))
        if total > 1e3 * ENOUGH_S and len(spent) * batch >= PHOTOS // 4:
            break
    first, second = np.mean(spent, axis=0) / batch
    return float(first), float(second)


def _timed(run: Runtime, images: np.ndarray) -> float:
    return timed_ms(lambda: run(images))


def _batches(paths: Sequence[Path], batch: int) -> list[list[str]]:
    """Full batches; what is left over is not timed, unless there is nothing else."""
    parts = [[str(path) for path in paths[at : at + batch]] for at in range(0, len(paths), batch)]
    return [part for part in parts if len(part) == batch] or [(parts[0] * batch)[:batch]]
