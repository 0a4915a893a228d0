"""Blending of one tile, forward and backward (Kerbl et al. 2023, with gsplat's thresholds).

A block of 4 x 4 pixels is one vector. The loops go over the tile's splats, front to back, and the blocks that each can
reach. The forward pass notes for every block that received something which lanes did (`lanes`, 16 bits); the backward
pass reads that record in reverse, so it visits only blocks with a contribution and agrees exactly with the forward one.
A negative transmittance marks a finished pixel; its magnitude is the final value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu import simd
from odin_nerfstudio.rendering.cpu.layout import (
    ALPHA_MAX,
    BLOCK,
    LOG2_ALPHA_MIN,
    P_REACHABLE,
    P_SLOT,
    P_SPLAT,
    P_TAKEN,
    S_COLOUR,
    S_LOG2_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_X,
    S_Y,
    SPLAT,
    TILE,
    TILE_PIXELS,
    TRANSMITTANCE_MIN,
)

_f = np.float32
_ZERO, _HALF, _ONE = _f(0), _f(0.5), _f(1)
_BLOCKS = TILE // BLOCK
_AHEAD = 4  # pairs between asking for a record and using it
_LANE = np.arange(simd.LANES)
OFFSETS = np.concatenate([_LANE % BLOCK, _LANE // BLOCK]).astype(np.float32) + _HALF  # lane centres, x then y

# Scratch of one tile: planes of 256 floats in block order.
_T, _C0, _C1, _C2, _C3 = 0, TILE_PIXELS, 2 * TILE_PIXELS, 3 * TILE_PIXELS, 4 * TILE_PIXELS
_BEHIND = 5 * TILE_PIXELS
SCRATCH = 6 * TILE_PIXELS


@njit(inline="always")
def _column(block):
    return _f((block & (_BLOCKS - 1)) * BLOCK)


@njit(inline="always")
def _row(block):
    return _f((block >> 2) * BLOCK)


@njit(inline="always")
def _pixel(k):
    """Column and row in the tile of place k in block order."""
    block, lane = k >> 4, k & 15
    return (block & 3) * BLOCK + (lane & 3), (block >> 2) * BLOCK + (lane >> 2)


def _make_forward(four: bool) -> Any:
    @njit(nogil=True, cache=True, error_model="numpy")
    def forward(
        first,
        end,
        width,
        height,
        tile_start,
        block_start,
        pairs,
        splats,
        background,
        offsets,
        image,
        alphas,
        transmittance,
        processed,
        lanes,
    ):
        """Render tiles [first, end) into `image` (H, W, X) and `alphas` (H, W), and record what `backward` needs:
        final transmittance (T, 256), blocks taken per pair (in `pairs`), pairs looked at per tile (`processed`), and
        the lanes that took each such block (`lanes`, from ``block_start[tile]`` on).
        """
        tiles_x = (width + TILE - 1) // TILE
        channels = image.shape[2]
        scratch = np.empty(SCRATCH, np.float32)
        # In memory rather than in a variable, so that the next splat need not wait for the last one's arithmetic.
        open_blocks = np.empty(1, np.int64)
        lane_x = simd.load(offsets, 0)
        lane_y = simd.load(offsets, 16)
        for tile in range(first, end):
            ty = tile // tiles_x
            ox = (tile - ty * tiles_x) * TILE
            oy = ty * TILE
            columns, rows = min(TILE, width - ox), min(TILE, height - oy)
            for k in range(TILE_PIXELS):
                scratch[_T + k] = _ONE
            if columns < TILE or rows < TILE:
                for k in range(TILE_PIXELS):
                    x, y = _pixel(k)
                    if x >= columns or y >= rows:
                        scratch[_T + k] = -_ONE
            for k in range(_C0, _C3 + TILE_PIXELS):
                scratch[k] = _ZERO
            open_blocks[0] = 0xFFFF
            record = block_start[tile]
            p = tile_start[tile]
            stop = tile_start[tile + 1]
            while p < stop and open_blocks[0] != 0:
                v = pairs[p, P_SPLAT]
                simd.prefetch(splats, np.int64(pairs[min(p + _AHEAD, stop - 1), P_SPLAT]) * SPLAT)
                todo = np.int64(pairs[p, P_REACHABLE]) & open_blocks[0]
                done = 0
                if todo != 0:
                    mx, my = splats[v, S_X] - _f(ox), splats[v, S_Y] - _f(oy)
                    wp, wq, wr = splats[v, S_P], splats[v, S_Q], splats[v, S_R]
                    peak = splats[v, S_LOG2_OPACITY]
                    c0, c1, c2 = splats[v, S_COLOUR], splats[v, S_COLOUR + 1], splats[v, S_COLOUR + 2]
                    c3 = splats[v, S_COLOUR + 3]
                    while todo != 0:
                        block = simd.lowest_bit(todo)
                        todo &= todo - 1
                        at = block * 16
                        dx = (mx - _column(block)) - lane_x
                        dy = (my - _row(block)) - lane_y
                        u, w = simd.fma(wp, dx, wq * dy), wr * dy
                        e = simd.fma(simd.negate(u), u, simd.fma(simd.negate(w), w, peak))
                        reached = simd.greater_equal(e, LOG2_ALPHA_MIN)
                        alpha = simd.minimum(simd.exp2(e), ALPHA_MAX)
                        t = simd.load(scratch, _T + at)
                        left = simd.fma(simd.negate(alpha), t, t)
                        take = simd.both(reached, simd.greater(left, TRANSMITTANCE_MIN))
                        t_next = simd.select(take, left, simd.select(reached, simd.negated_absolute(t), t))
                        simd.store(scratch, _T + at, t_next)
                        bits = simd.to_bits(take)
                        if bits != 0:
                            weight = simd.select(take, alpha * t, _ZERO)
                            simd.store(scratch, _C0 + at, simd.fma(weight, c0, simd.load(scratch, _C0 + at)))
                            simd.store(scratch, _C1 + at, simd.fma(weight, c1, simd.load(scratch, _C1 + at)))
                            simd.store(scratch, _C2 + at, simd.fma(weight, c2, simd.load(scratch, _C2 + at)))
                            if four:
                                simd.store(scratch, _C3 + at, simd.fma(weight, c3, simd.load(scratch, _C3 + at)))
                            lanes[record] = bits
                            record += 1
                            done |= 1 << block
                        if simd.to_bits(simd.greater(t_next, _ZERO)) == 0:
                            open_blocks[0] &= ~(1 << block)
                pairs[p, P_TAKEN] = done
                p += 1
            processed[tile] = p - tile_start[tile]
            for k in range(TILE_PIXELS):
                final = abs(scratch[_T + k])
                transmittance[tile, k] = final
                x, y = _pixel(k)
                if x < columns and y < rows:
                    alphas[oy + y, ox + x] = _ONE - final
                    for c in range(channels):
                        image[oy + y, ox + x, c] = scratch[_C0 + c * TILE_PIXELS + k] + final * background[c]

    return forward


def _make_backward(four: bool) -> Any:
    @njit(nogil=True, cache=True, error_model="numpy")
    def backward(
        first,
        end,
        width,
        height,
        tile_start,
        block_start,
        pairs,
        splats,
        background,
        offsets,
        transmittance,
        processed,
        lanes,
        v_image,
        v_alphas,
        slots,
        used,
    ):
        """Gradients of tiles [first, end): one row of `slots` (S, 16) for each pair that contributed, marked in `used`
        (S,) uint8. `v_image` (H, W, X) and `v_alphas` (H, W) are the gradients of the two images.
        """
        tiles_x = (width + TILE - 1) // TILE
        channels = v_image.shape[2]
        scratch = np.zeros(SCRATCH, np.float32)
        lane_x = simd.load(offsets, 0)
        lane_y = simd.load(offsets, 16)
        for tile in range(first, end):
            p = tile_start[tile] + processed[tile] - 1
            if p < tile_start[tile]:
                continue
            ty = tile // tiles_x
            ox = (tile - ty * tiles_x) * TILE
            oy = ty * TILE
            columns, rows = min(TILE, width - ox), min(TILE, height - oy)
            record = block_start[tile]
            for q in range(tile_start[tile], p + 1):
                record += simd.count_bits(np.int64(pairs[q, P_TAKEN]))
            for k in range(TILE_PIXELS):
                x, y = _pixel(k)
                final = transmittance[tile, k]
                behind = _ZERO
                if x < columns and y < rows:
                    for c in range(channels):
                        g = v_image[oy + y, ox + x, c]
                        scratch[_C0 + c * TILE_PIXELS + k] = g
                        behind += background[c] * g
                    behind = final * (behind - v_alphas[oy + y, ox + x])
                scratch[_T + k] = final
                scratch[_BEHIND + k] = behind
            while p >= tile_start[tile]:
                todo = np.int64(pairs[p, P_TAKEN])
                ahead = max(p - _AHEAD, tile_start[tile])
                simd.prefetch(splats, np.int64(pairs[ahead, P_SPLAT]) * SPLAT)
                simd.prefetch(slots, np.int64(pairs[ahead, P_SLOT]) * SPLAT)
                if todo != 0:
                    v = pairs[p, P_SPLAT]
                    mx, my = splats[v, S_X] - _f(ox), splats[v, S_Y] - _f(oy)
                    wp, wq, wr = splats[v, S_P], splats[v, S_Q], splats[v, S_R]
                    peak = splats[v, S_LOG2_OPACITY]
                    c0, c1, c2 = splats[v, S_COLOUR], splats[v, S_COLOUR + 1], splats[v, S_COLOUR + 2]
                    c3 = splats[v, S_COLOUR + 3]
                    sum_u, sum_y, sum_au, sum_ay = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
                    sum_uu, sum_uw, sum_ww, sum_o = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
                    sum_0, sum_1, sum_2, sum_3 = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
                    while todo != 0:
                        block = simd.highest_bit(todo)
                        todo &= ~(1 << block)
                        record -= 1
                        take = simd.from_bits(lanes[record])
                        at = block * 16
                        dx = (mx - _column(block)) - lane_x
                        dy = (my - _row(block)) - lane_y
                        u, w = simd.fma(wp, dx, wq * dy), wr * dy
                        e = simd.fma(simd.negate(u), u, simd.fma(simd.negate(w), w, peak))
                        raw = simd.exp2(e)
                        alpha = simd.select(take, simd.minimum(raw, ALPHA_MAX), _ZERO)
                        grow = simd.reciprocal(_ONE - alpha)
                        t = simd.load(scratch, _T + at) * grow
                        simd.store(scratch, _T + at, t)
                        weight = alpha * t
                        g0, g1, g2 = (
                            simd.load(scratch, _C0 + at),
                            simd.load(scratch, _C1 + at),
                            simd.load(scratch, _C2 + at),
                        )
                        colour = simd.fma(g2, c2, simd.fma(g1, c1, g0 * c0))
                        if four:
                            g3 = simd.load(scratch, _C3 + at)
                            colour = simd.fma(g3, c3, colour)
                            sum_3 = simd.fma(weight, g3, sum_3)
                        behind = simd.load(scratch, _BEHIND + at)
                        # d loss / d alpha, then times alpha: the gradient of the (negative) exponent.
                        v_alpha = simd.fma(t, colour, simd.negate(grow * behind))
                        simd.store(scratch, _BEHIND + at, simd.fma(weight, colour, behind))
                        free = simd.both(take, simd.greater_equal(ALPHA_MAX, raw))
                        v_exponent = simd.select(free, raw * v_alpha, _ZERO)
                        vu, vw = v_exponent * u, v_exponent * w
                        gy = simd.fma(vu, wq, vw * wr)
                        sum_u, sum_au = sum_u + vu, sum_au + simd.absolute(vu)
                        sum_y, sum_ay = sum_y + gy, sum_ay + simd.absolute(gy)
                        sum_uu, sum_uw = simd.fma(vu, u, sum_uu), simd.fma(vu, w, sum_uw)
                        sum_ww, sum_o = simd.fma(vw, w, sum_ww), sum_o + v_exponent
                        sum_0, sum_1 = simd.fma(weight, g0, sum_0), simd.fma(weight, g1, sum_1)
                        sum_2 = simd.fma(weight, g2, sum_2)
                    slot = pairs[p, P_SLOT]
                    used[slot] = 1
                    # In the order of a gradient row, which `gather` turns them into.
                    sums = simd.column_sums(
                        (sum_u, sum_y, sum_uu, sum_uw, sum_ww, sum_o, sum_0, sum_1, sum_2, sum_3, sum_au, sum_ay)
                    )
                    simd.store(slots, slot * SPLAT, sums)
                p -= 1

    return backward


forward_3, forward_4 = _make_forward(False), _make_forward(True)
backward_3, backward_4 = _make_backward(False), _make_backward(True)
