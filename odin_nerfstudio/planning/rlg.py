"""The Relative Locality Graph: which share of what one view reads would another have written.

The weight of edge (u, v) is |points(u) ∩ points(v)| / |points(v)|: u writes, v reads. It is directed, since a close-up
lies wholly within an overview but not the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning.tracks import Tracks


@dataclass(frozen=True)
class Rlg:
    """Relative Locality Graph of V views.

    Attributes:
        weights: ``weights[u, v]`` in (0, 1]: the share of reader v's points that writer u observes too. No diagonal,
            columns ascending, no stored zeros. (V, V) CSR float32
        unknown: Views without any observation. They conflict with every view in both directions, with weight 1, which
            is kept here and not in ``weights``. (V,) bool
        sizes: Points of each view, the cost estimate until times are measured. (V,) int64
        source: Where the observations came from, see :class:`Tracks`.
        importance: Whether points were weighted by how much of the reader's image they cover.
    """

    weights: sparse.csr_matrix
    unknown: np.ndarray
    sizes: np.ndarray
    source: str = "tracks"
    importance: bool = False

    def __post_init__(self) -> None:
        views = len(self.unknown)
        if self.weights.shape != (views, views) or self.sizes.shape != (views,):
            raise ValueError(
                f"weights {self.weights.shape}, unknown {self.unknown.shape} and sizes {self.sizes.shape} "
                "must describe the same views"
            )

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.unknown)

    def between(self, writers: np.ndarray, readers: np.ndarray) -> np.ndarray:
        """Weights of pairs, unknown views included. A view conflicts wholly with itself.

        Args:
            writers: Views that write, of any shape.
            readers: Views that read, broadcastable with ``writers``.

        Returns:
            Weights of the broadcast shape, float32.
        """
        writers, readers = np.broadcast_arrays(np.asarray(writers), np.asarray(readers))
        if writers.size == 0:
            return np.zeros(writers.shape, np.float32)
        out = np.asarray(self.weights[writers.ravel(), readers.ravel()], dtype=np.float32).reshape(writers.shape)
        full = self.unknown[writers] | self.unknown[readers] | (writers == readers)
        return np.where(full, np.float32(1.0), out)

    def statistics(self) -> dict[str, float]:
        """Mean weight and share of zero weights over all ordered pairs of different views."""
        pairs = self.views * (self.views - 1)
        if pairs == 0:
            return {"mean": 0.0, "zero_share": 0.0}
        known = self.views - int(self.unknown.sum())
        full = pairs - known * (known - 1)  # pairs with an unknown view
        mean = (float(self.weights.sum(dtype=np.float64)) + full) / pairs
        return {"mean": mean, "zero_share": 1.0 - (self.weights.nnz + full) / pairs}


def relative_locality_graph(tracks: Tracks, importance: np.ndarray | None = None) -> Rlg:
    """Build the graph from observations.

    Time is linear in the sum over points of (track length)², memory in observations plus edges.

    Args:
        tracks: Which view observed which point.
        importance: Weight of every observation, in the order of ``tracks.incidence.indices``, e.g.
            :func:`odin_nerfstudio.planning.geometry.coverage`. The weight of (u, v) is then the share of v's total
            importance that lies on points of u. None counts points. (nnz,) float32, not negative

    Raises:
        ValueError: ``importance`` has another length or negative values.
    """
    from odin_nerfstudio.planning import kernels

    incidence = tracks.incidence
    views, points = tracks.views, tracks.points
    indptr = incidence.indptr.astype(np.int64)
    indices, points = kernels.points_by_first_view(indptr, incidence.indices, points)
    sizes = np.diff(indptr)
    start, rows = kernels.transpose_pattern(indptr, indices, points)
    out_indptr, out_indices, counts = kernels.shared_points(indptr, indices, start, rows)
    if importance is None:
        data = (counts / np.maximum(sizes, 1)[out_indices]).astype(np.float32)
    else:
        importance = np.ascontiguousarray(importance, dtype=np.float32)
        if importance.shape != indices.shape or (importance.size and float(importance.min()) < 0.0):
            raise ValueError(f"importance must hold {len(indices)} values >= 0, one per observation")
        values = np.empty(len(out_indices), np.float64)
        kernels.shared_importance(indptr, indices, importance, start, rows, out_indptr, out_indices, values)
        total = np.add.reduceat(np.append(importance, 0.0).astype(np.float64), indptr[:-1]) * (sizes > 0)
        data = np.clip(values / np.maximum(total, 1e-30)[out_indices], 0.0, 1.0).astype(np.float32)
    weights = sparse.csr_matrix((data, out_indices, out_indptr), shape=(views, views))
    weights.has_sorted_indices = True
    if importance is not None:
        weights.eliminate_zeros()
    return Rlg(weights, sizes == 0, sizes.astype(np.int64), tracks.source, importance is not None)
