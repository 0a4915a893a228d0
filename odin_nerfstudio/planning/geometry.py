"""Co-visibility from geometry, where a dataset has no tracks: projected seed points, or sampled frusta."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.spatial import KDTree

POINTS_PER_CELL = 4
DEPTH_TOLERANCE = 0.15
SAMPLES_PER_VIEW = 512
MOST_SAMPLES = 100_000
ASSUMED_OVERLAP = 0.7


@dataclass(frozen=True)
class ViewGeometry:
    """Pinhole cameras of V views (distortion is ignored: co-visibility does not hang on a few pixels).

    Attributes:
        world_to_camera: OpenCV convention: x right, y down, z forward. (V, 4, 4)
        K: Intrinsics in pixels. (V, 3, 3)
        width: Image widths in pixels. (V,)
        height: Image heights in pixels. (V,)
    """

    world_to_camera: np.ndarray
    K: np.ndarray
    width: np.ndarray
    height: np.ndarray

    def __post_init__(self) -> None:
        views = len(self.world_to_camera)
        shapes = (self.world_to_camera.shape, self.K.shape, self.width.shape, self.height.shape)
        if shapes != ((views, 4, 4), (views, 3, 3), (views,), (views,)):
            raise ValueError(f"world_to_camera, K, width, height: want (V,4,4), (V,3,3), (V,), (V,), got {shapes}")

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.world_to_camera)

    def centers(self) -> np.ndarray:
        """Camera centres in the world frame. (V, 3) float64"""
        w2c = np.asarray(self.world_to_camera, dtype=np.float64)
        return -np.einsum("vji,vj->vi", w2c[:, :3, :3], w2c[:, :3, 3])

    def project(self, view: int, xyz: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Points inside one view's image.

        Args:
            view: Which view.
            xyz: World points. (P, 3)

        Returns:
            Point rows (n,), column and row in pixels (n,), (n,), and depth (n,) of the points in front of the camera
            and inside the image.
        """
        w2c = np.asarray(self.world_to_camera[view], dtype=np.float64)
        camera = xyz @ w2c[:3, :3].T + w2c[:3, 3]
        rows = np.flatnonzero(camera[:, 2] > 1e-6)
        x, y, z = camera[rows].T
        K = np.asarray(self.K[view], dtype=np.float64)
        column = K[0, 0] * x / z + K[0, 2]
        line = K[1, 1] * y / z + K[1, 2]
        inside = (column >= 0) & (column < self.width[view]) & (line >= 0) & (line < self.height[view])
        return rows[inside], column[inside], line[inside], z[inside]


def projected_incidence(cameras: ViewGeometry, xyz: np.ndarray) -> sparse.csr_matrix:
    """Points that each view sees, hidden ones left out.

    The points in an image are sorted into square cells, ``POINTS_PER_CELL`` of them per cell on average; a point counts
    as seen if it is at most ``DEPTH_TOLERANCE`` (relative) behind the nearest point of its cell.

    Args:
        cameras: The views.
        xyz: Seed points in the world frame. (P, 3)

    Returns:
        (V, P) CSR bool, columns ascending.
    """
    xyz = np.asarray(xyz, dtype=np.float64)
    return _stack((_visible(cameras, view, xyz) for view in range(cameras.views)), cameras.views, len(xyz))


