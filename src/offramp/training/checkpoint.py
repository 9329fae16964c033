"""The resume state: a folder `last/` of safetensors and JSON, and the one before it, `last.1/`.

A state is written whole beside `last/` and then moved there, so a kill at any moment leaves at least one
that is complete. Every file's sha256 is in `state.json`, which carries a digest of itself; a damaged state is reported
and the older one used.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.files import check_digests, read_sealed_json, sha256, write_sealed_json
from offramp.models.weights import read_tensors, write_tensors

log = logging.getLogger("offramp")

Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on at `step`: named groups of tensors and a little JSON."""

    step: int
    parts: Parts
    info: dict[str, Any]


def save_checkpoint(run: Path, state: Checkpoint) -> None:
    """Make `state` the run's `last/`, keeping the one before as `last.1/`."""
    new, last, older = run / "last.new", run / "last", run / "last.1"
    shutil.rmtree(new, ignore_errors=True)
    for name, tensors in state.parts.items():
        write_tensors(new / f"{name}.safetensors", tensors)
    sums = {p.name: sha256(p) for p in sorted(new.glob("*.safetensors"))}
    write_sealed_json(new / "state.json", {"schema": 1, "step": state.step, "info": state.info, "sha256": sums})
    if last.exists():
        shutil.rmtree(older, ignore_errors=True)
        os.replace(last, older)
    os.replace(new, last)


def has_checkpoint(run: Path) -> bool:
    """Whether a run has a state to go on from."""
    return any((run / name).is_dir() for name in ("last", "last.1"))


def load_checkpoint(run: Path) -> Checkpoint | None:
    """The newest state that is whole; None if the run has none."""
    found = [folder for name in ("last", "last.1") if (folder := run / name).is_dir()]
    for folder in found:
        try:
            return _read_checkpoint(folder)
        except ValueError as error:
            log.warning("resume state damaged, trying the one before it: %s", error)
    if found:
        raise ValueError(f"no resume state of {run} is whole; train again into another folder")
    return None


def _read_checkpoint(folder: Path) -> Checkpoint:
    head = read_sealed_json(folder / "state.json")
    try:
        step, info, sums = int(head["step"]), dict(head["info"]), dict(head["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'state.json'} lacks step, info or sha256") from error
    check_digests(folder, sums)
    return Checkpoint(step, {Path(name).stem: read_tensors(folder / name) for name in sums}, info)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's buffers as `param name|buffer name` -> tensor."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    return {
        f"{names[param]}|{key}": value
        for param, buffers in optimizer.state.items()
        for key, value in buffers.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, laid out in memory like the params."""
    params = dict(model.named_parameters())
    for key, value in tensors.items():
        name, buffer = key.split("|")
        param = params[name]
        # a count of steps lies beside its params on a GPU, where graphs and fused steps read it
        own = torch.empty_like(param) if value.shape == param.shape else torch.empty_like(value, device=param.device)
        optimizer.state[param][buffer] = own.copy_(value)
