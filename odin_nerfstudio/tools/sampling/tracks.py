"""Points and tracks such as structure from motion leaves: corners of the images, matched where they are seen.

Every view proposes points at corners of its image. Each point is looked for in all views (inside the image, within
range, not too much aslant, not occluded), found in most of them, and measured with an error. Its position is then
triangulated from those measurements, so that errors of positions and of reprojection go together as in a real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from odin_nerfstudio.tools.sampling.cameras import Cameras
from odin_nerfstudio.tools.sampling.render import Renderer

#: Standard deviation of a measured image position, pixels per axis.
PIXEL_NOISE = 0.3
#: Share of the views that see a point from the front in which it is found; falls off with the slant.
FIND_RATE = 0.85
#: Views that a track must have, unless the capture has fewer.
MIN_TRACK = 3


@dataclass(frozen=True)
class Candidates:
    """Surface points at corners of the images."""

    positions: NDArray[np.float64]
    """[C, 3]"""
    normals: NDArray[np.float64]
    """[C, 3] unit."""
    colours: NDArray[np.uint8]
    """[C, 3] sRGB."""


@dataclass(frozen=True)
class Tracks:
    """Points with their observations, sorted by view and within a view by point."""

    positions: NDArray[np.float64]
    """[P, 3] triangulated, in the world."""
    colours: NDArray[np.uint8]
    """[P, 3] sRGB."""
    errors: NDArray[np.float64]
    """[P] mean reprojection error, pixels."""
    views: NDArray[np.int64]
    """[O] view of each observation."""
    points: NDArray[np.int64]
    """[O] point of each observation."""
    pixels: NDArray[np.float64]
    """[O, 2] measured image position."""


def candidate_count(points: int) -> int:
    """Candidates to propose for a model of ``points``: some are found in too few views."""
    return points + points // 2 + 64


def propose(
    renderer: Renderer, cameras: Cameras, view: int, image: NDArray[np.uint8], count: int, rng: np.random.Generator
) -> Candidates:
    """Up to ``count`` surface points at corners of a view's image [H, W, 3], the stronger the likelier."""
    grey = image.astype(np.float64) @ (0.299, 0.587, 0.114)
    strength = _corner_strength(grey)
    peak = strength >= ndimage.maximum_filter(strength, size=3)
    weight = np.where(peak, 1.0, 0.02) * (np.sqrt(strength) + 1e-3)
    weight[:2], weight[-2:], weight[:, :2], weight[:, -2:] = 1e-9, 1e-9, 1e-9, 1e-9
    # The largest of log(weight) + Gumbel noise are a draw without replacement in proportion to the weights.
    score = np.log(weight) + rng.gumbel(size=weight.shape)
    chosen = np.sort(np.argsort(-score, axis=None, kind="stable")[:count])
    y, x = np.divmod(chosen, cameras.width)
    rays = cameras.rays(view, np.stack([x + 0.5, y + 0.5], axis=1) + rng.uniform(-0.4, 0.4, (len(chosen), 2)))
    distance, triangle, normal = renderer.hits(rays)
    hit = triangle >= 0
    positions = rays[hit, :3].astype(np.float64) + distance[hit, None].astype(np.float64) * rays[hit, 3:]
    return Candidates(positions, normal[hit].astype(np.float64), image[y[hit], x[hit]])


