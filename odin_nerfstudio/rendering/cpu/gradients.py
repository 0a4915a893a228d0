"""Gradients of `projection`: from splats back to primitives and camera, in one pass over the rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.exact import add
from odin_nerfstudio.rendering.cpu.harmonics import bases, direction_gradient
from odin_nerfstudio.rendering.cpu.layout import (
    C_EPS2D,
    C_FX,
    C_FY,
    C_POSITION,
    C_ROTATION,
    C_X_HIGH,
    C_X_LOW,
    C_Y_HIGH,
    C_Y_LOW,
    G_XX,
    G_XY,
    G_YY,
    S_COLOUR,
    S_OPACITY,
)
from odin_nerfstudio.rendering.cpu.projection import camera_axis, clamp, rotation_matrix, to_camera

_f = np.float32
_ZERO, _HALF, _ONE, _TWO = _f(0), _f(0.5), _f(1), _f(2)
_COMPENSATION_EPS = _f(1e-6)  # as gsplat, keeps the gradient of a square root near zero finite
CAMERA_SUMS = 15  # rotation 9, translation 3, camera position 3


@njit(inline="always")
def _axis_gradient(camera, q0, q1, q2, scale, jx, jy, jxz, jyz, ga, gb, gc):
    """Gradients through one half axis of the ellipsoid, whose direction is (q0, q1, q2) and length `scale`.

    Returns those of the four entries of J, of the length, of the direction (3), and of the axis in the camera's
    frame (3). `ga`, `gb`, `gc` are the entries of the symmetric gradient of the 2D covariance.
    """
    n0, n1, n2 = (
        camera_axis(camera, 0, q0, q1, q2, scale),
        camera_axis(camera, 1, q0, q1, q2, scale),
        camera_axis(camera, 2, q0, q1, q2, scale),
    )
    u, v = jx * n0 + jxz * n2, jy * n1 + jyz * n2
    gu, gv = _TWO * (ga * u + gb * v), _TWO * (gb * u + gc * v)
    h0, h1, h2 = jx * gu, jy * gv, jxz * gu + jyz * gv
    k = C_ROTATION
    m0 = camera[k] * h0 + camera[k + 3] * h1 + camera[k + 6] * h2
    m1 = camera[k + 1] * h0 + camera[k + 4] * h1 + camera[k + 7] * h2
    m2 = camera[k + 2] * h0 + camera[k + 5] * h1 + camera[k + 8] * h2
    along = q0 * m0 + q1 * m1 + q2 * m2
    return gu * n0, gv * n1, gu * n2, gv * n2, along, m0 * scale, m1 * scale, m2 * scale, h0, h1, h2


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
    opacities,
    colors,
    degree,
    channels,
    depth_channel,
    camera,
    antialiased,
    accumulate,
    accumulate_colors,
    splats,
    v_means2d,
    v_depths,
    v_splats,
    v_means,
    v_quats,
    v_scales,
    v_opacities,
    v_colors,
    want_camera,
    camera_sums,
):
    """Write the gradients of rows [first_row, end_row), whose visible ones are ``rows[first:end]``.

    Rows that are not visible get zeros, or, with `accumulate`, keep what another camera left there; visible rows are
    added to it. `accumulate_colors` says the same of the colours. With `want_camera` the camera's gradients are summed
    over these rows into `camera_sums`, (CAMERA_SUMS, BINS) of `exact`. `v_depths` (V,) is the gradient of the depths
    beside that of the depth channel.
    """
    fx, fy, eps2d = camera[C_FX], camera[C_FY], camera[C_EPS2D]
    coefficients = (degree + 1) * (degree + 1)
    color_rows, color_channels = v_colors.shape[1], v_colors.shape[2]
    basis = np.empty(16, np.float32)
    v_basis = np.empty(16, np.float32)
    v = first
    for i in range(first_row, end_row):
        visible = v < end and rows[v] == i
        if not visible and accumulate and accumulate_colors:
            continue
        active = False
        if visible:
            active = v_means2d[i, 0] != _ZERO or v_means2d[i, 1] != _ZERO or v_depths[v] != _ZERO
            for k in range(G_XX, S_COLOUR + 4):
                active = active or v_splats[v, k] != _ZERO
            v += 1
        if not active:
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
            continue
        s = v - 1

        # Recompute the projection.
        wx, wy, wz = means[i, 0], means[i, 1], means[i, 2]
        x, y, z = (
            to_camera(camera, 0, wx, wy, wz),
            to_camera(camera, 1, wx, wy, wz),
            to_camera(camera, 2, wx, wy, wz),
        )
        qw, qx, qy, qz = quats[i, 0], quats[i, 1], quats[i, 2], quats[i, 3]
        norm = _ONE / np.sqrt(qw * qw + qx * qx + qy * qy + qz * qz)
        qw, qx, qy, qz = qw * norm, qx * norm, qy * norm, qz * norm
        r00, r01, r02, r10, r11, r12, r20, r21, r22 = rotation_matrix(qw, qx, qy, qz)
        s0, s1, s2 = scales[i, 0], scales[i, 1], scales[i, 2]
        rz = _ONE / z
        jx, jy = fx * rz, fy * rz
        slope_x, slope_y = x * rz, y * rz
        cx = clamp(slope_x, camera[C_X_LOW], camera[C_X_HIGH])
        cy = clamp(slope_y, camera[C_Y_LOW], camera[C_Y_HIGH])
        jxz, jyz = -jx * cx, -jy * cy

        ga, gb, gc = v_splats[s, G_XX], v_splats[s, G_XY], v_splats[s, G_YY]
        v_opacity = v_splats[s, S_OPACITY]
        if antialiased:
            # Compensation = sqrt(det / blurred det); both determinants from squared minors, as in the projection.
            n2 = camera_axis(camera, 2, r00, r10, r20, s0)
            u0 = jx * camera_axis(camera, 0, r00, r10, r20, s0) + jxz * n2
            w0 = jy * camera_axis(camera, 1, r00, r10, r20, s0) + jyz * n2
            n2 = camera_axis(camera, 2, r01, r11, r21, s1)
            u1 = jx * camera_axis(camera, 0, r01, r11, r21, s1) + jxz * n2
            w1 = jy * camera_axis(camera, 1, r01, r11, r21, s1) + jyz * n2
            n2 = camera_axis(camera, 2, r02, r12, r22, s2)
            u2 = jx * camera_axis(camera, 0, r02, r12, r22, s2) + jxz * n2
            w2 = jy * camera_axis(camera, 1, r02, r12, r22, s2) + jyz * n2
            a, b, c = u0 * u0 + u1 * u1 + u2 * u2, u0 * w0 + u1 * w1 + u2 * w2, w0 * w0 + w1 * w1 + w2 * w2
            m01, m02, m12 = u0 * w1 - u1 * w0, u0 * w2 - u2 * w0, u1 * w2 - u2 * w1
            det_sharp = m01 * m01 + m02 * m02 + m12 * m12
            grown = eps2d * (a + c) + eps2d * eps2d
            inverse = _ONE / (det_sharp + grown)
            compensation = np.sqrt(det_sharp * inverse)
            share = grown * inverse  # 1 - compensation^2
            g = v_opacity * opacities[i] * _HALF / (compensation + _COMPENSATION_EPS) * inverse
            ga += g * (share * (c + eps2d) - eps2d)
            gb -= g * share * b
            gc += g * (share * (a + eps2d) - eps2d)
            v_opacity *= compensation

        # Covariance to J, rotation and scales, one half axis at a time.
        ja, jb, jc, jd, v_s0, d00, d10, d20, h00, h01, h02 = _axis_gradient(
            camera, r00, r10, r20, s0, jx, jy, jxz, jyz, ga, gb, gc
        )
        v_jx, v_jy, v_jxz, v_jyz = ja, jb, jc, jd
        ja, jb, jc, jd, v_s1, d01, d11, d21, h10, h11, h12 = _axis_gradient(
            camera, r01, r11, r21, s1, jx, jy, jxz, jyz, ga, gb, gc
        )
        v_jx, v_jy, v_jxz, v_jyz = v_jx + ja, v_jy + jb, v_jxz + jc, v_jyz + jd
        ja, jb, jc, jd, v_s2, d02, d12, d22, h20, h21, h22 = _axis_gradient(
            camera, r02, r12, r22, s2, jx, jy, jxz, jyz, ga, gb, gc
        )
        v_jx, v_jy, v_jxz, v_jyz = v_jx + ja, v_jy + jb, v_jxz + jc, v_jyz + jd

        # Rotation matrix to quaternion, through the normalization.
        g_w = _TWO * (qx * (d21 - d12) + qy * (d02 - d20) + qz * (d10 - d01))
        g_x = _TWO * (qw * (d21 - d12) + qy * (d10 + d01) + qz * (d20 + d02) - _TWO * qx * (d11 + d22))
        g_y = _TWO * (qw * (d02 - d20) + qx * (d10 + d01) + qz * (d21 + d12) - _TWO * qy * (d00 + d22))
        g_z = _TWO * (qw * (d10 - d01) + qx * (d20 + d02) + qy * (d21 + d12) - _TWO * qz * (d00 + d11))
        radial = g_w * qw + g_x * qx + g_y * qy + g_z * qz
        g_w, g_x = (g_w - radial * qw) * norm, (g_x - radial * qx) * norm
        g_y, g_z = (g_y - radial * qy) * norm, (g_z - radial * qz) * norm

        # Mean in the camera's frame: image position, depth, and J.
        g0, g1 = v_means2d[i, 0], v_means2d[i, 1]
        v_depth = v_depths[s]
        if depth_channel >= 0:
            v_depth += v_splats[s, S_COLOUR + depth_channel]
        c0, c1 = jx * g0, jy * g1
        c2 = v_depth - (jx * slope_x * g0 + jy * slope_y * g1)
        c2 -= rz * (jx * v_jx + jy * v_jy)
        if cx == slope_x:
            c0 -= jx * rz * v_jxz
            c2 += _TWO * jx * rz * cx * v_jxz
        else:
            c2 += jx * rz * cx * v_jxz
        if cy == slope_y:
            c1 -= jy * rz * v_jyz
            c2 += _TWO * jy * rz * cy * v_jyz
        else:
            c2 += jy * rz * cy * v_jyz
        k = C_ROTATION
        g_mx = camera[k] * c0 + camera[k + 3] * c1 + camera[k + 6] * c2
        g_my = camera[k + 1] * c0 + camera[k + 4] * c1 + camera[k + 7] * c2
        g_mz = camera[k + 2] * c0 + camera[k + 5] * c1 + camera[k + 8] * c2

        # Colours.
        b0, b1, b2 = _ZERO, _ZERO, _ZERO  # gradient of the direction from the camera to the mean
        if degree >= 0:
            # Channels that were clamped at zero pass no gradient.
            v_red = v_splats[s, S_COLOUR] if splats[s, S_COLOUR] > _ZERO else _ZERO
            v_green = v_splats[s, S_COLOUR + 1] if splats[s, S_COLOUR + 1] > _ZERO else _ZERO
            v_blue = v_splats[s, S_COLOUR + 2] if splats[s, S_COLOUR + 2] > _ZERO else _ZERO
            dx, dy, dz = wx - camera[C_POSITION], wy - camera[C_POSITION + 1], wz - camera[C_POSITION + 2]
            d_norm = _ONE / np.sqrt(dx * dx + dy * dy + dz * dz)
            dx, dy, dz = dx * d_norm, dy * d_norm, dz * d_norm
            bases(degree, dx, dy, dz, basis)
            for k in range(coefficients):
                b = basis[k]
                v_basis[k] = v_red * colors[i, k, 0] + v_green * colors[i, k, 1] + v_blue * colors[i, k, 2]
                if accumulate_colors:
                    v_colors[i, k, 0] += b * v_red
                    v_colors[i, k, 1] += b * v_green
                    v_colors[i, k, 2] += b * v_blue
                else:
                    v_colors[i, k, 0] = b * v_red
                    v_colors[i, k, 1] = b * v_green
                    v_colors[i, k, 2] = b * v_blue
            if not accumulate_colors:
                for k in range(coefficients, color_rows):
                    for c in range(color_channels):
                        v_colors[i, k, c] = _ZERO
            if degree >= 1:
                b0, b1, b2 = direction_gradient(degree, dx, dy, dz, v_basis)
                radial = b0 * dx + b1 * dy + b2 * dz
                b0, b1, b2 = (b0 - radial * dx) * d_norm, (b1 - radial * dy) * d_norm, (b2 - radial * dz) * d_norm
        else:
            for c in range(color_channels):
                g = v_splats[s, S_COLOUR + c] if c < channels else _ZERO
                if accumulate_colors:
                    v_colors[i, 0, c] += g
                else:
                    v_colors[i, 0, c] = g

        if accumulate:
            v_means[i, 0] += g_mx + b0
            v_means[i, 1] += g_my + b1
            v_means[i, 2] += g_mz + b2
            v_quats[i, 0] += g_w
            v_quats[i, 1] += g_x
            v_quats[i, 2] += g_y
            v_quats[i, 3] += g_z
            v_scales[i, 0] += v_s0
            v_scales[i, 1] += v_s1
            v_scales[i, 2] += v_s2
            v_opacities[i] += v_opacity
        else:
            v_means[i, 0] = g_mx + b0
            v_means[i, 1] = g_my + b1
            v_means[i, 2] = g_mz + b2
            v_quats[i, 0] = g_w
            v_quats[i, 1] = g_x
            v_quats[i, 2] = g_y
            v_quats[i, 3] = g_z
            v_scales[i, 0] = v_s0
            v_scales[i, 1] = v_s1
            v_scales[i, 2] = v_s2
            v_opacities[i] = v_opacity

        if want_camera:
            # Rotation: from the mean, and from the half axes n_k = W (scale_k direction_k).
            a0x, a0y, a0z = r00 * s0, r10 * s0, r20 * s0
            a1x, a1y, a1z = r01 * s1, r11 * s1, r21 * s1
            a2x, a2y, a2z = r02 * s2, r12 * s2, r22 * s2
            add(camera_sums, 0, c0 * wx + h00 * a0x + h10 * a1x + h20 * a2x)
            add(camera_sums, 1, c0 * wy + h00 * a0y + h10 * a1y + h20 * a2y)
            add(camera_sums, 2, c0 * wz + h00 * a0z + h10 * a1z + h20 * a2z)
            add(camera_sums, 3, c1 * wx + h01 * a0x + h11 * a1x + h21 * a2x)
            add(camera_sums, 4, c1 * wy + h01 * a0y + h11 * a1y + h21 * a2y)
            add(camera_sums, 5, c1 * wz + h01 * a0z + h11 * a1z + h21 * a2z)
            add(camera_sums, 6, c2 * wx + h02 * a0x + h12 * a1x + h22 * a2x)
            add(camera_sums, 7, c2 * wy + h02 * a0y + h12 * a1y + h22 * a2y)
            add(camera_sums, 8, c2 * wz + h02 * a0z + h12 * a1z + h22 * a2z)
            add(camera_sums, 9, c0)
            add(camera_sums, 10, c1)
            add(camera_sums, 11, c2)
            add(camera_sums, 12, -b0)
            add(camera_sums, 13, -b1)
            add(camera_sums, 14, -b2)
