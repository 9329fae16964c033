"""The training loop: batch -> losses -> weights -> step -> log -> save.

A configuration goes in, a run folder comes out. Every draw follows from the seed and the step (seeds.py), so
a run that was stopped anywhere goes on as if it had not been. Nothing in a step waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.checkpoint import (
    State,
    load_optimizer_tensors,
    load_state,
    optimizer_tensors,
    save_state,
)
from offramp.config import RunConfig, TrainConfig
from offramp.console import Bar, progress
from offramp.data import Dataset, load_dataset
from offramp.device import pick_device, training_dtype
from offramp.evaluate import accuracy
from offramp.files import writing
from offramp.meta import ENGINES
from offramp.models import store
from offramp.models.exits import ExitNet, ModelSpec
from offramp.objectives.allocation import allocate
from offramp.objectives.weighting import (
    FrozenWeighting,
    LearnedWeighting,
    SelectionWeighting,
    SlopedWeighting,
    UniformWeighting,
    Weighting,
)
from offramp.runs import MetricsLog, begin_run
from offramp.seeds import mix
from offramp.step import HalfResult, Method, iterate
from offramp.stopping import Stopped, caught_signals

SLOPE = (0.6, 1.4)  # the paper's fixed weights, first to last exit
SAMPLES_KEPT = 256


def train_run(config: RunConfig, out: str | Path, *, device: str = "auto", resume: bool = False) -> Path:
    """Train into the run folder `out` and return it; `resume` goes on from the folder's last state."""
    out, place = Path(out), pick_device(device)
    data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.options())
    config = fit_to_data(config, data)
    steps = data.steps_per_epoch(config.train.batch)
    total = steps * config.train.epochs
    model = new_model(config).to(place, memory_format=torch.channels_last)  # type: ignore[call-overload]
    refuse_other_size(model, data)
    begin_run(out, config, place, resume)
    optimizer = new_optimizer(model, config.train)
    method = new_method(config, model.num_exits, place)
    tally = Tally(model.num_exits, place)
    step = restore(out, model, optimizer, method, tally) if resume else 0
    stream = data.stream(config.train.batch, config.seed, place, start=step)
    metrics = MetricsLog(out, step)
    saver = Saver(config.train.save_seconds)
    began, began_step = time.monotonic(), step
    with caught_signals() as caught, progress("training", total, step) as bar:
        while step < total:
            set_rates(optimizer, method.weighting, config.train.initial_rate, cosine(step, total))
            torch.manual_seed(mix(config.seed, "step", step))  # for networks that draw, such as dropout
            images, labels = next(stream)
            for half in iterate(model, optimizer, method, images, labels, step):
                tally.add(half, step)
            step += 1
            bar.advance(1, config.train.batch)
            if step % steps == 0:
                tally.refuse_non_finite(out)
                row = epoch_row(step // steps, step, optimizer.param_groups[0]["lr"], tally)
                if row["epoch"] % config.train.eval_every == 0 or step == total:
                    row |= held_out(model, data, place)
                seconds = time.monotonic() - began
                row["images_per_s"] = round((step - began_step) * config.train.batch / seconds, 1)
                save_samples(out, row["epoch"], half, config.weighting.q)
                metrics.add(row)
                report(bar, row, config.train.epochs)
                tally.reset()
            if saver.due() or caught or step == total:
                tally.refuse_non_finite(out)
                refuse_bad_params(model, step, out)
                save_state(out, current_state(step, model, optimizer, method, tally))
            if caught and step < total:
                metrics.close()
                raise Stopped(caught[0], f"stopped at step {step} of {total}, saved; go on with --resume")
    metrics.close()
    store.write_tensors(out / store.WEIGHTS, model.state_dict())
    return out


class Tally:
    """Sums over an epoch, kept on the device: losses, hits, and the first step whose loss was not finite."""

    def __init__(self, num_exits: int, device: torch.device) -> None:
        self.tensors = {
            "losses": torch.zeros(num_exits, dtype=torch.float64, device=device),
            "hits": torch.zeros(num_exits, dtype=torch.int64, device=device),
            "seen": torch.zeros((), dtype=torch.int64, device=device),
            "meta_loss": torch.zeros((), dtype=torch.float64, device=device),
            "meta_updates": torch.zeros((), dtype=torch.int64, device=device),
            "first_bad": torch.full((), -1, dtype=torch.int64, device=device),
        }

    def add(self, half: HalfResult, step: int) -> None:
        sums = self.tensors
        sums["losses"] += half.losses_BK.sum(0, dtype=torch.float64)
        sums["hits"] += half.hits_K
        sums["seen"] += len(half.losses_BK)
        is_first = ~torch.isfinite(half.loss) & (sums["first_bad"] < 0)
        sums["first_bad"].masked_fill_(is_first, step)
        if half.meta_loss is not None:
            sums["meta_loss"] += half.meta_loss
            sums["meta_updates"] += 1

    def means(self) -> dict[str, Any]:
        seen, meta_updates = self.tensors["seen"].item(), self.tensors["meta_updates"].item()
        means: dict[str, Any] = {
            "train_loss": (self.tensors["losses"] / seen).tolist(),
            "train_top1": (self.tensors["hits"] / seen).tolist(),
        }
        if meta_updates:
            means["meta_loss"] = self.tensors["meta_loss"].item() / meta_updates
        return means

    def refuse_non_finite(self, run: Path) -> None:
        step = int(self.tensors["first_bad"].item())
        if step >= 0:
            raise ValueError(f"the loss was not finite at step {step}; {_kept(run)}")

    def reset(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.fill_(-1 if name == "first_bad" else 0)


class Saver:
    """Says when the next save is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.last = seconds, time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self.last < self.seconds:
            return False
        self.last = time.monotonic()
        return True


def fit_to_data(config: RunConfig, data: Dataset) -> RunConfig:
    """Fill in the number of classes; refuse a network that was made for other data."""
    if config.model.num_classes not in (None, data.num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but {data.name} has {data.num_classes} classes"
        )
    return replace(config, model=replace(config.model, num_classes=data.num_classes))


def refuse_other_size(model: ExitNet, data: Dataset) -> None:
    if model.input_shape[-1] != data.image_size:
        raise ValueError(
            f"the model takes images of {model.input_shape[-1]} pixels, {data.name} gives {data.image_size}; "
            f"set model.overrides.image_size={data.image_size}"
        )


def refuse_bad_params(model: ExitNet, step: int, run: Path) -> None:
    """A finite loss can still have had a gradient that was not: such params are never saved."""
    finite = torch.stack([p.isfinite().all() for p in model.parameters()]).all()
    if not finite:
        raise ValueError(f"the params are not finite after step {step}; {_kept(run)}")


def _kept(run: Path) -> str:
    return f"the last good state is kept in {run / 'last'}; try a lower train.learning_rate"


def new_model(config: RunConfig) -> ExitNet:
    """A fresh network, its params drawn from the seed."""
    assert config.model.num_classes is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(config.seed, "init"))
        return store.build(ModelSpec(config.model.name, config.model.num_classes, config.model.overrides))


def new_optimizer(model: ExitNet, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(),
        lr=config.initial_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )


def new_method(config: RunConfig, num_exits: int, device: torch.device) -> Method:
    """The configured weighting and how it is trained."""
    settings = config.weighting
    dtype = training_dtype(config.train.precision, device)
    return Method(
        new_weighting(config, num_exits, device),
        ENGINES[settings.engine],
        settings.q,
        settings.objective,
        settings.look_ahead,
        settings.interval,
        clip_norm=config.train.clip_norm,
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
    )


def new_weighting(config: RunConfig, num_exits: int, device: torch.device) -> Weighting:
    """The weighting object that the configuration names."""
    settings = config.weighting
    if settings.name in ("ascending", "descending"):
        return SlopedWeighting(*SLOPE if settings.name == "ascending" else SLOPE[::-1])
    if settings.name == "selection":
        return SelectionWeighting(settings.q)
    if settings.name == "uniform":
        return UniformWeighting()
    shape = {key: getattr(settings, key) for key in ("inputs", "depth", "width", "delta", "centring", "bound")}
    shape |= {"seed": config.seed, "device": device}
    if settings.name == "frozen":
        assert settings.from_run is not None
        frozen = FrozenWeighting(num_exits, **shape)
        frozen.load_tensors(finished_weighting(Path(settings.from_run)))
        return frozen
    rates = {key: getattr(settings, key) for key in ("learning_rate", "weight_decay")}
    return LearnedWeighting(num_exits, **shape, **rates)


def finished_weighting(run: Path) -> Mapping[str, Tensor]:
    """The weight net of a finished run."""
    state = load_state(run)
    if state is None or not state.parts["weighting"]:
        raise ValueError(f"{run} holds no weight net: it is not a run with learned weights")
    return state.parts["weighting"]


def set_rates(optimizer: torch.optim.Optimizer, weighting: Weighting, initial: float, share: float) -> None:
    """Both learning rates at `share` of their initial values."""
    for group in optimizer.param_groups:
        group["lr"] = share * initial
    if isinstance(weighting, LearnedWeighting):
        weighting.set_rate(share)


def cosine(step: int, total: int) -> float:
    """The share of the initial rate at `step` of `total`: from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


def current_state(step: int, model: ExitNet, optimizer: torch.optim.Optimizer, method: Method, tally: Tally) -> State:
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors(model, optimizer),
        "weighting": method.weighting.tensors(),
        "tally": tally.tensors,
    }
    return State(step, parts, info={})


def restore(run: Path, model: ExitNet, optimizer: torch.optim.Optimizer, method: Method, tally: Tally) -> int:
    """Put the run's last state back; the step to go on from, 0 if nothing was saved yet."""
    state = load_state(run)
    if state is None:
        return 0
    store.load_state(model, state.parts["model"], run / "last")
    load_optimizer_tensors(model, optimizer, state.parts["optimizer"])
    method.weighting.load_tensors(state.parts["weighting"])
    for name, tensor in tally.tensors.items():
        tensor.copy_(state.parts["tally"][name])
    return state.step


def epoch_row(epoch: int, step: int, rate: float, tally: Tally) -> dict[str, Any]:
    return {"epoch": epoch, "step": step, "learning_rate": rate, **tally.means()}


def save_samples(run: Path, epoch: int, half: HalfResult, q: float) -> None:
    """Keep what some samples of the epoch's last half looked like, for the report."""
    rows = slice(SAMPLES_KEPT)
    kept = {
        "losses": half.losses_BK[rows],
        "confidences": half.confidences_BK[rows],
        "weights": half.weights_BK[rows],
        "exits": allocate(half.confidences_BK, q)[rows],
    }
    with writing(run / "samples" / f"epoch-{epoch:04d}.npz") as file:
        arrays: dict[str, Any] = {name: tensor.float().cpu().numpy() for name, tensor in kept.items()}
        np.savez_compressed(file, **arrays)


def held_out(model: ExitNet, data: Dataset, device: torch.device) -> dict[str, Any]:
    """Accuracy on the calibration split, never on test data."""
    if data.size("calibration") == 0:
        return {}
    return {"calibration_top1": accuracy(model, data, "calibration", device)}


def report(bar: Bar, row: dict[str, Any], epochs: int) -> None:
    """A line per epoch; in a terminal it stays above the bar."""
    kind = "calibration" if "calibration_top1" in row else "train"
    exits = " ".join(f"{100 * share:5.1f}" for share in row[f"{kind}_top1"])
    loss = sum(row["train_loss"])
    bar.show(f"epoch {row['epoch'] + 1}/{epochs}" if row["epoch"] < epochs else "training")
    bar.line(f"epoch {row['epoch']:>3}/{epochs}  loss {loss:7.3f}  {kind} top-1 per exit: {exits} %")
