"""Convolution, BatchNorm and ReLU on an H200-class GPU, as a few kernels that read and write no more than they must.

MSDNet's maps are many and thin: 6 to 48 new channels per layer. Libraries pad such channels, change layouts and run
one kernel after another for what is a single sweep over memory. Here a map is a matrix, one row per pixel (NHWC);
rows begin at multiples of eight elements, so that eight channels are one load, and what lies between is zero. One
kernel convolves (forwards, for gradients and for tangents, by an implicit matrix product) and sums up what BatchNorm
needs on the way. Sums are partial sums per program, added up in a fixed order: results repeat bit for bit.

Names: M rows (pixels) of the result, taps of the filter, `inner` channels that are summed over, `outer` ones that come
out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # eight for each multiprocessor of an H200
SWEEP = 4096  # elements that one program of a sweep takes at a time
NO_SUMS, SQUARES, ALONG = 0, 1, 2


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
            a = _read(
                x, row_x8, rows, tap, channel, row_ok,
                HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, TRANSPOSED,
            )  # fmt: skip
            b = _weights(w, w_outer, w_tap, w_inner, tap, channel, cols, inner, outer, SIZE * SIZE)
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
            if PAIR:
                a2 = _read(
                    x2, row_x28, rows, tap, channel, row_ok,
                    HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIZE, STRIDE, TRANSPOSED,
                )  # fmt: skip
                b2 = _weights(w2, w_outer, w_tap, w_inner, tap, channel, cols, inner, outer, SIZE * SIZE)
                acc = tl.dot(a2, b2.to(a2.dtype), acc, input_precision="ieee")
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
def _sum_up(sums, programs, channels, column, BP: tl.constexpr, BC: tl.constexpr):
    """Both totals of a block of channels over all programs, in float64."""
    cols = column * BC + tl.arange(0, BC)
    first = tl.zeros([BC], tl.float64)
    second = tl.zeros([BC], tl.float64)
    for start in range(0, programs, BP):
        rows = start + tl.arange(0, BP)
        ok = (rows < programs)[:, None] & (cols < channels)[None, :]
        at = sums + rows[:, None] * 2 * channels + cols[None, :]
        first += tl.sum(tl.load(at, mask=ok, other=0.0).to(tl.float64), axis=0)
        second += tl.sum(tl.load(at + channels, mask=ok, other=0.0).to(tl.float64), axis=0)
    return first, second


@triton.jit
def _statistics(
    sums,
    programs,
    channels,
    rows_total,
    eps,
    momentum,
    mean,
    inverse_std,
    running_mean,
    running_var,
    TRACK: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Mean and inverse deviation of a batch; the running ones follow."""
    column = tl.program_id(0)
    first, second = _sum_up(sums, programs, channels, column, BP, BC)
    cols = column * BC + tl.arange(0, BC)
    ok = cols < channels
    mu = first / rows_total
    var = tl.maximum(second / rows_total - mu * mu, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean + cols, mu.to(tl.float32), mask=ok)
    tl.store(inverse_std + cols, 1.0 / tl.sqrt(var.to(tl.float32) + eps), mask=ok)
    if TRACK:
        unbiased = (var * (rows_total / (rows_total - 1.0))).to(tl.float32)
        old_mean = tl.load(running_mean + cols, mask=ok, other=0.0)
        old_var = tl.load(running_var + cols, mask=ok, other=0.0)
        tl.store(running_mean + cols, old_mean + momentum * (mu.to(tl.float32) - old_mean), mask=ok)
        tl.store(running_var + cols, old_var + momentum * (unbiased - old_var), mask=ok)


@triton.jit
def _affine(scale, shift, mu, inv, cols, ok):
    """BatchNorm as slope and level: what ReLU sees is slope * y + level."""
    slope = tl.load(scale + cols, mask=ok, other=0.0) * inv
    return slope, tl.load(shift + cols, mask=ok, other=0.0) - slope * mu


