"""The training loop: batch -> step -> log -> save.

It goes on by one step each time it is asked, so that several runs can share a device. Every draw follows from the
seed and the step (common/seeds.py), so a run that was stopped anywhere goes on as if it had not been. Nothing in a
step waits for the device.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.device import suits_kernels, training_dtype
from offramp.common.seeds import mix
from offramp.common.signals import Stopped
from offramp.data import Dataset
from offramp.models.exits import ExitNet
from offramp.models.weights import load_tensors, write_tensors
from offramp.runs.config import RunConfig
from offramp.runs.folder import WEIGHTS, MetricsLog, begin_run, forget_unsaved, going_on_explained
from offramp.runs.lock import locked
from offramp.runs.manifest import lasting_files, look_over, write_manifest
from offramp.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_optimizer_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from offramp.training.cuda_graph import CapturedStep
from offramp.training.ema import Ema
from offramp.training.evaluate import accuracy
from offramp.training.method import Method, Prepare
from offramp.training.mixing import Mixing
from offramp.training.objectives import Objective, num_terms
from offramp.training.optimizers import new_optimizer, rate_share, set_rate
from offramp.training.parts import freeze_norms
from offramp.training.probe import probe_heads
from offramp.training.processes import Processes
from offramp.training.step import HalfResult, train_step
from offramp.training.tally import Tally, kept_in, save_samples
from offramp.training.tape import use_taped_layers
from offramp.training.weighting import Context, new_weighting


@dataclass(frozen=True)
class Setup:
    """Where a run takes place, and with how many others; `caught` lists the signals that asked it to stop."""

    device: torch.device
    processes: Processes = field(default_factory=Processes)
    caught: list[int] = field(default_factory=list)
    together: int = 1

    @property
    def writes(self) -> bool:
        return self.processes.rank == 0

    def begin(self, out: Path, config: RunConfig, data: Dataset, resume: bool) -> None:
        """Make or check the run folder."""
        self.in_first(out, lambda: begin_run(out, config, data, self.device, resume))

    @contextmanager
    def alone_in(self, out: Path) -> Iterator[None]:
        """Keep other trainings out of the run folder meanwhile."""
        with ExitStack() as held:
            self.in_first(out, lambda: held.enter_context(locked(out)))
            yield

    def in_first(self, out: Path, use: Callable[[], None]) -> None:
        """Use the run folder in the first process; the others wait for it, and fail where it does."""
        refused: ValueError | OSError | None = None
        if self.writes:
            try:
                with going_on_explained(out):
                    use()
            except (ValueError, OSError) as error:
                refused = error
        if self.processes.any([refused is not None])[0]:
            raise refused or ValueError(f"the first process cannot use {out}")


@dataclass(frozen=True)
class Phase:
    """What is trained, on which data and objective, and into which folder.

    `model` is what is saved; `module` what is called: the model or a part of it. Not `final`: another phase
    follows, so a request to stop still counts after the last step.
    """

    config: RunConfig
    out: Path
    data: Dataset
    model: ExitNet
    module: nn.Module
    objective: Objective
    resume: bool
    prepare: Prepare | None = None
    final: bool = True

    @property
    def num_exits(self) -> int:
        """Of what is trained."""
        return int(getattr(self.module, "num_exits", self.model.num_exits))

    def heads_to_probe(self) -> list[int]:
        """The heads that are new and trained, from 1; one that stands at several exits by the last of these.

        The last one is not new where the network was trained before.
        """
        heads, last, parts = list(self.model.heads), self.model.num_exits, self.config.train.parts
        known = {heads[k - 1] for k in self.model.trained_exits}
        if parts == "inner_heads" or self.config.train.network_epochs:
            known.add(heads[-1])
        asked = {heads[k - 1]: k for k in ([last] if parts == "last_exit" else range(1, last + 1))}
        return sorted(k for head, k in asked.items() if head not in known)


@dataclass(frozen=True)
class Progress:
    """What a phase has just done: begun (`total` steps, `done` of them earlier), or trained on `images`.

    `line` is for people, at the end of an epoch; `now` says what comes next.
    """

    total: int = 0
    done: int = 0
    images: int = 0
    line: str | None = None
    now: str = "training"


def train_phase(phase: Phase, setup: Setup) -> Iterator[Progress]:
    """Train, one step each time it is asked; what fails before anything is saved leaves no folder behind."""
    setup.begin(phase.out, phase.config, phase.data, phase.resume)
    try:
        loop = Loop(phase, setup)
        yield Progress(total=loop.total, done=loop.step)
        with loop.metrics_log() as metrics:
            while loop.step < loop.total:
                loop.set_rates(rate_share(loop.step, loop.total, phase.config.train.warm_up_steps))
                loop.seed_draws()
                images, labels = next(loop.stream)
                halves = loop.train_step(images, labels, loop.step, loop.recipe())
                loop.count(halves)
                line = loop.end_epoch(halves[-1], metrics) if loop.step % loop.steps_per_epoch == 0 else None
                loop.save_where_due(phase.final)
                yield Progress(images=phase.config.train.batch, line=line, now=loop.now())
    except ValueError:
        if setup.writes:
            forget_unsaved(phase.out)
        raise
    if setup.writes:
        with going_on_explained(phase.out):
            with loop.averaged():
                write_tensors(phase.out / WEIGHTS, phase.model.state_dict())
            write_manifest(phase.out, loop.known_files)
    setup.processes.wait()  # a second phase reads what the first process has just written


class Loop:
    """Everything that a step needs, and how far the run has come."""

    def __init__(self, phase: Phase, setup: Setup) -> None:
        self.config, self.out, self.setup, self.module = phase.config, phase.out, setup, phase.module
        self.model, self.data = phase.model, phase.data
        config, module, batch = phase.config, phase.module, phase.config.train.batch
        self.steps_per_epoch = self.data.steps_per_epoch(batch) if config.train.epochs else 1
        self.total = self.steps_per_epoch * config.train.epochs
        module.to(setup.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        if config.train.freeze_norms:
            freeze_norms(phase.model)
        if isinstance(phase.prepare, nn.Module):
            phase.prepare.to(setup.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        fast = config.train.fast and setup.device.type == "cuda"
        found = load_checkpoint(self.out) if phase.resume else None
        if found is None and config.train.probe:
            self.probe(phase.heads_to_probe())
        self.optimizer = new_optimizer(phase.model, config.train)
        # after that: a network that holds kernels cannot be copied, which finding its params' stages takes
        use_taped_layers(module, kernels=fast and kernels_suit(config, setup.device))
        self.ema = None if config.train.ema is None else Ema(phase.model, config.train.ema)
        self.method = new_method(phase, setup, self.total, self.ema)
        self.tally = Tally(phase.num_exits, setup.device)
        self.step, self.seconds_before = 0, 0.0
        self.rows: list[dict[str, Any]] | None = None  # logged so far; states of older versions do not tell
        self.known_files: dict[str, str] = {}  # digests of what earlier calls wrote
        if found is not None:
            self.restore(found)
        self.train_step = (
            CapturedStep(module, self.optimizer, self.method)
            if fast
            else partial(train_step, module, self.optimizer, self.method)
        )
        places = setup.processes.own_places(batch) if setup.processes.size > 1 else None
        self.stream = self.data.stream(batch, config.seed, setup.device, self.step, places)
        self.began, self.began_step = time.monotonic(), self.step
        self.saved = self.began

    def probe(self, heads: Sequence[int]) -> None:
        """Let new heads begin as linear probes: the first process fits them, the others take what it found."""
        if self.setup.writes and heads:
            probe_heads(self.model, heads, self.data, self.config.seed, self.setup.device)
        for k in heads:
            self.setup.processes.take_from_first(self.model.heads[k - 1].state_dict().values())

    def metrics_log(self) -> Any:
        """The log that the first process writes; None in the others."""
        if not self.setup.writes:
            return nullcontext()
        with going_on_explained(self.out):
            self.known_files = look_over(self.out, self.known_files, self.step == self.total)
            log = MetricsLog(self.out, self.step, self.rows)
        self.rows = log.rows
        self.seconds_before = max(self.seconds_before, log.seconds_before)
        return log

    def set_rates(self, share: float) -> None:
        """All learning rates at `share` of their initial values, and the weighting at this step."""
        self.rate = share * self.config.train.initial_rate
        set_rate(self.optimizer, self.rate)
        self.method.weighting.set_rate(share)
        self.method.weighting.begin_step(self.step)

    def seed_draws(self) -> None:
        """For networks that draw, such as those with dropout: what they draw follows from the step."""
        torch.manual_seed(mix(self.config.seed, "step", self.step, self.setup.processes.rank))

    def recipe(self) -> Tensor | None:
        """How samples are mixed at this step; the same in all processes."""
        if self.method.mixing is None:
            return None
        drawn = self.method.mixing.draw(self.step, (self.data.image_size, self.data.image_size))
        return drawn.to(self.setup.device, non_blocking=True)

    def count(self, halves: list[HalfResult]) -> None:
        """Add up what a step saw."""
        for half in halves:
            self.tally.add(half, self.step)
        self.step += 1

    def end_epoch(self, half: HalfResult, metrics: MetricsLog | None) -> str | None:
        """Evaluate, each process its part of the calibration split; the first logs and gives a line for people."""
        self.tally.refuse_non_finite(self.out)
        config, epoch = self.config, self.step // self.steps_per_epoch
        row = {"epoch": epoch, "step": self.step, "learning_rate": self.rate, **self.tally.means(self.setup.processes)}
        self.tally.reset()
        if epoch % config.train.eval_every == 0 or self.step == self.total:
            with self.averaged():
                row |= calibration_accuracy(self.model, self.data, self.setup)
        if metrics is None:
            return None
        images_done = (self.step - self.began_step) * config.train.batch
        spent = time.monotonic() - self.began
        row["images_per_s"] = round(images_done / spent, 1)
        row["seconds"] = round(self.seconds(), 1)
        if self.setup.together > 1:
            row["together"] = self.setup.together  # runs that shared the device meanwhile
        with going_on_explained(self.out):
            save_samples(self.out, epoch, half, config.weighting.q)
            metrics.add(row)
        return epoch_line(row, config.train.epochs)

    def averaged(self) -> AbstractContextManager[None]:
        """What is evaluated and kept at the end: the average of the params, if there is one."""
        return nullcontext() if self.ema is None else self.ema.in_place()

    def save_where_due(self, final: bool) -> None:
        """Save the state now and then, at the end, and before leaving on request."""
        caught = self.setup.caught
        stopping, due = self.setup.processes.any([bool(caught), self.save_is_due()])
        if due or stopping or self.step == self.total:
            self.tally.refuse_non_finite(self.out)
            refuse_bad_params(self.model, self.step, self.out)
            checkpoint = self.checkpoint()
            if self.setup.writes:
                with going_on_explained(self.out):
                    checkpoint.info["files"] = lasting_files(self.out, self.epochs_logged(), self.known_files)
                    save_checkpoint(self.out, checkpoint)
        if stopping and (self.step < self.total or not final):
            signum = caught[0] if caught else signal.SIGTERM  # another process's
            raise Stopped(
                signum, f"stopped at step {self.step} of {self.total}, saved; go on with the same command and --resume"
            )

    def save_is_due(self) -> bool:
        """Whether the last save was long enough ago."""
        now = time.monotonic()
        due = now - self.saved >= self.config.train.save_seconds
        self.saved = now if due else self.saved
        return due

    def checkpoint(self) -> Checkpoint:
        """All that is needed to go on from here."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "weighting": self.method.weighting.tensors(),
            "tally": self.tally.summed(self.method.processes),
        }
        if self.ema is not None:
            parts["ema"] = self.ema.tensors()
        return Checkpoint(self.step, parts, {"seconds": self.seconds(), "metrics": self.rows})

    def epochs_logged(self) -> list[int]:
        """The epochs whose rows and samples are written."""
        return [row["epoch"] for row in self.rows or []]

    def restore(self, found: Checkpoint) -> None:
        """Put the run's last state back."""
        load_tensors(self.model, found.parts["model"], self.out / "last")
        load_optimizer_tensors(self.model, self.optimizer, found.parts["optimizer"])
        self.method.weighting.load_tensors(found.parts["weighting"])
        self.tally.load(found.parts["tally"], self.method.processes)
        if self.ema is not None:
            self.ema.load_tensors(found.parts["ema"])
        self.step, self.seconds_before = found.step, float(found.info.get("seconds", 0.0))  # older ones do not tell
        self.rows, self.known_files = found.info.get("metrics"), found.info.get("files", {})

    def seconds(self) -> float:
        """That training has taken, with what was spent before it was stopped."""
        return self.seconds_before + time.monotonic() - self.began

    def now(self) -> str:
        """What comes next, for the bar."""
        epoch = self.step // self.steps_per_epoch + 1
        return f"epoch {epoch}/{self.config.train.epochs}" if self.step < self.total else "training"


