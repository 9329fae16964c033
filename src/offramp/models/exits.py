"""The contract of a network with exits.

An `ExitNet` has K exits. Calling it gives the K logits; `step` walks it one stage at a time. The state
between stages is a flat tuple of tensors whose first dimension is the batch, so finished samples can be
dropped from it. The full forward *is* that walk, so the two agree bit for bit.

The state may carry what the exit before answered. Then a head may read it, or an exit answers with its own logits plus
`carry` times the earlier answer (boosted logits). No gradient flows back along that way.

Where a feature is both read by a head and passed on, training may set `fork`: a function that changes what either of
them gets, or which gradients come back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.files import write_json
from offramp.common.images import Preprocessing
from offramp.models.modules import floating_dtype
from offramp.models.weights import write_tensors

State = tuple[Tensor, ...]
Fork = Callable[[int, Tensor], tuple[Tensor, Tensor]]  # exit and feature -> what its head reads, what goes on
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # a network as a folder


@dataclass(frozen=True)
class ModelSpec:
    """What the registry needs to build a network again; `config.json["model"]`."""

    name: str
    num_classes: int
    overrides: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _members(spec: ModelSpec) -> list[tuple[dict[str, Any], ModelSpec]]:
    """The networks that a network is made of: what its overrides say of each, and a spec of it without its classes."""
    found = spec.overrides.get("members", ())
    tables = found if isinstance(found, (list, tuple)) else [found]
    for own in tables:
        if not isinstance(own, Mapping) or "name" not in own or not isinstance(own.get("overrides", {}), Mapping):
            raise ValueError(f"members of {spec.name!r} must be tables with a name and, if any, overrides; got {own!r}")
    return [(dict(own), ModelSpec(str(own["name"]), 0, dict(own.get("overrides", {})))) for own in tables]


def all_specs(spec: ModelSpec) -> list[ModelSpec]:
    """A network's spec and, if it is made of whole networks, theirs; with `pretrained`, if that is asked for."""
    found = [spec]
    for given, member in _members(spec):
        asked = {**member.overrides, "pretrained": given.get("pretrained", False)}
        found += all_specs(ModelSpec(member.name, 0, asked))
    return found


def without_sources(spec: ModelSpec) -> ModelSpec:
    """The same network, with nothing said about the params that its members start from: they are no part of it."""
    if "members" not in spec.overrides:
        return spec
    members = []
    for given, member in _members(spec):
        given.pop("pretrained", None)
        members.append({**given, "overrides": without_sources(member).overrides})
    return ModelSpec(spec.name, spec.num_classes, {**spec.overrides, "members": members})


def reads_before(head: nn.Module) -> bool:
    """Whether a head is called with the logits of the exit before it too (None at the first exit)."""
    return getattr(head, "reads_before", False)


