"""Gradients of surfels: sums over pixels in a fixed order, then from records back to primitives."""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu import simd
from odin_nerfstudio.rendering.cpu.harmonics import bases, direction_gradient
from odin_nerfstudio.rendering.cpu.layout import C_FX, C_FY, C_POSITION, C_ROTATION
from odin_nerfstudio.rendering.cpu.surfel_layout import (
    G_A,
    G_ABS_X,
    G_ABS_Y,
    G_B,
    G_C,
    G_COLOUR,
    G_DEPTH,
    G_EXPONENT,
    G_NORMAL,
    G_X,
    G_Y,
    LOW_PASS,
    R_COLOUR,
    R_OPACITY,
    SUMS,
)
from odin_nerfstudio.rendering.cpu.surfel_projection import centred, cross, placed, planes, rotation, spanned

_f = np.float32
_ZERO, _ONE = _f(0), _f(1)
_LOW_PASS = np.float64(LOW_PASS)
_AHEAD = 8  # surfels between asking for slots and adding them


@njit(nogil=True, cache=True, error_model="numpy")
def gather(first, end, runs, slots, used, sums):
    """Sum the run of slots of each of the surfels [first, end), in order, into its row of `sums` (V, 32)."""
    for v in range(first, end):
        low, high = simd.zeros(), simd.zeros()
        ahead = np.int64(runs[min(v + _AHEAD, end - 1), 0]) * SUMS  # runs lie in order of depth
        simd.prefetch(slots, ahead)
        simd.prefetch(slots, ahead + 16)
        for slot in range(runs[v, 0], runs[v, 1]):
            if used[slot] != 0:
                low = low + simd.load(slots, slot * SUMS)
                high = high + simd.load(slots, slot * SUMS + 16)
        simd.store(sums, v * SUMS, low)
        simd.store(sums, v * SUMS + 16, high)


