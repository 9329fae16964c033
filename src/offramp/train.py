"""The training loop: batch -> losses -> weights -> step -> log -> save.

A configuration goes in, a run folder comes out. Every draw follows from the seed and the step (seeds.py), so
a run that was stopped anywhere goes on as if it had not been. Nothing in a step waits for the device.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offramp.build import (
    fit_to_data,
    new_method,
    new_model,
    new_optimizer,
    on_top_of,
    refuse_other_size,
    without_collaboration,
)
from offramp.checkpoint import (
    State,
    load_optimizer_tensors,
    load_state,
    optimizer_tensors,
    save_state,
)
from offramp.config import RunConfig
from offramp.console import Bar, progress
from offramp.data import Dataset, load_dataset
from offramp.device import pick_device
from offramp.evaluate import accuracy
from offramp.meta import Criterion
from offramp.models import store
from offramp.models.collaboration import CollaborativeNet
from offramp.models.exits import ExitNet
from offramp.objectives.imta import OneForAll
from offramp.objectives.losses import exit_losses
from offramp.objectives.weighting import LearnedWeighting, Weighting
from offramp.runs import MetricsLog, begin_run
from offramp.seeds import mix
from offramp.step import Method, iterate
from offramp.stopping import Stopped, caught_signals
from offramp.tally import Tally, kept_in, save_samples
from offramp.world import World, joined_world


def train_run(config: RunConfig, out: str | Path, *, device: str = "auto", resume: bool = False) -> Path:
    """Train into the run folder `out` and return it; `resume` goes on from the folder's last state.

    Under torchrun all processes call this; the first one writes.
    """
    out, place = Path(out), pick_device(device)
    with joined_world(place) as world:
        data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.options())
        config = fit_to_data(config, data)
        model = new_model(config)
        refuse_other_size(model, data)
        setup = Setup(data, place, world)
        if not isinstance(model, CollaborativeNet):
            model.equilibrium = config.imta.equilibrium
            return fit(config, out, setup, model, model, exit_losses, resume)
        setup.begin(out, config, resume)
        first = without_collaboration(config)
        alone = new_model(first)
        alone.equilibrium = config.imta.equilibrium
        fit(first, out / "phase1", setup, alone, alone, exit_losses, resume=True, final=False)
        module = on_top_of(out / "phase1", model)
        distilled = OneForAll(config.imta.temperature, config.imta.gamma)
        return fit(config, out, setup, model, module, distilled, resume=True)


@dataclass(frozen=True)
class Setup:
    """Where a run takes place."""

    data: Dataset
    device: torch.device
    world: World

    @property
    def writes(self) -> bool:
        return self.world.rank == 0

    def begin(self, out: Path, config: RunConfig, resume: bool) -> None:
        """Make or check the run folder, in the first process; the others wait for it."""
        refused: ValueError | None = None
        if self.writes:
            try:
                begin_run(out, config, self.device, resume)
            except ValueError as error:
                refused = error
        if self.world.any([refused is not None])[0]:
            raise refused or ValueError(f"the first process cannot use {out}")


def fit(
    config: RunConfig,
    out: Path,
    setup: Setup,
    model: ExitNet,
    module: nn.Module,
    criterion: Criterion,
    resume: bool,
    final: bool = True,
) -> Path:
    """The loop. `model` is what is saved; `module` is what is called, the model itself or a wrapper around it.

    Not `final`: another phase follows, so a request to stop still counts after the last step.
    """
    data, place, world = setup.data, setup.device, setup.world
    steps = data.steps_per_epoch(config.train.batch)
    total = steps * config.train.epochs
    module.to(place, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = new_optimizer(model, config.train)
    method = new_method(config, model.num_exits, criterion, place, world)
    tally = Tally(model.num_exits, place)
    places = world.own_places(config.train.batch) if world.size > 1 else None
    setup.begin(out, config, resume)
    step = restore(out, model, optimizer, method, tally) if resume else 0
    stream = data.stream(config.train.batch, config.seed, place, step, places)
    saver = Saver(config.train.save_seconds)
    began, began_step = time.monotonic(), step
    with (
        caught_signals() as caught,
        progress("training", total, step, silent=not setup.writes) as bar,
        MetricsLog(out, step) if setup.writes else nullcontext() as metrics,
    ):
        while step < total:
            set_rates(optimizer, method.weighting, config.train.initial_rate, cosine(step, total))
            torch.manual_seed(mix(config.seed, "step", step, world.rank))  # for networks that draw: dropout
            images, labels = next(stream)
            for half in iterate(module, optimizer, method, images, labels, step):
                tally.add(half, step)
            step += 1
            bar.advance(1, config.train.batch)
            if step % steps == 0:
                tally.refuse_non_finite(out)
                row = epoch_row(step // steps, step, optimizer.param_groups[0]["lr"], tally.means(world))
                if metrics:
                    if row["epoch"] % config.train.eval_every == 0 or step == total:
                        row |= held_out(model, data, place)
                    images_done = (step - began_step) * config.train.batch
                    row["images_per_s"] = round(images_done / (time.monotonic() - began), 1)
                    save_samples(out, row["epoch"], half, config.weighting.q)
                    metrics.add(row)
                    report(bar, row, config.train.epochs)
                tally.reset()
            stopping, due = world.any([bool(caught), saver.due()])
            if due or stopping or step == total:
                tally.refuse_non_finite(out)
                refuse_bad_params(model, step, out)
                state = current_state(step, model, optimizer, method, tally)
                if setup.writes:
                    save_state(out, state)
            if stopping and (step < total or not final):
                signum = caught[0] if caught else signal.SIGTERM  # another process's
                raise Stopped(signum, f"stopped at step {step} of {total}, saved; go on with --resume")
    if setup.writes:
        store.write_tensors(out / store.WEIGHTS, model.state_dict())
    world.wait()  # a second phase reads what the first process has just written
    return out


class Saver:
    """Says when the next save is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.last = seconds, time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self.last < self.seconds:
            return False
        self.last = time.monotonic()
        return True


def refuse_bad_params(model: ExitNet, step: int, run: Path) -> None:
    """A finite loss can still have had a gradient that was not: such params are never saved."""
    finite = torch.stack([p.isfinite().all() for p in model.parameters()]).all()
    if not finite:
        raise ValueError(f"the params are not finite after step {step}; {kept_in(run)}")


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
        "tally": tally.summed(method.world),
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
    tally.load(state.parts["tally"], method.world)
    return state.step


def epoch_row(epoch: int, step: int, rate: float, means: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": epoch, "step": step, "learning_rate": rate, **means}


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