def _visible(cameras: ViewGeometry, view: int, xyz: np.ndarray) -> np.ndarray:
    rows, column, line, depth = cameras.project(view, xyz)
    if not len(rows):
        return rows
    area = float(cameras.width[view]) * float(cameras.height[view])
    cell = max(1.0, np.sqrt(area * POINTS_PER_CELL / len(rows)))
    across = int(np.ceil(cameras.width[view] / cell)) + 1
    key = (line // cell).astype(np.int64) * across + (column // cell).astype(np.int64)
    nearest = np.full(int(key.max()) + 1, np.inf)
    np.minimum.at(nearest, key, depth)
    return rows[depth <= nearest[key] * (1.0 + DEPTH_TOLERANCE)]


def frustum_incidence(cameras: ViewGeometry, seed: int = 0) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Overlap of view frusta, by samples: the last resort, since nothing is known of the scene but its cameras.

    Each view throws ``SAMPLES_PER_VIEW`` points (fewer if all would make more than ``MOST_SAMPLES``) into its own
    frustum, at 0.5 to 1.5 times the depth of the scene; a view sees the points of all that fall into its image no
    deeper than twice its own scene depth. The depth is the distance to the point that all cameras look at where most do
    (an orbit), else the one at which neighbouring images would overlap by ``ASSUMED_OVERLAP`` (a flight over terrain).

    Args:
        cameras: The views.
        seed: Seeds the samples.

    Returns:
        (V, P) CSR bool, and the samples (P, 3) float32.
    """
    depth = _scene_depth(cameras)
    count = max(8, min(SAMPLES_PER_VIEW, MOST_SAMPLES // max(cameras.views, 1)))
    rng = np.random.default_rng([seed, 0x0D14])
    parts = []
    for view in range(cameras.views):
        u = rng.random((count, 3))
        z = depth[view] * (0.5 + u[:, 2])
        pixels = np.stack([u[:, 0] * cameras.width[view], u[:, 1] * cameras.height[view], np.ones(len(u))], axis=1)
        local = (pixels @ np.linalg.inv(np.asarray(cameras.K[view], np.float64)).T) * z[:, None]
        w2c = np.asarray(cameras.world_to_camera[view], np.float64)
        parts.append((local - w2c[:3, 3]) @ w2c[:3, :3])
    xyz = np.concatenate(parts)

    def seen(view: int) -> np.ndarray:
        rows, _, _, z = cameras.project(view, xyz)
        return rows[z <= 2.0 * depth[view]]

    return _stack((seen(v) for v in range(cameras.views)), cameras.views, len(xyz)), xyz.astype(np.float32)


def _scene_depth(cameras: ViewGeometry) -> np.ndarray:
    """Assumed distance from each camera to what it looks at. (V,) float64, positive"""
    centers = cameras.centers()
    forward = np.asarray(cameras.world_to_camera, np.float64)[:, 2, :3]
    if cameras.views < 2:
        return np.ones(cameras.views)
    # Least-squares meeting point of the optical axes: sum (I - d d^T) x = sum (I - d d^T) c.
    across = np.eye(3) - forward[:, :, None] * forward[:, None, :]
    normal = across.sum(axis=0)
    if np.linalg.cond(normal) < 1e4:
        focus = np.linalg.solve(normal, np.einsum("vij,vj->i", across, centers))
        ahead = np.einsum("vi,vi->v", focus - centers, forward)
        distance = np.linalg.norm(focus - centers, axis=1)
        # An orbit: nearly all look at the focus, within half a field of view.
        if np.mean(ahead > 0.7 * distance) > 0.8:
            return np.maximum(ahead, 1e-3 * max(float(distance.max()), 1e-9))
    nearest = KDTree(centers).query(centers, k=2)[0][:, 1]
    typical = float(np.median(nearest[nearest > 0])) if np.any(nearest > 0) else 1.0
    baseline = np.maximum(nearest, 0.25 * typical)
    field = np.minimum(cameras.width / cameras.K[:, 0, 0], cameras.height / cameras.K[:, 1, 1])
    return baseline / ((1.0 - ASSUMED_OVERLAP) * field)


def coverage(cameras: ViewGeometry, incidence: sparse.csr_matrix, xyz: np.ndarray) -> np.ndarray:
    """How much of the image each observed point stands for, the importance of an observation.

    A point is given the size of a fresh primitive, the mean distance r to its three nearest points (splatfacto's
    initial scale), and covers pi (f r / z)² pixels of a view at depth z, at most the image.

    Args:
        cameras: The views, in the frame of ``xyz``.
        incidence: Observations. (V, P) CSR
        xyz: Points. (P, 3)

    Returns:
        Share of the image per observation, in the order of ``incidence.indices``. (nnz,) float32
    """
    xyz = np.asarray(xyz, dtype=np.float64)
    neighbours = min(4, len(xyz))
    near = KDTree(xyz).query(xyz, k=neighbours)[0] if neighbours > 1 else np.zeros((len(xyz), 1))
    radius = np.atleast_2d(near)[:, 1:].mean(axis=1) if neighbours > 1 else np.zeros(len(xyz))
    out = np.empty(incidence.nnz, np.float32)
    for view in range(cameras.views):
        part = slice(incidence.indptr[view], incidence.indptr[view + 1])
        rows = incidence.indices[part]
        w2c = np.asarray(cameras.world_to_camera[view], np.float64)
        z = np.maximum(xyz[rows] @ w2c[2, :3] + w2c[2, 3], 1e-6)
        pixels = np.pi * (cameras.K[view, 0, 0] * radius[rows] / z) ** 2
        out[part] = np.minimum(pixels / (float(cameras.width[view]) * float(cameras.height[view])), 1.0)
    return out


def _stack(rows: Iterator[np.ndarray], views: int, points: int) -> sparse.csr_matrix:
    parts = [np.sort(r).astype(np.int32) for r in rows]
    indptr = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
    indices = np.concatenate([*parts, np.empty(0, np.int32)])
    matrix = sparse.csr_matrix((np.ones(len(indices), np.bool_), indices, indptr), shape=(views, points))
    matrix.has_sorted_indices = True
    return matrix
