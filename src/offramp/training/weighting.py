"""Weightings: how much each sample counts at each exit.

A weighting turns losses and confidences [B, K] of a train half into weights [B, K] or, with `weighting.terms=each`,
into weights for each term of the objective, [B, terms * K]. The conventional one, the hand-made ones of the paper's
ablations and the learned one differ in this object alone. `weighting.name` names one; it is made by
`factory(settings, context)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn

from offramp.common.registry import Registry
from offramp.common.seeds import mix
from offramp.runs.config import WeightingConfig
from offramp.runs.folder import WEIGHTS, read_config
from offramp.training.checkpoint import load_checkpoint
from offramp.training.objectives import allocate, mean_weights
from offramp.training.optimizers import set_rate

Over = tuple[int, ...]  # dimensions of [B, K]; with weights for each term, of [B, terms * K]
CENTRINGS: dict[str, tuple[Over, ...]] = {"exit": ((1,),), "batch": ((0,),), "all": ((0, 1),), "both": ((1,), (0,))}
SLOPE = (0.6, 1.4)  # the paper's fixed weights, first to last exit


@dataclass(frozen=True)
class Context:
    """What a weighting may need to know of the run that it is made for; `total_steps` None: nobody knows its end.

    `terms` are those of its objective.
    """

    num_exits: int
    total_steps: int | None = None
    seed: int = 0
    device: torch.device = torch.device("cpu")
    terms: int = 1


class Weighting:
    """Base: a weighting that does not learn. All but `weights` has a default."""

    taught = False  # whether a meta-gradient teaches it, which needs look-ahead steps

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        """How much each sample of the half counts at each exit, [B, K], or at each exit of each term."""
        raise NotImplementedError

    def begin_step(self, step: int) -> None:
        """Called before each step, outside of what a CUDA graph repeats."""

    def learns(self, step: int) -> bool:
        """Whether it is taught at this step."""
        return False

    def learn(self, weights_BK: Tensor, gradient_BK: Tensor) -> None:
        """Take the gradient of the meta loss by the weights that were given."""
        raise NotImplementedError

    def set_rate(self, share: float) -> None:
        """Learn at this share of the initial rate."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that it has of its own."""
        return ()

    def tensors(self) -> dict[str, Tensor]:
        """What must be saved to go on later."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""


Factory = Callable[[WeightingConfig, Context], Weighting]
WEIGHTINGS: Registry[Factory] = Registry("weighting")
register_weighting = WEIGHTINGS.register  # a class or function called as `factory(settings, context)`


def new_weighting(settings: WeightingConfig, context: Context) -> Weighting:
    """The weighting that the settings name."""
    return WEIGHTINGS[settings.name](settings, context)


@register_weighting("uniform")
class UniformWeighting(Weighting):
    """Every sample counts the same at every exit: conventional training."""

    def __init__(self, settings: WeightingConfig | None = None, context: Context | None = None) -> None:
        pass

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        return torch.ones_like(losses_BK)


class FixedWeighting(Weighting):
    """Every exit has a weight of its own, the same for all samples."""

    def __init__(self, weights_K: Tensor) -> None:
        self.weights_K = weights_K

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        return self.weights_K.to(losses_BK.dtype).expand_as(losses_BK)


@register_weighting("fixed")
def _fixed(settings: WeightingConfig, context: Context) -> FixedWeighting:
    given = settings.exits or []
    if len(given) != context.num_exits:
        raise ValueError(f"weighting.exits has {len(given)} weights, the network has {context.num_exits} exits")
    return FixedWeighting(torch.tensor(given, device=context.device))


@register_weighting("ascending")
def _ascending(settings: WeightingConfig, context: Context) -> FixedWeighting:
    return FixedWeighting(torch.linspace(*SLOPE, context.num_exits, device=context.device))


@register_weighting("descending")
def _descending(settings: WeightingConfig, context: Context) -> FixedWeighting:
    return FixedWeighting(torch.linspace(*SLOPE[::-1], context.num_exits, device=context.device))


@register_weighting("selection")
class SelectionWeighting(Weighting):
    """Each exit trains on the samples allocated to it and on no others."""

    def __init__(self, settings: WeightingConfig, context: Context | None = None) -> None:
        self.q = settings.q

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        samples, num_exits = losses_BK.shape
        chosen = mean_weights(allocate(confidences_BK, self.q), num_exits)
        return chosen.to(losses_BK.dtype) * samples  # the loss divides by the batch again


class WeightNet(nn.Sequential):
    """The paper's WPN: an MLP with `depth` hidden layers from losses (or confidences) to tanh, [B, terms * K]."""

    def __init__(self, num_exits: int, settings: WeightingConfig, terms: int = 1) -> None:
        sizes = [num_exits * (2 if settings.inputs == "both" else 1), *[settings.width] * settings.depth]
        hidden = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(sizes[-1], terms * num_exits), nn.Tanh())


