"""From a configuration to the things it names: the network, the optimiser, the weighting."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from offramp.common.device import training_dtype
from offramp.common.seeds import mix
from offramp.data import Dataset
from offramp.models import store
from offramp.models.collaboration import CollaborativeNet, WithTeacher, classifier
from offramp.models.exits import ExitNet, ModelSpec
from offramp.models.registry import override_names
from offramp.runs.config import RunConfig, TrainConfig, WeightingConfig
from offramp.runs.folder import read_config
from offramp.training.checkpoint import load_state
from offramp.training.meta_gradient import ENGINES, Criterion
from offramp.training.processes import World
from offramp.training.step import Method
from offramp.training.weighting import (
    FixedWeighting,
    FrozenWeighting,
    LearnedWeighting,
    SelectionWeighting,
    UniformWeighting,
    Weighting,
)

SLOPE = (0.6, 1.4)  # the paper's fixed weights, first to last exit


def fit_to_data(config: RunConfig, data: Dataset) -> RunConfig:
    """Fill in the number of classes; refuse a network that was made for other data."""
    if config.model.num_classes not in (None, data.num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but {data.name} has {data.num_classes} classes"
        )
    overrides = config.model.overrides | ({"collaboration": True} if config.imta.collaboration else {})
    return replace(config, model=replace(config.model, num_classes=data.num_classes, overrides=overrides))


def refuse_other_size(model: ExitNet, data: Dataset) -> None:
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
        return store.build(ModelSpec(config.model.name, config.model.num_classes, config.model.overrides))


def new_optimizer(model: ExitNet, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.initial_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=next(model.parameters()).is_cuda,
    )


def new_method(
    config: RunConfig, num_exits: int, criterion: Criterion, device: torch.device, world: World, total_steps: int
) -> Method:
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
        ceil(settings.until * total_steps),
        settings.order,
        clip_norm=config.train.clip_norm,
        criterion=criterion,
        world=world,
        autocast=partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32),
    )


def new_weighting(config: RunConfig, num_exits: int, device: torch.device) -> Weighting:
    """The weighting object that the configuration names."""
    settings = config.weighting
    if settings.name in ("ascending", "descending"):
        first, last = SLOPE if settings.name == "ascending" else SLOPE[::-1]
        return FixedWeighting(torch.linspace(first, last, num_exits, device=device))
    if settings.exits is not None:
        if len(settings.exits) != num_exits:
            raise ValueError(f"weighting.exits has {len(settings.exits)} weights, the network has {num_exits} exits")
        return FixedWeighting(torch.tensor(settings.exits, device=device))
    if settings.name == "selection":
        return SelectionWeighting(settings.q)
    if settings.name == "uniform":
        return UniformWeighting()
    if settings.name == "frozen":
        return frozen_weighting(Path(settings.from_run or ""), num_exits, device)
    shape = net_settings(settings) | {"seed": config.seed, "device": device}
    rates = {key: getattr(settings, key) for key in ("learning_rate", "weight_decay")}
    return LearnedWeighting(num_exits, **shape, **rates)


def net_settings(settings: WeightingConfig) -> dict[str, Any]:
    """What shapes a weight net and its range."""
    return {key: getattr(settings, key) for key in ("inputs", "depth", "width", "delta", "centring", "bound")}


def frozen_weighting(run: Path, num_exits: int, device: torch.device) -> FrozenWeighting:
    """The weight net of a finished run, with the settings it was trained with."""
    settings = read_config(run).weighting
    state = load_state(run)
    if settings.name != "learned" or state is None or not (run / store.WEIGHTS).is_file():
        raise ValueError(f"{run} holds no finished weight net: it is not a finished run with learned weights")
    frozen = FrozenWeighting(num_exits, **net_settings(settings), device=device)
    frozen.load_tensors(state.parts["weighting"])
    return frozen


def without_collaboration(config: RunConfig) -> RunConfig:
    """The first phase of a run with collaboration."""
    overrides = {k: v for k, v in config.model.overrides.items() if k != "collaboration"}
    model = replace(config.model, overrides=overrides)
    return replace(config, model=model, imta=replace(config.imta, collaboration=False))


def on_top_of(phase1: Path, model: CollaborativeNet) -> WithTeacher:
    """Put the first phase's network under the collaborating heads; its own last head becomes the teacher."""
    trained = store.load_model(phase1)
    teacher = classifier(trained.heads[-1])
    under = {k: v for k, v in trained.state_dict().items() if k in model.base.state_dict()}
    model.base.load_state_dict(under)
    return WithTeacher(model, teacher)
