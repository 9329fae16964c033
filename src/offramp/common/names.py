"""One sentence for a name that is not known: what it was, the nearest match, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MANY = 100  # names are not listed any more
NEAR = 0.6  # how alike two names must be for one to be offered for the other, from 0 to 1


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """For example: model 'msdnet' is unknown; did you mean 'msdnet5'? Known: msdnet5, msdnet7."""
    names = list(allowed)
    if len(names) > MANY:
        near = get_close_matches(str(given), names, n=5, cutoff=NEAR)
        few = f"Near: {', '.join(near)}" if near else "None is near"
        return f"{what} {given!r} is unknown{meant(given, names) or '.'} {few}; there are {len(names):,}"
    return f"{what} {given!r} is unknown{meant(given, names) or '.'} Known: {', '.join(names) or 'none'}"


def meant(given: object, allowed: Iterable[str]) -> str:
    """A question about the nearest name; nothing where none is near."""
    names, text = list(allowed), str(given)
    near = get_close_matches(text, names, n=1, cutoff=NEAR) or [name for name in names if text and text in name]
    return f"; did you mean {near[0]!r}?" if near else ""


def check_device_name(name: str) -> None:
    """Raise for a device that no engine has; whether it is there, its engine says."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
