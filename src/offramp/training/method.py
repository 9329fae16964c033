"""The way a network is trained: everything about a step that stays the same from step to step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from offramp.runs.config import WeightingConfig
from offramp.training.objectives import Half, Objective, cross_entropy
from offramp.training.processes import Processes
from offramp.training.weighting import Weighting

Prepare = Callable[
    [Tensor], tuple[Tensor, Tensor | None]
]  # images -> what the network is called with, a teacher's logits


@dataclass(frozen=True)
class Method:
    """How samples are weighted, what is minimised, and with whom.

    `settings` say how a weighting that learns is taught. `prepare` runs once for a loader batch what training does not
    change: a frozen part of the network, a teacher.
    """

    weighting: Weighting
    settings: WeightingConfig = field(default_factory=WeightingConfig)
    objective: Objective = cross_entropy
    clip_norm: float | None = None
    processes: Processes = field(default_factory=Processes)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    prepare: Prepare | None = None

    def __post_init__(self) -> None:
        if self.weighting.taught and self.clip_norm is not None:
            raise ValueError(
                "train.clip_norm cannot go with learned weights: clipping by global norm couples all params, so "
                "the look-ahead step would no longer be elementwise; leave one of them out"
            )

    def halves(self, images: Tensor, labels: Tensor) -> tuple[Half, Half]:
        """Both halves of a loader batch."""
        teacher: Tensor | None = None
        if self.prepare is not None:
            with self.autocast():
                images, teacher = self.prepare(images)
        logits = (None, None) if teacher is None else teacher.chunk(2)
        first, second = map(Half, images.chunk(2), labels.chunk(2), logits)
        return first, second
