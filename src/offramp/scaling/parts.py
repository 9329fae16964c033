"""The folder that a large prediction writes: Parquet in parts, and a manifest that says what they are parts of.

A part holds a fixed range of the source's sorted keys. It is there whole or not at all, and its footer says how many of
its images left at each exit, so that a prediction that goes on counts what was finished without reading it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offramp.common.files import short_digest
from offramp.common.formatting import millions
from offramp.running.predict import Row
from offramp.scaling.places import joined, names_below, opened, read_all, remove, write_whole

MANIFEST = "_predict.json"  # with an underscore: whoever reads the folder as Parquet passes it over
NAME = re.compile(r"part-(\d{6})\.parquet")
HALF_WRITTEN = re.compile(r"\.+part-\d{6}\.parquet\..+")  # hidden, and followed by whose it is
FOOTER, PLAN = b"offramp", b"offramp.plan"
READERS = 16  # threads that read footers
SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "label": pa.string(),
        "confidence": pa.float32(),
        "exit": pa.int32(),
        "mul_adds": pa.int64(),
        "error": pa.string(),
    }
)


@dataclass(frozen=True)
class Plan:
    """What is predicted, as the manifest keeps it: whoever goes on must go on with the same."""

    bundle: str  # digest
    source: str  # digest of what was listed
    images: int
    part_images: int
    policy: str  # digest of measure and thresholds
    max_exit: int
    max_pixels: int

    @property
    def parts(self) -> int:
        return -(-self.images // self.part_images)

    def bounds(self, part: int) -> tuple[int, int]:
        """The numbers of a part's first image and of the one after its last."""
        return part * self.part_images, min((part + 1) * self.part_images, self.images)


@dataclass(frozen=True)
class PartCount:
    """What became of a part's images; the seconds are those of the call, from its first read to its file."""

    part: int
    exits: tuple[int, ...]
    unreadable: int
    seconds: float
    worker: str = ""
    ended: float = 0.0  # by the clock

    @property
    def images(self) -> int:
        return sum(self.exits) + self.unreadable

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> PartCount:
        value = json.loads(data)
        return PartCount(**{**value, "exits": tuple(value["exits"])})


@dataclass
class Totals:
    """What became of all images so far, and how fast those of this command were."""

    costs: tuple[int, ...]
    size: int
    exits: np.ndarray = field(init=False)
    unreadable: int = 0
    parts: int = 0
    new_images: int = 0  # done by this command, as are all below
    busy_s: float = 0.0  # of all workers together
    wall_s: float = 0.0
    start_s: float = 0.0  # until the first worker began
    workers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.exits = np.zeros(len(self.costs), np.int64)

    def add(self, count: PartCount, new: bool) -> None:
        self.exits += np.array(count.exits, np.int64)
        self.unreadable += count.unreadable
        self.parts += 1
        if new:
            self.new_images += count.images
            self.busy_s += count.seconds
            self.workers.add(count.worker)

    def note(self, count: PartCount, began: float) -> None:
        """Add a part that has just come; one that a worker of an earlier command wrote in the end is none of ours."""
        first, new = count.ended - count.seconds - began, count.ended > began
        if new:
            self.start_s = max(0.0, min(self.start_s, first) if self.new_images else first)
        self.add(count, new)

    @property
    def images(self) -> int:
        return int(self.exits.sum()) + self.unreadable

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple((self.exits / max(1, int(self.exits.sum()))).tolist())

    @property
    def mean_mul_adds(self) -> float:
        return float(self.exits @ np.array(self.costs, np.float64)) / max(1, int(self.exits.sum()))

    @property
    def images_per_s_of_a_worker(self) -> float:
        return self.new_images / self.busy_s if self.busy_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "unreadable": self.unreadable,
            "parts": self.parts,
            "exits": self.exits.tolist(),
            "shares": list(self.shares),
            "mean_mul_adds": self.mean_mul_adds,
            "new_images": self.new_images,
            "workers": len(self.workers),
            "images_per_s_of_a_worker": self.images_per_s_of_a_worker,
            "start_s": self.start_s,
            "wall_s": self.wall_s,
        }

    def shares_in_words(self) -> str:
        return "  ".join(f"exit {k}: {100 * share:.1f} %" for k, share in enumerate(self.shares, 1))

    def __str__(self) -> str:
        saved = 100 * (1 - self.mean_mul_adds / self.costs[-1]) if self.exits.any() else 0.0
        text = (
            f"{self.images:,} images in {self.parts:,} parts, {self.unreadable:,} of them could not be read\n"
            f"{self.shares_in_words()}\n"
            f"{millions(self.mean_mul_adds)} mul-adds per image, {saved:.1f} % of the compute saved"
        )
        return f"{text}\n{self.speed()}" if self.new_images else text

    def speed(self) -> str:
        """How fast the images of this command were."""
        rate = f"{self.images_per_s_of_a_worker:,.0f} images/s for each of {len(self.workers)} workers"
        return f"{self.new_images:,} images now: {rate}, after {self.start_s:.1f} s until the first began"


