"""What is minimised: the loss of every sample at every exit, the exit each sample is allocated to, and sums over both.

An objective is called with the K logits of a half and the half itself, and returns losses [B, K]; `objective.name`
names one. It may say what it needs and does: `terms`, that its loss is a sum of so many, which it returns side by side,
[B, terms * K]; `teacher`, the run folder whose last exit's logits come with each half; `changes_gradients`, that its
gradients are not those of its values, because it detaches some. Nothing here sees a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.names import unknown
from offramp.common.registry import Registry
from offramp.measuring.confidence import measured
from offramp.measuring.thresholds import exit_counts
from offramp.runs.config import ObjectiveConfig


@dataclass(frozen=True)
class Half:
    """One half of a loader batch: what the network is called with, labels, and a teacher's logits if there is one.

    Labels are classes [B], or mixtures of them [B, C]; then `unmixed` holds the same samples as they were.
    """

    images: Tensor
    labels: Tensor
    teacher: Tensor | None = None
    unmixed: Half | None = None

    @property
    def plain(self) -> Half:
        """The samples as they are, with classes as labels."""
        return self.unmixed or self

    @property
    def classes(self) -> Tensor:
        """The class of every sample; of a mixture the larger part's."""
        return self.labels.argmax(1) if self.labels.is_floating_point() else self.labels


Objective = Callable[[Sequence[Tensor], Half], Tensor]
OBJECTIVES: Registry[Callable[..., Objective]] = Registry("objective")
register_objective = OBJECTIVES.register  # a class or function that makes an objective from its options


def new_objective(settings: ObjectiveConfig) -> Objective:
    """The objective that the settings name."""
    try:
        return OBJECTIVES[settings.name](**settings.options)
    except TypeError as error:
        raise ValueError(f"objective.options do not fit the objective {settings.name!r}: {error}") from error


def num_terms(objective: Objective) -> int:
    """How many terms an objective's loss is the sum of."""
    return int(getattr(objective, "terms", 1))


def by_term(columns: Tensor, num_exits: int) -> Tensor:
    """What an objective or a weighting has side by side, [B, terms * K], as [B, terms, K]."""
    return columns.unflatten(1, (-1, num_exits))


def in_full_precision(logits: Sequence[Tensor]) -> list[Tensor]:
    """The logits in float32 or better: losses and confidences are never computed in 16 bits."""
    return [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in logits]


def exit_losses(logits: Sequence[Tensor], labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each sample at each exit, [B, K]; labels are classes, or mixtures of them [B, C]."""
    own = in_full_precision(logits)
    target = labels.to(own[0].dtype) if labels.is_floating_point() else labels
    losses = [F.cross_entropy(x, target, reduction="none", label_smoothing=label_smoothing) for x in own]
    return torch.stack(losses, dim=1)


def divergences(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy less the label's own entropy, [B, K]: 0 is the best there is for a mixture too."""
    losses_BK = exit_losses(logits, labels)
    if not labels.is_floating_point():
        return losses_BK
    return losses_BK - torch.special.entr(labels).sum(1, keepdim=True).to(losses_BK.dtype)


def distances(logits: Sequence[Tensor], target: Tensor, temperature: float) -> Tensor:
    """T^2 KL(target || exit) of each sample at each exit, [B, K], summed over classes; the target stays as it is."""
    *own, target = in_full_precision([*logits, target])
    wanted = F.log_softmax(target.detach() / temperature, dim=1)
    found = [
        F.kl_div(F.log_softmax(x / temperature, dim=1), wanted, reduction="none", log_target=True).sum(1) for x in own
    ]
    return temperature**2 * torch.stack(found, dim=1)


def distilled(plain_BK: Tensor, distances_BK: Tensor, share: float) -> Tensor:
    """Both terms of a distilled loss, [B, 2K]; exits that only have labels to learn from have these in both terms."""
    missing = plain_BK[:, distances_BK.shape[1] :]
    return torch.cat([(1 - share) * plain_BK, share * distances_BK, share * missing], dim=1)


def cross_entropy(logits: Sequence[Tensor], half: Half) -> Tensor:
    """The usual objective."""
    return exit_losses(logits, half.labels)


@register_objective("cross_entropy")
def _cross_entropy(label_smoothing: float = 0.0) -> Objective:
    _check_share("label_smoothing", label_smoothing)
    return SmoothedCrossEntropy(label_smoothing) if label_smoothing else cross_entropy


@dataclass(frozen=True)
class SmoothedCrossEntropy:
    """Cross-entropy with labels that give a little to every class."""

    label_smoothing: float

    def __call__(self, logits: Sequence[Tensor], half: Half) -> Tensor:
        return exit_losses(logits, half.labels, self.label_smoothing)


@register_objective("distillation")
@dataclass(frozen=True)
class Distillation:
    """(1 - share) CE + share T^2 KL(target || exit): exits also learn from a better answer, which stays as it is.

    `source` says whose: the `last` exit's (itself trained by its labels alone), the `mean` of all exits' logits, or
    that of a `teacher`, a run folder. Without `labels` the target is all there is to learn from; else there are two
    terms, and the last exit, if it is the target, has its cross-entropy in both.
    """

    source: str = "last"
    share: float = 0.5
    temperature: float = 3.0
    label_smoothing: float = 0.0
    labels: bool = True
    teacher: str | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(unknown("objective.options.source", self.source, SOURCES))
        for name in ("share", "label_smoothing"):
            _check_share(name, getattr(self, name))
        if not self.temperature > 0:
            raise ValueError(f"objective.options.temperature must be above 0, got {self.temperature!r}")
        if (self.source == "teacher") != (self.teacher is not None):
            raise ValueError(
                "objective.options.source=teacher and objective.options.teacher, a run folder, need each other"
            )
        if self.source == "mean" and not self.labels:
            raise ValueError(
                "objective.options.labels=false needs source=last or teacher: a mean alone teaches nothing"
            )

    @property
    def terms(self) -> int:
        return 2 if self.labels else 1

    @property
    def changes_gradients(self) -> bool:
        """Whether a target moves with the params although no gradient goes there."""
        return self.source != "teacher"

    @property
    def needs_frozen_last(self) -> bool:
        """Whether the last exit, which teaches the others, would learn from nothing itself."""
        return self.source == "last" and not self.labels

    def __call__(self, logits: Sequence[Tensor], half: Half) -> Tensor:
        distances_BK = distances(logits, self._target(logits, half), self.temperature)
        if self.source == "last":
            distances_BK = distances_BK[:, :-1]
        if self.labels:
            return distilled(exit_losses(logits, half.labels, self.label_smoothing), distances_BK, self.share)
        return F.pad(distances_BK, (0, len(logits) - distances_BK.shape[1]))  # a target has nothing to learn

    def _target(self, logits: Sequence[Tensor], half: Half) -> Tensor:
        if self.source == "teacher":
            assert half.teacher is not None
            return half.teacher
        own = in_full_precision(logits)
        return own[-1] if self.source == "last" else torch.stack(own).mean(0)


def without_exits(settings: ObjectiveConfig) -> ObjectiveConfig:
    """The same objective for a single exit, which has no other one to learn from."""
    if settings.name != "distillation" or settings.options.get("source") == "teacher":
        return settings
    smoothing = {k: v for k, v in settings.options.items() if k == "label_smoothing"}
    return ObjectiveConfig("cross_entropy", smoothing)


SOURCES = ("last", "mean", "teacher")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"objective.options.{name} must lie between 0 and 1, got {value!r}")


