"""One iteration of Algorithm 1: a loader batch, its two halves, two updates of the params.

Conventional training is the same iteration with a weighting that does not learn. The trainer and
`LearnedWeights` both run this function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offramp.meta import Criterion, Engine, Forward, Problem, draws_from, forward_mode, generator_states
from offramp.objectives.losses import exit_confidences, exit_losses, weighted_loss
from offramp.objectives.weighting import LearnedWeighting, Weighting
from offramp.world import World


@dataclass(frozen=True)
class Method:
    """What stays the same from step to step."""

    weighting: Weighting
    engine: Engine = forward_mode
    q: float = 0.75
    objective: str = "allocated"
    look_ahead: str = "optimizer"
    interval: int = 1
    clip_norm: float | None = None
    criterion: Criterion = exit_losses
    world: World = field(default_factory=World)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class HalfResult:
    """What one update saw and did: no graph, nothing copied to the host.

    Both losses are those of the global half, the rest is of this process's samples.
    """

    loss: Tensor
    losses_BK: Tensor
    confidences_BK: Tensor
    weights_BK: Tensor
    hits_K: Tensor
    meta_loss: Tensor | None


def iterate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    images: Tensor,
    labels: Tensor,
    step: int,
) -> list[HalfResult]:
    """Two updates on a loader batch: each half is once the train half and once the meta half."""
    first, second = zip(images.chunk(2), labels.chunk(2), strict=True)
    learn = step % method.interval == 0
    return [
        update(model, optimizer, method, train_half, meta_half, learn)
        for train_half, meta_half in ((first, second), (second, first))
    ]


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    train_half: tuple[Tensor, Tensor],
    meta_half: tuple[Tensor, Tensor],
    learn: bool,
) -> HalfResult:
    """One update of the params on the train half, after one of the weight net if it learns."""
    images, labels = train_half
    states = generator_states(images.device)
    with method.autocast():
        outputs = model(images)
    losses_BK = method.criterion(outputs, labels)
    num_exits = losses_BK.shape[1]
    # The weight net sees plain cross-entropy, of the global batch.
    plain_BK = losses_BK if method.criterion is exit_losses else exit_losses(outputs[:num_exits], labels)
    confidences_BK = exit_confidences(outputs[:num_exits])
    world = method.world
    seen = world.gather(plain_BK.detach()), world.gather(confidences_BK)
    meta_loss = None
    if learn and isinstance(method.weighting, LearnedWeighting):
        weights_NK = method.weighting.weights(*seen)
        forward = Forward(images, labels, losses_BK, states)
        problem = Problem(
            model,
            optimizer,
            forward,
            world.own_rows(weights_NK),
            *meta_half,
            method.q,
            method.objective,
            method.look_ahead,
            method.criterion,
            world,
            method.autocast,
        )
        with draws_from(None, images.device):  # the look-ahead leaves no trace in the real draws
            found = method.engine(problem)
        method.weighting.learn(weights_NK, world.gather(found.weights_BK))  # Eq. 8
        meta_loss = found.loss
    weights_BK = world.own_rows(method.weighting.weights(*seen)).detach()
    loss = weighted_loss(losses_BK, weights_BK, len(labels) * world.size)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # Eq. 9, through the first forward's graph: the params have not moved
    sum_gradients(model, world)
    if method.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), method.clip_norm)
    optimizer.step()
    torch.clear_autocast_cache()  # an autocast around the whole step would go on with the old params
    hits_K = torch.stack([(x.argmax(1) == labels).sum() for x in outputs[:num_exits]])
    return HalfResult(world.sum(loss.detach()), plain_BK.detach(), confidences_BK, weights_BK, hits_K, meta_loss)


def sum_gradients(model: nn.Module, world: World) -> None:
    """Add up the processes' gradients; their losses are shares of one mean already."""
    if world.size == 1:
        return
    owners = [p for p in model.parameters() if p.grad is not None]
    for param, total in zip(owners, world.sum_all([p.grad for p in owners if p.grad is not None]), strict=True):
        param.grad = total
