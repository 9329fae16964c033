"""What `fit` starts from: the backbones, whose params were trained before, and how photos are fine-tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offramp.common.pretrained import DEFAULT_BACKBONE, LARGER_BACKBONE
from offramp.models.backbones import DEFAULT_EXITS
from offramp.models.libraries import EMBEDDED, is_library_name, libraries_with
from offramp.runs.config import ModelConfig, RunConfig, data_dir_setting, parse_setting, with_settings
from offramp.runs.recipe import load_recipe

RECIPE = "photos-cascade"  # how photos are fine-tuned


def chosen_backbones(asked: str | None, settings: Sequence[str]) -> tuple[str, ...]:
    """The networks to start from, the smaller first: one or two, as asked for, else those whose params are here."""
    named = [value for key, value in map(parse_setting, settings) if key == "model.name"]
    if asked is None and not named and not any(map(_is_file_of_params, settings)):
        larger = (LARGER_BACKBONE,) if EMBEDDED[LARGER_BACKBONE].path() else ()
        return (DEFAULT_BACKBONE, *larger)
    names = tuple(name.strip() for name in asked.split(",")) if asked else tuple(map(str, named)) or (DEFAULT_BACKBONE,)
    if asked and named and names != tuple(named):
        raise ValueError(f"--backbone {asked} and --set model.name={named[0]} name two networks; leave one out")
    if len(names) > 2:
        raise ValueError(f"--backbone takes one network, or two with a comma between them, got {asked}")
    if len(names) > 1 and any(map(_is_file_of_params, settings)):
        raise ValueError("a file of params is for one network; give --backbone one name")
    for name in names:
        refuse_unknown_backbone(name)
    return names


def _is_file_of_params(setting: str) -> bool:
    key, value = parse_setting(setting)
    return key == "model.pretrained" and isinstance(value, str)


def refuse_unknown_backbone(name: str) -> None:
    """Raise unless a library knows the network."""
    if not is_library_name(name):
        known = " or ".join(libraries_with(name)) or f"{DEFAULT_BACKBONE}, for example"
        raise ValueError(
            f"fit starts from a network that was trained before, of timm or torchvision ({known}), not from {name!r}; "
            'to train another one on this folder write a recipe, with data.name = "imagefolder"'
        )


def starting_config(folder: Path, backbones: Sequence[str], settings: Sequence[str]) -> RunConfig:
    """How photos are fine-tuned, with the settings that were given; sizes and epochs come with the plan."""
    recipe = load_recipe(RECIPE).config
    model = ModelConfig(backbones[0], None, True, {"exits": DEFAULT_EXITS})
    fresh = ["train.freeze_norms=false"] if ("model.pretrained", False) in map(parse_setting, settings) else []
    own = ["data.name=imagefolder", data_dir_setting(folder.resolve()), *fresh, *settings]
    base = with_settings(replace(recipe, recipe=None, model=model), own)
    if base.data.calibration == 0:
        raise ValueError("a choice needs images held out; leave data.calibration alone, or ask for some")
    return base


def asked_epochs(settings: Sequence[str], config: RunConfig) -> int | None:
    """The epochs of fine-tuning, where somebody set them."""
    return config.train.epochs if any(s.split("=")[0].strip() == "train.epochs" for s in settings) else None
