"""A network of anybody's, cut into stages without changing what it computes.

Only the network's own forward is traced; the modules that it calls stay whole. The traced program is then split after
the modules whose outputs the exits read. A stage is a plain function that runs the original's modules, so params and
buffers are shared with it and nothing has to be kept in step. What a later stage needs becomes the state between them.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from offramp.common.generators import draws_from
from offramp.models.modules import floating_dtype, modes_kept

ROOT = "backbone"  # the attribute under which whoever runs a stage holds the network
CONSTANT = "constant"  # and under what begins so, tensors that a forward makes of nothing
TRACES = 2  # of a forward in training mode, which must be the same
StageFunction = Callable[..., tuple[Any, ...]]  # (holder, *state) -> feature, *next state


class CannotCut(ValueError):
    """A network whose forward cannot be traced or split; the sentence says what to do."""


@dataclass(frozen=True)
class Program:
    """The traced forward of a network: its calls in the order in which they run."""

    graph: fx.Graph
    holder: nn.Module

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the forward makes of nothing, by the names under which a stage reads them."""
        return {name: value for name, value in vars(self.holder).items() if isinstance(value, Tensor)}

    def on_meta(self) -> fx.GraphModule:
        """The program over a copy of the network that has shapes and no values, in evaluation mode."""
        twin = copy.deepcopy(self.holder).to("meta").eval()
        for name, value in self.constants.items():
            setattr(twin, name, value.to("meta"))
        return fx.GraphModule(twin, self.graph)

    @property
    def dtype(self) -> torch.dtype:
        """The precision that the network computes in."""
        return floating_dtype(self.holder)

    def calls(self) -> list[str]:
        """The modules that are called, by the network's own names, in order."""
        found = [str(node.target) for node in self.graph.nodes if node.op == "call_module"]
        return [name.removeprefix(f"{ROOT}.") for name in found]

    def call(self, name: str) -> fx.Node:
        """The one call of a module."""
        target = f"{ROOT}.{name}"
        found = [node for node in self.graph.nodes if node.op == "call_module" and node.target == target]
        if len(found) != 1:
            times = "never" if not found else f"{len(found)} times"
            raise CannotCut(f"{name!r} is called {times} by the network, an exit needs a module that is called once")
        return found[0]

    def output(self) -> fx.Node:
        """What the network returns."""
        (node,) = (node for node in self.graph.nodes if node.op == "output")
        found = node.args[0]
        if not isinstance(found, fx.Node):
            raise CannotCut("the network does not return one tensor of logits; wrap it in a module that does")
        return found


