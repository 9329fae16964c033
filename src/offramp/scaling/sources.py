"""What a large prediction reads: a folder, a list of paths or URIs, or Parquet with an image column.

The driver lists a source once, in a fixed order, and hands out ranges of it (`task`); a worker turns a range into
images (`ImageReader`). A key is the path below the folder, the list's line, or FILE#ROW, unless a column holds keys.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from offramp.common.files import short_digest
from offramp.common.images import SUFFIXES, UnreadableImage, is_image_name
from offramp.running.predict import DECODERS, ImageSource
from offramp.scaling.places import as_path, fetched, files_below, is_local, joined, kind_of, opened, read_all

REMOTE_DECODERS = 16  # threads that wait for a store most of the time
COLUMNS = ("image", "bytes", "content", "jpg", "png")  # where an image column is looked for, unless it is named
TOGETHER = 64  # rows of Parquet in memory at a time
READ_BYTES = 4 * 1024**2  # of a column of Parquet at a time: a row group may be larger than the memory


class ImageReader(Protocol):
    """What a worker needs to read images of a source."""

    @property
    def decoders(self) -> int:
        """How many threads read and decode."""

    def read(self, task: bytes) -> tuple[list[str], Iterable[ImageSource]]:
        """The keys of a range, and the images in the same order."""


class Source(Protocol):
    """A listed source: so many images, in the order of their keys."""

    about: str
    size: int
    digest: str  # of what was listed: another listing is another source
    together: int  # images that can only be read from the first of them on
    reader: ImageReader

    def task(self, start: int, stop: int) -> bytes:
        """What a worker must be told to read the images from number `start` to before `stop`."""


@dataclass(frozen=True)
class FileReader:
    """Files by their keys, below `base` where they are relative; where none is, there is no base."""

    base: str
    decoders: int

    def read(self, task: bytes) -> tuple[list[str], Iterable[ImageSource]]:
        if self.base and is_local(self.base) and not os.path.isdir(self.base):
            raise OSError(f"{socket.gethostname()} does not see {self.base}, where the images are")
        keys = zlib.decompress(task).decode(errors="surrogateescape").split("\0")
        return keys, map(self._source, keys)

    def _source(self, key: str) -> ImageSource:
        place = joined(self.base, key)
        return place if is_local(place) else partial(fetched, place)


class FileSource:
    """Images in files of their own."""

    together = 1

    def __init__(self, about: str, base: str, keys: Iterable[str]) -> None:
        self.about, self.keys = about, [key for key, _ in groupby(sorted(keys))]
        self.size, self.digest = len(self.keys), short_digest([base, *self.keys])
        remote = any(not is_local(joined(base, key)) for key in self.keys)
        self.reader: ImageReader = FileReader(base, REMOTE_DECODERS if remote else DECODERS)

    def task(self, start: int, stop: int) -> bytes:
        return zlib.compress("\0".join(self.keys[start:stop]).encode(errors="surrogateescape"), 1)


@dataclass(frozen=True)
class ParquetReader:
    """Rows of Parquet files; images are bytes, or structs with a field `bytes` as Hugging Face writes them."""

    base: str
    column: str
    key_column: str | None
    decoders: int = DECODERS

    def read(self, task: bytes) -> tuple[list[str], Iterable[ImageSource]]:
        ranges: list[tuple[str, int, int]] = [tuple(own) for own in json.loads(task)]
        keys = [key for own in ranges for key in self._keys(*own)]
        return keys, (image for own in ranges for image in self._images(*own))

    def _keys(self, name: str, start: int, stop: int) -> list[str]:
        if self.key_column is None:
            return [f"{name}#{row}" for row in range(start, stop)]
        cells = self._cells(name, start, stop, self.key_column)
        return [str(cell) for batch in cells for cell in batch.to_pylist()]

    def _images(self, name: str, start: int, stop: int) -> Iterator[ImageSource]:
        for batch in self._cells(name, start, stop, self.column):
            cells = batch.field("bytes") if pa.types.is_struct(batch.type) else batch
            for cell in cells:
                yield cell.as_py() if cell.is_valid else _empty

    def _cells(self, name: str, start: int, stop: int, column: str) -> Iterator[Any]:
        """A column's cells from row `start` to before `stop`, some at a time.

        Row groups before and after are not read; the first of those that are is read from its own first row.
        """
        with opened(joined(self.base, name)) as handle:
            file = pq.ParquetFile(handle, buffer_size=READ_BYTES, pre_buffer=False)
            groups, at = _groups(file.metadata, start, stop)
            for batch in file.iter_batches(TOGETHER, row_groups=groups, columns=[column]):
                low, high = max(start - at, 0), min(stop - at, len(batch))
                if low < high:
                    yield batch.column(0).slice(low, high - low)
                at += len(batch)
                if at >= stop:
                    return


def _groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows from `start` to before `stop`, and the number of their first row."""
    ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
    first, last = bisect_right(ends, start), bisect_left(ends, stop)
    return list(range(first, last + 1)), ends[first - 1] if first else 0


