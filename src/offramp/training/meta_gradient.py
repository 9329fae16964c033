"""The meta-gradient: how the meta loss at the look-ahead params changes with the weights of the train half.

Three interchangeable estimators, one signature: `estimator(problem) -> MetaGradient`. The weights enter the train
loss linearly, so with v the gradient of the meta loss at the look-ahead params and D the derivative of the
optimiser's step by the gradient (lookahead.py),

    dL_meta / dw_ik = -(1/n) * (gradient of l_ik by the params) . (D v)

The bracket is a directional derivative of the per-sample losses: `forward_mode` takes it with one forward-mode
pass and needs no double backward; `finite_difference` approximates it; `double_backward` is the textbook way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from offramp.common.generators import GeneratorStates, draws_from
from offramp.models.kernels.reference import dual, values_and_tangent
from offramp.training.lookahead import Params, look_ahead
from offramp.training.method import Method
from offramp.training.objectives import (
    Half,
    allocate,
    exit_confidences,
    exit_losses,
    mean_weights,
    soft_shares,
    weighted_loss,
)
from offramp.training.tape import Tape, no_trace, touched_buffers

# The first dual tensor makes torch load its own decompositions, which it warns about itself.
with warnings.catch_warnings(action="ignore"), fwAD.dual_level():
    fwAD.make_dual(torch.zeros(1), torch.zeros(1))


@dataclass(frozen=True)
class Forward:
    """The forward pass over a half: outputs and losses with their graph, the generator states before it, its tape.

    Here and in what follows K stands for all columns that have a weight: the exits, or the exits of each term.
    """

    half: Half
    outputs: Sequence[Tensor]
    losses_BK: Tensor
    generator_states: GeneratorStates
    tape: Tape | None = None

    @property
    def device(self) -> torch.device:
        return self.half.images.device


@dataclass(frozen=True)
class Problem:
    """Everything a meta-gradient depends on; `weights_BK` are those of this process's samples."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    method: Method
    train: Forward
    weights_BK: Tensor
    meta_half: Half

    @property
    def samples(self) -> int:
        """The size of the train half over all processes."""
        return len(self.train.half.labels) * self.method.processes.size

    def params(self) -> Params:
        """The params that the optimiser moves, by name."""
        moved = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) in moved}

    def outputs_at(self, params: Params, images: Tensor, replayed: Tape | None = None) -> Sequence[Tensor]:
        """The network's outputs at other params; buffers are copies, so the real ones stay as they are."""
        copies = {name: b.clone() for name, b in touched_buffers(self.model)}
        with self.method.autocast(), no_trace() if replayed is None else replayed.replaying():
            return functional_call(self.model, {**params, **copies}, (images,))

    def train_losses_at(self, params: Params, replayed: Tape | None = None) -> Tensor:
        """The train half's losses at other params, with the draws (dropout) of the first forward."""
        half = self.train.half
        with draws_from(self.train.generator_states, self.train.device):
            return self.method.losses(self.outputs_at(params, half.images, replayed), half)

    def meta_loss_at(self, params: Params) -> Tensor:
        """The meta loss at other params."""
        return self.meta_loss(self.outputs_at(params, self.meta_half.images))

    def meta_loss(self, outputs: Sequence[Tensor]) -> Tensor:
        """The meta loss of outputs: each exit's mean over the samples that would leave there (Eq. 6), or over all.

        Or, for a policy, the mean over samples of their loss where they leave, by soft shares.
        """
        processes, settings = self.method.processes, self.method.settings
        losses_BK = exit_losses(outputs, self.meta_half.labels)
        samples = len(losses_BK) * processes.size
        if settings.objective == "whole":
            return losses_BK.sum() / samples
        confidences_NK = processes.gather(exit_confidences(outputs, settings.through_exits))
        if settings.objective == "policy":
            shares_NK = soft_shares(confidences_NK, settings.q, settings.temperature)
            return (processes.own_rows(shares_NK) * losses_BK).sum() / samples
        means_NK = mean_weights(allocate(confidences_NK, settings.q), len(outputs))
        return (processes.own_rows(means_NK).to(losses_BK.dtype) * losses_BK).sum()

    def release(self) -> None:
        """Let go of what only the meta-gradient needed."""
        if self.train.tape is not None:
            self.train.tape.clear()


@dataclass(frozen=True)
class MetaGradient:
    """The gradient of the meta loss by the weights [B, K] and the loss itself."""

    weights_BK: Tensor
    loss: Tensor


Estimator = Callable[[Problem], MetaGradient]


def forward_mode(problem: Problem) -> MetaGradient:
    """Exact, by one forward-mode pass over the train half; the first forward's graph is kept for reuse."""
    params = problem.params()
    direction, loss = _direction(problem, params)
    return MetaGradient(by_tangents(problem, params, direction), loss)


