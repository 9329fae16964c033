"""What people see: a progress bar in a terminal and plain lines elsewhere, tables, warnings."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from offramp.common.formatting import is_numeric

PLAIN_SECONDS = 10.0  # between two plain lines
console = Console()


class Bar:
    """Counts work that is done; `show` changes the text beside it, `line` prints something that stays."""

    def advance(self, steps: int, images: int) -> None:
        raise NotImplementedError

    def extend(self, total: int, done: int) -> None:
        """`total` steps more, of which `done` were done earlier."""
        raise NotImplementedError

    def show(self, text: str) -> None:
        raise NotImplementedError

    def line(self, text: str) -> None:
        say(text)


class _ImagesPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = task.fields["images"] / task.elapsed if task.elapsed else 0
        return Text(f"{rate:,.0f} images/s")


class _TerminalBar(Bar):
    def __init__(self, progress: Progress, task: int) -> None:
        self.progress, self.task, self.images = progress, task, 0

    def advance(self, steps: int, images: int) -> None:
        self.images += images
        self.progress.update(self.task, advance=steps, images=self.images)  # type: ignore[arg-type]

    def extend(self, total: int, done: int) -> None:
        task = self.progress.tasks[self.task]
        self.progress.update(task.id, total=(task.total or 0) + total, completed=task.completed + done)

    def show(self, text: str) -> None:
        self.progress.update(self.task, description=text)  # type: ignore[arg-type]


class _PlainBar(Bar):
    def __init__(self, text: str, total: int, done: int) -> None:
        self.text, self.total, self.done, self.images = text, total, done, 0
        self.before = done
        self.began = self.printed = time.monotonic()

    def advance(self, steps: int, images: int) -> None:
        self.done, self.images = self.done + steps, self.images + images
        if time.monotonic() - self.printed >= PLAIN_SECONDS:
            self._print()

    def extend(self, total: int, done: int) -> None:
        self.total, self.done, self.before = self.total + total, self.done + done, self.before + done

    def show(self, text: str) -> None:
        self.text = text

    def _print(self) -> None:
        self.printed = time.monotonic()
        elapsed = self.printed - self.began
        left = timedelta(seconds=round(elapsed / (self.done - self.before) * max(0, self.total - self.done)))
        rate = self.images / elapsed
        self.line(f"{self.text}: {self.done}/{self.total}, {rate:,.0f} images/s, {left} left")


class _SilentBar(Bar):
    def advance(self, steps: int, images: int) -> None:
        pass

    def extend(self, total: int, done: int) -> None:
        pass

    def show(self, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


@contextmanager
def progress(text: str, total: int, done: int = 0, silent: bool = False) -> Iterator[Bar]:
    """A bar over `total` steps, `done` of which were done earlier, with throughput and time left."""
    if silent:
        yield _SilentBar()
        return
    if not console.is_terminal:
        yield _PlainBar(text, total, done)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _ImagesPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total, completed=done, images=0)
        yield _TerminalBar(bar, task)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], whole: bool = False) -> None:
    """A table under its title; columns of numbers are aligned to the right.

    A `whole` table is as wide as it needs to be where there is no terminal: no name in it is cut.
    """
    console.print(title, style="bold", highlight=False, markup=False)
    table = Table()
    for at, column in enumerate(columns):
        numbers = is_numeric([row[at] for row in rows])
        table.add_column(column, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: names of files may look like markup
    if whole and not console.is_terminal:
        size = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        Console(file=console.file, width=size).print(table)
    else:
        console.print(table)


def say(text: str) -> None:
    """A line of text as it is, never wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def only_ours() -> Iterator[None]:
    """Keep what a library prints, from Python or beneath it, out of the way; our own lines are shown as always."""
    out, err, before = sys.stdout, sys.stderr, os.dup(2)
    with tempfile.TemporaryFile("w+") as noise:
        console.file = out
        sys.stdout = sys.stderr = noise
        os.dup2(noise.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            sys.stdout, sys.stderr = out, err
            console.file = None  # type: ignore[assignment]  # whatever is standard output then


def log_to_console() -> None:
    """Warnings of the package go to standard error, a line each."""
    log = logging.getLogger("offramp")
    if not log.handlers:
        log.addHandler(RichHandler(console=Console(stderr=True), show_time=False, show_path=False))
        log.setLevel(logging.INFO)
