"""Runs: a configuration goes in, a run folder comes out; several of them can share a GPU.

`loop.py` trains; here the networks are built, phases follow each other, and people see how far it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from offramp.common.console import Bar, progress
from offramp.common.device import pick_device
from offramp.common.signals import Stopped, caught_signals
from offramp.data import load_dataset
from offramp.models.collaboration import CollaborativeNet
from offramp.runs.config import RunConfig
from offramp.runs.folder import PHASE1
from offramp.training.build import (
    fit_to_data,
    new_model,
    new_weighting,
    on_top_of,
    refuse_other_size,
    without_collaboration,
)
from offramp.training.loop import Event, Phase, Setup, fit
from offramp.training.objectives.imta import OneForAll
from offramp.training.objectives.losses import exit_losses
from offramp.training.processes import World, joined_world

Job = tuple[RunConfig, Path]


def train_run(config: RunConfig, out: str | Path, *, device: str = "auto", resume: bool = False) -> Path:
    """Train into the run folder `out` and return it; `resume` goes on from the folder's last state.

    Under torchrun all processes call this; the first one writes.
    """
    return train_runs([(config, Path(out))], device=device, resume=resume)[0]


def train_runs(jobs: Sequence[Job], *, device: str = "auto", resume: bool = False) -> list[Path]:
    """Train each configuration into its folder: together on a GPU, one after another on a CPU."""
    folders = [out for _, out in jobs]
    if len(set(folders)) < len(folders):
        raise ValueError(f"each run needs a folder of its own, got {', '.join(map(str, folders))}")
    place = pick_device(device)
    together = [list(jobs)] if place.type == "cuda" else [[job] for job in jobs]
    with joined_world(place) as world, caught_signals() as caught:
        for group in together:
            with progress("training", 0, silent=world.rank > 0) as bar:
                own = [training(*job, place, world, caught, resume, len(group)) for job in group]
                drive(dict(zip(names([out for _, out in group]), own, strict=True)), bar, place)
    return [out for _, out in jobs]


def names(folders: Sequence[Path]) -> list[str]:
    """What runs are called: by their folders' own names, unless two have the same."""
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def drive(runs: dict[str, Iterator[Event]], bar: Bar, device: torch.device) -> None:
    """One step of each named run in turn until all are done; on a GPU each run has a stream of its own.

    Small kernels of one run fill the gaps of another. Each run computes what it would compute alone.
    """
    if len(runs) == 1:
        for event in next(iter(runs.values())):
            show(event, bar)
        return
    lanes = {name: _lane(device) for name in runs}
    active, failed = dict(runs), []
    while active:
        for name, run in list(active.items()):
            try:
                with lanes[name]:
                    show(next(run), bar, f"{name}: ")
            except StopIteration:
                del active[name]
            except (Stopped, ValueError, RuntimeError) as error:  # one run's trouble is not the others'
                bar.line(f"{name}: {error}")
                failed.append(error)
                del active[name]
    if failed:
        raise failed[0]


def _lane(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def show(event: Event, bar: Bar, who: str = "") -> None:
    """Move the bar on; a line per epoch stays above it."""
    if event.total:
        bar.extend(event.total, event.done)
        return
    bar.show(event.now)
    if event.line:
        bar.line(who + event.line)
    bar.advance(1, event.images)


def training(
    config: RunConfig,
    out: Path,
    place: torch.device,
    world: World,
    caught: list[int],
    resume: bool,
    together: int = 1,
) -> Iterator[Event]:
    """A whole run; one with collaboration has two phases."""
    data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.options())
    config = fit_to_data(config, data)
    model = new_model(config)
    refuse_other_size(model, data)
    new_weighting(config, model.num_exits, torch.device("cpu"))  # refuses what does not fit before a folder is made
    setup = Setup(data, place, world, caught, together)
    if not isinstance(model, CollaborativeNet):
        model.equilibrium = config.imta.equilibrium
        yield from fit(Phase(config, out, model, model, exit_losses, resume), setup)
        return
    setup.begin(out, config, resume)
    first = without_collaboration(config)
    alone = new_model(first)
    alone.equilibrium = config.imta.equilibrium
    yield from fit(Phase(first, out / PHASE1, alone, alone, exit_losses, resume=True, final=False), setup)
    module = on_top_of(out / PHASE1, model)
    distilled = OneForAll(config.imta.temperature, config.imta.gamma)
    yield from fit(Phase(config, out, model, module, distilled, resume=True), setup)
