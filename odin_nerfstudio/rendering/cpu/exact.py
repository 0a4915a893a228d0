"""Sums of float32 numbers without rounding: neither their order nor who adds which of them shows in the result.

A sum is kept in bins of 16 exponents, an int64 each. A number goes to the bin of its exponent, its 24 bits shifted by
what is left of it, so it takes at most 39 bits there, and 2^24 numbers fit. Bins of several sums may be added.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

BINS = 17
"""The last one counts infinities and NaNs."""
_UNIT = -150
"""Exponent of the lowest bit of the first bin."""


@njit(inline="always")
def add(sums, k, value):
    """sums[k] += value. sums (n, BINS) int64, value float32."""
    bits = np.float32(value).view(np.int32)
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    if exponent == 255:
        sums[k, BINS - 1] += 1
    else:
        if exponent > 0:
            mantissa |= 0x800000
        else:
            exponent = 1  # as the smallest normal numbers
        shifted = np.int64(mantissa) << np.int64(exponent & 15)
        sums[k, exponent >> 4] += -shifted if bits < 0 else shifted


def totals(sums: np.ndarray) -> np.ndarray:
    """The sums, rounded once; NaN where something was not finite. (n, BINS) int64 -> (n,) float64."""
    out = np.empty(len(sums))
    for k, bins in enumerate(sums.tolist()):
        exact = sum(value << (16 * b) for b, value in enumerate(bins[:-1]))
        out[k] = math.nan if bins[-1] else math.ldexp(float(exact), _UNIT)
    return out
