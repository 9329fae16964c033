"""The verbs about networks: which there are, and what their exits cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offramp.cli.options import AsJson, Settings
from offramp.common.console import print_table, say
from offramp.common.files import read_json
from offramp.common.pretrained import CARD, MANIFEST, bundle_folder, is_bundle
from offramp.runs.config import parse_setting

if TYPE_CHECKING:
    from offramp.models.exits import ExitNet, ModelSpec

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
    say("timm/NAME and torchvision/NAME: any classifier of these libraries, with exits put on it")
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
    """Print what each exit of a network costs: params, the paper's mul-adds and plain MACs, cumulative.

    For a network of a library (timm/NAME, torchvision/NAME) also the places where exits can be put.
    """
    if holds_graphs(name):
        _print_graphs(bundle_folder(name), as_json)
        return
    table = describe(name, num_classes, image_size, "lazy" if lazy else None, settings or [])
    if as_json:
        print(json.dumps(table))
        return
    rows = [[str(e["exit"]), *(f"{e[key]:,}" for key in ("params", "mul_adds", "macs"))] for e in table["exits"]]
    title = f"{table['model']}, {table['num_classes']} classes, cumulative cost of each exit"
    print_table(title, ["exit", "params", "mul-adds", "MACs"], rows)
    if "places" in table:
        print_places(table)


def print_places(table: dict[str, Any]) -> None:
    """Where exits can be put on a network of a library, and how they are asked for."""
    whole = table["exits"][-1]["mul_adds"]
    rows = [
        [place["module"], f"{place['layout']} x {place['channels']}", f"{place['mul_adds']:,}", f"{share:.0%}"]
        for place in table["places"]
        if (share := place["mul_adds"] / whole)
    ]
    print_table("Places for exits; costs without heads", ["module", "returns", "mul-adds", "of the whole"], rows)
    if not rows:
        say("no place was found by itself; name modules: --set 'exits=[\"NAME\", ...]'")
        return
    first, *_, last = [place["module"] for place in table["places"]] * 2
    here = ", ".join(table["at"]) or "the last one alone"
    say(f'exits here: {here}; others: --set exits=N or --set \'exits=["{first}", "{last}"]\'')


def holds_graphs(name: str) -> bool:
    """Whether this is an ONNX bundle: nothing can be built of it, and what it costs it says itself."""
    return is_bundle(name) and read_json(bundle_folder(name) / MANIFEST).get("format") == "onnx"


def _print_graphs(folder: Path, as_json: bool) -> None:
    from offramp.running.bundle import checked

    card = checked(folder)[1]
    exits = [{"exit": k, "mul_adds": cost} for k, cost in enumerate(card.costs, 1)]
    if as_json:
        table = {"model": card.model.get("name"), "num_classes": card.model.get("num_classes"), "exits": exits}
        print(json.dumps(table))
        return
    title = f"{folder}, {card.model.get('num_classes')} classes, cumulative cost of each exit"
    print_table(title, ["exit", "mul-adds"], [[str(e["exit"]), f"{e['mul_adds']:,}"] for e in exits])


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
    from offramp.models.libraries import is_library_name
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
    found = {"model": spec.name, "num_classes": model.spec.num_classes, "exits": exits}
    return found | (_places(spec.name, model) if is_library_name(spec.name) else {})


def _places(name: str, model: ExitNet) -> dict[str, Any]:
    """Where exits are and where they could be, ready for JSON."""
    import torch

    from offramp.models.backbones import CutNet
    from offramp.models.libraries import library_places

    with torch.device("meta"):
        known = library_places(name, model.input_shape[-1])
    assert isinstance(model, CutNet)
    places = [
        {
            "module": place.name,
            "layout": place.feature.layout,
            "channels": place.feature.channels,
            "mul_adds": place.mul_adds,
        }
        for place in known
    ]
    return {"at": list(model.at), "places": places}
