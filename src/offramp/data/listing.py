"""The files of a folder of photos, as people have them, in three splits.

Class folders lie in DIR or in DIR/train; `val/`, `valid/`, `validation/` or `test/` beside `train/` is the test split,
else every class gives a fifth of its images (at least one, drawn by the seed). Where there are no class folders, a
`labels.csv` says what each file shows (label_table.py). What is passed over is counted and said. Needs no torch: boxes
that only run bundles list folders too.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from offramp.common.files import permitted, sha256, short_digest, walk
from offramp.common.images import (
    HEIC_SUFFIXES,
    SUFFIXES,
    UnreadableImage,
    heic_missing,
    is_image_name,
    read_image,
)
from offramp.data.label_table import LABELS, LabelTable, read_label_table
from offramp.data.splits import hold_out, hold_out_share

log = logging.getLogger("offramp")

TEST_SHARE = 0.2
CALIBRATION_SHARE = 0.1
ALLOWED_UNREADABLE = 0.01  # of a folder's images
ALWAYS_ALLOWED = 5  # of fifty or more
MOST_COMPARED = 50_000  # photos; in larger folders copies are not looked for, which would take long
TEST_FOLDERS = ("val", "valid", "validation", "test")  # beside train/; the first that is there
SPLITS = {"train", "training", "val", "validation", "test", "testing"}  # what hardly any class is called
MAC = "__MACOSX"  # what archives made there hold beside the photos
EXAMPLES = 3  # of what is ignored, or of classes that are too small


@dataclass(frozen=True)
class FileSplit:
    """Paths with labels, and their numbers in the folder's sorted list."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    index: np.ndarray

    def take(self, rows: np.ndarray) -> FileSplit:
        return FileSplit(tuple(self.paths[r] for r in rows), self.labels[rows], self.index[rows])


