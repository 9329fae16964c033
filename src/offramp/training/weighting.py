"""Weightings: how much each sample counts at each exit.

A weighting turns losses and confidences [B, K] of a train half into weights [B, K]. The conventional one, the
hand-made ones of the paper's ablations and the learned one differ in this object alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offramp.common.seeds import mix
from offramp.training.objectives.allocation import allocate
from offramp.training.objectives.losses import mean_weights
from offramp.training.rates import set_rate

Over = tuple[int, ...]  # dimensions of [B, K]
CENTRINGS: dict[str, tuple[Over, ...]] = {"exit": ((1,),), "batch": ((0,),), "all": ((0, 1),), "both": ((1,), (0,))}
INPUTS = ("loss", "confidence", "both")


class Weighting:
    """Base: what every weighting can do."""

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What must be saved to go on later."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""


class UniformWeighting(Weighting):
    """Every sample counts the same at every exit: conventional training."""

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        return torch.ones_like(losses_BK)


class FixedWeighting(Weighting):
    """Every exit has a weight of its own, the same for all samples."""

    def __init__(self, weights_K: Tensor) -> None:
        self.weights_K = weights_K

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        return self.weights_K.to(losses_BK.dtype).expand_as(losses_BK)


class SelectionWeighting(Weighting):
    """Each exit trains on the samples allocated to it and on no others."""

    def __init__(self, q: float) -> None:
        self.q = q

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        samples, num_exits = losses_BK.shape
        chosen = mean_weights(allocate(confidences_BK, self.q), num_exits)
        return chosen.to(losses_BK.dtype) * samples  # the loss divides by the batch again


class WeightNet(nn.Sequential):
    """The paper's WPN: an MLP with `depth` hidden layers from losses (or confidences) to tanh, [B, K]."""

    def __init__(self, num_exits: int, inputs: str = "loss", depth: int = 1, width: int = 500) -> None:
        sizes = [num_exits * (2 if inputs == "both" else 1), *[width] * depth]
        hidden = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(sizes[-1], num_exits), nn.Tanh())


def centred(tanh_BK: Tensor, centring: str, bound: bool) -> Tensor:
    """Perturbations that sum to zero over each sample's exits, each exit's batch, everything, or both of the first.

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

    def __init__(
        self,
        num_exits: int,
        *,
        inputs: str = "loss",
        depth: int = 1,
        width: int = 500,
        delta: float = 0.8,
        centring: str = "exit",
        bound: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.inputs, self.delta, self.centring, self.bound = inputs, delta, centring, bound
        self.num_exits = num_exits
        with torch.random.fork_rng(devices=[]):  # its own draws: the network's are the same without it
            torch.manual_seed(mix(seed, "weight net"))
            self.net = WeightNet(num_exits, inputs, depth, width).to(device)

    def weights(self, losses_BK: Tensor, confidences_BK: Tensor) -> Tensor:
        if losses_BK.shape[1] != self.num_exits:
            raise ValueError(f"the network gives {losses_BK.shape[1]} exits, the weight net is for {self.num_exits}")
        given = {"loss": [losses_BK], "confidence": [confidences_BK], "both": [losses_BK, confidences_BK]}
        seen = torch.cat(given[self.inputs], dim=1).detach()
        with torch.autocast(seen.device.type, enabled=False):
            tanh_BK = self.net(seen.to(next(self.net.parameters()).dtype))
        return (1 + self.delta * centred(tanh_BK, self.centring, self.bound)).to(losses_BK.dtype)

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


class LearnedWeighting(NetWeighting):
    """Weights from a weight net that is trained along, with Adam, by the meta-gradient."""

    def __init__(
        self, num_exits: int, *, learning_rate: float = 1e-4, weight_decay: float = 1e-4, **settings: object
    ) -> None:
        super().__init__(num_exits, **settings)  # type: ignore[arg-type]
        self.learning_rate = learning_rate
        on_gpu = next(self.net.parameters()).is_cuda
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu
        )

    def learn(self, weights_BK: Tensor, gradient_BK: Tensor) -> None:
        """One Adam step of the weight net, given the gradient of the meta loss by the weights it gave."""
        self.optimizer.zero_grad(set_to_none=True)
        weights_BK.backward(gradient_BK.to(weights_BK.dtype))  # Eq. 8
        self.optimizer.step()

    def set_rate(self, share: float) -> None:
        """The learning rate as a share of its initial value."""
        set_rate(self.optimizer, share * self.learning_rate)

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
