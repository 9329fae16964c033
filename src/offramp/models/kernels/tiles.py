"""How convolutions are cut up: what was fastest on an H200 over the layers of MSDNet (docs/performance.md)."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from offramp.models.kernels.maps import MULTIPROCESSORS, power_of_two


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut up: rows, columns and depth of a tile, warps, loads under way, programs for all tiles."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int
    room: int = 0  # channels of a tap, where all taps of a row are taken together

    def constants(self, bytes_each: int) -> dict[str, int]:
        """For maps whose elements take so many bytes; of large ones only one load is under way, or memory ran out."""
        shape = {"BM": self.rows, "BN": self.columns, "BK": self.depth, "ROOM": self.room}
        return shape | {"num_warps": self.warps, "num_stages": self.stages if bytes_each <= 2 else 1}


def together(inner: int, size: int) -> int:
    """The room of a tap in eights of channels, if there are so few that a row of taps makes one step; else 0."""
    room = triton.cdiv(inner, 8) * 8
    return room if size == 3 and room <= 16 else 0


def conv_tiles(inner: int, outer: int, size: int, pair: bool) -> Tiles:
    """For a convolution forwards, or along tangents (`pair`)."""
    columns = power_of_two(outer, 16, 64)
    if few := together(inner, size):
        return Tiles(128, columns, 4 * few, 4, 1, 4 * MULTIPROCESSORS, few)
    if columns < 64:
        deep = size > 1 and (columns == 32 or inner > 32)
        programs = (4 if columns == 16 else 2) * MULTIPROCESSORS
        return Tiles(128, columns, power_of_two(inner, 16, 32), 4, 3 if deep else 1, programs)
    if size > 1:
        return Tiles(64, columns, power_of_two(inner, 16, 64), 4, 3, 2 * MULTIPROCESSORS)
    if pair and outer > 64:
        return Tiles(64, columns, power_of_two(inner, 16, 32), 4, 3, 2 * MULTIPROCESSORS)
    return Tiles(128, columns, power_of_two(inner, 16, 32 if pair else 64), 4, 1, 2 * MULTIPROCESSORS)


def transposed_tiles(inner: int, outer: int, size: int) -> Tiles:
    """For the gradient of a convolution's input."""
    columns = power_of_two(outer, 16, 64)
    if few := together(inner, size):
        return Tiles(128, columns, 4 * few, 4, 1, 8 * MULTIPROCESSORS, few)
    if size > 1:
        return Tiles(128, columns, power_of_two(inner, 16, 64), 4, 3 if columns == 64 else 1, 8 * MULTIPROCESSORS)
    depth, stages = (32, 3) if inner > 64 else (power_of_two(inner, 16, 64), 1)
    return Tiles(128, columns, depth, 4, stages, 8 * MULTIPROCESSORS)


def filter_tiles(inner: int, outer: int, size: int) -> Tiles:
    """For the gradient of its filter."""
    columns, depth = power_of_two(outer, 16, 128), power_of_two(inner, 16, 64)
    if few := together(inner, size):
        return Tiles(128, columns, 4 * few, 4, 1, 8 * MULTIPROCESSORS, few)
    if columns >= 64:
        return Tiles(64, columns, depth, 4, 3, 2 * MULTIPROCESSORS)
    return Tiles(128, columns, depth, 4, 1, (4 if size == 1 else 8) * MULTIPROCESSORS)
