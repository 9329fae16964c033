"""Networks by name, and networks as folders.

A builder is called as `builder(num_classes, **settings)` and returns an `ExitNet`; its keyword arguments are the
overrides that `create_model` accepts. A wrapper turns a network into another one, and is asked for by an override
of its own name. As a folder a network is `config.json`, which says what to build, and `model.safetensors`; run
folders have the same two files, so `load_model` takes either.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offramp.common.files import check_digests, read_json
from offramp.common.names import nearest, unknown
from offramp.common.pretrained import CARD, MANIFEST, bundle_folder, pretrained_names
from offramp.common.registry import Registry
from offramp.models.backbones import CutNet
from offramp.models.exits import CONFIG, WEIGHTS, ExitNet, ModelSpec, without_sources
from offramp.models.libraries import (
    IMAGENET_CLASSES,
    build_library_model,
    is_library_name,
    libraries_like,
    libraries_with,
)
from offramp.models.weights import load_matching, load_tensors, read_params, read_tensors
from offramp.runs.manifest import refuse_damaged_network

PRETRAINED = "pretrained"  # a builder's argument that is no override: params do not belong to what a network is
Builder = Callable[..., ExitNet]
Wrapper = Callable[[ExitNet, Any], ExitNet]  # a network and the override's value


@dataclass(frozen=True)
class ModelEntry:
    """A registered network: how it is built, with which settings, and one line about it."""

    name: str
    builder: Builder
    num_classes: int
    settings: dict[str, Any]
    about: str


MODELS: Registry[ModelEntry] = Registry("model")
WRAPPERS: Registry[Wrapper] = Registry("wrapper")


def register_model(
    name: str, builder: Builder | None = None, *, num_classes: int = 100, about: str = "", **settings: Any
) -> Any:
    """Make `create_model(name)` call `builder(num_classes, **settings)`; without a builder, a decorator for one."""

    def add(given: Builder) -> Builder:
        MODELS.add(name, ModelEntry(name, given, num_classes, settings, about))
        return given

    return add if builder is None else add(builder)


def list_models() -> list[str]:
    """The names that `create_model` knows."""
    return list(MODELS)


def model_entry(name: str) -> ModelEntry:
    """The registry's entry for `name`; networks of a library need none of their own."""
    if is_library_name(name):
        builder = partial(build_library_model, name)
        return ModelEntry(name, builder, IMAGENET_CLASSES, {}, f"{name}, cut into stages")
    if name not in MODELS and name in pretrained_names():
        raise ValueError(
            f"{name} comes trained; in Python: create_model({name!r}, pretrained=True); "
            "offramp models lists those that are built without weights"
        )
    if name not in MODELS and (os.sep in name or name.startswith(".")):
        raise ValueError(f"{name} is not there, and no model has such a name (offramp models lists them)")
    if name not in MODELS and (found := _elsewhere(name)):
        raise ValueError(f"model {name!r} is unknown; did you mean {' or '.join(map(repr, found))}?")
    return MODELS[name]


def _elsewhere(name: str) -> list[str]:
    """Networks that come trained, or of libraries, that may have been meant by an unknown name."""
    near, trained = nearest(name, [*MODELS, *pretrained_names()]), pretrained_names()
    return libraries_with(name) or [n for n in near if n in trained] or ([] if near else libraries_like(name))


def create_model(
    name: str, num_classes: int | None = None, *, pretrained: bool | str | Path = False, **overrides: Any
) -> ExitNet:
    """Build a network of ours, of a library (`timm/NAME`, `torchvision/NAME`) or a registered one.

    `pretrained` is False for fresh params, True for those that come with the network, a `.safetensors` or `.pth` file,
    or the folder of a run or a model; a classifier of another size stays fresh, and so do heads that are not there.
    `overrides` replace the entry's settings: for an MSDNet `blocks`, `growth`, `factors`, `scales`, `image_size` and
    more, for a library's network `exits`, `head`, `head_options`, `image_size` and the library's own `options`.
    `collaboration=True` puts IMTA's collaborating classifiers on any of ours, `carry=0.5` lets each exit add half of
    what the exit before it answered.
    """
    comes_with_it = pretrained is True
    if comes_with_it and not is_library_name(name):
        return _trained(name, num_classes, overrides)
    entry = model_entry(name)
    classes = entry.num_classes if num_classes is None else num_classes
    if type(classes) is not int or classes < 2:
        raise ValueError(f"num_classes must be a whole number from 2 up, got {classes!r}")
    wrappers = {key: wanted for key, wanted in overrides.items() if key in WRAPPERS and wanted}
    own = {key: value for key, value in overrides.items() if key not in WRAPPERS}
    allowed = override_names(name)
    for key in own:
        if allowed is not None and key not in allowed:
            raise ValueError(unknown(f"override of model {name!r}", key, allowed))
    try:
        model = entry.builder(classes, **{**entry.settings, **own, **({PRETRAINED: True} if comes_with_it else {})})
    except (TypeError, RuntimeError) as error:
        if not own:
            raise
        raise ValueError(f"the overrides {own} do not fit model {name!r}: {error}") from error
    if isinstance(model, CutNet) and "exits" in (allowed or ()):
        own["exits"] = list(model.at)  # so that it is built again in the same way, whatever chose the places
    for key, wanted in wrappers.items():
        model = WRAPPERS[key](model, wanted)
    model.spec = without_sources(ModelSpec(name, classes, _as_json({**own, **wrappers})))
    if isinstance(pretrained, (str, Path)):
        model.trained_exits = exits_without(model, start_from(model, pretrained))
    return model


