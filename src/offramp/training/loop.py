"""The training loop: batch -> losses -> weights -> step -> log -> save.

A loop goes on by one step each time it is asked, so that several can share a device. Every draw follows from the
seed and the step (seeds.py), so a run that was stopped anywhere goes on as if it had not been. Nothing in a step
waits for the device.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offramp.common.device import suits_kernels, training_dtype
from offramp.common.seeds import mix
from offramp.common.signals import Stopped
from offramp.data import Dataset
from offramp.models import store
from offramp.models.exits import ExitNet
from offramp.models.layers import use_kernels
from offramp.runs.config import RunConfig
from offramp.runs.folder import MetricsLog, begin_run, forget_unsaved
from offramp.training.build import new_method, new_optimizer
from offramp.training.checkpoint import State, load_optimizer_tensors, load_state, optimizer_tensors, save_state
from offramp.training.cuda_graph import Stepper
from offramp.training.evaluate import accuracy
from offramp.training.meta_gradient import Criterion
from offramp.training.processes import World
from offramp.training.rates import cosine, set_rate
from offramp.training.step import HalfResult, Method, iterate
from offramp.training.tally import Tally, kept_in, save_samples
from offramp.training.weighting import LearnedWeighting, Weighting


@dataclass(frozen=True)
class Setup:
    """Where a run takes place, and with how many others; `caught` lists the signals that asked it to stop."""

    data: Dataset
    device: torch.device
    world: World
    caught: list[int] = field(default_factory=list)
    together: int = 1

    @property
    def writes(self) -> bool:
        return self.world.rank == 0

    def begin(self, out: Path, config: RunConfig, resume: bool) -> None:
        """Make or check the run folder, in the first process; the others wait for it."""
        refused: ValueError | None = None
        if self.writes:
            try:
                begin_run(out, config, self.data, self.device, resume)
            except ValueError as error:
                refused = error
        if self.world.any([refused is not None])[0]:
            raise refused or ValueError(f"the first process cannot use {out}")


@dataclass(frozen=True)
class Event:
    """What a loop has just done: begun (`total` steps, `done` of them earlier), or trained on `images`.

    `line` is for people, at the end of an epoch; `now` says what comes next.
    """

    total: int = 0
    done: int = 0
    images: int = 0
    line: str | None = None
    now: str = "training"


@dataclass(frozen=True)
class Phase:
    """What is trained, and into which folder.

    `model` is what is saved; `module` what is called: the model or a wrapper around it. Not `final`: another phase
    follows, so a request to stop still counts after the last step.
    """

    config: RunConfig
    out: Path
    model: ExitNet
    module: nn.Module
    criterion: Criterion
    resume: bool
    final: bool = True


def fit(phase: Phase, setup: Setup) -> Iterator[Event]:
    """Train, one step per event; what fails before anything is saved leaves no folder behind."""
    setup.begin(phase.out, phase.config, phase.resume)
    try:
        yield from _fit(phase, setup)
    except ValueError:
        if setup.writes:
            forget_unsaved(phase.out)
        raise


def _fit(phase: Phase, setup: Setup) -> Iterator[Event]:
    loop = Loop(phase, setup)
    yield Event(total=loop.total, done=loop.step)
    with MetricsLog(phase.out, loop.step) if setup.writes else nullcontext() as metrics:
        loop.seconds_before = max(loop.seconds_before, metrics.seconds_before if metrics else 0.0)
        while loop.step < loop.total:
            last_half = loop.advance()
            line = loop.end_epoch(last_half, metrics) if loop.step % loop.steps_per_epoch == 0 else None
            loop.save_where_due(phase.final)
            yield Event(images=phase.config.train.batch, line=line, now=loop.now())
    if setup.writes:
        store.write_tensors(phase.out / store.WEIGHTS, phase.model.state_dict())
    setup.world.wait()  # a second phase reads what the first process has just written


class Loop:
    """Everything that a step needs, and how far the run has come."""

    def __init__(self, phase: Phase, setup: Setup) -> None:
        self.config, self.out, self.setup, self.model = phase.config, phase.out, setup, phase.model
        config, model, module = phase.config, phase.model, phase.module
        place, world, batch = setup.device, setup.world, config.train.batch
        self.steps_per_epoch = setup.data.steps_per_epoch(batch)
        self.total = self.steps_per_epoch * config.train.epochs
        module.to(place, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        fast = config.train.fast and place.type == "cuda"
        twice = config.weighting.engine == "double_backward"  # our kernels know no second derivative
        made_for = suits_kernels(training_dtype(config.train.precision, place), place)
        use_kernels(module, fast and made_for and not twice)
        self.optimizer = new_optimizer(model, config.train)
        self.method = new_method(config, model.num_exits, phase.criterion, place, world, self.total)
        self.tally = Tally(model.num_exits, place)
        self.step, self.seconds_before = 0, 0.0
        if phase.resume:
            self.step, self.seconds_before = restore(phase.out, model, self.optimizer, self.method, self.tally)
        self.stepper = Stepper(module, self.optimizer, self.method, iterate, capture=fast)
        places = world.own_places(batch) if world.size > 1 else None
        self.stream = setup.data.stream(batch, config.seed, place, self.step, places)
        self.saver = Saver(config.train.save_seconds)
        self.began, self.began_step = time.monotonic(), self.step

    def advance(self) -> HalfResult:
        """One loader batch; gives the result of its second half."""
        set_rates(self.optimizer, self.method.weighting, self.config.train.initial_rate, cosine(self.step, self.total))
        # for networks that draw: dropout
        torch.manual_seed(mix(self.config.seed, "step", self.step, self.setup.world.rank))
        halves = self.stepper(*next(self.stream), self.step)
        for half in halves:
            self.tally.add(half, self.step)
        self.step += 1
        return halves[-1]

    def end_epoch(self, half: HalfResult, metrics: MetricsLog | None) -> str | None:
        """Log the epoch; in the first process, evaluate and give a line for people."""
        self.tally.refuse_non_finite(self.out)
        config, epoch = self.config, self.step // self.steps_per_epoch
        rate = float(self.optimizer.param_groups[0]["lr"])
        row = {"epoch": epoch, "step": self.step, "learning_rate": rate, **self.tally.means(self.setup.world)}
        self.tally.reset()
        if metrics is None:
            return None
        if epoch % config.train.eval_every == 0 or self.step == self.total:
            row |= held_out(self.model, self.setup.data, self.setup.device)
        images_done = (self.step - self.began_step) * config.train.batch
        spent = time.monotonic() - self.began
        row["images_per_s"] = round(images_done / spent, 1)
        row["seconds"] = round(self.seconds(), 1)
        if self.setup.together > 1:
            row["together"] = self.setup.together  # runs that shared the device meanwhile
        save_samples(self.out, epoch, half, config.weighting.q)
        metrics.add(row)
        return epoch_line(row, config.train.epochs)

    def save_where_due(self, final: bool) -> None:
        """Save the state now and then, at the end, and before leaving on request."""
        world, caught = self.setup.world, self.setup.caught
        stopping, due = world.any([bool(caught), self.saver.due()])
        if due or stopping or self.step == self.total:
            self.tally.refuse_non_finite(self.out)
            refuse_bad_params(self.model, self.step, self.out)
            info = {"seconds": self.seconds()}
            state = current_state(self.step, self.model, self.optimizer, self.method, self.tally, info)
            if self.setup.writes:
                save_state(self.out, state)
        if stopping and (self.step < self.total or not final):
            signum = caught[0] if caught else signal.SIGTERM  # another process's
            raise Stopped(
                signum, f"stopped at step {self.step} of {self.total}, saved; go on with the same command and --resume"
            )

    def seconds(self) -> float:
        """That training has taken, with what was spent before it was stopped."""
        return self.seconds_before + time.monotonic() - self.began

    def now(self) -> str:
        """What comes next, for the bar."""
        epoch = self.step // self.steps_per_epoch + 1
        return f"epoch {epoch}/{self.config.train.epochs}" if self.step < self.total else "training"


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
    set_rate(optimizer, share * initial)
    if isinstance(weighting, LearnedWeighting):
        weighting.set_rate(share)


def current_state(
    step: int,
    model: ExitNet,
    optimizer: torch.optim.Optimizer,
    method: Method,
    tally: Tally,
    info: dict[str, Any],
) -> State:
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors(model, optimizer),
        "weighting": method.weighting.tensors(),
        "tally": tally.summed(method.world),
    }
    return State(step, parts, info)


def restore(
    run: Path, model: ExitNet, optimizer: torch.optim.Optimizer, method: Method, tally: Tally
) -> tuple[int, float]:
    """Put the run's last state back; the step to go on from and the seconds it took, 0 if nothing was saved yet."""
    state = load_state(run)
    if state is None:
        return 0, 0.0
    store.load_state(model, state.parts["model"], run / "last")
    load_optimizer_tensors(model, optimizer, state.parts["optimizer"])
    method.weighting.load_tensors(state.parts["weighting"])
    tally.load(state.parts["tally"], method.world)
    return state.step, float(state.info.get("seconds", 0.0))  # older states do not tell


def held_out(model: ExitNet, data: Dataset, device: torch.device) -> dict[str, Any]:
    """Accuracy on the calibration split, never on test data."""
    if data.size("calibration") == 0:
        return {}
    return {"calibration_top1": accuracy(model, data, "calibration", device)}


def epoch_line(row: dict[str, Any], epochs: int) -> str:
    kind = "calibration" if "calibration_top1" in row else "train"
    exits = " ".join(f"{100 * share:5.1f}" for share in row[f"{kind}_top1"])
    loss = sum(row["train_loss"])
    return f"epoch {row['epoch']:>3}/{epochs}  loss {loss:7.3f}  {kind} top-1 per exit: {exits} %"
