"""One sentence for a name that is not known: what it was, the nearest match, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """For example: model 'msdnet' is unknown; did you mean 'msdnet5'? Known: msdnet5, msdnet7."""
    names = list(allowed)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{what} {given!r} is unknown{hint} Known: {', '.join(names) or 'none'}"
