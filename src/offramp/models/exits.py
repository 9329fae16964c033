"""The contract of a network with exits.

An `ExitNet` has K exits. Calling it gives the K logits; `step` walks it one stage at a time. The state
between stages is a flat tuple of tensors whose first dimension is the batch, so finished samples can be
dropped from it. The full forward *is* that walk, so the two agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class ModelSpec:
    """What the registry needs to build a network again; `config.json["model"]`."""

    name: str
    num_classes: int
    overrides: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ExitNet(nn.Module):
    """A classifier with `num_exits` exits over images of `input_shape` (channels, height, width)."""

    spec: ModelSpec | None = None

    def __init__(self, num_exits: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.num_exits = num_exits
        self.input_shape = input_shape

    def step(self, k: int, state: State) -> tuple[Tensor, State]:
        """Run stage `k` (1..K) on the state before it; give the logits of exit `k` and the next state.

        The state before stage 1 is `(images,)`.
        """
        raise NotImplementedError

    def forward(self, images: Tensor) -> list[Tensor]:
        """The logits of all exits, first to last."""
        state: State = (images,)
        logits = []
        for k in range(1, self.num_exits + 1):
            exit_logits, state = self.step(k, state)
            logits.append(exit_logits)
        return logits

    def save(self, folder: str | Path) -> Path:
        """Write `config.json` and `model.safetensors` into `folder`; `offramp.load_model` reads them."""
        from offramp.models.store import save_model

        return save_model(self, folder)

    @staticmethod
    def from_parts(
        stages: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        input_shape: tuple[int, int, int] = (3, 32, 32),
    ) -> ExitNet:
        """A network of one's own.

        Stage k is called with the tensors that stage k-1 returned (stage 1: the images) and returns one
        tensor or a tuple of tensors. Head k is called with the last of them and returns logits.
        """
        return _PartsNet(stages, heads, input_shape)


class _PartsNet(ExitNet):
    def __init__(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module], input_shape: tuple[int, int, int]
    ) -> None:
        if not stages or len(stages) != len(heads):
            raise ValueError(f"from_parts needs one head per stage, got {len(stages)} stages and {len(heads)} heads")
        super().__init__(len(stages), input_shape)
        self.stages = nn.ModuleList(stages)
        self.heads = nn.ModuleList(heads)

    def step(self, k: int, state: State) -> tuple[Tensor, State]:
        features = self.stages[k - 1](*state)
        state = (features,) if isinstance(features, torch.Tensor) else tuple(features)
        logits = self.heads[k - 1](state[-1])
        # After the last exit nothing is needed any more.
        return logits, state if k < self.num_exits else ()
