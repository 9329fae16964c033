"""Anytime evaluation: the accuracy of every exit on everything, and the saved logits behind it.

A run folder, a saved model with data, or a network of one's own loop with its loaders goes in;
`eval/{calibration,test}/` with logits, labels and rows, and `eval/eval.json` come out. The network is evaluated once,
in float32 without TF32; every later question is asked of the saved arrays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common.console import progress
from offramp.common.device import exact_float32, pick_device
from offramp.common.files import name_the_real_file, write_json, writing
from offramp.common.images import Preprocessing
from offramp.data import DATASETS, Batch, Dataset, load_dataset, prepared_for, preprocessing_of
from offramp.models.cost import ExitCost, exit_costs, lazy_costs
from offramp.models.exits import ExitNet
from offramp.models.modules import modes_kept
from offramp.models.registry import load_model
from offramp.runs.config import DataConfig
from offramp.runs.folder import CONFIG, PHASE1, POLICY, holds_run, read_config, refuse_other_data
from offramp.runs.manifest import name_damage
from offramp.runs.outputs import EVAL, SUMMARY, EvalSummary, ExitScore
from offramp.training.loaders import Loader, LoaderData
from offramp.training.processes import Processes

SPLITS = ("calibration", "test")  # that networks are evaluated on
THUMBS_PER_EXIT = 64
BATCH_PIXELS = 1 << 20  # images of 32x32 go 1024 at a time, larger ones fewer


class EvalData(Protocol):
    """What evaluation asks of data; every `Dataset` has it, and so have loaders (loaders.py)."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each class; none where they have no names."""

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How an image from elsewhere becomes one of these, where that is known."""

    def size(self, split: str) -> int:
        """How many samples a split holds, before it was swept at least about."""

    def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """The samples of a split, in order."""

    def difficulty(self, split: str) -> np.ndarray | None:
        """How hard each sample of a split was made to be, where that is known."""

    def some_thumbnails(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """At most `count` images to look at, uint8 [n, height, width, 3], and their numbers."""


def evaluate_run(
    run: str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str = "auto",
    data: DataConfig | None = None,
    splits: Sequence[str] = SPLITS,
) -> EvalSummary:
    """Evaluate a finished run on its calibration and test splits; write `RUN/eval/` and return the summary.

    `splits` may name one of them alone. `run` may be the folder of a mere model (`model.save`), which needs `data`: it
    does not know any.
    """
    run, place = Path(run), pick_device(device)
    if not holds_run(run) and (run / CONFIG).is_file():
        return _evaluate_model(run, data, data_dir, place, splits)
    if data is not None and holds_run(run):
        raise ValueError(f"{run} is a run, which is evaluated on its own data; --data is for bundles and saved models")
    config = read_config(run)
    model = load_model(run).to(place).eval()
    for folder in (run, run / PHASE1):
        name_damage(folder)
    own = load_dataset(config.data.name, data_dir=data_dir or config.data.dir, seed=config.seed, **config.data.given())
    own = prepared_for(model, own, config.data.image_size)
    if own.num_classes != config.model.num_classes:
        raise ValueError(
            f"{run} was trained on {config.model.num_classes} classes, but this {own.name} has {own.num_classes}"
        )
    refuse_other_data(run, own)
    return write_evaluation(run, config.model.name, model, _costs(model), own, place, splits=splits)


def _evaluate_model(
    folder: Path, config: DataConfig | None, data_dir: str | Path | None, place: torch.device, splits: Sequence[str]
) -> EvalSummary:
    """A saved model on data that are named for it."""
    if config is None:
        raise ValueError(
            f"{folder} holds a model, not a run, so it knows no data; say which: offramp eval {folder} --data NAME, "
            f"with NAME one of {', '.join(DATASETS)}"
        )
    model = load_model(folder).to(place).eval()
    assert model.spec is not None
    size = {} if config.name != "imagefolder" else {"image_size": model.input_shape[-1]}
    data = load_dataset(config.name, data_dir=data_dir or config.dir, **{**size, **config.given()})
    data = prepared_for(model, data, config.image_size)
    if data.num_classes != model.spec.num_classes:
        raise ValueError(
            f"{folder} knows {model.spec.num_classes} classes, but this {data.name} has {data.num_classes}"
        )
    if data.image_size != model.input_shape[-1]:
        raise ValueError(
            f"{folder} takes images of {model.input_shape[-1]} pixels, {data.name} gives {data.image_size}"
        )
    return write_evaluation(folder, model.spec.name, model, _costs(model), data, place, told=True, splits=splits)


def evaluate(
    model: nn.Module,
    *,
    calibration: Loader | None = None,
    test: Loader | None = None,
    out: str | Path,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    costs: Sequence[int] | None = None,
) -> EvalSummary:
    """Evaluate a network of any training loop into the folder `out`, as `offramp eval` does for a run.

    `calibration` and `test` are loaders: iterables of (images, labels) with normalised float images, gone over once.
    Thresholds come from the first, which must be neither trained nor tested on. `preprocessing` says how an image
    becomes what the loaders give; an `ExitNet` may know it. `costs` are needed for a module that is no `ExitNet`: the
    mul-adds up to each exit. A network that can be built again by its name is saved there too.
    """
    folder = Path(out)
    if holds_run(folder):
        raise ValueError(f"{folder} holds a run; evaluate that with evaluate_run, and choose another folder here")
    spec = getattr(model, "spec", None)
    prepared = preprocessing or preprocessing_of(model)
    loaders = {name: loader for name, loader in (("calibration", calibration), ("test", test)) if loader is not None}
    data = LoaderData(loaders, tuple(map(str, classes or ())), prepared)
    name = type(model).__name__ if spec is None else spec.name
    place = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    summary = write_evaluation(folder, name, model, _costs(model, costs), data, place, told=True)
    (folder / POLICY).unlink(missing_ok=True)  # it was found on another evaluation, perhaps of other params
    if isinstance(model, ExitNet) and spec is not None:
        model.save(folder)
    return summary


def _costs(model: nn.Module, given: Sequence[int] | None = None) -> tuple[ExitCost, ...]:
    """What each exit costs: found by walking a network of ours, else as given."""
    if given is None and isinstance(model, ExitNet):
        return exit_costs(model)
    if given is None:
        raise ValueError(
            f"what each exit of a {type(model).__name__} costs cannot be found: give costs=[...], the mul-adds up to "
            "each exit, or make it an ExitNet (ExitNet.from_parts)"
        )
    params = sum(tensor.numel() for tensor in model.parameters())  # of all of it: whose they are is not known
    return tuple(ExitCost(k, params, int(cost), int(cost)) for k, cost in enumerate(given, 1))


def write_evaluation(
    run: Path,
    name: str,
    model: nn.Module,
    costs: tuple[ExitCost, ...],
    data: EvalData,
    place: torch.device,
    told: bool = False,
    splits: Sequence[str] = SPLITS,
) -> EvalSummary:
    """Evaluate into `RUN/eval/`; one that fails leaves the one before it whole.

    `name` is what the network is called; where it was not trained on `data`, they are `told` in the summary.
    """
    new = run / f"{EVAL}.part"
    shutil.rmtree(new, ignore_errors=True)
    try:
        summary = _evaluated(name, model, costs, data, new, place, data.name if told else None, splits)
        shutil.rmtree(run / EVAL, ignore_errors=True)
        new.rename(run / EVAL)
    except OSError as error:
        name_the_real_file(error)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return summary


def _evaluated(
    name: str,
    model: nn.Module,
    costs: tuple[ExitCost, ...],
    data: EvalData,
    folder: Path,
    place: torch.device,
    told: str | None,
    splits: Sequence[str],
) -> EvalSummary:
    samples, exits = {}, {}
    for split in splits:
        if data.size(split):
            samples[split], hits = save_logits(model, data, split, folder / split, place, len(costs))
            exits[split] = tuple(_score(cost, hits, samples[split]) for cost in costs)
    if not samples:
        raise ValueError(f"{data.name} has neither a calibration nor a test split; there is nothing to evaluate")
    lazy = lazy_costs(model) if isinstance(model, ExitNet) else costs
    mul_adds = tuple(cost.mul_adds for cost in lazy)
    summary = EvalSummary(name, samples, exits, data.class_names, mul_adds, data.preprocessing, told)
    write_json(folder / SUMMARY, summary.to_json())
    return summary


def _score(cost: ExitCost, hits: np.ndarray, samples: int) -> ExitScore:
    top1, top5 = (float(count / samples) for count in hits[:, cost.exit - 1])
    return ExitScore(cost.exit, cost.params, cost.mul_adds, cost.macs, top1, top5)


def eval_batch(data: EvalData) -> int:
    """How many images are evaluated together."""
    return max(1, BATCH_PIXELS // getattr(data, "image_size", 32) ** 2)


def logits_of(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
    """The logits [K, B, C] of each batch, in evaluation mode; the modes of all parts are put back."""
    with modes_kept(model):
        model.eval()
        for part in batches:
            with torch.inference_mode(), exact_float32():
                logits = torch.stack(model(part.images))
            yield part, logits


def accuracy(
    model: ExitNet, data: Dataset, split: str, device: torch.device, processes: Processes | None = None
) -> list[float]:
    """Top-1 of every exit on a split, of which each of several processes looks at its part."""
    processes = processes or Processes()
    hits = torch.zeros(model.num_exits, dtype=torch.int64, device=device)
    seen = torch.zeros((), dtype=torch.int64, device=device)
    own = data.sweep_rows(split, processes.own_part(data.size(split)), eval_batch(data), device)
    for part, logits in logits_of(model, own):
        hits += count_hits(logits, part.labels)[0]
        seen += len(part.labels)
    hits, seen = processes.sum_all([hits, seen])
    return [count / int(seen) for count in hits.tolist()]


def count_hits(logits_KBC: Tensor, labels: Tensor) -> Tensor:
    """How many samples are right at each exit among the best 1 and the best 5 guesses, [2, K]."""
    best = logits_KBC.topk(min(5, logits_KBC.shape[-1]), dim=-1).indices
    right = best == labels[None, :, None]
    return torch.stack([right[..., :1].sum((1, 2)), right.sum((1, 2))])


def save_logits(
    model: nn.Module, data: EvalData, split: str, folder: Path, device: torch.device, num_exits: int
) -> tuple[int, np.ndarray]:
    """Write what calibration needs of a split; the number of samples and the hits [2, K].

    Logits are appended to one file per exit and joined at the end, so memory holds one batch at a time and
    samples that could not be read leave no gap.
    """
    labels, index = [], []
    hits = np.zeros((2, num_exits), np.int64)
    classes = 0
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"logits.{k}.part" for k in range(1, num_exits + 1)]
    with ExitStack() as stack, progress(f"evaluating {split}", data.size(split)) as bar:
        for part in parts:
            stack.callback(part.unlink, missing_ok=True)
        files = [stack.enter_context(part.open("wb")) for part in parts]
        for batch, logits in logits_of(model, data.sweep(split, eval_batch(data), device)):
            if len(logits) != num_exits:
                raise ValueError(f"the network gives the logits of {len(logits)} exits, its costs are {num_exits}")
            hits += count_hits(logits, batch.labels).cpu().numpy()
            classes = logits.shape[-1]
            _append(files, logits, split)
            labels.append(batch.labels.cpu().numpy())
            index.append(batch.index.cpu().numpy())
            bar.advance(len(batch.labels), len(batch.labels))
        for file in files:
            file.flush()
        samples = sum(map(len, labels))
        if not samples:
            raise ValueError(f"the {split} split of {data.name} gave no images")
        _join(parts, folder / "logits.npy", (len(parts), samples, classes))
    _save_array(folder / "labels.npy", np.concatenate(labels))
    _save_array(folder / "index.npy", np.concatenate(index))
    _save_extras(data, split, folder, num_exits)
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


def _save_extras(data: EvalData, split: str, folder: Path, num_exits: int) -> None:
    """Known difficulties, and a random handful of images for people to look at."""
    difficulty = data.difficulty(split)
    if difficulty is not None:
        _save_array(folder / "difficulty.npy", difficulty)
    found = data.some_thumbnails(split, THUMBS_PER_EXIT * num_exits)
    if found is not None:
        with writing(folder / "thumbs.npz") as file:
            np.savez_compressed(file, images=found[0], index=found[1])
