"""The contract of a network with exits.

An `ExitNet` has K exits. Calling it gives the K logits; `step` walks it one stage at a time. The state
between stages is a flat tuple of tensors whose first dimension is the batch, so finished samples can be
dropped from it. The full forward *is* that walk, so the two agree bit for bit.

Where a feature is both read by a head and passed on, training may set `fork`: a function that changes what either of
them gets, or which gradients come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.files import write_json
from offramp.models.weights import write_tensors

State = tuple[Tensor, ...]
Fork = Callable[[int, Tensor], tuple[Tensor, Tensor]]  # exit and feature -> what its head reads, what goes on
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # a network as a folder


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
    schedule = "eager"

    def __init__(self, num_exits: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.num_exits = num_exits
        self.input_shape = input_shape
        self.heads = nn.ModuleList()
        self.fork: Fork | None = None

    def set_schedule(self, schedule: str) -> ExitNet:
        """Choose what runs when: `eager`, or for a network made of cells also `lazy`."""
        if schedule != "eager":
            raise ValueError(f"this network is not made of cells, so it has no {schedule} schedule")
        return self

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        """Run stage `k` without its head; give the feature that the head reads and the next state."""
        raise NotImplementedError

    def step(self, k: int, state: State) -> tuple[Tensor, State]:
        """Run stage `k` (1..K) on the state before it; give the logits of exit `k` and the next state.

        The state before stage 1 is `(images,)`.
        """
        feature, state = self.advance(k, state)
        return self.heads[k - 1](feature), state

    def forked(self, k: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The feature of exit `k` for its head and for what comes after; `fork` decides in training mode."""
        return self.fork(k, feature) if self.fork is not None and self.training else (feature, feature)

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
        folder = Path(folder)
        if self.spec is None:
            raise ValueError(
                "this network has no name to be rebuilt from; give its builder one with register_model and "
                "create it with create_model"
            )
        write_tensors(folder / WEIGHTS, self.state_dict())
        write_json(folder / CONFIG, {"schema": 1, "model": self.spec.to_json()})
        return folder

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

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        given = self.stages[k - 1](*state)
        state = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        feature, onward = self.forked(k, state[-1])
        # After the last exit nothing is needed any more.
        return feature, (*state[:-1], onward) if k < self.num_exits else ()
