"""The verbs about networks: which there are, and what their exits cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offramp.cli.options import AsJson, Settings
from offramp.common.console import print_table, say
from offramp.common.pretrained import CARD, bundle_folder, is_bundle
from offramp.runs.config import parse_setting

if TYPE_CHECKING:
    from offramp.models.exits import ModelSpec

verbs = typer.Typer()


@verbs.command()
def models(as_json: AsJson = False) -> None:
    """List the networks that can be created by name."""
    from offramp.common.pretrained import pretrained_names
    from offramp.models.registry import list_models, model_entry

    if as_json:
        print(json.dumps(list_models()))
        return
    print_table("Models", ["name", "about"], [[name, model_entry(name).about] for name in list_models()])
    for name in pretrained_names():
        say(f"{name} comes trained: predict, serve, eval, export, info and bench take its name for a bundle")


@verbs.command()
def info(
    name: Annotated[str, typer.Argument(help="A model's name, or the folder of a model, a run or a bundle.")],
    num_classes: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    lazy: Annotated[bool, typer.Option(help="Count what the lazy schedule runs before each exit.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print what each exit of a network costs: params, the paper's mul-adds and plain MACs, cumulative."""
    table = describe(name, num_classes, image_size, "lazy" if lazy else None, settings or [])
    if as_json:
        print(json.dumps(table))
        return
    rows = [[str(e["exit"]), *(f"{e[key]:,}" for key in ("params", "mul_adds", "macs"))] for e in table["exits"]]
    title = f"{table['model']}, {table['num_classes']} classes, cumulative cost of each exit"
    print_table(title, ["exit", "params", "mul-adds", "MACs"], rows)


def _spec(name: str) -> ModelSpec:
    """What is in a model, a run or a bundle's folder, or comes trained; else a model of that name."""
    from offramp.models.exits import CONFIG, ModelSpec
    from offramp.models.registry import parse_spec, read_spec
    from offramp.running.bundle import checked

    if (Path(name) / CONFIG).is_file():
        return read_spec(name)
    if is_bundle(name):
        folder = bundle_folder(name)
        return parse_spec(checked(folder)[1].model, folder / CARD)
    return ModelSpec(name, 0)


def describe(
    name: str,
    num_classes: int | None = None,
    image_size: int | None = None,
    schedule: str | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """The model's name, its number of classes and its exits' cumulative costs, ready for JSON."""
    import torch

    from offramp.models.cost import exit_costs
    from offramp.models.registry import create_model, override_names

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
