"""Synthetic incidence of an aerial capture, for benchmarks and tests that need many views without images."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.planning.tracks import Tracks, incidence_matrix


def aerial_tracks(
    views: int,
    *,
    points_per_view: int = 1000,
    overlap: float = 0.7,
    detection: float = 0.6,
    oblique: float = 0.4,
    seed: int = 0,
) -> Tracks:
    """Tracks of a block flight over a square of terrain.

    Cameras fly to and fro along parallel lines. Each image covers a 4:3 rectangle of terrain, moved off the camera's
    nadir by its tilt; a point inside is observed with a fixed probability.

    Args:
        views: Number of views.
        points_per_view: Mean observations of a view in the middle of the block.
        overlap: Overlap of neighbouring images along and across the lines.
        detection: Probability that a point in an image is observed there.
        oblique: Largest offset of the covered terrain, in image lengths.
        seed: Seeds points, tilts and detections.

    Returns:
        Tracks of ``views`` views, in the order of flight.
    """
    rng = np.random.default_rng(seed)
    length, width = 4.0, 3.0
    lines = max(1, round(float(np.sqrt(views * length / width))))
    per_line = -(-views // lines)
    line, along = np.divmod(np.arange(views), per_line)
    along = np.where(line % 2 == 0, along, per_line - 1 - along)
    base = np.stack([along * length * (1 - overlap), line * width * (1 - overlap)], axis=1)
    base = base + rng.normal(0.0, 0.05 * width, base.shape)
    middle = base + rng.uniform(-oblique, oblique, base.shape) * length

    size = np.array([length, width])
    low = middle.min(axis=0) - size
    extent = middle.max(axis=0) + size - low
    density = points_per_view / (detection * length * width)
    count = int(density * extent[0] * extent[1])
    xy = rng.random((count, 2)) * extent
    # Sort points by cells, so that an image's terrain is a few runs of consecutive points.
    cell = width / 4
    across = int(extent[0] / cell) + 1
    key = (xy[:, 1] // cell).astype(np.int64) * across + (xy[:, 0] // cell).astype(np.int64)
    order = np.argsort(key, kind="stable")
    xy, key = xy[order], key[order]
    start = np.searchsorted(key, np.arange(across * (int(extent[1] / cell) + 2) + 1))

    parts: list[np.ndarray] = []
    for center in middle - low:
        first = np.maximum(((center - size / 2) // cell).astype(int), 0)
        last = np.minimum(((center + size / 2) // cell).astype(int), across - 1)
        runs = [np.arange(start[r * across + first[0]], start[r * across + last[0] + 1])
                for r in range(first[1], min(last[1] + 1, (len(start) - 1) // across))]  # fmt: skip
        rows = np.concatenate(runs)
        inside = (np.abs(xy[rows] - center) <= size / 2).all(axis=1)
        rows = rows[inside]
        parts.append(rows[rng.random(len(rows)) < detection].astype(np.int32))
    indptr = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
    incidence = incidence_matrix(indptr, np.concatenate(parts), count)
    xyz = np.concatenate([xy + low, np.zeros((count, 1))], axis=1).astype(np.float32)
    centers = np.concatenate([base, np.full((views, 1), 2.0 * length)], axis=1)
    return Tracks(incidence, [f"{v:05d}.jpg" for v in range(views)], xyz, "synthetic", centers)
