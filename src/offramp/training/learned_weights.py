"""Learned sample weights for people with their own network and training loop.

weights = LearnedWeights(model, optimizer, num_exits=3)
for images, labels in loader:
    logged = weights.step(images, labels)   # in place of forward, backward and optimizer.step()
    scheduler.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.names import unknown
from offramp.measuring.shares import exit_counts
from offramp.runs.config import check_order
from offramp.training.lookahead import check_optimizer
from offramp.training.meta_gradient import ENGINES
from offramp.training.objectives.losses import META_OBJECTIVES
from offramp.training.rates import cosine
from offramp.training.step import ORDERS, Method, iterate
from offramp.training.weighting import CENTRINGS, INPUTS, LearnedWeighting


class LearnedWeights:
    """Trains `model` (any module that returns a list of logits) with weights that are learned along.

    `total_steps` lets the weight net's rate fall to 0 along a cosine; without it the rate stays. The other
    settings are those of the method page; the defaults are the paper's for CIFAR.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_exits: int,
        q: float = 0.75,
        delta: float = 0.8,
        centring: str = "exit",
        bound: bool = False,
        inputs: str = "loss",
        depth: int = 1,
        width: int = 500,
        interval: int = 1,
        until: float = 1.0,
        objective: str = "allocated",
        look_ahead: str = "optimizer",
        engine: str = "forward_mode",
        order: str = "exact",
        learning_rate: float = 1e-4,
        weight_decay: float = 1e-4,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        check_optimizer(optimizer)
        _check("centring", centring, CENTRINGS)
        _check("inputs", inputs, INPUTS)
        _check("objective", objective, META_OBJECTIVES)
        _check("look_ahead", look_ahead, ("optimizer", "plain"))
        _check("engine", engine, ENGINES)
        _check("order", order, ORDERS)
        check_order(order, engine, look_ahead)
        if interval < 1:
            raise ValueError(f"interval must be 1 or more loader batches, got {interval}")
        if not 0 <= until <= 1:
            raise ValueError(f"until must lie between 0 and 1, got {until:g}")
        if until < 1 and total_steps is None:
            raise ValueError("until, a share of training, needs total_steps")
        exit_counts(1, num_exits, q)  # refuses a bad q
        if engine == "finite_difference" and getattr(model, "equilibrium", False):
            raise ValueError("engine finite_difference cannot see gradient equilibrium; use forward_mode")
        self.model, self.optimizer, self.total_steps, self.steps = model, optimizer, total_steps, 0
        self.weighting = LearnedWeighting(
            num_exits,
            inputs=inputs,
            depth=depth,
            width=width,
            delta=delta,
            centring=centring,
            bound=bound,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            seed=seed,
            device=next(model.parameters()).device,
        )
        last = None if total_steps is None else ceil(until * total_steps)
        self.method = Method(self.weighting, ENGINES[engine], q, objective, look_ahead, interval, last, order)

    def step(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Two updates on a batch, one per half; the logged values are means over both."""
        if len(images) < 2:
            raise ValueError("a batch needs at least two samples: one half trains, the other guides the weights")
        if self.total_steps:
            self.weighting.set_rate(cosine(min(self.steps, self.total_steps), self.total_steps))
        halves = iterate(self.model, self.optimizer, self.method, images, labels, self.steps)
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


def _check(what: str, given: str, allowed: Any) -> None:
    if given not in allowed:
        raise ValueError(unknown(what, given, allowed))
