"""A network as a folder: `config.json` says what to build, `model.safetensors` holds the params and buffers.

Run folders have the same two files, so `load_model` takes either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, contiguous_format

from offramp.common.files import read_json, write_bytes, write_json
from offramp.models.exits import ExitNet, ModelSpec
from offramp.models.registry import create_model

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save_model(model: ExitNet, folder: str | Path) -> Path:
    """Write `model` into `folder` (made if needed) and return the folder."""
    folder = Path(folder)
    if model.spec is None:
        raise ValueError(
            "this network has no name to be rebuilt from; give its builder one with register_model and "
            "create it with create_model"
        )
    write_tensors(folder / WEIGHTS, model.state_dict())
    write_json(folder / CONFIG, {"schema": 1, "model": model.spec.to_json()})
    return folder


def load_model(folder: str | Path) -> ExitNet:
    """Build the network of a model folder or run folder and load its params."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a model or run folder: it has no {CONFIG}")
    model = build(read_spec(folder))
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}: if it is a run, it has not finished training")
    load_state(model, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
    return model


def read_spec(folder: str | Path) -> ModelSpec:
    """What `config.json` in `folder` says of the network."""
    path = Path(folder) / CONFIG
    config = read_json(path)
    return parse_spec(config.get("model") if isinstance(config, dict) else None, path)


def parse_spec(given: Any, source: Any) -> ModelSpec:
    """A spec from its JSON; `source` is named if it is none."""
    try:
        return ModelSpec(str(given["name"]), given["num_classes"], dict(given.get("overrides", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f'{source} does not describe a model: "model" needs name and num_classes') from error


def build(spec: ModelSpec) -> ExitNet:
    """The network that `spec` describes, with fresh params."""
    return create_model(spec.name, spec.num_classes, **spec.overrides)


def load_state(model: ExitNet, tensors: Mapping[str, Tensor], source: Any) -> None:
    """Copy `tensors` into `model`; the first one that is missing, extra or of another shape is named."""
    own = model.state_dict()
    missing = sorted(own.keys() - tensors.keys())
    extra = sorted(tensors.keys() - own.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which the model does not"
        raise ValueError(f"{source} does not fit the model: it {what}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{source} does not fit the model: {name} has shape {list(tensor.shape)}, "
                f"the model's has {list(own[name].shape)}"
            )
    model.load_state_dict(dict(tensors))


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, atomically."""
    own = {name: t.detach().cpu().clone(memory_format=contiguous_format) for name, t in tensors.items()}
    write_bytes(path, to_safetensors(own))  # clones, because safetensors refuses tensors that share memory


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file; a damaged one is a ValueError that names it."""
    try:
        return parse_safetensors(Path(path).read_bytes())
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
