"""Folders, lists and Parquet as sources: sorted keys in ranges, and the images that belong to them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offramp.common.images import UnreadableImage
from offramp.scaling import sources
from offramp.scaling.places import files_below, write_whole
from offramp.scaling.sources import REMOTE_DECODERS, Source, open_source


def contents(images: Iterable[object]) -> list[object]:
    """The bytes of images, however they come; of one that cannot be had, why."""
    found: list[object] = []
    for image in images:
        if isinstance(image, str):
            found.append(Path(image).read_bytes())
        elif isinstance(image, bytes):
            found.append(image)
        else:
            try:
                found.append(image())  # type: ignore[operator]
            except UnreadableImage as error:
                found.append(str(error))
    return found


def all_ranges(source: Source, size: int) -> tuple[list[str], list[object]]:
    """Everything, read in ranges of `size`."""
    keys: list[str] = []
    images: list[object] = []
    for start in range(0, source.size, size):
        own, found = source.reader.read(source.task(start, min(start + size, source.size)))
        read = contents(found)
        assert len(own) == len(read) <= size
        keys += own
        images += read
    return keys, images


def test_a_folder_is_read_by_paths_below_it(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(digits.parent)
    source = open_source("digits")
    keys, images = all_ranges(source, 64)
    assert keys == sorted(path.relative_to(digits).as_posix() for path in digits.rglob("*.*")) and len(keys) == 250
    assert images == [(digits / key).read_bytes() for key in keys]
    assert source.digest == open_source(str(digits)).digest


def test_a_list_is_sorted_without_repetitions_and_paths_are_from_here(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute, relative, a name that is no text, blank lines; the list's digest follows from what it names."""
    monkeypatch.chdir(digits)
    odd = os.fsdecode(b"\xff odd.png")
    (digits / odd).write_bytes(b"odd")
    try:
        whole = str(digits / "001" / "00101.png")
        lines = ["000/00007.png", whole, "", " 000/00003.png ", odd, "000/00007.png"]
        (tmp_path / "list.txt").write_bytes(os.fsencode("\n".join(lines)))
        source = open_source(str(tmp_path / "list.txt"))
        keys, images = all_ranges(source, 2)
        assert keys == sorted({whole, "000/00003.png", "000/00007.png", odd}) and source.size == 4
        assert images == [Path(key).read_bytes() for key in keys]
    finally:
        (digits / odd).unlink()
    (tmp_path / "other.txt").write_text("000/00007.png\n")
    assert open_source(str(tmp_path / "other.txt")).digest != source.digest


