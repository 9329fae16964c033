"""One sentence for a name that is not known: what it was, the nearest match, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """For example: model 'msdnet' is unknown; did you mean 'msdnet5'? Known: msdnet5, msdnet7."""
    names = list(allowed)
    return f"{what} {given!r} is unknown{meant(given, names) or '.'} Known: {', '.join(names) or 'none'}"


def meant(given: object, allowed: Iterable[str]) -> str:
    """A question about the nearest name; nothing where none is near."""
    near = get_close_matches(str(given), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
