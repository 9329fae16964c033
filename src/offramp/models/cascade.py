"""A cascade: a network whose stages are whole networks, each with its own size of the same image.

Easy images get their answer from the first, small network; only the others are looked at by the next one. A network
that has exits of its own brings them along. The same network may stand there at several sizes: its params are shared.
The state between stages holds the images as long as a later network needs them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.images import Preprocessing
from offramp.models.exits import ExitNet, ModelSpec, State
from offramp.models.modules import floating_dtype
from offramp.models.registry import build, create_model, parse_spec, register_model

NAME = "cascade"
SCALE, SHIFT = "scale", "shift"  # of the images that a member gets, where its mean and deviation are others


class Cascade(ExitNet):
    """Networks one after another over images of one size, which each of them gets in its own."""

    takes_forks = False  # nothing flows from one network into the next

    def __init__(self, networks: Sequence[ExitNet], image_sizes: Sequence[int]) -> None:
        _refuse(networks, image_sizes)
        largest = max(image_sizes)
        super().__init__(sum(net.num_exits for net in networks), (networks[0].input_shape[0], largest, largest))
        unique = list(dict.fromkeys(networks))
        self.members = nn.ModuleList(unique)
        self.order = tuple(unique.index(net) for net in networks)  # which of the members each place holds
        self.image_sizes = tuple(image_sizes)
        del self._modules["heads"]  # they are the members' own
        self.preprocessing = _preprocessing(networks, image_sizes)
        self._turns = [(place, k) for place, net in enumerate(networks) for k in range(1, net.num_exits + 1)]
        turns = enumerate(self._turns, 1)
        self.trained_exits = frozenset(k for k, (place, own) in turns if own in networks[place].trained_exits)
        for place, net in enumerate(networks):
            for name, values in zip((SCALE, SHIFT), _renormalised(self.preprocessing, net.preprocessing), strict=False):
                self.register_buffer(f"{name}{place}", torch.tensor(values).view(-1, 1, 1), persistent=False)

    @property
    def heads(self) -> nn.ModuleList:
        return nn.ModuleList(head for net in self.networks for head in net.heads)

    @heads.setter
    def heads(self, value: nn.ModuleList) -> None:
        raise AttributeError("the heads of a cascade are those of its networks")

    @property
    def carries(self) -> bool:
        return bool(self.carry) or any(net.carries for net in self.networks)

    @property
    def changes_gradients(self) -> bool:
        return bool(self.carry) or any(net.changes_gradients for net in self.networks)

    @property
    def last_reads_others(self) -> bool:
        return bool(self.carry) or self.networks[-1].last_reads_others

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(k for k, (place, own) in enumerate(self._turns, 1) if own == self.network(place).num_exits)

    def head_params(self) -> list[nn.Parameter]:
        return [param for net in self.networks for param in net.head_params()]

    @property
    def schedule(self) -> str:  # type: ignore[override]
        return self.network(0).schedule

    def set_schedule(self, schedule: str) -> Cascade:
        for net in self.members:
            assert isinstance(net, ExitNet)
            net.set_schedule(schedule)
        return self

    def network(self, place: int) -> ExitNet:
        """The network at this place."""
        net = self.members[self.order[place]]
        assert isinstance(net, ExitNet)
        return net

    @property
    def networks(self) -> list[ExitNet]:
        """The network of every place; one may stand at several."""
        return [self.network(place) for place in range(len(self.order))]

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        place, own = self._turns[k - 1]
        later = place + 1 < len(self.order)
        if own == 1:
            images, state = state[0], (self.seen_by(place, state[0]),)
        elif later:
            images, state = state[0], state[1:]
        feature, after = self.network(place).advance(own, state)
        if own == self.network(place).num_exits:
            after = ()  # the next network begins with the images
        return feature, (images, *after) if later else after

    def answer(self, k: int, feature: Tensor, before: Tensor | None) -> Tensor:
        place, own = self._turns[k - 1]
        logits = self.network(place).answer(own, feature, before if own > 1 else None)
        return logits + self.carry * before.detach() if self.carry and before is not None else logits

    def last(self, images: Tensor) -> Tensor:
        if self.carry:
            return super().last(images)
        return self.networks[-1].last(self.seen_by(len(self.order) - 1, images))  # the others need not run

    def seen_by(self, place: int, images: Tensor) -> Tensor:
        """The images in the size, and with the mean and standard deviation, of the network at this place."""
        size = self.image_sizes[place]
        if size != images.shape[-1]:
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        scale, shift = self._buffers.get(f"{SCALE}{place}"), self._buffers.get(f"{SHIFT}{place}")
        return images if scale is None or shift is None else images * scale.to(images) + shift.to(images)


def cascade(networks: Sequence[ExitNet], image_sizes: Sequence[int], *, carry: float = 0.0) -> ExitNet:
    """Networks one after another, each called with the same images in its own size.

    `carry` adds so much of what a network answered to the next one's logits; 1 sums them. The networks may be fresh,
    or come from finished runs (`load_model`); trained together or not, the cascade goes through the same verbs.
    """
    model = Cascade(networks, image_sizes)
    if carry:
        if any(net.carries for net in networks):
            raise ValueError("carry cannot go with networks that pass on their own exits' answers")
        model.carry = float(carry)
    specs = [net.spec for net in networks]
    if all(specs):
        members = [spec.to_json() for spec in specs if spec is not None]
        overrides = {"members": members, "image_sizes": list(image_sizes), "same": list(model.order)}
        first = specs[0]
        assert first is not None
        model.spec = ModelSpec(NAME, first.num_classes, overrides | ({"carry": carry} if carry else {}))
    return model


def _build(
    num_classes: int,
    members: Sequence[Mapping[str, Any]] = ({"name": "msdnet-tiny"}, {"name": "msdnet-tiny"}),
    image_sizes: Sequence[int] = (24, 32),
    same: Sequence[int] | None = None,
) -> ExitNet:
    """Members are `{name, overrides, pretrained}`; equal numbers in `same` mean one network with shared params."""
    order = list(range(len(members))) if same is None else list(same)
    built: dict[int, ExitNet] = {}
    for number, given, size in zip(order, members, image_sizes, strict=False):
        if number not in built:
            built[number] = _member(dict(given), num_classes, size)
    if len(order) != len(members) or len(members) != len(image_sizes):
        raise ValueError(
            f"a cascade needs an image size for each of its members, got {len(members)} members and "
            f"{len(image_sizes)} sizes; set model.overrides.members and model.overrides.image_sizes"
        )
    return Cascade([built[number] for number in order], image_sizes)


def _member(given: dict[str, Any], num_classes: int, size: int) -> ExitNet:
    pretrained = given.pop("pretrained", False)
    spec = parse_spec({"num_classes": num_classes, **given}, "a member of the cascade")
    return (
        build(spec) if not pretrained else create_model(spec.name, num_classes, pretrained=pretrained, **spec.overrides)
    )


def _refuse(networks: Sequence[ExitNet], image_sizes: Sequence[int]) -> None:
    if not networks or len(networks) != len(image_sizes):
        raise ValueError(f"a cascade needs an image size for each network, got {len(networks)} and {len(image_sizes)}")
    if any(type(size) is not int or size < 1 for size in image_sizes):
        raise ValueError(f"image_sizes must be whole numbers from 1 up, got {list(image_sizes)}")
    for place, (net, size) in enumerate(zip(networks, image_sizes, strict=True), 1):
        if size != net.input_shape[-1]:
            _refuse_size(net, size, place)
    known = [net.spec.num_classes for net in networks if net.spec is not None]
    if len(set(known)) > 1:
        raise ValueError(f"the networks of a cascade must have the same classes, these have {known} of them")
    silent = [place for place, net in enumerate(networks, 1) if net.preprocessing is None]
    if 0 < len(silent) < len(networks) and any(net.trained_exits for net in networks):
        raise ValueError(
            f"network {silent[0]} of the cascade does not say how its images are normalised, others do; trained "
            "networks go together if all of them say it, as a library's do, or none does"
        )


@torch.no_grad()
def _refuse_size(net: ExitNet, size: int, place: int) -> None:
    """Raise where a network cannot take images of this size, found out without computing anything."""
    channels, twin = net.input_shape[0], copy.deepcopy(net).to("meta").eval()
    try:
        twin.last(torch.empty(2, channels, size, size, device="meta", dtype=floating_dtype(net)))
    except Exception as error:  # whatever a forward says to it
        own = net.input_shape[-1]
        raise ValueError(
            f"network {place} of the cascade is built for images of {own} pixels and cannot take {size}; build it with "
            f"image_size={size}"
        ) from error


def _renormalised(given: Preprocessing | None, wanted: Preprocessing | None) -> tuple[list[float], ...]:
    """Scale and shift of each channel that turn images normalised in one way into the other; nothing if they agree."""
    if given is None or wanted is None or (given.mean, given.std) == (wanted.mean, wanted.std):
        return ()
    scale = [a / b for a, b in zip(given.std, wanted.std, strict=True)]
    return scale, [(m - n) / b for m, n, b in zip(given.mean, wanted.mean, wanted.std, strict=True)]


def _preprocessing(networks: Sequence[ExitNet], image_sizes: Sequence[int]) -> Preprocessing | None:
    """That of the network with the largest images, at this size."""
    at = max(range(len(networks)), key=lambda place: image_sizes[place])
    own, size = networks[at].preprocessing, image_sizes[at]
    if own is None or own.size == size:
        return own
    return replace(own, size=size, resize=int(size * own.resize / own.size))


register_model(
    NAME, _build, num_classes=100, about="whole networks one after another, each with its own size of the image"
)