@njit(inline="always")
def _plus(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


@njit(inline="always")
def _scaled(a, factor):
    return a[0] * factor, a[1] * factor, a[2] * factor


@njit(inline="always")
def _dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@njit(inline="always")
def _column(camera, k):
    k += C_ROTATION
    return np.float64(camera[k]), np.float64(camera[k + 3]), np.float64(camera[k + 6])


@njit(inline="always")
def _to_world(camera, g):
    """Gradient by a direction in the world of one in the camera's frame."""
    return _dot(_column(camera, 0), g), _dot(_column(camera, 1), g), _dot(_column(camera, 2), g)


@njit(inline="always")
def _of_planes(row, at, factor):
    """Gradient of one of the vectors of a record, from the sums over pixels."""
    return -factor * np.float64(row[at]), -factor * np.float64(row[at + 1]), factor * np.float64(row[at + 2])


@njit(inline="always")
def _aabb_gradient(gx, gy, mx, my, u, v, w, below):
    """Gradients of the projected centre by the rows of the ray transform: by w alone, as those by M0 and M1 are
    multiples of the last value. The centre is ``sum_k f_k M0_k M2_k`` with f = (1, 1, -1) / (w_0^2 + w_1^2 - w_2^2).
    """
    inverse = 1.0 / below
    f = (inverse, inverse, -inverse)
    slope = (f[0] * w[0], f[1] * w[1], f[2] * w[2])
    by_w = (
        f[0] * (gx * (u[0] - mx * w[0]) + gy * (v[0] - my * w[0])),
        f[1] * (gx * (u[1] - mx * w[1]) + gy * (v[1] - my * w[1])),
        f[2] * (gx * (u[2] - mx * w[2]) + gy * (v[2] - my * w[2])),
    )
    return slope, by_w


@njit(inline="always")
def _quaternion_gradient(q, norm, first, second, third):
    """From gradients of the columns of a rotation matrix to that of the quaternion, through its normalization."""
    w, x, y, z = q
    d00, d10, d20 = first
    d01, d11, d21 = second
    d02, d12, d22 = third
    g_w = 2.0 * (x * (d21 - d12) + y * (d02 - d20) + z * (d10 - d01))
    g_x = 2.0 * (w * (d21 - d12) + y * (d10 + d01) + z * (d20 + d02) - 2.0 * x * (d11 + d22))
    g_y = 2.0 * (w * (d02 - d20) + x * (d10 + d01) + z * (d21 + d12) - 2.0 * y * (d00 + d22))
    g_z = 2.0 * (w * (d10 - d01) + x * (d20 + d02) + y * (d21 + d12) - 2.0 * z * (d00 + d11))
    radial = g_w * w + g_x * x + g_y * y + g_z * z
    return (
        (g_w - radial * w) * norm,
        (g_x - radial * x) * norm,
        (g_y - radial * y) * norm,
        (g_z - radial * z) * norm,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def backward(
    first_row,
    end_row,
    first,
    end,
    rows,
    means,
    quats,
    scales,
    colors,
    degree,
    channels,
    last_channel,
    depth_channel,
    camera,
    accumulate,
    accumulate_colors,
    records,
    sums,
    v_means,
    v_quats,
    v_scales,
    v_opacities,
    v_colors,
    v_densify,
    absolute,
):
    """Write the gradients of rows [first_row, end_row), whose visible ones are ``rows[first:end]``.

    Rows without a gradient get zeros, or, with `accumulate`, keep what another camera left there; the others are added
    to it. `accumulate_colors` says the same of the colours. Visible rows of `v_densify` and `absolute` (N, 2) get
    gsplat's ``gradient_2dgs`` and the absolute gradients of the projected centres.
    """
    fx, fy = np.float64(camera[C_FX]), np.float64(camera[C_FY])
    coefficients = (degree + 1) * (degree + 1)
    color_rows, color_channels = v_colors.shape[1], v_colors.shape[2]
    basis = np.empty(16, np.float32)
    v_basis = np.empty(16, np.float32)
    v_color = np.empty(4, np.float32)
    next_visible = first
    for i in range(first_row, end_row):
        if not accumulate:
            for k in range(3):
                v_means[i, k] = _ZERO
                v_scales[i, k] = _ZERO
            for k in range(4):
                v_quats[i, k] = _ZERO
            v_opacities[i] = _ZERO
        if not accumulate_colors:
            for k in range(color_rows):
                for c in range(color_channels):
                    v_colors[i, k, c] = _ZERO
        if not (next_visible < end and rows[next_visible] == i):
            continue
        s = next_visible
        next_visible += 1
        row = sums[s]
        active = False
        for k in range(SUMS):
            active = active or row[k] != _ZERO
        if not active:
            continue
        absolute[i, 0] = LOW_PASS * row[G_ABS_X]
        absolute[i, 1] = LOW_PASS * row[G_ABS_Y]
        v_opacities[i] += row[G_EXPONENT] / records[s, R_OPACITY] if row[G_EXPONENT] != _ZERO else _ZERO
        for k in range(4):
            v_color[k] = row[G_COLOUR + k]
        v_color[last_channel] += row[G_DEPTH]
        v_depth = np.float64(v_color[depth_channel]) if depth_channel >= 0 else 0.0

        # Recompute the projection.
        p = placed(camera, means, i)
        axis_0, axis_1, axis_2, q, norm = rotation(quats, i)
        s0, s1 = np.float64(scales[i, 0]), np.float64(scales[i, 1])
        a, b = spanned(camera, axis_0, s0), spanned(camera, axis_1, s1)
        mx, my, u, v, w, below = centred(camera, a, b, p)
        _, _, _, factor = planes(u, v, w)

        # From A, B and C to the rows u, v, w, and from there to the rows M of the ray transform.
        by_a, by_b, by_c = _of_planes(row, G_A, factor), _of_planes(row, G_B, factor), _of_planes(row, G_C, factor)
        v_u = _plus(cross(by_b, w), cross(v, by_c))
        v_v = _plus(cross(w, by_a), cross(by_c, u))
        v_w = _plus(cross(by_a, v), cross(u, by_b))
        v_densify[i, 0] = _f(v_u[2] * w[2])
        v_densify[i, 1] = _f(v_v[2] * w[2])
        # Measured from the principal point: its part of M0 and M1 goes the same way again when H is taken from M.
        v_w = _plus(v_w, _plus(_scaled(v_u, -mx), _scaled(v_v, -my)))
        gx, gy = _LOW_PASS * np.float64(row[G_X]), _LOW_PASS * np.float64(row[G_Y])
        if gx != 0.0 or gy != 0.0:
            slope, by_w = _aabb_gradient(gx, gy, mx, my, u, v, w, below)
            v_u, v_v = _plus(v_u, _scaled(slope, gx)), _plus(v_v, _scaled(slope, gy))
            v_w = _plus(v_w, by_w)

        # Rows of K [a b p] to half axes and centre.
        v_a = _to_world(camera, (fx * v_u[0], fy * v_v[0], v_w[0]))
        v_b = _to_world(camera, (fx * v_u[1], fy * v_v[1], v_w[1]))
        v_p = _to_world(camera, (fx * v_u[2], fy * v_v[2], v_w[2] + v_depth))
        normal = spanned(camera, axis_2, 1.0)
        sign = 1.0 if -_dot(normal, p) > 0.0 else -1.0
        n = G_NORMAL
        v_normal = (sign * np.float64(row[n]), sign * np.float64(row[n + 1]), sign * np.float64(row[n + 2]))
        g_quat = _quaternion_gradient(q, norm, _scaled(v_a, s0), _scaled(v_b, s1), v_normal)
        for k in range(4):
            v_quats[i, k] += _f(g_quat[k])
        v_scales[i, 0] += _f(_dot(v_a, axis_0))
        v_scales[i, 1] += _f(_dot(v_b, axis_1))

        # Colours.
        g0, g1, g2 = _ZERO, _ZERO, _ZERO  # gradient of the direction from the camera to the mean
        if degree >= 0:
            # Channels that were clamped at zero pass no gradient.
            red = v_color[0] if records[s, R_COLOUR] > _ZERO else _ZERO
            green = v_color[1] if records[s, R_COLOUR + 1] > _ZERO else _ZERO
            blue = v_color[2] if records[s, R_COLOUR + 2] > _ZERO else _ZERO
            dx = means[i, 0] - camera[C_POSITION]
            dy = means[i, 1] - camera[C_POSITION + 1]
            dz = means[i, 2] - camera[C_POSITION + 2]
            d_norm = _ONE / np.sqrt(dx * dx + dy * dy + dz * dz)
            dx, dy, dz = dx * d_norm, dy * d_norm, dz * d_norm
            bases(degree, dx, dy, dz, basis)
            for k in range(coefficients):
                v_basis[k] = red * colors[i, k, 0] + green * colors[i, k, 1] + blue * colors[i, k, 2]
                v_colors[i, k, 0] += basis[k] * red
                v_colors[i, k, 1] += basis[k] * green
                v_colors[i, k, 2] += basis[k] * blue
            if degree >= 1:
                g0, g1, g2 = direction_gradient(degree, dx, dy, dz, v_basis)
                radial = g0 * dx + g1 * dy + g2 * dz
                g0, g1, g2 = (g0 - radial * dx) * d_norm, (g1 - radial * dy) * d_norm, (g2 - radial * dz) * d_norm
        else:
            for c in range(min(channels, color_channels)):
                v_colors[i, 0, c] += v_color[c]
        v_means[i, 0] += _f(v_p[0]) + g0
        v_means[i, 1] += _f(v_p[1]) + g1
        v_means[i, 2] += _f(v_p[2]) + g2
