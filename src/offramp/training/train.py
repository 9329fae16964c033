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
from offramp.data import DATASETS, ArrayDataset, Dataset, load_dataset, prepared_for
from offramp.data.augment import AUGMENTATIONS
from offramp.models.collaboration import CollaborativeNet
from offramp.models.exits import ExitNet, ModelSpec, without_sources
from offramp.models.libraries import is_library_name
from offramp.models.registry import create_model, load_model, model_entry, override_names
from offramp.runs.config import RunConfig, WeightingConfig
from offramp.runs.folder import PHASE1
from offramp.training.checkpoint import has_checkpoint
from offramp.training.forks import FORKS, new_fork
from offramp.training.imta import OneForAll, on_top_of, without_collaboration
from offramp.training.lookahead import check_optimizer
from offramp.training.loop import Phase, Progress, Setup, train_phase
from offramp.training.meta_gradient import refuse_blind_differences
from offramp.training.method import Method
from offramp.training.objectives import OBJECTIVES, new_objective, num_terms, without_exits
from offramp.training.optimizers import OPTIMIZERS, new_optimizer
from offramp.training.parts import HeadsOnFeatures, part_to_train, refuse_dependent_last
from offramp.training.probe import linear_layer
from offramp.training.processes import joined_processes
from offramp.training.teacher import Taught, load_teacher
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
    model = new_model(config, starts=not (resume and goes_on(config, out)))
    data = prepared_for(model, data, config.data.image_size)
    refuse_other_size(model, data)
    phase = plain_phase(config, out, data, model, resume)
    refuse_what_does_not_fit(phase)
    return phase


def goes_on(config: RunConfig, out: Path) -> bool:
    """Whether a run's params are in its folder, so that those it started from are not needed any more.

    A probe that is still to come needs them, to know which heads were trained.
    """
    return has_checkpoint(out) or (has_checkpoint(out / PHASE1) and not config.train.probe)


def phases_of(whole: Phase, setup: Setup) -> Iterator[Phase]:
    """The phases of a run, each made when the one before it is over: two with IMTA's collaboration or where the network
    is trained alone first, else one.
    """
    config, out, data, model = whole.config, whole.out, whole.data, whole.model
    collaborates = isinstance(model, CollaborativeNet)
    if not collaborates and not config.train.network_epochs:
        yield whole
        return
    setup.begin(out, config, data, whole.resume)
    first = without_collaboration(config) if collaborates else network_alone(config)
    alone = new_model(first, starts=not has_checkpoint(out / PHASE1))
    yield replace(plain_phase(first, out / PHASE1, data, alone, resume=True), final=False)
    if isinstance(model, CollaborativeNet):
        module = on_top_of(out / PHASE1, model)
        yield Phase(config, out, data, model, module, OneForAll.of(config.imta), True, module.prepare)
    else:
        model.load_state_dict(load_model(out / PHASE1).state_dict())
        yield replace(whole, resume=True)


def network_alone(config: RunConfig) -> RunConfig:
    """The first phase of a run that trains its network alone first: no inner exits, so nothing between exits either."""
    train = replace(
        config.train,
        epochs=config.train.network_epochs or 0,
        network_epochs=None,
        parts="last_exit",
        fork=None,
        fork_options={},
    )
    return replace(
        config,
        train=train,
        objective=without_exits(config.objective),
        weighting=WeightingConfig(),
        imta=replace(config.imta, equilibrium=False),
    )


def plain_phase(config: RunConfig, out: Path, data: Dataset, model: ExitNet, resume: bool) -> Phase:
    """The whole network, trained as configured."""
    model.fork = new_fork(config, model.num_exits)
    if model.fork is not None and not model.takes_forks:
        raise ValueError("train.fork is for networks whose exits share a backbone; a cascade's networks share none")
    objective = new_objective(config.objective)
    module = part_to_train(model, config.train.parts)
    prepare = module.prepare if isinstance(module, HeadsOnFeatures) else None
    run = getattr(objective, "teacher", None)
    if run is not None:
        prepare = Taught(load_teacher(str(run).replace("{seed}", str(config.seed)), data, config), prepare)
    return Phase(config, out, data, model, module, objective, resume, prepare)