def centred(tanh_BK: Tensor, centring: str, bound: bool) -> Tensor:
    """Perturbations that sum to zero over each sample's exits, each exit's batch, everything, or both of the first.

    Exits of different terms are so many columns more: a sample's weights average to one over its exits and terms.
    Centring follows the tanh, so a value can leave -1..1; `bound` scales its group back where that happens.
    """
    shifted = tanh_BK
    for over in CENTRINGS[centring]:
        shifted = shifted - shifted.mean(over, keepdim=True)
    if bound:
        group = sum(CENTRINGS[centring], ())
        shifted = shifted / shifted.abs().amax(group, keepdim=True).clamp(min=1)
    return shifted


class NetWeighting(Weighting):
    """Weights from a weight net: 1 + delta times its centred output."""

    def __init__(self, settings: WeightingConfig, context: Context) -> None:
        self.settings, self.num_exits = settings, context.num_exits
        self.delta: float | Tensor = settings.delta
        terms = context.terms if settings.terms == "each" else 1
        with torch.random.fork_rng(devices=[]):  # its own draws: the network's are the same without it
            torch.manual_seed(mix(context.seed, "weight net"))
            self.net = WeightNet(context.num_exits, settings, terms).to(context.device)

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        if losses_BK.shape[1] != self.num_exits:
            raise ValueError(f"the network gives {losses_BK.shape[1]} exits, the weight net is for {self.num_exits}")
        given = {"loss": [losses_BK], "confidence": [confidences_BK], "both": [losses_BK, confidences_BK]}
        seen = torch.cat(given[self.settings.inputs], dim=1).detach()
        with torch.autocast(seen.device.type, enabled=False):
            tanh_BK = self.net(seen.to(next(self.net.parameters()).dtype))
        centred_BK = centred(tanh_BK, self.settings.centring, self.settings.bound)
        return (1 + self.delta * centred_BK).to(losses_BK.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {f"net.{name}": tensor for name, tensor in self.net.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name.removeprefix("net."): t for name, t in tensors.items() if name.startswith("net.")}
        try:
            self.net.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(f"the weight net does not fit: {str(error).splitlines()[-1].strip()}") from error


class FrozenWeighting(NetWeighting):
    """Weights from the weight net of a finished run, which stays as it is."""

    @torch.no_grad()
    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        return super().weights(losses_BK, confidences_BK)


@register_weighting("frozen")
def _frozen(settings: WeightingConfig, context: Context) -> FrozenWeighting:
    """The weight net of a finished run, with the settings it was trained with."""
    run = Path(settings.from_run or "")
    trained, checkpoint = read_config(run).weighting, load_checkpoint(run)
    if trained.name != "learned" or checkpoint is None or not (run / WEIGHTS).is_file():
        raise ValueError(f"{run} holds no finished weight net: it is not a finished run with learned weights")
    if trained.terms == "each" and settings.terms == "sum":
        raise ValueError(f"the weight net of {run} has weights for each term; set weighting.terms=each")
    frozen = FrozenWeighting(trained, context)
    frozen.load_tensors(checkpoint.parts["weighting"])
    return frozen


@register_weighting("learned")
class LearnedWeighting(NetWeighting):
    """Weights from a weight net that is trained along, with Adam, by the meta-gradient.

    It learns at every `interval`-th step between the shares `since` and `until` of training. All weights are 1 before.
    """

    taught = True

    def __init__(self, settings: WeightingConfig, context: Context) -> None:
        super().__init__(settings, context)
        self.first = 0 if context.total_steps is None else ceil(settings.since * context.total_steps)
        self.last = None if context.total_steps is None else ceil(settings.until * context.total_steps)
        if self.first:  # on the device, so that one CUDA graph serves before and after
            self.delta = torch.zeros((), dtype=torch.float64, device=context.device)
        on_gpu = next(self.net.parameters()).is_cuda
        self.optimizer = torch.optim.Adam(
            self.net.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )

    def begin_step(self, step: int) -> None:
        if isinstance(self.delta, Tensor):
            self.delta.fill_(self.settings.delta if step >= self.first else 0.0)

    def learns(self, step: int) -> bool:
        in_time = step >= self.first and (self.last is None or step < self.last)
        return in_time and step % self.settings.interval == 0

    def learn(self, weights_BK: Tensor, gradient_BK: Tensor) -> None:
        """One Adam step of the weight net, given the gradient of the meta loss by the weights it gave."""
        self.optimizer.zero_grad(set_to_none=True)
        weights_BK.backward(gradient_BK.to(weights_BK.dtype))  # Eq. 8
        self.optimizer.step()

    def set_rate(self, share: float) -> None:
        set_rate(self.optimizer, share * self.settings.learning_rate)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return (self.optimizer,)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {
            f"adam.{at}.{key}": value
            for at, param in enumerate(self.net.parameters())
            for key, value in self.optimizer.state[param].items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        params = list(self.net.parameters())
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, at, key = name.split(".", 2)
                param = params[int(at)]
                # Adam keeps its moments with the params; its step count only if graphs read it
                with_params = key != "step" or self.optimizer.defaults["capturable"]
                own = value.to(param.device if with_params else "cpu", copy=True)
                self.optimizer.state[param][key] = own
