"""BatchNorm and ReLU of a batch, their gradient and their tangent, each in as few sweeps over the map as can be.

All of a map must be known before any of it can be normalised: so sums first, then a plan of three numbers per
channel, then one sweep that carries it out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offramp.models.kernels.maps import (
    MULTIPROCESSORS,
    SWEEP,
    count_rows,
    eights,
    kernel,
    new_map,
    power_of_two,
    read_tile,
    row_stride,
    split,
    write_sums,
    write_tile,
)

Norm = tuple[Tensor, Tensor, Tensor, Tensor]  # scale, shift, mean, inverse deviation


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


@kernel
def _statistics(
    sums,
    programs: int,
    channels: int,
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
def _affine(scale, shift, mean, inverse_std, cols, ok):
    """Mean and inverse deviation of channels, and BatchNorm as slope and level: ReLU sees slope * y + level."""
    mu = tl.load(mean + cols, mask=ok, other=0.0)
    inv = tl.load(inverse_std + cols, mask=ok, other=0.0)
    slope = tl.load(scale + cols, mask=ok, other=0.0) * inv
    return mu, inv, slope, tl.load(shift + cols, mask=ok, other=0.0) - slope * mu


@kernel
def _normalise_relu(
    y,
    out,
    scale,
    shift,
    mean,
    inverse_std,
    rows_total: int,
    channels: int,
    row_y8: int,
    row_out8: int,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """out = max(slope * y + level, 0)."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    _, _, slope, level = _affine(scale, shift, mean, inverse_std, cols, col_ok)
    value = read_tile(y, rows, cols, row_y8, rows_total, channels, True)
    value = tl.maximum(slope[None, :] * value + level[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
    write_tile(out, value, rows, cols, row_out8, rows_total, channels)


@kernel
def _gradient_sums(
    gradient,
    y,
    scale,
    shift,
    mean,
    inverse_std,
    sums,
    rows_total: int,
    tiles_each: int,
    channels: int,
    row_gradient: int,
    row_y8: int,
    EIGHTS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Of the gradient behind ReLU: its sum, and its sum with the normalised y."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    col_ok = cols < channels
    mu, inv, slope, level = _affine(scale, shift, mean, inverse_std, cols, col_ok)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * BR + tl.arange(0, BR)
        g = read_tile(gradient, rows, cols, row_gradient, rows_total, channels, EIGHTS)
        v = read_tile(y, rows, cols, row_y8, rows_total, channels, True)
        g = tl.where(slope[None, :] * v + level[None, :] > 0, g, 0.0)
        first += g
        second += g * ((v - mu[None, :]) * inv[None, :])
    write_sums(sums, first, second, program, cols, channels)


@kernel
def _plan(
    sums,
    programs: int,
    channels: int,
    rows_total,
    scale,
    mean,
    inverse_std,
    of_scale,
    of_shift,
    plan,
    TANGENT: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The plan: m, a gradient or a tangent of y, goes through BatchNorm as plan[0] * m + plan[1] * y + plan[2].

    The sums are those of m and of m with the normalised y. For gradients they are also the gradients of shift and
    scale, which are written; for tangents, how scale and shift move is read.
    """
    column = tl.program_id(0)
    first, second = _sum_up(sums, programs, channels, column, BP, BC)
    cols = column * BC + tl.arange(0, BC)
    ok = cols < channels
    inv = tl.load(inverse_std + cols, mask=ok, other=0.0)
    mu = tl.load(mean + cols, mask=ok, other=0.0)
    slope = tl.load(scale + cols, mask=ok, other=0.0) * inv
    along = -slope * (second / rows_total).to(tl.float32)
    level = -slope * (first / rows_total).to(tl.float32)
    if TANGENT:
        along += tl.load(of_scale + cols, mask=ok, other=0.0)
        level += tl.load(of_shift + cols, mask=ok, other=0.0)
    else:
        tl.store(of_scale + cols, second.to(tl.float32), mask=ok)
        tl.store(of_shift + cols, first.to(tl.float32), mask=ok)
    tl.store(plan + cols, slope, mask=ok)
    tl.store(plan + channels + cols, along * inv, mask=ok)
    tl.store(plan + 2 * channels + cols, level - along * inv * mu, mask=ok)


@kernel
def _planned(
    moving,
    y,
    result,
    plan,
    scale,
    shift,
    mean,
    inverse_std,
    rows_total: int,
    channels: int,
    row_moving: int,
    row_y8: int,
    row_result8: int,
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
    _, _, slope, level = _affine(scale, shift, mean, inverse_std, cols, col_ok)
    m = read_tile(moving, rows, cols, row_moving, rows_total, channels, EIGHTS)
    v = read_tile(y, rows, cols, row_y8, rows_total, channels, True)
    alive = slope[None, :] * v + level[None, :] > 0
    if TANGENT:
        found = tl.where(alive, a[None, :] * m + b[None, :] * v + c[None, :], 0.0)
    else:
        found = a[None, :] * tl.where(alive, m, 0.0) + b[None, :] * v + c[None, :]
    write_tile(result, found, rows, cols, row_result8, rows_total, channels)


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
    _statistics[(triton.cdiv(channels, 8),)](
        sums, len(sums), channels, float(rows), eps, momentum, mean, inverse_std, *(running or (mean, mean)),
        TRACK=running is not None, BP=512, BC=8, num_warps=8,
    )  # fmt: skip
    out = new_map(y, *y.shape[1:])
    _normalise_relu[(triton.cdiv(rows, tile), blocks)](
        y, out, scale, shift, mean, inverse_std, rows, channels, row_stride(y) // 8, row_stride(out) // 8,
        BR=tile, BC=block,
    )  # fmt: skip
    return out, mean, inverse_std


def gradient_before_relu(gradient: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, of BatchNorm's scale and of its shift."""
    rows, channels, block, blocks, tile = _tiling(y)
    programs, tiles = split(rows, tile, blocks, 4 * MULTIPROCESSORS)
    sums = torch.empty(programs, 2, channels, device=y.device)
    row, in_eights = eights(gradient)
    _gradient_sums[(programs, blocks)](
        gradient, y, *norm, sums, rows, tiles, channels, row, row_stride(y) // 8, EIGHTS=in_eights, BR=tile, BC=block
    )
    by_scale, by_shift = torch.empty(2, channels, device=y.device)
    return _through(gradient, y, norm, sums, by_scale, by_shift, tangent=False), by_scale, by_shift


def tangent_after_relu(
    y_moves: Tensor, sums: Tensor, y: Tensor, norm: Norm, scale_moves: Tensor, shift_moves: Tensor
) -> Tensor:
    """How ReLU's output moves, given how y, scale and shift do; `sums` are those of `y_moves` along normalised y."""
    return _through(y_moves, y, norm, sums, scale_moves, shift_moves, tangent=True)


def _through(
    moving: Tensor, y: Tensor, norm: Norm, sums: Tensor, of_scale: Tensor, of_shift: Tensor, tangent: bool
) -> Tensor:
    """A gradient or a tangent through BatchNorm and ReLU: planned, then carried out."""
    rows, channels, block, blocks, tile = _tiling(y)
    scale, _, mean, inverse_std = norm
    plan, result = torch.empty(3, channels, device=y.device), new_map(y, *y.shape[1:])
    _plan[(triton.cdiv(channels, 8),)](
        sums, len(sums), channels, float(rows), scale, mean, inverse_std, of_scale, of_shift, plan,
        TANGENT=tangent, BP=512, BC=8, num_warps=8,
    )  # fmt: skip
    row, in_eights = eights(moving)
    _planned[(triton.cdiv(rows, tile), blocks)](
        moving, y, result, plan, *norm, rows, channels, row, row_stride(y) // 8, row_stride(result) // 8,
        EIGHTS=in_eights, TANGENT=tangent, BR=tile, BC=block,
    )  # fmt: skip
    return result


def _tiling(y: Tensor) -> tuple[int, int, int, int, int]:
    """Rows and channels of a map; for sweeps over it: channels in a block, blocks, rows in a tile."""
    block = power_of_two(y.shape[1], 8, 32)
    return count_rows(y), y.shape[1], block, triton.cdiv(y.shape[1], block), SWEEP // block
