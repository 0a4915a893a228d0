"""Sums over pixels in a fixed order: what the tiles left becomes one gradient row per splat."""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu import simd
from odin_nerfstudio.rendering.cpu.layout import (
    G_ABS_X,
    G_ABS_Y,
    G_XX,
    G_XY,
    G_YY,
    LOG2_E,
    S_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_X,
    S_Y,
    SPLAT,
)

_f = np.float32
_MEAN = _f(-2) / LOG2_E
_COVARIANCE = _f(2) / (LOG2_E * LOG2_E)
_AHEAD = 8  # splats between asking for slots and adding them


@njit(nogil=True, cache=True, error_model="numpy")
def gather(first, end, rows, splats, runs, slots, used, sums, means2d, means2d_abs):
    """Sum the run of slots of each of the splats [first, end), in order, and turn the sums into gradient rows.

    Writes them to `sums` (V, 16), and those of the 2D mean also to the rows of the primitives in `means2d` and
    `means2d_abs` (N, 2).
    """
    for v in range(first, end):
        total = simd.zeros()
        # Runs lie in order of depth, so the next ones are anywhere.
        ahead = np.int64(runs[min(v + _AHEAD, end - 1), 0]) * SPLAT
        simd.prefetch(slots, ahead)
        simd.prefetch(slots, ahead + SPLAT)
        for slot in range(runs[v, 0], runs[v, 1]):
            if used[slot] != 0:
                total = total + simd.load(slots, slot * SPLAT)
        simd.store(sums, v * SPLAT, total)
        if runs[v, 0] < runs[v, 1]:
            # The exponent is -(u^2 + w^2) in base 2: by the mean, -2 (u, w) M; by the covariance, 2 M^T (u, w)^2 M,
            # with M = (P, Q; 0, R) the whitening.
            p, q, r = splats[v, S_P], splats[v, S_Q], splats[v, S_R]
            uu, uw, ww = sums[v, G_XX], sums[v, G_XY], sums[v, G_YY]
            sums[v, S_X] *= _MEAN * p
            sums[v, S_Y] *= _MEAN
            sums[v, G_ABS_X] *= -_MEAN * p
            sums[v, G_ABS_Y] *= -_MEAN
            sums[v, G_XX] = _COVARIANCE * p * p * uu
            sums[v, G_XY] = _COVARIANCE * p * (q * uu + r * uw)
            sums[v, G_YY] = _COVARIANCE * (q * (q * uu + r * uw) + r * (q * uw + r * ww))
            sums[v, S_OPACITY] /= splats[v, S_OPACITY]
        i = rows[v]
        means2d[i, 0] = sums[v, S_X]
        means2d[i, 1] = sums[v, S_Y]
        means2d_abs[i, 0] = sums[v, G_ABS_X]
        means2d_abs[i, 1] = sums[v, G_ABS_Y]


@njit(nogil=True, cache=True)
def weighted_sums(weights, values, sums):
    """Add, channel by channel, ``weights * values`` over all pixels to `sums` float64, in reading order."""
    for y in range(values.shape[0]):
        for x in range(values.shape[1]):
            for c in range(values.shape[2]):
                sums[c] += np.float64(weights[y, x]) * np.float64(values[y, x, c])
