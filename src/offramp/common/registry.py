"""Registries: names for things that a configuration or the command line asks for, open to everybody.

Networks, weightings, objectives, forks, data sets, augmentations and optimisers each have one, beside what they name.
Entries add themselves when their module is imported; a user's own module is imported by `load_plugin` (`--import`).
Every process that builds things by name must import it: `loaded` lists what this one has, so that a process started
from here can do the same, and so that printed commands can repeat it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TypeVar, cast

from offramp.common.names import unknown

T = TypeVar("T")
E = TypeVar("E")


class Registry(Mapping[str, T]):
    """Entries by name; `what` is what people call one of them."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Make `name` known; a name can be taken only once."""
        if name in self._entries:
            raise ValueError(f"{self.what} {name!r} is registered already")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[E], E]:
        """A decorator for a function or class that shall be known by `name`."""

        def add(entry: E) -> E:
            self.add(name, cast(T, entry))
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        """The entry of this name; an unknown one is a ValueError that says which there are."""
        if name not in self._entries:
            own = f"One of your own: --import MODULE, or --import FILE.py, which registers the {self.what}"
            raise ValueError(f"{unknown(self.what, name, sorted(self._entries))}. {own}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


loaded: list[str] = []


def load_plugin(source: str) -> None:
    """Import `my_module`, or `path/to/file.py`; what goes wrong is a ValueError. Twice is once."""
    if source in loaded:
        return
    try:
        if source.endswith(".py"):
            _import_file(Path(source))
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # last, so that no file there stands in for a package
            import_module(source)
    except (ImportError, TypeError, SyntaxError, OSError) as error:
        raise ValueError(f"--import {source} failed: {error}") from error
    loaded.append(source)


def _import_file(path: Path) -> None:
    """A file as a module of its name, which must not be another module's."""
    if not path.is_file():
        raise ImportError(f"{path} is not there")
    if path.stem in sys.modules:
        raise ImportError(f"a module {path.stem!r} is loaded already; give the file another name")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
