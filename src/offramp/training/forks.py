"""Forks: what happens in training where a feature is both read by a head and passed on to the next stage.

A fork is called as `fork(k, feature)` and gives what exit k's head reads and what goes on. `train.fork` names one; it
is made by `factory(num_exits, **options)`. One whose gradients are not those of its values says so:
`changes_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.common.registry import Registry
from offramp.models.exits import Fork
from offramp.models.heads import Feature
from offramp.runs.config import RunConfig

FORKS: Registry[Callable[..., Fork]] = Registry("fork")
register_fork = FORKS.register  # a class or function called as `factory(num_exits, **options)`


def new_fork(config: RunConfig, num_exits: int) -> Fork | None:
    """The fork that the settings name, if they name one; `imta.equilibrium` is another way to say `equilibrium`."""
    name = "equilibrium" if config.imta.equilibrium else config.train.fork
    if name is None:
        return None
    try:
        return FORKS[name](num_exits, **config.train.fork_options)
    except TypeError as error:
        raise ValueError(f"train.fork_options do not fit the fork {name!r}: {error}") from error


@FORKS.register("surgery")
@dataclass(frozen=True)
class FeatureSurgery:
    """Deep Feature Surgery (Gong et al., ECCV 2024): later exits move only a `share` of what an earlier exit reads.

    The head reads the whole feature. What goes on is the same, but only its first channels let gradients through.
    Channels are the second dimension of maps, the last one of tokens and channels-last maps.
    """

    num_exits: int
    share: float = 0.5
    changes_gradients = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"train.fork_options.share must lie between 0 and 1, got {self.share!r}")

    def __call__(self, k: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        if k == self.num_exits:
            return feature, feature
        layout = Feature.of(tuple(feature.shape))
        channels = 1 if layout is None or layout.layout in ("maps", "vectors") else -1
        moved = round(self.share * feature.shape[channels])
        kept, own = feature.tensor_split([moved], dim=channels)
        return feature, torch.cat([kept, own.detach()], dim=channels)
