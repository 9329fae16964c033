"""Where the optimiser's next step leads, and how that place moves with the gradient.

The look-ahead params are those after one real step. With D the derivative of that step by the gradient,
elementwise, a gradient v of the meta loss at those params becomes the direction D v in which the train losses are
differentiated. Whole groups of params move together: a step costs a few kernels, not a few per param.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Params = dict[str, Tensor]
Slope = Sequence[Tensor] | Tensor | float


@dataclass(frozen=True)
class Moved:
    """Params of one group after the look-ahead step; with the gradient they move by minus `slope`, elementwise."""

    names: list[str]
    params: Sequence[Tensor]
    slope: Slope


@dataclass(frozen=True)
class LookAhead:
    """All params after the look-ahead step; those without a gradient stay, as they do in torch."""

    params: Params
    groups: list[Moved]

    def direction(self, gradients: Params) -> Params:
        """D v for every param; 0 for those that do not move."""
        found: Params = {}
        for group in self.groups:
            own = [gradients[name] for name in group.names]
            found |= zip(group.names, torch._foreach_mul(own, group.slope), strict=True)  # type: ignore[arg-type]
        return {name: found[name] if name in found else torch.zeros_like(g) for name, g in gradients.items()}


Rule = Callable[[list[Tensor], list[Tensor], dict, list[dict]], tuple[Sequence[Tensor], Slope]]


def look_ahead(
    optimizer: torch.optim.Optimizer, params: Params, gradients: dict[str, Tensor | None], how: str
) -> LookAhead:
    """Where the optimiser would take each param: by its own rule, or by `plain` gradient descent."""
    rule = _plain if how == "plain" else _rule(optimizer)
    moved, groups = dict(params), []
    for group in optimizer.param_groups:
        own = {id(p) for p in group["params"]}
        names = [n for n, g in gradients.items() if g is not None and id(params[n]) in own]
        states = {n: optimizer.state.get(params[n], {}) for n in names}
        fresh = [n for n in names if states[n].get("momentum_buffer") is None]  # their first step may be another
        for alike in (fresh, [n for n in names if n not in set(fresh)]):
            if not alike:
                continue
            known = [g for n in alike if (g := gradients[n]) is not None]
            ahead, slope = rule([params[n].detach() for n in alike], known, group, [states[n] for n in alike])
            groups.append(Moved(alike, ahead, slope))
            moved |= zip(alike, ahead, strict=True)
    return LookAhead(moved, groups)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser whose step is not known here."""
    _rule(optimizer)
    if optimizer._optimizer_step_pre_hooks:
        raise ValueError(
            "the optimizer has step hooks; a look-ahead cannot know what they do to the gradients "
            "(clipping by global norm, for example, couples all params): remove them"
        )
    for group in optimizer.param_groups:
        for option in ("maximize", "amsgrad"):
            if group.get(option):
                raise ValueError(f"the optimizer's {option}=True has no look-ahead here; leave it off")


def _rule(optimizer: torch.optim.Optimizer) -> Rule:
    rules: dict[type, Rule] = {torch.optim.SGD: _sgd, torch.optim.AdamW: _adamw}
    if type(optimizer) not in rules:
        known = ", ".join(kind.__name__ for kind in rules)
        raise ValueError(f"learned weights need one of the optimizers {known}, got {type(optimizer).__name__}")
    return rules[type(optimizer)]


def _plain(
    params: list[Tensor], gradients: list[Tensor], group: dict, states: list[dict]
) -> tuple[Sequence[Tensor], Slope]:
    """Plain gradient descent, as the paper writes it (Eq. 7)."""
    return torch._foreach_sub(params, torch._foreach_mul(gradients, group["lr"])), group["lr"]


def _sgd(
    params: list[Tensor], gradients: list[Tensor], group: dict, states: list[dict]
) -> tuple[Sequence[Tensor], Slope]:
    """torch's SGD: weight decay, momentum, dampening after the first step, Nesterov."""
    rate, momentum = group["lr"], group["momentum"]
    steps, slope = torch._foreach_add(gradients, params, alpha=group["weight_decay"]), 1.0
    if momentum:
        buffers = [b for state in states if (b := state.get("momentum_buffer")) is not None]  # all of them, or none
        fresh = 1 - group["dampening"] if buffers else 1.0
        averages = steps
        if buffers:
            averages = torch._foreach_add(torch._foreach_mul(buffers, momentum), steps, alpha=fresh)
        if group["nesterov"]:
            steps, slope = torch._foreach_add(steps, averages, alpha=momentum), 1 + momentum * fresh
        else:
            steps, slope = averages, fresh
    return torch._foreach_sub(params, torch._foreach_mul(steps, rate)), rate * slope


def _adamw(
    params: list[Tensor], gradients: list[Tensor], group: dict, states: list[dict]
) -> tuple[Sequence[Tensor], Slope]:
    each = zip(params, gradients, states, strict=True)
    found = [_adamw_step(param, gradient, group, state) for param, gradient, state in each]
    return [ahead for ahead, _ in found], [slope for _, slope in found]


def _adamw_step(param: Tensor, gradient: Tensor, group: dict, state: dict) -> tuple[Tensor, Tensor]:
    """torch's AdamW: decoupled weight decay, both moments with bias correction."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    zeros = torch.zeros_like(param)
    count = state.get("step", 0)
    if isinstance(count, Tensor) and count.device.type == "cpu":
        count = count.item()  # as torch does: a power in double precision
    count = count + 1
    first = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * gradient
    second = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * gradient * gradient
    pace, scale = rate / (1 - beta1**count), (1 - beta2**count) ** 0.5
    # A second moment of zero means a gradient of zero: its root adds nothing, and neither does its derivative.
    some = second > 0
    root = torch.where(some, second, torch.ones_like(second)).sqrt()
    below = torch.where(some, root, zeros) / scale + group["eps"]
    bend = torch.where(some, (1 - beta2) * gradient / (root * scale), zeros).detach()
    slope = pace * ((1 - beta1) - first.detach() * bend / below.detach()) / below.detach()
    return param * (1 - rate * group["weight_decay"]) - pace * first / below, slope
