"""Optimisers by name, and the learning rates they follow.

A factory is called as `factory(params, config)` with the params to train and the `TrainConfig`; `train.optimizer` names
one, and `train.optimizer_options` are its own. Where params differ in rate or weight decay they come in groups, as
torch's optimisers take them; a group's `factor` is its share of the rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.registry import Registry
from offramp.models.exits import ExitNet
from offramp.runs.config import TrainConfig
from offramp.training.param_stages import param_stages

Params = list[nn.Parameter] | list[dict[str, Any]]
Factory = Callable[[Any, TrainConfig], torch.optim.Optimizer]
OPTIMIZERS: Registry[Factory] = Registry("optimizer")
register_optimizer = OPTIMIZERS.register  # called as `factory(params, config)`


def new_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The configured optimiser of all params that are trained."""
    params = params_to_train(model, config)
    try:
        return OPTIMIZERS[config.optimizer](params, config)
    except TypeError as error:
        raise ValueError(f"train.optimizer_options do not fit {config.optimizer!r}: {error}") from error


def params_to_train(model: nn.Module, config: TrainConfig) -> Params:
    """All params that are trained, in groups of one rate and one weight decay where these differ."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if config.depth_decay == config.head_rate == 1 and config.decay_norms:
        return list(named.values())
    factors, spared = rate_factors(model, config), spared_decay(model)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, param in named.items():
        groups[factors[name], config.decay_norms or id(param) not in spared].append(param)
    return [
        {"params": params, "factor": factor, "weight_decay": config.weight_decay if decays else 0.0}
        for (factor, decays), params in groups.items()
    ]


def spared_decay(model: nn.Module) -> set[int]:
    """The params, by id, that are better off without weight decay: norms, biases, and what a network of timm names.

    These are position embeddings, class tokens and the like (`no_weight_decay()`).
    """
    found = {id(param) for param in model.parameters() if param.ndim < 2}
    for part in model.modules():
        named = getattr(part, "no_weight_decay", None)
        if callable(named):
            own = dict(part.named_parameters())
            found |= {id(own[name]) for name in named() if name in own}
    return found


def rate_factors(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    """The share of the rate that each param trains at, by name; depth is counted within each network of a cascade."""
    assert isinstance(model, ExitNet)
    stages = param_stages(model) if config.depth_decay < 1 else {}
    heads, ends = {id(param) for param in model.head_params()}, model.ends

    def above(name: str) -> int:
        stage = stages.get(name, model.num_exits)
        return next(end for end in ends if end >= stage) - stage

    return {
        name: config.depth_decay ** above(name) * (config.head_rate if id(param) in heads else 1.0)
        for name, param in model.named_parameters()
    }


def on_gpu(params: Params) -> bool:
    """Whether the params lie on a GPU."""
    first = params[0]
    return bool((first["params"][0] if isinstance(first, dict) else first).is_cuda)


@register_optimizer("sgd")
def _sgd(params: Params, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        params,
        lr=config.initial_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=on_gpu(params),
        **config.optimizer_options,
    )


@register_optimizer("adamw")
def _adamw(params: Params, config: TrainConfig) -> torch.optim.Optimizer:
    if config.learning_rate is None:
        raise ValueError("train.optimizer=adamw needs train.learning_rate, 1e-3 for example; the default is for sgd")
    return torch.optim.AdamW(
        params,
        lr=config.initial_rate,
        weight_decay=config.weight_decay,
        capturable=on_gpu(params),
        fused=on_gpu(params),
        **config.optimizer_options,
    )


def cosine(step: int, total: int) -> float:
    """The share of the initial rate at `step` of `total`: from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


def rate_share(step: int, total: int, warm_up: int = 0) -> float:
    """The share of the initial rate at `step`: in a line up to 1 over the warm-up, then along a cosine.

    The warm-up takes half of training at most.
    """
    warm_up = min(warm_up, total // 2)
    return (step + 1) / warm_up if step < warm_up else cosine(step - warm_up, total - warm_up)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One rate for all groups, but for their factors; a rate that lies on the device is changed in place."""
    for group in optimizer.param_groups:
        own = rate * group.get("factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Rates as tensors, so that a CUDA graph reads them anew at every step."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
