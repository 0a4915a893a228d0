"""Layouts shared by the surfel kernels, beside those of `layout`.

A pixel's ray meets the surfel's plane at (s_x, s_y), in standard deviations along its two axes. gsplat computes it as
the cross product h_u x h_v of two planes through the pixel, divided by its third component, with ``h_u = x M2 - M0``
and ``h_v = y M2 - M1`` and the rows M0, M1, M2 of the ray transform. Measured from the projected centre m, with
``dx = x - m_x`` and ``u = M0 - m_x M2``, ``v = M1 - m_y M2``, ``w = M2``, the product is affine in the pixel::

    h_u x h_v = dx A + dy B + C,    A = v x w,    B = w x u,    C = u x v

so a record holds A, B and C, scaled by a common factor, which the division removes.
"""

from __future__ import annotations

import numpy as np

# Surfel record, one row per visible primitive: float32, two cache lines.
R_X, R_Y = 0, 1  # projected centre, pixels
R_A, R_B, R_C = 2, 5, 8  # 3 each
R_LOG2_OPACITY = 11
R_COLOUR = 12  # four channels, unused ones zero
R_NORMAL = 16  # 3, in the world, towards the camera
R_OPACITY = 19
RECORD = 32

# Gradient row, float32: sums over pixels. a, b, c are the products of the exponent's gradient with s_x, s_y and
# s_x^2 + s_y^2, over the third component of the cross product: minus, minus and plus its gradient.
G_C, G_A, G_B = 0, 3, 6  # sums of (a, b, c), of dx (a, b, c), of dy (a, b, c)
G_X, G_Y = 9, 10  # where the low-pass decides: sums of the exponent's gradient times dx, dy
G_ABS_X, G_ABS_Y = 11, 12  # of their magnitudes
G_EXPONENT = 13
G_COLOUR = 16  # 4
G_DEPTH = 20  # what distortion and median depth add to the channel that they read
G_NORMAL = 21  # 3
SUMS = 32

LOW_PASS = np.float32(2)  # the 2D distance counts with this inverse variance, 1 / pixels^2 (sigma is sqrt(1/2) pixels)
HALF_LOG2_E = np.float32(0.5 * 1.4426950408889634)
