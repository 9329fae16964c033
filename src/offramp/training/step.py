"""One step of Algorithm 1: a loader batch, its two halves, two updates of the params.

    halves -> forward -> weights -> (meta-gradient -> the weight net learns -> weights again) -> backward -> update

Conventional training is the same step with a weighting that does not learn. The training loop and `LearnedWeights`
both call `train_step`. `weighting.order=delayed` is another algorithm under its own name: cheaper, because the real
update takes the weights from before the weight net learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offramp.common.seeds import draws_from, generator_states
from offramp.training.lookahead import look_ahead
from offramp.training.meta_gradient import ESTIMATORS, Forward, Problem, by_tangents, meta_gradients
from offramp.training.method import Method
from offramp.training.objectives import Half, cross_entropy, exit_confidences, exit_losses, weighted_loss
from offramp.training.tape import Tape


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


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    images: Tensor,
    labels: Tensor,
    step: int,
) -> list[HalfResult]:
    """Two updates on a loader batch: each half is once the train half and once the meta half."""
    first, second = method.halves(images, labels)
    learn = method.weighting.learns(step)
    if learn and method.settings.order == "delayed":
        return delayed_updates(model, optimizer, method, first, second)
    return [
        exact_update(model, optimizer, method, train_half, meta_half, learn)
        for train_half, meta_half in ((first, second), (second, first))
    ]


def exact_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, train_half: Half, meta_half: Half, learn: bool
) -> HalfResult:
    """One update of the params on the train half, after one of the weight net if it learns."""
    train = forward(model, method, train_half, keeps=learn)
    seen = what_the_net_sees(method, train)
    meta_loss = None
    if learn:
        weights_NK = method.weighting.weights(*seen)
        problem = Problem(model, optimizer, method, train, method.processes.own_rows(weights_NK), meta_half)
        with draws_from(None, train.device):  # the look-ahead leaves no trace in the real draws
            found = ESTIMATORS[method.settings.engine](problem)
        method.weighting.learn(weights_NK, method.processes.gather(found.weights_BK))  # Eq. 8
        meta_loss = found.loss
        problem.release()
    weights_BK = method.processes.own_rows(method.weighting.weights(*seen)).detach()
    loss = backward(model, optimizer, method, train, weights_BK)  # the params have not moved since the forward
    update(optimizer)
    return _result(method, train, seen, weights_BK, loss, meta_loss)


def delayed_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, first: Half, second: Half
) -> list[HalfResult]:
    """Both updates in the delayed order: weights come from the weight net as it was before it learned.

    So the real update is the look-ahead step, and the forward over the second half is both the first update's meta
    pass and the second update's train pass.
    """
    results = []
    train = forward(model, method, first, keeps=True)
    for meta_half, again in ((second, True), (first, False)):
        seen = what_the_net_sees(method, train)
        weights_NK = method.weighting.weights(*seen)
        weights_BK = method.processes.own_rows(weights_NK)
        problem = Problem(model, optimizer, method, train, weights_BK, meta_half)
        params = problem.params()
        loss = backward(model, optimizer, method, train, weights_BK.detach())
        ahead = look_ahead(optimizer, params, {name: p.grad for name, p in params.items()}, "optimizer")
        before = dict(zip(params, torch._foreach_mul([p.detach() for p in params.values()], 1.0), strict=True))
        update(optimizer)
        after = forward(model, method, meta_half, keeps=True) if again else None
        with draws_from(None, train.device):
            outputs = after.outputs if after else problem.outputs_at(params, meta_half.images)
            meta_loss = problem.meta_loss(outputs)
            v = meta_gradients(problem, meta_loss, params, keep_graph=again)
            gradient_BK = by_tangents(problem, before, ahead.direction(v))
            method.weighting.learn(weights_NK, method.processes.gather(gradient_BK))  # Eq. 8
        total = method.processes.sum(meta_loss.detach())
        results.append(_result(method, train, seen, weights_BK.detach(), loss, total))
        train = after or train
    return results


def forward(model: nn.Module, method: Method, half: Half, keeps: bool) -> Forward:
    """The forward over a half; its tape keeps, if asked to, what a tangent pass would compute again."""
    states, tape = generator_states(half.images.device), Tape(keeps)
    with method.autocast(), tape.recording():
        outputs = model(half.images)
    return Forward(half, outputs, method.objective(outputs, half), states, tape if keeps else None)


def what_the_net_sees(method: Method, train: Forward) -> tuple[Tensor, Tensor]:
    """Plain cross-entropy and confidence of the global half, [N, K]."""
    plain = method.objective is cross_entropy
    plain_BK = train.losses_BK if plain else exit_losses(train.outputs, train.half.labels)
    return method.processes.gather(plain_BK.detach()), method.processes.gather(exit_confidences(train.outputs))


def backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, train: Forward, weights_BK: Tensor
) -> Tensor:
    """The gradients of the weighted loss (Eq. 9), through the first forward's graph; gives the loss."""
    loss = weighted_loss(train.losses_BK, weights_BK, len(weights_BK) * method.processes.size)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    method.processes.sum_gradients(model.parameters())
    if method.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), method.clip_norm)
    return loss.detach()


def update(optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's step."""
    optimizer.step()
    torch.clear_autocast_cache()  # an autocast around the whole step would go on with the old params


def _result(
    method: Method,
    train: Forward,
    seen: tuple[Tensor, Tensor],
    weights_BK: Tensor,
    loss: Tensor,
    meta_loss: Tensor | None,
) -> HalfResult:
    hits_K = torch.stack([(x.argmax(1) == train.half.labels).sum() for x in train.outputs])
    plain_BK, confidences_BK = (method.processes.own_rows(rows) for rows in seen)
    return HalfResult(method.processes.sum(loss), plain_BK, confidences_BK, weights_BK, hits_K, meta_loss)
