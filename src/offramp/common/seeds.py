"""Every random draw follows from the run's seed and the place where it is made.

`mix(seed, "augment", step)` gives the same number on every machine, so a run resumes at any step without saved
generator states. torch's generators are in generators.py; this needs no torch.
"""

from __future__ import annotations

import hashlib


def mix(*parts: int | str) -> int:
    """A 63-bit number that follows from `parts` alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
