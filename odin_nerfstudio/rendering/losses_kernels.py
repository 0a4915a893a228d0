"""Numba kernel of the photometric loss: L1 and SSIM of two images with the gradient, streamed row by row.

Images are rows of interleaved channels, so a horizontal tap is a step of three floats and every loop is one long run of
the row. The filtered rows live in rings of eleven rows, which stay in the cache. Each row of the result depends on the
images alone and the row sums are added in row order by the caller, so the result does not depend on how the rows are
spread over threads. Taps use explicit fused multiply-adds: the same bits on every processor.

With filtered moments mx, my, xx + yy and xy, per pixel and channel:
``A1 = 2 mx my + C1``, ``A2 = 2 (xy - mx my) + C2``, ``B1 = mx^2 + my^2 + C1``, ``B2 = (xx + yy) - mx^2 - my^2 + C2``,
``SSIM = A1 A2 / (B1 B2)``; derivatives by the moments of x:
``P = dS/d(xy) = 2 A1 / (B1 B2)``, ``Q = dS/d(xx) = -S / B2``,
``R = dS/d(mx) = 2 my A2 / (B1 B2) - 2 mx S / B1 - my P - 2 mx Q``,
and ``dS/dx = F'(R) + 2 x F'(Q) + y F'(P)``, where F' is the transposed filter.

Source: Z. Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity, 2004.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
WINDOW = 11
_REACH = WINDOW - 1
_PAD = 3 * _REACH
_LANES = 16
_C1 = np.float32(0.01**2)
_C2 = np.float32(0.03**2)
_ONE = np.float32(1)
_TWO = np.float32(2)


def _fma_codegen(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding, in float32."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


_fma: Any = intrinsic(_fma_codegen)


@numba.njit(inline="always")
def _along(row, w, out):  # type: ignore[no-untyped-def]
    """Horizontal filter of one row of interleaved channels; len(out) = len(row) - 30."""
    w0, w1, w2, w3, w4, w5 = w[0], w[1], w[2], w[3], w[4], w[5]
    for j in range(out.shape[0]):
        a = w0 * (row[j] + row[j + 30])
        a = _fma(w1, row[j + 3] + row[j + 27], a)
        a = _fma(w2, row[j + 6] + row[j + 24], a)
        a = _fma(w3, row[j + 9] + row[j + 21], a)
        a = _fma(w4, row[j + 12] + row[j + 18], a)
        out[j] = _fma(w5, row[j + 15], a)


@numba.njit(inline="always")
def _across(ring, w, newest, out):  # type: ignore[no-untyped-def]
    """Vertical filter over a ring of eleven rows, of which slot `newest` % 11 is the last. ring: [11, n]; out: [n].

    Two passes: LLVM vectorises a loop over at most eight arrays that might overlap.
    """
    s = (newest + 1) % WINDOW  # the oldest slot
    w0, w1, w2, w3, w4, w5 = w[0], w[1], w[2], w[3], w[4], w[5]
    r0, r1, r2 = ring[s], ring[(s + 1) % WINDOW], ring[(s + 2) % WINDOW]
    r8, r9, r10 = ring[(s + 8) % WINDOW], ring[(s + 9) % WINDOW], ring[(s + 10) % WINDOW]
    for j in range(out.shape[0]):
        a = w0 * (r0[j] + r10[j])
        a = _fma(w1, r1[j] + r9[j], a)
        out[j] = _fma(w2, r2[j] + r8[j], a)
    r3, r4, r5 = ring[(s + 3) % WINDOW], ring[(s + 4) % WINDOW], ring[(s + 5) % WINDOW]
    r6, r7 = ring[(s + 6) % WINDOW], ring[(s + 7) % WINDOW]
    for j in range(out.shape[0]):
        a = _fma(w3, r3[j] + r7[j], out[j])
        a = _fma(w4, r4[j] + r6[j], a)
        out[j] = _fma(w5, r5[j], a)


@numba.njit(inline="always")
def _row_sum(row, lanes):  # type: ignore[no-untyped-def]
    """Sum in a fixed order: sixteen interleaved float32 sums of the row, then those in double."""
    full = row.shape[0] // _LANES
    for c in range(_LANES):
        lanes[c] = 0
    for b in range(full):
        o = b * _LANES
        for c in range(lanes.shape[0]):
            lanes[c] += row[o + c]
    total = 0.0
    for c in range(_LANES):
        total += lanes[c]
    for j in range(full * _LANES, row.shape[0]):
        total += row[j]
    return total


@numba.njit(**_OPTIONS)
def photometric_rows(  # type: ignore[no-untyped-def]
    x, y, w, first, last, l1_weight, ssim_weight, with_gradient, gradient, l1_sums, ssim_sums
):
    """Row sums of |x - y| and of SSIM, and rows of the gradient by x, for rows first..last-1.

    Args:
        x, y: Images as rows of interleaved RGB. [H, 3 W] float32, H and W at least 11.
        w: The window, symmetric. [11] float32.
        l1_weight, ssim_weight: Weights of one value of |x - y| and of one value of the SSIM map in the gradient.
        with_gradient: Whether to write `gradient`.
        gradient: Output. [H, 3 W] float32.
        l1_sums: Output. [H] float64.
        ssim_sums: Output; row r of the SSIM map comes from image rows r..r+10. [H - 10] float64.
    """
    height, n = x.shape
    inner = n - _PAD
    map_rows = height - _REACH
    begin = max(0, first - _REACH) if with_gradient else first  # map rows that the gradient rows need
    end = min(map_rows, last)
    filtered = np.zeros((4, WINDOW, inner), np.float32)
    moment = np.empty((4, inner), np.float32)
    squares = np.empty(n, np.float32)
    product = np.empty(n, np.float32)
    values = np.empty(inner, np.float32)
    padded = np.zeros((3, n + _PAD), np.float32)
    spread = np.zeros((3, WINDOW, n), np.float32)
    back = np.empty((3, n), np.float32)
    lanes = np.empty(_LANES, np.float32)

    for i in range(first, last):
        a, b = x[i], y[i]
        for j in range(n):
            squares[j] = abs(a[j] - b[j])
        l1_sums[i] = _row_sum(squares, lanes)

    for i in range(begin, min(end + _REACH, height) if end > begin else begin):
        a, b = x[i], y[i]
        for j in range(n):
            squares[j] = _fma(a[j], a[j], b[j] * b[j])
            product[j] = a[j] * b[j]
        slot = i % WINDOW
        _along(a, w, filtered[0, slot])
        _along(b, w, filtered[1, slot])
        _along(squares, w, filtered[2, slot])
        _along(product, w, filtered[3, slot])
        r = i - _REACH
        if r < begin:
            continue
        for q in range(4):
            _across(filtered[q], w, i, moment[q])
        mean_x, mean_y, mean_squares, mean_product = moment[0], moment[1], moment[2], moment[3]
        if with_gradient:
            p_row = padded[0, _PAD : _PAD + inner]
            q_row = padded[1, _PAD : _PAD + inner]
            r_row = padded[2, _PAD : _PAD + inner]
            for j in range(inner):
                mx, my = mean_x[j], mean_y[j]
                mm, m2 = mx * my, mx * mx + my * my
                a1, a2 = _TWO * mm + _C1, _TWO * (mean_product[j] - mm) + _C2
                b1, b2 = m2 + _C1, (mean_squares[j] - m2) + _C2
                inverse = _ONE / (b1 * b2)
                s = a1 * a2 * inverse
                values[j] = s
                p = _TWO * a1 * inverse
                q = -(s * b1) * inverse
                p_row[j] = p
                q_row[j] = q
                r_row[j] = _TWO * ((my * a2 - mx * s * b2) * inverse - mx * q) - my * p
        else:
            for j in range(inner):
                mx, my = mean_x[j], mean_y[j]
                mm, m2 = mx * my, mx * mx + my * my
                a1, a2 = _TWO * mm + _C1, _TWO * (mean_product[j] - mm) + _C2
                b1, b2 = m2 + _C1, (mean_squares[j] - m2) + _C2
                values[j] = a1 * a2 * (_ONE / (b1 * b2))
        if r >= first:
            ssim_sums[r] = _row_sum(values, lanes)
        if with_gradient:
            for q in range(3):
                _along(padded[q], w, spread[q, r % WINDOW])
            if r >= first:
                for q in range(3):
                    _across(spread[q], w, r, back[q])
                _gradient_row(x[r], y[r], back, l1_weight, ssim_weight, gradient[r])

    if with_gradient:
        for i in range(max(first, map_rows), last):  # below the last map row
            for k in range(max(map_rows, i - _REACH), i + 1):
                for q in range(3):
                    spread[q, k % WINDOW, :] = 0
            for q in range(3):
                _across(spread[q], w, i, back[q])
            _gradient_row(x[i], y[i], back, l1_weight, ssim_weight, gradient[i])


@numba.njit(inline="always")
def _gradient_row(a, b, back, l1_weight, ssim_weight, out):  # type: ignore[no-untyped-def]
    p, q, r = back[0], back[1], back[2]
    for j in range(out.shape[0]):
        d = a[j] - b[j]
        sign = l1_weight if d > 0 else (-l1_weight if d < 0 else np.float32(0))
        out[j] = _fma(ssim_weight, _fma(b[j], p[j], _fma(_TWO * a[j], q[j], r[j])), sign)
