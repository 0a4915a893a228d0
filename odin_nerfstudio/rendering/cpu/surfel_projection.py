"""From primitives to surfel records: ray transforms and bounding boxes as gsplat's 2DGS (Huang et al. 2024), and
colours.

A surfel is the plane spanned by the first two axes of a primitive; the third scale has no influence. Geometry is
computed in float64: gsplat's formula for the box subtracts squares of pixel coordinates. Measured from the projected
centre nothing cancels.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.harmonics import bases
from odin_nerfstudio.rendering.cpu.layout import (
    C_CX,
    C_CY,
    C_FAR,
    C_FX,
    C_FY,
    C_HEIGHT,
    C_NEAR,
    C_POSITION,
    C_RADIUS_CLIP,
    C_ROTATION,
    C_TRANSLATION,
    C_WIDTH,
    LOG2_ALPHA_MIN,
    S_LOG2_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_RADIUS,
    S_X,
    S_Y,
    TILE,
)
from odin_nerfstudio.rendering.cpu.projection import log2, tile_range
from odin_nerfstudio.rendering.cpu.surfel_layout import (
    HALF_LOG2_E,
    R_A,
    R_B,
    R_C,
    R_COLOUR,
    R_LOG2_OPACITY,
    R_NORMAL,
    R_OPACITY,
    R_X,
    R_Y,
    RECORD,
)

_f = np.float32
_ZERO, _HALF, _ONE = _f(0), _f(0.5), _f(1)
_RADIUS_MAX = 2.0**30  # keeps the conversion to int32 defined
_LEAST_VARIANCE = 1e-4  # gsplat's, pixels^2
# An outline that comes nearer to the camera's plane than this share of the squared depth is no ellipse to rely on.
_FLAT = 0.81
_AROUND = 1.5  # times radius plus 64 pixels: covers all tiles that the box touches


@njit(inline="always")
def turned(camera, row, x, y, z):
    """Component `row` in the camera's frame of a direction; float64."""
    k = C_ROTATION + 3 * row
    return np.float64(camera[k]) * x + np.float64(camera[k + 1]) * y + np.float64(camera[k + 2]) * z


@njit(inline="always")
def rotation(quats, i):
    """Columns of the rotation matrix of row i; the unit quaternion; one over the length of the given one. float64."""
    w, x, y, z = np.float64(quats[i, 0]), np.float64(quats[i, 1]), np.float64(quats[i, 2]), np.float64(quats[i, 3])
    norm = 1.0 / np.sqrt(w * w + x * x + y * y + z * z)
    w, x, y, z = w * norm, x * norm, y * norm, z * norm
    first = (1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z), 2.0 * (x * z - w * y))
    second = (2.0 * (x * y - w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z + w * x))
    third = (2.0 * (x * z + w * y), 2.0 * (y * z - w * x), 1.0 - 2.0 * (x * x + y * y))
    return first, second, third, (w, x, y, z), norm


@njit(inline="always")
def placed(camera, means, i):
    """Centre of row i in the camera's frame, float64."""
    x, y, z = np.float64(means[i, 0]), np.float64(means[i, 1]), np.float64(means[i, 2])
    k = C_TRANSLATION
    return (
        turned(camera, 0, x, y, z) + np.float64(camera[k]),
        turned(camera, 1, x, y, z) + np.float64(camera[k + 1]),
        turned(camera, 2, x, y, z) + np.float64(camera[k + 2]),
    )


@njit(inline="always")
def spanned(camera, axis, scale):
    """A half axis in the camera's frame, float64."""
    s = np.float64(scale)
    x, y, z = axis
    return turned(camera, 0, x, y, z) * s, turned(camera, 1, x, y, z) * s, turned(camera, 2, x, y, z) * s


@njit(inline="always")
def centred(camera, a, b, p):
    """Projected centre relative to the principal point, m (2), and the rows u, v, w of the ray transform measured from
    it.

    `a`, `b`, `p` are half axes and centre in the camera's frame. The last value is the denominator q - z^2 of gsplat's
    box, with q the squared depth of the half axes; it is zero where the box is undefined.
    """
    fx, fy = np.float64(camera[C_FX]), np.float64(camera[C_FY])
    w = (a[2], b[2], p[2])
    below = a[2] * a[2] + b[2] * b[2] - p[2] * p[2]
    inverse = 1.0 / below
    mx = fx * (a[0] * a[2] + b[0] * b[2] - p[0] * p[2]) * inverse
    my = fy * (a[1] * a[2] + b[1] * b[2] - p[1] * p[2]) * inverse
    u = (fx * a[0] - mx * w[0], fx * b[0] - mx * w[1], fx * p[0] - mx * w[2])
    v = (fy * a[1] - my * w[0], fy * b[1] - my * w[1], fy * p[1] - my * w[2])
    return mx, my, u, v, w, below


