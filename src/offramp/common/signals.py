"""Stopping on request: SIGINT and SIGTERM are remembered, so that a loop can save and leave at its next step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offramp.common.console import console


class Stopped(Exception):
    """Work was asked to stop by a signal; what it had done has been saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The list of signals caught so far; a second Ctrl-C stops at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return

    def remember(signum: int, frame: Any) -> None:
        if caught and signum == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signum)
        console.print("stopping after this step ...")

    before = {s: signal.signal(s, remember) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
