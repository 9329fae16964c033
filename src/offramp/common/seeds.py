"""Every random draw follows from the run's seed and the place where it is made.

`mix(seed, "augment", step)` gives the same number on every machine, so a run resumes at any step without
saved generator states. Within a step, `draws_from` lets a second pass draw what the first one drew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GeneratorStates = tuple[Tensor, ...]


def mix(*parts: int | str) -> int:
    """A 63-bit number that follows from `parts` alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator seeded with `mix(*parts)`."""
    return torch.Generator(device=device).manual_seed(mix(*parts))


def generator_states(device: torch.device) -> GeneratorStates:
    """The states of the generators that a module may draw from; none while a CUDA graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ()
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_generator_states(states: GeneratorStates, device: torch.device) -> None:
    """Put back what `generator_states` gave."""
    if not states:
        return
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def draws_from(states: GeneratorStates | None, device: torch.device) -> Iterator[None]:
    """Draw as from `states` (None: go on) inside the block, and afterwards as if it had not been."""
    before = generator_states(device)
    if states is not None:
        set_generator_states(states, device)
    try:
        yield
    finally:
        set_generator_states(before, device)
