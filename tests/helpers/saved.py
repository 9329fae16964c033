"""Run folders made by hand: saved outputs with known properties, without any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import write_json
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.outputs import EvalSummary, ExitScore
from offramp.runs.recipe import load_recipe

COSTS = (1_000_000, 2_500_000, 5_000_000)


def logits_and_labels(samples: int, seed: int, exits: int = 3, classes: int = 6, skill: float = 1.0) -> Any:
    """Logits whose right class grows with the exit and shrinks with difficulty, labels, difficulties."""
    draw = np.random.default_rng(seed)
    difficulty = draw.random(samples)
    labels = draw.integers(0, classes, samples)
    logits = draw.normal(size=(exits, samples, classes)).astype(np.float32)
    for k in range(exits):
        logits[k, np.arange(samples), labels] += (0.2 + skill * k + 2.5 * (1 - difficulty)).astype(np.float32)
    return logits, labels, difficulty


def write_split(folder: Path, logits: np.ndarray, labels: np.ndarray, difficulty: np.ndarray | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "logits.npy", logits)
    np.save(folder / "labels.npy", labels)
    np.save(folder / "index.npy", np.arange(len(labels)))
    if difficulty is not None:
        np.save(folder / "difficulty.npy", difficulty)
    rows = np.arange(min(40, len(labels)))
    images = np.random.default_rng(0).integers(0, 255, (len(rows), 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "thumbs.npz", images=images, index=rows)


def scores(logits: np.ndarray, labels: np.ndarray, costs: tuple[int, ...]) -> tuple[ExitScore, ...]:
    top1 = (logits.argmax(-1) == labels).mean(1)
    return tuple(ExitScore(k + 1, 1000, costs[k], costs[k], float(top1[k]), 1.0) for k in range(len(costs)))


def write_run(
    folder: Path,
    recipe: str = "digits-baseline",
    seed: int = 0,
    skill: float = 1.0,
    calibration: int = 400,
    test: int = 500,
    costs: tuple[int, ...] = COSTS,
) -> Path:
    """An evaluated run of a recipe, as `offramp train` and `offramp eval` would have left it."""
    config: RunConfig = with_settings(load_recipe(recipe).config, [f"seed={seed}", f"data.calibration={calibration}"])
    write_json(folder / "config.json", config.to_json())
    write_json(folder / "environment.json", {"python": "3.11", "command": ["train", recipe, "--out", str(folder)]})
    exits, samples, tables = len(costs), {}, {}
    for at, (split, count) in enumerate((("calibration", calibration), ("test", test))):
        if count:
            logits, labels, difficulty = logits_and_labels(count, 10 * seed + at, exits, skill=skill)
            write_split(folder / "eval" / split, logits, labels, difficulty)
            samples[split], tables[split] = count, scores(logits, labels, costs)
    summary = EvalSummary(config.model.name, samples, tables, tuple(f"<class {c}>" for c in range(6)))
    write_json(folder / "eval" / "eval.json", summary.to_json())
    rows = [
        {"epoch": e, "step": 10 * e, "train_loss": [2 / n] * exits, "calibration_top1": [1 - 1 / (n + 1)] * exits}
        for n, e in enumerate((1, 2, config.train.epochs), 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_samples(folder, exits, learned="learned" in recipe)
    return folder


def write_samples(folder: Path, exits: int, learned: bool) -> None:
    draw = np.random.default_rng(0)
    (folder / "samples").mkdir(exist_ok=True)
    losses = draw.random((64, exits)) * 4
    weights = 1 + 0.2 * (losses - 2) if learned else np.ones_like(losses)
    taken = draw.integers(1, exits + 1, 64)
    for name, some in (("epoch-0002", (weights + 1) / 2), ("epoch-0003", weights)):
        np.savez(folder / "samples" / f"{name}.npz", losses=losses, confidences=losses, weights=some, exits=taken)
