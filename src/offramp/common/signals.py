"""Stopping on request: SIGINT and SIGTERM are remembered, so that a loop can save and leave at its next step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offramp.common.console import console

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_listening: Callable[[int, Any], None] | None = None


class Stopped(Exception):
    """Work was asked to stop by a signal; what it had done has been saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The list of signals caught so far; a second Ctrl-C stops at once."""
    global _listening
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return

    def remember(signum: int, frame: Any) -> None:
        if caught and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not caught:
            console.print("stopping after this step ...")
        caught.append(signum)

    before = {signum: signal.signal(signum, remember) for signum in SIGNALS}
    outer, _listening = _listening, remember
    try:
        yield caught
    finally:
        _listening = outer
        for signum, handler in before.items():
            signal.signal(signum, handler)


def listen_again() -> None:
    """Take the signals back from a library that took them; cheap enough for every step.

    Triton's compiler does, when it first compiles a kernel. It passes a signal on, but one that comes right behind the
    first would end the process.
    """
    if _listening is not None and threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            signal.signal(signum, _listening)