def _empty() -> NoReturn:
    raise UnreadableImage("its cell is empty")


class ParquetSource:
    """Images in the rows of Parquet files, in the order of files and rows."""

    def __init__(self, about: str, base: str, names: Sequence[str], column: str | None, key_column: str | None) -> None:
        self.about, self.names, self.together = about, sorted(names), 1
        self.rows: list[int] = []
        for name in self.names:
            with opened(joined(base, name)) as handle:
                file = _parquet(handle, joined(base, name))
                column = _image_column(file.schema_arrow, column, joined(base, name))
                _check_column(file.schema_arrow, key_column, joined(base, name))
                self._add(file.metadata)
        assert column is not None
        self.size = sum(self.rows)
        listed = (f"{name}:{rows}" for name, rows in zip(self.names, self.rows, strict=True))
        self.digest = short_digest([base, column, key_column or "", *listed])
        self.reader: ImageReader = ParquetReader(base, column, key_column)

    def _add(self, metadata: Any) -> None:
        self.rows.append(metadata.num_rows)
        groups = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self.together = max([self.together, *groups])

    def task(self, start: int, stop: int) -> bytes:
        ranges, at = [], 0
        for name, rows in zip(self.names, self.rows, strict=True):
            low, high = max(start - at, 0), min(stop - at, rows)
            if low < high:
                ranges.append([name, low, high])
            at += rows
        return json.dumps(ranges).encode()


def _parquet(handle: Any, place: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(handle)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{place} is no Parquet file: {str(error).splitlines()[0]}") from error


def _image_column(schema: pa.Schema, wanted: str | None, place: str) -> str:
    """The column that holds encoded images: the one asked for, or the first that is called and typed like one."""
    usual = next((name for name in COLUMNS if name in schema.names and _holds_bytes(schema.field(name).type)), None)
    column = wanted or usual
    if column is None:
        raise ValueError(f"{place} has no image column; name it with --image-column: {', '.join(schema.names)}")
    _check_column(schema, column, place)
    if not _holds_bytes(schema.field(column).type):
        raise ValueError(f"{place}: column {column} holds {schema.field(column).type}, not the bytes of images")
    return column


def _check_column(schema: pa.Schema, column: str | None, place: str) -> None:
    if column is not None and column not in schema.names:
        raise ValueError(f"{place} has no column {column!r}; it has {', '.join(schema.names)}")


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def open_source(place: str, image_column: str | None = None, key_column: str | None = None) -> Source:
    """A folder of images or of Parquet files, one Parquet file, or a text file with a path or URI per line."""
    place = as_path(place)
    place = place if is_local(place) else place.rstrip("/")
    base = os.path.abspath(place) if is_local(place) else place
    kind = kind_of(place)
    if kind == "nothing":
        raise ValueError(f"{place} is not there; give a folder, a list of paths, or Parquet")
    if kind == "folder":
        source = _folder(place, base, image_column, key_column)
    elif place.endswith(".parquet"):
        folder, name = base.rsplit("/", 1)
        source = ParquetSource(place, folder, [name], image_column, key_column)
    else:
        source = _list(place)
    if not source.size:
        raise ValueError(f"{place} holds no images")
    return source


def _folder(place: str, base: str, image_column: str | None, key_column: str | None) -> Source:
    tables: list[str] = []
    images: list[str] = []
    for name in files_below(base):
        if name.endswith(".parquet"):
            tables.append(name)
        elif _is_image(name, is_local(base)):
            images.append(name)
    if tables and images:
        raise ValueError(f"{place} holds images and Parquet files; give a folder of one kind")
    return ParquetSource(place, base, tables, image_column, key_column) if tables else FileSource(place, base, images)


def _is_image(name: str, local: bool) -> bool:
    """HEIC is read from files of a machine alone."""
    return is_image_name(os.path.basename(name)) if local else os.path.splitext(name)[1].lower() in SUFFIXES


def _list(place: str) -> Source:
    data = read_all(place)
    if b"\0" in data:
        raise ValueError(f"{place} is no list of paths: text with a path or URI per line, or a .parquet file")
    lines = (line.strip() for line in data.split(b"\n"))  # as bytes: other characters that end a line may be in names
    keys = [line.decode(errors="surrogateescape") for line in lines if line]
    relative = any(is_local(key) and not os.path.isabs(key) for key in keys)
    return FileSource(place, os.getcwd() if relative else "", keys)
