"""Files that are either whole or not there: written beside their place, flushed, then moved into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
