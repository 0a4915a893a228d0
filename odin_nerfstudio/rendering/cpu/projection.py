"""From primitives to splats: EWA projection (Zwicker et al. 2002) with gsplat's culling, fused with the colours.

Two passes. `project` handles every row and decides which are visible; `shade` handles the visible rows alone and packs
what the pixel kernels need into one record per splat.

Determinants of 2D covariances are summed from squared minors instead of subtracting products: the value is gsplat's,
without the cancellation that makes thin splats inaccurate in float32.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from odin_nerfstudio.rendering.cpu.harmonics import bases
from odin_nerfstudio.rendering.cpu.layout import (
    C_CX,
    C_CY,
    C_EPS2D,
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
    C_X_HIGH,
    C_X_LOW,
    C_Y_HIGH,
    C_Y_LOW,
    CAMERA,
    LOG2_ALPHA_MIN,
    S_COLOUR,
    S_LOG2_OPACITY,
    S_OPACITY,
    S_P,
    S_Q,
    S_R,
    S_RADIUS,
    S_X,
    S_Y,
    TILE,
)

_f = np.float32
_ZERO, _HALF, _ONE, _TWO, _THREE = _f(0), _f(0.5), _f(1), _f(2), _f(3)
_WHITEN = _f(np.sqrt(0.5 * 1.4426950408889634))  # from half a square in base e to a square in base 2
_RADIUS_MAX = _f(2**30)  # keeps the conversion to int32 defined
_TILE = _f(TILE)


def camera_record(
    viewmat: np.ndarray,
    intrinsics: np.ndarray,
    width: int,
    height: int,
    eps2d: float,
    near: float,
    far: float,
    radius_clip: float,
) -> np.ndarray:
    """Pack one camera into float32 (32,); `viewmat` (4, 4) is world to camera, `intrinsics` (3, 3) in pixels."""
    camera = np.zeros(CAMERA, np.float32)
    camera[C_ROTATION : C_ROTATION + 9] = viewmat[:3, :3].ravel()
    camera[C_TRANSLATION : C_TRANSLATION + 3] = viewmat[:3, 3]
    fx, fy, cx, cy = intrinsics[0, 0], intrinsics[1, 1], intrinsics[0, 2], intrinsics[1, 2]
    camera[C_FX], camera[C_FY], camera[C_CX], camera[C_CY] = fx, fy, cx, cy
    camera[C_WIDTH], camera[C_HEIGHT] = width, height
    margin_x, margin_y = _f(0.15) * _f(width) / fx, _f(0.15) * _f(height) / fy
    camera[C_X_LOW], camera[C_X_HIGH] = -(cx / fx + margin_x), (_f(width) - cx) / fx + margin_x
    camera[C_Y_LOW], camera[C_Y_HIGH] = -(cy / fy + margin_y), (_f(height) - cy) / fy + margin_y
    camera[C_EPS2D], camera[C_NEAR], camera[C_FAR], camera[C_RADIUS_CLIP] = eps2d, near, far, radius_clip
    inverse = inverse_rotation(camera)
    for row in range(3):  # in plain arithmetic, as a library's bits may differ by processor
        camera[C_POSITION + row] = -sum(float(inverse[row, k]) * float(viewmat[k, 3]) for k in range(3))
    return camera


def inverse_rotation(camera: np.ndarray) -> np.ndarray:
    """Inverse of the upper left 3 x 3 of the view matrix, float64, by cofactors."""
    a, b, c, d, e, f, g, h, i = (float(v) for v in camera[C_ROTATION : C_ROTATION + 9])
    cofactors = [e * i - f * h, c * h - b * i, b * f - c * e, f * g - d * i, a * i - c * g, c * d - a * f]
    cofactors += [d * h - e * g, b * g - a * h, a * e - b * d]
    determinant = a * cofactors[0] + b * cofactors[3] + c * cofactors[6]
    if determinant == 0.0:
        raise ValueError("viewmats: the rotation part of a view matrix is singular")
    return np.array(cofactors).reshape(3, 3) / determinant


@njit(inline="always")
def rotation_matrix(w, x, y, z):
    """Rows of the rotation matrix of a unit quaternion."""
    return (
        _ONE - _TWO * (y * y + z * z),
        _TWO * (x * y - w * z),
        _TWO * (x * z + w * y),
        _TWO * (x * y + w * z),
        _ONE - _TWO * (x * x + z * z),
        _TWO * (y * z - w * x),
        _TWO * (x * z - w * y),
        _TWO * (y * z + w * x),
        _ONE - _TWO * (x * x + y * y),
    )


@njit(inline="always")
def camera_axis(camera, row, r0, r1, r2, scale):
    """Component `row` in the camera's frame of a principal axis (r0, r1, r2) of length `scale`."""
    k = C_ROTATION + 3 * row
    return (camera[k] * r0 + camera[k + 1] * r1 + camera[k + 2] * r2) * scale


