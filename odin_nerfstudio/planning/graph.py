"""The RLG in the form that partition and ordering work on: both directions of each edge side by side, as integers.

Integers make every sum exact, so that plans do not depend on the order of additions, the compiler or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning.rlg import Rlg

ONE = 1 << 20
"""Integer that stands for weight 1."""


@dataclass(frozen=True)
class PairGraph:
    """Edges of V views with a symmetric pattern.

    Attributes:
        indptr: Start of each view's edges. (V + 1,) int64
        neighbours: Other view of each edge, ascending within a view. (E,) int32
        written: Weight (own -> neighbour) in units of 1 / ``ONE``. (E,) int64
        read: Weight (neighbour -> own). (E,) int64
    """

    indptr: np.ndarray
    neighbours: np.ndarray
    written: np.ndarray
    read: np.ndarray

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.indptr) - 1


def pair_graph(rlg: Rlg) -> PairGraph:
    """Both directions of every edge. Unknown views have none: they conflict wherever they are put."""
    forward = sparse.csr_matrix(rlg.weights)
    forward.sort_indices()
    backward = sparse.csr_matrix(forward.T)
    backward.sort_indices()
    if not np.array_equal(forward.indices, backward.indices) or not np.array_equal(forward.indptr, backward.indptr):
        # A weight in one direction only: store an explicit zero for the other.
        pattern = sparse.csr_matrix(abs(forward) + abs(backward))
        pattern.data[:] = 0.0
        forward, backward = _on_pattern(forward, pattern), _on_pattern(backward, pattern)
    written = np.rint(forward.data.astype(np.float64) * ONE).astype(np.int64)
    read = np.rint(backward.data.astype(np.float64) * ONE).astype(np.int64)
    return PairGraph(forward.indptr.astype(np.int64), forward.indices.astype(np.int32), written, read)


def _on_pattern(matrix: sparse.csr_matrix, pattern: sparse.csr_matrix) -> sparse.csr_matrix:
    views = len(matrix.indptr) - 1
    out = pattern.copy()
    out.sort_indices()
    row = np.repeat(np.arange(views, dtype=np.int64), np.diff(out.indptr))
    own = np.repeat(np.arange(views, dtype=np.int64), np.diff(matrix.indptr))
    at = np.searchsorted(row * views + out.indices, own * views + matrix.indices)
    out.data[at] = matrix.data
    return out
