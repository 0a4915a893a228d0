"""Real spherical harmonics of degree 0 to 3 and their derivatives, as functions to inline into kernels.

The bases and their signs are those of gsplat, after Sloan, "Efficient Spherical Harmonic Evaluation", JCGT 2013.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_f = np.float32
_ONE, _TWO, _THREE = _f(1), _f(2), _f(3)
Y0 = _f(0.2820947917738781)
Y1 = _f(0.48860251190292)
Y2_XY, Y2_Z, Y2_ZZ, Y2_0 = (
    _f(0.5462742152960395),
    _f(-1.092548430592079),
    _f(0.9461746957575601),
    _f(0.3153915652525201),
)
Y3_C, Y3_C0, Y3_B, Y3_A = _f(-2.285228997322329), _f(0.4570457994644658), _f(1.445305721320277), _f(-0.5900435899266435)
Y3_Z, Y3_Z0 = _f(1.865881662950577), _f(1.119528997770346)


@njit(inline="always")
def bases(degree, x, y, z, out):
    """Fill `out`, float32 (16,), with the bases up to `degree` at the unit direction (x, y, z)."""
    out[0] = Y0
    if degree >= 1:
        out[1] = -Y1 * y
        out[2] = Y1 * z
        out[3] = -Y1 * x
    if degree >= 2:
        zz = z * z
        c1 = x * x - y * y
        s1 = _TWO * x * y
        out[4] = Y2_XY * s1
        out[5] = Y2_Z * z * y
        out[6] = Y2_ZZ * zz - Y2_0
        out[7] = Y2_Z * z * x
        out[8] = Y2_XY * c1
        if degree >= 3:
            c = Y3_C * zz + Y3_C0
            b = Y3_B * z
            out[9] = Y3_A * (x * s1 + y * c1)
            out[10] = b * s1
            out[11] = c * y
            out[12] = z * (Y3_Z * zz - Y3_Z0)
            out[13] = c * x
            out[14] = b * c1
            out[15] = Y3_A * (x * c1 - y * s1)


@njit(inline="always")
def direction_gradient(degree, x, y, z, g):
    """Gradient with respect to the unit direction of sum_k g[k] basis_k; `g` is float32 (16,)."""
    gx = _f(0)
    gy = _f(0)
    gz = _f(0)
    if degree >= 1:
        gx -= Y1 * g[3]
        gy -= Y1 * g[1]
        gz += Y1 * g[2]
    if degree >= 2:
        a = _TWO * Y2_XY
        gx += a * (y * g[4] + x * g[8]) + Y2_Z * z * g[7]
        gy += a * (x * g[4] - y * g[8]) + Y2_Z * z * g[5]
        gz += Y2_Z * (y * g[5] + x * g[7]) + _TWO * Y2_ZZ * z * g[6]
        if degree >= 3:
            zz = z * z
            c1 = x * x - y * y
            s1 = _TWO * x * y
            c = Y3_C * zz + Y3_C0
            b = _TWO * Y3_B * z
            gx += _THREE * Y3_A * (s1 * g[9] + c1 * g[15]) + b * (y * g[10] + x * g[14]) + c * g[13]
            gy += _THREE * Y3_A * (c1 * g[9] - s1 * g[15]) + b * (x * g[10] - y * g[14]) + c * g[11]
            gz += (
                Y3_B * (s1 * g[10] + c1 * g[14])
                + _TWO * Y3_C * z * (y * g[11] + x * g[13])
                + (_THREE * Y3_Z * zz - Y3_Z0) * g[12]
            )
    return gx, gy, gz
