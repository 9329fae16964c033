"""Runs: a configuration goes in, a run folder comes out; several of them can share a GPU.

`loop.py` trains; here the networks are built, phases follow each other, and people see how far it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from offramp.common.console import Bar, progress
from offramp.common.device import pick_device
from offramp.common.seeds import mix
from offramp.common.signals import Stopped, caught_signals, listen_again
from offramp.data import DATASETS, Dataset, load_dataset
from offramp.data.augment import AUGMENTATIONS
from offramp.models.collaboration import CollaborativeNet
from offramp.models.exits import ExitNet, ModelSpec
from offramp.models.registry import build, model_entry, override_names
from offramp.runs.config import RunConfig
from offramp.runs.folder import PHASE1
from offramp.training.imta import GradientEquilibrium, OneForAll, on_top_of, without_collaboration
from offramp.training.lookahead import check_optimizer
from offramp.training.loop import Phase, Progress, Setup, train_phase
from offramp.training.method import Method
from offramp.training.objectives import OBJECTIVES, new_objective
from offramp.training.optimizers import OPTIMIZERS, new_optimizer
from offramp.training.processes import joined_processes
from offramp.training.weighting import WEIGHTINGS, Context, new_weighting

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
    groups = [list(jobs)] if place.type == "cuda" else [[job] for job in jobs]
    with joined_processes(place) as processes, caught_signals() as caught:
        for group in groups:
            with progress("training", 0, silent=processes.rank > 0) as bar:
                setup = Setup(place, processes, caught, together=len(group))
                own = [training(*job, setup, resume) for job in group]
                drive(dict(zip(names([out for _, out in group]), own, strict=True)), bar, place)
    return [out for _, out in jobs]


def names(folders: Sequence[Path]) -> list[str]:
    """What runs are called: by their folders' own names, unless two have the same."""
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def drive(runs: dict[str, Iterator[Progress]], bar: Bar, device: torch.device) -> None:
    """One step of each named run in turn until all are done; on a GPU each run has a stream of its own.

    Small kernels of one run fill the gaps of another. Each run computes what it would compute alone.
    """
    if len(runs) == 1:
        for event in next(iter(runs.values())):
            listen_again()
            show(event, bar)
        return
    streams = {name: _stream(device) for name in runs}
    active, failed = dict(runs), []
    while active:
        listen_again()
        for name, run in list(active.items()):
            try:
                with streams[name]:
                    show(next(run), bar, f"{name}: ")
            except StopIteration:
                del active[name]
            except (Stopped, ValueError, RuntimeError, OSError) as error:  # one run's trouble is not the others'
                bar.line(f"{name}: {error}")
                failed.append(error)
                del active[name]
    if failed:
        raise failed[0]


def _stream(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def show(event: Progress, bar: Bar, who: str = "") -> None:
    """Move the bar on; a line per epoch stays above it."""
    if event.total:
        bar.extend(event.total, event.done)
        return
    bar.show(event.now)
    if event.line:
        bar.line(who + event.line)
    bar.advance(1, event.images)


def training(config: RunConfig, out: Path, setup: Setup, resume: bool) -> Iterator[Progress]:
    """A whole run, phase after phase, one step each time it is asked."""
    whole = whole_run(config, out, resume)
    with setup.alone_in(out):
        for phase in phases_of(whole, setup):
            yield from train_phase(phase, setup)


def whole_run(config: RunConfig, out: Path, resume: bool) -> Phase:
    """The whole network, its data and its method; what cannot be trained is refused before a folder is made."""
    refuse_unknown_names(config)
    data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.given())
    config = fit_to_data(config, data)
    model = new_model(config)
    refuse_other_size(model, data)
    phase = plain_phase(config, out, data, model, resume)
    refuse_what_does_not_fit(phase)
    return phase


def phases_of(whole: Phase, setup: Setup) -> Iterator[Phase]:
    """The phases of a run, each made when the one before it is over: two with IMTA's collaboration, else one."""
    config, out, data, model = whole.config, whole.out, whole.data, whole.model
    if not isinstance(model, CollaborativeNet):
        yield whole
        return
    setup.begin(out, config, data, whole.resume)
    first = without_collaboration(config)
    yield replace(plain_phase(first, out / PHASE1, data, new_model(first), resume=True), final=False)
    module = on_top_of(out / PHASE1, model)
    yield Phase(config, out, data, model, module, OneForAll.of(config.imta), True, module.prepare)


def plain_phase(config: RunConfig, out: Path, data: Dataset, model: ExitNet, resume: bool) -> Phase:
    """The whole network, trained as configured."""
    if config.imta.equilibrium:
        model.fork = GradientEquilibrium(model.num_exits)
    return Phase(config, out, data, model, model, new_objective(config.objective), resume)


def refuse_unknown_names(config: RunConfig) -> None:
    """Raise for a name that nothing was registered by, before data are read."""
    model_entry(config.model.name)
    DATASETS[config.data.name]
    WEIGHTINGS[config.weighting.name]
    OBJECTIVES[config.objective.name]
    OPTIMIZERS[config.train.optimizer]
    if config.data.augmentation is not None:
        AUGMENTATIONS[config.data.augmentation]


def refuse_what_does_not_fit(phase: Phase) -> None:
    """Raise if optimiser, weighting and objective do not go with the network or with each other."""
    optimizer = new_optimizer(phase.model, phase.config.train)
    context = Context(phase.model.num_exits, 1, phase.config.seed)
    method = Method(new_weighting(phase.config.weighting, context), clip_norm=phase.config.train.clip_norm)
    if method.weighting.taught:
        check_optimizer(optimizer)


def fit_to_data(config: RunConfig, data: Dataset) -> RunConfig:
    """Fill in the number of classes; refuse a network that was made for other data."""
    if config.model.num_classes not in (None, data.num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but {data.name} has {data.num_classes} classes"
        )
    overrides = config.model.overrides | ({"collaboration": True} if config.imta.collaboration else {})
    return replace(config, model=replace(config.model, num_classes=data.num_classes, overrides=overrides))


def refuse_other_size(model: ExitNet, data: Dataset) -> None:
    """Raise if the network takes images of another size than the data gives."""
    if model.input_shape[-1] != data.image_size:
        known = () if model.spec is None else override_names(model.spec.name) or ()
        size = data.image_size
        set_it, build_it = f"set model.overrides.image_size={size}", f"build it with input_shape=(3, {size}, {size})"
        how = set_it if "image_size" in known else build_it
        raise ValueError(f"the model takes images of {model.input_shape[-1]} pixels, {data.name} gives {size}; {how}")


def new_model(config: RunConfig) -> ExitNet:
    """A fresh network, its params drawn from the seed."""
    for key in ("name", "num_classes"):
        if key in config.model.overrides:
            raise ValueError(f"model.overrides.{key} is not an override; set model.{key}")
    assert config.model.num_classes is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(config.seed, "init"))
        return build(ModelSpec(config.model.name, config.model.num_classes, config.model.overrides))
