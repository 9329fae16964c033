"""A network as a graph of cells, and the schedules that decide which cell runs when.

A cell is a module with named inputs; a head reads one cell. `eager` runs each stage's cells whole, as the
papers do. `lazy` runs before each head only what that head needs and leaves the rest to samples that go on.
Both run the same modules on the same inputs: only the grouping into stages differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from offramp.models.exits import ExitNet, State

INPUT = "input"
SCHEDULES = ("eager", "lazy")


@dataclass(frozen=True)
class Cell:
    """One module of the graph. `stage` is where the eager schedule runs it."""

    name: str
    module: nn.Module
    inputs: tuple[str, ...]
    stage: int


@dataclass(frozen=True)
class Task:
    """A cell within a schedule: where its inputs come from and what may be freed once it has run."""

    name: str
    inputs: tuple[str, ...]
    dead: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One stage of a schedule: the state that goes in, the tasks, the cell under the head, the state out."""

    takes: tuple[str, ...]
    tasks: tuple[Task, ...]
    head_input: str
    gives: tuple[str, ...]


def _needed_by(cells: dict[str, Cell], name: str) -> set[str]:
    """The cell `name` and everything it depends on."""
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current != INPUT and current not in found:
            found.add(current)
            todo.extend(cells[current].inputs)
    return found


def _group(cells: dict[str, Cell], head_inputs: Sequence[str], schedule: str) -> list[list[Cell]]:
    """The cells of each stage, in the order they were defined (inputs come first)."""
    if schedule == "eager":
        return [[c for c in cells.values() if c.stage == k] for k in range(len(head_inputs))]
    done: set[str] = set()
    groups = []
    for head_input in head_inputs:
        needed = _needed_by(cells, head_input) - done
        groups.append([c for c in cells.values() if c.name in needed])
        done |= needed
    return groups


def plan(cells: dict[str, Cell], head_inputs: Sequence[str], schedule: str) -> list[Stage]:
    """Turn the graph into stages; the state between two stages is what later stages still need."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown; choose one of: {', '.join(SCHEDULES)}")
    groups = _group(cells, head_inputs, schedule)
    stages: list[Stage] = []
    live_after: set[str] = set()  # what the stages behind the current one read
    for group, head_input in zip(reversed(groups), reversed(head_inputs), strict=True):
        gives = tuple(name for name in (INPUT, *cells) if name in live_after)
        keep, tasks = live_after | {head_input}, []
        for cell in reversed(group):
            dead = tuple(dict.fromkeys(i for i in cell.inputs if i not in keep))
            tasks.append(Task(cell.name, cell.inputs, dead))
            keep |= set(cell.inputs)
        produced = {cell.name for cell in group}
        live_after = keep - produced
        takes = tuple(name for name in (INPUT, *cells) if name in live_after)
        stages.append(Stage(takes, tuple(reversed(tasks)), head_input, gives))
    return stages[::-1]


class CellNet(ExitNet):
    """An `ExitNet` built from cells and heads; `heads[k]` is the pair (cell it reads, module)."""

    def __init__(
        self,
        cells: Sequence[Cell],
        heads: Sequence[tuple[str, nn.Module]],
        input_shape: tuple[int, int, int],
        schedule: str = "eager",
    ) -> None:
        super().__init__(len(heads), input_shape)
        self._graph = {c.name: Cell(c.name, nn.Identity(), c.inputs, c.stage) for c in cells}
        self._head_inputs = tuple(name for name, _ in heads)
        self._refuse_unused_cells()
        self.cells = nn.ModuleDict({c.name: c.module for c in cells})
        self.heads = nn.ModuleList(module for _, module in heads)
        self.set_schedule(schedule)

    def set_schedule(self, schedule: str) -> CellNet:
        """Choose `eager` or `lazy`; params and predictions stay the same."""
        self._stages = plan(self._graph, self._head_inputs, schedule)
        self.schedule = schedule
        return self

    def advance(self, k: int, state: State) -> tuple[Tensor, State]:
        stage = self._stages[k - 1]
        values = dict(zip(stage.takes, state, strict=True))
        for task in stage.tasks:
            values[task.name] = self.cells[task.name](*(values[name] for name in task.inputs))
            for name in task.dead:
                del values[name]
        feature, values[stage.head_input] = self.forked(k, values[stage.head_input])
        return feature, tuple(values[name] for name in stage.gives)

    def _refuse_unused_cells(self) -> None:
        used: set[str] = set().union(*(_needed_by(self._graph, name) for name in self._head_inputs))
        unused = [name for name in self._graph if name not in used]
        if unused:
            raise ValueError(f"these cells would never be used, no exit reads them: {', '.join(unused)}")