@triton.jit
def _sweep(x, rows, cols, row_x, rows_total, channels, EIGHTS: tl.constexpr):
    """A tile of a map as float32. EIGHTS: `row_x` counts eights, and what lies between rows may be read with them."""
    if EIGHTS:
        at = x + rows[:, None] * (row_x * 8) + cols[None, :]
        ok = (rows < rows_total)[:, None] & (cols < (channels + 7) // 8 * 8)[None, :]
    else:
        at = x + rows[:, None] * row_x + cols[None, :]
        ok = (rows < rows_total)[:, None] & (cols < channels)[None, :]
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _fill(x, value, rows, cols, row_x8, rows_total, channels):
    """Write a tile of a map, and zeros between rows: there `value` is zero."""
    ok = (rows < rows_total)[:, None] & (cols < (channels + 7) // 8 * 8)[None, :]
    tl.store(x + rows[:, None] * (row_x8 * 8) + cols[None, :], value.to(x.dtype.element_ty), mask=ok)


@triton.jit
def _normalise_relu(
    y,
    out,
    scale,
    shift,
    mean,
    inverse_std,
    rows_total,
    channels,
    row_y8,
    row_out8,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """out = max(slope * y + level, 0)."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    mu = tl.load(mean + cols, mask=col_ok, other=0.0)
    inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    slope, level = _affine(scale, shift, mu, inv, cols, col_ok)
    value = _sweep(y, rows, cols, row_y8, rows_total, channels, True)
    value = tl.maximum(slope[None, :] * value + level[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
    _fill(out, value, rows, cols, row_out8, rows_total, channels)


@triton.jit
def _gradient_sums(
    gradient,
    y,
    scale,
    shift,
    mean,
    inverse_std,
    sums,
    rows_total,
    tiles_each,
    channels,
    row_gradient,
    row_y8,
    EIGHTS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Of the gradient behind ReLU: its sum, and its sum with the normalised y."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    mu = tl.load(mean + cols, mask=col_ok, other=0.0)
    inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    slope, level = _affine(scale, shift, mu, inv, cols, col_ok)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BR + tl.arange(0, BR)
        g = _sweep(gradient, rows, cols, row_gradient, rows_total, channels, EIGHTS)
        v = _sweep(y, rows, cols, row_y8, rows_total, channels, True)
        g = tl.where(slope[None, :] * v + level[None, :] > 0, g, 0.0)
        first += g
        second += g * ((v - mu[None, :]) * inv[None, :])
    at = sums + program * 2 * channels + cols
    tl.store(at, tl.sum(first, axis=0), mask=col_ok)
    tl.store(at + channels, tl.sum(second, axis=0), mask=col_ok)


@triton.jit
def _gradient_plan(
    sums,
    programs,
    channels,
    rows_total,
    scale,
    mean,
    inverse_std,
    by_scale,
    by_shift,
    plan,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradients of scale and shift; the gradient of y is plan[0] * g + plan[1] * y + plan[2]."""
    column = tl.program_id(0)
    first, second = _sum_up(sums, programs, channels, column, BP, BC)
    cols = column * BC + tl.arange(0, BC)
    ok = cols < channels
    inv = tl.load(inverse_std + cols, mask=ok, other=0.0)
    mu = tl.load(mean + cols, mask=ok, other=0.0)
    a = tl.load(scale + cols, mask=ok, other=0.0) * inv
    along = -a * inv * (second / rows_total).to(tl.float32)
    tl.store(by_shift + cols, first.to(tl.float32), mask=ok)
    tl.store(by_scale + cols, second.to(tl.float32), mask=ok)
    tl.store(plan + cols, a, mask=ok)
    tl.store(plan + channels + cols, along, mask=ok)
    tl.store(plan + 2 * channels + cols, -a * (first / rows_total).to(tl.float32) - along * mu, mask=ok)


@triton.jit
def _tangent_plan(
    sums,
    programs,
    channels,
    rows_total,
    scale,
    mean,
    inverse_std,
    scale_moves,
    shift_moves,
    plan,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """What ReLU sees moves by plan[0] * (how y moves) + plan[1] * y + plan[2]."""
    column = tl.program_id(0)
    first, second = _sum_up(sums, programs, channels, column, BP, BC)
    cols = column * BC + tl.arange(0, BC)
    ok = cols < channels
    inv = tl.load(inverse_std + cols, mask=ok, other=0.0)
    mu = tl.load(mean + cols, mask=ok, other=0.0)
    a = tl.load(scale + cols, mask=ok, other=0.0) * inv
    along = inv * (tl.load(scale_moves + cols, mask=ok, other=0.0) - a * (second / rows_total).to(tl.float32))
    level = tl.load(shift_moves + cols, mask=ok, other=0.0) - a * (first / rows_total).to(tl.float32) - along * mu
    tl.store(plan + cols, a, mask=ok)
    tl.store(plan + channels + cols, along, mask=ok)
    tl.store(plan + 2 * channels + cols, level, mask=ok)


@triton.jit
def _planned(
    moving,
    y,
    result,
    plan,
    scale,
    shift,
    mean,
    inverse_std,
    rows_total,
    channels,
    row_moving,
    row_y8,
    row_result8,
    EIGHTS: tl.constexpr,
    TANGENT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """result = plan[0] * m + plan[1] * y + plan[2]; ReLU masks m (gradients) or the result (tangents)."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    a = tl.load(plan + cols, mask=col_ok, other=0.0)
    b = tl.load(plan + channels + cols, mask=col_ok, other=0.0)
    c = tl.load(plan + 2 * channels + cols, mask=col_ok, other=0.0)
    mu = tl.load(mean + cols, mask=col_ok, other=0.0)
    inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    slope, level = _affine(scale, shift, mu, inv, cols, col_ok)
    m = _sweep(moving, rows, cols, row_moving, rows_total, channels, EIGHTS)
    v = _sweep(y, rows, cols, row_y8, rows_total, channels, True)
    alive = slope[None, :] * v + level[None, :] > 0
    if TANGENT:
        found = tl.where(alive, a[None, :] * m + b[None, :] * v + c[None, :], 0.0)
    else:
        found = a[None, :] * tl.where(alive, m, 0.0) + b[None, :] * v + c[None, :]
    _fill(result, found, rows, cols, row_result8, rows_total, channels)


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


@triton.jit
def _copy(
    source,
    target,
    rows_total,
    channels,
    row_source,
    row_target8,
    limit,
    EIGHTS: tl.constexpr,
    TO_EIGHTS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The source's channels, and zeros behind them: up to a multiple of eight if the target begins at one."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    value = _sweep(source, rows, cols, row_source, rows_total, channels, EIGHTS)
    value = tl.where((cols < channels)[None, :], value, 0.0)
    if TO_EIGHTS:
        _fill(target, value, rows, cols, row_target8, rows_total, channels)
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
    return x if row_stride(x) and _eights(x)[1] else join([x])


def _eights(x: Tensor) -> tuple[int, bool]:
    """The row stride in eights, if rows begin at multiples of eight elements; else as it is."""
    row = row_stride(x)
    fits = row % 8 == 0 and x.storage_offset() % 8 == 0
    return (row // 8, True) if fits else (row, False)


def new_map(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Room for a map; kernels fill the up to seven channels between its rows with zeros."""
    room = triton.cdiv(channels, 8) * 8
    rows = torch.empty(len(like), height, width, room, dtype=like.dtype, device=like.device)
    return rows.permute(0, 3, 1, 2)[:, :channels]


def join(maps: Sequence[Tensor]) -> Tensor:
    """Maps of one size side by side. Each is written after the one before it, over the zeros behind that."""
    channels = [m.shape[1] for m in maps]
    joined = new_map(maps[0], sum(channels), *maps[0].shape[2:])
    rows, room, first = _rows(joined), row_stride(joined), 0
    for own, count in zip(map(as_rows, maps), channels, strict=True):
        limit = room - first if first + count == sum(channels) else count
        block = _power(limit, 8, 64)
        grid = triton.cdiv(rows, SWEEP // block), triton.cdiv(max(limit, triton.cdiv(count, 8) * 8), block)
        row, eights = _eights(own)
        _copy[grid](
            own, joined[:, first:], rows, count, row, room // 8, limit,
            EIGHTS=eights, TO_EIGHTS=first % 8 == 0, BR=SWEEP // block, BC=block,
        )  # fmt: skip
        first += count
    return joined


def _constant(inner: int, size: int) -> int:
    """Eights of channels where a kernel must know them: under several taps; else 0, so that one serves all."""
    return triton.cdiv(inner, 8) if size > 1 else 0


def _rows(x: Tensor) -> int:
    return len(x) * x.shape[2] * x.shape[3]


def _power(number: int, least: int, most: int) -> int:
    """The power of two from `number` up, within bounds."""
    return min(most, max(least, triton.next_power_of_2(number)))


def _tall(rows: int) -> int:
    """Rows of a tile: fewer where tall ones would leave multiprocessors idle."""
    return 128 if rows >= 128 * PROGRAMS // 2 else 64


def _split(rows: int, tile: int, blocks: int) -> tuple[int, int]:
    """How many programs share the rows, and how many tiles each takes."""
    tiles = triton.cdiv(rows, tile)
    each = triton.cdiv(tiles, max(1, PROGRAMS // blocks))
    return triton.cdiv(tiles, each), each


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
    rows, outer = _rows(y), y.shape[1]
    inner = out_channels if transposed else in_channels
    bm, bn, bk = _tall(rows), _power(outer, 16, 64), _power(size * size * triton.cdiv(inner, 8) * 8, 16, 64)
    columns = triton.cdiv(outer, bn)
    programs, tiles = _split(rows, bm, columns)
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
    rows, depth8 = _rows(gradient), size * size * triton.cdiv(in_channels, 8) * 8
    bm, bn, bk = _tall(rows), _power(out_channels, 16, 64), _power(depth8, 16, 64)
    columns, blocks = triton.cdiv(out_channels, bn), triton.cdiv(depth8, bk)
    programs, tiles = _split(rows, bm, columns * blocks)
    parts = torch.empty(programs, out_channels, size, size, in_channels, device=x.device)
    _filter_gradient[(programs, columns, blocks)](
        x, gradient, parts, rows, tiles, in_channels, out_channels, row_stride(x) // 8, row_stride(gradient) // 8,
        HEIGHT=x.shape[2], WIDTH=x.shape[3], OUT_HEIGHT=gradient.shape[2], OUT_WIDTH=gradient.shape[3],
        SIZE=size, STRIDE=stride, INNER8=_constant(in_channels, size), BM=bm, BN=bn, BK=bk,
        num_warps=4 if bn == 16 else 8, num_stages=2,
    )  # fmt: skip
    return parts.sum(0).permute(0, 3, 1, 2)


def normalise_relu(
    y: Tensor,
    sums: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    momentum: float,
    running: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm's mean and inverse deviation, and ReLU of what it makes of y; running statistics move if given."""
    rows, channels, block, blocks, tile = _tiling(y)
    mean, inverse_std = torch.empty(2, channels, device=y.device)
    _statistics[(blocks,)](
        sums, len(sums), channels, float(rows), eps, momentum, mean, inverse_std, *(running or (mean, mean)),
        TRACK=running is not None, BP=128, BC=block,
    )  # fmt: skip
    out = new_map(y, *y.shape[1:])
    _normalise_relu[(triton.cdiv(rows, tile), blocks)](
        y, out, scale, shift, mean, inverse_std, rows, channels, row_stride(y) // 8, row_stride(out) // 8,
        BR=tile, BC=block,
    )  # fmt: skip
    return out, mean, inverse_std


Norm = tuple[Tensor, Tensor, Tensor, Tensor]  # scale, shift, mean, inverse deviation


def gradient_before_relu(gradient: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, of BatchNorm's scale and of its shift."""
    rows, channels, block, blocks, tile = _tiling(y)
    programs, tiles = _split(rows, tile, blocks)
    sums = torch.empty(programs, 2, channels, device=y.device)
    row, eights = _eights(gradient)
    strides = row, row_stride(y) // 8
    _gradient_sums[(programs, blocks)](
        gradient, y, *norm, sums, rows, tiles, channels, *strides, EIGHTS=eights, BR=tile, BC=block
    )  # fmt: skip
    by_scale, by_shift = torch.empty(2, channels, device=y.device)
    plan = torch.empty(3, channels, device=y.device)
    scale, _, mean, inverse_std = norm
    _gradient_plan[(blocks,)](
        sums, programs, channels, float(rows), scale, mean, inverse_std, by_scale, by_shift, plan, BP=128, BC=block
    )
    by_y = new_map(y, *y.shape[1:])
    _planned[(triton.cdiv(rows, tile), blocks)](
        gradient, y, by_y, plan, *norm, rows, channels, *strides, row_stride(by_y) // 8,
        EIGHTS=eights, TANGENT=False, BR=tile, BC=block,
    )  # fmt: skip
    return by_y, by_scale, by_shift


def tangent_after_relu(
    y_moves: Tensor, sums: Tensor, y: Tensor, norm: Norm, scale_moves: Tensor, shift_moves: Tensor
) -> Tensor:
    """How ReLU's output moves, given how y, scale and shift do; `sums` are those of `y_moves` along normalised y."""
    rows, channels, block, blocks, tile = _tiling(y)
    plan = torch.empty(3, channels, device=y.device)
    scale, _, mean, inverse_std = norm
    _tangent_plan[(blocks,)](
        sums, len(sums), channels, float(rows), scale, mean, inverse_std, scale_moves, shift_moves, plan,
        BP=128, BC=block,
    )  # fmt: skip
    moves = new_map(y, *y.shape[1:])
    strides = (row_stride(m) // 8 for m in (y_moves, y, moves))
    _planned[(triton.cdiv(rows, tile), blocks)](
        y_moves, y, moves, plan, *norm, rows, channels, *strides, EIGHTS=True, TANGENT=True, BR=tile, BC=block
    )
    return moves


def _tiling(y: Tensor) -> tuple[int, int, int, int, int]:
    """Rows and channels of a map; for sweeps over it: channels in a block, blocks, rows in a tile."""
    block = _power(y.shape[1], 8, 32)
    return _rows(y), y.shape[1], block, triton.cdiv(y.shape[1], block), SWEEP // block
