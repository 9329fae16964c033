"""What is asked of modules of any network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def has_modules(module: nn.Module) -> bool:
    """Whether a module has modules of its own."""
    return next(module.children(), None) is not None


def floating_dtype(module: nn.Module) -> torch.dtype:
    """The precision that a module computes in."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Training or evaluation mode of every part is afterwards what it was before, mixed ones too."""
    before = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
