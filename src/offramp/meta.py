"""The meta-gradient: how the meta loss at the look-ahead params changes with the weights of the train half.

Three interchangeable engines, one signature: `engine(problem) -> MetaGradient`. The weights enter the train
loss linearly, so with v the gradient of the meta loss at the look-ahead params and D the derivative of the
optimiser's step by the gradient,

    dL_meta / dw_ik = -(1/n) * (gradient of l_ik by the params) . (D v)

The bracket is a directional derivative of the per-sample losses: `forward_mode` takes it with one forward-mode
pass and needs no double backward; `finite_difference` approximates it; `double_backward` is the textbook way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from offramp.objectives.allocation import allocate
from offramp.objectives.losses import exit_confidences, exit_losses, mean_weights, weighted_loss
from offramp.world import World

# The first dual tensor makes torch load its own decompositions, which it warns about itself.
with warnings.catch_warnings(action="ignore"), fwAD.dual_level():
    fwAD.make_dual(torch.zeros(1), torch.zeros(1))

Criterion = Callable[[Sequence[Tensor], Tensor], Tensor]
Params = dict[str, Tensor]


@dataclass(frozen=True)
class Forward:
    """The forward pass over a train half: losses with their graph, and the generator states before it."""

    images: Tensor
    labels: Tensor
    losses_BK: Tensor
    generator_states: tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """Everything a meta-gradient depends on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Forward
    weights_BK: Tensor
    meta_images: Tensor
    meta_labels: Tensor
    q: float = 0.75
    objective: str = "allocated"
    look_ahead: str = "optimizer"
    criterion: Criterion = exit_losses
    world: World = field(default_factory=World)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def samples(self) -> int:
        """The size of the train half over all processes."""
        return len(self.train.labels) * self.world.size

    def params(self) -> Params:
        """The params that the optimiser moves, by name."""
        moved = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) in moved}

    def outputs_at(self, params: Params, images: Tensor) -> Sequence[Tensor]:
        """The network's outputs at other params; buffers are copies, so the real ones stay as they are."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        with self.autocast():
            return functional_call(self.model, {**params, **buffers}, (images,))

    def train_losses_at(self, params: Params) -> Tensor:
        """The train half's losses at other params, with the draws (dropout) of the first forward."""
        with draws_from(self.train.generator_states, self.train.images.device):
            return self.criterion(self.outputs_at(params, self.train.images), self.train.labels)


@dataclass(frozen=True)
class MetaGradient:
    """The gradient of the meta loss by the weights [B, K] and the loss itself."""

    weights_BK: Tensor
    loss: Tensor


Engine = Callable[[Problem], MetaGradient]


def forward_mode(problem: Problem) -> MetaGradient:
    """Exact, by one forward-mode pass over the train half; the first forward's graph is kept for reuse."""
    params = problem.params()
    direction, loss = _direction(problem, params)
    # Fused attention has no forward-mode formula; its plain form has.
    with torch.no_grad(), fwAD.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {name: fwAD.make_dual(p.detach(), direction[name]) for name, p in params.items()}
        found: Any = fwAD.unpack_dual(problem.train_losses_at(duals)).tangent
        # None where the train half reads nothing that moves
        tangents_BK = torch.zeros_like(problem.weights_BK) if found is None else found
    return MetaGradient(-tangents_BK / problem.samples, loss)


def finite_difference(problem: Problem) -> MetaGradient:
    """Approximate: the losses a small step ahead and behind along the same direction.

    The step balances rounding against curvature: the cube root of the machine's precision, relative to the
    params' own size.
    """
    params = problem.params()
    direction, loss = _direction(problem, params)
    # In half precision the small step would drown in rounding.
    full = partial(torch.autocast, problem.train.images.device.type, enabled=False)
    problem = replace(problem, autocast=full)
    with torch.no_grad():
        size, length = (_norm(tensors.values()) for tensors in (params, direction))
        relative = torch.finfo(loss.dtype).eps ** (1 / 3)
        step = torch.where(length > 0, relative * size / length, torch.ones_like(length))  # 0: nothing to see
        ahead, behind = (
            problem.train_losses_at({name: p + sign * step * direction[name] for name, p in params.items()})
            for sign in (1, -1)
        )
    return MetaGradient(-(ahead - behind) / (2 * step) / problem.samples, loss)


def double_backward(problem: Problem) -> MetaGradient:
    """The textbook way: differentiate through the look-ahead step."""
    params = problem.params()
    weights_BK = problem.weights_BK.detach().requires_grad_()
    gradients = _train_gradients(problem, params, weights_BK, create_graph=True)
    moved = look_ahead(problem.optimizer, params, gradients, problem.look_ahead)
    loss = meta_loss(problem, {name: step.params for name, step in moved.items()})
    (by_weights,) = torch.autograd.grad(loss, weights_BK, retain_graph=True, materialize_grads=True)
    return MetaGradient(by_weights, problem.world.sum(loss.detach()))


