"""The gradient of a convolution's filter: partial sums over pixels, added up in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offramp.models.kernels.geometry import depth_at, places, sides, under
from offramp.models.kernels.maps import count_rows, kernel, power_of_two, row_stride, split
from offramp.models.kernels.tiles import filter_tiles


@kernel
def _filter_gradient(
    x,
    gradient,
    parts,
    rows_total: int,
    tiles_each: int,
    inner: int,
    outer: int,
    row_x8: int,
    row_gradient8: int,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ROOM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Partial sums over rows of gradient (outer channels, BN at a time) x input (some of the depth at a time)."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ty, tx, channel, deep_ok = depth_at(tl.program_id(2), 0, SIZE, inner, 1, ROOM, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        row_ok = rows < rows_total
        image, top, left = places(rows, 0, 0, OUT_HEIGHT, OUT_WIDTH, 1)
        pixel, ok = under(rows, image, top, left, ty, tx, HEIGHT, WIDTH, SIZE, STRIDE, False)
        mask = ok & row_ok[:, None] & deep_ok[None, :]
        b = tl.load(x + pixel * (row_x8 * 8) + channel[None, :], mask=mask, other=0.0)
        here = row_ok[:, None] & (cols < row_gradient8 * 8)[None, :]
        a = tl.load(gradient + rows[:, None] * (row_gradient8 * 8) + cols[None, :], mask=here, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    depth = SIZE * SIZE * inner
    ok = (cols < outer)[:, None] & (deep_ok & (channel < inner))[None, :]
    at = parts + program * outer * depth + cols[:, None] * depth + ((ty * SIZE + tx) * inner + channel)[None, :]
    tl.store(at, acc, mask=ok)


@kernel
def _total(parts, total, count: int, elements: int, BP: tl.constexpr, BC: tl.constexpr):
    """The sum of so many parts, in a fixed order."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    acc = tl.zeros([BP, BC], tl.float32)
    for start in range(0, count, BP):
        rows = start + tl.arange(0, BP)
        ok = (rows < count)[:, None] & (cols < elements)[None, :]
        acc += tl.load(parts + rows[:, None] * elements + cols[None, :], mask=ok, other=0.0)
    tl.store(total + cols, tl.sum(acc, axis=0), mask=cols < elements)


def filter_gradient(x: Tensor, gradient: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the filter, float32, laid out as the filter is."""
    out_channels, in_channels, size, _ = weight.shape
    rows = count_rows(gradient)
    tiles = filter_tiles(in_channels, out_channels, size)
    columns = triton.cdiv(out_channels, tiles.columns)
    blocks = size if tiles.room else size * size * triton.cdiv(in_channels, tiles.depth)
    programs, each = split(rows, tiles.rows, columns * blocks, tiles.programs)
    parts = torch.empty(programs, out_channels, size, size, in_channels, device=x.device)
    _filter_gradient[(programs, columns, blocks)](
        x, gradient, parts, rows, each, in_channels, out_channels, row_stride(x) // 8, row_stride(gradient) // 8,
        **sides(x, gradient, size, stride), **tiles.constants(x.element_size()),
    )  # fmt: skip
    total = torch.empty_like(parts[0])
    tall = power_of_two(programs, 8, 128)
    wide = 4096 // tall
    _total[(triton.cdiv(total.numel(), wide),)](parts, total, programs, total.numel(), BP=tall, BC=wide)
    return total.permute(0, 3, 1, 2)
