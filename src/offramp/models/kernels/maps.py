"""Maps: matrices with a row for each pixel (NHWC), whose rows begin at multiples of eight elements.

So eight channels are one load. The up to seven elements between rows are zero; every kernel that writes a map writes
them too. A tile is some rows and some columns (channels) of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132  # of an H200; other GPUs only wait a little longer for the last programs
SWEEP = 2048  # elements that one program of a sweep takes at a time


def kernel(run: Callable[..., None]) -> Any:
    """A kernel that is compiled once for each set of its constants: numbers (`int`) do not make another of it."""
    return triton.jit(run, do_not_specialize=[name for name, kind in run.__annotations__.items() if kind == "int"])


@triton.jit
def read_tile(x, rows, cols, row_x, rows_total, channels, EIGHTS: tl.constexpr):
    """A tile of a map as float32. EIGHTS: `row_x` counts eights, and what lies between rows may be read with them."""
    if EIGHTS:
        at = x + rows[:, None] * (row_x * 8) + cols[None, :]
        ok = (rows < rows_total)[:, None] & (cols < (channels + 7) // 8 * 8)[None, :]
    else:
        at = x + rows[:, None] * row_x + cols[None, :]
        ok = (rows < rows_total)[:, None] & (cols < channels)[None, :]
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def write_tile(x, value, rows, cols, row_x8, rows_total, channels):
    """Write a tile of a map, and zeros between rows: there `value` is zero."""
    ok = (rows < rows_total)[:, None] & (cols < (channels + 7) // 8 * 8)[None, :]
    tl.store(x + rows[:, None] * (row_x8 * 8) + cols[None, :], value.to(x.dtype.element_ty), mask=ok)


@triton.jit
def write_sums(sums, first, second, program, cols, channels):
    """Write a program's two partial sums over the rows of its tiles, [programs, 2, channels]."""
    at = sums + program * 2 * channels + cols
    tl.store(at, tl.sum(first, axis=0), mask=cols < channels)
    tl.store(at + channels, tl.sum(second, axis=0), mask=cols < channels)


@kernel
def _copy(
    source,
    target,
    rows_total: int,
    channels: int,
    row_source: int,
    row_target8: int,
    limit: int,
    EIGHTS: tl.constexpr,
    TO_EIGHTS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The source's channels, and zeros behind them: up to a multiple of eight if the target begins at one."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    value = read_tile(source, rows, cols, row_source, rows_total, channels, EIGHTS)
    value = tl.where((cols < channels)[None, :], value, 0.0)
    if TO_EIGHTS:
        write_tile(target, value, rows, cols, row_target8, rows_total, channels)
    else:
        ok = (rows < rows_total)[:, None] & (cols < limit)[None, :]
        at = target + rows[:, None] * (row_target8 * 8) + cols[None, :]
        tl.store(at, value.to(target.dtype.element_ty), mask=ok)


def row_stride(x: Tensor) -> int:
    """How far apart the pixels of an NHWC map lie in memory; 0 if it is not one, not even a slice of channels."""
    channels = x.shape[1]
    step = next((x.stride(d) // behind for d, size, behind in _dims(x) if size > 1), x.stride(3))
    fits = all(size == 1 or x.stride(d) == behind * step for d, size, behind in _dims(x))
    return step if fits and (channels == 1 or x.stride(1) == 1) else 0


def _dims(x: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Width, height and batch: dimension, size, and how many pixels one step along it is."""
    n, _, height, width = x.shape
    return (3, width, 1), (2, height, width), (0, n, height * width)


def as_rows(x: Tensor) -> Tensor:
    """The map itself if its pixels are rows, however far apart, else a copy whose are."""
    return x if row_stride(x) else x.contiguous(memory_format=torch.channels_last)


def as_map(x: Tensor) -> Tensor:
    """The map itself if its pixels are rows that begin at a multiple of eight elements, else a copy whose do."""
    return x if row_stride(x) and eights(x)[1] else join([x])


def eights(x: Tensor) -> tuple[int, bool]:
    """The row stride in eights, if rows begin at multiples of eight elements; else as it is."""
    row = row_stride(x)
    fits = row % 8 == 0 and x.storage_offset() % 8 == 0
    return (row // 8, True) if fits else (row, False)


def new_map(like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a map; kernels fill the up to seven channels between its rows with zeros."""
    room = triton.cdiv(channels, 8) * 8
    rows = torch.empty(len(like), height, width, room, dtype=dtype or like.dtype, device=like.device)
    return rows.permute(0, 3, 1, 2)[:, :channels]


def join(maps: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Maps of one size side by side. Each is written after the one before it, over the zeros behind that."""
    channels = [m.shape[1] for m in maps]
    joined = new_map(maps[0], sum(channels), maps[0].shape[2], maps[0].shape[3], dtype)
    rows, room, first = count_rows(joined), row_stride(joined), 0
    for own, count in zip(map(as_rows, maps), channels, strict=True):
        limit = room - first if first + count == sum(channels) else count
        block = power_of_two(limit, 8, 64)
        grid = triton.cdiv(rows, SWEEP // block), triton.cdiv(max(limit, triton.cdiv(count, 8) * 8), block)
        row, in_eights = eights(own)
        _copy[grid](
            own, joined[:, first:], rows, count, row, room // 8, limit,
            EIGHTS=in_eights, TO_EIGHTS=first % 8 == 0, BR=SWEEP // block, BC=block,
        )  # fmt: skip
        first += count
    return joined


def count_rows(x: Tensor) -> int:
    """Pixels of all images of a map."""
    return len(x) * x.shape[2] * x.shape[3]


def power_of_two(number: int, least: int, most: int) -> int:
    """The power of two from `number` up, within bounds."""
    return min(most, max(least, triton.next_power_of_2(number)))


def split(rows: int, tile: int, blocks: int, most: int) -> tuple[int, int]:
    """How many programs share the rows, with about `most` over all blocks, and how many tiles each takes."""
    tiles = triton.cdiv(rows, tile)
    each = triton.cdiv(tiles, max(1, most // blocks))
    return triton.cdiv(tiles, each), each
