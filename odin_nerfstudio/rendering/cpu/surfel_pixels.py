"""Blending of one tile of surfels, forward and backward, with gsplat's thresholds.

Geometry of blocks and lanes, and the record that the backward pass reads, are those of `pixels`. Beside the colours a
pixel gathers the normal, the distortion ``2 sum_{j<i} w_i w_j (d_i - d_j)`` and the median depth: the depth of the last
surfel that found a transmittance above one half. Both read the last colour channel, as gsplat does: the depth, where
one is rendered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu import simd
from odin_nerfstudio.rendering.cpu.layout import (
    ALPHA_MAX,
    LOG2_ALPHA_MIN,
    P_REACHABLE,
    P_SLOT,
    P_SPLAT,
    P_TAKEN,
    TILE,
    TILE_PIXELS,
    TRANSMITTANCE_MIN,
)
from odin_nerfstudio.rendering.cpu.pixels import _column, _pixel, _row
from odin_nerfstudio.rendering.cpu.surfel_layout import (
    HALF_LOG2_E,
    LOW_PASS,
    R_A,
    R_B,
    R_C,
    R_COLOUR,
    R_LOG2_OPACITY,
    R_NORMAL,
    R_X,
    R_Y,
    RECORD,
    SUMS,
)

_f = np.float32
_ZERO, _HALF, _ONE, _TWO = _f(0), _f(0.5), _f(1), _f(2)
_FALL = -HALF_LOG2_E
_AHEAD = 4  # pairs between asking for a record and using it

# Scratch of one tile: planes of 256 floats in block order.
_T, _COLOUR, _NORMAL = 0, TILE_PIXELS, 5 * TILE_PIXELS
_DEPTH, _DISTORT, _MEDIAN, _MIDDLE = 8 * TILE_PIXELS, 9 * TILE_PIXELS, 10 * TILE_PIXELS, 11 * TILE_PIXELS
_BEHIND, _DEPTH_ALL, _ALPHA_ALL = 12 * TILE_PIXELS, 13 * TILE_PIXELS, 14 * TILE_PIXELS
_FORWARD, _BACKWARD = 12 * TILE_PIXELS, 15 * TILE_PIXELS


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    first,
    end,
    width,
    height,
    tile_start,
    block_start,
    pairs,
    records,
    background,
    offsets,
    image,
    alphas,
    normals,
    distortion,
    median,
    transmittance,
    processed,
    lanes,
    depth_sum,
    middle,
):
    """Render tiles [first, end) into `image` (H, W, X), `alphas`, `distortion`, `median` (H, W) and `normals` (H, W,
    3), and record what `backward` needs: that of `pixels.forward`, and per pixel (T, 256) the sum of weighted depths,
    measured from the tile's first one, and the place in the tile's list of the median depth.
    """
    tiles_x = (width + TILE - 1) // TILE
    channels = image.shape[2]
    scratch = np.empty(_FORWARD, np.float32)
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
        for k in range(_COLOUR, _FORWARD):
            scratch[k] = _ZERO
        open_blocks[0] = 0xFFFF
        record = block_start[tile]
        p = tile_start[tile]
        start, stop = p, tile_start[tile + 1]
        origin = records[pairs[p, P_SPLAT], R_COLOUR + channels - 1] if p < stop else _ZERO
        while p < stop and open_blocks[0] != 0:
            v = pairs[p, P_SPLAT]
            ahead = np.int64(pairs[min(p + _AHEAD, stop - 1), P_SPLAT]) * RECORD
            simd.prefetch(records, ahead)
            simd.prefetch(records, ahead + 16)
            todo = np.int64(pairs[p, P_REACHABLE]) & open_blocks[0]
            done = 0
            if todo != 0:
                mx, my = records[v, R_X] - _f(ox), records[v, R_Y] - _f(oy)
                a0, a1, a2 = records[v, R_A], records[v, R_A + 1], records[v, R_A + 2]
                b0, b1, b2 = records[v, R_B], records[v, R_B + 1], records[v, R_B + 2]
                k0, k1, k2 = records[v, R_C], records[v, R_C + 1], records[v, R_C + 2]
                peak = records[v, R_LOG2_OPACITY]
                c0, c1, c2 = records[v, R_COLOUR], records[v, R_COLOUR + 1], records[v, R_COLOUR + 2]
                c3 = records[v, R_COLOUR + 3]
                n0, n1, n2 = records[v, R_NORMAL], records[v, R_NORMAL + 1], records[v, R_NORMAL + 2]
                raw_depth = records[v, R_COLOUR + channels - 1]
                depth = raw_depth - origin
                place = _f(p - start)
                while todo != 0:
                    block = simd.lowest_bit(todo)
                    todo &= todo - 1
                    at = block * 16
                    dx = lane_x - (mx - _column(block))
                    dy = lane_y - (my - _row(block))
                    cz = simd.fma(dx, a2, simd.fma(dy, b2, k2))
                    inverse = simd.reciprocal(cz)
                    sx = simd.fma(dx, a0, simd.fma(dy, b0, k0)) * inverse
                    sy = simd.fma(dx, a1, simd.fma(dy, b1, k1)) * inverse
                    in_plane = simd.fma(sx, sx, sy * sy)
                    in_image = simd.fma(dx, dx, dy * dy) * LOW_PASS
                    e = simd.fma(simd.minimum(in_plane, in_image), _FALL, peak)
                    meets = simd.greater(simd.absolute(cz), _ZERO)
                    reached = simd.both(simd.greater_equal(e, LOG2_ALPHA_MIN), meets)
                    alpha = simd.minimum(simd.exp2(e), ALPHA_MAX)
                    t = simd.load(scratch, _T + at)
                    left = simd.fma(simd.negate(alpha), t, t)
                    take = simd.both(reached, simd.greater(left, TRANSMITTANCE_MIN))
                    t_next = simd.select(take, left, simd.select(reached, simd.negated_absolute(t), t))
                    simd.store(scratch, _T + at, t_next)
                    bits = simd.to_bits(take)
                    if bits != 0:
                        weight = simd.select(take, alpha * t, _ZERO)
                        q = _COLOUR + at
                        simd.store(scratch, q, simd.fma(weight, c0, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, c1, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, c2, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, c3, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, n0, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, n1, simd.load(scratch, q)))
                        q += TILE_PIXELS
                        simd.store(scratch, q, simd.fma(weight, n2, simd.load(scratch, q)))
                        total = simd.load(scratch, _DEPTH + at)
                        spread = simd.fma(_ONE - t, depth, simd.negate(total))
                        q = _DISTORT + at
                        simd.store(scratch, q, simd.fma(weight, spread, simd.load(scratch, q)))
                        simd.store(scratch, _DEPTH + at, simd.fma(weight, depth, total))
                        central = simd.both(take, simd.greater(t, _HALF))
                        q = _MEDIAN + at
                        simd.store(scratch, q, simd.select(central, raw_depth, simd.load(scratch, q)))
                        q = _MIDDLE + at
                        simd.store(scratch, q, simd.select(central, place, simd.load(scratch, q)))
                        lanes[record] = bits
                        record += 1
                        done |= 1 << block
                    if simd.to_bits(simd.greater(t_next, _ZERO)) == 0:
                        open_blocks[0] &= ~(1 << block)
            pairs[p, P_TAKEN] = done
            p += 1
        processed[tile] = p - start
        for k in range(TILE_PIXELS):
            final = abs(scratch[_T + k])
            transmittance[tile, k] = final
            depth_sum[tile, k] = scratch[_DEPTH + k]
            middle[tile, k] = scratch[_MIDDLE + k]
            x, y = _pixel(k)
            if x < columns and y < rows:
                alphas[oy + y, ox + x] = _ONE - final
                distortion[oy + y, ox + x] = _TWO * scratch[_DISTORT + k]
                median[oy + y, ox + x] = scratch[_MEDIAN + k]
                for c in range(channels):
                    image[oy + y, ox + x, c] = scratch[_COLOUR + c * TILE_PIXELS + k] + final * background[c]
                for c in range(3):
                    normals[oy + y, ox + x, c] = scratch[_NORMAL + c * TILE_PIXELS + k]


def _make_backward(geometry: bool) -> Any:
    @njit(nogil=True, cache=True, error_model="numpy")
    def backward(
        first,
        end,
        width,
        height,
        tile_start,
        block_start,
        pairs,
        records,
        background,
        offsets,
        transmittance,
        processed,
        lanes,
        depth_sum,
        middle,
        v_image,
        v_alphas,
        v_normals,
        v_distortion,
        v_median,
        slots,
        used,
    ):
        """Gradients of tiles [first, end): one row of `slots` (S, 32) for each pair that contributed, marked in `used`
        (S,) uint8. The gradients of normals, distortion and median depth are looked at in the variant with geometry
        only.
        """
        tiles_x = (width + TILE - 1) // TILE
        channels = v_image.shape[2]
        scratch = np.zeros(_BACKWARD, np.float32)
        lane_x = simd.load(offsets, 0)
        lane_y = simd.load(offsets, 16)
        for tile in range(first, end):
            start = tile_start[tile]
            p = start + processed[tile] - 1
            if p < start:
                continue
            origin = records[pairs[start, P_SPLAT], R_COLOUR + channels - 1]
            ty = tile // tiles_x
            ox = (tile - ty * tiles_x) * TILE
            oy = ty * TILE
            columns, rows = min(TILE, width - ox), min(TILE, height - oy)
            record = block_start[tile]
            for q in range(start, p + 1):
                record += simd.count_bits(np.int64(pairs[q, P_TAKEN]))
            for k in range(TILE_PIXELS):
                x, y = _pixel(k)
                final = transmittance[tile, k]
                behind = _ZERO
                if x < columns and y < rows:
                    for c in range(channels):
                        g = v_image[oy + y, ox + x, c]
                        scratch[_COLOUR + c * TILE_PIXELS + k] = g
                        behind += background[c] * g
                    behind = final * (behind - v_alphas[oy + y, ox + x])
                    if geometry:
                        for c in range(3):
                            scratch[_NORMAL + c * TILE_PIXELS + k] = v_normals[oy + y, ox + x, c]
                        scratch[_DISTORT + k] = _TWO * v_distortion[oy + y, ox + x]
                        scratch[_MEDIAN + k] = v_median[oy + y, ox + x]
                scratch[_T + k] = final
                scratch[_BEHIND + k] = behind
                if geometry:
                    scratch[_ALPHA_ALL + k] = _ONE - final
                    scratch[_DEPTH_ALL + k] = depth_sum[tile, k]
                    scratch[_DEPTH + k] = depth_sum[tile, k]
                    scratch[_MIDDLE + k] = middle[tile, k]
            while p >= start:
                todo = np.int64(pairs[p, P_TAKEN])
                ahead = max(p - _AHEAD, start)
                simd.prefetch(records, np.int64(pairs[ahead, P_SPLAT]) * RECORD)
                simd.prefetch(records, np.int64(pairs[ahead, P_SPLAT]) * RECORD + 16)
                simd.prefetch(slots, np.int64(pairs[ahead, P_SLOT]) * SUMS)
                simd.prefetch(slots, np.int64(pairs[ahead, P_SLOT]) * SUMS + 16)
                if todo != 0:
                    v = pairs[p, P_SPLAT]
                    mx, my = records[v, R_X] - _f(ox), records[v, R_Y] - _f(oy)
                    a0, a1, a2 = records[v, R_A], records[v, R_A + 1], records[v, R_A + 2]
                    b0, b1, b2 = records[v, R_B], records[v, R_B + 1], records[v, R_B + 2]
                    k0, k1, k2 = records[v, R_C], records[v, R_C + 1], records[v, R_C + 2]
                    peak = records[v, R_LOG2_OPACITY]
                    c0, c1, c2 = records[v, R_COLOUR], records[v, R_COLOUR + 1], records[v, R_COLOUR + 2]
                    c3 = records[v, R_COLOUR + 3]
                    n0, n1, n2 = records[v, R_NORMAL], records[v, R_NORMAL + 1], records[v, R_NORMAL + 2]
                    depth = records[v, R_COLOUR + channels - 1] - origin
                    place = _f(p - start)
                    sum_a, sum_b, sum_c = simd.zeros(), simd.zeros(), simd.zeros()
                    sum_ax, sum_bx, sum_cx = simd.zeros(), simd.zeros(), simd.zeros()
                    sum_ay, sum_by, sum_cy = simd.zeros(), simd.zeros(), simd.zeros()
                    sum_x, sum_y, sum_abs_x, sum_abs_y = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
                    sum_e, sum_depth = simd.zeros(), simd.zeros()
                    sum_0, sum_1, sum_2, sum_3 = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
                    sum_n0, sum_n1, sum_n2 = simd.zeros(), simd.zeros(), simd.zeros()
                    while todo != 0:
                        block = simd.highest_bit(todo)
                        todo &= ~(1 << block)
                        record -= 1
                        take = simd.from_bits(lanes[record])
                        at = block * 16
                        dx = lane_x - (mx - _column(block))
                        dy = lane_y - (my - _row(block))
                        cz = simd.fma(dx, a2, simd.fma(dy, b2, k2))
                        inverse = simd.reciprocal(cz)
                        sx = simd.fma(dx, a0, simd.fma(dy, b0, k0)) * inverse
                        sy = simd.fma(dx, a1, simd.fma(dy, b1, k1)) * inverse
                        in_plane = simd.fma(sx, sx, sy * sy)
                        in_image = simd.fma(dx, dx, dy * dy) * LOW_PASS
                        raw = simd.exp2(simd.fma(simd.minimum(in_plane, in_image), _FALL, peak))
                        alpha = simd.select(take, simd.minimum(raw, ALPHA_MAX), _ZERO)
                        grow = simd.reciprocal(_ONE - alpha)
                        t_after = simd.load(scratch, _T + at)
                        t = t_after * grow
                        simd.store(scratch, _T + at, t)
                        weight = alpha * t
                        q = _COLOUR + at
                        g0, g1 = simd.load(scratch, q), simd.load(scratch, q + TILE_PIXELS)
                        g2, g3 = simd.load(scratch, q + 2 * TILE_PIXELS), simd.load(scratch, q + 3 * TILE_PIXELS)
                        worth = simd.fma(g3, c3, simd.fma(g2, c2, simd.fma(g1, c1, g0 * c0)))
                        if geometry:
                            q = _NORMAL + at
                            h0, h1, h2 = (
                                simd.load(scratch, q),
                                simd.load(scratch, q + TILE_PIXELS),
                                simd.load(scratch, q + 2 * TILE_PIXELS),
                            )
                            worth = simd.fma(h2, n2, simd.fma(h1, n1, simd.fma(h0, n0, worth)))
                            sum_n0, sum_n1 = simd.fma(weight, h0, sum_n0), simd.fma(weight, h1, sum_n1)
                            sum_n2 = simd.fma(weight, h2, sum_n2)
                            # Of the distortion by this weight: sums up to and including this surfel, and over all.
                            up_to, through = simd.load(scratch, _DEPTH + at), _ONE - t_after
                            all_depth, all_alpha = (
                                simd.load(scratch, _DEPTH_ALL + at),
                                simd.load(scratch, _ALPHA_ALL + at),
                            )
                            v_distort = simd.load(scratch, _DISTORT + at)
                            slope = _TWO * simd.fma(through, depth, simd.negate(up_to))
                            slope = slope + simd.fma(simd.negate(all_alpha), depth, all_depth)
                            worth = simd.fma(slope, v_distort, worth)
                            simd.store(scratch, _DEPTH + at, simd.fma(simd.negate(weight), depth, up_to))
                            front = (_TWO - _TWO * t) - all_alpha + weight
                            sum_depth = simd.fma(weight * front, v_distort, sum_depth)
                            where = simd.load(scratch, _MIDDLE + at)
                            here = simd.both(simd.greater_equal(where, place), simd.greater_equal(place, where))
                            here = simd.both(here, take)
                            sum_depth = sum_depth + simd.select(here, simd.load(scratch, _MEDIAN + at), _ZERO)
                        behind = simd.load(scratch, _BEHIND + at)
                        # d loss / d alpha, then times alpha: the gradient of the (negative) exponent.
                        v_alpha = simd.fma(t, worth, simd.negate(grow * behind))
                        simd.store(scratch, _BEHIND + at, simd.fma(weight, worth, behind))
                        free = simd.both(take, simd.greater_equal(ALPHA_MAX, raw))
                        v_exponent = simd.select(free, raw * v_alpha, _ZERO)
                        sum_e = sum_e + v_exponent
                        # The nearer of the two distances takes the gradient. Where it is not the first, s may overflow.
                        inside = simd.both(free, simd.greater_equal(in_image, in_plane))
                        sx, sy = simd.select(inside, sx, _ZERO), simd.select(inside, sy, _ZERO)
                        h = simd.select(inside, v_exponent * inverse, _ZERO)
                        a, b, c = h * sx, h * sy, h * simd.fma(sx, sx, sy * sy)
                        sum_a, sum_b, sum_c = sum_a + a, sum_b + b, sum_c + c
                        sum_ax, sum_bx = simd.fma(a, dx, sum_ax), simd.fma(b, dx, sum_bx)
                        sum_ay, sum_by = simd.fma(a, dy, sum_ay), simd.fma(b, dy, sum_by)
                        sum_cx, sum_cy = simd.fma(c, dx, sum_cx), simd.fma(c, dy, sum_cy)
                        flat = simd.select(inside, _ZERO, v_exponent)
                        gx, gy = flat * dx, flat * dy
                        sum_x, sum_abs_x = sum_x + gx, sum_abs_x + simd.absolute(gx)
                        sum_y, sum_abs_y = sum_y + gy, sum_abs_y + simd.absolute(gy)
                        sum_0, sum_1 = simd.fma(weight, g0, sum_0), simd.fma(weight, g1, sum_1)
                        sum_2, sum_3 = simd.fma(weight, g2, sum_2), simd.fma(weight, g3, sum_3)
                    slot = np.int64(pairs[p, P_SLOT])
                    used[slot] = 1
                    # In the order of a gradient row.
                    sums = simd.column_sums(
                        (
                            sum_a,
                            sum_b,
                            sum_c,
                            sum_ax,
                            sum_bx,
                            sum_cx,
                            sum_ay,
                            sum_by,
                            sum_cy,
                            sum_x,
                            sum_y,
                            sum_abs_x,
                            sum_abs_y,
                            sum_e,
                        )
                    )
                    simd.store(slots, slot * SUMS, sums)
                    sums = simd.column_sums((sum_0, sum_1, sum_2, sum_3, sum_depth, sum_n0, sum_n1, sum_n2))
                    simd.store(slots, slot * SUMS + 16, sums)
                p -= 1

    return backward


backward_colour, backward_geometry = _make_backward(False), _make_backward(True)
