"""Exits on a network that exists: places where they can be put, and the cut network as an `ExitNet`.

A network and the names of some of its modules go in. The last exit is the network's own classifier: the cut network's
last answer equals the original's, bit for bit, and both share their params. Heads (heads.py) are put on the features
that the named modules return.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from offramp.common.names import unknown
from offramp.models.cost import Meter
from offramp.models.cut import (
    ROOT,
    CannotCut,
    Known,
    Program,
    Shape,
    StageFunction,
    ancestors,
    draws_kept,
    shapes,
    split,
    trace,
)
from offramp.models.exits import ExitNet, GivenStagesNet, State
from offramp.models.heads import Feature, channels_last, new_head
from offramp.models.modules import floating_dtype, has_modules

DEFAULT_EXITS, DEFAULT_HEAD = 4, "conv"
USEFUL = (0.02, 0.95)  # shares of the whole cost between which an exit is worth offering
POOLINGS = (nn.MaxPool2d, nn.AvgPool2d)  # where a plain row of layers, such as VGG's, has its exits
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Place:
    """A module that an exit can read: what it returns, and what has been computed by then for one image."""

    name: str
    mul_adds: int
    feature: Feature


class CutNet(GivenStagesNet):
    """`backbone`, cut after the modules `at`, with heads there; its own classifier is the last head."""

    def __init__(
        self,
        module: nn.Module,
        at: Sequence[str],
        image_shape: tuple[int, int, int],
        head: str,
        head_options: Mapping[str, Any],
    ) -> None:
        super().__init__(len(at) + 1, image_shape)
        self.at = tuple(at)
        plan = _plan(module, at, image_shape)
        self.classifier_name, self.endings = plan.classifier, plan.endings
        self.backbone, classifier = _exchanged(module, plan.classifier, nn.Identity())
        heads = [new_head(head, feature, plan.num_classes, head_options).to(plan.dtype) for feature in plan.features]
        self.heads = nn.ModuleList([*heads, classifier])
        self.num_classes = plan.num_classes
        self._stages = plan.stages
        for name, constant in plan.constants.items():
            self.register_buffer(name, constant, persistent=False)
        self.training = module.training  # the network's own parts keep their modes
        for each in heads:
            each.train(module.training)
        self.protect_states()

    def run_stage(self, k: int, state: State) -> tuple[Tensor, State]:
        feature, *after = self._stages[self.training][k - 1](self, *state)
        read, onward = self.forked(k, feature)
        return read, tuple(onward if value is feature else value for value in after)

    def head_params(self) -> list[nn.Parameter]:
        """With those of classifiers that are no head, as where the mean of two is the answer."""
        inside = (self.backbone.get_submodule(name) for name in self.endings)
        return [*self.heads.parameters(), *(param for part in inside for param in part.parameters())]

    def original(self) -> nn.Module:
        """The network as it was given, its classifier in its place; params and buffers are shared with it."""
        return _exchanged(self.backbone, self.classifier_name, self.heads[-1])[0]

    def own_name(self, name: str) -> str:
        """What a param of the original network is called here."""
        prefix = f"{self.classifier_name}."
        if self.classifier_name is not None and name.startswith(prefix):
            return f"heads.{self.num_exits - 1}.{name.removeprefix(prefix)}"
        return f"backbone.{name}"


@dataclass(frozen=True)
class _Plan:
    """How a network is cut; stages for evaluation (False) and training (True).

    `classifier` names the layer that ends it; where there is no such one, `endings` the modules behind which no other
    one follows.
    """

    stages: dict[bool, list[StageFunction]]
    constants: dict[str, Tensor]
    features: list[Feature]
    classifier: str | None
    endings: list[str]
    num_classes: int
    dtype: torch.dtype


def with_exits(
    module: nn.Module,
    at: Sequence[str] | int = DEFAULT_EXITS,
    *,
    example: Tensor,
    head: str = DEFAULT_HEAD,
    **head_options: Any,
) -> ExitNet:
    """Put exits on a network of one's own: after the modules `at`, or at so many places that are chosen by cost.

    `module` is called with images like the `example` [n, c, h, w] and returns logits, which become the last exit's.
    Params are shared with it. A number counts the last exit too. Registered under a name (`register_model`), it goes
    through all verbs; without, `offramp.export` makes an ONNX bundle of it.
    """
    if example.dim() != 4:
        raise ValueError(f"the example must be images [n, channels, height, width], got {list(example.shape)}")
    return cut_network(module, at, example, head, head_options)


def cut_network(
    module: nn.Module, exits: int | Sequence[str], example: Tensor, head: str, head_options: Mapping[str, Any]
) -> CutNet:
    """A network with exits at so many places, or at those named; one that would answer otherwise is refused."""
    _, *shape = example.shape
    image_shape = (shape[0], shape[1], shape[2])
    names = exits if isinstance(exits, (list, tuple)) else chosen(module, exits, image_shape)
    model = CutNet(module, names, image_shape, head, head_options)
    refuse_other_answers(module, model, example)
    return model


@torch.no_grad()
def refuse_other_answers(module: nn.Module, model: CutNet, example: Tensor) -> None:
    """Raise unless the last exit answers what the network answers, to the last bit, and buffers move as its own do."""
    if example.is_meta or any(tensor.is_meta for tensor in module.state_dict().values()):
        return
    images = _different(example).to(floating_dtype(module))
    one, other = copy.deepcopy(module), copy.deepcopy(model)
    for training, seen, when in ((False, images[:1], ""), (True, images, " in training")):
        wanted, found = (_answered(run, seen) for run in (one.train(training), other.train(training).last))
        buffers = dict(other.named_buffers(remove_duplicate=False))
        kept = [(buffer, buffers[model.own_name(name)]) for name, buffer in one.named_buffers()]
        if not all(map(_equal, (wanted, *(a for a, _ in kept)), (found, *(b for _, b in kept)))):
            raise CannotCut(
                f"{type(module).__name__} answers otherwise{when} once it is cut: its forward depends on more than "
                "tensors, or changes what it has computed before; build it from parts with ExitNet.from_parts"
            )


def _different(example: Tensor) -> Tensor:
    """Two images or more: those of the example or, where it is one value all over, which says little, drawn ones."""
    if example.min() == example.max():
        draw = torch.Generator(example.device).manual_seed(0)
        return torch.randn(2, *example.shape[1:], generator=draw, device=example.device)
    return example if len(example) > 1 else torch.cat([example, example.flip(3)])


def _answered(run: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """What a network answers; asked again, it draws the same random numbers."""
    with draws_kept(images.device):
        return run(images)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the last bit; what is not a number equals itself."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def places(module: nn.Module, image_shape: tuple[int, int, int]) -> list[Place]:
    """Where exits can be put, in the order in which they are reached; the costs leave heads out."""
    return _surveyed(module, image_shape)[0]


def _surveyed(module: nn.Module, image_shape: tuple[int, int, int]) -> tuple[list[Place], int]:
    """Where exits can be put, and what the whole network costs."""
    opened = _opened(module)
    program = trace(module, opened)
    known, costs = shapes(program, image_shape), _costs(program, image_shape)
    whole, found, modules = max(costs.values()), [], dict(module.named_modules())
    layouts = _Layouts(program, image_shape)
    for name, times in Counter(program.calls()).items():
        node = program.call(name) if times == 1 else None
        feature = None if node is None else layouts.feature(node, known[node])
        if node is None or feature is None or not USEFUL[0] <= costs[node.name] / whole <= USEFUL[1]:
            continue
        if _splits(program, node, known):
            found.append(Place(name, costs[node.name], feature))
    blocks = [place for place in found if is_block(modules[place.name])]
    poolings = [place for place in found if isinstance(modules[place.name], POOLINGS)]
    return blocks or poolings or _ends_of_rows(found, opened, program), whole


def _ends_of_rows(found: Sequence[Place], opened: set[str], program: Program) -> list[Place]:
    """The places at the end of a row of layers, under the row's name: where a network is made of plain rows."""
    last = {place.name: place for place in found}
    named = {}
    for row in sorted(opened):
        calls = [call for call in program.calls() if call.startswith(f"{row}.")]
        if calls and calls[-1] in last:
            named[calls[-1]] = replace(last[calls[-1]], name=row)  # of rows within rows, the innermost
    return [named[place.name] for place in found if place.name in named]


