"""Recipes: complete runs as TOML files, in the package or one's own, each with its claim.

A recipe may extend another and then holds only what differs.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from offramp.common.names import unknown
from offramp.runs.config import RunConfig, parse, same_network_and_data


@dataclass(frozen=True)
class Recipe:
    """A named configuration, what it claims, and what the paper reports for it: top-1 in % at each exit."""

    name: str
    claim: str
    config: RunConfig
    paper_top1: tuple[float, ...] | None = None
    root: str | None = None  # the recipe at the end of those that it extends; its own name where it extends none


def list_recipes() -> list[str]:
    """The names of the packaged recipes."""
    return sorted(p.name.removesuffix(".toml") for p in _packaged().iterdir() if p.name.endswith(".toml"))


def load_recipe(name_or_path: str) -> Recipe:
    """A packaged recipe by name, or one's own by the path of its TOML file."""
    text, name = _read_recipe(name_or_path)
    table = _resolve(name_or_path, seen=())
    paper, root = table.pop("paper_top1", None), table.pop("root")
    config = parse(RunConfig, {**table, "recipe": name})
    return Recipe(name, _claim(text), config, None if paper is None else tuple(float(top1) for top1 in paper), root)


def recipe_of(config: RunConfig) -> Recipe | None:
    """The packaged recipe that a run was trained with, if network, data and the kind of weighting are still its own."""
    if config.recipe not in list_recipes():
        return None
    recipe = load_recipe(config.recipe)
    same = same_network_and_data(recipe.config, config) and recipe.config.weighting.name == config.weighting.name
    return recipe if same else None


def _packaged() -> Any:
    return resources.files("offramp.runs") / "recipes"


def _read_recipe(name_or_path: str) -> tuple[str, str]:
    """The recipe's text and its name."""
    if name_or_path in list_recipes():
        return (_packaged() / f"{name_or_path}.toml").read_text(encoding="utf-8"), name_or_path
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ValueError(unknown("recipe", name_or_path, list_recipes()))
    if not path.is_file():
        raise ValueError(f"recipe {path} is not there")
    return path.read_text(encoding="utf-8"), path.stem


def _resolve(name_or_path: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The recipe's table laid over the one it extends."""
    if name_or_path in seen:
        raise ValueError(f"recipes extend each other in a circle: {' -> '.join((*seen, name_or_path))}")
    text, _ = _read_recipe(name_or_path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name_or_path} is not valid TOML: {error}") from error
    base = table.pop("extends", None)
    if base is None:
        return {**table, "root": name_or_path}
    if str(base).endswith(".toml"):
        base = str(Path(name_or_path).parent / base)
    below = _resolve(str(base), (*seen, name_or_path))
    below.pop("paper_top1", None)  # what the paper reports for another recipe
    return _lay_over(below, table)


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _lay_over(both[key], value) if nested else value
    return both


def _claim(text: str) -> str:
    """The recipe's first comment, as one line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)
