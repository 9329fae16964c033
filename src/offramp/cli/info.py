"""What `offramp info` prints: a network, by name or folder, and the cost of each of its exits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offramp.common.pretrained import bundle_folder, is_bundle
from offramp.models.cost import exit_costs
from offramp.models.exits import ModelSpec
from offramp.models.registry import create_model, override_names
from offramp.models.store import CONFIG, parse_spec, read_spec
from offramp.running.bundle import MODEL, checked
from offramp.runs.config import parse_setting


def _spec(name: str) -> ModelSpec:
    """What is in a model, a run or a bundle's folder, or comes trained; else a model of that name."""
    if (Path(name) / CONFIG).is_file():
        return read_spec(name)
    if is_bundle(name):
        folder = bundle_folder(name)
        return parse_spec(checked(folder)[1].model, folder / MODEL)
    return ModelSpec(name, 0)


def describe(
    name: str,
    num_classes: int | None = None,
    image_size: int | None = None,
    schedule: str | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """The model's name, its number of classes and its exits' cumulative costs, ready for JSON."""
    spec = _spec(name)
    asked = {"image_size": image_size, "schedule": schedule}
    allowed = override_names(spec.name)
    overrides = {**spec.overrides, **dict(map(parse_setting, settings))}
    overrides |= {k: v for k, v in asked.items() if v is not None and (allowed is None or k in allowed)}
    if schedule and "schedule" not in overrides:
        raise ValueError(f"model {spec.name!r} is not made of cells, so it has no {schedule} schedule")
    for key in ("name", "num_classes"):
        if key in overrides:
            raise ValueError(f"{key} is not an override; `offramp info NAME --num-classes N` takes it by itself")
    classes = num_classes if num_classes is not None else spec.num_classes or None
    with torch.device("meta"):  # costs need shapes, not values
        model = create_model(spec.name, classes, **overrides)
    assert model.spec is not None
    costs = exit_costs(model, image_size)
    exits = [cost.to_json() for cost in costs]
    return {"model": spec.name, "num_classes": model.spec.num_classes, "exits": exits}