@njit(inline="always")
def cross(a, b):
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


@njit(inline="always")
def largest(a):
    return max(abs(a[0]), max(abs(a[1]), abs(a[2])))


@njit(inline="always")
def planes(u, v, w):
    """A, B, C of the layout, and the factor that brings their largest entry to 1."""
    a, b, c = cross(v, w), cross(w, u), cross(u, v)
    size = max(largest(a), max(largest(b), largest(c)))
    factor = 1.0 / size if size > 0.0 else 1.0
    return a, b, c, factor


@njit(nogil=True, cache=True, error_model="numpy")
def project(first, end, means, quats, scales, camera, radii, means2d, depths):
    """Project rows [first, end). Writes radii (N,) int32, means2d (N, 2) and depths (N,) float32; zero where culled."""
    cx, cy = np.float64(camera[C_CX]), np.float64(camera[C_CY])
    width, height = np.float64(camera[C_WIDTH]), np.float64(camera[C_HEIGHT])
    near, far, clip = np.float64(camera[C_NEAR]), np.float64(camera[C_FAR]), np.float64(camera[C_RADIUS_CLIP])
    for i in range(first, end):
        radii[i] = 0
        means2d[i, 0] = _ZERO
        means2d[i, 1] = _ZERO
        depths[i] = _ZERO
        p = placed(camera, means, i)
        # Conditions are stated so that NaN culls.
        if not (p[2] >= near and p[2] <= far and _f(p[2]) > _ZERO):
            continue
        first_axis, second_axis, _, _, _ = rotation(quats, i)
        a, b = spanned(camera, first_axis, scales[i, 0]), spanned(camera, second_axis, scales[i, 1])
        mx, my, u, v, _, below = centred(camera, a, b, p)
        if not (below < 0.0 or below > 0.0):
            continue
        inverse = -1.0 / below
        spread_x = (u[0] * u[0] + u[1] * u[1] - u[2] * u[2]) * inverse
        spread_y = (v[0] * v[0] + v[1] * v[1] - v[2] * v[2]) * inverse
        radius = np.ceil(3.0 * np.sqrt(max(_LEAST_VARIANCE, max(spread_x, spread_y))))
        x, y = mx + cx, my + cy
        if not (radius > clip and x + radius > 0.0 and x - radius < width and y + radius > 0.0 and y - radius < height):
            continue
        radii[i] = np.int32(min(radius, _RADIUS_MAX))
        means2d[i, 0] = _f(x)
        means2d[i, 1] = _f(y)
        depths[i] = _f(p[2])


@njit(inline="always")
def _outline(u, v, w, reach, radius, x, y, out):
    """Write to the row `out` (16,), for `binning.emit`, an ellipse around the projected centre that holds every pixel
    where one of the two squared distances is at most `reach`.

    The surfel's outline at that distance is the conic with the dual matrix T diag(reach, reach, -1) T^T. Its own centre
    lies off the projected one by d; the ellipse (1 + t) E + (1 + 1/t) d d^T around the projected centre holds it for
    any t > 0. Adding the disc of the low-pass as a multiple of the identity makes it hold that too.
    """
    low_pass = 0.5 * reach
    below = reach * (w[0] * w[0] + w[1] * w[1]) - w[2] * w[2]
    around = _AROUND * (np.float64(radius) + 64.0)
    xx, xy, yy = around * around, 0.0, around * around
    if below < -(1.0 - _FLAT) * w[2] * w[2]:
        inverse = 1.0 / below
        dx = (reach * (u[0] * w[0] + u[1] * w[1]) - u[2] * w[2]) * inverse
        dy = (reach * (v[0] * w[0] + v[1] * w[1]) - v[2] * w[2]) * inverse
        exx = dx * dx - (reach * (u[0] * u[0] + u[1] * u[1]) - u[2] * u[2]) * inverse
        exy = dx * dy - (reach * (u[0] * v[0] + u[1] * v[1]) - u[2] * v[2]) * inverse
        eyy = dy * dy - (reach * (v[0] * v[0] + v[1] * v[1]) - v[2] * v[2]) * inverse
        exx, eyy = max(exx, 0.0), max(eyy, 0.0)
        t = np.sqrt((dx * dx + dy * dy) / (exx + eyy + low_pass + 1e-12)) + 1e-9
        grow, add = 1.0 + t, 1.0 + 1.0 / t
        exx = grow * exx + add * dx * dx + low_pass + 1e-6
        exy = grow * exy + add * dx * dy
        eyy = grow * eyy + add * dy * dy + low_pass + 1e-6
        if exx * eyy - exy * exy > 1e-9 * exx * eyy and exx + eyy < xx:
            xx, xy, yy = exx, exy, eyy
    det = xx * yy - xy * xy
    root = np.sqrt(yy / det)
    out[S_X] = x
    out[S_Y] = y
    out[S_P] = _f(root)
    out[S_Q] = _f(-xy / det / root)
    out[S_R] = _f(1.0 / np.sqrt(yy))
    out[S_RADIUS] = radius
    out[S_LOG2_OPACITY] = LOG2_ALPHA_MIN + _ONE  # the ellipse itself is the outline


