"""Convolutions as implicit matrix products: forwards, for gradients, for tangents, all by one kernel.

It sums up what BatchNorm needs on the way: partial sums per program, which are added up in a fixed order later, so that
results repeat bit for bit. Taps are the filter's places, `inner` channels are summed over, `outer` ones come out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offramp.models.kernels.geometry import depth_at, places, sides, taps, under
from offramp.models.kernels.maps import eights, join, kernel, row_stride, split, write_sums
from offramp.models.kernels.tiles import conv_tiles, transposed_tiles

IN_EIGHTS = tl.constexpr(2)  # how a map to add lies in memory
NO_SUMS, SQUARES, ALONG = 0, 1, 2  # what is summed up of a result: nothing; it and its squares; it, and along a map


@triton.jit
def _add_product(
    acc,
    x,
    w,
    row_x8,
    row_w8,
    pixel,
    pixel_ok,
    tap,
    channel,
    deep_ok,
    cols,
    inner,
    outer,
    TAPS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Add to a tile of the result what some of the depth contributes: channels under one tap, or under several."""
    a = tl.load(x + pixel * (row_x8 * 8) + channel[None, :], mask=pixel_ok & deep_ok[None, :], other=0.0)
    if TRANSPOSED:
        place = (channel * TAPS + tap)[:, None] * (row_w8 * 8) + cols[None, :]
        ok = (deep_ok & (channel < inner))[:, None] & (cols < row_w8 * 8)[None, :]
    else:
        place = (tap * (row_w8 * 8) + channel)[:, None] + (cols * TAPS * (row_w8 * 8))[None, :]
        ok = deep_ok[:, None] & (cols < outer)[None, :]
    return tl.dot(a, tl.load(w + place, mask=ok, other=0.0), acc, input_precision="ieee")