ENGINES: dict[str, Engine] = {
    "forward_mode": forward_mode,
    "double_backward": double_backward,
    "finite_difference": finite_difference,
}


def meta_loss(problem: Problem, params: Params) -> Tensor:
    """The meta loss at `params`: each exit's mean over the samples that would leave there (Eq. 6), or over all."""
    num_exits = problem.weights_BK.shape[1]
    outputs = problem.outputs_at(params, problem.meta_images)[:num_exits]  # a teacher behind them is no exit
    losses_BK = exit_losses(outputs, problem.meta_labels)
    if problem.objective == "whole":
        return losses_BK.sum() / (len(losses_BK) * problem.world.size)
    everyone = problem.world.gather(exit_confidences(outputs))
    means_NK = mean_weights(allocate(everyone, problem.q), num_exits)
    return (problem.world.own_rows(means_NK).to(losses_BK.dtype) * losses_BK).sum()


def _direction(problem: Problem, params: Params) -> tuple[Params, Tensor]:
    """D v for every param, and the meta loss."""
    gradients = _train_gradients(problem, params, problem.weights_BK.detach(), create_graph=False)
    moved = look_ahead(problem.optimizer, params, gradients, problem.look_ahead)
    ahead = {name: step.params.detach().requires_grad_() for name, step in moved.items()}
    loss = meta_loss(problem, ahead)
    v = torch.autograd.grad(loss, list(ahead.values()), materialize_grads=True)
    summed = zip(ahead, problem.world.sum_all(v), strict=True)
    direction = {name: moved[name].slope * g for name, g in summed}
    return direction, problem.world.sum(loss.detach())


def _train_gradients(
    problem: Problem, params: Params, weights_BK: Tensor, create_graph: bool
) -> dict[str, Tensor | None]:
    """The gradient of the weighted train loss, from the first forward's graph, over all processes."""
    loss = weighted_loss(problem.train.losses_BK, weights_BK, problem.samples)
    found = torch.autograd.grad(
        loss, list(params.values()), retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    if problem.world.size > 1:
        if create_graph:
            raise ValueError("double_backward runs in one process only; use forward_mode")
        used = [g for g in found if g is not None]
        summed = iter(problem.world.sum_all(used))
        found = tuple(None if g is None else next(summed) for g in found)
    return dict(zip(params, found, strict=True))


@dataclass(frozen=True)
class Step:
    """A param after the look-ahead step, and how that moves with the gradient: minus `slope`, elementwise."""

    params: Tensor
    slope: Tensor | float


def look_ahead(
    optimizer: torch.optim.Optimizer, params: Params, gradients: dict[str, Tensor | None], how: str
) -> dict[str, Step]:
    """Where the optimiser would take each param; those without a gradient stay, as they do in torch."""
    rule = _plain if how == "plain" else _rule(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    moved = {}
    for name, param in params.items():
        gradient = gradients[name]
        if gradient is None:
            moved[name] = Step(param, 0.0)
        else:
            moved[name] = rule(param.detach(), gradient, groups[id(param)], optimizer.state.get(param, {}))
    return moved


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


def _rule(optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor, dict, dict], Step]:
    rules = {torch.optim.SGD: _sgd, torch.optim.AdamW: _adamw}
    if type(optimizer) not in rules:
        known = ", ".join(kind.__name__ for kind in rules)
        raise ValueError(f"learned weights need one of the optimizers {known}, got {type(optimizer).__name__}")
    return rules[type(optimizer)]


def _plain(param: Tensor, gradient: Tensor, group: dict, state: dict) -> Step:
    """Plain gradient descent, as the paper writes it (Eq. 7)."""
    return Step(param - group["lr"] * gradient, group["lr"])


def _sgd(param: Tensor, gradient: Tensor, group: dict, state: dict) -> Step:
    """torch's SGD: weight decay, momentum, dampening after the first step, Nesterov."""
    rate, momentum = group["lr"], group["momentum"]
    step, slope = gradient + group["weight_decay"] * param, 1.0
    if momentum:
        buffer = state.get("momentum_buffer")
        fresh = 1.0 if buffer is None else 1 - group["dampening"]
        average = step if buffer is None else momentum * buffer + fresh * step
        if group["nesterov"]:
            step, slope = step + momentum * average, 1 + momentum * fresh
        else:
            step, slope = average, fresh
    return Step(param - rate * step, rate * slope)


def _adamw(param: Tensor, gradient: Tensor, group: dict, state: dict) -> Step:
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
    return Step(param * (1 - rate * group["weight_decay"]) - pace * first / below, slope)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the generators that a module may draw from."""
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


@contextmanager
def draws_from(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw as from `states` (None: go on) inside the block, and afterwards as if it had not been."""
    before = generator_states(device)
    if states is not None:
        _set_states(states, device)
    try:
        yield
    finally:
        _set_states(before, device)


def _set_states(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
