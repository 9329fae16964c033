"""Optimisers by name, and the learning rates they follow.

A factory is called as `factory(params, config)` with the params to train and the `TrainConfig`; `train.optimizer` names
one, and `train.optimizer_options` are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from offramp.common.registry import Registry
from offramp.runs.config import TrainConfig

Factory = Callable[[list[nn.Parameter], TrainConfig], torch.optim.Optimizer]
OPTIMIZERS: Registry[Factory] = Registry("optimizer")
register_optimizer = OPTIMIZERS.register  # called as `factory(params, config)`


def new_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The configured optimiser of all params that are trained."""
    try:
        return OPTIMIZERS[config.optimizer]([p for p in model.parameters() if p.requires_grad], config)
    except TypeError as error:
        raise ValueError(f"train.optimizer_options do not fit {config.optimizer!r}: {error}") from error


@register_optimizer("sgd")
def _sgd(params: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        params,
        lr=config.initial_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=params[0].is_cuda,
        **config.optimizer_options,
    )


@register_optimizer("adamw")
def _adamw(params: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params,
        lr=config.initial_rate,
        weight_decay=config.weight_decay,
        capturable=params[0].is_cuda,
        **config.optimizer_options,
    )


def cosine(step: int, total: int) -> float:
    """The share of the initial rate at `step` of `total`: from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One rate for all groups; a rate that lies on the device is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Rates as tensors, so that a CUDA graph reads them anew at every step."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
