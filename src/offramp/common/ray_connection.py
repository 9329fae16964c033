"""Ray: started on this machine, or joined at the address of a cluster, and left again.

What Ray prints and logs is kept out of the way; its own logs are in /tmp/ray.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offramp.common.cores import usable_cores

LOCAL = "local"
AUTH_MODE = "RAY_AUTH_MODE"
REACHED_S = 5.0  # how long the address of a cluster may take to answer


class RayFailed(OSError):
    """Ray cannot be used, or what ran on it failed; the sentence says why."""


@contextmanager
def ray_connection(address: str = LOCAL, cpus: float = 1.0, **started_with: Any) -> Iterator[None]:
    """Join the cluster at `address`; or, if it is `local`, start Ray here and end it afterwards.

    A Ray that is started has as many CPUs as there are cores, or `cpus` if those are more: it only counts them.
    """
    import ray

    if "://" in address:
        raise ValueError(
            f"--ray {address}: Ray's client is not used; start this on a machine of the cluster, --ray auto"
        )
    if ":" in address:
        _check_listens(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == LOCAL:
        count = max(usable_cores(), math.ceil(cpus))
        options |= {"include_dashboard": False, "num_cpus": count, **started_with}
    with _token_where_asked_for(address):
        try:
            ray.init(address, **options)
        except Exception as error:  # a machine that is too busy is a bare one
            raise RayFailed(f"Ray ({address}) cannot be started or joined: {last_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _token_where_asked_for(address: str) -> Iterator[None]:
    """Send this machine's token to a cluster that asks for one, and to no other, unless somebody decided otherwise.

    Ray itself sends it where the address is `auto` and nowhere else, whatever the cluster asks for. With the wrong one
    of the two nothing is understood, and the reason is not said.
    """
    asked = None if address == LOCAL or AUTH_MODE in os.environ else _asks_for_token(_found_at(address))
    if asked is None:
        yield
        return
    os.environ[AUTH_MODE] = "token" if asked else "disabled"
    _read_environment_again()
    try:
        yield
    finally:
        del os.environ[AUTH_MODE]
        _read_environment_again()


def _read_environment_again() -> None:
    """Ray has read it when it was imported."""
    import ray._raylet

    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]


def _found_at(address: str) -> str | None:
    """HOST:PORT; of `auto`, as Ray notes it for this machine."""
    if address != "auto":
        return address
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    noted = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return noted.read_text().strip() if noted.is_file() else None


def _asks_for_token(address: str | None) -> bool | None:
    """Whether the cluster refuses to say that it is alive to somebody without a token; None where it says nothing."""
    if address is None:
        return None
    try:
        import grpc
    except ModuleNotFoundError:
        return None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=REACHED_S)
        except grpc.RpcError as error:
            return True if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return False


def _check_listens(address: str) -> None:
    """Ray would try for minutes, in silence, to reach an address where nobody listens."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise RayFailed(f"no Ray listens at {address}: {getattr(error, 'strerror', None) or error}") from error


def last_line(error: BaseException) -> str:
    """What an error says in the end: the lines before it are Ray's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
