"""How long a call takes: wall-clock milliseconds, and their median over several calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def timed_ms(action: Callable[[], Any]) -> float:
    """Milliseconds of one call; a call that starts work on a device must wait for it itself."""
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


def median_ms(action: Callable[[], Any], repeats: int, warm_up: int = 2) -> float:
    """The median of several calls, after some that do not count."""
    for _ in range(warm_up):
        action()
    return statistics.median(timed_ms(action) for _ in range(repeats))
