"""Weightings and methods made of settings, as a run makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offramp.models.exits import ExitNet
from offramp.runs.config import WeightingConfig, parse
from offramp.training.imta import GradientEquilibrium
from offramp.training.meta_gradient import Forward, Problem
from offramp.training.method import Method
from offramp.training.objectives import Half
from offramp.training.step import forward
from offramp.training.weighting import Context, LearnedWeighting, UniformWeighting


def settings(**given: Any) -> WeightingConfig:
    """Settings of learned weights."""
    return parse(WeightingConfig, {"name": "learned", **given})


def learned(num_exits: int, *, seed: int = 0, double: bool = False, **given: Any) -> LearnedWeighting:
    """A weighting with a weight net; `terms=each` has two, as distillation does."""
    weighting = LearnedWeighting(settings(**given), Context(num_exits, seed=seed, terms=2))
    if double:
        weighting.net.double()
    return weighting


def by(weighting: LearnedWeighting, **given: Any) -> Method:
    """A method that teaches a weighting by its own settings."""
    return Method(weighting, weighting.settings, **given)


def problem_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Half,
    weights: torch.Tensor | None,
    meta: Half,
    method: Method | None = None,
    keeps: bool = False,
) -> Problem:
    """The problem of a meta-gradient; weights None: all ones."""
    method = method or Method(UniformWeighting(), settings())
    passed: Forward = forward(model, method, train, keeps=keeps)
    given = torch.ones_like(passed.losses_BK) if weights is None else weights
    return Problem(model, optimizer, method, passed, given, meta)


def with_equilibrium(model: ExitNet, on: bool = True) -> ExitNet:
    """A network that trains with IMTA's gradient equilibrium."""
    model.fork = GradientEquilibrium(model.num_exits) if on else None
    return model
