"""Shards: who owns which primitives. Spatially compact, balanced, from positions alone.

A tree of planes halves the points again and again (k-d tree, Bentley 1975), along the longer side of the box that holds
most of them; a part for several ranks gets as many points as it has ranks. The planes then decide for any point, so a
tree made from a sample serves all. Which part goes to which rank is chosen so that ranks own what their views see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

PARTS = 8
"""Parts of each rank where the plan lets ranks keep to one place, so that shards end about where their views do."""
_TRIM = 0.02
"""Share of the points on each side that do not count for the sides of the box: strays are far away."""


@dataclass(frozen=True)
class ShardTree:
    """Planes that divide space among ranks."""

    axes: np.ndarray
    """Axis of each inner node's plane; children of node k are 2k + 1 and 2k + 2. -1: a leaf. [K] int64."""
    planes: np.ndarray
    """Points below go to the first child. [K] float32."""
    owners: np.ndarray
    """Rank of each leaf; -1 elsewhere. [K] int64."""

    def owner(self, points: np.ndarray) -> np.ndarray:
        """Rank of each point. [N, 3] -> [N] int64. Points that are not finite go to the first child."""
        points = np.asarray(points, np.float32)
        node = np.zeros(len(points), np.int64)
        while True:
            axis = self.axes[node]
            inner = np.flatnonzero(axis >= 0)
            if not len(inner):
                return self.owners[node]
            above = points[inner, axis[inner]] >= self.planes[node[inner]]
            node[inner] = 2 * node[inner] + 1 + above

    def for_ranks(self, ranks: np.ndarray) -> ShardTree:
        """The same parts, the one of rank k for ranks[k]. [R] int64."""
        owners = np.where(self.owners >= 0, np.asarray(ranks)[np.maximum(self.owners, 0)], -1)
        return ShardTree(self.axes, self.planes, owners)


def divide(points: np.ndarray, ranks: int, weights: np.ndarray | None = None) -> ShardTree:
    """Divide points among ranks.

    Args:
        points: [N, 3], finite.
        ranks: At least 1.
        weights: What each point counts. [N]; None: all the same.

    Raises:
        ValueError: Fewer points than ranks, or fewer than 1 rank.
    """
    points = np.asarray(points, np.float32)
    if ranks < 1 or len(points) < ranks or points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"shards: {points.shape} points cannot be divided among {ranks} ranks")
    mass = np.ones(len(points)) if weights is None else np.asarray(weights, np.float64)
    depth = (ranks - 1).bit_length()
    size = 2 ** (depth + 1) - 1
    axes, planes, owners = np.full(size, -1), np.zeros(size, np.float32), np.full(size, -1)

    def cut(node: int, rows: np.ndarray, first: int, count: int) -> None:
        if count == 1:
            owners[node] = first
            return
        low = (count + 1) // 2
        low_corner, high_corner = np.quantile(points[rows], (_TRIM, 1 - _TRIM), axis=0)
        axis = int(np.argmax(high_corner - low_corner))
        order = rows[np.argsort(points[rows, axis], kind="stable")]
        total = np.cumsum(mass[order])
        at = int(np.clip(np.searchsorted(total, total[-1] * low / count), low, len(order) - (count - low)))
        axes[node], planes[node] = axis, points[order[at], axis]
        cut(2 * node + 1, order[:at], first, low)
        cut(2 * node + 2, order[at:], first + low, count - low)

    cut(0, np.arange(len(points)), 0, ranks)
    return ShardTree(axes, planes, owners)


def parts_for(ranks: int, points: int, local: bool) -> int:
    """How many parts to divide points into, the same number for each rank. local: See `PARTS`."""
    return ranks * max(1, min(PARTS, points // ranks)) if local and ranks > 1 else ranks


def assign(affinity: np.ndarray) -> np.ndarray:
    """Rank of each part, so that the sum of affinities is largest and all ranks get as many parts.

    affinity: [parts, ranks], parts a multiple of ranks -> [parts] int64.
    """
    each = affinity.shape[0] // affinity.shape[1]
    parts, places = linear_sum_assignment(np.repeat(affinity, each, axis=1), maximize=True)
    out = np.empty(len(affinity), np.int64)
    out[parts] = places // each
    return out


def imbalance(counts: Sequence[int]) -> float:
    """By how much the largest shard exceeds the mean; 0 where all are equal."""
    mean = sum(counts) / len(counts)
    return max(counts) / mean - 1 if mean else 0.0