class Ignored:
    """What a folder holds that is not used: by kind, how many, and the first few."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, names: Iterable[str | Path]) -> None:
        for name in names:
            self.counts[kind] += 1
            if len(self.found.setdefault(kind, [])) < EXAMPLES:
                self.found[kind].append(os.fspath(name))

    def __str__(self) -> str:
        """hidden files: 2 (.DS_Store, ._a.jpg); files that are no images: 1 (notes.txt)."""
        return "; ".join(f"{kind}: {count:,} ({self._some(kind)})" for kind, count in self.counts.items())

    def _some(self, kind: str) -> str:
        more = ", ..." if self.counts[kind] > len(self.found[kind]) else ""
        return ", ".join(os.path.basename(name) for name in self.found[kind]) + more


@dataclass(frozen=True)
class FolderListing:
    """The classes of a folder, its files in three splits, and a digest of those that training draws from."""

    class_names: tuple[str, ...]
    splits: dict[str, FileSplit]
    identity: str
    ignored: str = ""  # in words; empty where everything is used

    @property
    def images(self) -> int:
        """Of the whole folder, whichever split they are in."""
        return sum(len(split.paths) for split in self.splits.values())


@dataclass(frozen=True)
class Layout:
    """Where the classes of a folder lie: in folders, or in a table. Files are listed by `train` and `test`."""

    root: Path
    train_root: Path
    test_root: Path | None
    class_names: tuple[str, ...]
    table: LabelTable | None
    ignored: Ignored = field(default_factory=Ignored)

    @property
    def split_already(self) -> bool:
        """Whether the folder itself says which images are for testing."""
        return self.train_root != self.root or self.test_root is not None or bool(self.table and self.table.test)

    def train(self) -> FileSplit:
        """The files that training and calibration draw from, and the test split where none is set apart."""
        if self.table is not None:
            return self._rows(self.table.train)
        return list_files(self.train_root, self.class_names, self.ignored)

    def test(self) -> FileSplit | None:
        if self.table is not None:
            return self._rows(self.table.test) if self.table.test else None
        return None if self.test_root is None else list_files(self.test_root, self.class_names, self.ignored)

    def identity(self, train: FileSplit) -> str:
        """A digest of the classes and of all files that training draws from: with one more, others are held out.

        What it held before there were other layouts than `train/` with `val/` and bare class folders, it holds still.
        """
        listed = short_digest(path.relative_to(self.train_root).as_posix() for path in train.paths)
        parts = [*self.class_names, listed]
        if self.table is not None:
            parts += [LABELS, short_digest(map(str, train.labels.tolist())), str(bool(self.table.test))]
        elif self.test_root is not None and self.test_root.name != "val":
            parts.append(f"{self.test_root.name}/")
        return short_digest(parts)

    def is_of(self, train: FileSplit, identity: str | None) -> bool:
        """Whether an identity, with copies kept together or not, is that of these files."""
        own = self.identity(train)
        return identity in (own, with_copies_together(own))

    def _rows(self, rows: Sequence[tuple[Path, str]]) -> FileSplit:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels = np.array([numbers[label] for _, label in rows], np.int64)
        return FileSplit(tuple(path for path, _ in rows), labels, np.arange(len(rows)))

    def say_ignored(self) -> str:
        """Say, once in a process, what is not used."""
        text = str(self.ignored)
        if text:
            say_once(self.root, f"not used in {self.root}: {text}")
        return text


_said: set[tuple[Path, str]] = set()


def say_once(root: Path, text: str) -> None:
    """A warning about a folder, once in a process."""
    if (root, text) not in _said:
        _said.add((root, text))
        log.warning("%s", text)


def list_folder(data_dir: str | Path | None, seed: int = 0, calibration: int | None = None) -> FolderListing:
    """Three splits of a folder; `calibration` None holds out a tenth of every class."""
    layout = folder_layout(data_dir)
    names = layout.class_names
    if len(names) < 2:
        raise ValueError(
            f"{layout.train_root} needs a folder for each of at least two classes, or a {LABELS}; found {len(names)}"
        )
    if layout.table is None:
        doubt_classes(layout.train_root, names)
    train, test = layout.train(), layout.test()
    identity, ignored = layout.identity(train), layout.say_ignored()
    refuse_small_classes(layout.train_root, train, names, 1 + (test is None) + (calibration is None))
    together = Together(train.paths)
    own = 1 if calibration == 0 else 2  # splits that are still to be drawn
    if test is None:

        def tested(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return hold_out_share(labels, TEST_SHARE, seed, "test", names)

        train, test = together.parted(train, tested, own + 1)

    def held_out(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if calibration is None:
            return hold_out_share(labels, CALIBRATION_SHARE, seed, "calibration", names)
        return hold_out(labels, calibration, seed, "calibration", names)

    train, held = together.parted(train, held_out, own)
    splits = {"train": train, "calibration": held, "test": test}
    return FolderListing(names, splits, with_copies_together(identity) if together.moved else identity, ignored)


def with_copies_together(identity: str) -> str:
    """The identity of the same files where copies of a photo were kept on one side: other photos are held out then."""
    return short_digest([identity, "copies"])


class Together:
    """Holds files out so that copies of a photo stay on one side; `moved` says whether any had to be."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.photo = dict(zip(paths, first_twins(paths).tolist(), strict=True))  # a number that copies share
        self.moved = False

    def parted(
        self, files: FileSplit, hold_out: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], splits: int
    ) -> tuple[FileSplit, FileSplit]:
        """(kept, held out): drawn among photos that differ, by their labels; copies go where their first one goes.

        `splits` are the files for in the end; a class needs as many different photos.
        """
        first = self._first(files, splits)
        different = np.flatnonzero(first == np.arange(len(first)))
        held = np.isin(first, different[hold_out(files.labels[different])[1]])
        self.moved |= bool(held.any()) and len(different) < len(first)
        return files.take(np.flatnonzero(~held)), files.take(np.flatnonzero(held))

    def _first(self, files: FileSplit, splits: int) -> np.ndarray:
        """The place of each file's first copy; its own in a class with too few different photos to be split."""
        _, firsts, photos = np.unique([self.photo[p] for p in files.paths], return_index=True, return_inverse=True)
        different = np.bincount(files.labels[firsts], minlength=files.labels.max(initial=0) + 1)
        return np.where(different[files.labels] < splits, np.arange(len(photos)), firsts[photos])


def first_twins(paths: Sequence[Path]) -> np.ndarray:
    """Of each file the place of the first with the same content: its own, unless it is a copy.

    Of too many files each is taken for one of its own.
    """
    found = np.arange(len(paths))
    if len(paths) > MOST_COMPARED:
        return found
    lengths = [length_of(path) for path in paths]
    shared = Counter(lengths)
    known: dict[tuple[int | Path, str], int] = {}
    for place, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        if shared[length] > 1:
            found[place] = known.setdefault((length, content_of(path)), place)
    return found


def length_of(path: Path) -> int | Path:
    """The bytes of a file; one that is not there, as at the end of a broken link, is as long as no other."""
    try:
        return path.stat().st_size
    except OSError:
        return path


def content_of(path: Path) -> str:
    """A digest that copies share; a file that may not be opened is like no other."""
    try:
        about = path.stat()
        return _content(path, about.st_size, about.st_mtime_ns)
    except OSError:
        return str(path)


@lru_cache(maxsize=MOST_COMPARED)
def _content(path: Path, length: int, changed: int) -> str:
    """Read once: a folder is listed several times in a process."""
    return sha256(path)