class _Holder(nn.Module):
    """Calls the network with images alone, so that optional arguments take their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        setattr(self, ROOT, module)

    def forward(self, images: Tensor) -> Any:
        return getattr(self, ROOT)(images)


class _Tracer(fx.Tracer):
    """Looks into the network itself and into `opened` modules; all others are calls."""

    proxy_buffer_attributes = True  # what is computed from buffers is not computed once and for all

    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self.opened = opened

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name != ROOT and name.removeprefix(f"{ROOT}.") not in self.opened


def trace(module: nn.Module, opened: Iterable[str], training: bool = False) -> Program:
    """The forward of `module` in training or evaluation mode; `opened` modules are looked into."""
    names = set(opened)
    try:
        found = [_traced(module, names, training) for _ in range(TRACES if training else 1)]
    except Exception as error:  # whatever a forward does with what is not a tensor
        other = ", or name other modules" if names and _can_be_traced(module) else ""
        raise CannotCut(
            f"the forward of {type(module).__name__} cannot be traced ({first_line(error)}); build it from parts with "
            f"ExitNet.from_parts{other}"
        ) from error
    if not all(_same(found[0], other) for other in found[1:]):
        raise CannotCut(
            f"the forward of {type(module).__name__} is another one each time it is called in training, and a cut "
            "network would stay the same; build it from parts with ExitNet.from_parts"
        )
    return found[0]


def _same(one: Program, other: Program) -> bool:
    """Whether two programs do the same with the same constants."""
    both = zip(one.constants.values(), other.constants.values(), strict=False)
    return str(one.graph) == str(other.graph) and all(a.is_meta or torch.equal(a, b) for a, b in both)


def _traced(module: nn.Module, opened: set[str], training: bool) -> Program:
    holder = _Holder(module)
    with modes_kept(module), _buffers_kept(module), draws_kept(), _draws_refused():
        graph = _Tracer(opened).trace(holder.train(training))
    graph.eliminate_dead_code(is_impure_node=_stays)
    program = Program(graph, holder)
    for name in list(program.constants):  # those of both modes will lie side by side
        new = f"{CONSTANT}_{'training' if training else 'evaluation'}{name.removeprefix('_tensor_constant')}"
        setattr(holder, new, holder.__dict__.pop(name))
        for node in graph.nodes:
            if node.op == "get_attr" and node.target == name:
                node.target = new
    return program


def _can_be_traced(module: nn.Module) -> bool:
    """Whether the network's own forward can be, however it fares with what lies in it."""
    try:
        _traced(module, set(), False)
    except Exception:
        return False
    return True


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put buffers back as they were; raise where tracing wrote into one, as a cut network would never do it again."""
    held = [(part, key, buffer) for part in module.modules() for key, buffer in part._buffers.items()]
    counted = [(key, buffer) for _, key, buffer in held if buffer is not None and not buffer.is_inference()]
    before = [(buffer._version, buffer.clone()) for _, buffer in counted]
    written = set()
    try:
        yield
    finally:
        for part, key, buffer in held:
            if part._buffers[key] is not buffer:
                part._buffers[key] = buffer
                written.add(key)
        for (key, buffer), (version, values) in zip(counted, before, strict=True):
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(values)
                written.add(key)
    if written:
        raise ValueError(f"it writes into its buffer {min(written)}")


@contextmanager
def draws_kept(device: torch.device | str = "cpu") -> Iterator[None]:
    """Python's, numpy's and torch's random numbers go on afterwards as if none had been drawn."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with draws_from(None, torch.device(device)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _draws_refused() -> Iterator[None]:
    """Raise where random numbers were drawn: a cut network would go on with them instead of drawing others."""
    before = _generator_states()
    yield
    if _generator_states() != before:
        raise ValueError("it draws random numbers, which only modules that it calls may do")


def _generator_states() -> tuple[Any, ...]:
    """How far Python's, numpy's and torch's generators have come."""
    return random.getstate(), repr(np.random.get_state()), bytes(torch.get_rng_state().numpy())


def _stays(node: fx.Node) -> bool:
    """What stays even if nobody reads its result: calls of modules may write into buffers, and others in place."""
    return node.op in ("placeholder", "output", "call_module") or _writes(node)


def _writes(node: fx.Node) -> bool:
    """Whether a call changes what it is given."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target is operator.setitem or node.kwargs.get("inplace") is True


def ancestors(names: Iterable[str]) -> set[str]:
    """The modules that hold these: `a.b.c` -> a, a.b."""
    return {name.rsplit(".", cut)[0] for name in names for cut in range(1, name.count(".") + 1)}


@dataclass(frozen=True)
class Shape:
    """What a traced value is: a tensor's shape, and whether its first dimension is the batch."""

    shape: tuple[int, ...]
    batched: bool


Known = Mapping[fx.Node, Shape | int | None]


def shapes(program: Program, image_shape: tuple[int, int, int]) -> Known:
    """What a program computes, found on the meta device with two batch sizes.

    Tensors have a `Shape`, whole numbers that do not depend on the batch are themselves, and anything else is None.
    """
    twin = program.on_meta()
    seen = [_values(twin, torch.empty(n, *image_shape, device="meta", dtype=program.dtype)) for n in (2, 3)]
    return {node: _known(*(each.get(node.name) for each in seen)) for node in program.graph.nodes}


def _known(one: Any, two: Any) -> Shape | int | None:
    if isinstance(one, tuple) and isinstance(two, tuple):
        return Shape(one, one[:1] == (2,) and two[:1] == (3,) and one[1:] == two[1:])
    return one if isinstance(one, int) and one == two else None


def is_batched(value: Shape | int | None) -> bool:
    """Whether this is a tensor whose first dimension is the batch."""
    return isinstance(value, Shape) and value.batched