class _Layouts:
    """Tells where the channels of maps are; where their shape does not, by what changes with the images' size."""

    def __init__(self, program: Program, image_shape: tuple[int, int, int]) -> None:
        self.program, self.image_shape = program, image_shape

    def feature(self, node: fx.Node, value: Shape | int | None) -> Feature | None:
        """What a head would read there; None if none can."""
        if not isinstance(value, Shape) or not value.batched:
            return None
        return Feature.of(value.shape, self._channels_last(node, value.shape) if len(value.shape) == 4 else None)

    def _channels_last(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        known = channels_last(shape, self.image_shape)
        if known is not None:
            return known
        other = self._of_larger.get(node)
        if isinstance(other, Shape) and len(other.shape) == 4 and other.shape != shape:
            return other.shape[3] == shape[3] and other.shape[1] != shape[1]
        return str(getattr(getattr(self.program.holder, ROOT), "output_fmt", "")) == "NHWC"  # as timm's networks say

    @cached_property
    def _of_larger(self) -> Known:
        """Shapes for images twice as large; nothing where the network does not take them."""
        channels, height, width = self.image_shape
        try:
            return shapes(self.program, (channels, 2 * height, 2 * width))
        except CannotCut:
            return {}


def is_block(module: nn.Module) -> bool:
    """Whether a module is made of others, as the blocks of nearly every network are."""
    return has_modules(module) and not isinstance(module, NORMS)


def chosen(module: nn.Module, exits: Any, image_shape: tuple[int, int, int]) -> list[str]:
    """Modules for all exits but the last, so that the costs of the exits are spread as evenly as the places allow."""
    if type(exits) is not int or exits < 1:
        raise ValueError(f"exits must be a whole number from 1 up, or a list of module names, got {exits!r}")
    if exits == 1:
        return []
    known, whole = _surveyed(module, image_shape)
    if len(known) < exits - 1:
        there = f" ({', '.join(place.name for place in known)})" if known else ""
        raise CannotCut(
            f"{type(module).__name__} has {len(known)} places for exits that were found by themselves{there}, "
            f"{exits - 1} are asked for; ask for fewer, or name modules"
        )
    found: list[Place] = []
    for k in range(1, exits):
        left = exits - 1 - k  # places that must remain for the exits after this one
        free = known[known.index(found[-1]) + 1 if found else 0 : len(known) - left]
        found.append(min(free, key=lambda place: abs(place.mul_adds - whole * k / exits)))
    return [place.name for place in found]


class _Costed(fx.Interpreter):
    """Runs a program on the meta device and notes what had been computed after each call."""

    def __init__(self, module: fx.GraphModule, meter: Meter) -> None:
        super().__init__(module)
        self.meter, self.costs = meter, dict[str, int]()

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        self.costs[node.name] = self.meter.mul_adds
        return value


def _costs(program: Program, image_shape: tuple[int, int, int]) -> dict[str, int]:
    """Mul-adds for one image up to each node, by its name."""
    meter = Meter()
    runner = _Costed(program.on_meta(), meter)
    with torch.no_grad(), meter:
        runner.run(torch.empty(1, *image_shape, device="meta", dtype=program.dtype))
    return runner.costs


def _opened(module: nn.Module) -> set[str]:
    """The modules to look into for places: sequences, and what holds a sequence of like blocks and can be traced."""
    opened: set[str] = set()

    def visit(parent: nn.Module, prefix: str) -> None:
        for key, child in parent.named_children():
            name = f"{prefix}{key}"
            if isinstance(child, nn.ModuleList):  # is not called itself
                visit(child, f"{name}.")
            elif type(child) is nn.Sequential or (_holds_blocks(child) and _traces(module, opened | {name})):
                opened.add(name)
                visit(child, f"{name}.")

    visit(module, "")
    return opened


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a module holds one sequence whose members are of one class and have modules of their own.

    With several of them it is a block itself, whose branches run side by side.
    """
    sequences = [list(part) for part in module.children() if isinstance(part, (nn.Sequential, nn.ModuleList))]
    return sum(len(own) > 1 and len(set(map(type, own))) == 1 and has_modules(own[0]) for own in sequences) == 1


def _splits(program: Program, node: fx.Node, known: Known) -> bool:
    """Whether the program can be cut after a call."""
    try:
        split(program, [node, program.output()], known)
    except CannotCut:
        return False
    return True


def _traces(module: nn.Module, opened: set[str]) -> bool:
    try:
        trace(module, opened)
    except CannotCut:
        return False
    return True


def _plan(module: nn.Module, at: Sequence[str], image_shape: tuple[int, int, int]) -> _Plan:
    _refuse_unknown(module, at)
    linear = _last_linear(module)
    try:
        return _plan_with(module, at, image_shape, linear)
    except CannotCut:
        if linear is None:
            raise
        return _plan_with(module, at, image_shape, None)  # its classifier lies where tracing does not reach


def _plan_with(module: nn.Module, at: Sequence[str], image_shape: tuple[int, int, int], linear: str | None) -> _Plan:
    opened = ancestors([*at, *([linear] if linear else [])])
    stages: dict[bool, list[StageFunction]] = {}
    constants: dict[str, Tensor] = {}
    before: str | None = None
    for training in (False, True):
        program = trace(module, opened, training)
        known = shapes(program, image_shape)
        classifier = linear if linear and _ends_with(program, linear) else None
        if training and classifier != before:
            raise CannotCut("the network ends in training otherwise than in evaluation")
        before = classifier
        end = program.output() if classifier is None else program.call(classifier).all_input_nodes[0]
        ends = [_call_of(program, name) for name in at]
        layouts = _Layouts(program, image_shape)
        features = [
            _feature(name, known[node], layouts.feature(node, known[node])) for name, node in zip(at, ends, strict=True)
        ]
        stages[training] = split(program, [*ends, end], known)
        constants |= program.constants
    answer = known[program.output()]
    if not isinstance(answer, Shape) or len(answer.shape) != 2 or not answer.batched:
        raise CannotCut("the network does not return logits [batch, classes]; wrap it in a module that does")
    endings = _endings(program) if classifier is None else []
    return _Plan(stages, constants, features, classifier, endings, answer.shape[1], program.dtype)


def _feature(name: str, value: Shape | int | None, feature: Feature | None) -> Feature:
    if feature is None:
        what = (
            f"a tensor of shape {list(value.shape)}" if isinstance(value, Shape) else "something else than one tensor"
        )
        raise CannotCut(f"{name!r} returns {what}; an exit reads vectors, tokens or maps, the batch first")
    return feature


def _ends_with(program: Program, name: str) -> bool:
    """Whether a module's answer is the network's; modules that do nothing may follow."""
    node = program.output()
    while node.op == "call_module" and type(program.holder.get_submodule(str(node.target))) is nn.Identity:
        node = node.all_input_nodes[0]
    return program.calls().count(name) == 1 and node is program.call(name)


def _endings(program: Program) -> list[str]:
    """The modules with params that the answer is made of by operations alone."""
    seen, asked, found = set[fx.Node](), [program.output()], dict[str, None]()
    while asked:
        node = asked.pop()
        module = program.holder.get_submodule(str(node.target)) if node.op == "call_module" else nn.Identity()
        if next(module.parameters(), None) is not None:
            found[str(node.target).removeprefix(f"{ROOT}.")] = None
        elif node not in seen:
            asked += node.all_input_nodes
        seen.add(node)
    return list(found)


def _last_linear(module: nn.Module) -> str | None:
    """The linear layer that comes last, which is the classifier of nearly every network."""
    found = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return found[-1] if found and found[-1] else None


def _call_of(program: Program, name: str) -> fx.Node:
    """The call of a module, or of the last module in a sequence that was looked into."""
    own = [call for call in program.calls() if call == name or call.startswith(f"{name}.")]
    return program.call(name if name in own or not own else own[-1])


def _refuse_unknown(module: nn.Module, at: Sequence[str]) -> None:
    known = [name for name, _ in module.named_modules() if name]
    for name in at:
        if name not in known:
            raise ValueError(unknown(f"module of {type(module).__name__}", name, known))


def _exchanged(module: nn.Module, name: str | None, part: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The network with `part` in the place of the module of this name, and that module; the given one stays as it is.

    Only the modules on the way there are copied, and they share their params and all other modules.
    """
    if name is None:
        return module, part
    *path, last = name.split(".")
    own = parent = _shallow(module)
    for each in path:
        inner = _shallow(parent.get_submodule(each))
        parent._modules[each] = inner
        parent = inner
    found = parent.get_submodule(last)
    parent._modules[last] = part
    return own, found


def _shallow(module: nn.Module) -> nn.Module:
    own = copy.copy(module)
    for registry in ("_modules", "_parameters", "_buffers"):
        own.__dict__[registry] = dict(module.__dict__[registry])
    return own
