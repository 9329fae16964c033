"""Params and buffers as safetensors files, and into a network."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, contiguous_format, nn

from offramp.common.files import write_bytes

log = logging.getLogger("offramp")

MOST_OTHERS = 0.1  # of a file's tensors that the network has no place for


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


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: Any) -> None:
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
    _load(model, tensors)


def read_params(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a `.safetensors` file, or of a checkpoint as `torch.save` writes it, read without running its code.

    A checkpoint may hold them under `state_dict`, `state_dict_ema`, `model_ema`, `model` or `params`.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there; pretrained takes true, a file or the folder of a run or a model")
    if path.suffix == ".safetensors":
        return read_tensors(path)
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that holds more than tensors, or no pickle at all
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} cannot be read as params: {why}") from error
    for key in ("state_dict_ema", "model_ema", "state_dict", "model", "params"):
        found = found[key] if isinstance(found, Mapping) and isinstance(found.get(key), Mapping) else found
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{path} holds no params by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def load_matching(model: nn.Module, tensors: Mapping[str, Tensor], source: Any, fresh: Sequence[str] = ()) -> list[str]:
    """Copy pretrained `tensors` into `model`; give the names that stay fresh.

    Names may be the model's own, or all others, if shapes come in the same order. A classifier of another size stays
    fresh, and so may what begins with one of `fresh`. Anything else that is missing or does not fit is named.
    """
    own = model.state_dict()
    given = dict(tensors)
    if not set(given) & set(own) and len(given) == len(own):
        given = dict(zip(own, given.values(), strict=True))
    fits = {name: t for name, t in given.items() if name in own and t.shape == own[name].shape}
    left = [name for name in own if name not in fits]
    classes = [tensor for tensor in own.values() if tensor.dim() >= 2][-1].shape[0]
    for name in left:
        if not (name.startswith(tuple(fresh)) or name.endswith("num_batches_tracked")):
            refuse_unless_classifier(name, own[name], given.get(name), classes, source)
    _refuse_others(given, own, source)
    _load(model, fits, strict=False)
    return left


def _load(model: nn.Module, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
    """Into the network as it is built today: layers that ask for the version of a checkpoint are told their own."""
    state = OrderedDict(tensors)
    setattr(state, "_metadata", getattr(model.state_dict(), "_metadata", None))  # noqa: B010
    model.load_state_dict(state, strict=strict)


def _refuse_others(given: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Any) -> None:
    """Raise where much of a file has no place in the network: it belongs to a larger one. A little is only named."""
    others = [name for name in given if name not in own]
    if len(others) > MOST_OTHERS * len(given):
        raise ValueError(
            f"{source} does not fit the model: {len(others)} of its {len(given)} tensors are of another network, "
            f"{min(others)} for example"
        )
    if others:
        log.warning("%s: not used, as the model has no place for it: %s", source, ", ".join(others))


def refuse_unless_classifier(name: str, own: Tensor, given: Tensor | None, classes: int, source: Any) -> None:
    """Raise for a tensor that does not fit, unless it does but for the number of classes."""
    if given is None:
        raise ValueError(f"{source} does not fit the model: it lacks {name}")
    if own.shape[:1] != (classes,) or own.shape[1:] != given.shape[1:]:
        raise ValueError(
            f"{source} does not fit the model: {name} has shape {list(given.shape)}, the model's has {list(own.shape)}"
        )
