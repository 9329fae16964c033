"""Anytime evaluation: the accuracy of every exit on everything, and the saved logits behind it.

A run folder goes in; `eval/{calibration,test}/` with logits, labels and rows, and `eval/eval.json` come out.
The network is evaluated once, in float32 without TF32; every later question is asked of the saved arrays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from offramp.common.console import progress
from offramp.common.device import exact_float32, pick_device
from offramp.common.files import write_json, writing
from offramp.common.seeds import mix
from offramp.data import Batch, Dataset, load_dataset
from offramp.models.cost import ExitCost, exit_costs, lazy_costs
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.runs.config import RunConfig
from offramp.runs.folder import PHASE1, read_config, refuse_other_data
from offramp.runs.manifest import name_damage
from offramp.runs.outputs import EVAL, SUMMARY, EvalSummary, ExitScore

THUMBS_PER_EXIT = 64
BATCH_PIXELS = 1 << 20  # images of 32x32 go 1024 at a time, larger ones fewer


def evaluate_run(run: str | Path, *, data_dir: str | Path | None = None, device: str = "auto") -> EvalSummary:
    """Evaluate a finished run on its calibration and test splits; write `RUN/eval/` and return the summary."""
    run, place = Path(run), pick_device(device)
    config = read_config(run)
    model = load_model(run).to(place).eval()
    for folder in (run, run / PHASE1):
        name_damage(folder)
    data = _load_data(config, data_dir)
    if data.num_classes != config.model.num_classes:
        raise ValueError(
            f"{run} was trained on {config.model.num_classes} classes, but this {data.name} has {data.num_classes}"
        )
    refuse_other_data(run, data)
    new = run / f"{EVAL}.part"  # an evaluation that fails leaves the one before it whole
    shutil.rmtree(new, ignore_errors=True)
    try:
        summary = _evaluate(config, model, data, new, place)
        shutil.rmtree(run / EVAL, ignore_errors=True)
        new.rename(run / EVAL)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return summary


def _evaluate(config: RunConfig, model: ExitNet, data: Dataset, folder: Path, place: torch.device) -> EvalSummary:
    costs = exit_costs(model)
    samples, exits = {}, {}
    for split in ("calibration", "test"):
        if data.size(split):
            samples[split], hits = save_logits(model, data, split, folder / split, place)
            exits[split] = tuple(_score(cost, hits, samples[split]) for cost in costs)
    summary = EvalSummary(
        config.model.name,
        samples,
        exits,
        data.class_names,
        tuple(cost.mul_adds for cost in lazy_costs(model)),
        data.preprocessing,
    )
    write_json(folder / SUMMARY, summary.to_json())
    return summary


def _load_data(config: RunConfig, data_dir: str | Path | None) -> Dataset:
    place = config.data.dir if data_dir is None else data_dir
    return load_dataset(config.data.name, data_dir=place, seed=config.seed, **config.data.given())


def _score(cost: ExitCost, hits: np.ndarray, samples: int) -> ExitScore:
    top1, top5 = (float(count / samples) for count in hits[:, cost.exit - 1])
    return ExitScore(cost.exit, cost.params, cost.mul_adds, cost.macs, top1, top5)


def logits_of(model: ExitNet, data: Dataset, split: str, device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """The logits [K, B, C] of each batch of a split, in evaluation mode; the model's mode is put back."""
    batch = max(1, BATCH_PIXELS // data.image_size**2)
    training = model.training
    model.eval()
    try:
        for part in data.sweep(split, batch, device):
            with torch.inference_mode(), exact_float32():
                logits = torch.stack(model(part.images))
            yield part, logits
    finally:
        model.train(training)


def accuracy(model: ExitNet, data: Dataset, split: str, device: torch.device) -> list[float]:
    """Top-1 of every exit on a split."""
    hits: Tensor | int = 0
    seen = 0
    for part, logits in logits_of(model, data, split, device):
        hits = hits + count_hits(logits, part.labels)[0]
        seen += len(part.labels)
    assert isinstance(hits, Tensor)
    return [count / seen for count in hits.tolist()]


def count_hits(logits_KBC: Tensor, labels: Tensor) -> Tensor:
    """How many samples are right at each exit among the best 1 and the best 5 guesses, [2, K]."""
    best = logits_KBC.topk(min(5, logits_KBC.shape[-1]), dim=-1).indices
    right = best == labels[None, :, None]
    return torch.stack([right[..., :1].sum((1, 2)), right.sum((1, 2))])


def save_logits(
    model: ExitNet, data: Dataset, split: str, folder: Path, device: torch.device
) -> tuple[int, np.ndarray]:
    """Write what calibration needs of a split; the number of samples and the hits [2, K].

    Logits are appended to one file per exit and joined at the end, so memory holds one batch at a time and
    samples that could not be read leave no gap.
    """
    labels, index = [], []
    hits = np.zeros((2, model.num_exits), np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"logits.{k}.part" for k in range(1, model.num_exits + 1)]
    with ExitStack() as stack, progress(f"evaluating {split}", data.size(split)) as bar:
        for part in parts:
            stack.callback(part.unlink, missing_ok=True)
        files = [stack.enter_context(part.open("wb")) for part in parts]
        for batch, logits in logits_of(model, data, split, device):
            hits += count_hits(logits, batch.labels).cpu().numpy()
            _append(files, logits, split)
            labels.append(batch.labels.cpu().numpy())
            index.append(batch.index.cpu().numpy())
            bar.advance(len(batch.labels), len(batch.labels))
        for file in files:
            file.flush()
        samples, classes = sum(map(len, labels)), logits.shape[-1]
        _join(parts, folder / "logits.npy", (len(parts), samples, classes))
    _save_array(folder / "labels.npy", np.concatenate(labels))
    _save_array(folder / "index.npy", np.concatenate(index))
    _save_extras(data, split, folder, model.num_exits)
    return samples, hits


def _append(files: Sequence[IO[bytes]], logits_KBC: Tensor, split: str) -> None:
    values = logits_KBC.float().cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError(f"the network gives logits that are not finite on the {split} split; it cannot be evaluated")
    for file, exit_values in zip(files, values, strict=True):
        file.write(np.ascontiguousarray(exit_values).data)


def _join(parts: list[Path], path: Path, shape: tuple[int, int, int]) -> None:
    """One float32 `.npy` of the given shape out of the exits' files."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with writing(path) as whole:
        np.lib.format.write_array_header_1_0(whole, header)
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def _save_array(path: Path, values: np.ndarray) -> None:
    with writing(path) as file:
        np.save(file, values)


def _save_extras(data: Dataset, split: str, folder: Path, num_exits: int) -> None:
    """Known difficulties, and a random handful of images for people to look at."""
    difficulty = data.difficulty(split)
    if difficulty is not None:
        _save_array(folder / "difficulty.npy", difficulty)
    draw = np.random.default_rng(mix("thumbs", split))
    count = min(data.size(split), THUMBS_PER_EXIT * num_exits)
    rows = np.sort(draw.permutation(data.size(split))[:count])
    with writing(folder / "thumbs.npz") as file:
        np.savez_compressed(file, images=data.thumbnails(split, rows), index=data.index(split)[rows])
