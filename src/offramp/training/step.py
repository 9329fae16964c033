"""One iteration of Algorithm 1: a loader batch, its two halves, two updates of the params.

Conventional training is the same iteration with a weighting that does not learn. The trainer and
`LearnedWeights` both run this function. `order="delayed"` is another algorithm under its own name: cheaper, because
the real step takes the weights from before the weight net's update.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offramp.models.collaboration import WithTeacher
from offramp.models.tape import Tape
from offramp.training.lookahead import look_ahead
from offramp.training.meta_gradient import (
    Criterion,
    Engine,
    Forward,
    Problem,
    by_tangents,
    draws_from,
    forward_mode,
    generator_states,
    meta_gradients,
    meta_loss_of,
)
from offramp.training.objectives.losses import exit_confidences, exit_losses, weighted_loss
from offramp.training.processes import World
from offramp.training.weighting import LearnedWeighting, Weighting

Half = tuple[Tensor, Tensor]
ORDERS = ("exact", "delayed")


@dataclass(frozen=True)
class Method:
    """What stays the same from step to step; the weight net learns at every `interval`-th step before `until`."""

    weighting: Weighting
    engine: Engine = forward_mode
    q: float = 0.75
    objective: str = "allocated"
    look_ahead: str = "optimizer"
    interval: int = 1
    until: int | None = None
    order: str = "exact"
    clip_norm: float | None = None
    criterion: Criterion = exit_losses
    world: World = field(default_factory=World)
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    def learns(self, step: int) -> bool:
        """Whether the weight net is trained at this step."""
        due = step % self.interval == 0 and (self.until is None or step < self.until)
        return due and isinstance(self.weighting, LearnedWeighting)


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
    if isinstance(model, WithTeacher):
        with method.autocast():
            images = model.features(images)
    first, second = zip(images.chunk(2), labels.chunk(2), strict=True)
    learn = method.learns(step)
    if learn and method.order == "delayed":
        return delayed_updates(model, optimizer, method, first, second)
    return [
        update(model, optimizer, method, train_half, meta_half, learn)
        for train_half, meta_half in ((first, second), (second, first))
    ]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, train_half: Half, meta_half: Half, learn: bool
) -> HalfResult:
    """One update of the params on the train half, after one of the weight net if it learns."""
    train = forward(model, method, *train_half, keeps=learn)
    seen = what_the_net_sees(method, train)
    meta_loss = None
    if learn:
        weights_NK = method.weighting.weights(*seen)
        problem = new_problem(model, optimizer, method, train, weights_NK, meta_half)
        with draws_from(None, train.images.device):  # the look-ahead leaves no trace in the real draws
            found = method.engine(problem)
        teach(method, weights_NK, found.weights_BK)
        meta_loss = found.loss
        problem.release()
    weights_BK = method.world.own_rows(method.weighting.weights(*seen)).detach()
    loss = backward(model, optimizer, method, train, weights_BK)  # the params have not moved since the forward
    optimizer.step()
    torch.clear_autocast_cache()  # an autocast around the whole step would go on with the old params
    return result(method, train, seen, weights_BK, loss, meta_loss)


def delayed_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, first: Half, second: Half
) -> list[HalfResult]:
    """Both updates in the delayed order: weights come from the weight net as it was before the update.

    So the real step is the look-ahead step, and the forward over the second half is both the first update's meta
    pass and the second update's train pass.
    """
    results = []
    train = forward(model, method, *first, keeps=True)
    for meta_half, again in ((second, True), (first, False)):
        seen = what_the_net_sees(method, train)
        weights_NK = method.weighting.weights(*seen)
        weights_BK = method.world.own_rows(weights_NK).detach()
        problem = new_problem(model, optimizer, method, train, weights_NK, meta_half)
        params = problem.params()
        loss = backward(model, optimizer, method, train, weights_BK)
        ahead = look_ahead(optimizer, params, {name: p.grad for name, p in params.items()}, "optimizer")
        before = dict(zip(params, torch._foreach_mul([p.detach() for p in params.values()], 1.0), strict=True))
        optimizer.step()
        torch.clear_autocast_cache()
        after = forward(model, method, *meta_half, keeps=True) if again else None
        with draws_from(None, train.images.device):
            outputs = after.outputs if after else problem.outputs_at(params, problem.meta_images)
            meta_loss = meta_loss_of(problem, outputs)
            v = meta_gradients(problem, meta_loss, params, keep_graph=again)
            teach(method, weights_NK, by_tangents(problem, before, ahead.direction(v)))
        results.append(result(method, train, seen, weights_BK, loss, method.world.sum(meta_loss.detach())))
        train = after or train
    return results


def forward(model: nn.Module, method: Method, images: Tensor, labels: Tensor, keeps: bool) -> Forward:
    """The forward over a half; its tape keeps, if asked to, what a tangent pass would compute again."""
    states, tape = generator_states(images.device), Tape(keeps)
    with method.autocast(), tape.recording():
        outputs = model(images)
    return Forward(images, labels, method.criterion(outputs, labels), states, outputs, tape if keeps else None)


def what_the_net_sees(method: Method, train: Forward) -> tuple[Tensor, Tensor]:
    """Plain cross-entropy and confidence of the global half, [N, K]."""
    exits = train.outputs[: train.losses_BK.shape[1]]
    plain_BK = train.losses_BK if method.criterion is exit_losses else exit_losses(exits, train.labels)
    return method.world.gather(plain_BK.detach()), method.world.gather(exit_confidences(exits))


def new_problem(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    train: Forward,
    weights_NK: Tensor,
    meta_half: Half,
) -> Problem:
    return Problem(
        model,
        optimizer,
        train,
        method.world.own_rows(weights_NK),
        *meta_half,
        method.q,
        method.objective,
        method.look_ahead,
        method.criterion,
        method.world,
        method.autocast,
    )


def teach(method: Method, weights_NK: Tensor, gradient_BK: Tensor) -> None:
    """One update of the weight net (Eq. 8)."""
    assert isinstance(method.weighting, LearnedWeighting)
    method.weighting.learn(weights_NK, method.world.gather(gradient_BK))


def backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, train: Forward, weights_BK: Tensor
) -> Tensor:
    """The gradients of the weighted loss (Eq. 9), through the first forward's graph; gives the loss."""
    loss = weighted_loss(train.losses_BK, weights_BK, len(train.labels) * method.world.size)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    sum_gradients(model, method.world)
    if method.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), method.clip_norm)
    return loss.detach()


def result(
    method: Method,
    train: Forward,
    seen: tuple[Tensor, Tensor],
    weights_BK: Tensor,
    loss: Tensor,
    meta_loss: Tensor | None,
) -> HalfResult:
    hits_K = torch.stack([(x.argmax(1) == train.labels).sum() for x in train.outputs[: weights_BK.shape[1]]])
    plain_BK, confidences_BK = (method.world.own_rows(rows) for rows in seen)
    return HalfResult(method.world.sum(loss), plain_BK, confidences_BK, weights_BK, hits_K, meta_loss)


def sum_gradients(model: nn.Module, world: World) -> None:
    """Add up the processes' gradients; their losses are shares of one mean already."""
    if world.size == 1:
        return
    owners = [p for p in model.parameters() if p.grad is not None]
    for param, total in zip(owners, world.sum_all([p.grad for p in owners if p.grad is not None]), strict=True):
        param.grad = total
