"""Normals of the surface that a depth image shows, and their gradient; `gsplat.utils.depth_to_normal` on the CPU.

A pixel's normal is the normalized cross product of the differences of the points below and above it, and right and left
of it; the image's border has none. Backward, every depth gathers from its four neighbours, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from odin_nerfstudio.rendering.threads import run

_f = np.float32
_LEAST = _f(1e-12)  # as in torch's normalize
_ROWS = 16  # per piece of work


@njit(inline="always")
def _ray(camera, y, x):
    """Direction in the world of a pixel's ray, of depth one. `camera`: rotation to the world (9), fx, fy, cx, cy."""
    u = (_f(x) - camera[11] + _f(0.5)) / camera[9]
    v = (_f(y) - camera[12] + _f(0.5)) / camera[10]
    return (
        camera[0] * u + camera[1] * v + camera[2],
        camera[3] * u + camera[4] * v + camera[5],
        camera[6] * u + camera[7] * v + camera[8],
    )


@njit(inline="always")
def _difference(depth, camera, y1, x1, y0, x0):
    """Point of one pixel minus that of another."""
    a, b = _ray(camera, y1, x1), _ray(camera, y0, x0)
    d1, d0 = depth[y1, x1], depth[y0, x0]
    return a[0] * d1 - b[0] * d0, a[1] * d1 - b[1] * d0, a[2] * d1 - b[2] * d0


@njit(inline="always")
def _cross(a, b):
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


@njit(nogil=True, cache=True, error_model="numpy")
def forward(first, end, depth, camera, normals):
    """Normals (H, W, 3) of rows [first, end) of a depth image (H, W); zero on the border."""
    height, width = depth.shape
    for y in range(first, end):
        for x in range(width):
            if y < 1 or y > height - 2 or x < 1 or x > width - 2:
                normals[y, x, 0], normals[y, x, 1], normals[y, x, 2] = _f(0), _f(0), _f(0)
                continue
            down, right = _difference(depth, camera, y + 1, x, y - 1, x), _difference(depth, camera, y, x + 1, y, x - 1)
            n = _cross(down, right)
            inverse = _f(1) / max(np.sqrt(n[0] * n[0] + n[1] * n[1] + n[2] * n[2]), _LEAST)
            normals[y, x, 0], normals[y, x, 1], normals[y, x, 2] = n[0] * inverse, n[1] * inverse, n[2] * inverse


@njit(nogil=True, cache=True, error_model="numpy")
def differences(first, end, depth, camera, v_normals, v_differences):
    """Gradients of the differences down and right of the pixels of rows [first, end), (H, W, 6), by their normals'."""
    height, width = depth.shape
    for y in range(first, end):
        for x in range(width):
            out = v_differences[y, x]
            g = (v_normals[y, x, 0], v_normals[y, x, 1], v_normals[y, x, 2])
            inner = 0 < y < height - 1 and 0 < x < width - 1
            if not inner or (g[0] == 0 and g[1] == 0 and g[2] == 0):
                out[:] = _f(0)
                continue
            down, right = _difference(depth, camera, y + 1, x, y - 1, x), _difference(depth, camera, y, x + 1, y, x - 1)
            n = _cross(down, right)
            length = np.sqrt(n[0] * n[0] + n[1] * n[1] + n[2] * n[2])
            inverse = _f(1) / max(length, _LEAST)
            n = (n[0] * inverse, n[1] * inverse, n[2] * inverse)
            along = g[0] * n[0] + g[1] * n[1] + g[2] * n[2] if length > _LEAST else _f(0)
            g = ((g[0] - along * n[0]) * inverse, (g[1] - along * n[1]) * inverse, (g[2] - along * n[2]) * inverse)
            by_down, by_right = _cross(right, g), _cross(g, down)
            out[0], out[1], out[2] = by_down
            out[3], out[4], out[5] = by_right


@njit(nogil=True, cache=True, error_model="numpy")
def collect(first, end, camera, v_differences, v_depth):
    """Gradients of the depths of rows [first, end) from those of the differences of their neighbours."""
    height, width = v_depth.shape
    for y in range(first, end):
        for x in range(width):
            ray = _ray(camera, y, x)
            total = _f(0)
            for k in range(3):
                g = _f(0)
                if y > 0:
                    g += v_differences[y - 1, x, k]
                if y < height - 1:
                    g -= v_differences[y + 1, x, k]
                if x > 0:
                    g += v_differences[y, x - 1, 3 + k]
                if x < width - 1:
                    g -= v_differences[y, x + 1, 3 + k]
                total += ray[k] * g
            v_depth[y, x] = total


def _by_rows(kernel: Any, height: int, *arguments: Any) -> None:
    spans = [(y, min(y + _ROWS, height)) for y in range(0, height, _ROWS)]
    run(lambda k: kernel(*spans[k], *arguments), len(spans))


class _DepthNormals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, depths: Tensor, cameras: np.ndarray) -> Tensor:
        values = depths.detach().contiguous().numpy()
        normals = np.empty((*values.shape[:3], 3), np.float32)
        for k, camera in enumerate(cameras):
            _by_rows(forward, values.shape[1], values[k, :, :, 0], camera, normals[k])
        ctx.save_for_backward(depths)
        ctx.cameras = cameras
        return torch.from_numpy(normals)

    @staticmethod
    def backward(ctx: Any, v_normals: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (depths,) = ctx.saved_tensors
        values, incoming = depths.detach().contiguous().numpy(), v_normals.contiguous().numpy()
        height = values.shape[1]
        v_depths = np.empty_like(values)
        scratch = np.empty((*values.shape[1:3], 6), np.float32)
        for k, camera in enumerate(ctx.cameras):
            _by_rows(differences, height, values[k, :, :, 0], camera, incoming[k], scratch)
            _by_rows(collect, height, camera, scratch, v_depths[k, :, :, 0])
        return torch.from_numpy(v_depths), None


def depth_normals(depths: Tensor, rotations: np.ndarray, Ks: np.ndarray) -> Tensor:
    """Normals in the world of depth images.

    Args:
        depths: along z. [C, H, W, 1] float32; differentiable.
        rotations: camera to world. [C, 3, 3].
        Ks: intrinsics in pixels. [C, 3, 3].

    Returns:
        Unit normals towards the camera; zero on the border and where the depth is zero. [C, H, W, 3].
    """
    cameras = np.empty((len(Ks), 13), np.float32)
    cameras[:, :9] = rotations.reshape(-1, 9)
    cameras[:, 9:] = np.stack([Ks[:, 0, 0], Ks[:, 1, 1], Ks[:, 0, 2], Ks[:, 1, 2]], axis=-1)
    return _DepthNormals.apply(depths, cameras)  # type: ignore[no-any-return]
