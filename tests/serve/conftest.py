"""Servers for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.server import Running, Start
from offramp.serve import ServeConfig


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers: settings of `ServeConfig`, and `delay_s` of each stage."""
    servers: list[Running] = []

    def begin(delay_s: float = 0.0, **settings: Any) -> Running:
        servers.append(Running(ServeConfig(**settings), delay_s))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()