def refuse_unknown_names(config: RunConfig) -> None:
    """Raise for a name that nothing was registered by, before data are read."""
    model_entry(config.model.name)
    DATASETS[config.data.name]
    WEIGHTINGS[config.weighting.name]
    OBJECTIVES[config.objective.name]
    OPTIMIZERS[config.train.optimizer]
    if config.train.fork is not None:
        FORKS[config.train.fork]
    if config.data.augmentation is not None:
        AUGMENTATIONS[config.data.augmentation]


def refuse_what_does_not_fit(phase: Phase) -> None:
    """Raise if optimiser, weighting and objective do not go with the network or with each other."""
    settings = phase.config.train
    if getattr(phase.objective, "needs_frozen_last", False) and settings.parts != "inner_heads":
        raise ValueError(
            "objective.options.labels=false with source=last needs train.parts=inner_heads: a trained last exit"
        )
    if settings.freeze_norms and not all(phase.config.model.sources):
        raise ValueError(
            "train.freeze_norms keeps statistics that a network has learned; it needs one that starts from trained "
            "params (model.pretrained)"
        )
    if settings.network_epochs:
        refuse_dependent_last(phase.model, "train.network_epochs trains the network for its last exit alone at first")
    if settings.probe and not (phase.resume and has_checkpoint(phase.out)):
        for k in phase.heads_to_probe():
            linear_layer(phase.model.heads[k - 1])
    optimizer = new_optimizer(phase.model, settings)
    context = Context(phase.num_exits, 1, phase.config.seed, terms=num_terms(phase.objective))
    weighting = phase.config.weighting
    method = Method(new_weighting(weighting, context), weighting, phase.objective, clip_norm=settings.clip_norm)
    if method.weighting.taught:
        check_optimizer(optimizer)
        refuse_blind_differences(weighting.engine, phase.model, phase.objective)


def fit_to_data(config: RunConfig, data: Dataset) -> RunConfig:
    """Fill in the number of classes; refuse a network that was made for other data."""
    if config.model.num_classes not in (None, data.num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but {data.name} has {data.num_classes} classes"
        )
    overrides = config.model.overrides | ({"collaboration": True} if config.imta.collaboration else {})
    overrides = implied_size(config, data) | overrides
    return replace(config, model=replace(config.model, num_classes=data.num_classes, overrides=overrides))


def implied_size(config: RunConfig, data: Dataset) -> dict[str, int]:
    """A library's network is built for the size that was asked of the data, or that they have."""
    if not is_library_name(config.model.name):
        return {}
    size = data.image_size if isinstance(data, ArrayDataset) else config.data.image_size
    return {} if size is None else {"image_size": size}


def refuse_other_size(model: ExitNet, data: Dataset) -> None:
    """Raise if the network takes images of another size than the data gives."""
    if model.input_shape[-1] != data.image_size:
        known = () if model.spec is None else override_names(model.spec.name) or ()
        size = data.image_size
        set_it, build_it = f"set model.overrides.image_size={size}", f"build it with input_shape=(3, {size}, {size})"
        how = set_it if "image_size" in known else build_it
        raise ValueError(f"the model takes images of {model.input_shape[-1]} pixels, {data.name} gives {size}; {how}")


def new_model(config: RunConfig, starts: bool = True) -> ExitNet:
    """A network whose params are drawn from the seed or, where training `starts` from others, are those."""
    for key in ("name", "num_classes"):
        if key in config.model.overrides:
            raise ValueError(f"model.overrides.{key} is not an override; set model.{key}")
    assert config.model.num_classes is not None
    spec = ModelSpec(config.model.name, config.model.num_classes, config.model.overrides)
    overrides, pretrained = spec.overrides, config.model.pretrained
    if not starts:
        overrides, pretrained = without_sources(spec).overrides, False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(config.seed, "init"))
        return create_model(spec.name, spec.num_classes, pretrained=pretrained, **overrides)