@njit(inline="always")
def to_camera(camera, row, x, y, z):
    """Component `row` of a world position in the camera's frame."""
    k = C_ROTATION + 3 * row
    return camera[k] * x + camera[k + 1] * y + camera[k + 2] * z + camera[C_TRANSLATION + row]


@njit(inline="always")
def clamp(value, low, high):
    return min(max(value, low), high)


@njit(nogil=True, cache=True, error_model="numpy")
def project(
    first,
    end,
    means,
    quats,
    scales,
    opacities,
    camera,
    antialiased,
    radii,
    means2d,
    depths,
    conics,
    spread_y,
    compensated,
):
    """Project rows [first, end). Writes radii (N,) int32, means2d (N, 2), depths (N,), conics (N, 3) and the opacities
    that the pixels will use (N,); zero where culled (opacities only if antialiased). `spread_y` (N,) gets the variance
    along y where visible. Returns the visible count.
    """
    fx, fy, cx, cy = camera[C_FX], camera[C_FY], camera[C_CX], camera[C_CY]
    width, height = camera[C_WIDTH], camera[C_HEIGHT]
    eps2d, near, far, radius_clip = camera[C_EPS2D], camera[C_NEAR], camera[C_FAR], camera[C_RADIUS_CLIP]
    visible = 0
    for i in range(first, end):
        radii[i] = 0
        means2d[i, 0] = _ZERO
        means2d[i, 1] = _ZERO
        depths[i] = _ZERO
        conics[i, 0] = _ZERO
        conics[i, 1] = _ZERO
        conics[i, 2] = _ZERO
        compensated[i] = _ZERO if antialiased else opacities[i]
        wx, wy, wz = means[i, 0], means[i, 1], means[i, 2]
        z = to_camera(camera, 2, wx, wy, wz)
        # Conditions are stated so that NaN culls.
        if not (z >= near and z <= far and z > _ZERO):
            continue
        x = to_camera(camera, 0, wx, wy, wz)
        y = to_camera(camera, 1, wx, wy, wz)
        qw, qx, qy, qz = quats[i, 0], quats[i, 1], quats[i, 2], quats[i, 3]
        norm = _ONE / np.sqrt(qw * qw + qx * qx + qy * qy + qz * qz)
        r00, r01, r02, r10, r11, r12, r20, r21, r22 = rotation_matrix(qw * norm, qx * norm, qy * norm, qz * norm)
        s0, s1, s2 = scales[i, 0], scales[i, 1], scales[i, 2]
        rz = _ONE / z
        jx, jy = fx * rz, fy * rz
        jxz = -jx * clamp(x * rz, camera[C_X_LOW], camera[C_X_HIGH])
        jyz = -jy * clamp(y * rz, camera[C_Y_LOW], camera[C_Y_HIGH])
        # Rows u, v of J W R S: the image axes of the ellipsoid's three half axes.
        n2 = camera_axis(camera, 2, r00, r10, r20, s0)
        u0 = jx * camera_axis(camera, 0, r00, r10, r20, s0) + jxz * n2
        v0 = jy * camera_axis(camera, 1, r00, r10, r20, s0) + jyz * n2
        n2 = camera_axis(camera, 2, r01, r11, r21, s1)
        u1 = jx * camera_axis(camera, 0, r01, r11, r21, s1) + jxz * n2
        v1 = jy * camera_axis(camera, 1, r01, r11, r21, s1) + jyz * n2
        n2 = camera_axis(camera, 2, r02, r12, r22, s2)
        u2 = jx * camera_axis(camera, 0, r02, r12, r22, s2) + jxz * n2
        v2 = jy * camera_axis(camera, 1, r02, r12, r22, s2) + jyz * n2
        a = u0 * u0 + u1 * u1 + u2 * u2
        b = u0 * v0 + u1 * v1 + u2 * v2
        c = v0 * v0 + v1 * v1 + v2 * v2
        m01, m02, m12 = u0 * v1 - u1 * v0, u0 * v2 - u2 * v0, u1 * v2 - u2 * v1
        det_sharp = m01 * m01 + m02 * m02 + m12 * m12
        det = det_sharp + eps2d * (a + c) + eps2d * eps2d
        if not det > _ZERO:
            continue
        mid, half = _HALF * (a + c) + eps2d, _HALF * (a - c)
        radius = np.ceil(_THREE * np.sqrt(mid + np.sqrt(max(_f(0.01), half * half + b * b))))
        mx, my = jx * x + cx, jy * y + cy
        if not (
            radius > radius_clip
            and mx + radius > _ZERO
            and mx - radius < width
            and my + radius > _ZERO
            and my - radius < height
        ):
            continue
        visible += 1
        radii[i] = np.int32(min(radius, _RADIUS_MAX))
        means2d[i, 0] = mx
        means2d[i, 1] = my
        depths[i] = z
        inverse = _ONE / det
        conics[i, 0] = (c + eps2d) * inverse
        conics[i, 1] = -b * inverse
        conics[i, 2] = (a + eps2d) * inverse
        spread_y[i] = c + eps2d
        if antialiased:
            compensated[i] = opacities[i] * np.sqrt(det_sharp * inverse)
    return visible


