"""One sentence for a name that is not known: what it was, the nearest match, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MANY = 100  # names are not listed any more
NEAR = 0.7  # how alike two names must be for one to be offered for the other, from 0 to 1
WHOLE = 4  # letters from which on a name inside another one counts


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """For example: model 'msdnet' is unknown; did you mean 'msdnet5'? Known: msdnet5, msdnet7."""
    names = list(allowed)
    if len(names) > MANY:
        near = nearest(given, names, 5)
        few = f"Near: {', '.join(near)}" if near else "None is near"
        return f"{what} {given!r} is unknown{meant(given, names) or '.'} {few}; there are {len(names):,}"
    return f"{what} {given!r} is unknown{meant(given, names) or '.'} Known: {', '.join(names) or 'none'}"


def meant(given: object, allowed: Iterable[str]) -> str:
    """A question about the nearest name; nothing where none is near."""
    near = nearest(given, allowed)
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(given: object, allowed: Iterable[str], many: int = 1) -> list[str]:
    """The names that may have been meant: alike, one inside the other, or what is given short for one.

    Where names share what stands before their last dot (`train.`), it says nothing, and only the rest is compared.
    """
    names, text = list(allowed), str(given).lower()
    parent, _, own = text.rpartition(".")
    if parent and any(name.lower().startswith(f"{parent}.") for name in names):
        own_names = {name.lower()[len(parent) + 1 :]: name for name in names if name.lower().startswith(f"{parent}.")}
    else:
        own, own_names = text, {name.lower(): name for name in names}
    if not own:
        return []
    inside = [name for name in own_names if own in name or (len(name) >= WHOLE and name in own)]
    found = get_close_matches(own, own_names, n=many, cutoff=NEAR)
    found = found or sorted(inside, key=len) or sorted((n for n in own_names if _short_for(own, n)), key=len)
    return [own_names[name] for name in found[:many]]


def _short_for(text: str, name: str) -> bool:
    """Whether this is an abbreviation: the words' initials, or letters of the name in their order, digits included."""
    if text == "".join(word[:1] for word in re.split(r"[_.\- ]", name)):
        return True
    letters = iter(name)
    return len(text) >= WHOLE and text[0] == name[:1] and all(letter in letters for letter in text)


def check_device_name(name: str) -> None:
    """Raise for a device that no engine has; whether it is there, its engine says."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
