"""Numba kernel of the candidate test; `candidates` derives the formulas and the slack that covers rounding.

Rows run in blocks through straight-line loops without branches, so that LLVM vectorises them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
_BLOCK = 512
_ZERO = np.float32(0)
_MIDDLE = np.float32(200.5)
_ONE = np.float32(1)
_THREE = np.float32(3)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOW, _HIGH = np.float32(-87.0), np.float32(87.0)
_INFINITY = np.float32(np.inf)
_E2, _E3 = np.float32(0.5), np.float32(1 / 6)
_E4, _E5, _E6, _E7 = np.float32(1 / 24), np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_BIG = np.float32(1 << 22)


@numba.njit(inline="always")
def _exp_up(x):  # type: ignore[no-untyped-def]
    """exp(x) within 1e-6 relative for x in -87..87; infinity above and for NaN; exp(-87) below. Vectorises."""
    clipped = min(max(x, _LOW), _HIGH)
    k = np.int32(clipped * _LOG2_E + _MIDDLE) - np.int32(200)
    f = np.float32(k)
    r = clipped - f * _LN2_HIGH
    r = r - f * _LN2_LOW
    p = _ONE + r * (_ONE + r * (_E2 + r * (_E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7))))))
    scale = np.int32((k + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * scale if x <= _HIGH else _INFINITY


@numba.njit(inline="always")
def _ceil(x):  # type: ignore[no-untyped-def]
    """ceil for x >= 0, or x itself where float32 holds no fractions."""
    whole = np.float32(np.int32(min(x, _BIG)))
    return (whole + _ONE if whole < x else whole) if x < _BIG else x


@numba.njit(**_OPTIONS)
def mark(means, log_scales, versions, step, least_lag, reach_means, reach_scales, extra, variance, view, out):  # type: ignore[no-untyped-def]
    """Set out[i] to 1 for rows that may be visible, else 0.

    Args:
        means, log_scales: [N, 3] float32.
        versions: [N] int32, or empty: every row lags by least_lag.
        step, least_lag: A row lags by max(step - version, least_lag).
        reach_means, reach_scales: Motion by lag. [L + 1] float32.
        extra: Further motion of each row's position, or empty: none. [N] float32.
        variance: What is added to each row's variance in 3D, or empty: nothing. [N] float32.
        view: Constants of the view, see `candidates.ViewTest.packed`. float32.
        out: [N] uint8.

    Returns:
        The number of candidates, or -1 - lag if a row lags by more than L.
    """
    r00, r01, r02, tx = view[0], view[1], view[2], view[3]
    r10, r11, r12, ty = view[4], view[5], view[6], view[7]
    r20, r21, r22, tz = view[8], view[9], view[10], view[11]
    norm_x, norm_y, norm_z, slack_scale, slack_offset = view[12], view[13], view[14], view[15], view[16]
    fx, fy, cx, cy, width, height = view[17], view[18], view[19], view[20], view[21], view[22]
    left, right, top, bottom = view[23], view[24], view[25], view[26]
    spread, blur, near, far, radius_clip = view[27], view[28], view[29], view[30], view[31]
    pixel_scale, pixel_offset_x, pixel_offset_y = view[32], view[33], view[34]
    n = means.shape[0]
    longest = reach_means.shape[0] - 1
    if least_lag > longest:
        return -1 - least_lag
    lagging, further = versions.shape[0] > 0, extra.shape[0] > 0
    px, py, pz = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    largest, flags = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
    move = np.full(_BLOCK, reach_means[least_lag], np.float32)
    grow = np.full(_BLOCK, reach_scales[least_lag], np.float32)
    filtered, wider = variance.shape[0] > 0, np.zeros(_BLOCK, np.float32)
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
        elif further:
            move[:] = reach_means[least_lag]
        if further:
            for k in range(size):
                move[k] += extra[start + k]
        if filtered:
            wider[:size] = variance[start : start + size]
        for k in range(size):
            px[k], py[k], pz[k] = means_here[k, 0], means_here[k, 1], means_here[k, 2]
            a, b, c = scales_here[k, 0], scales_here[k, 1], scales_here[k, 2]
            largest[k] = max(a, max(b, c)) + grow[k] + _ZERO * (a + b + c)  # max loses a NaN, the product does not
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
            # gsplat clamps the direction at which it linearises the projection
            ax = max(abs(min(max(u0, left), right)), abs(min(max(u1, left), right)))
            ay = max(abs(min(max(v0, top), bottom)), abs(min(max(v1, top), bottom)))
            slope = inverse_near * inverse_near * (_ONE + ax * ax + ay * ay)
            radius = _ceil(_THREE * np.sqrt((_exp_up(largest[k] + largest[k]) + wider[k]) * spread * slope + blur))
            left_edge, right_edge, top_edge, bottom_edge = fx * u0 + cx, fx * u1 + cx, fy * v0 + cy, fy * v1 + cy
            slack = radius + pixel_scale * radius
            reach_x = slack + pixel_scale * max(abs(left_edge), abs(right_edge)) + pixel_offset_x
            reach_y = slack + pixel_scale * max(abs(top_edge), abs(bottom_edge)) + pixel_offset_y
            # only true comparisons reject, so that a NaN stays a candidate
            outside = np.int32(z + dz < near) | np.int32(z - dz > far) | np.int32(radius <= radius_clip)
            outside |= np.int32(right_edge + reach_x <= _ZERO) | np.int32(left_edge - reach_x >= width)
            outside |= np.int32(bottom_edge + reach_y <= _ZERO) | np.int32(top_edge - reach_y >= height)
            flags[k] = np.int32(1) - outside
        inside = np.int32(0)
        for k in range(size):
            out_here[k] = np.uint8(flags[k])
            inside += flags[k]
        count += inside
    return count


@numba.njit(**_OPTIONS)
def mask_to_ids(mask, ids):  # type: ignore[no-untyped-def]
    """Ascending rows whose mask byte is not zero, into ids. [count of them] int32."""
    k = 0
    for i in range(mask.shape[0]):
        if mask[i] != 0:
            ids[k] = i
            k += 1
