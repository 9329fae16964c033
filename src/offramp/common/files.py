"""Files that are either whole or not there: written beside their place, flushed, then moved into it.

A digest tells whether a file is still the one that was written; sealed JSON carries the digest of its own content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PART = re.compile(r"\..+\.(\d+)\.part")  # what `writing` calls a file until it is whole; the number is its process's
# The same within a path, and folders that are called NAME.part; the first group is the real name.
PART_OF = re.compile(r"(?:^|(?<=/))(?:\.(?=[^/]+\.\d+\.part))?([^/]+?)(?:\.\d+)?\.part(?=/|$)")
DIGEST = "digest"  # the key of sealed JSON


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file that takes the place of `path` only once the block has ended well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `path` only once the block has ended well; `path` must be free."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ValueError(f"{path} is there already; choose another folder or remove it")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        if path.is_dir():
            path.rmdir()
        os.replace(part, path)
    except OSError as error:
        name_the_real_file(error)
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the disk's errors that name no file, or one that is only half written, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # one without a number is a sentence of its own
            error.filename = str(path)
        name_the_real_file(error)
        raise


def name_the_real_file(error: OSError) -> None:
    """Let an error name what is written, not what it is called until it is whole."""
    if isinstance(error.filename, (str, Path)):
        error.filename = PART_OF.sub(r"\1", str(error.filename))
        del error.filename2  # where a finished part was to be moved


@contextmanager
def permitted() -> Iterator[None]:
    """Name a folder that may not be opened as such."""
    try:
        yield
    except PermissionError as error:
        name = os.fsdecode(error.filename or "")
        raise ValueError(f"{name} may not be opened (permission denied); allow it, or move it away") from error


def walk(folder: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder below with its files' names; one that may not be opened is a sentence, one that is gone nothing."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    with permitted():
        for place, _, names in os.walk(folder, onerror=refuse):
            yield place, names


def remove_stale_parts(folder: Path) -> None:
    """Remove what processes that are no more left half written, in the folder and below."""
    for path in list(folder.rglob(".*.part")):
        found = PART.fullmatch(path.name)
        if found and path.is_file() and not _is_alive(int(found[1])):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


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


def write_sealed_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write JSON that carries a digest of its own content, atomically."""
    write_json(path, {**value, DIGEST: _digest_of(value)})


def read_sealed_json(path: str | Path) -> Any:
    """Read JSON and check its digest, where it has one: older versions wrote none."""
    value = read_json(path)
    if isinstance(value, dict) and DIGEST in value and value.pop(DIGEST) != _digest_of(value):
        raise ValueError(f"{path} is damaged: it is not the file that was written")
    return value


def _digest_of(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
        wrong = "is missing" if os.path.basename(name) != name else difference(folder / name, digest)
        if wrong:
            raise ValueError(f"{folder} is damaged: {name} {wrong}")


def difference(path: Path, digest: str) -> str | None:
    """What is wrong with a file that had this digest when it was written; None if nothing is."""
    if not path.is_file():
        return "is missing"
    return None if sha256(path) == digest else "is not the file that was written"
