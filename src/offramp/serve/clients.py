"""What each client may use: a bucket per client that fills with mul-adds at a fixed rate and is emptied by its images.

An image is charged what it really used, once it is over. Until then the most it could use is held back, so that
many requests at a time cannot pass on the same balance.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_CLIENTS = 4096  # kept at a time; whoever was away longest is forgotten first
BURST_S = 2.0  # seconds of its rate that a client who was away may use at once


class Bucket:
    """One client's balance in mul-adds; it may go below zero by one request, and is paid back before the next."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock = rate, clock
        self.balance, self.held = BURST_S * rate, 0.0
        self._at = clock()

    def wait_s(self) -> float:
        """Seconds until this client may send again; zero if it may now."""
        now = self.clock()
        self.balance = min(BURST_S * self.rate, self.balance + self.rate * (now - self._at))
        self._at = now
        return 0.0 if self.balance > self.held else max(-self.balance / self.rate, 0.1)

    def hold(self, mul_adds: float) -> None:
        """Keep back what an image could use."""
        self.held += mul_adds

    def charge(self, held: float, used: float) -> None:
        """Give back what was held for an image and take what it used."""
        self.held -= held
        self.balance -= used


class Clients:
    """The buckets of the clients seen last."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock = rate, clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def bucket(self, name: str) -> Bucket | None:
        """A client's bucket, new and full if it was not known; None where there is no ceiling."""
        if self.rate is None:
            return None
        own = self._buckets.setdefault(name, Bucket(self.rate, self.clock))
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return own

    def __len__(self) -> int:
        return len(self._buckets)


def client_name(peer: str | None, forwarded: Sequence[str] = ()) -> str:
    """Whom to charge: the peer, or the last address that a trusted proxy's X-Forwarded-For headers name.

    That is the one which the proxy itself saw; those before it are whatever the client wrote.
    """
    told = ",".join(forwarded).split(",")[-1].strip()
    return _network(told or peer or "unknown")


def _network(address: str) -> str:
    """An IPv6 client owns at least 2^64 addresses, so its network counts as one client."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((int(parsed), 64), strict=False))
