"""The way a network is trained: everything about a step that stays the same from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offramp.runs.config import WeightingConfig
from offramp.training.ema import Ema
from offramp.training.mixing import Mixing
from offramp.training.objectives import Half, Objective, by_term, cross_entropy, num_terms
from offramp.training.processes import Processes
from offramp.training.weighting import Weighting

Prepare = Callable[
    [Tensor], tuple[Tensor, Tensor | None]
]  # images -> what the network is called with, a teacher's logits


@dataclass(frozen=True)
class Method:
    """How samples are weighted, what is minimised, and with whom.

    `settings` say how a weighting that learns is taught. `prepare` runs once for a loader batch what training does not
    change: a frozen part of the network, a teacher. `ema` follows every update of the params, `mixing` mixes
    samples with each other.
    """

    weighting: Weighting
    settings: WeightingConfig = field(default_factory=WeightingConfig)
    objective: Objective = cross_entropy
    clip_norm: float | None = None
    processes: Processes = field(default_factory=Processes)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    prepare: Prepare | None = None
    ema: Ema | None = None
    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        if self.weighting.taught and self.clip_norm is not None:
            raise ValueError(
                "train.clip_norm cannot go with learned weights: clipping by global norm couples all params, so "
                "the look-ahead step would no longer be elementwise; leave one of them out"
            )
        if self.settings.terms == "each" and num_terms(self.objective) == 1:
            raise ValueError(
                "weighting.terms=each needs an objective of several terms, such as distillation; this one has a single "
                "term, so leave weighting.terms out"
            )
        if self.settings.through_exits and self.processes.size > 1:
            raise ValueError("weighting.through_exits=true runs in one process only; leave it out")

    def losses(self, outputs: Sequence[Tensor], half: Half) -> Tensor:
        """What has weights: the loss of every sample at every exit, [B, K], or each term of it, [B, terms * K]."""
        found, num_exits = self.objective(outputs, half), len(outputs)
        if self.settings.terms == "each" or found.shape[1] == num_exits:
            return found
        return by_term(found, num_exits).sum(1)

    def halves(
        self, images: Tensor, labels: Tensor, recipe: Tensor | None = None, learn: bool = True
    ) -> tuple[Half, Half]:
        """Both halves of a loader batch, each mixed within itself if there is a recipe for it.

        Where the weighting is to `learn` from them, they come unmixed too.
        """
        if recipe is None:
            return self._prepared(images, labels)
        assert self.mixing is not None
        each = zip(images.chunk(2), labels.chunk(2), recipe, strict=True)
        mixed = [self.mixing.mixed(*half) for half in each]
        halves = self._prepared(*(torch.cat(parts) for parts in zip(*mixed, strict=True)))
        if not learn:  # nobody asks for the samples as they were
            return halves
        first, second = zip(halves, self._prepared(images, labels), strict=True)
        return replace(first[0], unmixed=first[1]), replace(second[0], unmixed=second[1])

    def _prepared(self, images: Tensor, labels: Tensor) -> tuple[Half, Half]:
        teacher: Tensor | None = None
        if self.prepare is not None:
            with self.autocast():
                images, teacher = self.prepare(images)
        logits = (None, None) if teacher is None else teacher.chunk(2)
        first, second = map(Half, images.chunk(2), labels.chunk(2), logits)
        return first, second
