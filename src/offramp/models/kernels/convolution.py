"""Convolutions as implicit matrix products: forwards, for gradients, for tangents, and the filter's gradient.

One kernel does the first three. It sums up what BatchNorm needs on the way: partial sums per program, which are added
up in a fixed order later, so that results repeat bit for bit. Taps are the filter's places, `inner` channels are summed
over, `outer` ones come out; the depth is taps x inner channels, in eights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offramp.models.kernels.maps import PROGRAMS, count_rows, power_of_two, row_stride, split

NO_SUMS, SQUARES, ALONG = 0, 1, 2  # what is summed up of a result: nothing; it and its squares; it, and along a map


@triton.jit
def _along_depth(k, inner8, SIZE: tl.constexpr, INNER8: tl.constexpr):
    """Tap and channel of places along the depth: tap by tap, the channels of a tap in eights."""
    if SIZE == 1:
        return tl.where(k < inner8 * 8, 0, 1), k
    tap = k // 8 // INNER8
    return tap, (k // 8 - tap * INNER8) * 8 + k % 8


@triton.jit
def _read(
    x,
    row_x8,
    rows,
    tap,
    channel,
    row_ok,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """What rows of the result read of the map x under each tap and channel, [rows, depth]; outside the map zeros."""
    image = rows // (OUT_HEIGHT * OUT_WIDTH)
    top = rows // OUT_WIDTH % OUT_HEIGHT
    left = rows % OUT_WIDTH
    if TRANSPOSED:
        down = top[:, None] + (SIZE // 2 - tap // SIZE)[None, :]
        right = left[:, None] + (SIZE // 2 - tap % SIZE)[None, :]
        ok = (down >= 0) & (right >= 0) & (down % STRIDE == 0) & (right % STRIDE == 0)
        down = down // STRIDE
        right = right // STRIDE
        ok = ok & (down < HEIGHT) & (right < WIDTH)
    else:
        down = top[:, None] * STRIDE + (tap // SIZE - SIZE // 2)[None, :]
        right = left[:, None] * STRIDE + (tap % SIZE - SIZE // 2)[None, :]
        ok = (down >= 0) & (down < HEIGHT) & (right >= 0) & (right < WIDTH)
    ok = ok & row_ok[:, None] & (tap < SIZE * SIZE)[None, :]
    pixel = (image[:, None] * HEIGHT + down) * WIDTH + right
    return tl.load(x + pixel * (row_x8 * 8) + channel[None, :], mask=ok, other=0.0)


@triton.jit
def _weights(w, w_outer, w_tap, w_inner, tap, channel, cols, inner, outer, TAPS: tl.constexpr):
    """The filter under each tap and channel for columns of the result, [depth, columns]; beyond its channels zeros."""
    ok = ((tap < TAPS) & (channel < inner))[:, None] & (cols < outer)[None, :]
    return tl.load(w + (tap * w_tap + channel * w_inner)[:, None] + cols[None, :] * w_outer, mask=ok, other=0.0)


@triton.jit
def _add_product(
    acc,
    x,
    w,
    row_x8,
    w_outer,
    w_tap,
    w_inner,
    rows,
    row_ok,
    tap,
    channel,
    cols,
    inner,
    outer,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Add to a tile of the result what some of the depth contributes."""
    a = _read(x, row_x8, rows, tap, channel, row_ok, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, TRANSPOSED)
    b = _weights(w, w_outer, w_tap, w_inner, tap, channel, cols, inner, outer, SIZE * SIZE)
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


