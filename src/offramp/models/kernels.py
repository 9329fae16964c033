"""Convolution, BatchNorm and ReLU on an H200-class GPU, as a few kernels that read and write no more than they must.

MSDNet's maps are many and thin: 6 to 48 new channels per layer. Libraries pad such channels, change layouts and run
one kernel after another for what is a single sweep over memory. Here a map is a matrix, one row per pixel
(NHWC), of any row stride; one kernel convolves (forwards, for gradients and for tangents, by an implicit matrix
product) and sums up what BatchNorm needs on the way. Sums are partial sums per program, added up in a fixed
order: results repeat bit for bit.

Names: M rows (pixels) of the result, taps of the filter, `inner` channels that are summed over, `outer` ones that come
out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # eight for each multiprocessor of an H200
NO_SUMS, SQUARES, ALONG = 0, 1, 2


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
    height,
    width,
    out_height,
    out_width,
    inner,
    outer,
    row_x,
    row_x2,
    row_y,
    row_along,
    w_outer,
    w_tap,
    w_inner,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
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
    depth = SIZE * SIZE * inner
    first = tl.zeros([BN], tl.float32)
    second = tl.zeros([BN], tl.float32)
    if SUMS == 2:
        mu = tl.load(mean + cols, mask=col_ok, other=0.0)
        inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        row_ok = rows < rows_total
        image = rows // (out_height * out_width)
        pixel = rows % (out_height * out_width)
        top = pixel // out_width
        left = pixel % out_width
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, depth, BK):
            k = start + tl.arange(0, BK)
            tap = k // inner
            channel = k % inner
            if TRANSPOSED:
                down = top[:, None] + SIZE // 2 - (tap // SIZE)[None, :]
                right = left[:, None] + SIZE // 2 - (tap % SIZE)[None, :]
                ok = (down >= 0) & (right >= 0) & (down % STRIDE == 0) & (right % STRIDE == 0)
                down = down // STRIDE
                right = right // STRIDE
            else:
                down = top[:, None] * STRIDE + (tap // SIZE)[None, :] - SIZE // 2
                right = left[:, None] * STRIDE + (tap % SIZE)[None, :] - SIZE // 2
                ok = (down >= 0) & (right >= 0)
            ok = ok & (down < height) & (right < width) & row_ok[:, None] & (k < depth)[None, :]
            place = (image[:, None] * height + down) * width + right
            w_at = cols[None, :] * w_outer + (tap * w_tap + channel * w_inner)[:, None]
            w_ok = (k < depth)[:, None] & col_ok[None, :]
            a = tl.load(x + place * row_x + channel[None, :], mask=ok, other=0.0)
            b = tl.load(w + w_at, mask=w_ok, other=0.0).to(a.dtype)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if PAIR:
                a2 = tl.load(x2 + place * row_x2 + channel[None, :], mask=ok, other=0.0)
                b2 = tl.load(w2 + w_at, mask=w_ok, other=0.0).to(a2.dtype)
                acc = tl.dot(a2, b2, acc, input_precision="ieee")
        here = row_ok[:, None] & col_ok[None, :]
        rounded = acc.to(y.dtype.element_ty)
        tl.store(y + rows[:, None] * row_y + cols[None, :], rounded, mask=here)
        if SUMS > 0:
            value = tl.where(here, rounded.to(tl.float32), 0.0)
            first += tl.sum(value, axis=0)
            if SUMS == 1:
                second += tl.sum(value * value, axis=0)
            else:
                before = tl.load(along + rows[:, None] * row_along + cols[None, :], mask=here, other=0.0)
                second += tl.sum(value * (before.to(tl.float32) - mu[None, :]) * inv[None, :], axis=0)
    if SUMS > 0:
        at = sums + program * 2 * outer + cols
        tl.store(at, first, mask=col_ok)
        tl.store(at + outer, second, mask=col_ok)


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
    scale,
    shift,
    mean,
    inverse_std,
    slope,
    level,
    running_mean,
    running_var,
    TRACK: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Mean and deviation of a batch; `slope` and `level` turn y into what ReLU sees."""
    column = tl.program_id(0)
    first, second = _sum_up(sums, programs, channels, column, BP, BC)
    cols = column * BC + tl.arange(0, BC)
    ok = cols < channels
    mu = first / rows_total
    var = tl.maximum(second / rows_total - mu * mu, 0.0)
    inv = 1.0 / tl.sqrt(var.to(tl.float32) + eps)
    a = tl.load(scale + cols, mask=ok, other=0.0) * inv
    tl.store(mean + cols, mu.to(tl.float32), mask=ok)
    tl.store(inverse_std + cols, inv, mask=ok)
    tl.store(slope + cols, a, mask=ok)
    tl.store(level + cols, tl.load(shift + cols, mask=ok, other=0.0) - a * mu.to(tl.float32), mask=ok)
    if TRACK:
        unbiased = (var * (rows_total / (rows_total - 1.0))).to(tl.float32)
        old_mean = tl.load(running_mean + cols, mask=ok, other=0.0)
        old_var = tl.load(running_var + cols, mask=ok, other=0.0)
        tl.store(running_mean + cols, old_mean + momentum * (mu.to(tl.float32) - old_mean), mask=ok)
        tl.store(running_var + cols, old_var + momentum * (unbiased - old_var), mask=ok)