def exit_confidences(logits: Sequence[Tensor], graph: bool = False) -> Tensor:
    """The largest softmax probability of each sample at each exit, [B, K]; with a `graph` only if asked for."""
    with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
        return torch.stack([measured(x.softmax(1), "max_softmax", torch) for x in in_full_precision(logits)], dim=1)


def weighted_loss(losses_BK: Tensor, weights_BK: Tensor, samples: int | None = None) -> Tensor:
    """The mean over samples of the weighted sum over exits (and terms); `samples` of the global batch, if larger."""
    # Eq. 4; Eq. 3 where all weights are one
    return (weights_BK * losses_BK).sum(dim=1).sum() / (samples or len(losses_BK))


@torch.no_grad()
def allocate(confidences_NK: Tensor, q: float) -> Tensor:
    """The exit (1..K) that each sample of a batch would leave at.

    Exit k takes its share of samples, the most confident among those not yet taken; the last takes the rest. Among
    equal confidences the earlier row goes first. No Python loop over samples, no wait for the device.
    """
    samples, num_exits = confidences_NK.shape
    exits = torch.full((samples,), num_exits, dtype=torch.int64, device=confidences_NK.device)
    lowest = torch.finfo(confidences_NK.dtype).min
    free = confidences_NK.nan_to_num(nan=lowest, neginf=lowest)  # a copy; minus infinity marks who has left
    for k, count in enumerate(exit_counts(samples, num_exits, q)[:-1], start=1):
        order = torch.sort(free[:, k - 1], descending=True, stable=True).indices
        taken = order[:count]
        exits.index_fill_(0, taken, k)
        free.index_fill_(0, taken, -torch.inf)
    return exits


def mean_weights(exits_N: Tensor, num_exits: int) -> Tensor:
    """[N, K]: 1/N_k where a sample was allocated to exit k, else 0, so that losses sum to means per exit."""
    chosen = F.one_hot(exits_N - 1, num_exits)
    return chosen / chosen.sum(0).clamp(min=1)


def soft_shares(confidences_NK: Tensor, q: float, temperature: float) -> Tensor:
    """How much of each sample leaves at each exit under thresholds that are soft, [N, K]; a sample's shares sum to 1.

    Of what is left of a sample at exit k, sigmoid((confidence - t_k) / temperature) leaves. The threshold t_k lies
    halfway between those whom `allocate` lets out there and those whom it keeps, so a temperature near 0 gives its
    allocation. If the confidences have a graph, the thresholds move with them, as those of a policy would.
    """
    exits_N = allocate(confidences_NK, q)
    staying_N, shares = torch.ones_like(confidences_NK[:, 0]), []
    for k, confidences_N in enumerate(confidences_NK.unbind(1)[:-1], start=1):
        threshold = _threshold(confidences_N.detach(), exits_N, k)
        leaving_N = torch.sigmoid((confidences_N - threshold) / temperature)
        slope = (staying_N * leaving_N * (1 - leaving_N)).sum().detach() / temperature
        share = (staying_N * leaving_N).sum()
        # its value is 0, its gradient that of the threshold by which the exit's share stays what it is
        move = (share - share.detach()) / slope.clamp(min=torch.finfo(slope.dtype).eps)
        leaving_N = torch.sigmoid((confidences_N - threshold - move) / temperature)
        shares.append(staying_N * leaving_N)
        staying_N = staying_N * (1 - leaving_N)
    return torch.stack([*shares, staying_N], dim=1)


def _threshold(confidences_N: Tensor, exits_N: Tensor, k: int) -> Tensor:
    """Halfway between the least confident sample of exit k and the most confident one of later exits."""
    least = confidences_N.masked_fill(exits_N != k, torch.inf).amin()  # infinite where nobody leaves
    most = confidences_N.masked_fill(exits_N <= k, -torch.inf).amax()
    return (least + most) / 2
