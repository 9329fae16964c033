"""Params and buffers as safetensors files, and into a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, contiguous_format, nn

from offramp.common.files import write_bytes


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
    model.load_state_dict(dict(tensors))