@triton.jit
def _affine_relu(y, out, slope, level, rows_total, channels, row_y, row_out, BR: tl.constexpr, BC: tl.constexpr):
    """out = max(slope * y + level, 0)."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    ok = (rows < rows_total)[:, None] & col_ok[None, :]
    a = tl.load(slope + cols, mask=col_ok, other=0.0)
    b = tl.load(level + cols, mask=col_ok, other=0.0)
    value = tl.load(y + rows[:, None] * row_y + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    value = tl.maximum(a[None, :] * value + b[None, :], 0.0)
    tl.store(out + rows[:, None] * row_out + cols[None, :], value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gradient_sums(
    gradient,
    y,
    out,
    mean,
    inverse_std,
    sums,
    rows_total,
    tiles_each,
    channels,
    row_gradient,
    row_y,
    row_out,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Of the gradient behind ReLU: its sum, and its sum with the normalised y."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    mu = tl.load(mean + cols, mask=col_ok, other=0.0)
    inv = tl.load(inverse_std + cols, mask=col_ok, other=0.0)
    first = tl.zeros([BC], tl.float32)
    second = tl.zeros([BC], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BR + tl.arange(0, BR)
        ok = (rows < rows_total)[:, None] & col_ok[None, :]
        g = tl.load(gradient + rows[:, None] * row_gradient + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        z = tl.load(out + rows[:, None] * row_out + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        v = tl.load(y + rows[:, None] * row_y + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        g = tl.where(z > 0, g, 0.0)
        first += tl.sum(g, axis=0)
        second += tl.sum(g * (v - mu[None, :]) * inv[None, :], axis=0)
    at = sums + program * 2 * channels + cols
    tl.store(at, first, mask=col_ok)
    tl.store(at + channels, second, mask=col_ok)


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
    out,
    result,
    plan,
    rows_total,
    channels,
    row_moving,
    row_y,
    row_out,
    row_result,
    TANGENT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """result = plan[0] * m + plan[1] * y + plan[2]; ReLU masks m (gradients) or the result (tangents)."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    ok = (rows < rows_total)[:, None] & col_ok[None, :]
    a = tl.load(plan + cols, mask=col_ok, other=0.0)
    b = tl.load(plan + channels + cols, mask=col_ok, other=0.0)
    c = tl.load(plan + 2 * channels + cols, mask=col_ok, other=0.0)
    m = tl.load(moving + rows[:, None] * row_moving + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    v = tl.load(y + rows[:, None] * row_y + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    z = tl.load(out + rows[:, None] * row_out + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    if TANGENT:
        found = tl.where(z > 0, a[None, :] * m + b[None, :] * v + c[None, :], 0.0)
    else:
        found = a[None, :] * tl.where(z > 0, m, 0.0) + b[None, :] * v + c[None, :]
    tl.store(result + rows[:, None] * row_result + cols[None, :], found.to(result.dtype.element_ty), mask=ok)


@triton.jit
def _filter_gradient(
    x,
    gradient,
    parts,
    rows_total,
    tiles_each,
    height,
    width,
    out_height,
    out_width,
    inner,
    outer,
    row_x,
    row_gradient,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Partial sums over rows of gradient (outer channels, BN at a time) x input under each tap (BK at a time)."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = SIZE * SIZE * inner
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    tap = k // inner
    channel = k % inner
    acc = tl.zeros([BN, BK], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BM + tl.arange(0, BM)
        row_ok = rows < rows_total
        image = rows // (out_height * out_width)
        pixel = rows % (out_height * out_width)
        down = (pixel // out_width)[:, None] * STRIDE + (tap // SIZE)[None, :] - SIZE // 2
        right = (pixel % out_width)[:, None] * STRIDE + (tap % SIZE)[None, :] - SIZE // 2
        ok = (down >= 0) & (right >= 0) & (down < height) & (right < width)
        ok = ok & row_ok[:, None] & (k < depth)[None, :]
        place = (image[:, None] * height + down) * width + right
        b = tl.load(x + place * row_x + channel[None, :], mask=ok, other=0.0)
        here = row_ok[None, :] & (cols < outer)[:, None]
        a = tl.load(gradient + rows[None, :] * row_gradient + cols[:, None], mask=here, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    at = parts + program * outer * depth + cols[:, None] * depth + k[None, :]
    tl.store(at, acc, mask=(cols < outer)[:, None] & (k < depth)[None, :])


def row_stride(x: Tensor) -> int:
    """How far apart the pixels of an NHWC map lie in memory; 0 if it is not one, not even a slice of channels."""
    n, channels, height, width = x.shape
    step = next((x.stride(d) // behind for d, size, behind in _dims(x) if size > 1), channels)
    fits = all(size == 1 or x.stride(d) == behind * step for d, size, behind in _dims(x))
    return step if fits and (channels == 1 or x.stride(1) == 1) else 0


def _dims(x: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Width, height and batch: dimension, size, and how many pixels one step along it is."""
    n, _, height, width = x.shape
    return (3, width, 1), (2, height, width), (0, n, height * width)


def as_rows(x: Tensor) -> Tensor:
    """The map itself if its pixels are rows, else a copy whose are."""
    return x if row_stride(x) else x.contiguous(memory_format=torch.channels_last)


def new_map(like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = (len(like), channels, height, width)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def _power(number: int, least: int, most: int) -> int:
    """The power of two from `number` up, within bounds."""
    return min(most, max(least, triton.next_power_of_2(number)))


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
    rows, outer = len(y) * y.shape[2] * y.shape[3], y.shape[1]
    inner = out_channels if transposed else in_channels
    depth = size * size * inner
    bm, bn, bk = 128, _power(outer, 16, 64), _power(depth, 16, 64)
    columns = triton.cdiv(outer, bn)
    programs, tiles = _split(rows, bm, columns)
    partial = torch.empty(programs, 2, outer, device=y.device) if sums else None
    steps = (in_channels, size * size * in_channels) if transposed else (size * size * in_channels, 1)
    w_outer, w_inner = (1, steps[1]) if transposed else steps
    other, weight2 = pair or (x, weight)
    seen, mean, inverse_std = along or (y, y, y)
    _conv[(programs, columns)](
        x, weight, other, weight2, y, seen, mean, inverse_std, y if partial is None else partial,
        rows, tiles, x.shape[2], x.shape[3], y.shape[2], y.shape[3], inner, outer,
        row_stride(x), row_stride(other), row_stride(y), row_stride(seen), w_outer, in_channels, w_inner,
        SIZE=size, STRIDE=stride, TRANSPOSED=transposed, PAIR=pair is not None, SUMS=sums, BM=bm, BN=bn, BK=bk,
    )  # fmt: skip
    return partial


def filter_gradient(x: Tensor, gradient: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the filter, float32, laid out as the filter is."""
    out_channels, in_channels, size, _ = weight.shape
    rows = len(gradient) * gradient.shape[2] * gradient.shape[3]
    depth = size * size * in_channels
    bm, bn, bk = 64, _power(out_channels, 16, 64), _power(depth, 16, 128)
    columns, blocks = triton.cdiv(out_channels, bn), triton.cdiv(depth, bk)
    programs, tiles = _split(rows, bm, columns * blocks)
    parts = torch.empty(programs, out_channels, size, size, in_channels, device=x.device)
    _filter_gradient[(programs, columns, blocks)](
        x, gradient, parts, rows, tiles, x.shape[2], x.shape[3], gradient.shape[2], gradient.shape[3],
        in_channels, out_channels, row_stride(x), row_stride(gradient),
        SIZE=size, STRIDE=stride, BM=bm, BN=bn, BK=bk,
    )  # fmt: skip
    return parts.sum(0).permute(0, 3, 1, 2)


def _channel_blocks(channels: int) -> tuple[int, int]:
    block = _power(channels, 8, 32)
    return block, triton.cdiv(channels, block)


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
    rows, channels = len(y) * y.shape[2] * y.shape[3], y.shape[1]
    mean, inverse_std, slope, level = torch.empty(4, channels, device=y.device)
    block, blocks = _channel_blocks(channels)
    own = running or (mean, mean)
    _statistics[(blocks,)](
        sums, len(sums), channels, float(rows), eps, momentum, scale, shift, mean, inverse_std, slope, level, *own,
        TRACK=running is not None, BP=128, BC=block,
    )  # fmt: skip
    out = torch.empty_like(y)
    tile = 4096 // block
    _affine_relu[(triton.cdiv(rows, tile), blocks)](
        y, out, slope, level, rows, channels, row_stride(y), row_stride(out), BR=tile, BC=block
    )
    return out, mean, inverse_std


def gradient_before_relu(
    gradient: Tensor, y: Tensor, out: Tensor, scale: Tensor, mean: Tensor, inverse_std: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, of BatchNorm's scale and of its shift."""
    rows, channels = len(y) * y.shape[2] * y.shape[3], y.shape[1]
    block, blocks = _channel_blocks(channels)
    tile = 4096 // block
    programs, tiles = _split(rows, tile, blocks)
    sums = torch.empty(programs, 2, channels, device=y.device)
    strides = row_stride(gradient), row_stride(y), row_stride(out)
    _gradient_sums[(programs, blocks)](
        gradient, y, out, mean, inverse_std, sums, rows, tiles, channels, *strides, BR=tile, BC=block
    )
    by_scale, by_shift = torch.empty(2, channels, device=y.device)
    plan = torch.empty(3, channels, device=y.device)
    _gradient_plan[(blocks,)](
        sums, programs, channels, float(rows), scale, mean, inverse_std, by_scale, by_shift, plan, BP=128, BC=block
    )
    by_y = torch.empty_like(y)
    _planned[(triton.cdiv(rows, tile), blocks)](
        gradient, y, out, by_y, plan, rows, channels, *strides, row_stride(by_y), TANGENT=False, BR=tile, BC=block
    )
    return by_y, by_scale, by_shift


def tangent_after_relu(
    y_moves: Tensor,
    sums: Tensor,
    y: Tensor,
    out: Tensor,
    scale: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    scale_moves: Tensor,
    shift_moves: Tensor,
) -> Tensor:
    """How ReLU's output moves, given how y, scale and shift do; `sums` are those of `y_moves` along normalised y."""
    rows, channels = len(y) * y.shape[2] * y.shape[3], y.shape[1]
    block, blocks = _channel_blocks(channels)
    plan = torch.empty(3, channels, device=y.device)
    _tangent_plan[(blocks,)](
        sums, len(sums), channels, float(rows), scale, mean, inverse_std, scale_moves, shift_moves, plan,
        BP=128, BC=block,
    )  # fmt: skip
    moves = torch.empty_like(out)
    tile = 4096 // block
    strides = row_stride(y_moves), row_stride(y), row_stride(out), row_stride(moves)
    _planned[(triton.cdiv(rows, tile), blocks)](
        y_moves, y, out, moves, plan, rows, channels, *strides, TANGENT=True, BR=tile, BC=block
    )
    return moves
