"""One sentence for a name that is not known: what it was, the nearest match, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

FEW, MANY = 20, 100  # up to which names are listed: beside one that is near, and where none is
NEAR = 0.7  # how alike two names must be for one to be offered for the other, from 0 to 1
WHOLE = 4  # letters from which on a name inside another one counts


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """For example: model 'msdnet' is unknown; did you mean 'msdnet5'? Known: msdnet5, msdnet7."""
    names = list(allowed)
    near = nearest(given, names, 5)
    if len(names) > (FEW if near else MANY):
        first = meant(given, names) or "; no name is near it."
        others = f" Also near: {', '.join(near[1:])}." if near[1:] else ""
        return f"{what} {given!r} is unknown{first}{others} There are {len(names):,}"
    return f"{what} {given!r} is unknown{meant(given, names) or '.'} Known: {', '.join(names) or 'none'}"


def meant(given: object, allowed: Iterable[str]) -> str:
    """A question about the nearest name; nothing where none is near."""
    near = nearest(given, allowed)
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(given: object, allowed: Iterable[str], many: int = 1) -> list[str]:
    """The names that may have been meant: begun, alike, one inside the other, or what is given short for one.

    Where names share what stands before their last dot (`train.`), it says nothing, and only the rest is compared;
    a word without a dot is compared with the last word of each. Hyphens and underscores are nothing.
    """
    names, text = list(allowed), str(given).lower()
    parent = f"{text.rpartition('.')[0]}."
    inner = {name.lower()[len(parent) :]: name for name in names if name.lower().startswith(parent)}
    own, known = (text[len(parent) :], inner) if inner else (text, {name.lower(): name for name in names})
    if not _plain(own):
        return []
    ways = (_same, _last_word, _begun, _alike, _inside, _short)
    found = next((words for way in ways if (words := way(own, list(known)))), [])
    return [known[word] for word in found[:many]]


def _plain(word: str) -> str:
    return re.sub(r"[_.\- ]", "", word)


def _same(own: str, words: list[str]) -> list[str]:
    return [word for word in words if _plain(word) == _plain(own)]


def _last_word(own: str, words: list[str]) -> list[str]:
    """Of dotted names, those whose last word it is, or is short for."""
    lasts = {word: word.rpartition(".")[2] for word in words if "." in word}
    return [word for word, last in lasts.items() if "." not in own and own in (last, _initials(last))]


def _alike(own: str, words: list[str]) -> list[str]:
    return get_close_matches(own, words, n=5, cutoff=NEAR)


def _begun(own: str, words: list[str]) -> list[str]:
    return _shortest(word for word in words if _plain(word).startswith(_plain(own)))


def _inside(own: str, words: list[str]) -> list[str]:
    return _shortest(word for word in words if own in word or (len(word) >= WHOLE and word in own))


def _short(own: str, words: list[str]) -> list[str]:
    """Abbreviations: the words' initials, or letters of the name in their order, digits included."""
    return _shortest(word for word in words if own == _initials(word) or _letters_of(own, word))


def _shortest(words: Iterable[str]) -> list[str]:
    return sorted(words, key=lambda word: (len(word), word))


def _initials(name: str) -> str:
    return "".join(word[:1] for word in re.split(r"[_.\- ]", name))


def _letters_of(text: str, name: str) -> bool:
    letters = iter(name)
    return len(text) >= WHOLE and text[0] == name[:1] and all(letter in letters for letter in text)


def check_device_name(name: str) -> None:
    """Raise for a device that no engine has; whether it is there, its engine says."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
