"""Ray casting of a mesh: images, and the questions that tracks ask (what is hit, what is seen)."""

from __future__ import annotations

import numpy as np
import open3d as o3d
from numpy.typing import NDArray

from odin_nerfstudio.tools.sampling.cameras import Cameras
from odin_nerfstudio.tools.sampling.mesh import Mesh
from odin_nerfstudio.tools.sampling.texture import SUN, shade

#: Rays per pixel along each image axis.
SUPERSAMPLING = 2


class Renderer:
    """A mesh in a ray caster."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._scene = o3d.t.geometry.RaycastingScene()
        self._scene.add_triangles(
            o3d.core.Tensor.from_numpy(mesh.vertices), o3d.core.Tensor.from_numpy(np.ascontiguousarray(mesh.triangles))
        )
        self._sun = np.asarray(SUN) / np.linalg.norm(SUN)

    def hits(self, rays: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """First hits of rays [R, 6]: distance in lengths of the direction [R] (inf: none), triangle [R] (-1: none),
        and unit normal towards the ray's origin [R, 3]."""
        answer = self._scene.cast_rays(o3d.core.Tensor.from_numpy(np.ascontiguousarray(rays)))
        distance = answer["t_hit"].numpy()
        triangle = answer["primitive_ids"].numpy().astype(np.int64)
        triangle[~np.isfinite(distance)] = -1
        normal = answer["primitive_normals"].numpy()
        away = np.einsum("rc,rc->r", normal, rays[:, 3:]) > 0
        return distance, triangle, np.where(away[:, None], -normal, normal)

    def visible(self, centre: NDArray[np.floating], points: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Whether no surface lies between a camera's centre [3] and points [N, 3] on surfaces -> [N]."""
        rays = np.empty((len(points), 6), dtype=np.float32)
        rays[:, :3] = centre
        rays[:, 3:] = points - centre
        # The point's own surface is at 1; it may lie a little off it.
        blocked = self._scene.test_occlusions(o3d.core.Tensor.from_numpy(rays), tfar=1.0 - 1e-3)
        return ~blocked.numpy()

    def image(self, cameras: Cameras, view: int) -> NDArray[np.uint8]:
        """The view's image [H, W, 3], sRGB."""
        mesh, n = self.mesh, SUPERSAMPLING
        rays = cameras.rays(view, _sample_pixels(cameras.width, cameras.height)).reshape(-1, 6)
        distance, triangle, normal = self.hits(rays)
        hit = triangle >= 0
        points = rays[:, :3] + np.where(hit, distance, 0)[:, None] * rays[:, 3:]
        length = np.linalg.norm(rays[:, 3:], axis=1)
        facing = -np.einsum("rc,rc->r", normal, rays[:, 3:]) / length
        # A pixel's footprint grows with distance and, at a slant, with one over the cosine; the square root is a
        # compromise between its two axes.
        pixels = distance * length / cameras.focal / np.sqrt(np.maximum(facing, 0.05))
        sunlit = np.zeros(len(rays), dtype=bool)
        sunlit[hit] = self._sunlit(points[hit] + normal[hit] * 2e-3 * np.maximum(distance[hit, None] * 0.05, 1))
        colours = np.empty((len(rays), 3), dtype=np.float32)
        materials = np.where(hit, mesh.materials[triangle], -1).astype(np.int32)
        shade(points, normal, materials, mesh.objects[triangle], mesh.table, sunlit, pixels.astype(np.float32), colours)
        linear = colours.reshape(cameras.height, n, cameras.width, n, 3).mean(axis=(1, 3))
        return _srgb(linear)

    def _sunlit(self, points: NDArray[np.floating]) -> NDArray[np.bool_]:
        rays = np.empty((len(points), 6), dtype=np.float32)
        rays[:, :3] = points
        rays[:, 3:] = self._sun
        return ~self._scene.test_occlusions(o3d.core.Tensor.from_numpy(rays)).numpy()


def _sample_pixels(width: int, height: int) -> NDArray[np.float64]:
    """Sample positions [H * n, W * n, 2] in pixels, n x n in each pixel."""
    n = SUPERSAMPLING
    x = (np.arange(width * n) + 0.5) / n
    y = (np.arange(height * n) + 0.5) / n
    return np.stack(np.meshgrid(x, y), axis=-1)


def _srgb(linear: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Linear RGB to 8-bit sRGB (IEC 61966-2-1)."""
    linear = np.clip(linear, 0.0, 1.0)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (encoded * 255 + 0.5).astype(np.uint8)