def start_from(model: ExitNet, source: str | Path) -> list[str]:
    """Copy the params of a file, a run or a model folder into a network; give the names that stay as they are.

    The last head takes the last head's params, wherever it stands.
    """
    path = Path(source)
    if not path.is_dir():
        return _start_from_file(model, path)
    tensors = read_params(path / WEIGHTS)
    heads = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("heads.")})
    if heads and heads[-1] != model.num_exits - 1:
        old, new = f"heads.{heads[-1]}.", f"heads.{model.num_exits - 1}."
        others = {name: t for name, t in tensors.items() if not name.startswith("heads.")}
        tensors = others | {new + n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)}
    return load_matching(model, tensors, path, fresh=("heads.",))


def _start_from_file(model: ExitNet, path: Path) -> list[str]:
    """The file may be of the network itself or, where exits were put on one that exists, of that one."""
    params = read_params(path)
    if not isinstance(model, CutNet) or not params.keys().isdisjoint(model.state_dict()):
        return load_matching(model, params, path, ("heads.",))
    whole = model.original()
    known = {model.own_name(name) for name in whole.state_dict()}
    left = [model.own_name(name) for name in load_matching(whole, params, path)]
    return [*left, *(name for name in model.state_dict() if name not in known)]


def exits_without(model: ExitNet, fresh: Iterable[str]) -> frozenset[int]:
    """The exits whose classifiers hold none of the params named; those that are in no head are the last exit's."""
    params = dict(model.named_parameters())
    named = {id(params[name]) for name in fresh if name in params}
    heads = [{id(param) for param in head.parameters()} for head in model.heads]
    heads[-1] |= named - set().union(*heads)
    return frozenset(k for k, own in enumerate(heads, 1) if named.isdisjoint(own))


def override_names(name: str) -> list[str] | None:
    """What can be overridden in the model `name`, its builder's keyword arguments; None where it takes any."""
    parameters = list(inspect.signature(model_entry(name).builder).parameters.values())[1:]  # without num_classes
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return sorted(p.name for p in parameters if p.name != PRETRAINED)


def _as_json(overrides: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(overrides, default=list)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"overrides must be numbers, text or lists of these: {error}") from error


def _trained(name: str, num_classes: int | None, overrides: dict[str, Any]) -> ExitNet:
    """The network of a bundle that comes with the package."""
    if not pretrained_names():
        raise ValueError("no network comes trained with this version of offramp")
    if name not in pretrained_names():
        raise ValueError(unknown("pretrained network", name, pretrained_names()))
    folder = bundle_folder(name)
    check_digests(folder, read_json(folder / MANIFEST)["files"])
    card = read_json(folder / CARD)
    classes = len(card["classes"])
    if num_classes not in (None, classes) or overrides:
        raise ValueError(
            f"{name} is trained as it is, for {classes} classes; in other ways the network is built without "
            f"its weights: create_model({card['model'].get('name')!r}, ...)"
        )
    return build_trained(parse_spec(card["model"], folder / CARD), card["schedule"], folder / WEIGHTS)


def build(spec: ModelSpec) -> ExitNet:
    """The network that `spec` describes, with fresh params."""
    return create_model(spec.name, spec.num_classes, **spec.overrides)


def build_trained(spec: ModelSpec, schedule: str, weights: Path) -> ExitNet:
    """The network that `spec` describes, with the params of a safetensors file."""
    return _with_params(build(spec).set_schedule(schedule), weights)


def _with_params(model: ExitNet, weights: Path) -> ExitNet:
    load_tensors(model, read_tensors(weights), weights)
    model.trained_exits = frozenset(range(1, model.num_exits + 1))
    return model


def load_model(folder: str | Path) -> ExitNet:
    """Build the network of a model folder or run folder and load its params."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a model or run folder: it has no {CONFIG}")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}: if it is a run, it has not finished training")
    refuse_damaged_network(folder)
    return _with_params(build(read_spec(folder)), folder / WEIGHTS)


def read_spec(folder: str | Path) -> ModelSpec:
    """What `config.json` in `folder` says of the network; its params are there, wherever training started from."""
    path = Path(folder) / CONFIG
    config = read_json(path)
    return without_sources(parse_spec(config.get("model") if isinstance(config, dict) else None, path))


def parse_spec(given: Any, source: Any) -> ModelSpec:
    """A spec from its JSON; `source` is named if it is none."""
    try:
        return ModelSpec(str(given["name"]), given["num_classes"], dict(given.get("overrides", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f'{source} does not describe a model: "model" needs name and num_classes') from error