def refuse_small_classes(root: Path, files: FileSplit, names: Sequence[str], least: int) -> None:
    """Every class must have an image for every split that is taken out of these files."""
    counts = np.bincount(files.labels, minlength=len(names))
    small = [f"{names[c]!r} has {counts[c]}" for c in np.flatnonzero(counts < least).tolist()]
    if small:
        more = f" and {len(small) - EXAMPLES} more classes" if len(small) > EXAMPLES else ""
        raise ValueError(
            f"{root}: each class needs at least {least} image{'s'[: least - 1]}, one for each split; "
            f"{', '.join(small[:EXAMPLES])}{more}. Add some, or take the class out"
        )


def doubt_classes(root: Path, names: Sequence[str]) -> None:
    """Folders that must be splits are refused as classes; where they may be, that is said."""
    inside = {name: set(class_folders(root / name)) - {name} for name in names}
    shared = sorted(inner for inner, count in Counter(i for own in inside.values() for i in own).items() if count > 1)
    for name, own in inside.items():
        if own and (own <= set(names) or (name.casefold() in SPLITS and own & set(shared))):
            raise ValueError(
                f"{root} would have the class {name!r}, which holds folders that look like classes "
                f"({', '.join(sorted(own)[:EXAMPLES])}); put the images to learn from under train/CLASS/ and those to "
                "test on under test/CLASS/, or take the folder out"
            )
    called = [name for name in names if name.casefold() in SPLITS]
    if called:
        say_once(root, f"{root / called[0]} is taken as a class; it would be a split beside a folder train/")
    elif len(shared) > 1:
        some = ", ".join(shared[:EXAMPLES])
        say_once(
            root,
            f"classes of {root} hold folders of the same names ({some}); if these are the classes, put them under "
            "train/ and test/",
        )


def folder_layout(data_dir: str | Path | None, known: Collection[str] = ()) -> Layout:
    """How a folder says what its images show; `known` are classes that a lone folder may be one of."""
    root = existing_folder(data_dir)
    with permitted():
        ignored = Ignored()
        top = _inside_wrappers(root, known, ignored)
        train_root, test_root = _split_roots(top, known, ignored)
        names = class_folders(train_root)
        table = None
        if not _are_classes(names, known):
            table = read_label_table(top, ignored.note) or read_label_table(train_root, ignored.note)
        if table is not None:
            names, train_root, test_root = table.class_names, table.root, None
            ignored.note("images without a label", table.unlisted)
        refuse_same_words(train_root, names)
        if table is None:
            _note_beside(top, train_root, test_root, ignored)
        return Layout(top, train_root, test_root, names, table, ignored)


def _are_classes(names: Sequence[str], known: Collection[str]) -> bool:
    """Whether folders of these names are classes, whatever lies beside them: two or more, or known; not `images`."""
    if set(names) <= set(known):
        return bool(names)
    return len(names) > 1 and not {name.casefold() for name in names} <= {"images", *TEST_FOLDERS}


def existing_folder(data_dir: str | Path | None) -> Path:
    """The folder, if it is one."""
    if data_dir is None:
        raise ValueError("imagefolder needs a folder with a folder per class: name it with --data-dir")
    if not Path(data_dir).is_dir():
        raise ValueError(f"{data_dir} is not there; imagefolder needs a folder with a folder per class")
    return Path(data_dir)


def _inside_wrappers(root: Path, known: Collection[str], ignored: Ignored) -> Path:
    """The folder itself, or what it wraps: a lone folder of folders, as archives unpack to; an image may lie beside."""
    for _ in range(3):
        folders = class_folders(root)
        if len(folders) != 1 or folders[0] in known or folders[0].casefold() == "train" or _holds_images(root):
            return root
        inner = root / folders[0]
        if not class_folders(inner) or _holds_images(inner):
            return root
        _note_files(root, ignored)
        root = inner
    return root


def _holds_images(folder: Path) -> bool:
    """Whether it has a table, or more than a stray image."""
    return sum(is_image_name(path.name) for path in folder.iterdir()) > 1 or (folder / LABELS).is_file()


def _named(root: Path, name: str) -> Path | None:
    """The folder of this name in another, whatever the case of its letters."""
    if (root / name).is_dir():
        return root / name
    return next((root / own for own in class_folders(root) if own.casefold() == name), None)


def _split_roots(top: Path, known: Collection[str], ignored: Ignored) -> tuple[Path, Path | None]:
    """Where the class folders of training and of the test split lie."""
    train = _named(top, "train")
    tests = [found for found in (_named(top, name) for name in TEST_FOLDERS) if found is not None]
    if train is None:
        if (top / "val").is_dir():
            raise ValueError(f"{top} has val/ but no train/; put the training images under train/CLASS/")
        return top, None
    inner = [(folder, _inside_wrappers(folder, known, ignored)) for folder in tests]
    usable = [(folder, own) for folder, own in inner if class_folders(own)]
    ignored.note("folders without classes", [folder for folder, own in inner if not class_folders(own)])
    if not class_folders(train):
        return train, None
    ignored.note("folders beside the one that is the test split", [folder for folder, _ in usable[1:]])
    return _inside_wrappers(train, known, ignored), usable[0][1] if usable else None


