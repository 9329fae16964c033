"""A bundle behind HTTP: `serve` runs a server, `create_app` makes the application for a server of one's own.

Needs the extra `serve`; `offramp.bench.load` tests a running server.
"""

from __future__ import annotations

from offramp.serve.app import create_app
from offramp.serve.config import ServeConfig
from offramp.serve.run import serve

__all__ = ["ServeConfig", "create_app", "serve"]
