"""Names for networks. `register_model` adds a builder, `create_model` calls it, `list_models` lists them.

A builder is called as `builder(num_classes, **settings)` and returns an `ExitNet`; its keyword arguments are
the overrides that `create_model` accepts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offramp.common.names import unknown
from offramp.common.pretrained import bundle_folder, pretrained_names
from offramp.models.collaboration import CollaborativeNet
from offramp.models.exits import ExitNet, ModelSpec
from offramp.models.msdnet import msdnet
from offramp.models.ranet import ranet

Builder = Callable[..., ExitNet]


@dataclass(frozen=True)
class ModelEntry:
    """A registered network: how it is built, with which settings, and one line about it."""

    name: str
    builder: Builder
    num_classes: int
    settings: dict[str, Any]
    about: str


_entries: dict[str, ModelEntry] = {}


def register_model(name: str, builder: Builder, *, num_classes: int = 100, about: str = "", **settings: Any) -> None:
    """Make `create_model(name)` call `builder(num_classes, **settings)`; a name can be taken only once."""
    if name in _entries:
        raise ValueError(f"model {name!r} is registered already")
    _entries[name] = ModelEntry(name, builder, num_classes, settings, about)


def list_models() -> list[str]:
    """The names that `create_model` knows."""
    return sorted(_entries)


def model_entry(name: str) -> ModelEntry:
    """The registry's entry for `name`."""
    if name not in _entries and name in pretrained_names():
        raise ValueError(
            f"{name} comes trained; in Python: create_model({name!r}, pretrained=True); "
            "offramp models lists those that are built without weights"
        )
    if name not in _entries:
        raise ValueError(f"{unknown('model', name, list_models())}. One of your own: offramp --import MODULE ...")
    return _entries[name]


def create_model(name: str, num_classes: int | None = None, *, pretrained: bool = False, **overrides: Any) -> ExitNet:
    """Build a registered network with fresh params, or `pretrained` one that comes trained.

    `overrides` replace the entry's settings: for an MSDNet `blocks`, `growth`, `factors`, `scales`,
    `image_size` and more. `collaboration=True` puts IMTA's collaborating classifiers on any of ours.
    """
    if pretrained:
        return _trained(name, num_classes, overrides)
    entry = model_entry(name)
    classes = entry.num_classes if num_classes is None else num_classes
    if type(classes) is not int or classes < 2:
        raise ValueError(f"num_classes must be a whole number from 2 up, got {classes!r}")
    collaboration = overrides.pop("collaboration", False)
    allowed = override_names(name)
    for key in overrides:
        if allowed is not None and key not in allowed:
            raise ValueError(unknown(f"override of model {name!r}", key, allowed))
    try:
        model = entry.builder(classes, **{**entry.settings, **overrides})
    except (TypeError, RuntimeError) as error:
        if not overrides:
            raise
        raise ValueError(f"the overrides {overrides} do not fit model {name!r}: {error}") from error
    if collaboration:
        model, overrides = CollaborativeNet(model), {**overrides, "collaboration": True}
    model.spec = ModelSpec(name, classes, _as_json(overrides))
    return model


def _trained(name: str, num_classes: int | None, overrides: dict[str, Any]) -> ExitNet:
    from offramp.running.bundle import bundled_model, checked

    if not pretrained_names():
        raise ValueError("no network comes trained with this version of offramp")
    if name not in pretrained_names():
        raise ValueError(unknown("pretrained network", name, pretrained_names()))
    folder = bundle_folder(name)
    card = checked(folder)[1]
    if num_classes not in (None, len(card.classes)) or overrides:
        raise ValueError(
            f"{name} is trained as it is, for {len(card.classes)} classes; in other ways the network is built without "
            f"its weights: create_model({card.model.get('name')!r}, ...)"
        )
    return bundled_model(folder, card)


def override_names(name: str) -> list[str] | None:
    """What can be overridden in the model `name`, its builder's keyword arguments; None where it takes any."""
    parameters = list(inspect.signature(model_entry(name).builder).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return sorted(p.name for p in parameters)


def _as_json(overrides: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(overrides, default=list)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"overrides must be numbers, text or lists of these: {error}") from error


def _register_ours() -> None:
    register_model("msdnet5", msdnet, about="MSDNet for CIFAR, 5 exits")
    register_model("msdnet7", msdnet, about="MSDNet for CIFAR, 7 exits", blocks=(1, 2, 3, 4, 5, 6, 7))
    for step in (4, 6, 7):
        register_model(
            f"msdnet-imagenet-s{step}",
            msdnet,
            num_classes=1000,
            about=f"MSDNet for ImageNet, 5 exits, {step} layers between them",
            image_size=224,
            blocks=(4, step, step, step, step),
            base_width=32,
            growth=16,
            factors=(1, 2, 4, 4),
            stem="imagenet",
            head_width=None,
        )
    register_model("ranet-c1", ranet, about="RANet Model-C-1 for CIFAR, 6 exits")
    register_model(
        "ranet-c2",
        ranet,
        about="RANet Model-C-2 for CIFAR, 8 exits",
        blocks=(2, 4, 6, 8),
        scales=(1, 2, 2, 3),
        factors=(4, 2, 2, 1),
    )
    register_model(
        "msdnet-tiny",
        msdnet,
        num_classes=10,
        about="a small MSDNet for 32x32 images that trains on two CPU cores in about a minute, 3 exits",
        blocks=(1, 2, 3),
        base_width=16,
        growth=8,
        factors=(1, 2),
        stem="strided",
        head_width=32,
    )


_register_ours()
