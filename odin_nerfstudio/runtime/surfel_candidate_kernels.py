"""Numba kernel of the candidate test of surfels; `surfel_candidates` derives the formulas.

As in `candidate_kernels`, rows run in blocks through straight-line loops without branches, so that LLVM vectorises
them.
"""

from __future__ import annotations

import numba
import numpy as np

from odin_nerfstudio.runtime.candidate_kernels import _BLOCK, _OPTIONS, _ceil, _exp_up

_f = np.float32
_ZERO, _HALF, _ONE, _THREE = _f(0), _f(0.5), _f(1), _f(3)
LEAST_VARIANCE = _f(1.01e-4)
STEEP = _f(1 / 16)


@numba.njit(**_OPTIONS)
def mark(means, log_scales, versions, step, least_lag, reach_means, reach_scales, view, rounding, out):
    """Set out[i] to 1 for rows that may be visible, else 0.

    Args:
        means, log_scales: [N, 3] float32; the third scale is not looked at.
        versions: [N] int32, or empty: every row lags by least_lag.
        step, least_lag: A row lags by max(step - version, least_lag).
        reach_means, reach_scales: Motion by lag. [L + 1] float32.
        view: Constants of the view, see `candidates.ViewTest.packed`. float32.
        rounding: Error of the renderer's squared extents, relative to squared pixel coordinates. float32.
        out: [N] uint8.

    Returns:
        The number of candidates, or -1 - lag if a row lags by more than L.
    """
    r00, r01, r02, tx = view[0], view[1], view[2], view[3]
    r10, r11, r12, ty = view[4], view[5], view[6], view[7]
    r20, r21, r22, tz = view[8], view[9], view[10], view[11]
    norm_x, norm_y, norm_z, slack_scale, slack_offset = view[12], view[13], view[14], view[15], view[16]
    fx, fy, cx, cy, width, height = view[17], view[18], view[19], view[20], view[21], view[22]
    near, far, radius_clip = view[29], view[30], view[31]
    pixel_scale, pixel_offset_x, pixel_offset_y = view[32], view[33], view[34]
    stretch = view[27] / (max(fx, fy) * max(fx, fy))
    n = means.shape[0]
    longest = reach_means.shape[0] - 1
    if least_lag > longest:
        return -1 - least_lag
    lagging = versions.shape[0] > 0
    px, py, pz = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    largest, flags = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
    move = np.full(_BLOCK, reach_means[least_lag], np.float32)
    grow = np.full(_BLOCK, reach_scales[least_lag], np.float32)
    count = 0
    for start in range(0, n, _BLOCK):
        size = min(_BLOCK, n - start)
        means_here, scales_here, out_here = means[start : start + size], log_scales[start : start + size], out[start:]
        if lagging:
            versions_here = versions[start : start + size]
            oldest = versions_here[0]
            for k in range(size):
                oldest = min(oldest, versions_here[k])
            if step - oldest > longest:
                return -1 - (step - oldest)
            for k in range(size):
                lag = max(step - versions_here[k], least_lag)
                move[k] = reach_means[lag]
                grow[k] = reach_scales[lag]
        for k in range(size):
            px[k], py[k], pz[k] = means_here[k, 0], means_here[k, 1], means_here[k, 2]
            a, b = scales_here[k, 0], scales_here[k, 1]
            largest[k] = max(a, b) + grow[k] + _ZERO * (a + b)  # max loses a NaN, the product does not
        for k in range(size):
            d = move[k]
            a, b, c = px[k], py[k], pz[k]
            e = slack_scale * (abs(a) + abs(b) + abs(c) + d) + slack_offset
            x = r00 * a + r01 * b + r02 * c + tx
            y = r10 * a + r11 * b + r12 * c + ty
            z = r20 * a + r21 * b + r22 * c + tz
            dx, dy, dz = d * norm_x + e, d * norm_y + e, d * norm_z + e
            # bounds of 1/z over the part of the box in front of the near plane
            inverse_near = _ONE / max(z - dz, near)
            inverse_far = _ONE / max(z + dz, near)
            x0, x1, y0, y1 = x - dx, x + dx, y - dy, y + dy
            u0 = x0 * (inverse_far if x0 > _ZERO else inverse_near)
            u1 = x1 * (inverse_near if x1 > _ZERO else inverse_far)
            v0 = y0 * (inverse_far if y0 > _ZERO else inverse_near)
            v1 = y1 * (inverse_near if y1 > _ZERO else inverse_far)
            share = _exp_up(largest[k] + largest[k]) * stretch * inverse_near * inverse_near
            steep = np.int32(1) - np.int32(share < STEEP)
            share = min(share, STEEP)
            more = _ONE / (_ONE - share)
            turn = _HALF * share * more
            u0, u1 = min(u0, u0 * more) - turn, max(u1, u1 * more) + turn
            v0, v1 = min(v0, v0 * more) - turn, max(v1, v1 * more) + turn
            mx, my = fx * max(abs(u0), abs(u1)), fy * max(abs(v0), abs(v1))
            bx, by = mx + abs(cx), my + abs(cy)
            noise = rounding * max(bx * bx, by * by) + LEAST_VARIANCE
            variance = share * more * max(fx * fx + mx * mx, fy * fy + my * my)
            radius = _ceil(_THREE * np.sqrt(variance + noise))
            left_edge, right_edge, top_edge, bottom_edge = fx * u0 + cx, fx * u1 + cx, fy * v0 + cy, fy * v1 + cy
            slack = radius + pixel_scale * radius
            reach_x = slack + pixel_scale * max(abs(left_edge), abs(right_edge)) + pixel_offset_x
            reach_y = slack + pixel_scale * max(abs(top_edge), abs(bottom_edge)) + pixel_offset_y
            # only true comparisons reject, so that a NaN stays a candidate
            beside = np.int32(radius <= radius_clip)
            beside |= np.int32(right_edge + reach_x <= _ZERO) | np.int32(left_edge - reach_x >= width)
            beside |= np.int32(bottom_edge + reach_y <= _ZERO) | np.int32(top_edge - reach_y >= height)
            outside = np.int32(z + dz < near) | np.int32(z - dz > far)
            flags[k] = (np.int32(1) - outside) * ((np.int32(1) - beside) | steep)
        inside = np.int32(0)
        for k in range(size):
            out_here[k] = np.uint8(flags[k])
            inside += flags[k]
        count += inside
    return count