def new_method(phase: Phase, setup: Setup, total_steps: int, ema: Ema | None = None) -> Method:
    """The configured way of training."""
    config, device = phase.config, setup.device
    dtype = training_dtype(config.train.precision, device)
    context = Context(phase.num_exits, total_steps, config.seed, device, num_terms(phase.objective))
    return Method(
        new_weighting(config.weighting, context),
        config.weighting,
        phase.objective,
        clip_norm=config.train.clip_norm,
        processes=setup.processes,
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
        prepare=phase.prepare,
        ema=ema,
        mixing=Mixing.of(config.train, phase.data.num_classes, config.seed),
    )


def kernels_suit(config: RunConfig, device: torch.device) -> bool:
    """Whether our kernels can train so: they are for 16 bits and know no second derivative."""
    dtype = training_dtype(config.train.precision, device)
    return suits_kernels(dtype, device) and config.weighting.engine != "double_backward"


def refuse_bad_params(model: ExitNet, step: int, run: Path) -> None:
    """A finite loss can still have had a gradient that was not: such params are never saved."""
    finite = torch.stack([p.isfinite().all() for p in model.parameters()]).all()
    if not finite:
        raise ValueError(f"the params are not finite after step {step}; {kept_in(run)}")


def calibration_accuracy(model: ExitNet, data: Dataset, setup: Setup) -> dict[str, Any]:
    """Accuracy on the calibration split, never on test data, of the network that the first process will save."""
    if data.size("calibration") == 0:
        return {}
    setup.processes.take_from_first(model.buffers())  # running statistics are each process's own
    return {"calibration_top1": accuracy(model, data, "calibration", setup.device, setup.processes)}


def epoch_line(row: dict[str, Any], epochs: int) -> str:
    """An epoch in one line, for people."""
    kind = "calibration" if "calibration_top1" in row else "train"
    exits = " ".join(f"{100 * share:5.1f}" for share in row[f"{kind}_top1"])
    loss = sum(row["train_loss"])
    return f"epoch {row['epoch']:>3}/{epochs}  loss {loss:7.3f}  {kind} top-1 per exit: {exits} %"