@njit(nogil=True, cache=True, error_model="numpy")
def shade(
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
    radii,
    means2d,
    depths,
    records,
    outlines,
    tile_bound,
    transforms,
    normals,
):
    """Pack visible rows ``rows[first:end]`` into `records` (V, 32) and `outlines` (V, 16), bound the tiles of each,
    `tile_bound` (V,) int32, and note ray transforms (V, 9) and normals in the camera's frame (V, 3).

    `colors` is (N, K, 3) spherical harmonics where `degree` >= 0, else (N, 1, D) final values of `channels` channels.
    `depth_channel` is the colour channel that carries the depth, or -1.
    """
    tiles_x = (np.int64(camera[C_WIDTH]) + TILE - 1) // TILE
    tiles_y = (np.int64(camera[C_HEIGHT]) + TILE - 1) // TILE
    cx, cy = np.float64(camera[C_CX]), np.float64(camera[C_CY])
    basis = np.empty(16, np.float32)
    count = (degree + 1) * (degree + 1)
    for k in range(first, end):
        i = rows[k]
        p = placed(camera, means, i)
        first_axis, second_axis, third_axis, _, _ = rotation(quats, i)
        a, b = spanned(camera, first_axis, scales[i, 0]), spanned(camera, second_axis, scales[i, 1])
        mx, my, u, v, w, _ = centred(camera, a, b, p)
        plane_a, plane_b, plane_c, factor = planes(u, v, w)
        normal = spanned(camera, third_axis, 1.0)
        sign = 1.0 if -(normal[0] * p[0] + normal[1] * p[1] + normal[2] * p[2]) > 0.0 else -1.0
        record = records[k]
        for j in range(RECORD):
            record[j] = _ZERO
        x, y = means2d[i, 0], means2d[i, 1]
        record[R_X] = x
        record[R_Y] = y
        for j in range(3):
            record[R_A + j] = _f(plane_a[j] * factor)
            record[R_B + j] = _f(plane_b[j] * factor)
            # The record's centre is rounded; C moves along with it.
            shifted = plane_c[j] + (np.float64(x) - (mx + cx)) * plane_a[j] + (np.float64(y) - (my + cy)) * plane_b[j]
            record[R_C + j] = _f(shifted * factor)
            record[R_NORMAL + j] = _f(sign * third_axis[j])
            normals[k, j] = _f(sign * normal[j])
            transforms[k, j] = _f(u[j] + (mx + cx) * w[j])
            transforms[k, 3 + j] = _f(v[j] + (my + cy) * w[j])
            transforms[k, 6 + j] = _f(w[j])
        opacity = opacities[i]
        record[R_OPACITY] = opacity
        log2_opacity = _f(-np.inf)
        tile_bound[k] = 0
        outline = outlines[k]
        for j in range(outlines.shape[1]):
            outline[j] = _ZERO
        if opacity > _ZERO:
            log2_opacity = log2(opacity)
            if log2_opacity >= LOG2_ALPHA_MIN:
                radius = _f(radii[i])
                x0, x1 = tile_range(x, radius, tiles_x)
                y0, y1 = tile_range(y, radius, tiles_y)
                tile_bound[k] = (x1 - x0) * (y1 - y0)
                reach = np.float64(log2_opacity - LOG2_ALPHA_MIN) / np.float64(HALF_LOG2_E) * 1.0001 + 1e-4
                _outline(u, v, w, reach, radius, x, y, outline)
        record[R_LOG2_OPACITY] = log2_opacity
        if degree >= 0:
            dx = means[i, 0] - camera[C_POSITION]
            dy = means[i, 1] - camera[C_POSITION + 1]
            dz = means[i, 2] - camera[C_POSITION + 2]
            norm = _ONE / np.sqrt(dx * dx + dy * dy + dz * dz)
            bases(degree, dx * norm, dy * norm, dz * norm, basis)
            red, green, blue = _HALF, _HALF, _HALF
            for j in range(count):
                red += basis[j] * colors[i, j, 0]
                green += basis[j] * colors[i, j, 1]
                blue += basis[j] * colors[i, j, 2]
            record[R_COLOUR] = max(red, _ZERO)
            record[R_COLOUR + 1] = max(green, _ZERO)
            record[R_COLOUR + 2] = max(blue, _ZERO)
        else:
            for j in range(channels):
                record[R_COLOUR + j] = colors[i, 0, j]
        if depth_channel >= 0:
            record[R_COLOUR + depth_channel] = depths[i]