class ExitNet(nn.Module):
    """A classifier with `num_exits` exits over images of `input_shape` (channels, height, width)."""

    spec: ModelSpec | None = None
    preprocessing: Preprocessing | None = None  # how its images are prepared, where that comes with the network
    schedule = "eager"
    takes_forks = True  # whether a fork set here is asked at every exit

    def __init__(self, num_exits: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.num_exits = num_exits
        self.input_shape = input_shape
        self.heads = nn.ModuleList()
        self.trained_exits = frozenset[int]()  # whose heads came with trained params
        self.carry = 0.0
        self.fork: Fork | None = None

    def set_schedule(self, schedule: str) -> ExitNet:
        """Choose what runs when: `eager`, or for a network made of cells also `lazy`."""
        if schedule != "eager":
            raise ValueError(f"this network is not made of cells, so it has no {schedule} schedule")
        return self

    @property
    def carries(self) -> bool:
        """Whether each state ends with the logits of the exit before it."""
        return bool(self.carry) or any(map(reads_before, self.heads))

    @property
    def changes_gradients(self) -> bool:
        """Whether exits answer with what earlier ones said, while no gradient goes there."""
        return self.carries

    @property
    def last_reads_others(self) -> bool:
        """Whether the last exit's answer depends on what earlier exits say."""
        return bool(self.carry) or reads_before(self.heads[-1])

    @property
    def ends(self) -> tuple[int, ...]:
        """The last exit of each network that it is made of: its own, unless it is a cascade."""
        return (self.num_exits,)

    def head_params(self) -> list[nn.Parameter]:
        """The params of all classifiers."""
        return list(self.heads.parameters())

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        """Run stage `k` without its head; give the feature that the head reads and the next state.

        Neither state holds carried logits, and the given one is not changed in place.
        """
        raise NotImplementedError

    def answer(self, k: int, feature: Tensor, before: Tensor | None) -> Tensor:
        """The logits of exit `k`, from its feature and, if they are carried, from the logits of the exit before."""
        head, before = self.heads[k - 1], None if before is None else before.detach()
        logits = head(feature, before) if reads_before(head) else head(feature)
        return logits + self.carry * before if self.carry and before is not None else logits

    def step(self, k: int, state: State) -> tuple[Tensor, State]:
        """Run stage `k` (1..K) on the state before it; give the logits of exit `k` and the next state.

        The state before stage 1 is `(images,)`.
        """
        carries = self.carries
        state, before = (state[:-1], state[-1]) if carries and k > 1 else (state, None)
        feature, state = self.advance(k, state)
        logits = self.answer(k, feature, before)
        return logits, (*state, logits) if carries and k < self.num_exits else state

    def last(self, images: Tensor) -> Tensor:
        """The logits of the last exit; inner heads run only if it depends on them."""
        if self.last_reads_others:
            return self.forward(images)[-1]
        feature, state = self.advance(1, (images,))
        for k in range(2, self.num_exits + 1):
            feature, state = self.advance(k, state)
        return self.answer(self.num_exits, feature, None)

    def forked(self, k: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The feature of exit `k` for its head and for what comes after; `fork` decides in training mode."""
        return self.fork(k, feature) if self.fork is not None and self.training else (feature, feature)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The logits of all exits, first to last."""
        state: State = (images,)
        logits = []
        for k in range(1, self.num_exits + 1):
            exit_logits, state = self.step(k, state)
            logits.append(exit_logits)
        return logits

    def save(self, folder: str | Path) -> Path:
        """Write `config.json` and `model.safetensors` into `folder`; `offramp.load_model` reads them."""
        folder = Path(folder)
        if self.spec is None:
            raise ValueError(
                "this network has no name to be rebuilt from; give its builder one with register_model and "
                "create it with create_model"
            )
        write_tensors(folder / WEIGHTS, self.state_dict())
        write_json(folder / CONFIG, {"schema": 1, "model": self.spec.to_json()})
        return folder

    @staticmethod
    def from_parts(
        stages: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        input_shape: tuple[int, int, int] = (3, 32, 32),
    ) -> ExitNet:
        """A network of one's own.

        Stage k is called with the tensors that stage k-1 returned (stage 1: the images) and returns one
        tensor or a tuple of tensors. Head k is called with the last of them and returns logits; a head with the
        attribute `reads_before = True` is called with the logits of the exit before it too (None at exit 1).
        """
        return _PartsNet(stages, heads, input_shape)


class GivenStagesNet(ExitNet):
    """A network whose stages and heads are anybody's: those that write into what they are given get a copy of it.

    `protect_states` finds out which do, as one that begins with an in-place ReLU or dropout does.
    """

    def __init__(self, num_exits: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__(num_exits, input_shape)
        self._copied: dict[bool, frozenset[int]] = {}  # by mode: stages, and heads as negative numbers

    def run_stage(self, k: int, state: State) -> tuple[Tensor, State]:
        """Stage `k` without its head: the feature, and the next state."""
        raise NotImplementedError

    def _copies(self, part: int) -> bool:
        return part in self._copied.get(self.training, ())

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        return self.run_stage(k, tuple(t.clone() for t in state) if self._copies(k) else state)

    def answer(self, k: int, feature: Tensor, before: Tensor | None) -> Tensor:
        return super().answer(k, feature.clone() if self._copies(-k) else feature, before)

    @torch.inference_mode(False)  # there, tensors do not count what is written into them
    @torch.no_grad()
    def protect_states(self) -> None:
        """Find the stages and heads that write into what they are given, on a copy that has shapes and no values."""
        try:
            twin = copy.deepcopy(self).to("meta")
            for training in (False, True):
                images = torch.empty(2, *self.input_shape, device="meta", dtype=floating_dtype(self))
                self._copied[training] = frozenset(_writers(twin.train(training), images))
        except Exception:  # parts that compute with values, or take images of another shape: any of them may write
            self._copied = dict.fromkeys((False, True), frozenset(range(-self.num_exits, self.num_exits + 1)))


def _writers(model: ExitNet, images: Tensor) -> Iterator[int]:
    """The stages that change the state they are given and, as negative numbers, the heads that change features."""
    state: State = (images,)
    before: Tensor | None = None
    for k in range(1, model.num_exits + 1):
        seen = [t._version for t in state]
        feature, after = model.advance(k, state)
        if [t._version for t in state] != seen:
            yield k
        seen = [feature._version]
        before = model.answer(k, feature, before)
        if [feature._version] != seen:
            yield -k
        state = after


class _PartsNet(GivenStagesNet):
    def __init__(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module], input_shape: tuple[int, int, int]
    ) -> None:
        if not stages or len(stages) != len(heads):
            raise ValueError(f"from_parts needs one head per stage, got {len(stages)} stages and {len(heads)} heads")
        super().__init__(len(stages), input_shape)
        self.stages = nn.ModuleList(stages)
        self.heads = nn.ModuleList(heads)
        self.protect_states()

    def run_stage(self, k: int, state: State) -> tuple[Tensor, State]:
        given = self.stages[k - 1](*state)
        state = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        feature, onward = self.forked(k, state[-1])
        # After the last exit nothing is needed any more.
        return feature, (*state[:-1], onward) if k < self.num_exits else ()