@triton.jit
def _product(
    x,
    w,
    x2,
    w2,
    rows,
    image,
    top,
    left,
    row_ok,
    cols,
    py,
    px,
    inner,
    outer,
    row_x8,
    row_x28,
    row_w8,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PAIR: tl.constexpr,
    ROOM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of x * w (+ x2 * w2): the sum over the taps that its pixels lie under, and over all inner channels."""
    FOLD: tl.constexpr = STRIDE if TRANSPOSED else 1
    first_y, count_y = taps(py, SIZE, FOLD)
    first_x, count_x = taps(px, SIZE, FOLD)
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(count_y if ROOM else count_y * count_x * tl.cdiv(inner, BK)):
        down, tx, channel, deep_ok = depth_at(step, first_x, count_x, inner, FOLD, ROOM, BK)
        ty = first_y + down * FOLD
        pixel, ok = under(rows, image, top, left, ty, tx, HEIGHT, WIDTH, SIZE, STRIDE, TRANSPOSED)
        ok, tap = ok & row_ok[:, None], ty * SIZE + tx
        acc = _add_product(
            acc, x, w, row_x8, row_w8, pixel, ok, tap, channel, deep_ok, cols, inner, outer, SIZE * SIZE, TRANSPOSED
        )  # fmt: skip
        if PAIR:
            acc = _add_product(
                acc, x2, w2, row_x28, row_w8, pixel, ok, tap, channel, deep_ok, cols, inner, outer, SIZE * SIZE,
                TRANSPOSED,
            )  # fmt: skip
    return acc


@kernel
def _conv(
    x,
    w,
    x2,
    w2,
    y,
    along,
    mean,
    inverse_std,
    plus,
    sums,
    rows_total: int,
    tiles_each: int,
    inner: int,
    outer: int,
    row_x8: int,
    row_x28: int,
    row_w8: int,
    row_y8: int,
    row_along8: int,
    row_plus: int,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PAIR: tl.constexpr,
    SUMS: tl.constexpr,
    PLUS: tl.constexpr,
    ROOM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = x * w (+ x2 * w2) (+ a map, PLUS): rows of y in tiles of BM, its channels in tiles of BN.

    Transposed, only pixels of one parity share a tile: they lie under the same taps, a quarter of them at stride 2.
    """
    FOLD: tl.constexpr = STRIDE if TRANSPOSED else 1
    program, column, parity = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    py, px = parity // FOLD, parity % FOLD
    cols = column * BN + tl.arange(0, BN)
    col_ok = cols < outer
    first = tl.zeros([BM, BN], tl.float32)
    second = tl.zeros([BM, BN], tl.float32)
    if SUMS == 2:
        mu = tl.load(mean + cols, mask=col_ok, other=0.0)
        inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        image, top, left = places(rows, py, px, OUT_HEIGHT, OUT_WIDTH, FOLD)
        row_ok = rows < rows_total
        own = rows
        if FOLD > 1:
            row_ok = row_ok & (top < OUT_HEIGHT) & (left < OUT_WIDTH)
            own = (image * OUT_HEIGHT + top) * OUT_WIDTH + left
        acc = _product(
            x, w, x2, w2, rows, image, top, left, row_ok, cols, py, px, inner, outer, row_x8, row_x28, row_w8,
            HEIGHT, WIDTH, SIZE, STRIDE, TRANSPOSED, PAIR, ROOM, BM, BN, BK,
        )  # fmt: skip
        here = row_ok[:, None] & (cols < row_y8 * 8)[None, :]  # what lies between rows is zero
        if PLUS:
            step_plus = row_plus * 8 if PLUS == IN_EIGHTS else row_plus
            at = plus + own[:, None] * step_plus + cols[None, :]
            acc += tl.load(at, mask=row_ok[:, None] & col_ok[None, :], other=0.0).to(tl.float32)
        rounded = acc.to(y.dtype.element_ty)
        tl.store(y + own[:, None] * (row_y8 * 8) + cols[None, :], rounded, mask=here)
        if SUMS > 0:
            value = rounded.to(tl.float32)  # zero where there is no row
            first += value
            if SUMS == 1:
                second += value * value
            else:
                before = tl.load(along + own[:, None] * (row_along8 * 8) + cols[None, :], mask=here, other=0.0)
                second += value * ((before.to(tl.float32) - mu[None, :]) * inv[None, :])
    if SUMS > 0:
        write_sums(sums, first, second, program, cols, outer)


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
    plus: Tensor | None = None,
) -> Tensor | None:
    """Write x * weight (+ the same of `pair`) to y; give partial sums [programs, 2, channels] if asked for.

    Filters are maps too, in x's precision (`as_filter`).

    Transposed: x is the gradient of a convolution's output, y becomes that of its input. `along`: a map with mean and
    inverse deviation, for sums with that map normalised. `plus`: a map to add.
    """
    out_channels, in_channels, size, _ = weight.shape
    inner, outer = (out_channels, in_channels) if transposed else (in_channels, out_channels)
    fold = stride if transposed else 1
    rows = len(y) * triton.cdiv(y.shape[2], fold) * triton.cdiv(y.shape[3], fold)
    shape = inner, outer, size
    tiles = transposed_tiles(*shape) if transposed else conv_tiles(*shape, pair is not None)
    columns = triton.cdiv(outer, tiles.columns)
    programs, each = split(rows, tiles.rows, columns * fold * fold, tiles.programs)
    partial = torch.empty(programs, 2, outer, device=y.device) if sums else None
    other, weight2 = pair or (x, weight)
    seen, mean, inverse_std = along or (y, y, y)
    row_plus, plus_eights = (0, False) if plus is None else eights(plus)
    _conv[(programs, columns, fold * fold)](
        x, weight, other, weight2, y, seen, mean, inverse_std, y if plus is None else plus,
        y if partial is None else partial,
        rows, each, inner, outer, *(row_stride(m) // 8 for m in (x, other, weight, y, seen)), row_plus,
        **sides(x, y, size, stride), TRANSPOSED=transposed, PAIR=pair is not None, SUMS=sums,
        PLUS=0 if plus is None else 1 + plus_eights, **tiles.constants(x.element_size()),
    )  # fmt: skip
    return partial


def as_filter(weight: Tensor, like: Tensor) -> Tensor:
    """A filter laid out as a map, in the precision of the maps it meets."""
    return join([weight.contiguous(memory_format=torch.channels_last)], like.dtype)
