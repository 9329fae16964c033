"""Files that are either whole or not there: written beside their place, flushed, then moved into it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file that takes the place of `path` only once the block has ended well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, atomically."""
    with writing(path) as file:
        file.write(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: str | Path) -> Any:
    """Read JSON; a file that is missing or damaged is a ValueError that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_digest(words: Iterable[str]) -> str:
    """A short name for a list of words, the same on every machine."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def check_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise for the first of the named files that is missing or is not the one that was written."""
    for name, digest in digests.items():
        path = folder / name
        if os.path.basename(name) != name or not path.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing")
        if sha256(path) != digest:
            raise ValueError(f"{folder} is damaged: {name} is not the file that was written")