class _Recorder(fx.Interpreter):
    """Runs a program and notes the shapes of tensors, and whole numbers, by the names of their nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, tuple[int, ...] | int] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Tensor):
            self.found[node.name] = tuple(value.shape)
        elif type(value) is int:
            self.found[node.name] = value
        return value


def _values(twin: fx.GraphModule, images: Tensor) -> dict[str, tuple[int, ...] | int]:
    recorder = _Recorder(twin)
    try:
        with torch.no_grad():
            recorder.run(images)
    except Exception as error:
        why = first_line(error)
        raise CannotCut(
            f"the network cannot be followed on images of {list(images.shape[1:])} ({why}); build it from parts with "
            "ExitNet.from_parts, or name other modules"
        ) from error
    return recorder.found


def first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def split(program: Program, ends: Sequence[fx.Node], known: Known) -> list[StageFunction]:
    """One function per stage; stage k ends with the call `ends[k]`, whose value is the feature.

    Stages are runs of consecutive calls. Values that are read later are the state; what has no batch dimension (sizes,
    position embeddings) is computed again where it is needed.
    """
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    images = next(node for node in program.graph.nodes if node.op == "placeholder")
    cuts = [order[images], *(order[end] for end in ends)]
    if cuts != sorted(set(cuts)):
        raise CannotCut("the exits must be named in the order in which their modules run")
    nodes = list(program.graph.nodes)
    runs = [nodes[begin + 1 : end + 1] for begin, end in zip(cuts, cuts[1:], strict=False)]
    needed: list[list[fx.Node]] = [[] for _ in runs]  # read by stage k or later, made before it
    later: list[fx.Node] = []
    for k in range(len(runs) - 1, -1, -1):
        wanted = _reads(program, runs[k], known) + later
        needed[k] = [node for node in dict.fromkeys(wanted) if node not in set(runs[k])]
        later = needed[k]
    if needed[0] not in ([], [images]):
        raise CannotCut("the network reads something else than its images")
    return [
        _function(run, needed[k] if k else [images], end, needed[k + 1] if k + 1 < len(runs) else [], known)
        for k, (run, end) in enumerate(zip(runs, ends, strict=True))
    ]


def _reads(program: Program, run: Sequence[fx.Node], known: Known) -> list[fx.Node]:
    """The batched tensors from before that a run of nodes reads, through what is computed again for it."""
    found: dict[fx.Node, None] = {}
    own = set(run)
    asked = [node for each in run for node in each.all_input_nodes]
    while asked:
        node = asked.pop()
        if node in own or node in found or is_fixed(node, known):
            continue
        if is_batched(known[node]) or node.op == "placeholder":
            found[node] = None
        elif node.op == "call_module" and _runs_once(program, node, known):
            name = str(node.target).removeprefix(f"{ROOT}.")
            raise CannotCut(
                f"{name!r} returns something else than one tensor with the batch first, and it is read behind an exit; "
                "put the exit at another module"
            )
        else:
            asked += node.all_input_nodes
    return list(found)


def is_fixed(node: fx.Node, known: Known) -> bool:
    """Whether this is a whole number that a module returned, such as a map's size: it is the same for every batch."""
    if not isinstance(known[node], int):
        return False
    return any(each.op == "call_module" for each in _made_from(node, known) if not is_batched(known[each]))


def _made_from(node: fx.Node, known: Known) -> set[fx.Node]:
    """A node and what it is computed from, back to the first batched tensors."""
    found, asked = set[fx.Node](), [node]
    while asked:
        each = asked.pop()
        if each not in found:
            found.add(each)
            asked += [] if is_batched(known[each]) else each.all_input_nodes
    return found


def _runs_once(program: Program, node: fx.Node, known: Known) -> bool:
    """Whether a module must not run again in a later stage: it sees the images, or it has params.

    If it ran twice, its params' gradients would be added in another order.
    """
    module = program.holder.get_submodule(str(node.target))
    sees = any(is_batched(known[each]) or each.op == "placeholder" for each in _made_from(node, known))
    return sees or next(module.parameters(), None) is not None


def _function(
    run: Sequence[fx.Node],
    state: Sequence[fx.Node],
    end: fx.Node,
    after: Sequence[fx.Node],
    known: Known,
) -> StageFunction:
    """A run of nodes as a Python function (holder, *state) -> (feature, *next state)."""
    graph = fx.Graph()
    own = set(run)
    copies: dict[fx.Node, Any] = {node: graph.placeholder(f"state_{at}") for at, node in enumerate(state)}

    def copied(node: fx.Node) -> Any:
        if node not in copies and node not in own and is_fixed(node, known):
            copies[node] = known[node]
        elif node not in copies:
            for each in node.all_input_nodes:  # before the node itself: copies are appended
                copied(each)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in run:
        copied(node)
    graph.output(tuple(copied(node) for node in (end, *after)))
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<stage>", "exec"), scope)  # our own graph's code, nothing from outside
    return cast(StageFunction, scope["forward"])
