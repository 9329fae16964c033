"""Learned sample weights for people with their own network and training loop.

weights = LearnedWeights(model, optimizer, num_exits=3)
for images, labels in loader:
    logged = weights.step(images, labels)   # in place of forward, backward and optimizer.step()
    scheduler.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offramp.runs.config import WeightingConfig, parse
from offramp.training.lookahead import check_optimizer
from offramp.training.meta_gradient import refuse_blind_differences
from offramp.training.method import Method
from offramp.training.optimizers import cosine
from offramp.training.step import train_step
from offramp.training.tape import use_taped_layers
from offramp.training.weighting import Context, new_weighting


class LearnedWeights:
    """Trains `model` (any module that returns a list of logits) with weights that are learned along.

    `settings` are those of a run's `[weighting]` (docs/methods/learned-weights.md): `q`, `delta`, `centring`,
    `bound`, `inputs`, `interval`, `since`, `objective`, `order` and more; the defaults are the paper's for CIFAR.
    `weighting` names another registered weighting. `total_steps` lets the weight net's rate fall to 0 along a
    cosine; without it the rate stays.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_exits: int,
        weighting: str = "learned",
        total_steps: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        check_optimizer(optimizer)
        own = parse(WeightingConfig, {"name": weighting, **settings})
        for name, whole in (("since", 0), ("until", 1)):
            if getattr(own, name) != whole and total_steps is None:
                raise ValueError(f"{name}, a share of training, needs total_steps")
        refuse_blind_differences(own.engine, model)
        self.model, self.optimizer, self.total_steps, self.steps = model, optimizer, total_steps, 0
        use_taped_layers(model)
        context = Context(num_exits, total_steps, seed, next(model.parameters()).device)
        self.weighting = new_weighting(own, context)
        self.method = Method(self.weighting, own)

    def step(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Two updates on a batch, one per half; the logged values are means over both."""
        if len(images) < 2:
            raise ValueError("a batch needs at least two samples: one half trains, the other guides the weights")
        if self.total_steps:
            self.weighting.set_rate(cosine(min(self.steps, self.total_steps), self.total_steps))
        self.weighting.begin_step(self.steps)
        halves = train_step(self.model, self.optimizer, self.method, images, labels, self.steps)
        self.steps += 1
        values = {"loss": torch.stack([h.loss for h in halves]).mean()}
        for k, column in enumerate(torch.cat([h.losses_BK for h in halves]).mean(0), start=1):
            values[f"loss/exit{k}"] = column
        weights_BK = torch.cat([h.weights_BK for h in halves])
        values["weight/min"], values["weight/max"] = weights_BK.min(), weights_BK.max()
        meta = [h.meta_loss for h in halves if h.meta_loss is not None]
        if meta:
            values["meta_loss"] = torch.stack(meta).mean()
        numbers = torch.stack([v.double() for v in values.values()]).tolist()  # one wait for the device
        return dict(zip(values, numbers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The weight net, its optimiser and the step count; the model and its optimiser are yours to save."""
        return {"steps": self.steps, "weighting": {k: v.clone() for k, v in self.weighting.tensors().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.steps = int(state["steps"])
        self.weighting.load_tensors(state["weighting"])