def by_tangents(problem: Problem, params: Params, direction: Params) -> Tensor:
    """The gradient by the weights: how the train losses at `params` change along the direction D v."""
    # Fused attention has no forward-mode formula; its plain form has.
    with torch.no_grad(), fwAD.dual_level(), sdpa_kernel(SDPBackend.MATH), frozen_norms_keep_dtype(problem.model):
        duals = {name: fwAD.make_dual(p.detach(), direction[name]) for name, p in params.items()}
        found: Any = fwAD.unpack_dual(problem.train_losses_at(duals, problem.train.tape)).tangent
        # None where the train half reads nothing that moves
        tangents_BK = torch.zeros_like(problem.weights_BK) if found is None else found
    return -tangents_BK / problem.samples


@contextmanager
def frozen_norms_keep_dtype(model: nn.Module) -> Iterator[None]:
    """Tangents of a BatchNorm in evaluation mode get their values' dtype; torch gives them that of its params."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and not m.training]
    hooks = [norm.register_forward_hook(_in_one_dtype) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_one_dtype(norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    value, tangent = values_and_tangent(output)
    return output if tangent is None or tangent.dtype == value.dtype else dual(value, tangent.to(value.dtype))


def finite_difference(problem: Problem) -> MetaGradient:
    """Approximate: the losses a small step ahead and behind along the same direction.

    The step balances rounding against curvature: the cube root of the machine's precision, relative to the
    params' own size.
    """
    params = problem.params()
    direction, loss = _direction(problem, params)
    # In 16 bits the small step would drown in rounding.
    full: Callable[[], AbstractContextManager[object]] = partial(
        torch.autocast, problem.train.device.type, enabled=False
    )
    problem = replace(problem, method=replace(problem.method, autocast=full))
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
    ahead = look_ahead(problem.optimizer, params, gradients, problem.method.settings.look_ahead)
    loss = problem.meta_loss_at(ahead.params)
    (by_weights,) = torch.autograd.grad(loss, weights_BK, retain_graph=True, materialize_grads=True)
    return MetaGradient(by_weights, problem.method.processes.sum(loss.detach()))


ESTIMATORS: dict[str, Estimator] = {
    estimator.__name__: estimator for estimator in (forward_mode, double_backward, finite_difference)
}


def refuse_blind_differences(engine: str, model: nn.Module, objective: object = None) -> None:
    """Raise for differences of forward passes where something has other gradients than its values have."""
    if engine != "finite_difference":
        return
    for part in (objective, getattr(model, "fork", None)):
        if getattr(part, "changes_gradients", False):
            raise ValueError(
                f"weighting.engine=finite_difference cannot see what {type(part).__name__} does to gradients, which "
                "are not those of its values; use forward_mode"
            )
    if getattr(model, "changes_gradients", False):
        raise ValueError(
            "weighting.engine=finite_difference sees exits answer with what earlier ones said (carry, or a head that "
            "reads the exit before), but no gradient goes there; use forward_mode"
        )


def _direction(problem: Problem, params: Params) -> tuple[Params, Tensor]:
    """D v for every param, and the meta loss."""
    gradients = _train_gradients(problem, params, problem.weights_BK.detach(), create_graph=False)
    ahead = look_ahead(problem.optimizer, params, gradients, problem.method.settings.look_ahead)
    leaves = {name: p.detach().requires_grad_() for name, p in ahead.params.items()}
    loss = problem.meta_loss_at(leaves)
    v = meta_gradients(problem, loss, leaves)
    return ahead.direction(v), problem.method.processes.sum(loss.detach())


def meta_gradients(problem: Problem, loss: Tensor, params: Params, keep_graph: bool = False) -> Params:
    """The gradient of the meta loss by the params it was computed at, over all processes."""
    v = torch.autograd.grad(loss, list(params.values()), retain_graph=keep_graph, materialize_grads=True)
    return dict(zip(params, problem.method.processes.sum_all(v), strict=True))


def _train_gradients(
    problem: Problem, params: Params, weights_BK: Tensor, create_graph: bool
) -> dict[str, Tensor | None]:
    """The gradient of the weighted train loss, from the first forward's graph, over all processes."""
    loss = weighted_loss(problem.train.losses_BK, weights_BK, problem.samples)
    found = torch.autograd.grad(
        loss, list(params.values()), retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    if problem.method.processes.size > 1:
        if create_graph:
            raise ValueError("double_backward runs in one process only; use forward_mode")
        used = [g for g in found if g is not None]
        summed = iter(problem.method.processes.sum_all(used))
        found = tuple(None if g is None else next(summed) for g in found)
    return dict(zip(params, found, strict=True))


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()