@njit(inline="always")
def log2(value):
    """log2 of a positive float32 to float32 accuracy, in plain arithmetic: a library's bits differ by processor."""
    mantissa, exponent = math.frexp(np.float64(value))
    if mantissa < 0.7071067811865476:
        mantissa *= 2.0
        exponent -= 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11)))))
    return _f(exponent + 2.8853900817779268 * s * series)


@njit(inline="always")
def tile_range(centre, radius, count):
    """Tiles [first, end) along one axis that gsplat's 3-sigma box touches."""
    t, r = centre / _TILE, radius / _TILE
    limit = _f(count)
    return np.int64(clamp(np.floor(t - r), _ZERO, limit)), np.int64(clamp(np.ceil(t + r), _ZERO, limit))


@njit(nogil=True, cache=True, error_model="numpy")
def shade(
    first,
    end,
    rows,
    means,
    colors,
    degree,
    channels,
    depth_channel,
    camera,
    radii,
    means2d,
    depths,
    conics,
    spread_y,
    opacities,
    splats,
    tile_bound,
):
    """Pack visible rows ``rows[first:end]`` into `splats` (V, 16) and bound the tiles of each, `tile_bound` (V,) int32.

    `colors` is (N, K, 3) spherical harmonics where `degree` >= 0, else (N, 1, D) final values of `channels` channels.
    `depth_channel` is the colour channel that carries the depth, or -1.
    """
    tiles_x = (np.int64(camera[C_WIDTH]) + TILE - 1) // TILE
    tiles_y = (np.int64(camera[C_HEIGHT]) + TILE - 1) // TILE
    basis = np.empty(16, np.float32)
    count = (degree + 1) * (degree + 1)
    for v in range(first, end):
        i = rows[v]
        splats[v, S_X] = means2d[i, 0]
        splats[v, S_Y] = means2d[i, 1]
        root = np.sqrt(conics[i, 0])
        splats[v, S_P] = root * _WHITEN
        splats[v, S_Q] = conics[i, 1] / root * _WHITEN
        splats[v, S_R] = _WHITEN / np.sqrt(spread_y[i])
        opacity = opacities[i]
        radius = _f(radii[i])
        splats[v, S_OPACITY] = opacity
        splats[v, S_RADIUS] = radius
        for k in range(4):
            splats[v, S_COLOUR + k] = _ZERO
        for k in range(S_RADIUS + 1, 16):
            splats[v, k] = _ZERO
        log2_opacity = _f(-np.inf)
        tile_bound[v] = 0
        if opacity > _ZERO:
            log2_opacity = log2(opacity)
            if log2_opacity >= LOG2_ALPHA_MIN:
                x0, x1 = tile_range(means2d[i, 0], radius, tiles_x)
                y0, y1 = tile_range(means2d[i, 1], radius, tiles_y)
                tile_bound[v] = (x1 - x0) * (y1 - y0)
        splats[v, S_LOG2_OPACITY] = log2_opacity
        if degree >= 0:
            x = means[i, 0] - camera[C_POSITION]
            y = means[i, 1] - camera[C_POSITION + 1]
            z = means[i, 2] - camera[C_POSITION + 2]
            norm = _ONE / np.sqrt(x * x + y * y + z * z)
            bases(degree, x * norm, y * norm, z * norm, basis)
            red, green, blue = _HALF, _HALF, _HALF
            for k in range(count):
                red += basis[k] * colors[i, k, 0]
                green += basis[k] * colors[i, k, 1]
                blue += basis[k] * colors[i, k, 2]
            splats[v, S_COLOUR] = max(red, _ZERO)
            splats[v, S_COLOUR + 1] = max(green, _ZERO)
            splats[v, S_COLOUR + 2] = max(blue, _ZERO)
        else:
            for k in range(channels):
                splats[v, S_COLOUR + k] = colors[i, 0, k]
        if depth_channel >= 0:
            splats[v, S_COLOUR + depth_channel] = depths[i]
