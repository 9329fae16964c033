"""Places for files by their URI: folders of this machine, S3, and whatever else fsspec reads.

A path without a scheme is local. `s3://` and `gs://` are read by pyarrow itself, which takes credentials and region
from the usual AWS and Google settings, and S3's address from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; all other schemes
go to fsspec. What is written is whole or not there: on a disk by a rename, in a store by a single put.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.fs as fs

from offramp.common.extras import MissingExtra
from offramp.common.files import write_bytes
from offramp.common.images import SUFFIXES, UnreadableImage, image_files

NATIVE = ("gs", "gcs", "hdfs", "viewfs")  # read by pyarrow, as s3 is
TRIES = 4  # of a read that fails for another reason than that nothing is there
WAIT_S = 0.5  # before the second; twice as long before each one after it
REFUSED = "AWS Error ACCESS_DENIED"  # S3's answer, as pyarrow words it, for an object that is not for us

T = TypeVar("T")


def is_local(place: str) -> bool:
    """Whether this is a path of a machine and no URI."""
    return "://" not in place


def joined(base: str, name: str) -> str:
    """A file of a folder; a name that is a whole path or a URI is itself."""
    if not is_local(name) or (is_local(base) and os.path.isabs(name)):
        return name
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


def fetched(place: str) -> bytes:
    """The bytes of an image in a store; one that is not there or not for us is an `UnreadableImage`.

    Anything else, a network that is down say, is tried again and then an OSError: it says nothing about the image.
    """

    def read() -> bytes:
        system, path = located(place)
        with system.open_input_stream(path) as stream:
            return bytes(stream.readall())

    try:
        return _patiently(read)
    except FileNotFoundError as error:
        raise UnreadableImage("it is not there") from error
    except OSError as error:
        if _is_refused(error):
            raise UnreadableImage("access to it is refused") from error
        raise OSError(f"{place} cannot be read: {_first_line(error)}") from error


def _patiently(read: Callable[[], T]) -> T:
    """Try again what may go better in a moment."""
    for attempt in range(TRIES - 1):
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            if _is_refused(error):
                raise
            time.sleep(WAIT_S * 2**attempt)
    return read()


def _is_refused(error: OSError) -> bool:
    return isinstance(error, PermissionError) or REFUSED in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def images_below(folder: str) -> list[str]:
    """The names of the images in a folder and below, relative to it."""
    if is_local(folder):
        root = Path(folder)
        return [path.relative_to(root).as_posix() for path in image_files(root)]
    found = (name for name in names_below(folder, recursive=True) if os.path.splitext(name)[1].lower() in SUFFIXES)
    return sorted(name for name in found if not name.rsplit("/", 1)[-1].startswith("."))


def names_below(folder: str, recursive: bool = False) -> list[str]:
    """The files in a folder, relative to it; none where it is not there."""
    system, path = located(folder)
    listed = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive))
    root = path.rstrip("/") + "/"
    return sorted(info.path.removeprefix(root) for info in listed if info.type == fs.FileType.File)


def kind_of(place: str) -> str:
    """`file`, `folder` or `nothing`."""
    system, path = located(place)
    kinds = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
    return kinds.get(system.get_file_info([path])[0].type, "nothing")


def opened(place: str) -> Any:
    """A file to be read at any position."""
    system, path = located(place)
    return system.open_input_file(path)


def read_all(place: str) -> bytes:
    """A whole file; one that is missing is a FileNotFoundError."""
    with opened(place) as file:
        return bytes(file.read())


def write_whole(place: str, data: bytes) -> None:
    """Write a file that is whole or not there."""
    if is_local(place):
        write_bytes(place, data)
        return
    system, path = located(place)
    with system.open_output_stream(path) as stream:
        stream.write(data)


def remove(place: str) -> None:
    """Remove a file."""
    system, path = located(place)
    system.delete_file(path)
