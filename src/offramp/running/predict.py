"""`offramp predict`: many images through a bundle in throughput mode, a row of results each.

Paths go in; rows come out in the order of the paths. Images are decoded by threads while the network runs; an
image that cannot be read is a row that says so. Images that are no files come with their paths (`ImageSource`).
"""

from __future__ import annotations

import glob
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.console import progress
from offramp.common.files import write_bytes
from offramp.common.formatting import Table, millions, to_csv
from offramp.common.images import MAX_PIXELS, UnreadableImage, image_files
from offramp.measuring.policy import Policy
from offramp.running.bundle import Bundle
from offramp.running.pool import Left, Pool, Ticket
from offramp.running.runtime import ceiling

DECODERS = 4
ImageSource = str | bytes | Callable[[], bytes]  # a path, an encoded image, or what fetches one
WAIT_S = 30.0  # longest that a sample waits for a full batch; at the end of the stream nobody waits


@dataclass(frozen=True)
class Row:
    """What became of one path: an answer, or the reason why there is none."""

    path: str
    label: str | None = None
    confidence: float | None = None
    exit: int | None = None
    mul_adds: int | None = None
    forced: bool | None = None
    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """What became of all of them."""

    rows: tuple[Row, ...]
    shares: tuple[float, ...]
    saved: float
    images_per_s: float

    @property
    def unreadable(self) -> int:
        return sum(row.error is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unreadable": self.unreadable}

    def __str__(self) -> str:
        done = len(self.rows) - self.unreadable
        shares = "  ".join(f"exit {k}: {100 * share:.1f} %" for k, share in enumerate(self.shares, 1))
        saved = f"{100 * self.saved:.1f} % of the compute saved"
        text = f"{done:,} images, {self.images_per_s:,.0f} images/s; {saved}\n{shares}"
        return f"{text}\n{self.unreadable:,} could not be read" if self.unreadable else text


def expand(words: Iterable[str]) -> list[str]:
    """Files, folders (searched for images), globs, and `-` for a list on standard input, as paths."""
    found: list[str] = []
    words = list(words)
    if len(words) == 1 and words[0] != "-" and not glob.has_magic(words[0]) and not Path(words[0]).exists():
        raise ValueError(f"{words[0]} is not there")
    for word in words:
        if word == "-":
            found += [line.strip() for line in sys.stdin if line.strip()]
        elif Path(word).is_dir():
            if not _inside(word):
                raise ValueError(f"{word} holds no images")
            found += _inside(word)
        elif glob.has_magic(word) and not Path(word).exists():
            matches = sorted(glob.glob(word, recursive=True))
            if not matches:
                raise ValueError(f"nothing matches {word}")
            found += [path for match in matches for path in _inside(match)]
        else:
            found.append(word)
    if not found:
        raise ValueError("no images were given")
    return found


def _inside(word: str) -> list[str]:
    """The images in a folder; a file is itself."""
    if not Path(word).is_dir():
        return [word]
    return [str(path) for path in image_files(Path(word))]


def predict(
    bundle: Bundle,
    paths: Sequence[str],
    *,
    policy: Policy | None = None,
    batch: int = 64,
    max_exit: int | None = None,
    max_mul_adds: float | None = None,
    max_pixels: int = MAX_PIXELS,
    images: Iterable[ImageSource] | None = None,
    decoders: int = DECODERS,
    silent: bool = False,
) -> Summary:
    """Classify the images at `paths`; one with more than `max_pixels` is not read.

    `images`, one for each path, are read instead where they are given: a few batches ahead, by so many `decoders`.
    """
    rows: dict[int, Row] = {}
    last = ceiling(bundle.costs, max_exit, max_mul_adds)
    pool = Pool(bundle.engine, policy or bundle.policies.policy, batch, WAIT_S)
    began = time.perf_counter()
    with progress("predicting", len(paths), silent=silent) as bar:

        def note(left: Iterable[Left]) -> None:
            for one in left:
                rows[one.ticket.key] = _row(bundle, paths[one.ticket.key], one)
                bar.advance(1, 1)

        for chunk in _decoded(bundle, paths if images is None else images, batch, max_pixels, decoders):
            for number, why in chunk.unreadable.items():
                rows[number] = Row(paths[number], error=why)
            bar.advance(len(chunk.unreadable), 0)
            if chunk.numbers:
                pool.add(chunk.images, [Ticket(number, last) for number in chunk.numbers])
            while pool.ready():
                note(pool.work())
        while pool.waiting:
            note(pool.work(flush=True))
    return _summary(bundle, [rows[number] for number in range(len(paths))], time.perf_counter() - began)


@dataclass(frozen=True)
class _Chunk:
    """Some images in their order: the numbers of those that could be read, normalised, and why others could not."""

    numbers: list[int]
    images: np.ndarray
    unreadable: dict[int, str]


def _decoded(
    bundle: Bundle, sources: Iterable[ImageSource], batch: int, max_pixels: int, decoders: int
) -> Iterator[_Chunk]:
    """Images in chunks of a batch, decoded by threads ahead of whoever takes them."""
    own = bundle.card.preprocessing

    def decode(source: ImageSource) -> np.ndarray | UnreadableImage:
        try:
            return own.read(source() if callable(source) else source, max_pixels)
        except UnreadableImage as error:
            return error

    numbered = enumerate(sources)
    chunks = iter(lambda: list(islice(numbered, batch)), [])
    with ThreadPoolExecutor(decoders) as threads:

        def begun(count: int) -> Iterator[tuple[list[int], Future[list[np.ndarray | UnreadableImage]]]]:
            for chunk in islice(chunks, count):
                yield [n for n, _ in chunk], threads.submit(lambda c: [decode(source) for _, source in c], chunk)

        ahead = deque(begun(decoders))
        while ahead:
            numbers, decoding = ahead.popleft()
            found = dict(zip(numbers, decoding.result(), strict=True))
            ahead.extend(begun(1))
            good = {n: image for n, image in found.items() if isinstance(image, np.ndarray)}
            images = own.normalise(np.stack(list(good.values()))) if good else np.empty(0)
            yield _Chunk(list(good), images, {n: str(why) for n, why in found.items() if n not in good})


def _row(bundle: Bundle, path: str, left: Left) -> Row:
    name = bundle.classes[left.label] if bundle.classes else str(left.label)
    cost = bundle.costs[left.exit - 1]
    return Row(path, name, round(left.confidence, 6), left.exit, cost, left.forced)


def _summary(bundle: Bundle, rows: Sequence[Row], seconds: float) -> Summary:
    exits = np.array([row.exit for row in rows if row.exit is not None], np.int64)
    counts = np.bincount(exits, minlength=len(bundle.costs) + 1)[1:]
    done = max(len(exits), 1)
    spent = float(counts @ np.array(bundle.costs, np.float64)) / done
    saved = 1 - spent / bundle.costs[-1] if len(exits) else 0.0
    return Summary(tuple(rows), tuple((counts / done).tolist()), saved, len(exits) / seconds)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All rows as CSV or, with that suffix, as one JSON object per line; atomically."""
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    elif path.suffix == ".csv":
        columns = list(asdict(rows[0]))
        text = to_csv(columns, [["" if v is None else str(v) for v in asdict(row).values()] for row in rows])
    else:
        raise ValueError(f"results are written as .csv or .jsonl, not as {path.name}")
    write_bytes(path, text.encode(errors="surrogateescape"))  # file names are bytes, and need not be text


def result_table(rows: Sequence[Row]) -> Table:
    """Title, columns and rows for people."""
    cells = [
        [row.path, row.error, "", "", ""]
        if row.error is not None
        else [row.path, str(row.label), f"{row.confidence:.3f}", str(row.exit), millions(row.mul_adds or 0)]
        for row in rows
    ]
    return "Predictions", ["image", "label", "confidence", "exit", "mul-adds"], cells
