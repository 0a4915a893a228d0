"""Cameras of a capture: one pinhole model, one pose for each view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Cameras:
    """Views that share one pinhole camera. Pixel (0, 0) has its centre at (0.5, 0.5), as in COLMAP."""

    width: int
    height: int
    focal: float
    """Focal length in pixels, for both axes; the principal point is the image's centre."""
    centres: NDArray[np.float64]
    """[V, 3] camera centres in the world (x east, y north, z up)."""
    rotations: NDArray[np.float64]
    """[V, 3, 3] world to camera; camera axes as in OpenCV (x right, y down, z forward)."""

    def __len__(self) -> int:
        return len(self.centres)

    def project(self, view: int, points: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Pixels [N, 2] and depths [N] of world points [N, 3]. Pixels of points behind the camera mean nothing."""
        local = (points - self.centres[view]) @ self.rotations[view].T
        depth = local[:, 2]
        safe = np.where(np.abs(depth) < 1e-9, 1e-9, depth)
        xy = self.focal * local[:, :2] / safe[:, None] + (self.width / 2, self.height / 2)
        return xy, depth

    def rays(self, view: int, pixels: NDArray[np.floating]) -> NDArray[np.float32]:
        """Rays [..., 6] (origin, direction) through pixels [..., 2]; the direction has depth 1."""
        local = np.empty((*pixels.shape[:-1], 3))
        local[..., :2] = (pixels - (self.width / 2, self.height / 2)) / self.focal
        local[..., 2] = 1.0
        rays = np.empty((*pixels.shape[:-1], 6), dtype=np.float32)
        rays[..., :3] = self.centres[view]
        rays[..., 3:] = local @ self.rotations[view]
        return rays


def look_along(forward: NDArray[np.floating], roll: NDArray[np.floating] | float = 0.0) -> NDArray[np.float64]:
    """World to camera rotations [V, 3, 3] that look along ``forward`` [V, 3] with z up, then roll by radians [V]."""
    ahead = forward / np.linalg.norm(forward, axis=1, keepdims=True)
    right = np.cross(ahead, (0.0, 0.0, 1.0))
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    down = np.cross(ahead, right)
    cos, sin = np.cos(roll), np.sin(roll)
    cos, sin = np.broadcast_to(cos, len(ahead))[:, None], np.broadcast_to(sin, len(ahead))[:, None]
    return np.stack([cos * right + sin * down, cos * down - sin * right, ahead], axis=1)
