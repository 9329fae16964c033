"""Where things lie in a convolution: pixels of a tile, what a tap of the filter lies over, the depth that is summed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def places(rows, py, px, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr):
    """Image, top and left of rows, which count every FOLD-th pixel down and right from (py, px)."""
    high: tl.constexpr = (HEIGHT + FOLD - 1) // FOLD
    wide: tl.constexpr = (WIDTH + FOLD - 1) // FOLD
    return rows // (high * wide), rows // wide % high * FOLD + py, rows % wide * FOLD + px


@triton.jit
def under(
    rows,
    image,
    top,
    left,
    ty,
    tx,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The pixel of the map read that lies under the tap (ty, tx), and whether there is one; [rows, taps].

    Under a filter of one tap that takes every pixel it is the row itself.
    """
    if SIZE == 1 and STRIDE == 1:
        return rows[:, None], rows[:, None] >= 0
    image, top, left = image[:, None], top[:, None], left[:, None]
    if TRANSPOSED:
        down = top + SIZE // 2 - ty
        right = left + SIZE // 2 - tx
        ok = (down >= 0) & (right >= 0)
        down = down // STRIDE
        right = right // STRIDE
        ok = ok & (down < HEIGHT) & (right < WIDTH)
    else:
        down = top * STRIDE + ty - SIZE // 2
        right = left * STRIDE + tx - SIZE // 2
        ok = (down >= 0) & (right >= 0) & (down < HEIGHT) & (right < WIDTH)
    return (image * HEIGHT + down) * WIDTH + right, ok


@triton.jit
def taps(parity, SIZE: tl.constexpr, FOLD: tl.constexpr):
    """Along one side: the first tap that a pixel of this parity is under, and how many are, FOLD apart."""
    first = (parity + SIZE // 2) % FOLD
    return first, (SIZE - first + FOLD - 1) // FOLD


@triton.jit
def depth_at(step, first_x, count_x, inner, FOLD: tl.constexpr, ROOM: tl.constexpr, BK: tl.constexpr):
    """What of the depth a step takes: how many rows of taps before it, its tap across, channels, which of them count.

    ROOM: all taps of a row together, with so many channels each; else one tap, BK channels at a time.
    """
    inner8 = (inner + 7) // 8 * 8
    k = tl.arange(0, BK)
    if ROOM:
        channel = k % ROOM
        return step, first_x + k // ROOM * FOLD, channel, (channel < inner8) & (k // ROOM < count_x)
    else:
        blocks = tl.cdiv(inner, BK)
        place = step // blocks
        channel = (step - place * blocks) * BK + k
        return place // count_x, first_x + place % count_x * FOLD, channel, channel < inner8


def sides(x: Tensor, y: Tensor, size: int, stride: int) -> dict[str, int]:
    """What a kernel must know of the maps' shapes; nothing where each pixel stands alone, so that one serves all."""
    sides = (1, 1, 1, 1) if size == stride == 1 else (*x.shape[2:], *y.shape[2:])
    names = ("HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "SIZE", "STRIDE")
    return dict(zip(names, (*sides, size, stride), strict=True))
