"""Places for files by their URI: folders of this machine, S3, and whatever else fsspec reads.

A path without a scheme, or with `file://`, is local. `s3://` and `gs://` are read by pyarrow itself, which takes
credentials and region from the usual AWS and Google settings, and S3's address from AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL; most other schemes go to fsspec. Whatever a store is asked is asked again if it fails. What is written
is whole or not there: in S3 and Google's store by a single put, everywhere else by a move.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from offramp.common.extras import MissingExtra
from offramp.common.files import walk, write_bytes
from offramp.common.images import UnreadableImage

LOCAL_SCHEMES = ("file://", "local://")
PUTS = ("s3://", "gs://", "gcs://")  # what is written to these is not seen before it is whole
NATIVE = ("gs", "gcs", "hdfs", "viewfs")  # read by pyarrow, as s3 is
TRIES = 4  # of what a store is asked, if it fails for another reason than that nothing is there
WAIT_S = 0.5  # before the second; twice as long before each one after it
REFUSED = "AWS Error ACCESS_DENIED"  # S3's answer, as pyarrow words it, for an object that is not for us

T = TypeVar("T")


def is_local(place: str) -> bool:
    """Whether this is a path of a machine and no URI."""
    return "://" not in place


def as_path(place: str) -> str:
    """The path that a `file://` names, as it stands there; any other place as it is."""
    scheme = next((scheme for scheme in LOCAL_SCHEMES if place.startswith(scheme)), "")
    path = place.removeprefix(scheme)
    if scheme and not os.path.isabs(path):
        raise ValueError(f"{place} names no path of this machine; write {scheme}/PATH")
    return path


def joined(base: str, name: str) -> str:
    """A file of a folder; a name that is a whole path or a URI is itself."""
    if not is_local(name) or (is_local(base) and os.path.isabs(name)):
        return as_path(name)
    return os.path.join(base, name) if is_local(base) else f"{base.rstrip('/')}/{name}"


def located(place: str) -> tuple[fs.FileSystem, str]:
    """The file system of a place and the path within it."""
    if is_local(place):
        return fs.LocalFileSystem(), os.path.abspath(place)
    scheme, path = place.split("://", 1)
    if scheme == "s3":
        return _s3(path.split("/", 1)[0]), path
    if scheme in NATIVE:
        return _native(f"{scheme}://{path.split('/', 1)[0]}"), path
    return _by_fsspec(place)


@lru_cache
def _s3(bucket: str) -> fs.FileSystem:
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and not address:
        region = fs.resolve_s3_region(bucket)
    # delayed: what is small enough, as parts are, is one put instead of an upload in several steps
    return fs.S3FileSystem(region=region, endpoint_override=address, allow_delayed_open=True)


@lru_cache
def _native(root: str) -> fs.FileSystem:
    return fs.FileSystem.from_uri(root)[0]


def _by_fsspec(place: str) -> tuple[fs.FileSystem, str]:
    import fsspec

    try:
        found, path = fsspec.core.url_to_fs(place)
    except ImportError as error:  # fsspec's own sentence names the package
        raise MissingExtra(f"{place} cannot be opened: {error}") from error
    except ValueError as error:
        raise ValueError(f"{place} cannot be opened: {error}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), path


def patiently(place: str, ask: Callable[[], T]) -> T:
    """What a store answers, asked again where it may go better in a moment; this machine's disks are asked once."""
    waits = [WAIT_S * 2**attempt for attempt in range(TRIES - 1)]
    while True:
        try:
            return ask()
        except OSError as error:
            if is_local(place) or isinstance(error, FileNotFoundError) or _is_refused(error):
                raise
            if not waits:
                raise OSError(f"{place} cannot be reached: {_first_line(error)}") from error
            time.sleep(waits.pop(0))


def _is_refused(error: OSError) -> bool:
    return isinstance(error, PermissionError) or REFUSED in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def fetched(place: str) -> bytes:
    """The bytes of an image in a store; one that is not there or not for us is an `UnreadableImage`.

    Anything else, a network that is down say, is an OSError in the end: it says nothing about the image.
    """

    def read() -> bytes:
        system, path = located(place)
        with system.open_input_stream(path) as stream:
            return bytes(stream.readall())

    try:
        return patiently(place, read)
    except FileNotFoundError as error:
        raise UnreadableImage("it is not there") from error
    except OSError as error:
        if _is_refused(error):
            raise UnreadableImage("access to it is refused") from error
        raise


def files_below(folder: str) -> Iterator[str]:
    """The files in a folder and below, relative to it, in no order; hidden ones are left out."""
    if not is_local(folder):
        yield from (name for name in names_below(folder, recursive=True) if not os.path.basename(name).startswith("."))
        return
    for place, names in walk(folder):
        within = os.path.relpath(place, folder)
        for name in names:
            if not name.startswith("."):
                yield name if within == "." else f"{within}/{name}"


def names_below(folder: str, recursive: bool = False) -> list[str]:
    """The files in a folder, relative to it; none where it is not there."""

    def listed() -> list[str]:
        system, path = located(folder)
        root = path.rstrip("/") + "/"
        found = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive))
        return sorted(info.path.removeprefix(root) for info in found if info.type == fs.FileType.File)

    return patiently(folder, listed)


def kind_of(place: str) -> str:
    """`file`, `folder` or `nothing`."""

    def kind() -> str:
        system, path = located(place)
        kinds = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
        return kinds.get(system.get_file_info([path])[0].type, "nothing")

    return patiently(place, kind)


def opened(place: str) -> Any:
    """A file to be read at any position."""
    return _open(place) if is_local(place) else pa.PythonFile(_PatientFile(place), mode="r")


def _open(place: str) -> Any:
    system, path = located(place)
    return system.open_input_file(path)


class _PatientFile:
    """A file of a store, for Arrow to read: a read that fails is tried again."""

    def __init__(self, place: str) -> None:
        self.place, self.at, self.closed = place, 0, False
        self.file = patiently(place, partial(_open, place))
        self.bytes = patiently(place, self.file.size)

    def read(self, size: int = -1) -> bytes:
        wanted = self.bytes - self.at if size < 0 else size
        data = patiently(self.place, lambda: self.file.read_at(wanted, self.at))
        self.at += len(data)
        return bytes(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.bytes}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def close(self) -> None:
        self.closed = True
        self.file.close()


def read_all(place: str) -> bytes:
    """A whole file; one that is missing is a FileNotFoundError."""
    with opened(place) as file:
        return bytes(file.read())


def write_whole(place: str, data: bytes) -> None:
    """Write a file that is whole or not there."""
    if is_local(place):
        beside = _beside(place)
        write_bytes(beside, data)
        os.replace(beside, place)
    else:
        patiently(place, partial(_put if place.startswith(PUTS) else _moved, place, data))


def _beside(path: str) -> str:
    """Another name in the same folder; processes of two machines, which may have one number, never share it."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{socket.gethostname()}.{os.getpid()}")


def _put(place: str, data: bytes) -> None:
    system, path = located(place)
    with system.open_output_stream(path) as stream:
        stream.write(data)


def _moved(place: str, data: bytes) -> None:
    system, path = located(place)
    beside = _beside(path)
    try:
        with system.open_output_stream(beside) as stream:
            stream.write(data)
        system.move(beside, path)
    except BaseException:
        with suppress(OSError):
            system.delete_file(beside)
        raise


def remove(place: str) -> None:
    """Remove a file."""
    system, path = located(place)
    patiently(place, lambda: system.delete_file(path))