def _note_beside(top: Path, train_root: Path, test_root: Path | None, ignored: Ignored) -> None:
    """What lies on the way to the class folders: images with no class, other folders, an unused table."""
    for place in dict.fromkeys((top, train_root, test_root)):
        if place is not None:
            _note_files(place, ignored)
    beside = [name for name in class_folders(top) if name.casefold() not in ("train", *TEST_FOLDERS)]
    ignored.note("folders beside train/", beside if top != train_root else [])


def _note_files(place: Path, ignored: Ignored) -> None:
    """Files and hidden folders of a folder whose other folders are used."""
    for path in sorted(place.iterdir()):
        if not path.is_dir():
            ignored.note("images that lie in no class folder" if is_image_name(path.name) else _kind(path), [path])
        elif _is_hidden(path.name):
            ignored.note("hidden folders", [path])


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == MAC


def _kind(path: Path) -> str:
    """What a file is that is no image."""
    if path.name.startswith("."):
        return "hidden files"
    if path.suffix.lower() in HEIC_SUFFIXES:
        return f"HEIC photos, {heic_missing()}"
    return f"{LABELS}, as there are class folders" if path.name == LABELS else "files that are no images"


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, hidden ones left out."""
    with permitted():
        return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not _is_hidden(p.name)))


def refuse_same_words(root: Path, names: Sequence[str]) -> None:
    """Two classes that are one word in other cases are most likely one class: whoever has them says which."""
    seen: dict[str, str] = {}
    for name in names:
        word = unicodedata.normalize("NFC", name).casefold()
        if word in seen:
            raise ValueError(
                f"{root} has the classes {seen[word]!r} and {name!r}, which are the same word; put them together, or "
                "rename one of them"
            )
        seen[word] = name


def list_files(root: Path, names: tuple[str, ...], ignored: Ignored | None = None) -> FileSplit:
    """The images below `root/NAME`, labelled by the name's place."""
    ignored = Ignored() if ignored is None else ignored
    with permitted():
        strangers, missing = (
            sorted(set(class_folders(root)) - set(names)),
            sorted(set(names) - set(class_folders(root))),
        )
        if strangers:
            raise ValueError(f"{root} has the class {strangers[0]!r}, which the training folder does not have")
        if missing:
            raise ValueError(
                f"{root} has no folder for the class {missing[0]!r}, which the training folder has; put some of its "
                "images there, or take the class out"
            )
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(names):
            found = _images_below(root / name, ignored)
            paths += found
            labels += [label] * len(found)
    return FileSplit(tuple(paths), np.array(labels, np.int64), np.arange(len(paths)))


def _images_below(folder: Path, ignored: Ignored) -> list[Path]:
    """The images of a class, by their names; at least one."""
    found: list[Path] = []
    others: list[Path] = []
    for place, names in walk(folder):
        for name in names:
            (found if is_image_name(name) else others).append(Path(place, name))
    for path in sorted(others):
        ignored.note(_kind(path), [path])
    if not found:
        heic = any(path.suffix.lower() in HEIC_SUFFIXES for path in others)
        why = f"but HEIC photos, {heic_missing()}" if heic else f"({', '.join(sorted(SUFFIXES))})"
        raise ValueError(f"{folder} holds no images {why}")
    return sorted(found)


def most_unreadable(images: int) -> int:
    """How many of a folder's images are passed over; with more, something is wrong with the folder."""
    return max(min(ALWAYS_ALLOWED, images // 10), 1, int(ALLOWED_UNREADABLE * images))


class Unreadable:
    """Counts the unreadable images of a folder, each once, and stops the run when there are too many."""

    def __init__(self, images: int, max_pixels: int) -> None:
        self.images, self.max_pixels = images, max_pixels  # of the whole folder, whichever split they are in
        self.paths: dict[Path, str] = {}  # and why

    def note(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self.paths:
                self.paths[path] = self._why(path)
                log.warning("unreadable image passed over (%d so far): %s: %s", len(self.paths), path, self.paths[path])
        if len(self.paths) > most_unreadable(self.images):
            last, why = list(self.paths.items())[-1]
            raise ValueError(
                f"{len(self.paths)} of {self.images:,} images are unreadable, more than the "
                f"{most_unreadable(self.images):,} that are passed over; the last one is {last}: {why}. Repair or "
                "remove them before training, or allow larger ones with data.max_pixels"
            )

    def _why(self, path: Path) -> str:
        """A worker found it unreadable; here it is tried once more, for the reason."""
        try:
            read_image(path, self.max_pixels)
        except UnreadableImage as error:
            return str(error)
        return "it could not be read a moment ago"
