"""`labels.csv`: what each file of a folder shows, for people whose images do not lie in a folder per class.

A line per image: its file and its label, separated by commas, semicolons or tabs; a first line with the columns' names
is optional. Files are looked for beside the table and in `images/` and `train/` there.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from offramp.common.images import SUFFIXES, image_files, is_image_name

LABELS = "labels.csv"
PLACES = (".", "images", "train")  # where files are looked for, from the table on
FILE_COLUMNS = ("filename", "file_name", "file", "path", "filepath", "image", "image_path", "id", "image_id")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target")
TEST_WORDS = ("val", "valid", "validation", "test")
Note = Callable[[str, Iterable[str | Path]], None]


@dataclass(frozen=True)
class LabelTable:
    """The files of a table with their labels, those of the test split apart, and images that it does not name."""

    root: Path
    class_names: tuple[str, ...]
    train: tuple[tuple[Path, str], ...]
    test: tuple[tuple[Path, str], ...]
    unlisted: tuple[Path, ...]


def read_label_table(folder: Path, note: Note) -> LabelTable | None:
    """The table of a folder, if it has one; what is not used of it is noted."""
    path = folder / LABELS
    if not path.is_file():
        return None
    rows = _rows(path)
    columns = _columns(path, rows, folder)
    found: dict[Path, tuple[str, bool]] = {}
    for row in rows[columns.first :]:
        name, label = row[columns.file].strip(), row[columns.label].strip()
        file = _file(path, folder, name)
        if file is None or not label:
            note(f"lines of {LABELS} {'whose file is not there' if file is None else 'without a label'}", [name])
            continue
        testing = columns.split is not None and row[columns.split].strip().casefold() in TEST_WORDS
        if found.setdefault(file, (label, testing)) != (label, testing):
            raise ValueError(f"{path} names {name} twice, with other words: {found[file][0]!r} and {label!r}")
    if not found:
        raise ValueError(
            f"{path} names no file that is there; files are looked for beside it, in images/ and in train/"
        )
    train, test = (
        tuple(sorted((f, own) for f, (own, t) in found.items() if t == testing)) for testing in (False, True)
    )
    if test and not train:
        raise ValueError(f"{path} leaves no image to train on: its split column says test everywhere")
    names = tuple(sorted({label for _, label in train}))
    strangers = sorted({label for _, label in test} - set(names))
    if strangers:
        raise ValueError(f"{path} has the class {strangers[0]!r} in the test split alone")
    return LabelTable(folder, names, train, test, tuple(f for f in image_files(folder) if f not in found))


@dataclass(frozen=True)
class _Columns:
    file: int
    label: int
    split: int | None
    first: int  # line of data


def _rows(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8; save it again with that encoding") from error
    line = text.split("\n", 1)[0]
    separator = max(",;\t", key=line.count)
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if any(cell.strip() for cell in row)]
    if not rows:
        raise ValueError(f"{path} is empty")
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or len(row) < len(rows[0]):
            raise ValueError(f"{path}, line {number}: a file and a label are needed, separated by a comma: {row}")
    return rows


def _columns(path: Path, rows: Sequence[Sequence[str]], folder: Path) -> _Columns:
    """Which column is which: by the names in the first line, if that is a header, else file and label."""
    names = [cell.strip().casefold() for cell in rows[0]]
    file, label = (next((names.index(n) for n in known if n in names), None) for known in (FILE_COLUMNS, LABEL_COLUMNS))
    named = file is not None or label is not None
    if not named and (is_image_name(rows[0][0].strip()) or _file(path, folder, rows[0][0].strip()) is not None):
        return _Columns(0, 1, None, 0)
    if file is None:
        file = 0 if label != 0 else 1
    if label is None:
        label = next(at for at in range(len(names)) if at != file)
    return _Columns(file, label, names.index("split") if "split" in names else None, 1)


def _file(path: Path, folder: Path, name: str) -> Path | None:
    """The file that a line means; one without a suffix is an image of that name."""
    own = PurePosixPath(name.replace("\\", "/"))
    if own.is_absolute() or ".." in own.parts or ":" in name[:2]:
        raise ValueError(f"{path} names {name}, which lies outside of {folder}; write paths from {folder} on")
    for place in PLACES:
        for suffix in ("",) if own.suffix.lower() in SUFFIXES else ("", *sorted(SUFFIXES)):
            file = folder / place / f"{own}{suffix}"
            if name and is_image_name(file.name) and file.is_file():
                return file
    return None