@triton.jit
def _conv(
    x,
    w,
    x2,
    w2,
    y,
    along,
    mean,
    inverse_std,
    sums,
    rows_total,
    tiles_each,
    inner,
    outer,
    row_x8,
    row_x28,
    row_y8,
    row_along8,
    w_outer,
    w_tap,
    w_inner,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    INNER8: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PAIR: tl.constexpr,
    SUMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = x * w (+ x2 * w2): rows of y in tiles of BM, its channels in tiles of BN."""
    program, column = tl.program_id(0), tl.program_id(1)
    cols = column * BN + tl.arange(0, BN)
    col_ok = cols < outer
    inner8 = (inner + 7) // 8
    first = tl.zeros([BM, BN], tl.float32)
    second = tl.zeros([BM, BN], tl.float32)
    if SUMS == 2:
        mu = tl.load(mean + cols, mask=col_ok, other=0.0)
        inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        row_ok = rows < rows_total
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, SIZE * SIZE * inner8 * 8, BK):
            tap, channel = _along_depth(start + tl.arange(0, BK), inner8, SIZE, INNER8)
            acc = _add_product(
                acc, x, w, row_x8, w_outer, w_tap, w_inner, rows, row_ok, tap, channel, cols, inner, outer,
                HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, TRANSPOSED,
            )  # fmt: skip
            if PAIR:
                acc = _add_product(
                    acc, x2, w2, row_x28, w_outer, w_tap, w_inner, rows, row_ok, tap, channel, cols, inner, outer,
                    HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, TRANSPOSED,
                )  # fmt: skip
        here = row_ok[:, None] & (cols < row_y8 * 8)[None, :]  # what lies between rows is zero
        rounded = acc.to(y.dtype.element_ty)
        tl.store(y + rows[:, None] * (row_y8 * 8) + cols[None, :], rounded, mask=here)
        if SUMS > 0:
            value = rounded.to(tl.float32)  # zero where there is no row
            first += value
            if SUMS == 1:
                second += value * value
            else:
                before = tl.load(along + rows[:, None] * (row_along8 * 8) + cols[None, :], mask=here, other=0.0)
                second += value * ((before.to(tl.float32) - mu[None, :]) * inv[None, :])
    if SUMS > 0:
        at = sums + program * 2 * outer + cols
        tl.store(at, tl.sum(first, axis=0), mask=col_ok)
        tl.store(at + outer, tl.sum(second, axis=0), mask=col_ok)


@triton.jit
def _filter_gradient(
    x,
    gradient,
    parts,
    rows_total,
    tiles_each,
    inner,
    outer,
    row_x8,
    row_gradient8,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    INNER8: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Partial sums over rows of gradient (outer channels, BN at a time) x input under each tap (BK at a time)."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inner8 = (inner + 7) // 8
    tap, channel = _along_depth(tl.program_id(2) * BK + tl.arange(0, BK), inner8, SIZE, INNER8)
    acc = tl.zeros([BN, BK], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        row_ok = rows < rows_total
        b = _read(
            x, row_x8, rows, tap, channel, row_ok, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, False
        )  # fmt: skip
        here = row_ok[:, None] & (cols < row_gradient8 * 8)[None, :]
        a = tl.load(gradient + rows[:, None] * (row_gradient8 * 8) + cols[None, :], mask=here, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    depth = SIZE * SIZE * inner
    ok = (cols < outer)[:, None] & ((tap < SIZE * SIZE) & (channel < inner))[None, :]
    at = parts + program * outer * depth + cols[:, None] * depth + (tap * inner + channel)[None, :]
    tl.store(at, acc, mask=ok)


def _constant(inner: int, size: int) -> int:
    """Eights of channels where a kernel must know them: under several taps; else 0, so that one serves all."""
    return triton.cdiv(inner, 8) if size > 1 else 0


def _tall(rows: int) -> int:
    """Rows of a tile: fewer where tall ones would leave multiprocessors idle."""
    return 128 if rows >= 128 * PROGRAMS // 2 else 64


def convolve(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    stride: int,
    *,
    pair: tuple[Tensor, Tensor] | None = None,
    transposed: bool = False,
    sums: int = NO_SUMS,
    along: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Write x * weight (+ the same of `pair`) to y; give partial sums [programs, 2, channels] if asked for.

    Transposed: x is the gradient of a convolution's output, y becomes that of its input. `along`: a map with mean and
    inverse deviation, for sums with that map normalised.
    """
    out_channels, in_channels, size, _ = weight.shape
    rows, outer = count_rows(y), y.shape[1]
    inner = out_channels if transposed else in_channels
    bm, bn, bk = _tall(rows), power_of_two(outer, 16, 64), power_of_two(size * size * triton.cdiv(inner, 8) * 8, 16, 64)
    columns = triton.cdiv(outer, bn)
    programs, tiles = split(rows, bm, columns)
    partial = torch.empty(programs, 2, outer, device=y.device) if sums else None
    depth = size * size * in_channels
    w_outer, w_inner = (1, depth) if transposed else (depth, 1)
    other, weight2 = pair or (x, weight)
    seen, mean, inverse_std = along or (y, y, y)
    _conv[(programs, columns)](
        x, weight, other, weight2, y, seen, mean, inverse_std, y if partial is None else partial,
        rows, tiles, inner, outer, *(row_stride(m) // 8 for m in (x, other, y, seen)), w_outer, in_channels, w_inner,
        HEIGHT=x.shape[2], WIDTH=x.shape[3], OUT_HEIGHT=y.shape[2], OUT_WIDTH=y.shape[3], SIZE=size, STRIDE=stride,
        INNER8=_constant(inner, size), TRANSPOSED=transposed, PAIR=pair is not None, SUMS=sums, BM=bm, BN=bn, BK=bk,
        num_warps=4 if bn == 16 else 8, num_stages=1,
    )  # fmt: skip
    return partial


def filter_gradient(x: Tensor, gradient: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the filter, float32, laid out as the filter is."""
    out_channels, in_channels, size, _ = weight.shape
    rows, depth8 = count_rows(gradient), size * size * triton.cdiv(in_channels, 8) * 8
    bm, bn, bk = _tall(rows), power_of_two(out_channels, 16, 64), power_of_two(depth8, 16, 64)
    columns, blocks = triton.cdiv(out_channels, bn), triton.cdiv(depth8, bk)
    programs, tiles = split(rows, bm, columns * blocks)
    parts = torch.empty(programs, out_channels, size, size, in_channels, device=x.device)
    _filter_gradient[(programs, columns, blocks)](
        x, gradient, parts, rows, tiles, in_channels, out_channels, row_stride(x) // 8, row_stride(gradient) // 8,
        HEIGHT=x.shape[2], WIDTH=x.shape[3], OUT_HEIGHT=gradient.shape[2], OUT_WIDTH=gradient.shape[3],
        SIZE=size, STRIDE=stride, INNER8=_constant(in_channels, size), BM=bm, BN=bn, BK=bk,
        num_warps=4 if bn == 16 else 8, num_stages=2,
    )  # fmt: skip
    return parts.sum(0).permute(0, 3, 1, 2)