def part_name(part: int) -> str:
    return f"part-{part:06d}.parquet"


def to_parquet(rows: Sequence[Row], count: PartCount, plan: Plan) -> bytes:
    """A part as Parquet, with what became of its images in the footer."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        columns["key"].append(as_text(row.path))
        for name in SCHEMA.names[1:]:
            columns[name].append(getattr(row, name))
    about = {PLAN: plan_digest(plan).encode(), FOOTER: count.to_json()}
    table = pa.table(columns, SCHEMA).replace_schema_metadata(about)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def as_text(key: str) -> str:
    r"""A key as Parquet can hold it: bytes of a file's name that are no UTF-8 become \xff."""
    return os.fsencode(key).decode(errors="backslashreplace")


def plan_digest(plan: Plan) -> str:
    """A short name for exactly this plan."""
    return short_digest([json.dumps(asdict(plan), sort_keys=True)])


def read_count(out: str, part: int, plan: Plan) -> PartCount:
    """What a finished part's footer says; a file that is no part of this plan is a ValueError."""
    place = joined(out, part_name(part))
    try:
        with opened(place) as handle:
            metadata = pq.ParquetFile(handle).metadata
        own, count = metadata.metadata[PLAN].decode(), PartCount.from_json(metadata.metadata[FOOTER])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged; remove it and start again: the rest is kept") from error
    first, last = plan.bounds(part)
    if own != plan_digest(plan) or count.part != part or not metadata.num_rows == count.images == last - first:
        raise ValueError(f"{place} is no part of this prediction; remove it, or choose another --out")
    return count


def finished_parts(out: str, plan: Plan) -> dict[int, PartCount]:
    """The parts that are there, by their number, with what became of their images."""
    numbers = [int(found[1]) for name in names_below(out) if (found := NAME.fullmatch(name))]
    strange = [number for number in numbers if number >= plan.parts]
    if strange:
        raise ValueError(f"{joined(out, part_name(strange[0]))} is no part of this prediction; choose another --out")
    with ThreadPoolExecutor(READERS) as threads:
        counts = threads.map(lambda number: read_count(out, number, plan), numbers)
        return dict(zip(numbers, counts, strict=True))


def claim(out: str, plan: Plan, about: dict[str, Any]) -> None:
    """Write the manifest into a folder, or find that the one there is the same; another is a ValueError."""
    names = names_below(out)
    if MANIFEST not in names:
        if any(not name.startswith(".") for name in names):
            raise ValueError(f"{out} holds files but no {MANIFEST}; choose another --out")
        value = {"schema": 1, **about, "plan": asdict(plan)}
        write_whole(joined(out, MANIFEST), (json.dumps(value, indent=2) + "\n").encode())
        return
    try:
        there = json.loads(read_all(joined(out, MANIFEST)))["plan"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{joined(out, MANIFEST)} is damaged; choose another --out") from error
    for name, own in asdict(plan).items():
        if there.get(name) != own:
            raise ValueError(
                f"{out} holds a prediction with {_in_words(name)} {there.get(name)}, this one has {own}; "
                "repeat the command that began it, or choose another --out"
            )


def _in_words(name: str) -> str:
    words = {
        "bundle": "another bundle:",
        "source": "another source:",
        "images": "another number of images:",
        "part_images": "another --part-images:",
        "policy": "another policy:",
        "max_exit": "another last exit:",
        "max_pixels": "another --max-pixels:",
    }
    return words[name]


def check_whole(out: str, plan: Plan) -> None:
    """Raise if a part is missing; and remove what killed workers left half written. For when nobody writes any more."""
    names = names_below(out)
    for name in filter(HALF_WRITTEN.fullmatch, names):
        with suppress(FileNotFoundError):
            remove(joined(out, name))
    missing = plan.parts - sum(NAME.fullmatch(name) is not None for name in names)
    if missing:
        raise OSError(
            f"{missing:,} of {plan.parts:,} parts were written, but not into the {out} of this machine: the machines "
            "do not share it; choose an --out that all of them see under one name, or a store"
        )