def _corner_strength(grey: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smaller eigenvalue of the structure tensor of each pixel (Shi and Tomasi, "Good features to track", 1994)."""
    dx, dy = ndimage.sobel(grey, axis=1) / 8, ndimage.sobel(grey, axis=0) / 8
    xx, yy, xy = (ndimage.gaussian_filter(p, 1.0) for p in (dx * dx, dy * dy, dx * dy))
    half_trace = (xx + yy) / 2
    return np.maximum(half_trace - np.sqrt(((xx - yy) / 2) ** 2 + xy**2), 0.0)


def find(
    renderer: Renderer, cameras: Cameras, view: int, candidates: Candidates, reach: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Candidates found in a view and their measured pixels.

    Args:
        renderer: The scene.
        cameras: All views.
        view: The view to look in.
        candidates: Points to look for.
        reach: Largest distance from the camera at which a point is matched.
        rng: Decides what is missed, and the errors of the measurements.

    Returns:
        Indices [M] in ascending order and pixels [M, 2].
    """
    pixels, depth = cameras.project(view, candidates.positions)
    size = np.array([cameras.width, cameras.height])
    inside = np.flatnonzero((depth > 1e-3) & np.all((pixels > 0.5) & (pixels < size - 0.5), axis=1))
    offset = cameras.centres[view] - candidates.positions[inside]
    distance = np.linalg.norm(offset, axis=1)
    frontal = np.einsum("nc,nc->n", offset, candidates.normals[inside]) / distance
    keep = (frontal > 0.12) & (distance < reach)
    inside, frontal = inside[keep], frontal[keep]
    seen = renderer.visible(cameras.centres[view], candidates.positions[inside])
    inside, frontal = inside[seen], frontal[seen]
    found = rng.random(len(inside)) < FIND_RATE * np.clip(2.2 * frontal, 0, 1)
    inside = inside[found]
    measured = pixels[inside] + rng.normal(0, PIXEL_NOISE, (len(inside), 2))
    return inside, np.clip(measured, 0.0, size)


def build_tracks(
    renderer: Renderer,
    cameras: Cameras,
    candidates: Candidates,
    count: int,
    reach: float,
    seed: int,
    run: Callable[[Callable[[int], tuple], int], Iterable[tuple]],
) -> Tracks:
    """Match candidates over all views and keep at most ``count`` points.

    Args:
        renderer: The scene.
        cameras: All views.
        candidates: Points to look for.
        count: Points wanted.
        reach: See ``find``.
        seed: Seed of the capture.
        run: Maps a function over range(n), in order (and shows progress).

    Raises:
        RuntimeError: No point was found in enough views.
    """

    def look(view: int) -> tuple:
        return find(renderer, cameras, view, candidates, reach, np.random.default_rng([seed, 3, view]))

    found = list(run(look, len(cameras)))
    views = np.repeat(np.arange(len(cameras)), [len(points) for points, _ in found])
    points = np.concatenate([points for points, _ in found])
    pixels = np.concatenate([pixels for _, pixels in found])
    length = np.bincount(points, minlength=len(candidates.positions))
    good = np.flatnonzero(length >= min(MIN_TRACK, len(cameras)))
    if not len(good):
        raise RuntimeError("no point was found in enough views; ask for more --views, --points or a larger --size")
    if len(good) > count:
        good = np.sort(np.random.default_rng([seed, 4]).choice(good, count, replace=False))
    number = np.full(len(length), -1)
    number[good] = np.arange(len(good))
    kept = number[points] >= 0
    views, points, pixels = views[kept], number[points[kept]], pixels[kept]
    positions = _triangulate(cameras, candidates.positions[good], views, points, pixels)
    residual = np.linalg.norm(_reproject(cameras, positions, views, points) - pixels, axis=1)
    errors = np.bincount(points, residual, len(good)) / np.bincount(points, minlength=len(good))
    return Tracks(positions, candidates.colours[good], errors, views, points, pixels)


def _reproject(
    cameras: Cameras, positions: NDArray[np.float64], views: NDArray[np.int64], points: NDArray[np.int64]
) -> NDArray[np.float64]:
    local = np.einsum("oij,oj->oi", cameras.rotations[views], positions[points] - cameras.centres[views])
    return cameras.focal * local[:, :2] / local[:, 2:] + (cameras.width / 2, cameras.height / 2)


def _triangulate(
    cameras: Cameras,
    positions: NDArray[np.float64],
    views: NDArray[np.int64],
    points: NDArray[np.int64],
    pixels: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Least squares positions [P, 3] by one Gauss-Newton step from the true ones, damped along unsure directions."""
    rotation = cameras.rotations[views]
    local = np.einsum("oij,oj->oi", rotation, positions[points] - cameras.centres[views])
    depth = local[:, 2]
    slope = np.zeros((len(views), 2, 3))
    slope[:, 0, 0] = slope[:, 1, 1] = cameras.focal / depth
    slope[:, :, 2] = -cameras.focal * local[:, :2] / depth[:, None] ** 2
    jacobian = slope @ rotation
    residual = pixels - (cameras.focal * local[:, :2] / depth[:, None] + (cameras.width / 2, cameras.height / 2))
    count = len(positions)
    normal = np.zeros((count, 3, 3))
    right = np.zeros((count, 3))
    for i in range(3):
        right[:, i] = np.bincount(points, (jacobian[:, :, i] * residual).sum(axis=1), count)
        for j in range(3):
            normal[:, i, j] = np.bincount(points, (jacobian[:, :, i] * jacobian[:, :, j]).sum(axis=1), count)
    # Rays that are nearly parallel leave the depth open: hold it to about two hundredths of the distance.
    prior = PIXEL_NOISE / (0.02 * np.bincount(points, depth, count) / np.bincount(points, minlength=count))
    normal += (prior**2)[:, None, None] * np.eye(3)
    return positions + np.linalg.solve(normal, right[..., None])[..., 0]
