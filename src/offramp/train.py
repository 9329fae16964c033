"""The training loop: batch -> losses -> weights -> step -> log -> save.

A configuration goes in, a run folder comes out. Every draw follows from the seed and the step (seeds.py), so
a run that was stopped anywhere goes on as if it had not been. Nothing in a step waits for the device.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from offramp.models import store
from offramp.models.exits import ExitNet, ModelSpec
from offramp.objectives.losses import exit_losses, weighted_loss
from offramp.objectives.weighting import UniformWeighting, Weighting
from offramp.runs import MetricsLog, begin_run
from offramp.seeds import mix
from offramp.stopping import Stopped, caught_signals


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
    weighting = UniformWeighting()
    tally = Tally(model.num_exits, place)
    step = restore(out, model, optimizer, tally) if resume else 0
    stream = data.stream(config.train.batch, config.seed, place, start=step)
    dtype = training_dtype(config.train.precision, place)
    metrics = MetricsLog(out, step)
    saver = Saver(config.train.save_seconds)
    began, began_step = time.monotonic(), step
    with caught_signals() as caught, progress("training", total, step) as bar:
        while step < total:
            rate = cosine(config.train.initial_rate, step, total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            torch.manual_seed(mix(config.seed, "step", step))  # for networks that draw, such as dropout
            images, labels = next(stream)
            for x, y in zip(images.chunk(2), labels.chunk(2), strict=True):
                update(model, optimizer, weighting, tally, x, y, step, dtype)
            step += 1
            bar.advance(1, config.train.batch)
            if step % steps == 0:
                tally.refuse_non_finite(out)
                row = epoch_row(step // steps, step, rate, tally)
                if row["epoch"] % config.train.eval_every == 0 or step == total:
                    row |= held_out(model, data, place)
                seconds = time.monotonic() - began
                row["images_per_s"] = round((step - began_step) * config.train.batch / seconds, 1)
                metrics.add(row)
                report(bar, row, config.train.epochs)
                tally.reset()
            if saver.due() or caught or step == total:
                tally.refuse_non_finite(out)
                refuse_bad_params(model, step, out)
                save_state(out, current_state(step, model, optimizer, tally))
            if caught and step < total:
                metrics.close()
                raise Stopped(caught[0], f"stopped at step {step} of {total}, saved; go on with --resume")
    metrics.close()
    store.write_tensors(out / store.WEIGHTS, model.state_dict())
    return out


def update(
    model: ExitNet,
    optimizer: torch.optim.Optimizer,
    weighting: Weighting,
    tally: Tally,
    x: Tensor,
    y: Tensor,
    step: int,
    dtype: torch.dtype,
) -> None:
    """One update of the params on one half of a loader batch."""
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(x)
    losses_BK = exit_losses(logits, y)
    loss = weighted_loss(losses_BK, weighting.weights(losses_BK.detach()))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    tally.add(loss.detach(), losses_BK.detach(), logits, y, step)


class Tally:
    """Sums over an epoch, kept on the device: losses, hits, and the first step whose loss was not finite."""

    def __init__(self, num_exits: int, device: torch.device) -> None:
        self.tensors = {
            "losses": torch.zeros(num_exits, dtype=torch.float64, device=device),
            "hits": torch.zeros(num_exits, dtype=torch.int64, device=device),
            "seen": torch.zeros((), dtype=torch.int64, device=device),
            "first_bad": torch.full((), -1, dtype=torch.int64, device=device),
        }

    @torch.no_grad()
    def add(self, loss: Tensor, losses_BK: Tensor, logits: list[Tensor], labels: Tensor, step: int) -> None:
        sums = self.tensors
        sums["losses"] += losses_BK.sum(0, dtype=torch.float64)
        sums["hits"] += torch.stack([(x.argmax(1) == labels).sum() for x in logits])
        sums["seen"] += len(labels)
        is_first = ~torch.isfinite(loss) & (sums["first_bad"] < 0)
        sums["first_bad"].masked_fill_(is_first, step)

    def means(self) -> dict[str, list[float]]:
        seen = self.tensors["seen"].item()
        return {
            "train_loss": (self.tensors["losses"] / seen).tolist(),
            "train_top1": (self.tensors["hits"] / seen).tolist(),
        }

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


def cosine(initial: float, step: int, total: int) -> float:
    """The rate at `step` of `total`: from `initial` down to 0."""
    return 0.5 * initial * (1 + math.cos(math.pi * step / total))


def current_state(step: int, model: ExitNet, optimizer: torch.optim.Optimizer, tally: Tally) -> State:
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors(model, optimizer),
        "tally": tally.tensors,
    }
    return State(step, parts, info={})


def restore(run: Path, model: ExitNet, optimizer: torch.optim.Optimizer, tally: Tally) -> int:
    """Put the run's last state back; the step to go on from, 0 if nothing was saved yet."""
    state = load_state(run)
    if state is None:
        return 0
    store.load_state(model, state.parts["model"], run / "last")
    load_optimizer_tensors(model, optimizer, state.parts["optimizer"])
    for name, tensor in tally.tensors.items():
        tensor.copy_(state.parts["tally"][name])
    return state.step


def epoch_row(epoch: int, step: int, rate: float, tally: Tally) -> dict[str, Any]:
    return {"epoch": epoch, "step": step, "learning_rate": rate, **tally.means()}


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
