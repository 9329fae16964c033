"""Whether to cut leaving samples out of a batch: a rule from times measured once per machine and bundle.

Packing copies the state of those who stay; it pays when the next stage is faster on fewer samples by more than the
copy takes. Times are kept in a file in the user's cache folder, and `explain` says what they mean.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json, write_json
from offramp.common.timing import median_ms
from offramp.running.engines.protocol import Engine, EngineState, copied
from offramp.running.runtime import AlwaysPack, Packing

SIZES = (1, 4, 16, 64, 256)
REPEATS = 5
PATIENCE_MS = 100.0  # larger batches are timed only while running the network once takes less


@dataclass(frozen=True)
class MeasuredPacking:
    """Milliseconds of each stage, and of packing before it, by batch size."""

    sizes: tuple[int, ...]
    stage_ms: tuple[tuple[float, ...], ...]
    pack_ms: tuple[tuple[float, ...], ...]  # [k] is packing after exit k + 1

    def worth_it(self, k: int, batch: int, staying: int) -> bool:
        """After exit k: is stage k + 1 faster on `staying` samples by more than packing them takes?"""
        return self._at(self.stage_ms[k], batch) - self._at(self.stage_ms[k], staying) > self._at(
            self.pack_ms[k - 1], staying
        )

    def _at(self, times: Sequence[float], count: int) -> float:
        if count > self.sizes[-1]:
            return times[-1] * count / self.sizes[-1]
        return float(np.interp(count, self.sizes, times))

    def explain(self) -> list[str]:
        """One line per exit: from how many leaving samples of a full batch on packing pays."""
        lines = []
        batch = self.sizes[-1]
        for k in range(1, len(self.stage_ms)):
            pays = [gone for gone in range(1, batch) if self.worth_it(k, batch, batch - gone)]
            when = f"once {pays[0]} of {batch} have left" if pays else "never"
            lines.append(
                f"after exit {k}, packing pays {when}: stage {k + 1} takes {self.stage_ms[k][-1]:.2f} ms for {batch}, "
                f"{self.stage_ms[k][0]:.2f} ms for 1; packing {batch} takes {self.pack_ms[k - 1][-1]:.2f} ms"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "stage_ms": self.stage_ms, "pack_ms": self.pack_ms}

    @staticmethod
    def from_json(value: dict[str, Any]) -> MeasuredPacking:
        def table(rows: Any) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(map(float, row)) for row in rows)

        return MeasuredPacking(tuple(map(int, value["sizes"])), table(value["stage_ms"]), table(value["pack_ms"]))


def measure_packing(engine: Engine, images: np.ndarray) -> MeasuredPacking:
    """Time every stage and every packing on some of the given images."""
    with engine.active():
        return _measure(engine, images)


def _measure(engine: Engine, images: np.ndarray) -> MeasuredPacking:
    sizes: tuple[int, ...] = ()
    stages: list[float] = []
    packs: list[float] = []
    for size in SIZES if len(images) in SIZES else (*(s for s in SIZES if s < len(images)), len(images)):
        if size > len(images) or sum(stages[-engine.num_exits :]) > PATIENCE_MS:
            break
        sizes += (size,)
        state = engine.begin(images[:size])
        for k in range(1, engine.num_exits + 1):
            before = state
            stages.append(median_ms(partial(_run, engine, k, before), REPEATS, warm_up=1))
            if k < engine.num_exits:
                state = copied(engine, engine.run(k, before)[1])
                packs.append(median_ms(partial(_pack, engine, k + 1, state, np.arange(size)), REPEATS, warm_up=1))
    exits = engine.num_exits
    return MeasuredPacking(
        sizes,
        tuple(tuple(stages[k::exits]) for k in range(exits)),
        tuple(tuple(packs[k :: exits - 1]) for k in range(exits - 1)),
    )


def _run(engine: Engine, k: int, state: EngineState) -> None:
    engine.judge(k, engine.run(k, state)[0])


def _pack(engine: Engine, k: int, state: EngineState, rows: np.ndarray) -> None:
    engine.gather(k, [(state, rows)])
    engine.wait()  # a GPU has only been told so far


def _cache_file(digest: str, engine: Engine) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = f"{platform.node()}-{os.cpu_count()}-{engine.place}"
    place = re.sub(r"[^\w.-]+", "-", place)
    return root / "offramp" / f"packing-{digest}-{place}.json"


def cached_packing(digest: str, engine: Engine) -> Packing:
    """The rule measured for this bundle on this machine and device; without one, always pack."""
    try:
        return MeasuredPacking.from_json(read_json(_cache_file(digest, engine)))
    except (ValueError, KeyError, TypeError):
        return AlwaysPack()


def tuned_packing(digest: str, engine: Engine, images: np.ndarray) -> MeasuredPacking:
    """Measure the rule and keep it for later calls, on this machine, of whoever loads the same bundle."""
    found = measure_packing(engine, images)
    write_json(_cache_file(digest, engine), found.to_json())
    return found
