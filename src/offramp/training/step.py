"""One step of Algorithm 1: a loader batch, its two halves, two updates of the params.

    halves -> forward -> weights -> (meta-gradient -> the weight net learns -> weights again) -> backward -> update

Conventional training is the same step with a weighting that does not learn. The training loop and `LearnedWeights`
both call `train_step`. `weighting.order=delayed` is another algorithm under its own name: cheaper, because the real
update takes the weights from before the weight net learned.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from offramp.common.generators import draws_from, generator_states
from offramp.training.lookahead import look_ahead
from offramp.training.meta_gradient import ESTIMATORS, Forward, Problem, by_tangents, meta_gradients
from offramp.training.method import Method
from offramp.training.objectives import Half, by_term, cross_entropy, divergences, exit_confidences, weighted_loss
from offramp.training.tape import Tape


@dataclass(frozen=True)
class HalfResult:
    """What one update saw and did: no graph, nothing copied to the host.

    Both losses are those of the global half, the rest is of this process's samples. `weights_BK` has K columns for
    each term that has weights of its own.
    """

    loss: Tensor
    losses_BK: Tensor
    confidences_BK: Tensor
    weights_BK: Tensor
    hits_K: Tensor
    meta_loss: Tensor | None

    @property
    def term_weights(self) -> Tensor:
        """The weights by term, [B, terms, K]."""
        return by_term(self.weights_BK, self.losses_BK.shape[1])


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    images: Tensor,
    labels: Tensor,
    step: int,
    recipe: Tensor | None = None,
) -> list[HalfResult]:
    """Two updates on a loader batch: each half is once the train half and once the meta half.

    `recipe` says how samples are mixed (mixing.py). The meta loss sees them unmixed.
    """
    learn = method.weighting.learns(step)
    first, second = method.halves(images, labels, recipe, learn)
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
        weights_NK = weights_of(method, train, seen)
        problem = Problem(model, optimizer, method, train, method.processes.own_rows(weights_NK), meta_half.plain)
        with draws_from(None, train.device):  # the look-ahead leaves no trace in the real draws
            found = ESTIMATORS[method.settings.engine](problem)
        method.weighting.learn(weights_NK, method.processes.gather(found.weights_BK))  # Eq. 8
        meta_loss = found.loss
        problem.release()
    weights_BK = method.processes.own_rows(weights_of(method, train, seen)).detach()
    loss = backward(model, optimizer, method, train, weights_BK)  # the params have not moved since the forward
    update(optimizer, method)
    return _result(method, train, seen, weights_BK, loss, meta_loss)


def delayed_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, first: Half, second: Half
) -> list[HalfResult]:
    """Both updates in the delayed order: weights come from the weight net as it was before it learned.

    So the real update is the look-ahead step, and the forward over the second half is both the first update's meta
    pass and the second update's train pass, unless samples are mixed.
    """
    results = []
    train = forward(model, method, first, keeps=True)
    for meta_half, again in ((second, True), (first, False)):
        seen = what_the_net_sees(method, train)
        weights_NK = weights_of(method, train, seen)
        weights_BK = method.processes.own_rows(weights_NK)
        problem = Problem(model, optimizer, method, train, weights_BK, meta_half.plain)
        params = problem.params()
        loss = backward(model, optimizer, method, train, weights_BK.detach())
        ahead = look_ahead(optimizer, params, {name: p.grad for name, p in params.items()}, "optimizer")
        before = dict(zip(params, torch._foreach_mul([p.detach() for p in params.values()], 1.0), strict=True))
        update(optimizer, method)
        after = forward(model, method, meta_half, keeps=True) if again else None
        with draws_from(None, train.device):
            serves = after is not None and meta_half.unmixed is None
            outputs = after.outputs if after and serves else problem.outputs_at(params, meta_half.plain.images)
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
    # Attention in the form that tangents have (meta_gradient.py): another one would drop out other places.
    attention = sdpa_kernel(SDPBackend.MATH) if keeps else nullcontext()
    with method.autocast(), tape.recording(), attention:
        outputs = model(half.images)
    return Forward(half, outputs, method.losses(outputs, half), states, tape if keeps else None)


def what_the_net_sees(method: Method, train: Forward) -> tuple[Tensor, Tensor]:
    """Plain cross-entropy (less a mixture's own entropy) and confidence of the global half, [N, K]."""
    plain = method.objective is cross_entropy and not train.half.labels.is_floating_point()
    plain_BK = train.losses_BK if plain else divergences(train.outputs, train.half.labels)
    return method.processes.gather(plain_BK.detach()), method.processes.gather(exit_confidences(train.outputs))


def weights_of(method: Method, train: Forward, seen: tuple[Tensor, Tensor]) -> Tensor:
    """A weight for every column of losses of the global half; what has none for each term has the same for all."""
    given = method.weighting.weights(*seen)
    columns = train.losses_BK.shape[1]
    return given if given.shape[1] == columns else given.repeat(1, columns // given.shape[1])


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


def update(optimizer: torch.optim.Optimizer, method: Method) -> None:
    """The optimiser's step, and that of the params' average."""
    optimizer.step()
    if method.ema is not None:
        method.ema.update()
    torch.clear_autocast_cache()  # an autocast around the whole step would go on with the old params


def _result(
    method: Method,
    train: Forward,
    seen: tuple[Tensor, Tensor],
    weights_BK: Tensor,
    loss: Tensor,
    meta_loss: Tensor | None,
) -> HalfResult:
    classes = train.half.classes
    hits_K = torch.stack([(x.argmax(1) == classes).sum() for x in train.outputs])
    plain_BK, confidences_BK = (method.processes.own_rows(rows) for rows in seen)
    return HalfResult(method.processes.sum(loss), plain_BK, confidences_BK, weights_BK, hits_K, meta_loss)