def test_a_list_of_whole_paths_is_the_same_from_everywhere(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digits / "000" / "00001.png"
    (tmp_path / "whole.txt").write_text(f"{whole}\nmemory://none/b.png\nfile://{whole}\n")
    (tmp_path / "relative.txt").write_text("000/00001.png\n")
    digests = []
    for place in (digits, tmp_path):
        monkeypatch.chdir(place)
        digests.append([open_source(str(tmp_path / name)).digest for name in ("whole.txt", "relative.txt")])
    assert digests[0][0] == digests[1][0] and digests[0][1] != digests[1][1]
    keys, images = all_ranges(open_source(f"file://{tmp_path}/whole.txt"), 2)
    assert keys[1] == f"file://{whole}" and images == [*[whole.read_bytes()] * 2, "it is not there"]


def test_only_a_newline_ends_a_line(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["a\u2028b.png", "a\x85.png", "a\x0cb.png", "\u2028.png"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "list.txt").write_bytes("\r\n".join(names).encode())
    keys, images = all_ranges(open_source("list.txt"), 10)
    assert keys == sorted(names) and images == [name.encode() for name in keys]


def test_a_folder_is_listed_once(digits: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(f"{s3}/a.png", b"x")
    listed: list[str] = []

    def counting(folder: str) -> Iterator[str]:
        listed.append(folder)
        return files_below(folder)

    monkeypatch.setattr(sources, "files_below", counting)
    assert open_source(str(digits)).size == 250 and open_source(s3).size == 1
    assert listed == [str(digits), s3]


def test_a_machine_without_the_folder_says_so(digits: Path, tmp_path: Path) -> None:
    """It is not as if all of the images were unreadable."""
    shutil.copytree(digits, tmp_path / "digits")
    source = open_source(str(tmp_path / "digits"))
    shutil.rmtree(tmp_path / "digits")
    with pytest.raises(OSError, match=f"{socket.gethostname()} does not see {tmp_path}/digits, where the images are"):
        source.reader.read(source.task(0, 10))


def test_a_list_of_uris(digits: Path, tmp_path: Path, s3: str) -> None:
    picture = (digits / "000" / "00001.png").read_bytes()
    write_whole(f"{s3}/one.png", picture)
    (tmp_path / "list.txt").write_text(f"{s3}/one.png\n{s3}/none.png\n{digits / '000' / '00001.png'}\n")
    source = open_source(str(tmp_path / "list.txt"))
    assert source.reader.decoders == REMOTE_DECODERS
    keys, images = all_ranges(source, 10)
    assert dict(zip(keys, images, strict=True)) == {
        f"{s3}/one.png": picture,
        f"{s3}/none.png": "it is not there",
        str(digits / "000" / "00001.png"): picture,
    }


def write_tables(folder: Path, cells: list[bytes | None], as_struct: bool) -> None:
    """Two files with row groups of 7, the second with fewer rows."""
    folder.mkdir()
    for name, rows in (("b.parquet", slice(30, None)), ("a.parquet", slice(0, 30))):
        own = cells[rows]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if as_struct else pa.binary()
        column = [{"bytes": cell, "path": None} for cell in own] if as_struct else own
        ids = list(range(rows.start, rows.start + len(own)))
        pq.write_table(pa.table({"id": ids, "image": pa.array(column, kind)}), folder / name, row_group_size=7)


@pytest.mark.parametrize("as_struct", [False, True])
@pytest.mark.parametrize("size", [1, 10, 100])
def test_parquet_is_read_in_the_order_of_files_and_rows(tmp_path: Path, as_struct: bool, size: int) -> None:
    cells: list[bytes | None] = [None if at == 33 else b"image %d" % at for at in range(45)]
    write_tables(tmp_path / "tables", cells, as_struct)
    keys, images = all_ranges(open_source(str(tmp_path / "tables")), size)
    assert keys == [f"a.parquet#{row}" for row in range(30)] + [f"b.parquet#{row}" for row in range(15)]
    assert images == ["its cell is empty" if cell is None else cell for cell in cells]
    named = open_source(str(tmp_path / "tables"), "image", "id")
    assert all_ranges(named, size)[0] == [str(at) for at in range(45)]
    assert named.digest != open_source(str(tmp_path / "tables")).digest
    single = open_source(str(tmp_path / "tables" / "b.parquet"))
    assert all_ranges(single, size) == ([f"b.parquet#{row}" for row in range(15)], images[30:])


def test_row_groups_that_are_not_needed_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(tmp_path / "tables", [b"image %d" % at for at in range(45)], False)
    source, asked = open_source(str(tmp_path / "tables")), []
    read = pq.ParquetFile.iter_batches

    def noting(file: pq.ParquetFile, *given: object, row_groups: list[int], **more: object) -> Iterator[pa.RecordBatch]:
        asked.append(row_groups)
        return read(file, *given, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    assert source.together == 7
    for start, stop, groups in ((0, 7, [0]), (6, 8, [0, 1]), (7, 14, [1]), (13, 29, [1, 2, 3, 4]), (29, 30, [4])):
        asked.clear()
        keys, images = source.reader.read(source.task(start, stop))
        assert contents(images) == [b"image %d" % at for at in range(start, stop)] and len(keys) == stop - start
        assert asked == [groups]


def test_parquet_in_a_store(tmp_path: Path, s3: str) -> None:
    write_tables(tmp_path / "tables", [b"image %d" % at for at in range(45)], True)
    for name in ("a.parquet", "b.parquet"):
        write_whole(f"{s3}/tables/{name}", (tmp_path / "tables" / name).read_bytes())
    here, there = (all_ranges(open_source(f"{base}/tables"), 8) for base in (tmp_path, s3))
    assert here == there


def test_sources_that_are_none_are_sentences(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "text.parquet")
    for name, columns, said in (
        ("none", (), "is not there; give a folder"),
        ("empty", (), "holds no images"),
        ("blank.txt", (), "holds no images"),
        ("binary", (), "is no list of paths"),
        ("broken.parquet", (), "broken.parquet is no Parquet file"),
        ("text.parquet", (), "no image column; name it with --image-column: id, text"),
        ("text.parquet", ("text",), "column text holds string, not the bytes of images"),
        ("text.parquet", ("nope",), "has no column 'nope'; it has id, text"),
    ):
        with pytest.raises(ValueError, match=said):
            open_source(str(tmp_path / name), *columns)
    both = tmp_path / "both"
    both.mkdir()
    (both / "a.png").write_bytes(b"x")
    (both / "t.parquet").write_bytes((tmp_path / "text.parquet").read_bytes())
    with pytest.raises(ValueError, match="images and Parquet files"):
        open_source(str(both))
