"""Numba kernels of `noise`, row by row, in float64 and without library functions: the same bits everywhere."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORDS = 9
"""64-bit words a row draws: three coordinates of twelve 16-bit numbers."""
SILENT_LOGIT = -0.38
"""Rows of a larger opacity (0.41) get no noise; the paper's factor is below 4e-18 for them."""
STEEPNESS, THRESHOLD = 100.0, 0.005
"""Noise fades with opacity o as 1 / (1 + exp(100 (o - 0.005)))."""
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693147180369123816490, 1.90821492927058770002e-10
FACTORIALS = tuple(1.0 / float(np.prod(np.arange(1, k + 1, dtype=np.float64))) for k in range(13, -1, -1))
"""Coefficients of exp, from the highest power down."""
EXP_LIMIT = 690.0

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_LOW_16 = np.uint64(0xFFFF)


@numba.njit(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp(x) to a few units in the last place, for |x| clipped to 690."""
    x = min(max(x, -EXP_LIMIT), EXP_LIMIT)
    k = np.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = FACTORIALS[0]
    for c in FACTORIALS[1:]:
        p = p * r + c
    return p * np.int64((np.int64(k) + np.int64(1023)) << np.int64(52)).view(np.float64)


@numba.njit(inline="always")
def _word(key, index):  # type: ignore[no-untyped-def]
    """The index-th output of SplitMix64 seeded with key (Steele et al. 2014)."""
    z = key + index * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@numba.njit(inline="always")
def _variate(key, row, axis):  # type: ignore[no-untyped-def]
    """One coordinate of a row's noise: the sum of twelve uniform numbers, mean 0, variance 1, within 6."""
    total = np.int64(0)
    first = np.uint64(row) * np.uint64(WORDS) + np.uint64(axis) * np.uint64(3) + np.uint64(1)
    for j in range(3):
        w = _word(key, first + np.uint64(j))
        total += np.int64(w & _LOW_16) + np.int64((w >> np.uint64(16)) & _LOW_16)
        total += np.int64((w >> np.uint64(32)) & _LOW_16) + np.int64(w >> np.uint64(48))
    return np.float64(total + np.int64(6 - 6 * 65536)) / 65536.0


@numba.njit(inline="always")
def _fading(logit):  # type: ignore[no-untyped-def]
    """How much of the noise a primitive of this opacity gets."""
    opacity = 1.0 / (1.0 + _exp(-logit))
    return 1.0 / (1.0 + _exp(STEEPNESS * (opacity - THRESHOLD)))


@numba.njit(**_OPTIONS)
def add(means, log_scales, quats, logits, places, mask, key, scale):  # type: ignore[no-untyped-def]
    """means[i] += scale fading(o) Sigma z for the rows of the mask (empty: all). Arrays as in `noise.PositionNoise`.

    places: Row of the whole model of each row. [N] int32; empty: the rows are all of it.
    """
    some, whole = mask.shape[0] > 0, places.shape[0] == 0
    for i in range(means.shape[0]):
        if (some and mask[i] == 0) or not logits[i, 0] <= SILENT_LOGIT:
            continue
        w, x, y, z = (
            np.float64(quats[i, 0]),
            np.float64(quats[i, 1]),
            np.float64(quats[i, 2]),
            np.float64(quats[i, 3]),
        )
        norm = ((w * w + x * x) + y * y) + z * z
        n = 2.0 / max(norm, 1e-24)
        r00, r01, r02 = 1.0 - n * (y * y + z * z), n * (x * y - w * z), n * (x * z + w * y)
        r10, r11, r12 = n * (x * y + w * z), 1.0 - n * (x * x + z * z), n * (y * z - w * x)
        r20, r21, r22 = n * (x * z - w * y), n * (y * z + w * x), 1.0 - n * (x * x + y * y)
        row = i if whole else np.int64(places[i])
        a, b, c = _variate(key, row, 0), _variate(key, row, 1), _variate(key, row, 2)
        factor = scale * _fading(np.float64(logits[i, 0]))
        t0 = ((r00 * a + r10 * b) + r20 * c) * _exp(2.0 * np.float64(log_scales[i, 0])) * factor
        t1 = ((r01 * a + r11 * b) + r21 * c) * _exp(2.0 * np.float64(log_scales[i, 1])) * factor
        t2 = ((r02 * a + r12 * b) + r22 * c) * _exp(2.0 * np.float64(log_scales[i, 2])) * factor
        means[i, 0] = np.float32(np.float64(means[i, 0]) + ((r00 * t0 + r01 * t1) + r02 * t2))
        means[i, 1] = np.float32(np.float64(means[i, 1]) + ((r10 * t0 + r11 * t1) + r12 * t2))
        means[i, 2] = np.float32(np.float64(means[i, 2]) + ((r20 * t0 + r21 * t1) + r22 * t2))


@numba.njit(**_OPTIONS)
def reach(means, log_scales, logits, places, versions, step, least_lag, keys, scales, grow, fade, out):  # type: ignore[no-untyped-def]
    """How far the noise of missing updates can move any coordinate of a row, see `noise.PositionNoise.reach`.

    Args:
        places: As in `add`.
        keys, scales: Of steps step - 1, step - 2, ... [L].
        grow, fade: Largest growth of a log scale and largest fall of an opacity logit, by lag. [L + 1].
        out: [N] float32.
    """
    whole = places.shape[0] == 0
    for i in range(means.shape[0]):
        lag = max(step - versions[i], least_lag)
        out[i] = np.float32(0)
        if lag <= 0 or lag > keys.shape[0]:
            continue
        logit = np.float64(logits[i, 0]) - fade[lag]
        if logit > SILENT_LOGIT:
            continue
        lengths, row = 0.0, i if whole else np.int64(places[i])
        for k in range(lag):
            a, b, c = _variate(keys[k], row, 0), _variate(keys[k], row, 1), _variate(keys[k], row, 2)
            lengths += scales[k] * np.sqrt(a * a + b * b + c * c)
        largest = max(np.float64(log_scales[i, 0]), max(np.float64(log_scales[i, 1]), np.float64(log_scales[i, 2])))
        moved = lengths * _fading(logit) * _exp(2.0 * (largest + grow[lag]))
        size = abs(np.float64(means[i, 0])) + abs(np.float64(means[i, 1])) + abs(np.float64(means[i, 2]))
        out[i] = np.float32((moved + lag * 2.0**-23 * (size + moved)) * (1.0 + 1e-6))
